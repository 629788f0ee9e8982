"""Measurements of a decoder on a GPU: milliseconds a token, and what they are a share of."""

import statistics
import subprocess
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv2mk.manifests.sidecar import Sidecar
from dsv2mk.runner.decoder import GpuDecoder

#: Bytes that the read bandwidth is measured over, where they are free.
_READ_BYTES = 8 << 30
#: Positions at which the kernel and the stock way are compared.
_COMPARED = 16


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """What to decode."""

    input_len: int
    output_len: int
    warmup: int
    iterations: int
    seed: int = 0
    skip_prompt: bool = False  # random values in the cache rather than a prompt that is decoded


def bench(decoder: GpuDecoder, request: Request) -> dict[str, Any]:
    """Decode `output_len` tokens after a prompt of random ones, several times; the JSON's facts.

    A sample is the time from one token to the next by the device's timer, inside one launch.
    """
    prompt = prompt_of(request, decoder.sidecar.geometry.vocab_size)
    samples: list[float] = []
    seconds = []
    for iteration in range(request.warmup + request.iterations):
        if request.skip_prompt:
            decoder.skip(request.input_len, request.seed)
        else:
            decoder.reset()
            decoder.feed(prompt)
        timed = decoder.run(request.output_len, timed=True)
        assert timed is not None
        if iteration >= request.warmup:
            samples += timed.samples
            seconds.append(timed.seconds)
    weights = decoder.weights.layout.token_bytes()
    cache = cache_bytes(decoder.sidecar, request)
    mean = statistics.fmean(samples)
    used = memory_used(decoder.cache.device)
    bandwidth = read_bandwidth(decoder.cache.device)
    achieved = (weights + cache) / mean / 1e9
    return {
        "ms_per_token": {"mean": mean, **percentiles(samples)},
        "ms_per_token_by_events": [1e3 * total / request.output_len for total in seconds],
        "tokens_per_s": 1e3 / mean,
        "bytes_per_token": weights + cache,
        "weight_bytes_per_token": weights,
        "cache_bytes_per_token": cache,
        "achieved_tb_s": achieved,
        "read_bandwidth_tb_s": bandwidth,
        "share_of_read_bandwidth": achieved / bandwidth,
        "memory_used": used,
        "finite": bool(decoder.logits.isfinite().all()),
        "samples_ms": samples,
    }


def prompt_of(request: Request, vocabulary: int) -> list[int]:
    """Random tokens of the request's length, the same on every rank."""
    generator = torch.Generator().manual_seed(request.seed)
    tokens: list[int] = torch.randint(
        vocabulary, (request.input_len,), generator=generator
    ).tolist()
    return tokens


def kernel_logits(decoder: GpuDecoder, request: Request) -> list[Tensor]:
    """The kernel's logits [V] of the first positions, for `stock` to be compared with."""
    decoder.reset()
    prompt = prompt_of(request, decoder.sidecar.geometry.vocab_size)
    return [decoder.step(token).clone() for token in prompt[:_COMPARED]]


def stock(decoder: GpuDecoder, request: Request, logits: list[Tensor] | None) -> dict[str, Any]:
    """The same rank's model the stock way: see baseline.py. All ranks call it together.

    logits: `kernel_logits`, on rank 0. Positions where a router is near a tie may differ much: the
    activations are bf16.
    """
    from dsv2mk.runner.baseline import TorchDecoder

    world, layout = decoder.world, decoder.weights.layout
    group = None
    if world.size > 1:
        world.group()
        group = torch.distributed.new_group(backend="nccl")
    context = request.input_len + request.output_len
    torch_decoder = TorchDecoder(decoder.weights, context=context, group=group)
    prompt = prompt_of(request, layout.geometry.vocab_size)
    start, end = layout.topology.vocab_range(layout.geometry, layout.rank)
    errors = []
    for index, token in enumerate(prompt):
        got = torch_decoder.step(token)
        if logits is not None and index < len(logits):
            want = logits[index][start:end].double()
            errors.append(float((got.double() - want).norm() / want.norm()))
    samples = torch_decoder.run(request.output_len)
    torch_decoder.close()
    mean = statistics.fmean(samples)
    return {
        "ms_per_token": {"mean": mean, **percentiles(samples)},
        "tokens_per_s": 1e3 / mean,
        "relative_error": {"median": statistics.median(errors), "max": max(errors)}
        if errors
        else None,
        "positions_compared": len(errors),
        "samples_ms": samples,
    }


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p90 and p99, each a sample (nearest rank)."""
    ordered = sorted(samples)
    return {
        f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in (50, 90, 99)
    }


def cache_bytes(sidecar: Sidecar, request: Request) -> int:
    """Bytes of the latent cache that a token reads, in the mean over the output; read once."""
    live = request.input_len + (request.output_len + 1) / 2
    geometry = sidecar.geometry
    row: int = sidecar.cache_row
    return round(live * geometry.num_hidden_layers * row * 2)


def memory_used(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def read_bandwidth(device: torch.device) -> float:
    """TB/s that plain reductions read at best, over memory far larger than the L2."""
    free, _ = torch.cuda.mem_get_info(device)
    count = min(_READ_BYTES, free // 2) // 4
    values = torch.empty(count, dtype=torch.float32, device=device).uniform_()
    best = 0.0
    for view in (values, values.view(torch.float64)[: count // 2].view(torch.int64)):
        for reduce in (torch.sum, torch.amax):
            times = [_seconds(lambda v=view, r=reduce: r(v)) for _ in range(6)][1:]
            best = max(best, 4 * count / statistics.median(times) / 1e12)
    return best


def _seconds(work: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def profile(decoder: GpuDecoder, tokens: int = 32) -> list[dict[str, Any]]:
    """Mean microseconds of each phase, as CTA 0 sees them, over all layers but the dense ones.

    work: from the end of the last hop to this hop's arrival; wait: from there to its end.
    """
    hops = decoder.sidecar.workspace["hops"]
    geometry = decoder.sidecar.geometry
    order = [name for name in hops if name not in ("best", "route")]
    if geometry.q_lora_rank is None:
        order.remove("q")
    work: dict[str, list[float]] = {name: [] for name in order}
    wait: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(tokens):
        marks = decoder.marked_step().double() / 1e3
        for layer in range(max(1, geometry.first_k_dense_replace), geometry.num_hidden_layers):
            before = marks[layer - 1, hops.index("down"), 1]
            for name in order:
                arrived, after = marks[layer, hops.index(name)]
                work[name].append(float(arrived - before))
                wait[name].append(float(after - arrived))
                before = after
    return [
        {
            "hop": name,
            "work_us": statistics.fmean(work[name]),
            "wait_us": statistics.fmean(wait[name]),
        }
        for name in order
        if work[name]
    ]


def device_facts(index: int) -> dict[str, Any]:
    """What a measurement is of: device, driver, clocks as they are found."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    try:
        text = subprocess.run(
            [
                "nvidia-smi",
                f"--query-gpu={','.join(fields)}",
                "--format=csv,noheader",
                f"-i={index}",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout
        facts = dict(zip(fields, (word.strip() for word in text.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        facts = {"name": torch.cuda.get_device_name(index)}
    return {**facts, "torch": torch.__version__, "cuda": torch.version.cuda}
