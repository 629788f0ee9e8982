"""xxh3-128 of files, by 64 MiB chunks. Against accidents, not against attackers."""

import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from dsv2mk.manifests.manifest import CHUNK_BYTES, FileEntry

#: Bytes read and hashed at a time: small enough to be hashed out of the cache.
_PIECE = 1 << 20


def hash_range(fd: int, start: int, length: int) -> str:
    """xxh3-128, hex, of `length` bytes of an open file from `start`.

    Raises EOFError if the file is shorter.
    """
    state = xxhash.xxh3_128()
    piece = bytearray(min(_PIECE, length))
    view = memoryview(piece)
    end = start + length
    while start < end:
        count = os.preadv(fd, [view[: end - start]], start)
        if count == 0:
            raise EOFError(f"the file ends at byte {start}")
        state.update(view[:count])
        start += count
    return state.hexdigest()


def digest_of(chunks: Iterable[str]) -> str:
    """Digest over a chunk list: xxh3-128, hex, of the chunks' 16-byte digests in order."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(bytes.fromhex(chunk))
    return state.hexdigest()


def chunk_range(index: int, file_size: int) -> tuple[int, int]:
    """(start, length) of a chunk of a file."""
    start = index * CHUNK_BYTES
    return start, min(CHUNK_BYTES, file_size - start)


def sampled(count: int, sample: float) -> list[int]:
    """Indices of the chunks that a sample of some percent looks at: all, or a new random choice.

    At least one is looked at, if there are any.
    """
    if sample >= 100:
        return list(range(count))
    share = min(count, max(1, math.ceil(count * sample / 100)))
    return sorted(random.sample(range(count), share))


def hash_file(path: Path, done: Callable[[int], object] = lambda count: None) -> FileEntry:
    """Size and hashes of a whole file; `done` is told the bytes of each finished chunk."""
    chunks: list[str] = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for index in range(-(-size // CHUNK_BYTES)):
            start, length = chunk_range(index, size)
            chunks.append(hash_range(file.fileno(), start, length))
            done(length)
    return FileEntry(size=size, digest=digest_of(chunks), chunks=tuple(chunks))
