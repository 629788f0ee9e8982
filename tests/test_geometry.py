"""What a config.json gives: derived values, rope in both spellings, and what is refused."""

import copy
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers import GONE, YARN, Call, slow_but, small_config, tiny_config
from hypothesis import given, settings
from strategies import geometries
from transformers import DeepseekV2Config

from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry, preset_config, preset_names
from dsv2mk.manifests.manifest import canonical_json

# ---- values ----


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


@pytest.mark.parametrize("case", slow_but(ROPES, "mscale differs"))
@pytest.mark.parametrize("new_spelling", [False, True])
def test_rope_equals_transformers(case: str, new_spelling: bool) -> None:
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


@settings(max_examples=200)
@given(geometries())
def test_a_geometry_survives_its_json(geometry: Geometry) -> None:
    encoded = canonical_json(geometry.to_json())
    back = Geometry.from_json(json.loads(encoded))
    assert back == geometry
    assert canonical_json(back.to_json()) == encoded


# ---- refusals ----

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
def test_the_command_refuses_a_config_in_one_line(case: str, tmp_path: Path, dsv2mk: Call) -> None:
    changes, word = REFUSED[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**tiny_config(), **changes}))
    out = tmp_path / "out"
    code, shown, err = dsv2mk("synth", out, "--geometry", path)
    assert (code, shown) == (10, "")
    assert len(err.splitlines()) == 1
    assert word in err
    assert not out.exists()


def test_a_config_of_any_nesting_is_refused(tmp_path: Path, dsv2mk: Call) -> None:
    path = tmp_path / "config.json"
    text = json.dumps({**tiny_config(), "model_type": 0})
    for depth in (*range(700, 1001, 3), 100_000):
        deep = "[" * depth + "]" * depth
        path.write_text(text.replace('"model_type": 0', f'"model_type": {deep}'))
        done = dsv2mk("synth", tmp_path / "out", "--geometry", path)
        assert done.code == 10
        assert len(done.err.splitlines()) == 1
