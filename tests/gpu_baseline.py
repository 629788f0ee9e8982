"""The stock way (`runner/baseline.py`) against the reference decoder, on GPUs.

    python tests/gpu_baseline.py DIR                              an artifact of one rank
    torchrun --nproc_per_node=2 tests/gpu_baseline.py DIR         of two, with NCCL

All positions by launches and then by a CUDA graph; the reference takes the experts that the stock
way chose. Each GPU must hold the reference, which is all ranks' weights, and its own rank's;
`--positions 0` leaves the reference out. Rank 0 prints one JSON object.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.baseline import TorchDecoder
from dsv2mk.runner.bench import device_facts, percentiles
from dsv2mk.runner.load import Weights, load_weights
from dsv2mk.runner.reference import ReferenceDecoder


def compare(decoder: TorchDecoder, artifact: Artifact, tokens: list[int]) -> list[float]:
    """Relative errors of this rank's logits; the decoder is at its start before and after."""
    reference = ReferenceDecoder(artifact, device=decoder.device)
    layout = decoder.layout
    start, end = layout.topology.vocab_range(layout.geometry, layout.rank)
    errors = []
    for token in tokens:
        logits = decoder.step(token).double()
        assert logits.shape == (end - start,)
        assert bool(logits.isfinite().all())
        wanted = reference.step(token, decoder.choices)[start:end].to(logits)
        if end > start:  # of many ranks some may have no row
            errors.append(float((logits - wanted).norm() / wanted.norm()))
    decoder.reset()
    return errors


def measure(
    weights: Weights, artifact: Artifact, tokens: list[int], count: int, capture: bool
) -> tuple[list[float], dict[str, Any]]:
    """This rank's relative errors, and what is to be printed."""
    decoder = TorchDecoder(weights, context=max(len(tokens), count), capture=capture)
    errors = compare(decoder, artifact, tokens) if tokens else []
    torch.cuda.empty_cache()
    samples = decoder.run(count)
    decoder.close()
    rest = samples[len(samples) // 4 :]  # the clocks have settled
    data: dict[str, Any] = {
        "ms_per_token": {"mean": statistics.fmean(rest), "min": min(rest), **percentiles(rest)}
    }
    if capture:
        data["fastest"] = {str(key): name for key, name in decoder.ops.fastest.items()}
    return errors, data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--positions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="that are timed")
    args = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    artifact = Artifact.open(args.artifact)
    geometry, ranks = artifact.manifest.geometry, artifact.manifest.topology.ranks
    if ranks != size:
        parser.error(f"an artifact of {ranks} ranks, {size} processes")
    torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl", device_id=device)
    weights = load_weights(artifact, rank, device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(geometry.vocab_size, (args.positions,), generator=generator).tolist()
    data: dict[str, Any] = {}
    for name, capture in (("launches", False), ("graph", True)):
        errors, data[name] = measure(weights, artifact, tokens, args.tokens, capture)
        every: list[Any] = [errors]
        if size > 1:
            every = [None] * size
            dist.all_gather_object(every, errors)
        found = [error for each in every for error in each]
        data[name]["relative_error"] = (
            {"max": max(found), "median": statistics.median(found)} if found else None
        )
    if rank == 0:
        facts = {"ranks": size, "positions": args.positions, "tokens": args.tokens}
        facts |= {"digest": artifact.manifest.digest, "device": device_facts(device.index)}
        print(json.dumps({**data, **facts}))
    if size > 1:
        dist.barrier(device_ids=[device.index])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
