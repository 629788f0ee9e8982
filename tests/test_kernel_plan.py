"""What the kernel derives from a geometry: chunks, shared memory, workspace, limits."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv2mk.kernel import plan as constants
from dsv2mk.kernel.plan import MAX_CTAS, Plan, vector_bytes
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry, preset_config, preset_names
from dsv2mk.manifests.layout import group_layout
from dsv2mk.manifests.topology import Topology

pytest.register_assert_rewrite("reference_plan")

from reference_plan import (  # noqa: E402
    STREAMED,
    check_chunks,
    check_down,
    check_grids,
    check_plan,
    check_shared_memory,
    check_workspace,
    most_at_work,
    straddles,
    vector_size,
)

CASES = [(name, ranks) for name in preset_names() for ranks in (1, 2, 4, 8)]
TINY = Geometry.from_config(preset_config("tiny"))


@cache
def plan_of(name: str, ranks: int) -> Plan:
    geometry = Geometry.from_config(preset_config(name))
    return Plan(geometry=geometry, topology=Topology(ranks=ranks))


def tiny_plan(ranks: int = 1, **changes: Any) -> Plan:
    return Plan(geometry=replace(TINY, **changes), topology=Topology(ranks=ranks))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of geometries that the kernel accepts, for 1 to 8 ranks."""
    ranks, heads = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 40))
    v_head_dim = 8 * draw(st.integers(1, 32))
    groups = draw(st.integers(1, 8))
    topk_group, per_group = draw(st.integers(1, groups)), draw(st.integers(1, 20))
    layers = draw(st.integers(1, 4))
    geometry = replace(
        TINY,
        hidden_size=256 * draw(st.integers(1, 24)),
        num_attention_heads=ranks * heads,
        q_lora_rank=draw(st.none() | st.integers(1, 512).map(lambda n: 8 * n)),
        kv_lora_rank=32 * draw(st.integers(1, 16)),
        qk_rope_head_dim=16 * draw(st.integers(1, 4)),
        qk_nope_head_dim=8 * draw(st.integers(1, 24)),
        v_head_dim=v_head_dim,
        intermediate_size=draw(st.integers(1, 12000)),
        moe_intermediate_size=draw(st.integers(1, 2000)),
        n_group=groups,
        topk_group=topk_group,
        n_routed_experts=groups * per_group,
        num_experts_per_tok=draw(st.integers(1, min(8, topk_group * per_group))),
        n_shared_experts=draw(st.integers(1, 3)),
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.integers(0, layers)),
        vocab_size=draw(st.integers(1, 200_000)),
    )
    try:
        plan = Plan(geometry=geometry, topology=Topology(ranks=ranks))
    except InputError as error:
        known = ("shared memory", "a row that is cut")  # any other refusal is one too many
        assume(not any(words in str(error) for words in known))
        raise
    assume(not straddles(plan))  # see EDGES
    return plan


# ---- chunks ----


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_chunks_of_the_presets(name: str, ranks: int) -> None:
    check_chunks(plan_of(name, ranks))
    check_down(plan_of(name, ranks))


def test_rows_of_deepseek_v2_that_are_longer_than_a_slot() -> None:
    pieces = [plan_of("deepseek-v2", ranks).o.pieces for ranks in (1, 2, 4, 8)]
    assert pieces == [4, 2, 1, 1]  # of 32, 16, 8 and 4 KiB, in slots of 10 KiB


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_what_a_bulk_copy_reads_starts_on_16_bytes(name: str, ranks: int) -> None:
    plan = plan_of(name, ranks)
    for layout in group_layout(plan.geometry, plan.topology):
        for tensor in (*STREAMED, "ffn_gate_up", "ffn_gate_up_scale", "ffn_down"):
            spec = layout.tensors[tensor]
            assert (spec.offset % 16, spec.stride % 16) == (0, 0)
    assert plan.cache_row * 2 % 16 == 0


def test_everything_that_is_dealt_has_one_cta() -> None:
    from dsv2mk.kernel.stream import deal

    presets = [plan_of(*case) for case in CASES]
    totals = {total for plan in presets for total in plan.runs.values()}
    totals |= {plan.gate_up.chunks * units for plan in presets for units in range(plan.most_units)}
    for ctas in range(1, MAX_CTAS + 1):
        grid = [SimpleNamespace(cta=cta, ctas=ctas) for cta in range(ctas)]
        for total in totals:
            firsts, ends = zip(*(deal(env, total) for env in grid), strict=True)
            assert firsts == tuple(cta * total // ctas for cta in range(ctas))
            assert (*firsts, total) == (0, *ends)
            lengths = {end - first for first, end in zip(firsts, ends, strict=True)}
            assert lengths <= {total // ctas, total // ctas + 1}


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_dealing_stays_within_32_bits(name: str, ranks: int) -> None:
    plan = plan_of(name, ranks)
    dealt = {matrix: getattr(plan, matrix).chunks for matrix in STREAMED}
    assert plan.runs == {**dealt, "rows": plan.geometry.hidden_size}
    assert max(plan.runs.values()) * 256 < 1 << 31


# ---- collectives ----


def test_a_collective_takes_no_memory_of_its_own() -> None:
    p2p = plan_of("tiny", 2)
    multimem = replace(p2p, collective="multimem")
    check_plan(multimem)
    assert p2p.collective == "p2p"
    for name in ("exchange", "counters", "smem", "smem_bytes", "exchange_offset"):
        assert getattr(multimem, name) == getattr(p2p, name)


@pytest.mark.parametrize(
    ("collective", "ranks", "expected"),
    [("multimem", 1, "several ranks, found 1"), ("nvls", 2, "p2p or multimem, found nvls")],
)
def test_a_collective_that_there_is_not_is_refused(
    collective: str, ranks: int, expected: str
) -> None:
    with pytest.raises(InputError, match=f"the kernel: collective.*expected {expected}"):
        Plan(geometry=TINY, topology=Topology(ranks=ranks), collective=collective)


# ---- shared memory ----


@given(st.integers(1, 700).map(lambda n: 8 * n))
def test_a_vector_fits_its_bytes(width: int) -> None:
    assert vector_size(width) <= vector_bytes(width) < 4 * width + 4 * 256
    assert vector_bytes(width) % 16 == 0


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_shared_memory_of_the_presets(name: str, ranks: int) -> None:
    check_shared_memory(plan_of(name, ranks))


@pytest.mark.parametrize("rope", [16, 32, 48, 64])
def test_eight_rows_share_no_bank(rope: int) -> None:
    """Lanes of one load: a row's 16 bytes (ldmatrix), or four words a row (32-bit loads)."""
    for kv_lora in range(32, 513, 32):
        plan = tiny_plan(kv_lora_rank=kv_lora, qk_rope_head_dim=rope)
        assert kv_lora + rope <= plan.cache_row < kv_lora + rope + 16
        for row_bytes in (2 * plan.cache_row, 2 * plan.p_row):
            assert row_bytes % 16 == 0
            banks = {(row * row_bytes // 4 + word) % 32 for row in range(8) for word in range(4)}
            assert len(banks) == 32


def test_registers_that_warps_trade_are_those_of_the_launch() -> None:
    """What the compiler gives: 65536 registers over the threads, in eights."""
    threads = constants.THREADS
    given_ = 65536 // threads // 8 * 8 * threads
    consumers, service = constants.CONSUMER_REGISTERS, constants.SERVICE_REGISTERS
    assert consumers % 8 == service % 8 == 0
    assert 512 * consumers + (threads - 512) * service <= given_


# ---- workspace ----


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_workspace_of_the_presets(name: str, ranks: int) -> None:
    check_workspace(plan_of(name, ranks))


# ---- grids ----


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_grids_of_the_presets(name: str, ranks: int) -> None:
    check_grids(plan_of(name, ranks), (*range(1, 34), 64, 100, 132, 148, 160, 255, 256))


# ---- units at work ----


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_units_at_work_in_the_presets(name: str, ranks: int) -> None:
    plan = plan_of(name, ranks)
    units, routed = most_at_work(plan)
    if (name, ranks) == ("tiny", 8):  # an expert a group has a unit on a rank, and two are chosen
        assert (units, routed) == (3, 2)
        assert (plan.most_units, plan.routed_slots) == (5, 4)
    else:
        assert plan.routed_slots == routed
        assert units <= plan.most_units <= units + 1


# ---- other geometries ----


@settings(max_examples=150)
@given(plans())
def test_any_accepted_geometry_has_a_sound_plan(plan: Plan) -> None:
    check_plan(plan)


#: What the kernel takes no more of, and the words of its refusal.
LIMITS: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_size": 128}, "hidden_size", "a multiple of 256"),
    ({"hidden_size": 384}, "hidden_size", "a multiple of 256"),
    ({"hidden_size": 8448}, "hidden_size", "at most 8192"),
    ({"q_lora_rank": 5128}, "a row that is cut", "256-element pieces"),
    ({"num_attention_heads": 50, "v_head_dim": 200}, "a row that is cut", "found 10000"),
    ({"kv_lora_rank": 48}, "kv_lora_rank", "a multiple of 32"),
    ({"kv_lora_rank": 544}, "kv_lora_rank", "at most 512"),
    ({"qk_rope_head_dim": 24}, "qk_rope_head_dim", "a multiple of 16"),
    ({"qk_rope_head_dim": 80}, "qk_rope_head_dim", "at most 64"),
    ({"v_head_dim": 36}, "v_head_dim", "a multiple of 8"),
    ({"qk_nope_head_dim": 36}, "qk_nope_head_dim", "a multiple of 8"),
    ({"q_lora_rank": 100}, "q_lora_rank", "a multiple of 8"),
    ({"n_routed_experts": 516}, "n_routed_experts", "at most 512"),
    ({"n_routed_experts": 66, "n_group": 33}, "n_group", "at most 32"),
    ({"num_attention_heads": 2048}, "shared memory", "at least 8 slots"),
]


@pytest.mark.parametrize(("changes", "name", "expected"), LIMITS)
def test_a_geometry_past_a_limit_is_refused_by_name(
    changes: dict[str, Any], name: str, expected: str
) -> None:
    with pytest.raises(InputError, match=f"the kernel: {name}.*{expected}") as refused:
        tiny_plan(**changes)
    assert refused.value.exit_code == 10
    if len(changes) == 1 and name in changes:
        assert refused.value.found == str(changes[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 8, "qk_nope_head_dim": 8},
        {"q_lora_rank": None},
        {"q_lora_rank": 8},
        {"q_lora_rank": 5120},
        {"num_attention_heads": 64, "v_head_dim": 200},
        {"n_routed_experts": 512, "n_group": 32},
        {"n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
        {"num_attention_heads": 1},
        {"num_attention_heads": 17},
        {"first_k_dense_replace": 4},
        {"first_k_dense_replace": 0},
        {"vocab_size": 1},
    ],
)
def test_a_geometry_at_a_limit_is_accepted(changes: dict[str, Any]) -> None:
    check_plan(tiny_plan(**changes))


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(InputError, match="divisor of the 8 heads"):
        tiny_plan(ranks=3)


#: What no limit names yet: each must be refused by name, or have a sound plan.
EDGES = {
    "a chunk of w_uv has rows of two heads": {
        "num_attention_heads": 48,
        "v_head_dim": 16,
        "kv_lora_rank": 512,
    },
    "more tiles of heads than CTAs": {
        "num_attention_heads": 4096,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
    },
    "more rows of lm_head than 32 bits count": {"vocab_size": 1 << 36},
}


@pytest.mark.parametrize("case", EDGES)
def test_a_geometry_at_an_edge_is_refused_or_has_a_sound_plan(case: str) -> None:
    try:
        plan = tiny_plan(**EDGES[case])
    except InputError:
        return
    check_plan(plan)
