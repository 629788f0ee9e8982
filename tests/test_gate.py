"""The comparisons of the gate: logits, a free run, and what every phase leaves."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv2mk.manifests.geometry import Geometry
from dsv2mk.runner.gate import CHOICE_TOLERANCE, Follower, compare, gate_free_run, gate_positions
from dsv2mk.runner.reference import choice_slack, route

NAN, INF = math.nan, math.inf


def logits(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- one position ----


def test_equal_logits_pass_without_any_tolerance() -> None:
    row = logits(3, -1, 0.5, 7, 7, -2, 4)
    assert compare(row, row.clone(), 0.0) == {
        "relative_error": 0.0,
        "largest_difference": 0.0,
        "top1_equal": True,
        "top1_told": False,  # two are the largest
        "top5_overlap": 1.0,
        "top5_told": True,
        "finite": True,
        "passes": True,
    }


def test_the_error_is_relative_to_the_whole_reference() -> None:
    want, got = logits(3, 4, 0), logits(3, 4 + 2**-7, 0)
    error = 2**-7 / 5
    found = compare(got, want, error)
    assert (found["relative_error"], found["largest_difference"]) == (error, 2**-7)
    assert found["passes"]
    assert not compare(got, want, math.nextafter(error, 0))["passes"]
    found = compare(logits(6, 8, 0), want, 0.99)
    assert (found["relative_error"], found["largest_difference"]) == (1.0, 4.0)
    assert not found["passes"]


def test_the_error_of_a_reference_of_zeros_is_the_difference() -> None:
    found = compare(logits(0.25, 0), logits(0, 0), 0.25)
    assert (found["relative_error"], found["passes"]) == (0.25, True)
    assert not compare(logits(0.25, 0), logits(0, 0), 0.2)["passes"]


def test_another_top_1_passes_within_the_margin() -> None:
    close = compare(logits(0.875, 1, 0), logits(1, 0.875, 0), tolerance=1.0)
    assert (close["top1_equal"], close["top1_told"], close["passes"]) == (False, False, True)
    tied = compare(logits(1, 1 + 2**-20, 0), logits(1, 1, 0))
    assert (tied["top1_equal"], tied["top1_told"], tied["passes"]) == (False, False, True)


def test_what_is_told_follows_from_the_reference_alone() -> None:
    for want, name in (([1, 7], "top1_told"), ([20, 20, 20, 20, 7, 1, -1, 0], "top5_told")):
        rms = math.sqrt(sum(value * value for value in want) / len(want))
        bound = 6 / (8 * rms)  # the margin is 6
        for tolerance, told in ((bound * (1 + 1e-9), False), (bound * (1 - 1e-9), True)):
            for got in (want, [0] * len(want), [100 * value for value in want]):
                assert compare(logits(*got), logits(*want), tolerance)[name] == told


def test_another_top_1_beyond_the_margin_fails() -> None:
    """In a wide vocabulary a token that is wrong by a whole logit is a small error of the whole."""
    want, got = torch.full((100_000,), -10.0), torch.full((100_000,), -10.0)
    want[:2], got[:2] = logits(1, 0), logits(0, 1)
    found = compare(got, want)
    assert found["relative_error"] < 1e-3
    assert not found["passes"]


def test_another_top_5_beyond_the_margin_fails() -> None:
    want = torch.full((100_000,), -10.0)
    want[:6] = logits(9, 8, 7, 6, 5, 4)
    got = want.clone()
    got[4:6] = logits(4, 5)
    found = compare(got, want)
    assert found["relative_error"] < 1e-3
    assert (found["top1_equal"], found["top5_overlap"], found["passes"]) == (True, 0.8, False)
    assert compare(got, want, 0.013)["passes"]  # 8 * 0.013 * 10 is more than the margin


def test_the_order_of_the_top_5_does_not_matter() -> None:
    want = logits(9, 8, 7, 6, 5, 4, 3)
    found = compare(logits(9, 5, 6, 7, 8, 4, 3), want, 1.0)
    assert (found["top5_overlap"], found["top1_equal"], found["passes"]) == (1.0, True, True)
    found = compare(logits(5, 6, 7, 8, 9, 4, 3), want, 1.0)
    assert (found["top5_overlap"], found["top1_equal"]) == (1.0, False)
    found = compare(logits(9, 8, 7, 6, 4, 5, 3), want, 1.0)  # the fifth is another
    assert (found["top5_overlap"], found["top5_told"], found["passes"]) == (0.8, False, True)
    found = compare(logits(-9, -8, -7, -6, -5, -4, -3), want, 9.0)
    assert (found["top5_overlap"], found["top5_told"]) == (0.6, False)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6])
def test_a_vocabulary_may_be_smaller_than_what_is_looked_at(size: int) -> None:
    want = torch.arange(size, dtype=torch.float32)
    found = compare(want + 0.125, want, 1.0)
    assert (found["top1_equal"], found["top5_overlap"], found["passes"]) == (True, 1.0, True)
    assert found["top1_told"] == (size == 1)
    assert found["top5_told"] == (size < 6)
    found = compare(want.flip(0), want, 9.0)
    assert found["top1_equal"] == (size == 1)
    assert found["top5_overlap"] == (0.8 if size == 6 else 1.0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_no_number_fails(value: float) -> None:
    good = logits(3, 4, 0, 1, 2, 5, 6)
    for place in range(len(good)):
        bad = good.clone()
        bad[place] = value
        for got, want in ((bad, good), (good, bad), (bad, bad)):
            found = compare(got, want, 1e300)
            assert not found["passes"]
            assert found["finite"] == (got is good)
            assert (found["relative_error"], found["largest_difference"]) == (None, None)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=1, max_size=9))
def test_facts_are_those_of_plain_arithmetic(pairs: list[tuple[int, int]]) -> None:
    got, want = ([pair[side] / 4 for pair in pairs] for side in (0, 1))
    found = compare(logits(*got), logits(*want), 0.123)

    def first(values: list[float], count: int) -> list[int]:
        return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]

    largest = max(abs(x - y) for x, y in zip(got, want, strict=True))
    size = math.hypot(*want)
    error = math.dist(got, want) / size if size else largest
    assert math.isclose(found["relative_error"], error, rel_tol=1e-12)
    assert found["largest_difference"] == largest
    equal1 = first(got, 1) == first(want, 1)
    equal5 = {*first(got, 5)} == {*first(want, 5)}
    ordered = sorted(want, reverse=True)
    margin = 8 * 0.123 * math.sqrt(sum(value * value for value in want) / len(want))
    told1 = len(want) < 2 or ordered[0] - ordered[1] > margin
    told5 = len(want) < 6 or ordered[4] - ordered[5] > margin
    shared = len({*first(got, 5)} & {*first(want, 5)})
    assert (found["top1_equal"], found["top1_told"]) == (equal1, told1)
    assert (found["top5_overlap"], found["top5_told"]) == (shared / min(5, len(want)), told5)
    agree = (equal1 or not told1) and (equal5 or not told5)
    assert found["passes"] == (agree and error <= 0.123)


# ---- all positions ----


class Recorded:
    """Decodes what it was given."""

    def __init__(self, *rows: Tensor, log: list[str] | None = None, name: str = "") -> None:
        self.rows = list(rows)
        self.fed: list[int] = []
        self.log, self.name = [] if log is None else log, name

    def step(self, token: int) -> Tensor:
        self.fed.append(token)
        self.log.append(self.name)
        return self.rows[len(self.fed) - 1]


def test_positions_are_compared_one_by_one() -> None:
    want = [logits(3, 4, 0), logits(1, 0, 0), logits(0, 0, 2)]
    got = [logits(3, 4, 0), logits(1, 0.25, 0), logits(0, 4, 2)]
    for by_token in (False, True):
        order: list[str] = []
        candidate = Recorded(*got, log=order, name="candidate")
        reference, seen = Recorded(*want, log=order, name="reference"), list[int]()
        verdict = gate_positions(
            candidate,
            [7, 5, 6],
            reference.step if by_token else want,
            tolerance=0.25,
            after=seen.append,
        )
        assert candidate.fed == [7, 5, 6]
        assert reference.fed == ([7, 5, 6] if by_token else [])
        assert seen == [0, 1, 2]
        assert not by_token or order == ["candidate", "reference"] * 3
        assert verdict.data == {
            "positions": 3,
            "max_relative_error": 2.0,
            "largest_difference": 4.0,
            "top1_agreement": 2 / 3,
            "top1_agreement_where_told": None,  # 8 * 0.25 times the rms is more than any margin
            "top5_overlap": 1.0,
            "top5_overlap_where_told": 1.0,
            "positions_told": [0, 3],
            "tolerance": 0.25,
        }
        (failure,) = verdict.failures
        assert failure.startswith("position 2: relative error 2.00e+00, top-1 differs")


def test_agreement_where_nothing_is_told_is_unknown() -> None:
    tied = logits(1, 1, 1, 1, 1, 1)
    verdict = gate_positions(Recorded(tied), [0], [tied])
    assert verdict.failures == []
    assert verdict.data["top1_agreement_where_told"] is None
    assert verdict.data["top5_overlap_where_told"] is None
    assert verdict.data["positions_told"] == [0, 0]


def test_strict_is_a_bit() -> None:
    want = logits(3, 4, -1)
    near = want.clone()
    near[1] = torch.nextafter(near[1], logits(9)[0])
    for got, equal in ((want.clone(), True), (near, False)):
        loose = gate_positions(Recorded(want, got), [0, 0], [want, want])
        assert (loose.failures, "bit_equal" in loose.data) == ([], False)
        strict = gate_positions(Recorded(want, got), [0, 0], [want, want], strict=True)
        assert strict.data["bit_equal"] == equal
        said = "position 1: logits are not bit-equal to the reference's"
        assert strict.failures == ([] if equal else [said])


def test_strict_tells_the_zeros_apart() -> None:
    strict = gate_positions(Recorded(logits(1, -0.0)), [0], [logits(1, 0.0)], strict=True)
    assert not strict.data["bit_equal"]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_no_number_is_not_lost_among_positions(place: int, value: float) -> None:
    good = [logits(3, 4)] * 3
    bad = [*good[:place], logits(3, value), *good[place + 1 :]]
    for got, want, whose in ((bad, good, ""), (good, bad, "the reference's "), (bad, bad, "")):
        verdict = gate_positions(Recorded(*got), [0, 0, 0], want)
        assert verdict.failures == [f"position {place}: {whose}logits are not finite"]
        assert verdict.data["max_relative_error"] is None
        assert verdict.data["largest_difference"] is None
        json.dumps(verdict.data, allow_nan=False)


# ---- a free run ----


@pytest.mark.parametrize(
    ("count", "distinct", "passes"),
    [
        *((1, 1, True), (7, 1, True), (8, 1, False), (8, 2, True), (47, 1, False), (47, 2, True)),
        *((48, 2, False), (48, 3, True), (64, 3, False), (64, 4, True), (65, 4, True)),
    ],
)
def test_a_free_run_is_not_degenerate(count: int, distinct: int, passes: bool) -> None:
    new = [100 + index % distinct for index in range(count)]
    for prompt in ([], [1], [1, 2, 3, 4, 5, 6, 7, 8]):
        verdict = gate_free_run([*prompt, *new], len(prompt), None, 0.0)
        assert verdict.data == {"tokens": count, "distinct": distinct, "slack": 0.0}
        assert (verdict.failures == []) == passes
        assert all("degenerate" in failure for failure in verdict.failures)


def test_choices_are_the_reference_s_or_as_good() -> None:
    rows = [logits(0, 9, 0, 0)] * 2  # within the prompt: not looked at
    rows += [logits(0, 1, 0, 0), logits(0, 1, 0.75, 0), logits(2, 0, 1.5, 1)]
    reference = Recorded(*rows)
    tokens = [3, 2, 0, 1, 2, 0]
    verdict = gate_free_run(tokens, 3, reference.step, 0.25)
    assert reference.fed == tokens[:-1]
    assert verdict.failures == []
    wanted = {"tokens": 3, "distinct": 3, "slack": 0.25, "equal_to_reference": 2}
    assert verdict.data == wanted

    verdict = gate_free_run(tokens, 3, Recorded(*rows).step, math.nextafter(0.25, 0))
    (failure,) = verdict.failures
    assert "chose 2 for position 4, the reference 1: its logit is higher by 2.50e-01" in failure
    assert verdict.data["equal_to_reference"] == 2

    verdict = gate_free_run([3, 2, 0, 3, 3, 3], 3, Recorded(*rows).step, 0.999)
    assert [failure.split(",")[0] for failure in verdict.failures] == [
        f"free-running decode chose 3 for position {position}" for position in (3, 4, 5)
    ]
    assert gate_free_run([3, 2, 0, 3, 3, 3], 3, Recorded(*rows).step, 1.0).failures == []


def test_a_slack_that_is_no_number_allows_nothing() -> None:
    assert len(gate_free_run([0, 1, 0], 1, Recorded(*[logits(1, 0)] * 2).step, NAN).failures) == 2


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_reference_without_numbers_fails_the_run(value: float) -> None:
    rows = [logits(1, 0), logits(0, value), logits(1, 0)]
    verdict = gate_free_run([0, 0, 1, 1], 1, Recorded(*rows).step, 1.0)
    assert verdict.failures == ["the reference's logits at position 1 are not finite"]
    assert verdict.data["equal_to_reference"] == 1


def test_a_replay_chooses_what_the_launch_chose() -> None:
    rows = [logits(0, 9, 0), logits(0, 0, 1), logits(1, 0, 0), logits(0, 3, 3)]
    tokens = [1, 0, 2, 0, 1]  # the first is within the prompt: what follows it was given
    for reference in (None, Recorded(*rows).step):
        replay = Recorded(*rows)
        verdict = gate_free_run(tokens, 2, reference, 0.0, replay.step)
        assert (verdict.failures, verdict.data["replay_equal"]) == ([], True)
        assert replay.fed == tokens[:-1]
        assert ("equal_to_reference" in verdict.data) == (reference is not None)
    order: list[str] = []
    both = [Recorded(*rows, log=order, name=name).step for name in ("reference", "replay")]
    gate_free_run(tokens, 2, both[0], 0.0, both[1])
    assert order == ["replay", "reference"] * 4

    other = [*rows[:2], logits(1, 1 + 2**-20, 0), rows[3]]
    verdict = gate_free_run(tokens, 2, Recorded(*rows).step, 0.0, Recorded(*other).step)
    said = "free-running decode chose 0 for position 3, its replay step by step 1"
    assert verdict.failures == [said]
    assert (verdict.data["replay_equal"], verdict.data["equal_to_reference"]) == (False, 3)


def test_a_replay_without_numbers_fails_the_run() -> None:
    rows = [logits(1, 0), logits(0, NAN), logits(1, 0)]
    verdict = gate_free_run([0, 0, 1, 1], 1, None, 0.0, Recorded(*rows).step)
    assert verdict.failures == ["the replay's logits at position 1 are not finite"]
    assert not verdict.data["replay_equal"]


# ---- choices of experts ----


def routing(groups: int, each: int, topk_group: int, experts: int) -> Geometry:
    return replace(
        Geometry.from_config(small_config()),
        n_group=groups,
        n_routed_experts=groups * each,
        topk_group=topk_group,
        num_experts_per_tok=experts,
    )


def choices(g: Geometry, rows: np.ndarray) -> np.ndarray:
    """Which experts are chosen [rows, experts], of many rows of logits: the rule once more."""
    tops = rows.reshape(len(rows), g.n_group, -1).max(2)
    place = np.argsort(np.argsort(-tops, axis=1, kind="stable"), axis=1)
    allowed = np.repeat(place < g.topk_group, g.experts_per_group, axis=1)
    order = np.argsort(np.where(allowed, -rows, np.inf), axis=1, kind="stable")
    out = np.zeros(rows.shape, bool)
    np.put_along_axis(out, order[:, : g.num_experts_per_tok], True, axis=1)
    return out


@pytest.mark.parametrize("whole", [False, True], ids=["real", "ties"])
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 6, 1, 2), (3, 2, 1, 1), (3, 2, 1, 2), (3, 2, 2, 2), (3, 2, 2, 3), (4, 2, 2, 3)),
        *((2, 3, 1, 3), (2, 3, 2, 6), (3, 2, 3, 2), (7, 1, 3, 3), (2, 4, 1, 2), (4, 2, 3, 2)),
    ],
)
def test_no_smaller_change_of_the_logits_makes_another_choice(
    shape: tuple[int, int, int, int], whole: bool
) -> None:
    g, random = routing(*shape), np.random.default_rng(sum(shape))
    count = g.n_routed_experts
    corners = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=count)))
    possible = 0
    for _ in range(40):
        values = random.normal(size=count) * 3
        if whole:
            values = np.round(values)
        row = torch.tensor(values)
        assert {expert for expert, _ in route(g, row)} == {
            *choices(g, values[None])[0].nonzero()[0]
        }
        assert choice_slack(g, row, [expert for expert, _ in route(g, row)]) == 0.0
        wanted = random.permutation(count)[: g.num_experts_per_tok]
        chosen = np.isin(np.arange(count), wanted)
        slack = choice_slack(g, row, wanted.tolist())
        reach = slack * (np.abs(values).max() or 1.0)
        changes = np.concatenate([corners, random.uniform(-1, 1, (1000, count))])
        if math.isinf(slack):
            assert len({*(wanted // g.experts_per_group)}) > g.topk_group
            assert not (choices(g, values + changes * 100) == chosen).all(1).any()
            continue
        possible += 1
        if reach:
            assert not (choices(g, values + changes * reach * (1 - 1e-9)) == chosen).all(1).any()
        up = np.where(chosen, 1.0, -1.0)
        enough = torch.tensor(values + up * (reach + 1e-9))
        assert {expert for expert, _ in route(g, enough)} == {*wanted}
    assert possible >= 4


@pytest.mark.parametrize(
    ("topk_group", "experts", "apart"),
    [
        (2, [0, 2], 0),
        (2, [2, 0], 0),
        (2, [2, 1], 8 - 6),  # 1 changes places with 0
        (2, [0, 1], 7 - 6),  # group 1 is still the second: its 2 has to fall below 1
        (2, [0, 4], 7 - -3),  # group 2 has to get past group 1
        (2, [6, 2], 8 - -10),
        (1, [0, 1], 0),
        (1, [2, 3], 8 - 7),  # group 1 has to get past group 0, and then has no other experts
        *((1, [0, 2], INF), (2, [0, 0], INF), (2, [0], INF), (2, [0, 1, 2], INF)),
        *((2, [0, 8], INF), (2, [-1, 2], INF), (2, [], INF)),
    ],
)
def test_the_slack_of_a_choice(topk_group: int, experts: list[int], apart: float) -> None:
    """Half the distance of the two that change places, over the largest magnitude."""
    row = logits(8, 6, 7, -13, -3, -4, -10, -16)
    g = routing(4, 2, topk_group, 2)
    assert choice_slack(g, row, experts) == apart / 2 / 16
    assert choice_slack(g, row * 0, experts) == (INF if apart == INF else 0)
    row[5] = NAN
    assert choice_slack(g, row, experts) == INF


class Routed:
    """A reference whose router had other choices of these slacks, layer by layer."""

    geometry = routing(4, 2, 2, 2)  # three layers, the first without a router

    def __init__(self, *slacks: float) -> None:
        self.position, self.taken = 0, list[object]()
        self.followed = [(layer, [0, 1], [2, 1], slack) for layer, slack in enumerate(slacks, 1)]

    def step(self, token: int, choices: dict[int, list[int]]) -> Tensor:
        self.position += 1
        self.taken.append((token, choices))
        return logits(token)


def exchange(weights: list[float]) -> Callable[[str, int], Tensor]:
    numbers = torch.tensor([2, 1], dtype=torch.int32).view(torch.float32)
    return lambda name, layer: {"chosen": torch.stack([numbers, logits(*weights)])}[name]


def test_a_follower_takes_choices_and_judges_them() -> None:
    reference = Routed(0.01, 0.25)
    judge = Follower(reference, exchange([0.5, 0.5]), tolerance=0.01)  # type: ignore[arg-type]
    assert judge.data == {"choices_followed": 0, "largest_choice_slack": 0.0}
    assert [judge.step(token).tolist() for token in (7, 8)] == [[7.0], [8.0]]
    assert reference.taken == [(token, {1: [2, 1], 2: [2, 1]}) for token in (7, 8)]
    assert judge.data == {"choices_followed": 4, "largest_choice_slack": 0.25}
    assert [failure.split(": that")[0] for failure in judge.failures] == [
        f"position {position}: layer 2 chose experts [2, 1], the reference [0, 1]"
        for position in (0, 1)
    ]
    assert "by 2.50e-01 of the largest, allowed 1.00e-02" in judge.failures[0]


@pytest.mark.parametrize("slack", [INF, math.nextafter(CHOICE_TOLERANCE, 1)])
def test_a_choice_past_the_slack_fails(slack: float) -> None:
    judge = Follower(Routed(CHOICE_TOLERANCE, slack), exchange([2, 1]))  # type: ignore[arg-type]
    judge.step(0)
    (failure,) = judge.failures
    assert failure.startswith("position 0: layer 2 chose")
    data = json.loads(json.dumps(judge.data, allow_nan=False))
    assert data["largest_choice_slack"] == (None if slack == INF else slack)


@pytest.mark.parametrize("weights", [[0.5, 0.5 + 2**-20], [NAN, 0.5], [0.5, NAN]])
def test_experts_are_listed_by_descending_weight(weights: list[float]) -> None:
    judge = Follower(Routed(), exchange(weights))  # type: ignore[arg-type]
    judge.step(0)
    assert [failure.split(" by ")[0] for failure in judge.failures] == [
        f"position 0: layer {layer} lists experts [2, 1]" for layer in (1, 2)
    ]
