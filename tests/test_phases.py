"""What every phase leaves: the reference's trace, and where the gate finds the first difference."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import exchange_of
from helpers import make_artifact, make_snapshot, small_config
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.tensors import as_torch
from dsv2mk.runner.gate import PHASES, first_difference, phases_of
from dsv2mk.runner.reference import ReferenceDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = math.nan
#: Three layers, the first dense; an expert and the shared ones have several units.
CONFIG = small_config()
LITE = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}


def make(tmp_path: Path, **changes: Any) -> Artifact:
    snapshot = make_snapshot(tmp_path / "snapshot", small_config(**changes))
    return make_artifact(snapshot, 1, tmp_path / "artifact")


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
        "o": (192,),
        "down": (192,),
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
        has("o", weights["o"][layer] @ trace[layer, "value"].flatten())
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
    geometry, trace = artifact.manifest.geometry, traced(artifact, 5, 6)
    words = exchange_of(geometry, trace)
    phases = phases_of(geometry, lambda name, layer: words[name, layer], trace)
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
    "o": [191],
    "route": [7],
    "down": [0],
}


@pytest.mark.parametrize("phase", PLACES)
@pytest.mark.parametrize("layer", [1, 2])
def test_one_element_is_named(phase: str, layer: int, artifact: Artifact) -> None:
    geometry, trace = artifact.manifest.geometry, traced(artifact, 5, 6)
    words, place = exchange_of(geometry, trace), PLACES[phase]
    wanted = trace[layer, phase]
    changed = wanted.clone()
    changed[tuple(place)] += 0.5 * wanted.abs().max()
    words[phase, layer] = changed.view(words[phase, layer].shape)
    if layer == 1:
        words["qkv", 2].fill_(NAN)  # what comes after it is not the first
    phases = phases_of(geometry, lambda name, at: words[name, at], trace)
    worst, first = first_difference(phases)
    expected, found = float(wanted[tuple(place)]), float(changed[tuple(place)])
    assert first == (
        f"layer {layer}, phase {phase}, element {place}: expected {expected:.6g}, found {found:.6g}"
    )
    if layer == 2:
        assert worst.pop(phase) == pytest.approx(0.5)
        assert set(worst.values()) == {0.0}


def test_an_element_of_a_unit_is_named(artifact: Artifact) -> None:
    """Units at work are numbered shared ones first, then by the experts that were chosen."""
    geometry, trace = artifact.manifest.geometry, traced(artifact, 5, 6)
    second = int(trace[1, "chosen"][0, 1])
    for layer, row, unit in ((0, 1, 1), (1, 0, 16), (1, 2, 18), (1, 3 + 2 + 1, 2 * second + 1)):
        words = exchange_of(geometry, trace)
        words["act", layer][row, 5] += 100
        _, first = first_difference(phases_of(geometry, lambda n, at: words[n, at], trace))  # noqa: B023
        assert first is not None
        assert first.startswith(f"layer {layer}, phase act of unit {unit}, element [5]: ")


@pytest.mark.parametrize(("row", "value"), [(0, 0), (0, 7), (1, 1)])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_choice_is_named(row: int, value: int, column: int, artifact: Artifact) -> None:
    """Numbers of experts are int32 words among floats."""
    geometry, trace = artifact.manifest.geometry, traced(artifact, 5, 6)
    words, wanted = exchange_of(geometry, trace), trace[2, "chosen"]
    assert words["chosen", 2].view(torch.int32)[0].tolist() == wanted[0].int().tolist()
    if row == 0:
        value = value if value != int(wanted[0, column]) else 3
        words["chosen", 2].view(torch.int32)[0, column] = value
    else:
        value = float(wanted[1, column]) + 1
        words["chosen", 2][1, column] = value
    _, first = first_difference(phases_of(geometry, lambda name, at: words[name, at], trace))
    expected = float(wanted[row, column])
    place = f"layer 2, phase chosen, element [{row}, {column}]"
    assert first == f"{place}: expected {expected:.6g}, found {value:.6g}"


@pytest.mark.parametrize(
    ("found", "worst", "said"),
    [
        ([[150.0, 8.0], [0.5, 0.25]], math.inf, "[0, 1]: expected 7, found 8"),
        ([[7.0, 150.0], [0.5, 0.25]], math.inf, "[0, 0]: expected 150, found 7"),
        ([[150.0, 77.0], [0.5, 9.0]], math.inf, "[0, 1]: expected 7, found 77"),
        ([[150.0, 7.0], [0.5, 0.28125]], 0.0625, "[1, 1]: expected 0.25, found 0.28125"),
        ([[150.0, 7.0], [NAN, 0.25]], math.inf, "[1, 0]: expected 0.5, found nan"),
    ],
)
def test_a_choice_among_many_experts_is_named(
    found: list[list[float]], worst: float, said: str
) -> None:
    """Experts by number, whatever the tolerance; weights by the largest weight."""
    wanted = torch.tensor([[150.0, 7.0], [0.5, 0.25]])
    phases = [(1, "chosen", torch.tensor(found), wanted)]
    named = f"layer 1, phase chosen, element {said}"
    assert first_difference(phases) == ({"chosen": worst}, named)
    assert first_difference(phases, 1e9)[1] == (named if worst == math.inf else None)


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
