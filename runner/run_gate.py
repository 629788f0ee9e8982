"""One run of the gate: which decoder, reference and checks. The comparisons are gate.py's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.runner.gate import (
    Follower,
    Stepper,
    Verdict,
    bit_equal,
    finite,
    first_difference,
    gate_free_run,
    gate_positions,
    phases_of,
)
from dsv2mk.runner.reference import ReferenceDecoder, generate
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
    verify: str


def run_gate(
    artifact: Artifact, request: GateRequest, options: GpuOptions | None
) -> Verdict | None:
    """Gate a GPU (options given) or the reference decoder against a reference.

    None on another rank than 0: rank 0 judges.

    On a GPU the whole cache is filled with noise first, so that a read past the live tokens shows.
    The reference decoder takes the experts that the GPU has chosen, and judges the choices; stored
    logits follow nobody, so that a choice between experts that are nearly equal may fail there.
    Raises UsageError, before weights are loaded, for what does not fit the model.
    """
    if not math.isfinite(request.tolerance):
        raise UsageError("--tolerance", expected="a finite number", found=request.tolerance)
    geometry = artifact.manifest.geometry
    tokens, stored = _tokens(request, geometry)
    prompt = tokens[:_PROMPT]
    room = geometry.max_position_embeddings - len(prompt)
    if request.free_run > room:
        raise UsageError("--free-run", expected=f"at most {room} tokens", found=request.free_run)
    if options is None:
        check(artifact, request.verify)
        return _judge(artifact, request, tokens, stored, None)
    longest = max(len(tokens), len(prompt) + request.free_run)
    with open_gpu(artifact, options, tokens=longest, trace=stored is None) as gpu:
        return None if gpu.follow() else _judge(artifact, request, tokens, stored, gpu)


def _judge(
    artifact: Artifact,
    request: GateRequest,
    tokens: list[int],
    stored: list[Tensor] | None,
    gpu: Any,
) -> Verdict:
    geometry, prompt = artifact.manifest.geometry, tokens[:_PROMPT]
    device = "cpu" if gpu is None else gpu.cache.device

    def fresh() -> Stepper:
        if gpu is None:
            return ReferenceDecoder(artifact)
        gpu.reset(noise=_NOISE)
        stepper: Stepper = gpu
        return stepper

    def follower() -> Follower | None:
        if stored is not None:
            return None
        return Follower(ReferenceDecoder(artifact, device=device), gpu.exchange)

    judge = follower()
    worst: dict[str, float] = {}
    differences: list[str] = []
    apart: list[str] = []

    def look_at_phases(position: int) -> None:
        assert judge is not None
        assert judge.reference.trace is not None
        topology, trace = artifact.manifest.topology, judge.reference.trace
        found, first = first_difference(phases_of(geometry, topology, gpu.exchange, trace))
        for phase, value in found.items():
            worst[phase] = max(worst.get(phase, 0.0), value)
        if first is not None and not differences:
            differences.append(f"position {position}: {first}")

    def look(position: int) -> None:
        if request.phases:
            look_at_phases(position)
        differ = None if gpu is None else gpu.ranks_differ()
        if differ and not apart:
            apart.append(f"position {position}: {differ}")

    if request.phases and judge is not None:
        judge.reference.trace = {}
    verdict = gate_positions(
        fresh(),
        tokens,
        (stored or []) if judge is None else judge.step,
        tolerance=request.tolerance,
        strict=request.strict and stored is not None,
        after=look,
    )
    data = {"backend": "reference" if gpu is None else "gpu", **verdict.data}
    failures = list(verdict.failures)
    if judge is not None:
        data |= judge.data
        failures += judge.failures
    failures += differences + apart
    if gpu is not None and gpu.world.size > 1:
        data["ranks_bit_equal"] = not apart
    if request.phases:
        data["phases"] = {phase: finite(value) for phase, value in worst.items()}
    if request.strict:
        again = _runs_are_equal(fresh, tokens)
        data["runs_bit_equal"] = again
        if not again:
            failures.append("two runs of one decoder gave logits that are not bit-equal")
    largest = verdict.data["largest_difference"]
    if request.free_run and largest is not None:  # else it has failed, and there is no slack
        decoder = fresh()
        try:
            chosen = _free_run(decoder, prompt, request.free_run)
        except ArtifactError as error:
            failures.append(f"free-running decode: {error}")
        else:
            second = follower()
            free = gate_free_run(
                chosen,
                len(prompt),
                None if second is None else second.step,
                2 * largest,
                replay=None if gpu is None else fresh().step,
            )
            data["free_run"] = free.data
            failures += free.failures
            if second is not None:
                free.data |= second.data
                failures += [f"free-running decode: {failure}" for failure in second.failures]
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


def _tokens(request: GateRequest, geometry: Geometry) -> tuple[list[int], list[Tensor] | None]:
    """Tokens to feed, and the stored logits of their positions if there are any."""
    vocabulary, most = geometry.vocab_size, geometry.max_position_embeddings
    if request.stored is None:
        _refuse_more("--positions", most, request.positions)
        generator = torch.Generator().manual_seed(request.seed)
        drawn = torch.randint(vocabulary, (request.positions,), generator=generator)
        return [int(token) for token in drawn], None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    what = f"--reference {request.stored}"
    if not request.stored.is_file():  # a pipe would wait for ever
        raise UsageError(what, expected="a file", fix="Make one: dsv2mk generate DIR --logits FILE")
    try:
        loaded = load_file(request.stored)
        logits, ids = loaded["logits"], loaded["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(
            f"{what}: {error}", fix="Make one: dsv2mk generate DIR --logits FILE"
        ) from None
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] != vocabulary:
        raise UsageError(
            f"{what}: logits", expected=f"float32 [positions, {vocabulary}]", found=_kind(logits)
        )
    positions = len(logits)
    if not positions:
        raise UsageError(what, expected="at least 1 position", found=0)
    _refuse_more(what, most, positions)
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 1 or len(ids) < positions:
        raise UsageError(
            f"{what}: token_ids", expected=f"int32 [{positions} or more]", found=_kind(ids)
        )
    tokens = [int(token) for token in ids]
    if bad := [token for token in tokens if not 0 <= token < vocabulary]:
        raise UsageError(f"{what}: token id", expected=f"0 to {vocabulary - 1}", found=bad[0])
    return tokens[:positions], list(logits)


def _refuse_more(what: str, most: int, positions: int) -> None:
    if positions > most:
        raise UsageError(what, expected=f"at most {most} positions", found=positions)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _runs_are_equal(fresh: Callable[[], Stepper], tokens: list[int]) -> bool:
    def run() -> list[Tensor]:
        decoder = fresh()
        return [decoder.step(token).cpu().clone() for token in tokens]

    return all(bit_equal(a, b) for a, b in zip(run(), run(), strict=True))


def _free_run(decoder: Any, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` tokens that the decoder chose: on a GPU in one launch.

    Raises ArtifactError if logits are not finite; those of a GPU's last position are looked at.
    """
    if isinstance(decoder, ReferenceDecoder):
        steps = generate(decoder, prompt, count, frozenset())
        return [*prompt, *(token for _, token in steps if token is not None)]
    decoder.place(prompt)
    decoder.run(len(prompt) + count - 1)
    if not decoder.logits.isfinite().all():
        raise ArtifactError(
            f"logits at position {decoder.position - 1} are not finite",
            fix="Are the weights damaged? dsv2mk verify DIR",
        )
    tokens: list[int] = decoder.tokens(0, len(prompt) + count)
    return tokens
