"""Geometry, topology, layout, jobs and manifest: the arithmetic, and what is refused."""

import ast
import copy
import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv2mk.artifacts import console
from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.errors import ArtifactError, InputError
from dsv2mk.manifests.geometry import Geometry, Yarn, preset_config, preset_names
from dsv2mk.manifests.layout import PARTS, group_layout
from dsv2mk.manifests.manifest import (
    CHUNK_BYTES,
    FileEntry,
    Manifest,
    canonical_json,
    deciding_sections,
    describe_changes,
    make_manifest,
    parse_manifest,
)
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.build import CODE
from dsv2mk.pipeline.cli import cli
from dsv2mk.pipeline.jobs import job_extents, jobs
from dsv2mk.pipeline.pack import Packer
from dsv2mk.pipeline.snapshot import Reader, Snapshot
from tests.helpers import YARN, make_snapshot, small_config, tiny_config

ROOT = Path(__file__).resolve().parents[1]

# ---- geometry: values ----


def test_derived_values_of_the_presets() -> None:
    assert preset_names() == ["deepseek-v2", "deepseek-v2-lite", "deepseek-v2.5", "tiny"]
    v2, v25, lite, tiny = (
        Geometry.from_config(preset_config(name))
        for name in ("deepseek-v2", "deepseek-v2.5", "deepseek-v2-lite", "tiny")
    )
    assert v2.softmax_scale == pytest.approx(0.1147214, abs=5e-8)
    assert v2.rope_magnitude == 1.0
    m = 0.1 * math.log(40) + 1  # V2.5 has mscale = mscale_all_dim = 1
    assert v25.softmax_scale == pytest.approx(m * m / math.sqrt(192), rel=1e-14)
    assert (v2.qk_head_dim, v2.q_in, v2.qkv_a_rows, v2.cache_width) == (192, 1536, 2112, 576)
    assert (v2.expert_units, v2.shared_units, v2.layer_units(0)) == (12, 24, 96)
    assert (v2.routed_units, v2.layer_units(1), v2.num_moe_layers) == (1920, 1944, 59)
    assert (v2.experts_per_group, v2.shared_width) == (20, 3072)
    # No query latent; 10944 columns are 85.5 blocks; greedy routing is one group.
    assert (lite.q_in, lite.qkv_a_rows, lite.layer_units(0)) == (2048, 576, 86)
    assert (lite.q_lora_rank, lite.n_group, lite.topk_group) == (None, 1, 1)
    # Widths 192 and 320: the last unit of each is half empty.
    assert (tiny.expert_units, tiny.shared_units, tiny.layer_units(0)) == (2, 3, 3)


def test_parameters_of_deepseek_v2() -> None:
    """235.7 B parameters, 471.5 GB in bf16, counted from the checkpoint's tensors."""
    shapes = checkpoint_tensors(Geometry.from_config(preset_config("deepseek-v2"))).values()
    total = sum(math.prod(shape) for shape in shapes)
    assert f"{total / 1e9:.1f} {2 * total / 1e9:.1f}" == "235.7 471.5"


def test_inverse_frequencies_of_deepseek_v2() -> None:
    """Pairs that turn 32 and 1 times in 4096 positions are 10.5 and 22.5: a ramp from 10 to 23."""
    got = Geometry.from_config(preset_config("deepseek-v2")).inverse_frequencies()
    assert len(got) == 32
    for pair, slowed in ((0, 0), (10, 0), (11, 1 / 13), (16, 6 / 13), (23, 1), (31, 1)):
        plain = 1e4 ** (-pair / 32)
        assert got[pair] == pytest.approx(plain * (1 - slowed * 39 / 40), rel=1e-14)


def test_without_yarn_frequencies_are_plain() -> None:
    geometry = Geometry.from_config(tiny_config(rope_scaling=None, rope_theta=500.0))
    assert geometry.yarn is None
    assert (geometry.rope_magnitude, geometry.softmax_scale) == (1.0, 48**-0.5)
    plain = [500.0 ** (-i / 8) for i in range(8)]
    assert geometry.inverse_frequencies() == pytest.approx(plain, rel=1e-15)


def rope(**changes: Any) -> dict[str, Any]:
    """YaRN with mscale != mscale_all_dim; a change to None removes a key."""
    merged = {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def in_parameters(scaling: dict[str, Any], theta: float) -> dict[str, Any]:
    """The newer spelling of the same facts: everything in `rope_parameters`, theta as well."""
    renamed = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    return {"rope_parameters": {**renamed, "rope_theta": theta}}


ROPES = {
    "mscale differs": (rope(), 10000.0),
    "mscale only by default": (rope(mscale=None, mscale_all_dim=None), 10000.0),
    "no betas": (rope(beta_fast=None, beta_slow=None), 10000.0),
    "whole ramp": (rope(original_max_position_embeddings=4096), 50000.0),
    "narrow ramp": (rope(beta_fast=2, original_max_position_embeddings=64), 300.0),
    "factor 1": (rope(factor=1.0), 10000.0),
    "fraction": (rope(factor=2.5, beta_fast=31.5), 12345.6),
    "less than one turn": (rope(original_max_position_embeddings=1), 100.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ROPES)
@pytest.mark.parametrize("new_spelling", [False, True])
def test_rope_equals_transformers(case: str, new_spelling: bool) -> None:
    from transformers import DeepseekV2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

    scaling, theta = ROPES[case]
    config = small_config(rope_scaling=scaling, rope_theta=theta)
    if new_spelling:
        del config["rope_scaling"], config["rope_theta"]
        config |= in_parameters(scaling, theta)
    geometry = Geometry.from_config(config)

    reference = DeepseekV2Config.from_dict(copy.deepcopy(config))
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    attention = DeepseekV2Attention(reference, layer_idx=0)
    assert geometry.inverse_frequencies() == pytest.approx(frequencies.tolist(), rel=2e-6)
    assert geometry.rope_magnitude == pytest.approx(magnitude, rel=1e-14)
    assert geometry.softmax_scale == pytest.approx(attention.scaling, rel=1e-14)
    if case == "mscale differs":  # the case would prove nothing if the two were alike
        assert geometry.rope_magnitude > 1.1
        assert geometry.softmax_scale == pytest.approx((0.06 * math.log(40) + 1) ** 2 / 4)


@pytest.mark.parametrize("case", ROPES)
def test_both_spellings_of_rope_are_one(case: str) -> None:
    scaling, theta = ROPES[case]
    old = small_config(rope_scaling=scaling, rope_theta=theta)
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    read = Geometry.from_config(old)
    assert read == Geometry.from_config(new | in_parameters(scaling, theta))
    assert read == Geometry.from_config(old | in_parameters(scaling, theta))


# ---- geometry: refusals ----

GONE = object()
INTEGERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "n_group"),
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("topk_group", "first_k_dense_replace", "max_position_embeddings"),
)
REALS = ("routed_scaling_factor", "rms_norm_eps")
NOT_NUMBERS = (True, "4", float("nan"), float("inf"), [], {}, None, GONE)


def refused(config: dict[str, Any], word: str) -> InputError:
    with pytest.raises(InputError) as caught:
        Geometry.from_config({key: value for key, value in config.items() if value is not GONE})
    assert caught.value.exit_code == 10
    assert word in str(caught.value)
    return caught.value


def test_integer_fields_are_all_listed() -> None:
    """So that a new field cannot be left out of the tests below."""
    assert {f.name for f in fields(Geometry) if f.type is int} == set(INTEGERS)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, 4.0, 2.5, -1], ids=repr)
def test_a_bad_integer_is_refused_by_name(name: str, value: object) -> None:
    config = tiny_config()
    config[name] = value
    refused(config, name)


@pytest.mark.parametrize("name", [*sorted({*INTEGERS} - {"first_k_dense_replace"}), "q_lora_rank"])
def test_zero_is_refused_by_name(name: str) -> None:
    refused({**tiny_config(), name: 0}, name)


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, 10**400, -1.0], ids=lambda v: repr(v)[:8])
def test_a_bad_real_is_refused_by_name(name: str, value: object) -> None:
    refused({**tiny_config(), name: value}, name)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "normalised weights": ({"norm_topk_prob": True}, "norm_topk_prob"),
    "sigmoid": ({"scoring_func": "sigmoid"}, "scoring_func"),
    "sparse MoE layers": ({"moe_layer_freq": 2}, "moe_layer_freq"),
    "attention bias": ({"attention_bias": True}, "attention_bias"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "V3": ({"model_type": "deepseek_v3"}, "model_type"),
    "V3 routing": ({"topk_method": "noaux_tc"}, "topk_method"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act"),
    "a list for a word": ({"hidden_act": ["silu"]}, "hidden_act"),
    "grouped queries": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "q_lora_rank negative": ({"q_lora_rank": -96}, "q_lora_rank"),
    "q_lora_rank text": ({"q_lora_rank": "96"}, "q_lora_rank"),
    "q_lora_rank bool": ({"q_lora_rank": True}, "q_lora_rank"),
    "tied text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    "tied number": ({"tie_word_embeddings": 0}, "tie_word_embeddings"),
    "more dense layers than layers": ({"first_k_dense_replace": 5}, "first_k_dense_replace"),
    "odd rope": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    "ragged groups": ({"n_group": 3}, "n_group"),
    "more groups than there are": ({"topk_group": 5}, "topk_group"),
    "more experts than allowed": ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "theta 1": ({"rope_theta": 1}, "rope_theta"),
    "theta negative": ({"rope_theta": -10000.0}, "rope_theta"),
    "theta huge": ({"rope_theta": 10**400}, "rope_theta"),
    "theta text": ({"rope_theta": "10000"}, "rope_theta"),
    "rope list": ({"rope_scaling": [1]}, "rope_scaling"),
    "rope text": ({"rope_scaling": "yarn"}, "rope_scaling"),
    "rope false": ({"rope_scaling": False}, "rope_scaling"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
    "no type": ({"rope_scaling": rope(type=7)}, "7"),
    "attention factor": ({"rope_scaling": rope(attention_factor=1.1)}, "attention_factor"),
    "truncate": ({"rope_scaling": rope(truncate=False)}, "truncate"),
    "partial rotary": ({"rope_scaling": rope(partial_rotary_factor=0.5)}, "partial_rotary"),
    "mscale alone": ({"rope_scaling": rope(mscale_all_dim=None)}, "mscale_all_dim"),
    "mscale_all_dim alone": ({"rope_scaling": rope(mscale=None)}, "mscale"),
    "mscale 0": ({"rope_scaling": rope(mscale=0)}, "mscale"),
    "mscale_all_dim 0": ({"rope_scaling": rope(mscale_all_dim=0)}, "mscale_all_dim"),
    "mscale text": ({"rope_scaling": rope(mscale="1")}, "mscale"),
    "no factor": ({"rope_scaling": rope(factor=None)}, "factor"),
    "factor below 1": ({"rope_scaling": rope(factor=0.5)}, "factor"),
    "factor NaN": ({"rope_scaling": rope(factor=float("nan"))}, "factor"),
    "factor bool": ({"rope_scaling": rope(factor=True)}, "factor"),
    "original 0": ({"rope_scaling": rope(original_max_position_embeddings=0)}, "original_max"),
    "original real": ({"rope_scaling": rope(original_max_position_embeddings=64.5)}, "original"),
    "betas crossed": ({"rope_scaling": rope(beta_fast=1, beta_slow=32)}, "beta_slow"),
    "beta 0": ({"rope_scaling": rope(beta_slow=0)}, "beta_slow"),
    # Readers differ in which of the two they believe.
    "spellings disagree": (
        {"rope_scaling": rope(), "rope_parameters": rope(factor=20)},
        "rope_parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_is_refused_by_name(case: str) -> None:
    changes, word = REFUSED[case]
    refused({**tiny_config(), **changes}, word)


@pytest.mark.parametrize("case", ["normalised weights", "V3", "mscale alone", "theta huge"])
def test_the_command_refuses_a_config_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, word = REFUSED[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**tiny_config(), **changes}))
    out = tmp_path / "out"
    assert console.run(cli, ["synth", str(out), "--geometry", str(path)]) == 10
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert word in shown.err
    assert not out.exists()


def test_a_config_of_any_nesting_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    text = json.dumps({**tiny_config(), "model_type": 0})
    for depth in (*range(700, 1001, 3), 100_000):
        deep = "[" * depth + "]" * depth
        path.write_text(text.replace('"model_type": 0', f'"model_type": {deep}'))
        assert console.run(cli, ["synth", str(tmp_path / "out"), "--geometry", str(path)]) == 10
        assert len(capsys.readouterr().err.splitlines()) == 1


# ---- random geometries ----

_SIZE = st.integers(1, 300)
_REAL = st.floats(min_value=1e-300, max_value=1e300)


@st.composite
def yarns(draw: st.DrawFn) -> Yarn:
    slow = draw(st.floats(0.01, 100))
    return Yarn(
        factor=draw(st.floats(1, 1e6)),
        original_max_position_embeddings=draw(st.integers(1, 1 << 40)),
        beta_fast=slow * draw(st.floats(1, 100)),
        beta_slow=slow,
        mscale=draw(st.floats(1e-6, 100)),
        mscale_all_dim=draw(st.floats(1e-6, 100)),
    )


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    layers = draw(st.integers(1, 5))
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    topk_group = draw(st.integers(1, groups))
    return Geometry(
        vocab_size=draw(_SIZE),
        hidden_size=draw(_SIZE),
        num_hidden_layers=layers,
        num_attention_heads=draw(st.integers(1, 24)),
        q_lora_rank=draw(st.none() | _SIZE),
        kv_lora_rank=draw(_SIZE),
        qk_nope_head_dim=draw(_SIZE),
        qk_rope_head_dim=2 * draw(_SIZE),
        v_head_dim=draw(_SIZE),
        intermediate_size=draw(st.integers(1, 1000)),
        moe_intermediate_size=draw(st.integers(1, 500)),
        n_routed_experts=groups * per_group,
        n_shared_experts=draw(st.integers(1, 3)),
        num_experts_per_tok=draw(st.integers(1, topk_group * per_group)),
        n_group=groups,
        topk_group=topk_group,
        first_k_dense_replace=draw(st.integers(0, layers)),
        routed_scaling_factor=draw(_REAL),
        rms_norm_eps=draw(_REAL),
        max_position_embeddings=draw(st.integers(1, 1 << 40)),
        rope_theta=draw(st.floats(1.5, 1e12)),
        yarn=draw(st.none() | yarns()),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def groups_of_ranks(draw: st.DrawFn) -> tuple[Geometry, Topology]:
    geometry = draw(geometries())
    heads = geometry.num_attention_heads
    ranks = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return geometry, Topology(ranks=ranks)


@settings(max_examples=200, deadline=None)
@given(geometries())
def test_a_geometry_survives_its_json(geometry: Geometry) -> None:
    encoded = canonical_json(geometry.to_json())
    back = Geometry.from_json(json.loads(encoded))
    assert back == geometry
    assert canonical_json(back.to_json()) == encoded


# ---- topology and layout ----


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(groups_of_ranks())
def test_token_bytes_equal_another_count(pair: tuple[Geometry, Topology]) -> None:
    geometry, topology = pair
    for layout in group_layout(geometry, topology):
        found = layout.token_bytes()
        assert abs(found - counted_token_bytes(geometry, topology.ranks)) <= 0.5


@pytest.mark.parametrize("ranks", [-8, 0, 3, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="divisor of the 8 heads"):
        group_layout(Geometry.from_config(tiny_config()), Topology(ranks=ranks))


# ---- jobs ----


@settings(max_examples=100, deadline=None)
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


# ---- canonical JSON ----


def test_canonical_json_literally() -> None:
    data = {"b": [1, True, None, -2], "a": {"é": '\n"\\\u20ac', "": []}, "A": 10**20}
    assert canonical_json(data) == (
        b'{"A":100000000000000000000,"a":{"":[],"\xc3\xa9":"\\n\\"\\\\\xe2\x82\xac"},'
        b'"b":[1,true,null,-2]}'
    )


@pytest.mark.parametrize("bad", [1.0, [0.5], {"a": {"b": (float("nan"),)}}, {1: 2}, {None: 1}])
def test_canonical_json_refuses_floats_and_other_keys(bad: object) -> None:
    with pytest.raises(ValueError, match=r"float|not text"):
        canonical_json(bad)


# ---- manifest ----

GEOMETRY = Geometry.from_config(small_config())
HASHES = ("0123456789abcdef" * 2, "fedcba9876543210" * 2)


def example(ranks: int = 2) -> Manifest:
    topology = Topology(ranks=ranks)
    source = {"copied": {}, "files": {"model.safetensors": {"digest": HASHES[0], "size": 5}}}
    files = {
        layout.file_name(part): FileEntry(size=CHUNK_BYTES + 1, digest=HASHES[0], chunks=HASHES)
        for layout in group_layout(GEOMETRY, topology)
        for part in PARTS
    }
    files["config.json"] = FileEntry(size=0, digest=HASHES[1], chunks=())
    sections = deciding_sections(GEOMETRY, topology, source, {"pipeline/pack.py": "0" * 64})
    return make_manifest(sections, files, {"python": "3.11", "é": "ü"})


VALID = example().encoded
SHARD = "rank-00.ffn.safetensors"


@pytest.mark.parametrize("ranks", [1, 2, 24])
def test_a_manifest_survives_its_bytes(ranks: int) -> None:
    manifest = example(ranks)
    again = parse_manifest(manifest.encoded)
    assert again == manifest
    assert again.encoded == manifest.encoded
    assert (again.geometry, again.topology.ranks) == (GEOMETRY, ranks)
    assert len(again.layouts) == ranks
    entry = again.files["rank-00.replicated.safetensors"]
    assert entry == FileEntry(size=CHUNK_BYTES + 1, digest=HASHES[0], chunks=HASHES)


def damaged(encoded: bytes) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(encoded)
    assert caught.value.exit_code == 11
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


RAW: dict[str, bytes] = {
    "empty": b"",
    "cut short": VALID[:-1],
    "not UTF-8": VALID.replace("ü".encode(), b"\xfc"),
    "UTF-16": VALID.decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + VALID,
    "array": b"[]",
    "null": b"null",
    "new line": VALID + b"\n",
    "white space": VALID.replace(b'"schema":1', b'"schema": 1'),
    "escaped text": VALID.replace("ü".encode(), b"\\u00fc"),
    "lone surrogate": VALID.replace("ü".encode(), b"\\ud800"),
    "a key twice": VALID.replace(b'"schema":1', b'"schema":1,"schema":1'),
    "keys not sorted": json.dumps(json.loads(VALID)).encode(),
    "a float": VALID.replace(b'"size":5', b'"size":5.0'),
    "NaN": VALID.replace(b'"size":5', b'"size":NaN'),
    "a number of 5000 digits": VALID.replace(b'"size":5', b'"size":' + b"9" * 5000),
    "100000 brackets": b"[" * 100_000,
    "100000 objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_manifest_are_refused(case: str) -> None:
    assert RAW[case] != VALID
    damaged(RAW[case])


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at a path of keys (the last item is the value, GONE removes the key)."""
    *keys, last, value = path

    def change(data: Any) -> None:
        for key in keys:
            data = data[key]
        if value is GONE:
            del data[last]
        else:
            data[last] = value

    return change


ENTRY = {"size": 1, "digest": HASHES[0], "chunks": [HASHES[0]]}
FIRST = example().layouts[0].part("ffn")[0].name
MUTATIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "schema 2": put("schema", 2),
    "schema true": put("schema", True),
    "no schema": put("schema", GONE),
    "layout version 2": put("layout_version", 2),
    "layout version as text": put("layout_version", "1"),
    "another section": put("signature", {}),
    "scheme renamed": put("scheme", "name", "e4m3-block64"),
    "block of 64": put("scheme", "block", [64, 64]),
    "chunk size": put("chunk_bytes", CHUNK_BYTES // 2),
    "no shard": put("files", SHARD, GONE),
    "files a list": put("files", []),
    "file name ..": put("files", "..", ENTRY),
    "file name up": put("files", "../x", ENTRY),
    "file name in a folder": put("files", "a/b", ENTRY),
    "file name absolute": put("files", "/etc/passwd", ENTRY),
    "file name backslash": put("files", "a\\b", ENTRY),
    "file name empty": put("files", "", ENTRY),
    "file name hidden": put("files", ".a", ENTRY),
    "file name an option": put("files", "-rf", ENTRY),
    "file name with a line": put("files", "a\n", ENTRY),
    "file name NUL": put("files", "a\0b", ENTRY),
    "file name of itself": put("files", "manifest.json", ENTRY),
    "a chunk too few": put("files", SHARD, "chunks", [HASHES[0]]),
    "a chunk too many": put("files", SHARD, "chunks", [*HASHES, HASHES[0]]),
    "no chunks": put("files", SHARD, "chunks", []),
    "chunks null": put("files", SHARD, "chunks", None),
    "chunks a text": put("files", "a", {**ENTRY, "chunks": "f"}),
    "chunks an object": put("files", "a", {**ENTRY, "chunks": {HASHES[0]: 1}}),
    "hash in capitals": put("files", SHARD, "digest", HASHES[0].upper()),
    "hash too short": put("files", SHARD, "digest", HASHES[0][1:]),
    "hash a number": put("files", SHARD, "chunks", [HASHES[0], 7]),
    "hash with a line": put("files", SHARD, "digest", HASHES[0] + "\n"),
    "size negative": put("files", SHARD, "size", -1),
    "size bool": put("files", SHARD, {**ENTRY, "size": True}),
    "size text": put("files", SHARD, "size", "5"),
    "size huge": put("files", SHARD, "size", 1 << 70),
    "entry without size": put("files", SHARD, "size", GONE),
    "entry with more": put("files", SHARD, "mode", 0o644),
    "entry a list": put("files", SHARD, []),
    "tensor removed": put("tensors", "embed", GONE),
    "tensor added": put("tensors", "bias", {}),
    "tensor moved": put("tensors", "q_b", "ranks", "1", "offset", 4096),
    "tensor at false": put("tensors", FIRST, "ranks", "0", "offset", False),
    "tensor reshaped": put("tensors", "embed", "ranks", "0", "shape", [192, 301]),
    "tensor of another type": put("tensors", "embed", "dtype", "F16"),
    "tensors a list": put("tensors", []),
    "ranks 0": put("topology", "ranks", 0),
    "ranks negative": put("topology", "ranks", -2),
    "ranks bool": put("topology", "ranks", True),
    "ranks text": put("topology", "ranks", "2"),
    "ranks null": put("topology", "ranks", None),
    "ranks 5": put("topology", "ranks", 5),
    "other ranks": put("topology", "ranks", 4),
    "topology with more": put("topology", "hosts", 1),
    "topology empty": put("topology", {}),
    "topology a list": put("topology", ["ranks"]),
    "no geometry": put("geometry", None),
    "field missing": put("geometry", "vocab_size", GONE),
    "field added": put("geometry", "head_dim", 8),
    "heads 0": put("geometry", "num_attention_heads", 0),
    "width as text": put("geometry", "hidden_size", "192"),
    "width bool": put("geometry", "n_group", True),
    "tied a number": put("geometry", "tie_word_embeddings", 0),
    "tied": put("geometry", "tie_word_embeddings", True),
    "real respelled": put("geometry", "rms_norm_eps", "1e-6"),
    "real an integer": put("geometry", "rms_norm_eps", 1),
    "real NaN": put("geometry", "rms_norm_eps", "nan"),
    "real infinite": put("geometry", "routed_scaling_factor", "inf"),
    "real not a number": put("geometry", "rope_theta", "many"),
    # Values that config.json may not have either: decoding would divide by zero.
    "theta 1": put("geometry", "rope_theta", "1.0"),
    "theta negative": put("geometry", "rope_theta", "-10000.0"),
    "eps negative": put("geometry", "rms_norm_eps", "-1e-06"),
    "yarn a list": put("geometry", "yarn", []),
    "yarn with more": put("geometry", "yarn", "truncate", 1),
    "yarn factor": put("geometry", "yarn", "factor", "0.5"),
    "yarn original": put("geometry", "yarn", "original_max_position_embeddings", 0),
    "yarn beta": put("geometry", "yarn", "beta_slow", "0.0"),
    "code a list": put("code", []),
    "code a number": put("code", "pipeline/pack.py", 1),
    "tools null": put("tools", None),
    "source a list": put("source", []),
    **{f"no {name}": put(name, GONE) for name in sorted(json.loads(VALID))},
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_a_hostile_manifest_is_refused(case: str) -> None:
    data = json.loads(VALID)
    MUTATIONS[case](data)
    encoded = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert encoded != VALID
    damaged(encoded)


def test_nesting_near_the_limit_of_recursion_is_no_traceback() -> None:
    """Reading JSON, checking it and writing it again do not give up at the same depth."""
    refused_at = []
    for depth in range(700, 1001):
        deep = b"[" * depth + b"]" * depth
        try:
            parse_manifest(VALID.replace(b'"copied":{}', b'"copied":' + deep))
        except ArtifactError:
            refused_at.append(depth)
    assert refused_at == list(range(refused_at[0], 1001))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=1))))
def test_a_manifest_with_changed_bytes_is_refused_or_is_another(edits: list[Any]) -> None:
    encoded = bytearray(VALID)
    for at, byte in edits:
        encoded[at : at + 1] = byte
    try:
        manifest = parse_manifest(bytes(encoded))
    except ArtifactError:
        return
    assert manifest.encoded == encoded


def test_describe_changes() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "gone": None, "same": {"z": 0}, "long": "x" * 90}
    new = {"a": 2, "b": {"c": [1, 3], "d": None}, "new": {"y": 1}, "same": {"z": 0}, "long": "y"}
    assert describe_changes(old, new) == [
        "a: 1 -> 2",
        "b.c: [1, 2] -> [1, 3]",
        'b.d: "x" -> null',
        "gone: removed",
        "long: differs",
        "new: added",
    ]
    assert describe_changes(old, copy.deepcopy(old)) == []
    assert describe_changes({"é": 1}, {"é": "ü"}, "s") == ['s.é: 1 -> "ü"']


# ---- the shape of the code itself ----

FOLDERS = ("artifacts", "kernel", "manifests", "pipeline", "runner")
#: What a folder may import of ours, beside itself.
MAY_IMPORT = {
    "manifests": set[str](),
    "artifacts": {"manifests"},
    "pipeline": {"manifests", "artifacts", "kernel"},
    "kernel": {"manifests"},
    "runner": {"manifests", "artifacts"},
}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_packages_are_the_folders_with_an_init() -> None:
    settings_ = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tool = settings_["tool"]["setuptools"]
    hidden = (path for path in ROOT.rglob("__init__.py") if "dsv2mk" not in path.parts[-3:])
    found = sorted(
        "dsv2mk." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in hidden
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in ("build", "dist", "tests")
    )
    assert tool["packages"] == found
    assert found == [f"dsv2mk.{folder}" for folder in FOLDERS]
    assert not (ROOT / "__init__.py").exists()
    assert tool["package-dir"] == {"dsv2mk": "."}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert modules
    for path in modules:
        for name in imports(path):
            top, *rest = name.split(".")
            assert top not in FOLDERS, f"{path}: {name} is imported past the package"
            if top == "dsv2mk":
                assert rest[0] in MAY_IMPORT[folder] | {folder}, f"{path}: {name}"
            elif folder == "manifests":
                assert top in sys.stdlib_module_names, f"{path}: {name}"


def test_code_names_all_modules_that_decide_bytes() -> None:
    """CODE is what pack, container and jobs reach by import, without errors and package inits."""
    reached: set[str] = set()
    waiting = ["pipeline/pack.py", "artifacts/container.py", "pipeline/jobs.py"]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        for name in imports(ROOT / module):
            top, *rest = name.split(".")
            if top == "dsv2mk":
                # `from dsv2mk.a.b import c`, or `from dsv2mk.a import b`
                paths = ["/".join(rest[:count]) + ".py" for count in range(2, len(rest) + 1)]
                found = [path for path in paths if (ROOT / path).is_file()]
                assert found, f"{module}: {name}"
                waiting += found
    assert sorted(CODE) == sorted(reached - {"manifests/errors.py"})
    assert list(CODE) == sorted(set(CODE))
