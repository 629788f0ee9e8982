"""The reference decoder against transformers; and that the comparison would notice mistakes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import YARN, make_artifact, slow_but, small_config
from reference_model import (
    GEOMETRIES,
    count_experts,
    decode,
    dequantised,
    differences,
    hf_logits,
    hf_model,
    hf_reference,
    load_weights,
    random_tokens,
    stored_weights,
)
from torch import Tensor
from transformers import DeepseekV2ForCausalLM, DynamicCache

pytestmark = pytest.mark.usefixtures("one_thread")

Mutant = Callable[[Path], DeepseekV2ForCausalLM]
POSITIONS = 72
MSCALE = 0.1 * math.log(40)  # of YARN's factor: m(x) = MSCALE * x + 1
_INTO_A_NORM = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")


def save_random(path: Path, config: dict[str, Any], max_shard_size: str) -> None:
    """A bf16 checkpoint as transformers writes it, of activations that are neither tiny nor huge.

    Where rms_norm_eps is not the latent norms' 1e-6, what goes into either kind of norm is so
    small that its epsilon counts.
    """
    model = hf_model(config)
    rng = torch.Generator().manual_seed(11)
    small = 0.005 if config["rms_norm_eps"] != 1e-6 else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=rng)
            if values.ndim == 1:
                values = 1 + 0.3 * values
            elif "embed" in name:
                values *= small
            else:
                values /= math.sqrt(values.shape[-1])
            if name.endswith(tuple(f"{proj}.weight" for proj in _INTO_A_NORM)):
                values *= small
            elif name.endswith("experts.down_proj"):
                values *= small * 4 / config["routed_scaling_factor"]
            elif name.endswith(("gate.weight", "q_b_proj.weight", "q_proj.weight")):
                values *= 2
            parameter.copy_(values)
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size=max_shard_size)


class RoundedCache(DynamicCache):
    """Keeps what the latent cache in bf16 keeps."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key.bfloat16().float(), value.bfloat16().float(), *args, **kwargs)


@pytest.mark.parametrize("name", slow_but(GEOMETRIES, "edges", "lite"))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, index = small_config(**GEOMETRIES[name]), list(GEOMETRIES).index(name)
    snapshot, tokens = tmp_path / "snapshot", random_tokens(config, POSITIONS)
    several = index % 2 == 0
    save_random(snapshot, config, "500KB" if several else "5GB")
    assert (len(list(snapshot.glob("*.safetensors"))) > 1) == several
    model = hf_reference(snapshot)
    used = count_experts(model)
    expected = hf_logits(model, tokens)
    assert len(used) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert all(len(experts) == config["n_routed_experts"] for experts in used)
    assert expected.argmax(1).unique().numel() > POSITIONS / 3  # not a model of one answer

    artifact = make_artifact(snapshot, 1 + index % 3, tmp_path / "artifact")
    found = decode(artifact, tokens)
    exact = differences(found, expected)
    assert float(exact.max()) < 1e-4
    assert torch.equal(found.argmax(1), expected.argmax(1))

    # A cache in bf16 is a rounding that transformers can repeat; where a value lies between two
    # bf16 numbers either may be taken, so this bound is wider and a few positions may pass it.
    rounded = decode(artifact, tokens, torch.bfloat16)
    same = differences(rounded, hf_logits(model, tokens, RoundedCache()))
    assert float(same.median()) < 2e-3
    assert int((same > 5e-3).sum()) <= 3
    loss = differences(rounded, found)
    assert 1e-3 < float(loss.median()) < 0.03
    print(
        f"{name}: fp32 cache {exact.max():.1e}; bf16 cache {same.max():.1e} from the same "
        f"rounding in transformers, {loss.max():.1e} (median {loss.median():.1e}) from fp32"
    )


def _rope(**changes: Any) -> Mutant:
    """Another softmax scale or rope, the factor on cos and sin kept unless it is named."""
    factor = {"attention_factor": (MSCALE + 1) / (MSCALE * 0.707 + 1)}
    yarn = {**YARN, "rope_theta": 10000, "rope_type": "yarn", **factor, **changes}
    del yarn["type"]
    return lambda path: hf_reference(path, rope_parameters=yarn)


def _rope_halves(path: Path) -> DeepseekV2ForCausalLM:
    """Pairs (i, i + half) instead of (2i, 2i + 1)."""
    model = hf_reference(path)
    config, weights = model.config, dequantised(path)
    width = config.qk_rope_head_dim
    halves = [*range(0, width, 2), *range(1, width, 2)]
    for name, weight in weights.items():
        if name.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            heads = config.num_attention_heads if "q_b" in name else 1
            rope = weight.view(heads, -1, weight.shape[1])[:, -width:]
            rope.copy_(rope[:, halves].clone())
    load_weights(model, weights)
    return model


def _latent_eps(path: Path) -> DeepseekV2ForCausalLM:
    model = hf_reference(path)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
    return model


def _not_quantised(path: Path) -> DeepseekV2ForCausalLM:
    model = hf_reference(path)
    load_weights(model, {name: value.float() for name, value in stored_weights(path).items()})
    return model


#: Mistakes that the comparison has to notice: (geometry, the model that makes it).
MUTANTS: dict[str, tuple[str, Mutant]] = {
    "mscale-for-mscale-all-dim": ("edges", _rope(mscale_all_dim=1.0)),
    "no-softmax-factor": ("edges", _rope(mscale_all_dim=None)),
    "no-rope-magnitude": ("edges", _rope(attention_factor=1.0)),
    "ramp-of-another-length": ("yarn-ramp", _rope(mscale=0.707, attention_factor=1.0)),
    "no-yarn": ("edges", lambda path: hf_reference(path, rope_parameters=None)),
    "rope-halves": ("edges", _rope_halves),
    "eps-of-other-norms": ("eps", lambda path: hf_reference(path, rms_norm_eps=1e-6)),
    "eps-of-latent-norms": ("eps", _latent_eps),
    "not-quantised": ("edges", _not_quantised),
    "greedy": ("edges", lambda path: hf_reference(path, topk_method="greedy")),
    "not-scaled": ("v2-routing", lambda path: hf_reference(path, routed_scaling_factor=1.0)),
}


@pytest.mark.parametrize("name", slow_but(MUTANTS, "no-rope-magnitude", "not-quantised", "greedy"))
def test_the_comparison_would_notice(name: str, tmp_path: Path) -> None:
    geometry, mutant = MUTANTS[name]
    config = small_config(**GEOMETRIES[geometry])
    save_random(tmp_path / "snapshot", config, "5GB")
    tokens = random_tokens(config, POSITIONS)
    right = hf_logits(hf_reference(tmp_path / "snapshot"), tokens)
    change = differences(hf_logits(mutant(tmp_path / "snapshot"), tokens), right)
    assert float(change[1:].median()) > 1e-3
    if "rope" in name or "mscale" in name or "factor" in name:
        assert float(change[0]) < 1e-5  # one position has nothing to weigh: it always looks right
