"""Reads tensors of a snapshot in row order, hashing what passes."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dsv2mk.artifacts.container import StoredTensor
from dsv2mk.manifests.errors import InputError

Array = np.ndarray[Any, Any]

#: Bytes that are read at a time. Small enough to stay in the cache while they are worked on.
BAND_BYTES = 2 << 20

_NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8}


class BadInput(InputError):
    """Input that no other try can use: it has to change first."""


@dataclass(kw_only=True, frozen=True)
class SourceTensor:
    """One tensor of the checkpoint. BF16 and E4M3 rows are read as their bits (uint16, uint8)."""

    name: str
    file: str  # relative to the snapshot's folder
    path: Path
    stored: StoredTensor

    @property
    def dtype(self) -> str:
        """As safetensors spells it."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As in the file."""
        return self.stored.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of one entry along axis 0."""
        return self.stored.nbytes // self.shape[0]


def band_rows(tensor: SourceTensor) -> int:
    """Rows of a band of about BAND_BYTES, one at least."""
    return max(1, BAND_BYTES // tensor.row_bytes)


class Reader:
    """Reads whole tensors, each in bands. One thread at a time."""

    def __init__(self, done: Callable[[int], object] = lambda count: None) -> None:
        self.digests: dict[str, str] = {}  # xxh3-128 of each tensor that was read whole
        self._done = done
        self._buffers: dict[str, Array] = {}

    def bands(self, tensor: SourceTensor, rows: int, buffer: str = "a") -> Iterator[Array]:
        """Successive bands of `rows` rows, the last one shorter, as [rows, columns].

        A band is valid until the next one of the same `buffer`. The tensor's digest is known after
        the last. Raises BadInput if the file ends early, InputError if it cannot be read.
        """
        total = tensor.shape[0]
        dtype = np.dtype(_NUMPY[tensor.dtype])
        size = rows * tensor.row_bytes
        held = self._buffers.get(buffer)
        if held is None or held.size < size:
            held = self._buffers[buffer] = np.empty(size, np.uint8)
        state = xxhash.xxh3_128()
        try:
            fd = os.open(tensor.path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(tensor, error) from None
        try:
            for start in range(0, total, rows):
                length = min(rows, total - start) * tensor.row_bytes
                band = held[:length]
                _read_into(fd, band.data, tensor, start * tensor.row_bytes)
                state.update(band.data)
                self._done(length)
                yield band.view(dtype).reshape(min(rows, total - start), -1)
        finally:
            os.close(fd)
        self.digests[tensor.name] = state.hexdigest()

    def whole(self, tensor: SourceTensor) -> Array:
        """A small tensor at once, in its own shape; the caller owns it."""
        (band,) = self.bands(tensor, tensor.shape[0], "whole")
        return band.reshape(tensor.shape).copy()


def damaged(tensor: SourceTensor, why: str, position: tuple[int, ...]) -> BadInput:
    """The error for a bad value at an index of a tensor."""
    index = "[" + ", ".join(map(str, position)) + "]"
    return BadInput(f"{tensor.path}: {tensor.name}{index} is {why}", fix="Download this file again")


def _read_into(fd: int, view: memoryview, tensor: SourceTensor, start: int) -> None:
    offset = tensor.stored.offset + start
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise _unreadable(tensor, error) from None
        if count == 0:
            raise BadInput(
                f"{tensor.path} ended inside {tensor.name}, at byte {offset}",
                fix="It changed while it was read: leave the input alone and build again",
            )
        view, offset = view[count:], offset + count


def _unreadable(tensor: SourceTensor, error: OSError) -> InputError:
    return InputError(f"{tensor.path}: {tensor.name} cannot be read: {error.strerror}")
