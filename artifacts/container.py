"""safetensors files, read and written by the letter of the format.

The header is parsed here rather than by the safetensors library because a plan needs byte offsets
without touching data, because a build writes tensors piece by piece in place, and because a user
must be told which file and tensor is damaged, and how.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv2mk.manifests.layout import ITEM_SIZE as STORED_ITEM_SIZE
from dsv2mk.manifests.layout import PAGE, TensorSpec

#: Longest header that the safetensors library accepts.
MAX_HEADER = 100_000_000

_MAX_BYTES = 1 << 63

#: Bytes of one element, by safetensors dtype.
ITEM_SIZE = {
    **STORED_ITEM_SIZE,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2"), 1),
    **dict.fromkeys(("F16", "I16", "U16"), 2),
    **dict.fromkeys(("U32",), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}


class ContainerError(ValueError):
    """A file is not a whole, well-formed safetensors file; the message says why."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Header:
    """Parsed header of a safetensors file."""

    encoded: bytes  # length word included: the file up to its data
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]  # in the order of their offsets
    file_size: int


def read_header(path: Path | int) -> Header:
    """Read and check the header of a file, or of an open one, which is closed; no tensor data.

    Raises ContainerError for any file that the safetensors format does not allow (a length beyond
    the file, no UTF-8 or JSON, duplicate names, offsets that overlap, leave holes or do not end
    with the file, a size that is not the shape's), and OSError.
    """
    with open(path, "rb", opener=_open) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise ContainerError("not a regular file")
        size = info.st_size
        word = file.read(8)
        if len(word) < 8:
            raise ContainerError(f"{size} bytes are too few for a header")
        length = int.from_bytes(word, "little")
        if length > min(MAX_HEADER, size - 8):
            raise ContainerError(f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    if len(text) != length:
        raise ContainerError(f"the file ended inside its header of {length} bytes")
    return _parse(word + text, size)


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Header of a file with these tensors, padded with spaces so that data starts on a page."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, spec.offset + spec.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def _parse(encoded: bytes, size: int) -> Header:
    text = encoded[8:]
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except ContainerError:
        raise
    except UnicodeDecodeError:
        raise ContainerError("the header is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"the header is not JSON: {error}") from None
    if not isinstance(data, dict) or not text.startswith(b"{"):
        raise ContainerError("the header is not a JSON object")
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ContainerError("__metadata__ is not a map of strings")
    tensors = {name: _entry(name, entry, len(encoded)) for name, entry in data.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    position = len(encoded)
    for name, tensor in tensors.items():
        if tensor.offset != position:
            kind = "overlaps the one before" if tensor.offset < position else "follows a hole"
            raise ContainerError(f"tensor {name} at byte {tensor.offset} {kind}")
        position += tensor.nbytes
    if position != size:
        what = "truncated" if size < position else "followed by other bytes"
        raise ContainerError(f"data is {what}: expected {position} bytes, found {size}")
    return Header(encoded=encoded, metadata=metadata, tensors=tensors, file_size=size)


def _entry(name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ContainerError(f"tensor {name}: the entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ContainerError(f"tensor {name}: unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ContainerError(f"tensor {name}: shape {shape!r}, data_offsets {offsets!r}")
    nbytes = ITEM_SIZE[dtype]
    for extent in shape:
        nbytes *= extent
        if nbytes >= _MAX_BYTES:
            raise ContainerError(f"tensor {name}: a shape of 2^63 bytes or more")
    if offsets[1] - offsets[0] != nbytes:
        raise ContainerError(
            f"tensor {name}: {dtype} {shape} is {nbytes} bytes, data_offsets {offsets} are "
            f"{offsets[1] - offsets[0]}"
        )
    return StoredTensor(
        dtype=dtype, shape=tuple(shape), offset=data_start + offsets[0], nbytes=nbytes
    )


def _open(path: str, flags: int) -> int:
    """Open without waiting for the other end, if the path turns out to be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < _MAX_BYTES for v in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ContainerError(f"{twice!a} stands twice in the header")
    for name in out:
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            raise ContainerError(f"a name in the header is not text: {name!a}")
    return out
