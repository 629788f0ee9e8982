"""Random geometries, for hypothesis."""

from hypothesis import strategies as st

from dsv2mk.manifests.geometry import Geometry, Yarn

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
