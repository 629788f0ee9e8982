"""Loading an artifact onto a GPU, in one run: `python tests/bench_load.py DIR`.

Rounds of: the runner's loading; safetensors' own, tensor by tensor to the same GPU; and one pinned
buffer copied over and over, which is what the bus gives. Files are read once before, so that they
come from the page cache. Prints one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.layout import PARTS
from dsv2mk.runner.load import THREADS, load_weights, part_bytes


def plain(paths: list[Path]) -> None:
    """Every tensor to the GPU by safetensors."""
    for path in paths:
        with safe_open(path, "pt", device="cuda:0") as tensors:
            held = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
    torch.cuda.synchronize()
    del held


def pinned(size: int) -> None:
    """`size` bytes from one pinned buffer."""
    piece = min(size, 256 << 20)
    source = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(piece, dtype=torch.uint8, device="cuda")
    started = time.perf_counter()
    for _ in range(size // piece):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    pinned.rate = size // piece * piece / (time.perf_counter() - started) / 1e9  # type: ignore[attr-defined]


def rate(work: Callable[[], object], size: int) -> float:
    """GB/s of one run."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return size / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    artifact = Artifact.open(args.artifact)
    layout = artifact.layouts[0]
    paths = [artifact.path / layout.file_name(part) for part in PARTS]
    size = sum(part_bytes(layout, part) for part in PARTS)
    for path in paths:
        with open(path, "rb") as file:
            while file.read(64 << 20):
                pass
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    rates: dict[str, list[float]] = {"load": [], "safetensors": [], "pinned": []}
    for _ in range(args.rounds):
        rates["load"].append(rate(lambda: load_weights(artifact, 0, device), size))
        rates["safetensors"].append(rate(lambda: plain(paths), size))
        pinned(size)
        rates["pinned"].append(pinned.rate)  # type: ignore[attr-defined]
    load = statistics.median(rates["load"])
    print(
        json.dumps(
            {
                "bytes": size,
                "threads": THREADS,
                "gb_s": rates,
                "load_over_pinned": load / statistics.median(rates["pinned"]),
                "load_over_safetensors": load / statistics.median(rates["safetensors"]),
                "device": torch.cuda.get_device_name(0),
                "digest": artifact.manifest.digest,
            }
        )
    )


if __name__ == "__main__":
    main()
