"""The table of every tensor in a rank's artifact: one source of truth for all that read or write.

Legend of shapes: L layers, M layers with a router, V vocabulary, H hidden, E routed experts, N the
rank's units over all layers, h the rank's heads, v its vocabulary rows, B = ceil(H / 128).

| part        | tensor            | shape                        | owner      |
|-------------|-------------------|------------------------------|------------|
| replicated  | embed             | [V, H]                       | all        |
|             | attn_norm         | [L, H]                       | all        |
|             | qkv_a             | [L, q_lora+kv_lora+rope, H]  | all        |
|             | q_a_norm          | [L, q_lora]                  | all        |
|             | kv_a_norm         | [L, kv_lora]                 | all        |
|             | ffn_norm          | [L, H]                       | all        |
|             | router            | [M, E, H]                    | all        |
|             | final_norm        | [H]                          | all        |
| partitioned | q_b               | [L, h, nope+rope, q_in]      | heads      |
|             | w_uk              | [L, h, kv_lora, nope]        | heads      |
|             | w_uv              | [L, h, v_dim, kv_lora]       | heads      |
|             | o                 | [L, H, h * v_dim]            | heads      |
|             | lm_head           | [v, H]                       | vocabulary |
| ffn         | ffn_gate_up       | [N, 128, 2, H] E4M3          | units      |
|             | ffn_gate_up_scale | [N, 2, B] fp32               | units      |
|             | ffn_down          | [N, H, 128] E4M3             | units      |
|             | ffn_down_scale    | [N, B] fp32                  | units      |
|             | ffn_unit_offset   | [L + 1] int32                | units      |

Every matrix is output rows by contiguous reduction columns: W_UK is transposed for that, and a
unit's gate row stands beside its up row, so that one lane meets both. Rope columns keep the
checkpoint's order, in which adjacent values are a pair. Layer l's units are the slots
[ffn_unit_offset[l], ffn_unit_offset[l + 1]).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from dsv2mk.manifests.checkpoint import EMBED, FINAL_NORM, LM_HEAD
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.manifests.topology import Topology

#: Raised whenever the place, order or meaning of a stored byte changes.
LAYOUT_VERSION = 1
#: Parts of a shard, a file each.
PARTS = ("replicated", "partitioned", "ffn")
#: Where large tensors start, so that a mapping can be handed on page by page.
PAGE = 4096

ITEM_SIZE = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}

_LAYER = "model.layers.{layer}."
_FFNS = ("mlp.", "mlp.experts.{expert}.", "mlp.shared_experts.")


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """One tensor of a rank's shard."""

    name: str
    part: str
    dtype: str  # as safetensors spells it
    axis: str  # what axis 0 runs over: layer, moe_layer, unit, or other
    shape: tuple[int, ...]
    origin: tuple[str, ...]  # checkpoint tensors that it is made of
    offset: int = 0  # from the start of the file's data

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]

    @property
    def stride(self) -> int:
        """Bytes of one entry along axis 0."""
        return self.nbytes // self.shape[0]

    @property
    def owner(self) -> str:
        """By what the tensor is dealt to ranks: all (replicated), heads, vocabulary or units."""
        if self.name == "lm_head":
            return "vocabulary"
        return {"replicated": "all", "partitioned": "heads", "ffn": "units"}[self.part]


@dataclass(kw_only=True, frozen=True)
class RankLayout:
    """All tensors of one rank, placed in the files of its shard."""

    geometry: Geometry
    topology: Topology
    rank: int

    @cached_property
    def unit_offsets(self) -> tuple[int, ...]:
        """[L + 1] first slot of each layer's units, and their total."""
        counts = (
            self.topology.rank_units(self.geometry.layer_units(layer), self.rank)
            for layer in range(self.geometry.num_hidden_layers)
        )
        return tuple(accumulate(counts, initial=0))

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """By name, in the order of the table above; empty tensors are left out."""
        specs = [spec for spec in self._table() if spec.nbytes]
        placed: dict[str, TensorSpec] = {}
        for part in PARTS:
            # Sizes divisible by a higher power of two (a page at most) go first. So every tensor
            # starts on the largest power of two that divides its size, and there are no holes.
            own = sorted(
                (spec for spec in specs if spec.part == part),
                key=lambda spec: -min(spec.nbytes & -spec.nbytes, PAGE),
            )
            offset = 0
            for spec in own:
                placed[spec.name] = replace(spec, offset=offset)
                offset += spec.nbytes
        return {spec.name: placed[spec.name] for spec in specs}

    def part(self, part: str) -> list[TensorSpec]:
        """Tensors of one file in the order of their offsets."""
        own = (spec for spec in self.tensors.values() if spec.part == part)
        return sorted(own, key=lambda spec: spec.offset)

    def file_name(self, part: str) -> str:
        """Name of the file that holds a part of this rank's shard."""
        return f"rank-{self.rank:02d}.{part}.safetensors"

    def metadata(self, part: str) -> dict[str, str]:
        """`__metadata__` of a part's file. A replicated part is the same file for all ranks."""
        out = {"format": "dsv2mk", "layout_version": str(LAYOUT_VERSION), "part": part}
        if part != "replicated":
            out |= {"rank": str(self.rank), "ranks": str(self.topology.ranks)}
        return out

    def token_bytes(self) -> int:
        """Weight bytes that one decoded token reads on a rank, in the mean over routing, rounded.

        One row of embed; everything else once, except that of the routed units only those of
        num_experts_per_tok experts are read. The cache is not counted: it grows with the context.
        """
        g = self.geometry
        active = sum(
            g.layer_units(layer)
            if g.is_dense(layer)
            else g.num_experts_per_tok * g.expert_units + g.shared_units
            for layer in range(g.num_hidden_layers)
        )
        unit_bytes = 3 * BLOCK * g.hidden_size + 3 * -(-g.hidden_size // BLOCK) * ITEM_SIZE["F32"]
        fixed = sum(
            spec.stride if spec.name == "embed" else spec.nbytes
            for spec in self.tensors.values()
            if spec.axis != "unit"
        )
        return fixed + round(active * unit_bytes / self.topology.ranks)

    def _table(self) -> list[TensorSpec]:
        g, heads = self.geometry, self.topology.heads(self.geometry)
        layers, moe, units = g.num_hidden_layers, g.num_moe_layers, self.unit_offsets[-1]
        hidden, blocks = g.hidden_size, -(-g.hidden_size // BLOCK)
        q_a, q_b = ("q_a_proj", "q_b_proj") if g.q_lora_rank else (None, "q_proj")

        def spec(
            name: str, part: str, dtype: str, axis: str, shape: list[int], *origin: str
        ) -> TensorSpec:
            return TensorSpec(
                name=name, part=part, dtype=dtype, axis=axis, shape=tuple(shape), origin=origin
            )

        def replicated(name: str, axis: str, shape: list[int], *origin: str) -> TensorSpec:
            return spec(name, "replicated", "BF16", axis, shape, *origin)

        def partitioned(name: str, axis: str, shape: list[int], *origin: str) -> TensorSpec:
            return spec(name, "partitioned", "BF16", axis, shape, *origin)

        def layer(*names: str | None) -> list[str]:
            return [f"{_LAYER}{name}.weight" for name in names if name]

        def attention(*names: str | None) -> list[str]:
            return layer(*(name and f"self_attn.{name}" for name in names))

        gate_up = layer(*(f"{ffn}{name}_proj" for ffn in _FFNS for name in ("gate", "up")))
        down = layer(*(f"{ffn}down_proj" for ffn in _FFNS))
        lm_head = EMBED if g.tie_word_embeddings else LM_HEAD
        q_b_shape = [layers, heads, g.qk_head_dim, g.q_in]
        return [
            replicated("embed", "other", [g.vocab_size, hidden], EMBED),
            replicated("attn_norm", "layer", [layers, hidden], *layer("input_layernorm")),
            replicated(
                "qkv_a",
                "layer",
                [layers, g.qkv_a_rows, hidden],
                *attention(q_a, "kv_a_proj_with_mqa"),
            ),
            replicated(
                "q_a_norm", "layer", [layers, g.q_lora_rank or 0], *attention("q_a_layernorm")
            ),
            replicated(
                "kv_a_norm", "layer", [layers, g.kv_lora_rank], *attention("kv_a_layernorm")
            ),
            replicated("ffn_norm", "layer", [layers, hidden], *layer("post_attention_layernorm")),
            replicated(
                "router", "moe_layer", [moe, g.n_routed_experts, hidden], *layer("mlp.gate")
            ),
            replicated("final_norm", "other", [hidden], FINAL_NORM),
            partitioned("q_b", "layer", q_b_shape, *attention(q_b)),
            partitioned(
                "w_uk",
                "layer",
                [layers, heads, g.kv_lora_rank, g.qk_nope_head_dim],
                *attention("kv_b_proj"),
            ),
            partitioned(
                "w_uv",
                "layer",
                [layers, heads, g.v_head_dim, g.kv_lora_rank],
                *attention("kv_b_proj"),
            ),
            partitioned("o", "layer", [layers, hidden, heads * g.v_head_dim], *attention("o_proj")),
            partitioned("lm_head", "other", [self.topology.vocab_rows(g), hidden], lm_head),
            spec("ffn_gate_up", "ffn", "F8_E4M3", "unit", [units, BLOCK, 2, hidden], *gate_up),
            spec("ffn_gate_up_scale", "ffn", "F32", "unit", [units, 2, blocks], *gate_up),
            spec("ffn_down", "ffn", "F8_E4M3", "unit", [units, hidden, BLOCK], *down),
            spec("ffn_down_scale", "ffn", "F32", "unit", [units, blocks], *down),
            spec("ffn_unit_offset", "ffn", "I32", "other", [layers + 1]),
        ]


def group_layout(geometry: Geometry, topology: Topology) -> list[RankLayout]:
    """Layouts of all ranks. Raises InputError if the geometry cannot be dealt to them."""
    topology.check(geometry)
    return [
        RankLayout(geometry=geometry, topology=topology, rank=rank)
        for rank in range(topology.ranks)
    ]
