"""Who owns what, where it lies in the files, which job writes it, and what a token reads."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import make_snapshot, small_config, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries

from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry, preset_config
from dsv2mk.manifests.layout import PARTS, group_layout
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.jobs import job_extents, jobs
from dsv2mk.pipeline.pack import Packer
from dsv2mk.pipeline.snapshot import Reader, Snapshot


@st.composite
def groups_of_ranks(draw: st.DrawFn) -> tuple[Geometry, Topology]:
    geometry = draw(geometries())
    heads = geometry.num_attention_heads
    ranks = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return geometry, Topology(ranks=ranks)


@settings(max_examples=100)
@given(groups_of_ranks())
def test_every_unit_head_and_vocabulary_row_has_one_owner(pair: tuple[Geometry, Topology]) -> None:
    geometry, topology = pair
    layouts = group_layout(geometry, topology)
    ranks = topology.ranks
    assert [layout.rank for layout in layouts] == list(range(ranks))
    assert topology.heads(geometry) * ranks == geometry.num_attention_heads
    for layer in range(geometry.num_hidden_layers):
        if layer < geometry.first_k_dense_replace:
            units = math.ceil(geometry.intermediate_size / 128)
        else:  # (e * U + u), then the shared ones
            units = geometry.n_routed_experts * math.ceil(geometry.moe_intermediate_size / 128)
            width = geometry.n_shared_experts * geometry.moe_intermediate_size
            units += math.ceil(width / 128)
        places = Counter((topology.unit_rank(u), topology.unit_slot(u)) for u in range(units))
        assert all(topology.unit_rank(u) == u % ranks for u in range(units))
        dense = {
            (layout.rank, slot)
            for layout in layouts
            for slot in range(layout.unit_offsets[layer + 1] - layout.unit_offsets[layer])
        }
        assert set(places) == dense
        assert set(places.values()) == {1}
    rows = [r for rank in range(ranks) for r in range(*topology.vocab_range(geometry, rank))]
    assert rows == list(range(geometry.vocab_size))
    stored = topology.vocab_rows(geometry)
    for rank in range(ranks):
        start, end = topology.vocab_range(geometry, rank)
        assert end - start <= stored
        assert start == end or start == rank * stored  # where a reader looks for it


@settings(max_examples=100)
@given(groups_of_ranks())
def test_parts_have_no_holes_and_aligned_tensors(pair: tuple[Geometry, Topology]) -> None:
    item = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}
    for layout in group_layout(*pair):
        seen = 0
        for part in PARTS:
            position = 0
            for spec in layout.part(part):
                size = math.prod(spec.shape) * item[spec.dtype]
                assert (spec.part, spec.nbytes, spec.offset) == (part, size, position)
                assert size > 0
                assert spec.offset % math.gcd(size, 4096) == 0
                position += size
                seen += 1
        assert seen == len(layout.tensors)


@settings(max_examples=50)
@given(groups_of_ranks())
def test_layouts_hold_the_whole_checkpoint(pair: tuple[Geometry, Topology]) -> None:
    """Each checkpoint tensor is an origin, and stored elements are its elements plus padding."""
    geometry, topology = pair
    layouts = group_layout(geometry, topology)
    names = checkpoint_tensors(geometry)
    origins = {origin for layout in layouts for s in layout.tensors.values() for origin in s.origin}
    # A template stands for every tensor whose name differs in numbers only.
    general = {re.sub(r"\{\w+\}", "#", origin) for origin in origins}
    wanted = {re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names}
    if geometry.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    if geometry.num_moe_layers == 0 or geometry.first_k_dense_replace == 0:
        assert wanted <= general  # gate_up and down name dense and expert origins alike
    else:
        assert wanted == general

    def stored(name: str, once: bool = False) -> int:
        owners = layouts[:1] if once else layouts
        return sum(math.prod(o.tensors[name].shape) for o in owners if name in o.tensors)

    def of(*endings: str) -> int:
        found = (math.prod(shape) for name, shape in names.items() if name.endswith(endings))
        return sum(found)

    q_b = "self_attn.q_proj.weight" if geometry.q_lora_rank is None else "q_b_proj.weight"
    assert stored("q_b") == of(q_b)
    assert stored("w_uk") + stored("w_uv") == of("kv_b_proj.weight")
    assert stored("o") == of("o_proj.weight")
    assert stored("qkv_a", True) == of("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    assert stored("router", True) == of("mlp.gate.weight")
    assert stored("embed", True) == of("embed_tokens.weight")
    padding = topology.vocab_rows(geometry) * topology.ranks - geometry.vocab_size
    assert stored("lm_head") == (geometry.vocab_size + padding) * geometry.hidden_size
    units = sum(geometry.layer_units(layer) for layer in range(geometry.num_hidden_layers))
    assert stored("ffn_gate_up") == units * 2 * 128 * geometry.hidden_size
    assert stored("ffn_down") == units * 128 * geometry.hidden_size


@pytest.mark.parametrize("ranks", [-8, 0, 3, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="divisor of the 8 heads"):
        group_layout(Geometry.from_config(tiny_config()), Topology(ranks=ranks))


# ---- bytes of a token ----


def counted_token_bytes(g: Geometry, ranks: int) -> float:
    """Bytes that a token reads on a rank, from the model's description alone."""
    hidden, layers, moe = g.hidden_size, g.num_hidden_layers, g.num_moe_layers
    latent = g.kv_lora_rank + g.qk_rope_head_dim + (g.q_lora_rank or 0)
    norms = 2 * hidden + g.kv_lora_rank + (g.q_lora_rank or 0)
    head = (g.qk_nope_head_dim + g.qk_rope_head_dim) * (g.q_lora_rank or hidden)
    head += g.kv_lora_rank * (g.qk_nope_head_dim + g.v_head_dim) + hidden * g.v_head_dim
    attention = latent * hidden + norms + head * g.num_attention_heads // ranks
    lm_head = -(-g.vocab_size // ranks) * hidden
    bf16 = layers * attention + moe * g.n_routed_experts * hidden + lm_head + 2 * hidden
    expert = -(-g.moe_intermediate_size // 128)
    shared = -(-g.n_shared_experts * g.moe_intermediate_size // 128)
    active = (layers - moe) * -(-g.intermediate_size // 128)
    active += moe * (g.num_experts_per_tok * expert + shared)
    unit = 3 * 128 * hidden + 3 * 4 * -(-hidden // 128)
    return 2 * bf16 + active * unit / ranks + 4 * (layers + 1)


@pytest.mark.parametrize(("ranks", "shown"), [(8, "5.02"), (4, "8.64"), (2, "15.9"), (1, "30.4")])
def test_token_bytes_of_deepseek_v2(ranks: int, shown: str) -> None:
    geometry = Geometry.from_config(preset_config("deepseek-v2"))
    for layout in group_layout(geometry, Topology(ranks=ranks)):
        assert f"{layout.token_bytes() / 1e9:.3g}" == shown


@settings(max_examples=100)
@given(groups_of_ranks())
def test_token_bytes_equal_another_count(pair: tuple[Geometry, Topology]) -> None:
    geometry, topology = pair
    for layout in group_layout(geometry, topology):
        found = layout.token_bytes()
        assert abs(found - counted_token_bytes(geometry, topology.ranks)) <= 0.5


# ---- jobs ----


@settings(max_examples=100)
@given(groups_of_ranks())
def test_jobs_write_every_byte_once(pair: tuple[Geometry, Topology]) -> None:
    geometry, topology = pair
    names = jobs(geometry)
    assert names == ["embed", *(f"layer {i}" for i in range(geometry.num_hidden_layers)), "head"]
    for layout in group_layout(geometry, topology):
        for part in PARTS:
            extents = sorted(
                (start, end, job)
                for spec in layout.part(part)
                for job, start, end in job_extents(layout, spec)
            )
            position = 0
            for start, end, job in extents:
                assert start == position < end
                assert job in names
                position = end
            assert position == sum(spec.nbytes for spec in layout.part(part))


class Extents:
    """A sink that keeps where was written, as a count for each byte of each part."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str, int]] = Counter()

    def write(self, rank: int, part: str, offset: int, data: Any) -> None:
        self.counts.update((rank, part, at) for at in range(offset, offset + data.nbytes))


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 2, "q_lora_rank": None}])
def test_a_packer_writes_just_the_extents_of_its_job(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(
        hidden_size=10,
        vocab_size=13,
        intermediate_size=130,
        moe_intermediate_size=20,
        qk_nope_head_dim=2,
        qk_rope_head_dim=2,
        v_head_dim=3,
        kv_lora_rank=3,
        **{"q_lora_rank": 5, **changes},
    )
    snapshot = Snapshot.open(make_snapshot(tmp_path / "snapshot", config))
    layouts = group_layout(snapshot.geometry, Topology(ranks=3))
    for job in jobs(snapshot.geometry):
        sink = Extents()
        Packer(snapshot, layouts, Reader(), sink).run(job)
        expected: Counter[tuple[int, str, int]] = Counter()
        padding: set[tuple[int, str, int]] = set()
        for layout in layouts:
            for spec in layout.tensors.values():
                if spec.part == "replicated" and layout.rank > 0:
                    continue  # one file for all ranks
                for name, start, end in job_extents(layout, spec):
                    if name == job:
                        expected.update((layout.rank, spec.part, at) for at in range(start, end))
                if spec.name == "lm_head":  # rows past the vocabulary are left zero
                    first, last = layout.topology.vocab_range(layout.geometry, layout.rank)
                    at = range(spec.offset + (last - first) * spec.stride, spec.offset)
                    at = range(at.start, spec.offset + spec.nbytes)
                    padding |= {(layout.rank, spec.part, byte) for byte in at}
        for byte in padding:
            expected.pop(byte, None)
        assert expected
        assert sink.counts == expected
