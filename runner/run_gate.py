"""One run of the gate: which decoder, reference and checks. The comparisons are gate.py's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import UsageError
from dsv2mk.runner.gate import (
    Stepper,
    Verdict,
    first_difference,
    gate_free_run,
    gate_positions,
    phases_of,
)
from dsv2mk.runner.reference import ReferenceDecoder, greedy
from dsv2mk.runner.session import GpuOptions, check, open_gpu

#: Tokens that a free run starts from, and the seed of the noise in the cache past the live tokens.
_PROMPT, _NOISE = 8, 1


@dataclass(kw_only=True, slots=True, frozen=True)
class GateRequest:
    """What to check."""

    positions: int
    free_run: int
    phases: bool
    strict: bool
    seed: int
    tolerance: float
    stored: Path | None


def run_gate(artifact: Artifact, request: GateRequest, options: GpuOptions | None) -> Verdict:
    """Gate a GPU (options given) or the reference decoder against a reference.

    On a GPU the whole cache is filled with noise first, so that a read past the live tokens shows.
    """
    geometry = artifact.manifest.geometry
    tokens, stored = _tokens(request, geometry.vocab_size)
    longest = min(
        max(len(tokens), _PROMPT + request.free_run) + 1, geometry.max_position_embeddings
    )
    gpu: Any = None
    if options is None:
        check(artifact, "none")
    else:
        gpu = open_gpu(artifact, options, tokens=longest, trace=request.phases)
    device = "cpu" if gpu is None else gpu.cache.device

    def fresh() -> Stepper:
        if gpu is None:
            return ReferenceDecoder(artifact)
        gpu.reset(noise=_NOISE)
        stepper: Stepper = gpu
        return stepper

    reference = None if stored is not None else ReferenceDecoder(artifact, device=device)
    worst: dict[str, float] = {}
    differences: list[str] = []

    def look_at_phases(position: int) -> None:
        assert reference is not None
        assert reference.trace is not None
        found, first = first_difference(phases_of(geometry, gpu.exchange, reference.trace))
        for phase, value in found.items():
            worst[phase] = max(worst.get(phase, 0.0), value)
        if first is not None and not differences:
            differences.append(f"position {position}: {first}")

    if request.phases and reference is not None:
        reference.trace = {}
    wanted = (stored or []) if reference is None else reference.step
    verdict = gate_positions(
        fresh(),
        tokens,
        wanted,
        tolerance=request.tolerance,
        strict=request.strict and stored is not None,
        after=look_at_phases if request.phases else lambda position: None,
    )
    data = {"backend": "reference" if gpu is None else "gpu", **verdict.data}
    failures = verdict.failures + differences
    if request.phases:
        data["phases"] = worst
    if request.strict:
        again = _runs_are_equal(fresh, tokens)
        data["runs_bit_equal"] = again
        if not again:
            failures.append("two runs of one decoder gave logits that are not bit-equal")
    if request.free_run:
        slack = 2 * verdict.data["largest_difference"]
        judge = None if reference is None else ReferenceDecoder(artifact, device=device).step
        chosen = _free_run(fresh(), tokens[:_PROMPT], request.free_run, gpu)
        free = gate_free_run(chosen, min(_PROMPT, len(tokens)), judge, slack)
        data["free_run"] = free.data
        failures += free.failures
    return Verdict(
        data={
            **data,
            "seed": request.seed,
            "digest": artifact.manifest.digest,
            "kernel_key": None if gpu is None else gpu.sidecar.kernel_key,
            "ctas": None if gpu is None else gpu.ctas,
        },
        failures=failures,
    )


def _tokens(request: GateRequest, vocabulary: int) -> tuple[list[int], list[Tensor] | None]:
    """Tokens to feed, and the stored logits of their positions if there are any."""
    if request.stored is None:
        generator = torch.Generator().manual_seed(request.seed)
        tokens = torch.randint(vocabulary, (request.positions,), generator=generator)
        return [int(token) for token in tokens], None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded = load_file(request.stored)
        logits, ids = loaded["logits"], loaded["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(
            f"--reference {request.stored}: {error}",
            fix="Make one: dsv2mk generate DIR --logits FILE",
        ) from None
    if logits.ndim != 2 or logits.shape[1] != vocabulary or len(ids) < len(logits):
        raise UsageError(
            f"--reference {request.stored}: logits of another model",
            expected=f"[positions, {vocabulary}]",
            found=list(logits.shape),
        )
    return [int(token) for token in ids[: len(logits)]], list(logits)


def _runs_are_equal(fresh: Callable[[], Stepper], tokens: list[int]) -> bool:
    def run() -> list[Tensor]:
        decoder = fresh()
        return [decoder.step(token).cpu().clone() for token in tokens]

    return all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def _free_run(decoder: Stepper, prompt: list[int], count: int, gpu: Any) -> list[int]:
    """The prompt and `count` tokens that the decoder chose: on a GPU in one launch."""
    if gpu is not None:
        gpu.place(prompt)
        gpu.run(len(prompt) + count - 1)
        tokens: list[int] = gpu.tokens(0, len(prompt) + count)
        return tokens
    chosen = list(prompt)
    logits = [decoder.step(token) for token in prompt][-1]
    for _ in range(count):
        chosen.append(greedy(logits))
        logits = decoder.step(chosen[-1])
    return chosen
