"""What the shards of a checkpoint should hold, from the published layout and ownership formula.

Shards and checkpoints are read with the `safetensors` library alone.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import INDEX, SINGLE, make_artifact, small_config
from reference_fp8 import BLOCK, E4M3, reference_dequantise, reference_quantise
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]

#: One layer with a dense FFN, one with experts, edge blocks in every direction.
SMALL = small_config(
    num_hidden_layers=2,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    vocab_size=9,
)


# ---- checkpoints ----


def read_checkpoint(path: Path) -> Tensors:
    """All tensors that the index names, or those of the only file."""
    if not (path / INDEX).exists():
        return load_file(path / SINGLE)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    files = {file: load_file(path / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


def write_checkpoint(
    path: Path, tensors: Tensors, config: Config, weight_map: Mapping[str, str] | None = None
) -> Path:
    """A checkpoint of one file, or of the files of a weight map."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if weight_map is None:
        save_file(tensors, path / SINGLE)
        return path
    for file in set(weight_map.values()):
        (path / file).parent.mkdir(exist_ok=True)
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": dict(weight_map)}))
    return path


def copy_of(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# ---- what the shards should hold ----


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    """bf16 as uint16 and E4M3 as uint8; others as they are."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def units_of(width: int) -> int:
    return -(-width // BLOCK)


class Checkpoint:
    """Tensors and config of a checkpoint, and what of it belongs into a shard."""

    def __init__(self, tensors: Tensors, config: Config) -> None:
        self.tensors, self.config = tensors, config
        self._blocks: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def plain(self, name: str) -> np.ndarray:
        """bf16 bits."""
        tensor = self.tensors[name]
        if tensor.dtype != torch.float8_e4m3fn:
            return as_bits(tensor.to(torch.bfloat16))
        scales = as_bits(self.tensors[name + "_scale_inv"]).repeat(BLOCK, 0)[: len(tensor)]
        return reference_dequantise(as_bits(tensor), scales)

    def blocks(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """E4M3 bytes and block scales, padded to whole blocks of rows and of columns."""
        if name not in self._blocks:
            tensor = self.tensors[name]
            if tensor.dtype == torch.float8_e4m3fn:
                codes, scales = as_bits(tensor), as_bits(self.tensors[name + "_scale_inv"])
            else:
                codes, scales = reference_quantise(tensor.double().numpy())
            self._blocks[name] = (codes, scales)
        return self._blocks[name]

    def ffns(self, layer: int) -> list[tuple[str, int]]:
        """(name prefix, intermediate width) of a layer's FFNs in the order of their units."""
        c, prefix = self.config, f"model.layers.{layer}.mlp."
        if layer < c["first_k_dense_replace"]:
            return [(prefix, c["intermediate_size"])]
        width = c["moe_intermediate_size"]
        routed = [(f"{prefix}experts.{e}.", width) for e in range(c["n_routed_experts"])]
        return [*routed, (f"{prefix}shared_experts.", c["n_shared_experts"] * width)]

    def owned_units(self, layer: int, ranks: int, rank: int) -> Iterator[tuple[str, int]]:
        """(FFN, unit) of a rank: those with (e * U + u) mod R == rank, in that order.

        Shared experts come after the routed ones, a dense FFN is e = 0.
        """
        each = units_of(self.ffns(layer)[0][1])
        for e, (prefix, width) in enumerate(self.ffns(layer)):
            for u in range(units_of(width)):
                if (e * each + u) % ranks == rank:
                    yield prefix, u

    def unit(self, prefix: str, u: int) -> dict[str, np.ndarray]:
        """One unit in stored form, zero where it is padded."""
        own, hidden = slice(u * BLOCK, (u + 1) * BLOCK), self.config["hidden_size"]
        gate_up, down = np.zeros((BLOCK, 2, hidden), np.uint8), np.zeros((hidden, BLOCK), np.uint8)
        gate_up_scale = []
        for which, name in enumerate(("gate_proj", "up_proj")):
            codes, scales = self.blocks(f"{prefix}{name}.weight")
            gate_up[: len(codes[own]), which] = codes[own]
            gate_up_scale.append(scales[u])
        codes, scales = self.blocks(f"{prefix}down_proj.weight")
        down[:, : codes[:, own].shape[1]] = codes[:, own]
        return {
            "ffn_gate_up": gate_up,
            "ffn_gate_up_scale": np.array(gate_up_scale, np.float32),
            "ffn_down": down,
            "ffn_down_scale": scales[:, u].astype(np.float32),
        }

    def shard(self, ranks: int, rank: int) -> dict[str, np.ndarray]:
        """Every tensor of a rank's shard."""
        c = self.config
        layers, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
        heads, nope, v_dim = (
            c["num_attention_heads"] // ranks,
            c["qk_nope_head_dim"],
            c["v_head_dim"],
        )
        own = slice(rank * heads, (rank + 1) * heads)
        q_lora = c["q_lora_rank"] is not None

        def stack(name: str, first: int = 0) -> np.ndarray:
            """[layers, ...] of a tensor that each layer has."""
            return np.stack(
                [self.plain(f"model.layers.{i}.{name}.weight") for i in range(first, layers)]
            )

        def by_head(name: str) -> np.ndarray:
            """[layers, own heads, rows of a head, columns]."""
            rows = stack(name)
            return rows.reshape(layers, c["num_attention_heads"], -1, rows.shape[2])[:, own]

        kv_b, kv_a = by_head("self_attn.kv_b_proj"), stack("self_attn.kv_a_proj_with_mqa")
        o = stack("self_attn.o_proj")
        head = self.plain(
            "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        )
        rows = -(-len(head) // ranks)
        lm_head = np.zeros((rows, head.shape[1]), np.uint16)
        mine = head[rank * rows : (rank + 1) * rows]
        lm_head[: len(mine)] = mine
        out = {
            "embed": self.plain("model.embed_tokens.weight"),
            "attn_norm": stack("input_layernorm"),
            "qkv_a": np.concatenate([stack("self_attn.q_a_proj"), kv_a], 1) if q_lora else kv_a,
            "kv_a_norm": stack("self_attn.kv_a_layernorm"),
            "ffn_norm": stack("post_attention_layernorm"),
            "final_norm": self.plain("model.norm.weight"),
            "q_b": by_head("self_attn.q_b_proj" if q_lora else "self_attn.q_proj"),
            "w_uk": kv_b[:, :, :nope].transpose(0, 1, 3, 2),
            "w_uv": kv_b[:, :, nope:],
            "o": o[:, :, own.start * v_dim : own.stop * v_dim],
            "lm_head": lm_head,
        }
        if q_lora:
            out["q_a_norm"] = stack("self_attn.q_a_layernorm")
        if dense < layers:
            out["router"] = stack("mlp.gate", dense)
        offsets, units = [0], []
        for layer in range(layers):
            units += [self.unit(*unit) for unit in self.owned_units(layer, ranks, rank)]
            offsets.append(len(units))
        if units:  # a tensor without elements is left out
            out |= {name: np.stack([unit[name] for unit in units]) for name in units[0]}
        return {**out, "ffn_unit_offset": np.array(offsets, np.int32)}


REPLICATED = {
    *("embed", "attn_norm", "qkv_a", "q_a_norm", "kv_a_norm", "ffn_norm", "router", "final_norm"),
}


def read_shard(path: Path, rank: int) -> dict[str, np.ndarray]:
    """All tensors of a rank; each stands in the file of its part."""
    out: dict[str, np.ndarray] = {}
    for part in ("replicated", "partitioned", "ffn"):
        with safe_open(path / f"rank-{rank:02d}.{part}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert name not in out
                own = "ffn" if name.startswith("ffn_") else "partitioned"
                replicated = name in REPLICATED
                assert part == ("replicated" if replicated else own), name
                out[name] = as_bits(file.get_tensor(name))
    return out


# ---- an FP8 checkpoint of which a part is not ----


def with_plain(
    fp8: tuple[Tensors, Config], names: list[str], listed: object
) -> tuple[Tensors, Config]:
    """An FP8 checkpoint in which some linear weights are bf16, and what its config says of that."""
    tensors, config = copy_of(fp8[0]), json.loads(json.dumps(fp8[1]))
    source = Checkpoint(*fp8)
    for name in names:
        tensors[name] = torch.from_numpy(source.plain(name)).view(torch.bfloat16)
        del tensors[name + "_scale_inv"]
    config["quantization_config"]["modules_to_not_convert"] = listed
    return tensors, config


PLAIN = ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"]


# ---- from the shards back to the checkpoint ----


def bits_to_double(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Coverage:
    """Checkpoint tensors put together again, with a count of how often each element was seen."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.values = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
        self.counts = {name: np.zeros(shape, int) for name, shape in shapes.items()}

    def put(self, name: str, where: Any, values: np.ndarray) -> None:
        """Values must fit the place exactly: nothing is broadcast."""
        assert self.values[name][where].shape == values.shape, name
        self.values[name][where] = values
        self.counts[name][where] += 1


def invert(shards: list[dict[str, np.ndarray]], config: Config, found: Coverage) -> None:
    """Put every element of the partitioned and FFN tensors back; padding must be zero."""
    c, ranks = config, len(shards)
    hidden, qk = c["hidden_size"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    nope, v_dim = c["qk_nope_head_dim"], c["v_head_dim"]
    q_b = "q_proj" if c["q_lora_rank"] is None else "q_b_proj"
    for rank, shard in enumerate(shards):
        wide = {n: bits_to_double(t) for n, t in shard.items() if t.dtype == np.uint16}
        for layer in range(c["num_hidden_layers"]):
            attention = f"model.layers.{layer}.self_attn."
            heads = shard["q_b"].shape[1]
            for h in range(heads):
                head = rank * heads + h
                rows = np.s_[head * qk : (head + 1) * qk]
                found.put(f"{attention}{q_b}.weight", rows, wide["q_b"][layer, h])
                first = head * (nope + v_dim)
                kv_b = f"{attention}kv_b_proj.weight"
                found.put(kv_b, np.s_[first : first + nope], wide["w_uk"][layer, h].T)
                rows = np.s_[first + nope : first + nope + v_dim]
                found.put(kv_b, rows, wide["w_uv"][layer, h])
                found.put(
                    f"{attention}o_proj.weight",
                    np.s_[:, head * v_dim : (head + 1) * v_dim],
                    wide["o"][layer][:, h * v_dim : (h + 1) * v_dim],
                )
            offsets = shard["ffn_unit_offset"]
            for slot in range(offsets[layer], offsets[layer + 1]):
                index = (slot - offsets[layer]) * ranks + rank
                prefix, width, u = _unit_at(c, layer, index)
                kept = min(BLOCK, width - u * BLOCK)
                rows = np.s_[u * BLOCK : u * BLOCK + kept]
                for which, name in enumerate(("gate_proj", "up_proj")):
                    codes = shard["ffn_gate_up"][slot, :, which]
                    assert not codes[kept:].any()
                    scale = shard["ffn_gate_up_scale"][slot, which].repeat(BLOCK)[:hidden]
                    found.put(f"{prefix}{name}.weight", rows, E4M3[codes[:kept]] * scale)
                codes = shard["ffn_down"][slot]
                assert not codes[:, kept:].any()
                scale = shard["ffn_down_scale"][slot].repeat(BLOCK)[:hidden, None]
                values = E4M3[codes[:, :kept]] * scale
                found.put(f"{prefix}down_proj.weight", np.s_[:, rows], values)
        name = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        stored = wide["lm_head"]
        first = min(rank * len(stored), c["vocab_size"])
        kept = min(len(stored), c["vocab_size"] - first)
        found.put(name, np.s_[first : first + kept], stored[:kept])
        assert not shard["lm_head"][kept:].any()


def _unit_at(c: Config, layer: int, index: int) -> tuple[str, int, int]:
    """(prefix, width, unit in the FFN) of a unit's index in its layer."""
    prefix = f"model.layers.{layer}.mlp."
    if layer < c["first_k_dense_replace"]:
        return prefix, c["intermediate_size"], index
    width = c["moe_intermediate_size"]
    expert, u = divmod(index, units_of(width))
    if expert < c["n_routed_experts"]:
        return f"{prefix}experts.{expert}.", width, u
    shared = index - c["n_routed_experts"] * units_of(width)
    return f"{prefix}shared_experts.", width * c["n_shared_experts"], shared


def half_steps(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Half the distance between E4M3 values around each value, at its block's scale."""
    rows, columns = values.shape
    spread = scales.astype(np.float64).repeat(BLOCK, 0).repeat(BLOCK, 1)[:rows, :columns]
    _, exponent = np.frexp(np.maximum(np.abs(values) / spread, 2.0**-6))  # in [2^(e-1), 2^e)
    return spread * 2.0 ** (exponent - 1.0 - 3 - 1)


def check_artifact(path: Path, source: Checkpoint, ranks: int) -> None:
    """Compare every tensor of every rank; then rebuild the checkpoint from the shards."""
    shards = [read_shard(path, rank) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        expected = source.shard(ranks, rank)
        assert set(shard) == set(expected)
        for name, values in expected.items():
            assert shard[name].dtype == values.dtype, name
            assert np.array_equal(shard[name], values), (rank, name)
        for name in REPLICATED & set(shard):
            assert np.array_equal(shard[name], shards[0][name])

    sharded = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tied = source.config["tie_word_embeddings"]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    names = {
        n for n in source.tensors if n == head or n.endswith(tuple(s + ".weight" for s in sharded))
    }
    found = Coverage({name: tuple(source.tensors[name].shape) for name in names})
    invert(shards, source.config, found)
    for name in names:
        assert (found.counts[name] == 1).all(), name
        if ".mlp." not in name:
            assert np.array_equal(found.values[name], bits_to_double(source.plain(name))), name
            continue
        _, scales = source.blocks(name)
        if source.tensors[name].dtype != torch.float8_e4m3fn:
            values = source.tensors[name].double().numpy()
            assert (np.abs(found.values[name] - values) <= half_steps(values, scales)).all(), name
    # All that is not dealt out is replicated: compared above with the checkpoint, rank by rank.
    replicated = {
        *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_a_proj"),
        *("q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "gate"),
    }
    rest = {n for n in source.tensors if not n.endswith("_scale_inv")} - names
    rest -= {"lm_head.weight"} if tied else set()
    assert {name.split(".")[-2] for name in rest} <= replicated


def build_and_check(
    snapshot: Path, ranks: int, out: Path, source: Checkpoint | None = None, workers: int = 2
) -> None:
    if source is None:
        config = json.loads((snapshot / "config.json").read_text())
        source = Checkpoint(read_checkpoint(snapshot), config)
    make_artifact(snapshot, ranks, out, workers=workers)
    check_artifact(out, source, ranks)
