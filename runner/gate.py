"""The numerical gate: a decoder against a reference, position by position and phase by phase.

A reference is the reference decoder, or logits that `generate --logits` stored. It tells the order
of two of its values if they are more than 8 * tolerance * rms apart, where rms is the root mean
square of its logits at that position: an error of the tolerance that is spread evenly is
tolerance * rms an element, and each side is allowed four times that. Agreement on top-1 and top-5
is asked for only where their order is told.

A router's choice is discontinuous: experts whose logits lie closer together than rounding moves
them are chosen by one side and not by the other, and what follows differs though both are right. So
the reference decoder takes the experts that the decoder has chosen, and the choice is judged by
itself: see Follower.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.topology import Topology
from dsv2mk.runner.reference import ReferenceDecoder, greedy

#: Bound on ||logits - reference|| / ||reference||.
TOLERANCE = 2e-3
#: Bound on a phase's largest difference, over the largest magnitude of the reference's values.
PHASE_TOLERANCE = 1e-2
#: Bound on how far a choice of experts is from the reference's own: see reference.choice_slack.
CHOICE_TOLERANCE = 1e-3
#: What a phase leaves, in the order of a layer; `act` is compared unit by unit.
PHASES = ("qkv", "q", "q_lat", "latent", "value", "o", "route", "chosen", "act", "down")


class Stepper(Protocol):
    """What decodes: feed a token, get the logits [V] fp32 of the next."""

    def step(self, token: int) -> Tensor:
        """Feed one token."""


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Outcome of a gate. `failures` is empty if it passed."""

    data: dict[str, Any]
    failures: list[str] = field(default_factory=list)


def compare(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Facts about one position's logits [V], and whether they pass.

    Errors are None where a logit of either side is not finite; `finite` is about `got`.
    """
    x, y = got.double().cpu(), want.double().cpu()
    largest = float((x - y).abs().max())
    size = float(y.norm())
    order = y.sort(descending=True, stable=True)
    top = [int(index) for index in x.sort(descending=True, stable=True).indices[:5]]
    wanted = [int(index) for index in order.indices[:5]]
    overlap = len(set(top) & set(wanted)) / len(wanted)
    margin = 8 * tolerance * size / math.sqrt(len(y))
    values = order.values
    top1_told = len(values) < 2 or float(values[0] - values[1]) > margin
    top5_told = len(values) < 6 or float(values[4] - values[5]) > margin
    error = finite(float((x - y).norm()) / size if size else largest)
    facts = {
        "relative_error": error,
        "largest_difference": finite(largest),
        "top1_equal": top[0] == wanted[0],
        "top1_told": top1_told,
        "top5_overlap": overlap,
        "top5_told": top5_told,
        "finite": bool(x.isfinite().all()),
    }
    facts["passes"] = (
        error is not None
        and error <= tolerance
        and (top[0] == wanted[0] or not top1_told)
        and (overlap == 1.0 or not top5_told)
    )
    return facts


def gate_positions(
    candidate: Stepper,
    tokens: Sequence[int],
    wanted: Sequence[Tensor] | Callable[[int], Tensor],
    *,
    tolerance: float = TOLERANCE,
    strict: bool = False,
    after: Callable[[int], None] = lambda position: None,
) -> Verdict:
    """Feed `tokens` and compare each position's logits with the reference's.

    wanted: the reference's logits by position, or a function that feeds a token to the reference;
    the candidate is fed first.
    strict: they must be bit-equal. `after` is called after each position.
    """
    rows, failures = [], []
    for position, token in enumerate(tokens):
        got = candidate.step(token)
        want = wanted(token) if callable(wanted) else wanted[position]
        facts = compare(got, want, tolerance)
        if strict:
            facts["bit_equal"] = bit_equal(got, want)
        rows.append(facts)
        if facts["relative_error"] is None:
            whose = "the reference's " if facts["finite"] else ""
            failures.append(f"position {position}: {whose}logits are not finite")
        elif not facts["passes"]:
            failures.append(
                f"position {position}: relative error {facts['relative_error']:.2e}, "
                f"top-1 {'equal' if facts['top1_equal'] else 'differs'}, "
                f"top-5 overlap {facts['top5_overlap']:.1f}"
            )
        if strict and not facts["bit_equal"]:
            failures.append(f"position {position}: logits are not bit-equal to the reference's")
        after(position)
    told1 = [row for row in rows if row["top1_told"]]
    told5 = [row for row in rows if row["top5_told"]]
    data = {
        "positions": len(rows),
        "max_relative_error": _largest(row["relative_error"] for row in rows),
        "largest_difference": _largest(row["largest_difference"] for row in rows),
        "top1_agreement": _mean(row["top1_equal"] for row in rows),
        "top1_agreement_where_told": _mean(row["top1_equal"] for row in told1),
        "top5_overlap": _mean(row["top5_overlap"] for row in rows),
        "top5_overlap_where_told": _mean(row["top5_overlap"] for row in told5),
        "positions_told": [len(told1), len(told5)],
        "tolerance": tolerance,
    }
    if strict:
        data["bit_equal"] = all(row["bit_equal"] for row in rows)
    return Verdict(data=data, failures=failures)


def gate_free_run(
    tokens: Sequence[int],
    start: int,
    step: Callable[[int], Tensor] | None,
    slack: float,
    replay: Callable[[int], Tensor] | None = None,
) -> Verdict:
    """A free-running decode: tokens [start:] were chosen. Not degenerate, and as the reference's.

    step: feeds a token to the reference, which has seen none; a choice is right if the reference's
    own is no better than it by more than `slack`. replay: feeds a token to the decoder itself, from
    its start and before the reference is fed; it has to choose the same. None: not checked.
    """
    new = list(tokens[start:])
    failures = []
    distinct = len(set(new))
    if len(new) >= 8 and distinct < max(2, len(new) // 16):
        failures.append(f"free-running decode is degenerate: {distinct} tokens in {len(new)}")
    equal, same = 0, True
    for position, token in enumerate(tokens[:-1]):
        again = None if replay is None else replay(token).double().cpu()
        logits = None if step is None else step(token).double().cpu()
        if position + 1 < start:
            continue
        chosen = tokens[position + 1]
        if again is not None:
            if not again.isfinite().all():
                failures.append(f"the replay's logits at position {position} are not finite")
                same = False
                break
            own = greedy(again)
            if own != chosen:
                failures.append(
                    f"free-running decode chose {chosen} for position {position + 1}, its replay "
                    f"step by step {own}"
                )
                same = False
        if logits is not None:
            if not logits.isfinite().all():
                failures.append(f"the reference's logits at position {position} are not finite")
                break
            best = greedy(logits)
            equal += chosen == best
            gap = float(logits[best] - logits[chosen])
            if not gap <= slack:
                failures.append(
                    f"free-running decode chose {chosen} for position {position + 1}, the "
                    f"reference {best}: its logit is higher by {gap:.2e}, slack {slack:.2e}"
                )
    data = {"tokens": len(new), "distinct": distinct, "slack": slack}
    if step is not None:
        data["equal_to_reference"] = equal
    if replay is not None:
        data["replay_equal"] = same
    return Verdict(data=data, failures=failures)


# ---- choices of experts ----


class Follower:
    """The reference decoder beside a traced decoder, taking the experts that this has chosen.

    A choice may differ from the reference's own where its slack is at most `tolerance`, and the
    decoder has to list experts by descending weight. exchange: the decoder's, of its last step.
    """

    def __init__(
        self,
        reference: ReferenceDecoder,
        exchange: Callable[[str, int], Tensor],
        tolerance: float = CHOICE_TOLERANCE,
    ) -> None:
        self.reference = reference
        self.failures: list[str] = []
        self._exchange = exchange
        self._tolerance = tolerance
        self._slacks: list[float] = []

    def step(self, token: int) -> Tensor:
        """Feed a token that the decoder has been fed just before; the reference's logits [V]."""
        geometry, position = self.reference.geometry, self.reference.position
        choices = {}
        for layer in range(geometry.first_k_dense_replace, geometry.num_hidden_layers):
            experts, weights = _chosen(self._exchange("chosen", layer))
            choices[layer] = experts.tolist()
            if not bool((weights[:-1] >= weights[1:]).all()):
                self.failures.append(
                    f"position {position}: layer {layer} lists experts {choices[layer]} by weights "
                    f"that do not descend: {[float(f'{weight:.6g}') for weight in weights]}"
                )
        logits = self.reference.step(token, choices)
        for layer, expected, found, slack in self.reference.followed:
            self._slacks.append(slack)
            if not slack <= self._tolerance:
                self.failures.append(
                    f"position {position}: layer {layer} chose experts {found}, the reference "
                    f"{expected}: that takes a change of the router's logits by {slack:.2e} of the "
                    f"largest, allowed {self._tolerance:.2e}"
                )
        return logits

    @property
    def data(self) -> dict[str, Any]:
        """How many choices had another set than the reference's own, and their largest slack."""
        return {
            "choices_followed": len(self._slacks),
            "largest_choice_slack": finite(max(self._slacks, default=0.0)),
        }


def _chosen(words: Tensor) -> tuple[Tensor, Tensor]:
    """(experts int32, weights fp32) of a layer's `chosen`: int32 words, then fp32 ones."""
    experts, weights = words.cpu()
    return experts.view(torch.int32), weights


# ---- phases ----


def phases_of(
    geometry: Geometry,
    topology: Topology,
    exchange: Callable[[str, int], Tensor],
    reference: dict[Any, Tensor],
) -> list[tuple[int, str, Tensor, Tensor]]:
    """(layer, phase, found, wanted) of all phases of a traced step, in order, fp32 on the CPU.

    exchange: rank 0's. The reference must have taken its experts: of `chosen` the weights are left.
    """
    out = []
    for layer in range(geometry.num_hidden_layers):
        for phase in PHASES:
            if phase == "act":
                out += _acts(geometry, topology, layer, exchange, reference)
            elif (layer, phase) in reference:
                wanted = reference[layer, phase].float().cpu()
                found = exchange(phase, layer).cpu()
                if phase == "chosen":
                    found, wanted = found[1], wanted[1]
                out.append((layer, phase, found.reshape(wanted.shape), wanted))
    return out


def _acts(
    geometry: Geometry,
    topology: Topology,
    layer: int,
    exchange: Callable[[str, int], Tensor],
    reference: Any,
) -> list[tuple[int, str, Tensor, Tensor]]:
    """Rank 0's units at work: numbered always-on first, then by the experts that it has chosen."""
    acts = exchange("act", layer).cpu()
    units = list(range(geometry.layer_units(layer)))
    if not geometry.is_dense(layer):
        units = units[geometry.routed_units :]
        for expert in _chosen(exchange("chosen", layer))[0].tolist():
            first = expert * geometry.expert_units
            units += range(first, first + geometry.expert_units)
    own = [unit for unit in units if topology.unit_rank(unit) == 0]
    return [
        (layer, f"act of unit {unit}", acts[index], reference[layer, f"act {unit}"].float().cpu())
        for index, unit in enumerate(own)
        if (layer, f"act {unit}") in reference
    ]


def first_difference(
    phases: Sequence[tuple[int, str, Tensor, Tensor]], tolerance: float = PHASE_TOLERANCE
) -> tuple[dict[str, float], str | None]:
    """Largest scaled difference of each kind of phase, and the first phase past the tolerance.

    The text names layer, phase and element. A difference is infinite where a value is no number.
    """
    worst: dict[str, float] = {}
    first = None
    for layer, phase, found, wanted in phases:
        difference = _scaled(found, wanted)
        largest = float(difference.max())
        kind = phase.split()[0]
        worst[kind] = max(worst.get(kind, 0.0), largest)
        if largest > tolerance and first is None:
            index = int((difference.flatten() > tolerance).nonzero()[0])
            place = [int(i) for i in torch.unravel_index(torch.tensor(index), found.shape)]
            first = (
                f"layer {layer}, phase {phase}, element {place}: expected "
                f"{float(wanted[tuple(place)]):.6g}, found {float(found[tuple(place)]):.6g}"
            )
    return worst, first


def _scaled(found: Tensor, wanted: Tensor) -> Tensor:
    """Differences over the largest magnitude that is wanted."""
    scale = float(wanted.abs().max()) or 1.0
    return ((found.double() - wanted.double()).abs() / scale).nan_to_num(nan=math.inf)


# ---- numbers ----


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two fp32 tensors have the same bits: zeros of two signs differ."""
    return torch.equal(a.float().cpu().view(torch.int32), b.float().cpu().view(torch.int32))


def finite(value: float) -> float | None:
    """A number, or None for one that JSON does not have."""
    return value if math.isfinite(value) else None


def _largest(values: Iterable[float | None]) -> float | None:
    """None if one of them is."""
    numbers = list(values)
    return None if None in numbers else max(number for number in numbers if number is not None)


def _mean(values: Any) -> float | None:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else None
