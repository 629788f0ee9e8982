"""What every phase leaves: the reference's trace, and where the gate finds the first difference."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import exchange_of, nearly_tied
from helpers import make_artifact, make_snapshot, small_config
from safetensors.torch import load_file
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.tensors import as_torch
from dsv2mk.runner.gate import PHASES, first_difference, phases_of
from dsv2mk.runner.reference import ReferenceDecoder, route

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = math.nan
#: Three layers, the first dense; an expert and the shared ones have several units.
CONFIG = small_config()
LITE = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}


def make(tmp_path: Path, **changes: Any) -> Artifact:
    snapshot = make_snapshot(tmp_path / "snapshot", small_config(**changes))
    return make_artifact(snapshot, 1, tmp_path / "artifact")


def found_phases(
    artifact: Artifact, words: dict[Any, Tensor], trace: dict[Any, Tensor]
) -> list[tuple[int, str, Tensor, Tensor]]:
    manifest = artifact.manifest
    return phases_of(manifest.geometry, manifest.topology, lambda *key: words[key], trace)


def left(artifact: Artifact, trace: dict[Any, Tensor]) -> dict[tuple[str, int], Tensor]:
    return exchange_of(artifact.manifest.geometry, artifact.manifest.topology, trace)


def traced(artifact: Artifact, *tokens: int) -> dict[Any, Tensor]:
    decoder = ReferenceDecoder(artifact)
    decoder.trace = {}
    for token in tokens:
        decoder.step(token)
    return decoder.trace


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return make(tmp_path)


# ---- the reference's trace ----


@pytest.mark.parametrize("changes", [{}, LITE], ids=["grouped", "lite"])
def test_a_trace_has_every_phase_of_every_layer(changes: dict[str, Any], tmp_path: Path) -> None:
    artifact = make(tmp_path, **changes)
    trace = traced(artifact, 5, 6)
    always = {
        "qkv": (24 + 8 + (0 if changes else 40),),
        "q": (24, 16),
        "q_lat": (24, 24),
        "latent": (24, 24),
        "value": (24, 16),
        "o": (1, 192),
        "down": (1, 192),
    }
    shapes = {(layer, phase): shape for layer in range(3) for phase, shape in always.items()}
    shapes |= {(0, f"act {unit}"): (128,) for unit in range(2)}  # 200 wide
    for layer in (1, 2):
        shapes |= {(layer, "route"): (8,), (layer, "chosen"): (2, 3)}
        # 136 wide experts have two units, the shared ones (272 wide) three, after 8 experts'.
        experts = [int(expert) for expert in trace[layer, "chosen"][0]]
        units = [2 * expert + half for expert in experts for half in (0, 1)]
        shapes |= {(layer, f"act {unit}"): (128,) for unit in [*units, 16, 17, 18]}
    assert {key: tuple(value.shape) for key, value in trace.items()} == shapes
    assert {value.dtype for value in trace.values()} == {torch.float32}


def test_a_trace_is_of_the_last_step_and_changes_nothing(artifact: Artifact) -> None:
    plain, looking = ReferenceDecoder(artifact), ReferenceDecoder(artifact)
    looking.trace = {}
    for token in (5, 6, 7):
        assert torch.equal(looking.step(token), plain.step(token))
    assert plain.trace is None
    last = traced(artifact, 5, 6, 7)
    assert list(looking.trace) == list(last)
    assert all(torch.equal(looking.trace[key], last[key]) for key in last)
    assert not torch.equal(last[0, "qkv"], traced(artifact, 5)[0, "qkv"])


def test_phases_are_what_their_names_say(artifact: Artifact) -> None:
    """From the weights and the phase before, in float64."""
    (layout,) = artifact.layouts
    weights = {
        name: as_torch(artifact.map_tensor(0, name), spec).double()
        for name, spec in layout.tensors.items()
        if spec.dtype == "BF16"
    }
    trace = {key: value.double() for key, value in traced(artifact, 5, 6).items()}
    for layer in range(3):

        def has(phase: str, expected: Tensor, layer: int = layer) -> None:
            torch.testing.assert_close(trace[layer, phase], expected, rtol=1e-5, atol=1e-6)

        q_a = trace[layer, "qkv"][:40]
        q_in = q_a * (q_a.square().mean() + 1e-6).rsqrt() * weights["q_a_norm"][layer]
        has("q", torch.einsum("hdi,i->hd", weights["q_b"][layer], q_in))
        nope = trace[layer, "q"][:, :8]
        has("q_lat", torch.einsum("hcn,hn->hc", weights["w_uk"][layer], nope))
        has("value", torch.einsum("hvc,hc->hv", weights["w_uv"][layer], trace[layer, "latent"]))
        has("o", (weights["o"][layer] @ trace[layer, "value"].flatten())[None])
        if layer:
            scores = trace[layer, "route"].softmax(0)
            experts, gates = trace[layer, "chosen"]
            groups = sorted(range(4), key=lambda group: -float(scores[2 * group :][:2].max()))[:2]
            allowed = [expert for expert in range(8) if expert // 2 in groups]
            allowed.sort(key=lambda expert: -float(scores[expert]))
            assert experts.tolist() == allowed[:3]
            torch.testing.assert_close(
                gates, scores[allowed[:3]] * CONFIG["routed_scaling_factor"], rtol=1e-6, atol=0
            )


# ---- found and wanted ----


@pytest.mark.parametrize(
    "changes", [{}, LITE, {"first_k_dense_replace": 3}, {"first_k_dense_replace": 0}]
)
def test_what_the_reference_left_is_found_without_a_difference(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    artifact = make(tmp_path, **changes)
    trace = traced(artifact, 5, 6)
    phases = found_phases(artifact, left(artifact, trace), trace)
    seen = [(layer, phase.replace("act of unit", "act")) for layer, phase, _, _ in phases]
    assert sorted(seen) == sorted(trace)
    order = [(layer, PHASES.index(phase.split()[0])) for layer, phase in seen]
    assert order == sorted(order)
    worst, first = first_difference(phases, 0.0)
    assert first is None
    kinds = {phase.split()[0] for _, phase in trace}
    assert worst == dict.fromkeys(kinds, 0.0)


PLACES: dict[str, list[int]] = {
    "qkv": [71],
    "q": [23, 15],
    "q_lat": [0, 23],
    "latent": [17, 0],
    "value": [5, 6],
    "o": [0, 191],
    "route": [7],
    "down": [0, 0],
}


@pytest.mark.parametrize("phase", PLACES)
@pytest.mark.parametrize("layer", [1, 2])
def test_one_element_is_named(phase: str, layer: int, artifact: Artifact) -> None:
    trace = traced(artifact, 5, 6)
    words, place = left(artifact, trace), PLACES[phase]
    wanted = trace[layer, phase]
    changed = wanted.clone()
    changed[tuple(place)] += 0.5 * wanted.abs().max()
    words[phase, layer] = changed.view(words[phase, layer].shape)
    if layer == 1:
        words["qkv", 2].fill_(NAN)  # what comes after it is not the first
    worst, first = first_difference(found_phases(artifact, words, trace))
    expected, found = float(wanted[tuple(place)]), float(changed[tuple(place)])
    assert first == (
        f"layer {layer}, phase {phase}, element {place}: expected {expected:.6g}, found {found:.6g}"
    )
    if layer == 2:
        assert worst.pop(phase) == pytest.approx(0.5)
        assert set(worst.values()) == {0.0}


def test_an_element_of_a_unit_is_named(artifact: Artifact) -> None:
    """Units at work are numbered shared ones first, then by the experts that were chosen."""
    trace = traced(artifact, 5, 6)
    second = int(trace[1, "chosen"][0, 1])
    for layer, row, unit in ((0, 1, 1), (1, 0, 16), (1, 2, 18), (1, 3 + 2 + 1, 2 * second + 1)):
        words = left(artifact, trace)
        words["act", layer][row, 5] += 100
        _, first = first_difference(found_phases(artifact, words, trace))
        assert first is not None
        assert first.startswith(f"layer {layer}, phase act of unit {unit}, element [5]: ")


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_wrong_weight_of_an_expert_is_named(column: int, artifact: Artifact) -> None:
    """Numbers of experts are int32 words among floats, and no matter of phases."""
    trace = traced(artifact, 5, 6)
    words, (experts, weights) = left(artifact, trace), trace[2, "chosen"]
    assert words["chosen", 2].view(torch.int32)[0].tolist() == experts.int().tolist()
    largest = float(weights.max())
    for wrong, differs in ((0.009 * largest, False), (0.011 * largest, True)):
        words["chosen", 2][1, column] = weights[column] + wrong
        worst, first = first_difference(found_phases(artifact, words, trace))
        assert worst["chosen"] == pytest.approx(wrong / largest, rel=1e-3)
        assert (first is not None) == differs
    assert first == (
        f"layer 2, phase chosen, element [{column}]: expected {float(weights[column]):.6g}, "
        f"found {float(weights[column] + wrong):.6g}"
    )


# ---- two ranks ----


def dequantised_down(artifact: Artifact, layer: int, unit: int) -> Tensor:
    """[H, 128] float64 of a unit, from an artifact for one rank."""
    (layout,) = artifact.layouts
    slot = layout.unit_offsets[layer] + unit
    data, scale = (
        as_torch(artifact.map_tensor(0, name), layout.tensors[name])[slot].double()
        for name in ("ffn_down", "ffn_down_scale")
    )
    return data * scale.repeat_interleave(128)[: len(data), None]


@pytest.fixture
def two_ranks(tmp_path: Path) -> tuple[Artifact, dict[Any, Tensor], dict[Any, Tensor]]:
    """An artifact for two ranks, its trace, and what rank 0 finds, from an artifact for one.

    Rank 0 has heads 0 to 11 of 24 and the units of even numbers.
    """
    one = make(tmp_path)
    weights = load_file(tmp_path / "snapshot" / "model.safetensors")
    whole, words = traced(one, 5, 6), dict[Any, Tensor]()
    for layer in range(3):
        o = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].double()
        value = whole[layer, "value"].double()
        shares = [
            o[:, first * 16 :][:, : 12 * 16] @ value[first : first + 12].flatten()
            for first in (0, 12)
        ]
        words["o", layer] = torch.stack(shares).float()
        words["qkv", layer] = whole[layer, "qkv"]
        for phase in ("q", "q_lat", "latent", "value"):
            words[phase, layer] = whole[layer, phase][:12]
        own = [0]  # of two
        if layer:
            words["route", layer] = whole[layer, "route"]
            experts, gates = whole[layer, "chosen"]
            words["chosen", layer] = torch.stack([experts.int().view(torch.float32), gates])
            own = [16, 18, *(2 * int(expert) for expert in experts)]
        acts = {int(key[1][4:]): whole[key] for key in whole if key[0] == layer and "act" in key[1]}
        words["act", layer] = torch.stack([acts[unit] for unit in own])
        parts = {unit: dequantised_down(one, layer, unit) @ acts[unit].double() for unit in acts}
        shares = [torch.stack([parts[u] for u in parts if u % 2 == rank]).sum(0) for rank in (0, 1)]
        words["down", layer] = torch.stack(shares).float()
    two = make_artifact(tmp_path / "snapshot", 2, tmp_path / "two")
    return two, traced(two, 5, 6), words


def test_two_ranks_leave_partial_sums_and_one_rank_s_units(
    two_ranks: tuple[Artifact, dict[Any, Tensor], dict[Any, Tensor]],
) -> None:
    two, trace, words = two_ranks
    phases = found_phases(two, words, trace)
    worst, first = first_difference(phases, 1e-4)
    assert (first, sorted(worst)) == (None, sorted(PHASES))
    for layer in range(3):
        seen = [phase.split()[3] for at, phase, _, _ in phases if at == layer and "act" in phase]
        own = [*words["chosen", layer][0].view(torch.int32).tolist()] if layer else []
        assert seen == ([str(unit) for unit in (16, 18, *(2 * e for e in own))] if layer else ["0"])
        for phase in ("o", "down"):
            rows = trace[layer, phase]
            assert rows.shape == (2, 192)
            assert float((rows[0] - rows[1]).abs().max()) > 0.1 * float(rows.abs().max())
    for key, value in left(two, trace).items():  # the fake of a GPU leaves the same
        found, wanted = value[: len(words[key])], words[key]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=str(key))


def test_another_rank_s_partial_sum_is_named(
    two_ranks: tuple[Artifact, dict[Any, Tensor], dict[Any, Tensor]],
) -> None:
    two, trace, words = two_ranks
    unit = 2 * int(words["chosen", 2][0].view(torch.int32)[1])
    for name, place, said in (  # from the last phase to the first
        ("down", (1, 0), "down, element [1, 0]"),
        ("act", (3, 1), f"act of unit {unit}, element [1]"),
        ("o", (1, 7), "o, element [1, 7]"),
    ):
        words[name, 2][place] += 100
        _, first = first_difference(found_phases(two, words, trace))
        assert first is not None
        assert first.startswith(f"layer 2, phase {said}: ")


# ---- experts that are given ----


#: Two orders with no three experts in common at either end, nor groups.
ONE, OTHER = [7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 3, 7, 2, 6, 5, 4]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("changes", [{}, LITE], ids=["grouped", "lite"])
def test_given_experts_make_the_reference_agree(changes: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = (
        nearly_tied(tmp_path, name, order, small_config(**changes))
        for name, order in (("ours", ONE), ("theirs", OTHER))
    )
    other, following, alone = (ReferenceDecoder(artifact) for artifact in (theirs, ours, ours))
    other.trace, following.trace = {}, {}
    for token in (5, 6, 300):
        wanted = other.step(token)
        choices = {layer: other.trace[layer, "chosen"][0].int().tolist() for layer in (1, 2)}
        assert error(following.step(token, choices), wanted) < 1e-5
        assert error(alone.step(token), wanted) > 1e-2
        worst, first = first_difference(
            found_phases(ours, left(theirs, other.trace), following.trace), 1e-4
        )
        assert (first, len(worst)) == (None, len(PHASES))
        assert [layer for layer, *_ in following.followed] == [1, 2]
        for layer, expected, given, slack in following.followed:
            logits = following.trace[layer, "route"]
            assert given == choices[layer] == following.trace[layer, "chosen"][0].tolist()
            assert expected == [expert for expert, _ in route(ours.manifest.geometry, logits)]
            spread = float((logits.max() - logits.min()) / logits.abs().max())
            assert 0 < slack <= 0.501 * spread < 1e-3
        assert alone.followed == []


def test_an_order_of_the_same_experts_is_followed_without_a_word(artifact: Artifact) -> None:
    plain, told = ReferenceDecoder(artifact), ReferenceDecoder(artifact)
    plain.trace, told.trace = {}, {}
    for token in (5, 6):
        expected = plain.step(token)
        own = {layer: plain.trace[layer, "chosen"].flip(1) for layer in (1, 2)}
        choices = {layer: chosen[0].int().tolist() for layer, chosen in own.items()}
        assert torch.equal(told.step(token, choices), expected)
        assert told.followed == []
        assert all(torch.equal(told.trace[layer, "chosen"], own[layer]) for layer in own)
    assert torch.equal(told.step(7), plain.step(7))  # without choices its own
    assert torch.equal(told.trace[1, "chosen"], plain.trace[1, "chosen"])


@pytest.mark.parametrize("given", [[9, 0, 1], [-1, 0, 1], [0, 0, 1], [0, 1], [0, 1, 2, 3], []])
def test_what_is_no_choice_is_not_taken(given: list[int], artifact: Artifact) -> None:
    plain, told = ReferenceDecoder(artifact), ReferenceDecoder(artifact)
    assert torch.equal(told.step(5, {2: given, 0: [77]}), plain.step(5))
    ((layer, expected, found, slack),) = told.followed
    assert (layer, found, slack) == (2, given, math.inf)
    assert expected == traced(artifact, 5)[2, "chosen"][0].tolist()
    told.step(5)
    assert told.followed == []


def test_experts_of_too_many_groups_are_taken_by_the_router_s_scores(artifact: Artifact) -> None:
    decoder = ReferenceDecoder(artifact)
    decoder.trace = {}
    decoder.step(5, {1: [6, 0, 3]})
    ((_, _, found, slack),) = decoder.followed
    assert (found, slack) == ([6, 0, 3], math.inf)
    scores = decoder.trace[1, "route"].softmax(0)[[6, 0, 3]] * CONFIG["routed_scaling_factor"]
    torch.testing.assert_close(decoder.trace[1, "chosen"][1], scores, rtol=1e-6, atol=0)


# ---- the first difference ----


def phase(name: str, found: object, wanted: object, layer: int = 0) -> tuple[Any, ...]:
    return layer, name, torch.tensor(found), torch.tensor(wanted)


def test_differences_are_over_the_largest_value_that_is_wanted() -> None:
    found = [
        phase("q", [[1.0, -4.0]], [[1.0, -4.0]]),
        phase("act of unit 3", [2.0, 1.0], [4.0, 1.0]),
        phase("act of unit 4", [1.0, 0.0], [0.0, 8.0]),
        phase("down", [0.25, 0.0], [0.0, 0.0]),  # of zeros: the difference itself
    ]
    worst, first = first_difference(found, tolerance=1.0)
    assert (worst, first) == ({"q": 0.0, "act": 1.0, "down": 0.25}, None)
    for tolerance, said in (
        (0.25, "layer 0, phase act of unit 3, element [0]: expected 4, found 2"),
        (0.5, "layer 0, phase act of unit 4, element [1]: expected 8, found 0"),
    ):
        assert first_difference(found, tolerance) == (worst, said)


def test_at_the_tolerance_there_is_no_difference() -> None:
    found = [phase("o", [1.25, 2.0], [1.0, 2.0], layer=5)]
    assert first_difference(found, 0.125) == ({"o": 0.125}, None)
    _, first = first_difference(found, math.nextafter(0.125, 0))
    assert first == "layer 5, phase o, element [0]: expected 1, found 1.25"


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_what_is_no_number_is_a_difference(value: float) -> None:
    good = [[1.0, 2.0], [3.0, 4.0]]
    bad = [[1.0, 2.0], [value, 4.0]]
    worst, first = first_difference([phase("q", bad, good)], 1e9)
    assert first == f"layer 0, phase q, element [1, 0]: expected 3, found {value}"
    assert not worst["q"] <= 1e9
    for found in (good, bad):
        worst, first = first_difference([phase("q", found, bad)], 1e9)
        assert first is not None
        assert not worst["q"] <= 1e9
