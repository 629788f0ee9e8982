"""Synthetic checkpoints in exact Hugging Face form, for tests, demos and benchmarks.

Values are uniform, scaled so that activations stay near 1 through any number of layers and
routing is spread: each matrix keeps the variance of its input, what a layer adds to the residual
stream is scaled by 1/sqrt(2 * layers), and router logits have a standard deviation of about 1.
Each tensor's values follow from the seed and its name alone.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dsv2mk.artifacts.console import progress, size_text
from dsv2mk.artifacts.container import ITEM_SIZE
from dsv2mk.manifests.checkpoint import (
    EMBED,
    LM_HEAD,
    checkpoint_tensors,
    is_linear,
    scale_name,
)
from dsv2mk.manifests.errors import SpaceError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.scheme import BLOCK, E4M3_MAX
from dsv2mk.pipeline.reader import Array

#: Elements that are made at a time.
_PIECE = 1 << 22


@dataclass(kw_only=True, slots=True, frozen=True)
class _Stored:
    """A tensor of the checkpoint: a weight, or the block scales of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    weight: str  # whose values it stores or scales
    weight_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def synth(
    out: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "bf16",
    max_shard_size: int = 5_000_000_000,
) -> int:
    """Write a checkpoint of the config's geometry to the new folder `out`; returns its bytes.

    It gets its name when it is complete. Raises InputError for a config that is not supported,
    UsageError if `out` exists, SpaceError if the disk is too small.
    """
    geometry = Geometry.from_config(config)
    if os.path.lexists(out):
        raise UsageError(f"{out} exists", fix="Name another folder")
    tensors = list(_stored(geometry, dtype))
    shards = _assign_shards(tensors, max_shard_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(out.parent).free
    if total > free:
        raise SpaceError(
            f"no space for {out}", expected=f"{size_text(total)} free", found=size_text(free)
        )
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        weight_map: dict[str, str] = {}
        with progress(total, "synth") as bar:
            for index, shard in enumerate(shards):
                name = _shard_name(index, len(shards))
                _write_shard(partial / name, shard, geometry, seed, bar)
                weight_map |= {tensor.name: name for tensor in shard}
        if len(shards) > 1:
            index_data = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(partial / "model.safetensors.index.json", index_data)
        full = dict(config)
        if dtype == "fp8-block":
            full["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            }
        _write_json(partial / "config.json", full)
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        _write_json(partial / "generation_config.json", special)
        _write_json(partial / "tokenizer.json", byte_tokenizer(geometry.vocab_size, special))
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        _write_json(partial / "tokenizer_config.json", tokenizer_config)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return total


def byte_tokenizer(vocab_size: int, special: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose tokens are the 256 bytes, with special tokens at the config's ids.

    A byte whose id a smaller vocabulary or a special token takes cannot be encoded.
    """
    specials = {
        int(token): f"<{name.removesuffix('_token_id')}>"
        for name, token in special.items()
        if isinstance(token, int) and 0 <= token < vocab_size
    }
    vocab = {char: byte for byte, char in enumerate(_byte_alphabet()) if byte < vocab_size}
    vocab = {char: token for char, token in vocab.items() if token not in specials}
    vocab |= {content: token for token, content in specials.items()}
    added = [
        {
            "id": token,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, content in sorted(specials.items())
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _stored(geometry: Geometry, dtype: str) -> Iterator[_Stored]:
    """Every stored tensor; scales follow their weight."""
    for name, shape in checkpoint_tensors(geometry).items():
        if name == LM_HEAD and geometry.tie_word_embeddings:
            continue
        fp8 = dtype == "fp8-block" and is_linear(name)
        kind = "F8_E4M3" if fp8 else "BF16"
        yield _Stored(name=name, dtype=kind, shape=shape, weight=name, weight_shape=shape)
        if fp8:
            blocks = tuple(-(-extent // BLOCK) for extent in shape)
            scale = scale_name(name)
            yield _Stored(name=scale, dtype="F32", shape=blocks, weight=name, weight_shape=shape)


def _assign_shards(tensors: list[_Stored], limit: int) -> list[list[_Stored]]:
    """Tensors in order, a new shard whenever the next one would pass the limit."""
    shards: list[list[_Stored]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:06d}.safetensors"
    )


def _write_shard(path: Path, shard: list[_Stored], geometry: Geometry, seed: int, bar: Any) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in shard:
            for values in _values(tensor.weight, tensor.weight_shape, geometry, seed):
                piece = _encode(values, tensor.dtype)
                file.write(piece.reshape(-1).view(np.uint8).data)
                bar.update(piece.nbytes)


def _encode(values: Array, dtype: str) -> Array:
    """Whole rows of blocks, as a tensor of this dtype stores them."""
    if dtype == "BF16":
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    scales = _block_scales(values)
    if dtype == "F32":
        return scales
    wide = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[: len(values), : values.shape[1]]
    scaled = torch.from_numpy(values / wide).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _block_scales(values: Array) -> Array:
    """amax / 448 of each block, as DeepSeek's own FP8 checkpoints are scaled; no power of two."""
    rows, columns = values.shape
    padded = np.zeros((-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:rows, :columns] = np.abs(values)
    blocks = padded.reshape(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scales: Array = np.maximum(blocks.max((1, 3)) / np.float32(E4M3_MAX), np.float32(1e-12))
    return scales


def _values(name: str, shape: tuple[int, ...], geometry: Geometry, seed: int) -> Iterator[Array]:
    """fp32 values [rows, columns], a multiple of 128 rows at a time."""
    rng = np.random.Generator(np.random.SFC64([seed, xxhash.xxh3_64_intdigest(name.encode())]))
    rows, columns = (shape[0], math.prod(shape[1:]))
    deviation, mean = _scale_of(name, shape, geometry)
    step = max(1, _PIECE // (columns * BLOCK)) * BLOCK
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = rng.integers(0, 1 << 16, (count, columns), dtype=np.uint16).view(np.int16)
        values = raw.astype(np.float32)
        values *= np.float32(deviation * math.sqrt(3) / (1 << 15))  # uniform in +-sqrt(3) sigma
        values += np.float32(mean)
        yield values


def _scale_of(name: str, shape: tuple[int, ...], geometry: Geometry) -> tuple[float, float]:
    """Standard deviation and mean of a tensor's values."""
    if len(shape) == 1:
        return 0.1, 1.0  # gamma of a norm
    if name == EMBED:
        return 1.0, 0.0
    deviation = 1 / math.sqrt(shape[1])
    if name.endswith("o_proj.weight"):
        deviation /= math.sqrt(2 * geometry.num_hidden_layers)
    elif name.endswith("down_proj.weight"):
        # silu(g) * u of two standard normals has a deviation of about 0.6. A token sums several
        # experts, each weighted by its score times the scaling factor: about factor / E.
        deviation /= 0.6 * math.sqrt(2 * geometry.num_hidden_layers)
        if ".experts." in name:
            weight = 4 * geometry.routed_scaling_factor / geometry.n_routed_experts
            deviation /= max(1.0, weight * math.sqrt(geometry.num_experts_per_tok))
    return deviation, 0.0


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
