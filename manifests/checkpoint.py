"""Names and shapes of the tensors of a Hugging Face DeepSeek-V2 checkpoint."""

import re

from dsv2mk.manifests.geometry import Geometry

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

#: Tensors that some checkpoints carry and no decoder needs.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_LINEAR = re.compile(r"model\.layers\.\d+\..*(_proj|_proj_with_mqa)\.weight")


def layer_prefix(layer: int) -> str:
    """Common start of a layer's tensor names."""
    return f"model.layers.{layer}."


def is_linear(name: str) -> bool:
    """Whether a block-FP8 checkpoint stores this tensor in FP8 (the router is not a `_proj`)."""
    return _LINEAR.fullmatch(name) is not None


def scale_name(name: str) -> str:
    """Name of the block scales of an FP8 weight."""
    return name + "_scale_inv"


def ffn_weights(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The three weights of one FFN: gate and up [width, H], down [H, width]."""
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def attention_weights(geometry: Geometry, layer: int) -> dict[str, tuple[int, ...]]:
    """A layer's attention tensors and both of its norms."""
    g, p = geometry, layer_prefix(layer)
    a = f"{p}self_attn."
    q_rows = g.num_attention_heads * g.qk_head_dim
    out: dict[str, tuple[int, ...]] = {
        f"{p}input_layernorm.weight": (g.hidden_size,),
        f"{p}post_attention_layernorm.weight": (g.hidden_size,),
    }
    if g.q_lora_rank is None:
        out[f"{a}q_proj.weight"] = (q_rows, g.hidden_size)
    else:
        out[f"{a}q_a_proj.weight"] = (g.q_lora_rank, g.hidden_size)
        out[f"{a}q_a_layernorm.weight"] = (g.q_lora_rank,)
        out[f"{a}q_b_proj.weight"] = (q_rows, g.q_lora_rank)
    out[f"{a}kv_a_proj_with_mqa.weight"] = (g.cache_width, g.hidden_size)
    out[f"{a}kv_a_layernorm.weight"] = (g.kv_lora_rank,)
    out[f"{a}kv_b_proj.weight"] = (
        g.num_attention_heads * (g.qk_nope_head_dim + g.v_head_dim),
        g.kv_lora_rank,
    )
    out[f"{a}o_proj.weight"] = (g.hidden_size, g.num_attention_heads * g.v_head_dim)
    return out


def feed_forward_weights(geometry: Geometry, layer: int) -> dict[str, tuple[int, ...]]:
    """A layer's FFN tensors: dense, or router, routed experts and shared experts."""
    g, p = geometry, f"{layer_prefix(layer)}mlp."
    if g.is_dense(layer):
        return ffn_weights(p, g.intermediate_size, g.hidden_size)
    out: dict[str, tuple[int, ...]] = {f"{p}gate.weight": (g.n_routed_experts, g.hidden_size)}
    for expert in range(g.n_routed_experts):
        out |= ffn_weights(f"{p}experts.{expert}.", g.moe_intermediate_size, g.hidden_size)
    return out | ffn_weights(f"{p}shared_experts.", g.shared_width, g.hidden_size)


def checkpoint_tensors(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this geometry, by name, in the order of the data flow.

    lm_head is named also where embeddings are tied; such a checkpoint may leave it out.
    """
    out: dict[str, tuple[int, ...]] = {EMBED: (geometry.vocab_size, geometry.hidden_size)}
    for layer in range(geometry.num_hidden_layers):
        out |= attention_weights(geometry, layer)
        out |= feed_forward_weights(geometry, layer)
    out[FINAL_NORM] = (geometry.hidden_size,)
    out[LM_HEAD] = (geometry.vocab_size, geometry.hidden_size)
    return out
