"""An independent model: transformers in fp32 on weights that went through FP8."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers import YARN
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.reference import ReferenceDecoder

#: What differs from helpers.small_config: 3 layers, the first dense, 8 experts in 4 groups,
#: q_lora, mscale 1.0 and mscale_all_dim 0.707, 16 positions before YaRN, every width with an edge.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "edges": {},
    "whole-blocks": {
        "hidden_size": 384,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "vocab_size": 256,
    },
    "lite": {  # as V2-Lite: greedy, no q_lora, factor 1, tables of its own for theta
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "rope_theta": 500,
    },
    "no-yarn": {"rope_scaling": None},
    "no-yarn-no-q-lora": {"rope_scaling": None, "q_lora_rank": None},
    "yarn-without-mscale": {
        "rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k},
    },
    "yarn-ramp": {  # some pairs lie on the ramp between kept and slowed down
        "qk_rope_head_dim": 32,
        "rope_scaling": {**YARN, "mscale": 0.707, "original_max_position_embeddings": 64},
    },
    "no-dense-layer": {"first_k_dense_replace": 0, "moe_intermediate_size": 40},
    "only-dense-layers": {"first_k_dense_replace": 3},
    "tied": {"tie_word_embeddings": True, "n_shared_experts": 1},
    "eps": {"rms_norm_eps": 1e-5},
    "v2-routing": {
        "moe_intermediate_size": 136,
        "n_routed_experts": 32,
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 16.0,
    },
}


def hf_model(config: dict[str, Any]) -> DeepseekV2ForCausalLM:
    model = DeepseekV2ForCausalLM._from_config(
        DeepseekV2Config.from_dict(json.loads(json.dumps(config))),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    return model.eval()


def through_fp8(weight: Tensor) -> Tensor:
    """[rows, columns] quantised and dequantised, block by block, in float64."""
    wide, out = weight.double(), torch.empty(weight.shape, dtype=torch.float64)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = wide[row : row + 128, column : column + 128]
            scale = 2.0**-126
            while block.abs().max() > 448 * scale:
                scale *= 2
            rounded = (block / scale).float().to(torch.float8_e4m3fn)
            out[row : row + 128, column : column + 128] = rounded.double() * scale
    return out.float()


def stored_weights(path: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def dequantised(path: Path) -> dict[str, Tensor]:
    """All weights as the artifact should hold them, fp32, under their names in the checkpoint."""
    stored = stored_weights(path)
    out: dict[str, Tensor] = {}
    for name, weight in stored.items():
        is_ffn = ".mlp." in name and "_proj.weight" in name
        scale = stored.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            continue
        if scale is not None:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = weight.float() * wide[: weight.shape[0], : weight.shape[1]]
            out[name] = value if is_ffn else value.bfloat16().float()
        else:
            out[name] = through_fp8(weight) if is_ffn else weight.float()
    return out


def load_weights(model: DeepseekV2ForCausalLM, weights: dict[str, Tensor]) -> None:
    """Load by checkpoint names; transformers keeps a layer's experts in two tensors."""
    state = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(model.config.first_k_dense_replace, model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [
                    weights[f"{prefix}{expert}.{kind}_proj.weight"]
                    for expert in range(model.config.n_routed_experts)
                ]
            )
            for kind in ("gate", "up", "down")
        )
        state[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}down_proj"] = down
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)


def hf_logits(
    model: DeepseekV2ForCausalLM, tokens: list[int], cache: DynamicCache | None = None
) -> Tensor:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        return model(ids, use_cache=cache is not None, past_key_values=cache).logits[0]


def hf_reference(path: Path, **changes: Any) -> DeepseekV2ForCausalLM:
    """The model of a checkpoint, some fields of its config changed."""
    model = hf_model({**json.loads((path / "config.json").read_text()), **changes})
    load_weights(model, dequantised(path))
    return model


def count_experts(model: DeepseekV2ForCausalLM) -> list[set[int]]:
    """Filled, as the model runs, with the experts that each MoE layer chooses."""
    used: list[set[int]] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            used.append(chosen := set())

            def note(_: Any, __: Any, output: Any, chosen: set[int] = chosen) -> None:
                chosen.update(output[2].flatten().tolist())

            layer.mlp.gate.register_forward_hook(note)
    return used


def decode(artifact: Artifact, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    decoder = ReferenceDecoder(artifact, cache_dtype=dtype)
    return torch.stack([decoder.step(token) for token in tokens])


def differences(found: Tensor, expected: Tensor) -> Tensor:
    """[positions] largest difference over the largest logit."""
    assert found.shape == expected.shape
    return (found - expected).abs().amax(1) / expected.abs().amax(1)


def random_tokens(config: dict[str, Any], count: int, seed: int = 5) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(config["vocab_size"], (count,), generator=rng).tolist()
