"""Every byte of every shard, against its checkpoint; and checkpoints that are refused.

Shards and checkpoints are read with the `safetensors` library alone. What they should hold is
worked out here from the published layout and the ownership formula.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import edit_json, make_artifact, make_snapshot, small_config
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_quantise import E4M3, reference_dequantise, reference_quantise

from dsv2mk.artifacts import console
from dsv2mk.pipeline.cli import cli

BLOCK = 128
RANKS = (1, 2, 3, 4, 6, 8)
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]

#: One layer with a dense FFN, one with experts, edge blocks in every direction.
SMALL = small_config(num_hidden_layers=2, n_routed_experts=4, n_group=2, topk_group=1, vocab_size=9)
SMALL["num_experts_per_tok"] = 2

# ---- checkpoints ----


def read_checkpoint(path: Path) -> Tensors:
    """All tensors that the index names, or those of the only file."""
    if not (path / INDEX).exists():
        return load_file(path / "model.safetensors")
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
        save_file(tensors, path / "model.safetensors")
        return path
    for file in set(weight_map.values()):
        (path / file).parent.mkdir(exist_ok=True)
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": dict(weight_map)}))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """A checkpoint of SMALL in bf16."""
    return read_checkpoint(make_snapshot(tmp_path_factory.mktemp("small") / "s", SMALL))


@pytest.fixture(scope="module")
def small_fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Config]:
    """A checkpoint of SMALL in block-FP8, and its config."""
    path = make_snapshot(tmp_path_factory.mktemp("small") / "s", SMALL, dtype="fp8-block")
    return read_checkpoint(path), json.loads((path / "config.json").read_text())


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


# ---- geometries ----


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
    "deadline": None,
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


@pytest.mark.parametrize("dtype", ["bf16", "fp8-block"])
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


# ---- forms of input ----


def test_dtypes_may_differ_inside_a_checkpoint(tmp_path: Path, small: Tensors) -> None:
    """fp32 and fp16 with more digits than bf16 has: what is kept is rounded from those."""
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for index, (name, tensor) in enumerate(small.items()):
        wide = tensor.float() * (1 + torch.rand(tensor.shape, generator=generator) / 64)
        is_norm = "norm" in name
        dtype = (
            torch.float32 if is_norm else (torch.bfloat16, torch.float16, torch.float32)[index % 3]
        )
        tensors[name] = wide.to(dtype)
    kinds = {(n.split(".")[-2], t.dtype) for n, t in tensors.items()}
    assert ("norm", torch.float32) in kinds
    for dtype in (torch.float16, torch.float32):
        assert {"down_proj", "up_proj"} & {name for name, kind in kinds if kind == dtype}
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    build_and_check(snapshot, 4, tmp_path / "out")


def test_fp8_weights_and_scales_in_different_files(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    tensors, config = small_fp8
    weight_map = {n: "b.bin" if n.endswith("_inv") else "a.bin" for n in tensors}
    assert set(weight_map.values()) == {"a.bin", "b.bin"}
    snapshot = write_checkpoint(tmp_path / "s", tensors, config, weight_map)
    build_and_check(snapshot, 6, tmp_path / "out", Checkpoint(tensors, config))


def test_fp8_bytes_and_scales_pass_through(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    """Even those that quantising would not have given: any byte but NaN, any scale."""
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    rng = np.random.default_rng(6)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            raw = torch.from_numpy(rng.choice(codes, tuple(tensor.shape)))
            tensors[name] = raw.view(torch.float8_e4m3fn)
        elif name.endswith("_inv"):
            scale = rng.uniform(0.5, 1, tuple(tensor.shape)) * 2.0 ** rng.integers(-40, 40)
            tensors[name] = torch.from_numpy(scale.astype(np.float32))
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 4, tmp_path / "out")


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


@pytest.mark.parametrize(
    "listed",
    [
        [name.removesuffix(".weight") for name in PLAIN],
        ["layers.0.self_attn.o_proj", "experts.2.up_proj", "lm_head"],
    ],
)
def test_modules_that_are_not_converted_are_bf16(
    tmp_path: Path, small_fp8: tuple[Tensors, Config], listed: list[str]
) -> None:
    tensors, config = with_plain(small_fp8, PLAIN, listed)
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 3, tmp_path / "out")


def test_a_listed_router_is_not_the_gate_projection(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    """`mlp.gate` names a module, and `mlp.gate_proj` is another one, which stays FP8."""
    tensors, config = with_plain(small_fp8, [], ["lm_head", "mlp.gate"])
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 2, tmp_path / "out")


@pytest.mark.parametrize("present", [True, False])
def test_tied_embeddings(tmp_path: Path, small: Tensors, present: bool) -> None:
    tensors = copy_of(small)
    del tensors["lm_head.weight"]
    if present:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = {**SMALL, "tie_word_embeddings": True}
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 4, tmp_path / "out")


def test_inv_freq_is_ignored(tmp_path: Path, small: Tensors) -> None:
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)
    }
    snapshot = write_checkpoint(tmp_path / "s", {**small, **extra}, SMALL)
    build_and_check(snapshot, 2, tmp_path / "out", Checkpoint(small, SMALL))


def test_the_index_says_where_tensors_are(tmp_path: Path, small: Tensors) -> None:
    """Odd names and a folder; what the index does not name is not read, whatever it looks like."""
    files = ["model-1-of-000163.safetensors", "weights.st", "sub/part .bin", "model.safetensors"]
    weight_map = {name: files[index % 4] for index, name in enumerate(small)}
    snapshot = write_checkpoint(tmp_path / "s", small, SMALL, weight_map)
    (snapshot / "consolidated.safetensors").write_bytes(b"not one of them")
    # The same names once more, with other values, in a file that the index does give, for others.
    other = next(name for name, file in weight_map.items() if file != "weights.st")
    stale = {n: t for n, t in small.items() if weight_map[n] == "weights.st"}
    save_file({**stale, other: torch.zeros_like(small[other])}, snapshot / "weights.st")
    build_and_check(snapshot, 2, tmp_path / "out", Checkpoint(small, SMALL))


def hub_cache(path: Path, snapshot: Path) -> Path:
    """A snapshot as the hub's cache keeps it: links to blobs that are named by their hash."""
    (path / "blobs").mkdir(parents=True)
    out = path / "snapshots" / "main"
    out.mkdir(parents=True)
    for file in snapshot.iterdir():
        blob = path / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (out / file.name).symlink_to(Path("../../blobs") / blob.name)
    return out


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and time of change of everything in a folder."""
    return {
        str(path): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("links", [False, True])
def test_the_input_is_never_written(tmp_path: Path, small: Tensors, links: bool, bad: bool) -> None:
    tensors = copy_of(small)
    if bad:
        tensors["model.norm.weight"][0] = float("inf")
    snapshot = write_checkpoint(tmp_path / "input", tensors, SMALL)
    folder = snapshot
    if links:
        folder = tmp_path / "hub"
        snapshot = hub_cache(folder, snapshot)
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = fingerprint(folder)
    assert run_build(snapshot, tmp_path / "out") == (10 if bad else 0)
    assert fingerprint(folder) == before
    if not bad:
        check_artifact(tmp_path / "out", Checkpoint(small, SMALL), 2)


# ---- what is refused ----


def run_build(snapshot: Path, out: Path, *options: str) -> int:
    args = ["build", str(snapshot), "--tp", "2", "--out", str(out), "--workers", "2", *options]
    return console.run(cli, args)


def assert_refused(
    snapshot: Path, capsys: pytest.CaptureFixture[str], *said: str, early: bool = True
) -> None:
    """Both `build` and, unless it takes tensor data to see, `plan` say so; nothing is left."""
    place = snapshot.parent / "place"
    place.mkdir()
    capsys.readouterr()
    assert run_build(snapshot, place / "out", "--json") == 10
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 10
    assert error["kind"] == "input refused"
    for words in said:
        assert words in error["message"]
    assert os.listdir(place) == []
    if early:
        assert console.run(cli, ["plan", str(snapshot), "--tp", "2", "--json"]) == 10
        assert json.loads(capsys.readouterr().out)["error"] == error


#: A tensor of every kind that a build reads.
KINDS = [
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.1.self_attn.q_a_proj",
    "model.layers.0.self_attn.q_a_layernorm",
    "model.layers.1.self_attn.q_b_proj",
    "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "model.layers.1.self_attn.kv_a_layernorm",
    "model.layers.0.self_attn.kv_b_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.0.post_attention_layernorm",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts.3.gate_proj",
    "model.layers.1.mlp.experts.0.up_proj",
    "model.layers.1.mlp.experts.2.down_proj",
    "model.layers.1.mlp.shared_experts.gate_proj",
    "model.layers.1.mlp.shared_experts.up_proj",
    "model.layers.1.mlp.shared_experts.down_proj",
    "model.norm",
    "lm_head",
]


def test_the_kinds_are_all_kinds(small: Tensors) -> None:
    def kind(name: str) -> tuple[str, bool, bool]:
        return name.split(".")[-1], "shared" in name, ".experts." in name

    assert {kind(name) for name in KINDS} == {kind(n.removesuffix(".weight")) for n in small}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_is_refused(
    tmp_path: Path,
    small: Tensors,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    dtype: torch.dtype,
) -> None:
    """Value and position differ from case to case: first, last, in the middle, past a block."""
    case = KINDS.index(kind) + (torch.bfloat16, torch.float16, torch.float32).index(dtype)
    value, word = [("nan", "NaN"), ("inf", "infinite"), ("-inf", "infinite")][case % 3]
    name = f"{kind}.weight"
    shape = tuple(small[name].shape)
    spots = [tuple(n - 1 for n in shape), tuple(n * 2 // 3 for n in shape), (0,) * len(shape)]
    spot = spots[case // 3 % 3]
    tensors = {**small, name: small[name].to(dtype, copy=True)}
    tensors[name][spot] = float(value)
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    index = ", ".join(map(str, spot))
    said = f"{snapshot / 'model.safetensors'}: {name}[{index}] is {word}"
    assert_refused(snapshot, capsys, said, early=False)


def test_fp32_past_bf16_is_refused_only_where_bf16_is_kept(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    expert, norm = "model.layers.1.mlp.experts.1.down_proj.weight", "model.norm.weight"
    largest = torch.finfo(torch.float32).max
    tensors = {**small, expert: small[expert].float()}
    tensors[expert][150, 130] = -largest
    build_and_check(write_checkpoint(tmp_path / "good", tensors, SMALL), 2, tmp_path / "out")
    tensors[norm] = tensors[norm].float()
    tensors[norm][7] = largest
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    assert_refused(snapshot, capsys, f"{norm}[7] is too large for bf16", early=False)


FP8_FFN = "model.layers.1.mlp.experts.1.down_proj.weight"
FP8_ATTENTION = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [FP8_FFN, FP8_FFN.replace("down", "gate"), FP8_ATTENTION])
def test_fp8_nan_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    name: str,
    byte: int,
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    tensors[name].view(torch.uint8)[133, 9] = byte
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(snapshot, capsys, f"{name}[133, 9] is NaN", early=False)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.5"])
@pytest.mark.parametrize("name", [FP8_FFN, FP8_FFN.replace("down", "up"), FP8_ATTENTION])
def test_a_scale_that_is_none_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    scale = name + "_scale_inv"
    tensors[scale][1, -1] = float(value)
    last = tensors[scale].shape[1] - 1
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(snapshot, capsys, f"{scale}[1, {last}] is {value}", early=False)


def test_a_scale_that_takes_fp8_attention_past_fp32_is_refused(
    tmp_path: Path, small_fp8: tuple[Tensors, Config], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    tensors[FP8_ATTENTION].view(torch.uint8)[:] = 0
    tensors[FP8_ATTENTION].view(torch.uint8)[200, 3] = 0x7E
    tensors[FP8_ATTENTION + "_scale_inv"][1, 0] = 1e36
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(snapshot, capsys, f"{FP8_ATTENTION}_scale_inv[1, 0] is ", early=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "no quantization_config"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": None}, "quant_method"),
        ({"weight_block_size": [64, 64]}, "[64, 64]"),
        ({"weight_block_size": [1, 128]}, "[1, 128]"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"fmt": "e5m2"}, "e5m2"),
        ("fp8", "quantization_config"),
    ],
)
def test_other_quantisation_is_refused_by_name(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    changes: Any,
    said: str,
) -> None:
    tensors, config = small_fp8[0], dict(small_fp8[1])
    quantization = config.pop("quantization_config")
    if changes is not None:
        is_map = isinstance(changes, dict)
        config["quantization_config"] = {**quantization, **changes} if is_map else changes
    assert_refused(write_checkpoint(tmp_path / "s", tensors, config), capsys, said)


@pytest.mark.parametrize("listed", [5, [7], "lm_head"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_list_of_modules_that_is_none_is_refused(
    tmp_path: Path,
    small: Tensors,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    listed: Any,
    plain: bool,
) -> None:
    """A string is no list of its letters, which would let bf16 pass for FP8 everywhere."""
    tensors, config = with_plain(small_fp8, [], listed)
    snapshot = write_checkpoint(tmp_path / "s", small if plain else tensors, config)
    assert_refused(snapshot, capsys, "modules_to_not_convert")


@pytest.mark.parametrize("listed", [None, [], ["lm_head", "layers.1.mlp.gate"]])
@pytest.mark.parametrize("name", PLAIN)
def test_bf16_under_an_fp8_config_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    name: str,
    listed: list[str] | None,
) -> None:
    tensors, config = with_plain(small_fp8, [name], listed)
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(snapshot, capsys, name, "F8_E4M3", "BF16")


Edit = Callable[[Tensors], object]


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(FP8_FFN + "_scale_inv"), [FP8_FFN, "no " + FP8_FFN + "_scale_inv"]),
        (
            _set("model.layers.0.self_attn.o_proj.weight_scale_inv", lambda s: s.T),
            ["o_proj.weight_scale_inv", "F32 [2, 3]", "F32 [3, 2]"],
        ),
        (_set(FP8_FFN + "_scale_inv", lambda s: s[:1]), ["F32 [2, 2]", "F32 [1, 2]"]),
        (_set(FP8_FFN + "_scale_inv", lambda s: s.bfloat16()), ["F32 [2, 2]", "BF16 [2, 2]"]),
        (_set(FP8_FFN + "_scale_inv", lambda s: s.reshape(-1)), ["F32 [4]"]),
        (
            _set(FP8_FFN, lambda w: w.float().to(torch.float8_e5m2)),
            [FP8_FFN, "F8_E5M2"],
        ),
        (
            _set("model.layers.1.mlp.gate.weight", lambda w: w.to(torch.float8_e4m3fn)),
            ["model.layers.1.mlp.gate.weight", "F8_E4M3"],
        ),
        (
            lambda t: t.__setitem__("model.norm.weight_scale_inv", torch.ones(1)),
            ["model.norm.weight_scale_inv", "not a tensor of this geometry"],
        ),
    ],
)
def test_fp8_tensors_that_do_not_fit_are_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    capsys: pytest.CaptureFixture[str],
    edit: Edit,
    said: list[str],
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    edit(tensors)
    assert_refused(write_checkpoint(tmp_path / "s", tensors, config), capsys, *said)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings is false"]),
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight missing"]),
        (
            lambda t: [
                t.pop(f"model.layers.1.mlp.experts.3.{n}_proj.weight") for n in ("up", "gate")
            ],
            ["model.layers.1.mlp.experts.3.gate_proj.weight and 1 more missing"],
        ),
        (
            lambda t: t.__setitem__("model.layers.1.mlp.experts.4.up_proj.weight", torch.ones(2)),
            ["model.layers.1.mlp.experts.4.up_proj.weight", "not a tensor of this geometry"],
        ),
        (
            lambda t: t.__setitem__("model.layers.0.self_attn.q_b_proj.bias", torch.ones(2)),
            ["q_b_proj.bias", "not a tensor of this geometry"],
        ),
        (
            lambda t: t.__setitem__("model.layers.0.self_attn.rotary_emb.cos", torch.ones(2)),
            ["rotary_emb.cos", "not a tensor of this geometry"],
        ),
        (
            _set("model.layers.1.mlp.experts.0.down_proj.weight", lambda w: w.T),
            ["experts.0.down_proj.weight: shape", "[192, 136]", "[136, 192]"],
        ),
        (
            _set("model.embed_tokens.weight", lambda w: w[:-1]),
            ["model.embed_tokens.weight: shape", "[9, 192]", "[8, 192]"],
        ),
        (_set("model.norm.weight", lambda w: w[None]), ["[192]", "[1, 192]"]),
        (_set("model.norm.weight", lambda w: w.double()), ["model.norm.weight", "F64"]),
        (_set("lm_head.weight", lambda w: w.to(torch.int8)), ["lm_head.weight", "I8"]),
        (
            _set(PLAIN[0], lambda w: w.to(torch.float8_e4m3fn)),
            [PLAIN[0], "no quantization_config", "F8_E4M3"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path,
    small: Tensors,
    capsys: pytest.CaptureFixture[str],
    edit: Edit,
    said: list[str],
) -> None:
    tensors = copy_of(small)
    edit(tensors)
    assert_refused(write_checkpoint(tmp_path / "s", tensors, SMALL), capsys, *said)


def test_a_tied_head_that_differs_is_refused(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = copy_of(small)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7, 191] += 1
    config = {**SMALL, "tie_word_embeddings": True}
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    said = ("lm_head.weight differs from model.embed_tokens.weight in row 7",)
    assert_refused(snapshot, capsys, *said, early=False)


# ---- the index and the files ----

SPLIT = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def split_checkpoint(path: Path, tensors: Tensors) -> tuple[Path, dict[str, str]]:
    weight_map = {name: SPLIT[index % 2] for index, name in enumerate(tensors)}
    return write_checkpoint(path, tensors, SMALL, weight_map), weight_map


@pytest.mark.parametrize("file", [*SPLIT, INDEX, "config.json"])
def test_a_missing_file_is_named(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / file).unlink()
    assert_refused(snapshot, capsys, str(snapshot / file), "No such file")


@pytest.mark.parametrize("file", [*SPLIT, INDEX, "config.json"])
def test_a_dangling_link_is_named_with_its_target(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """A download to the hub's cache that was broken off."""
    plain, _ = split_checkpoint(tmp_path / "plain", small)
    snapshot = hub_cache(tmp_path / "hub", plain)
    target = os.readlink(snapshot / file)
    (snapshot / target).unlink()
    assert_refused(snapshot, capsys, str(snapshot / file), f"link to {target}")


@pytest.mark.parametrize(
    "file",
    [
        "../plain.safetensors",
        "sub/../../plain.safetensors",
        "/etc/hostname",
        "..",
        "",
        ".",
        "a\0b",
        7,
        None,
        ["model-1-of-2.safetensors"],
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str], file: Any
) -> None:
    snapshot, weight_map = split_checkpoint(tmp_path / "s", small)
    # What it would find there is a good file.
    (tmp_path / "plain.safetensors").write_bytes((snapshot / SPLIT[0]).read_bytes())
    name = next(name for name, place in weight_map.items() if place == SPLIT[0])
    edit_json(snapshot / INDEX, weight_map={**weight_map, name: file})
    assert_refused(snapshot, capsys, name, "a file inside the folder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ("{}", "weight_map"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / INDEX).write_text(text)
    assert_refused(snapshot, capsys, INDEX, said)


def test_a_tensor_that_is_not_where_the_index_says_is_named(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, weight_map = split_checkpoint(tmp_path / "s", small)
    name = next(name for name, place in weight_map.items() if place == SPLIT[0])
    edit_json(snapshot / INDEX, weight_map={**weight_map, name: SPLIT[1]})
    assert_refused(snapshot, capsys, f"{snapshot / SPLIT[1]} does not hold {name}")


def test_a_folder_in_place_of_a_file_is_named(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / SPLIT[0]).unlink()
    (snapshot / SPLIT[0]).mkdir()
    assert_refused(snapshot, capsys, str(snapshot / SPLIT[0]))


def test_a_truncated_file_is_named(
    tmp_path: Path, small: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    os.truncate(snapshot / SPLIT[1], os.path.getsize(snapshot / SPLIT[1]) - 1)
    assert_refused(snapshot, capsys, str(snapshot / SPLIT[1]), "truncated")
