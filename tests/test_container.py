"""The container: headers that are written and read, and hashes of files."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from helpers import spec
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsv2mk.artifacts import hashing
from dsv2mk.artifacts.container import encode_header, read_header

# ---- writing ----


def test_a_header_literally() -> None:
    specs = [spec("b", "BF16", (2, 3)), spec("a", "F8_E4M3", (5,), 12)]
    text = (
        b'{"__metadata__":{"part":"ffn"},'
        b'"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"a":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[12,17]}}'
    )
    expected = b"\xf8\x0f\0\0\0\0\0\0" + text + b" " * (4088 - len(text))
    assert encode_header(specs, {"part": "ffn"}) == expected


@pytest.mark.parametrize(("extra", "size"), [(-1, 4096), (0, 4096), (1, 8192), (4097, 12288)])
def test_data_starts_on_a_page(extra: int, size: int) -> None:
    bare = len(b'{"__metadata__":{"x":""}}')
    header = encode_header([], {"x": "y" * (4096 - 8 - bare + extra)})
    assert len(header) == size
    assert int.from_bytes(header[:8], "little") == size - 8


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "big": torch.from_numpy(rng.integers(0, 0x7F, (3, 128, 2), np.uint8)),
        "scale": torch.from_numpy(rng.standard_normal((3, 2, 1), np.float32)),
        "norm": torch.from_numpy(rng.standard_normal((7,), np.float32)).to(torch.bfloat16),
        "offsets": torch.tensor([0, 1, -3], dtype=torch.int32),
    }
    tensors["big"] = tensors["big"].view(torch.float8_e4m3fn)
    dtypes = {"big": "F8_E4M3", "scale": "F32", "norm": "BF16", "offsets": "I32"}
    specs, data = [], b""
    for name, tensor in tensors.items():
        specs.append(spec(name, dtypes[name], tuple(tensor.shape), len(data)))
        data += tensor.flatten().view(torch.uint8).numpy().tobytes()
    metadata = {"format": "dsv2mk", "é": '"\\\n'}
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_header(specs, metadata) + data)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
    assert read_header(path).metadata == metadata


# ---- reading ----


def test_headers_of_the_library_are_read(tmp_path: Path) -> None:
    kinds = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16")
    kinds += ("float32", "float64", "float8_e4m3fn", "float8_e5m2")
    tensors = {
        kind: torch.arange(1, 7).reshape(2, 3).to(getattr(torch, kind)) for kind in sorted(kinds)
    }
    tensors |= {"": torch.ones(1), 'é "\\\n': torch.ones(2), "scalar": torch.tensor(2.5)}
    tensors |= {"none": torch.zeros(0, 3), "also none": torch.zeros(3, 0, 2)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"format": "pt"})
    header, data = read_header(path), path.read_bytes()
    assert header.metadata == {"format": "pt"}
    assert header.file_size == len(data)
    assert data.startswith(header.encoded)
    assert header.tensors.keys() == tensors.keys()
    for name, stored in header.tensors.items():
        assert stored.shape == tuple(tensors[name].shape)
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[stored.offset : stored.offset + stored.nbytes] == raw
    offsets = [stored.offset for stored in header.tensors.values()]
    assert offsets == sorted(offsets)
    save_file({}, path)
    assert read_header(path).tensors == {}


# ---- hashing ----


def test_hashes_literally() -> None:
    empty = "99aa06d3014798d86001c324468d497f"
    assert hashing.digest_of([]) == empty
    assert xxhash.xxh3_128_hexdigest(b"") == empty
    assert hashing.CHUNK_BYTES == 67_108_864


@pytest.mark.parametrize("piece", [1, 5, 16, 100])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 160])
def test_files_are_hashed_by_chunks(
    size: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 16)
    monkeypatch.setattr(hashing, "_PIECE", piece)
    content = bytes(range(7, 7 + size))
    path = tmp_path / "file"
    path.write_bytes(content)
    told: list[int] = []
    entry = hashing.hash_file(path, told.append)
    parts = [content[start : start + 16] for start in range(0, size, 16)]
    digests = [xxhash.xxh3_128_digest(part) for part in parts]
    assert entry.size == size
    assert entry.chunks == tuple(digest.hex() for digest in digests)
    assert entry.digest == xxhash.xxh3_128_hexdigest(b"".join(digests))
    assert entry.digest == hashing.digest_of(entry.chunks)
    assert told == [len(part) for part in parts]
    ranges = [hashing.chunk_range(index, size) for index in range(len(parts))]
    assert ranges == [(16 * index, len(part)) for index, part in enumerate(parts)]


def test_a_range_is_hashed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_PIECE", 4)
    content = bytes(range(50))
    path = tmp_path / "file"
    path.write_bytes(content)
    with open(path, "rb") as file:
        for start, length in ((0, 50), (0, 0), (50, 0), (3, 9), (47, 3), (8, 4)):
            expected = xxhash.xxh3_128_hexdigest(content[start : start + length])
            assert hashing.hash_range(file.fileno(), start, length) == expected
        for start, length in ((0, 51), (48, 3), (60, 1)):
            with pytest.raises(EOFError, match="ends at byte"):
                hashing.hash_range(file.fileno(), start, length)
