"""Weights in GPU memory: a rank's shard from its files, or random ones in the same layout.

Shard files are read by several threads, each into its pinned buffers in turn, and copied from there
asynchronously: a copy straight from pageable memory runs at a fraction of the bus. A thread takes a
chunk of a file at a time, and hashes it from the very buffers that are copied: what is proved is
what the GPU gets. Every part of a shard becomes one allocation; tensors are places in it, as the
layout says.
"""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import PARTS, RankLayout, TensorSpec
from dsv2mk.manifests.manifest import CHUNK_BYTES

#: Bytes of a pinned buffer, buffers of a thread, and threads that read. All buffers together stay
#: in a server's L3, so that the GPU gets from there what a thread has just read; smaller ones would
#: make more pieces than Python's lock passes, some ten thousand a second. With two a thread reads
#: into one while the other is copied.
STAGE_BYTES = 8 << 20
BUFFERS = 2
THREADS = min(12, os.cpu_count() or 1)
#: Bytes that an allocation is longer: the kernel copies scales in whole 16 bytes.
SLACK = 256

_FIX = "dsv2mk verify tells about all files"


@dataclass(kw_only=True, slots=True)
class Weights:
    """One rank's weights on a device."""

    layout: RankLayout
    parts: dict[str, Tensor]  # uint8, SLACK longer than the part's data
    seconds_hashed: float = 0.0  # by all threads that read, over their number

    def address(self, name: str) -> int:
        """Address of a tensor; 0 for one that the geometry does not have."""
        spec = self.layout.tensors.get(name)
        return 0 if spec is None else self.parts[spec.part].data_ptr() + spec.offset

    def base(self, part: str) -> int:
        """Address of a part's data."""
        return self.parts[part].data_ptr()

    def view(self, name: str) -> Tensor:
        """A tensor as bytes, in place."""
        spec = self.layout.tensors[name]
        return self.parts[spec.part][spec.offset : spec.offset + spec.nbytes]


def part_bytes(layout: RankLayout, part: str) -> int:
    """Bytes of a part's data."""
    return sum(spec.nbytes for spec in layout.part(part))


def weight_bytes(layout: RankLayout) -> int:
    """Bytes of a rank's weights on a device."""
    return sum(part_bytes(layout, part) + SLACK for part in PARTS)


def load_weights(
    artifact: Artifact,
    rank: int,
    device: torch.device,
    done: Callable[[int], object] = lambda count: None,
    verify: str = "sample",
    threads: int = THREADS,
) -> Weights:
    """Copy a rank's shard to a device. `done` is told of bytes that have been handed over.

    verify: "none", "sample" or "full", as `Artifact.to_prove` says. Raises ArtifactError if a file
    cannot be read to its end, or if a chunk is not what the manifest says.
    """
    layout = artifact.layouts[rank]
    parts = {part: _allocate(layout, part, device) for part in PARTS}
    sources = []
    for part in PARTS:
        name, start = artifact.locate(rank, layout.part(part)[0])
        sources.append(
            Source(
                open=partial(artifact.open_file, name),
                label=artifact.label(name),
                start=start,
                end=start + part_bytes(layout, part),
                target=parts[part],
                wanted=artifact.to_prove(name, verify),
                new_hash=artifact.new_hash,
            )
        )
    seconds = copy_files(sources, device, done, threads)
    return Weights(layout=layout, parts=parts, seconds_hashed=seconds)


# ---- from files to a device ----


@dataclass(kw_only=True, slots=True)
class Source:
    """A file whose bytes from `start` to `end`, its last, go to the start of a uint8 tensor."""

    open: Callable[[], int]  # gives a descriptor
    label: str  # for messages; no two files have one
    start: int
    end: int
    target: Tensor
    wanted: Mapping[int, str] = field(default_factory=dict)  # digests of chunks that are hashed
    new_hash: Callable[[], Any] = xxhash.xxh3_128


def copy_files(
    sources: list[Source],
    device: torch.device,
    done: Callable[[int], object],
    threads: int = THREADS,
) -> float:
    """Copy files to the device; seconds of hashing, as in Weights."""
    chunks = _chunks(sources)
    lock = threading.Lock()
    errors: list[BaseException] = []
    seconds: list[float] = []

    def take() -> tuple[Source, int] | None:
        with lock:
            return None if errors else next(chunks, None)

    def count(more: int) -> None:
        with lock:
            done(more)

    def work() -> None:
        try:
            if first := take():
                mine = itertools.chain([first], iter(take, None))
                seconds.append(_copy_chunks(mine, device, count))
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    torch.cuda.synchronize(device)
    return sum(seconds) / max(1, len(seconds))


def _chunks(sources: list[Source]) -> Iterator[tuple[Source, int]]:
    """Each chunk of each file; of a file's header only what is hashed."""
    for source in sources:
        for index in range(-(-source.end // CHUNK_BYTES)):
            end = min((index + 1) * CHUNK_BYTES, source.end)
            if index in source.wanted or end > source.start:
                yield source, index


def _copy_chunks(
    chunks: Iterable[tuple[Source, int]], device: torch.device, done: Callable[[int], object]
) -> float:
    """One thread's share: read into one of its buffers while the others are being copied.

    Returns the seconds of hashing.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)  # this thread's
    # Pinning is slow: each thread begins when its own are there. PyTorch keeps them, for the next
    # call of this process.
    buffers = _pinned(BUFFERS * STAGE_BYTES).view(BUFFERS, STAGE_BYTES)
    ring = itertools.cycle(
        [
            (buffer, memoryview(buffer.numpy()), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for buffer in buffers
        ]
    )
    opened: dict[str, int] = {}
    seconds = 0.0
    try:
        for source, index in chunks:
            target, first = source.target, source.start
            if source.label not in opened:
                opened[source.label] = _open(source)
            fd = opened[source.label]
            start = index * CHUNK_BYTES
            end = min(start + CHUNK_BYTES, source.end)
            state = source.new_hash() if index in source.wanted else None
            for at in range(start, end, STAGE_BYTES):
                count = min(STAGE_BYTES, end - at)
                buffer, memory, copied = next(ring)
                copied.synchronize()
                _read(fd, source, at, memory[:count])
                header = max(first - at, 0)  # bytes of it in this piece
                if header < count:
                    place = at + header - first
                    target[place : place + count - header].copy_(
                        buffer[header:count], non_blocking=True
                    )
                    copied.record(stream)
                if state is not None:  # while it is being copied
                    began = time.perf_counter()
                    state.update(memory[:count])
                    seconds += time.perf_counter() - began
            if state is not None and (found := state.hexdigest()) != source.wanted[index]:
                raise ArtifactError(
                    f"{source.label}: chunk {index} (from byte {start})",
                    expected=source.wanted[index],
                    found=found,
                    fix=_FIX,
                )
            done(max(end - max(start, first), 0))
    finally:
        for fd in opened.values():
            os.close(fd)
        stream.synchronize()  # the buffers may go to another call
    return seconds


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def _open(source: Source) -> int:
    try:
        return source.open()
    except OSError as error:
        raise _unreadable(source, error) from None


def _read(fd: int, source: Source, offset: int, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        try:
            count = os.preadv(fd, [into[filled:] if filled else into], offset + filled)
        except OSError as error:
            raise _unreadable(source, error) from None
        if count == 0:
            raise ArtifactError(f"{source.label} ends early", fix=_FIX)
        filled += count


def _unreadable(source: Source, error: OSError) -> ArtifactError:
    return ArtifactError(f"{source.label}: {error.strerror}", fix=_FIX)


def _allocate(layout: RankLayout, part: str, device: torch.device) -> Tensor:
    return torch.empty(part_bytes(layout, part) + SLACK, dtype=torch.uint8, device=device)


# ---- random weights ----


def dummy_weights(layout: RankLayout, device: torch.device, seed: int = 0) -> Weights:
    """Random weights in a rank's layout: no NaN, activations of about unit size, spread routing.

    A matrix's entries are normal with variance 1 / (its reduction length), a norm's are 1; E4M3
    values are normal with a standard deviation of 16, their scales the power of two that undoes it.
    """
    parts = {part: _allocate(layout, part, device) for part in PARTS}
    weights = Weights(layout=layout, parts=parts)
    own = 2 * layout.rank + 1
    seeds = {"replicated": seed, "partitioned": seed ^ own, "ffn": seed ^ (own + 1)}
    generators = {part: torch.Generator(device).manual_seed(seeds[part]) for part in PARTS}
    for name, spec in layout.tensors.items():
        _fill(weights.view(name), spec, layout, generators[spec.part])
    torch.cuda.synchronize(device)
    return weights


def _fill(out: Tensor, spec: TensorSpec, layout: RankLayout, generator: torch.Generator) -> None:
    hidden = layout.geometry.hidden_size
    if spec.name == "ffn_unit_offset":
        offsets = torch.tensor(layout.unit_offsets, dtype=torch.int32, device=out.device)
        out.copy_(offsets.view(torch.uint8))
    elif spec.dtype == "F32":  # scales
        width = hidden if "gate_up" in spec.name else layout.geometry.moe_intermediate_size
        out.view(torch.float32).fill_(2.0 ** round(math.log2(width**-0.5 / 16)))
    elif spec.name.endswith("norm"):
        out.view(torch.bfloat16).fill_(1.0)
    else:
        width = 1 if spec.name == "embed" else spec.shape[-1]
        piece = 1 << 26
        kind = torch.float8_e4m3fn if spec.dtype == "F8_E4M3" else torch.bfloat16
        std = 16.0 if spec.dtype == "F8_E4M3" else width**-0.5
        values = out.view(kind)
        for start in range(0, values.numel(), piece):
            part = values[start : start + piece]
            part.copy_(torch.randn(part.numel(), generator=generator, device=out.device).mul_(std))
