"""Every byte of every shard, against its checkpoint, for geometries of all kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import make_artifact, make_snapshot, slow_but, small_config
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference_shards import (
    SMALL,
    Checkpoint,
    Tensors,
    build_and_check,
    read_checkpoint,
    write_checkpoint,
)

RANKS = (1, 2, 3, 4, 6, 8)


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    """Small geometries of 24 heads, with edge blocks, narrow FFNs and odd sizes everywhere."""
    groups = draw(st.sampled_from([1, 2, 3]))
    experts = groups * draw(st.integers(1, 3))
    topk_group = draw(st.integers(1, groups))
    layers = draw(st.integers(1, 3))
    widths = st.sampled_from([1, 40, 127, 128, 129, 200, 256, 300])
    greedy = draw(st.booleans())
    return small_config(
        hidden_size=draw(st.sampled_from([36, 100, 127, 128, 129, 192, 256, 260])),
        intermediate_size=draw(widths),
        moe_intermediate_size=draw(widths),
        n_shared_experts=draw(st.integers(1, 3)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, topk_group * (experts // groups))),
        n_group=groups,
        topk_group=topk_group,
        topk_method="greedy" if greedy else "group_limited_greedy",
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.sampled_from(sorted({0, 1, layers}))),
        q_lora_rank=draw(st.none() | st.integers(1, 140)),
        kv_lora_rank=draw(st.integers(1, 140)),
        qk_nope_head_dim=draw(st.integers(1, 12)),
        qk_rope_head_dim=2 * draw(st.integers(1, 5)),
        v_head_dim=draw(st.integers(1, 12)),
        vocab_size=draw(st.integers(1, 50)),
        tie_word_embeddings=draw(st.booleans()),
    )


def check_geometry(folder: Path, config: dict[str, Any], dtype: str, workers: int) -> None:
    snapshot = make_snapshot(folder / "snapshot", config, dtype=dtype, max_shard_size=100_000)
    written = json.loads((snapshot / "config.json").read_text())
    source = Checkpoint(read_checkpoint(snapshot), written)
    for ranks in RANKS:
        build_and_check(snapshot, ranks, folder / f"out-{ranks}", source, workers)


# Without shrinking: each example is six builds, and small as it is.
_SETTINGS = {
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow],
}


@settings(max_examples=5, **_SETTINGS)
@given(config=geometries(), dtype=st.sampled_from(["bf16", "fp8-block"]))
def test_geometries(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], dtype: str
) -> None:
    check_geometry(tmp_path_factory.mktemp("geometry"), config, dtype, 2)


@pytest.mark.slow
@settings(max_examples=25, **_SETTINGS)
@given(
    config=geometries(),
    dtype=st.sampled_from(["bf16", "fp8-block"]),
    workers=st.integers(1, 4),
)
def test_more_geometries(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], dtype: str, workers: int
) -> None:
    check_geometry(tmp_path_factory.mktemp("geometry"), config, dtype, workers)


@pytest.mark.parametrize("dtype", slow_but(["bf16", "fp8-block"], "bf16"))
@pytest.mark.parametrize(
    "changes",
    [
        # Fewer units than ranks in every layer: some ranks have no FFN at all.
        {"first_k_dense_replace": 2, "num_hidden_layers": 2, "intermediate_size": 129},
        # Fewer rows of the vocabulary than ranks; nine rows on eight ranks leave three without.
        {"vocab_size": 5},
        {"vocab_size": 9},
        # Dense, expert and shared FFN of one width.
        {"intermediate_size": 136, "n_shared_experts": 1},
        # Orientation cannot be told from the shapes: square experts, and H = 2I.
        {"hidden_size": 192, "moe_intermediate_size": 192, "n_shared_experts": 1},
        {"hidden_size": 256, "moe_intermediate_size": 128, "n_shared_experts": 2},
        # Square attention: o_proj [H, heads * v] and q_proj [heads * qk, H].
        {"hidden_size": 384, "q_lora_rank": None, "v_head_dim": 16, "num_hidden_layers": 1},
        {"first_k_dense_replace": 0, "topk_method": "greedy", "tie_word_embeddings": True},
    ],
)
def test_geometries_of_note(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    config = small_config(**changes)
    snapshot = make_snapshot(tmp_path / "snapshot", config, dtype=dtype)
    written = json.loads((snapshot / "config.json").read_text())
    source = Checkpoint(read_checkpoint(snapshot), written)
    for ranks in (1, 3, 8):
        build_and_check(snapshot, ranks, tmp_path / f"out-{ranks}", source)


def test_replicated_files_are_equal(tmp_path: Path, small: Tensors) -> None:
    snapshot = write_checkpoint(tmp_path / "s", small, SMALL)
    make_artifact(snapshot, 3, tmp_path / "out")
    first, *others = (
        (tmp_path / "out" / f"rank-{rank:02d}.replicated.safetensors").read_bytes()
        for rank in range(3)
    )
    assert others == [first, first]
