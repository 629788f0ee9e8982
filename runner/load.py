"""Weights in GPU memory: a rank's shard from its files, or random ones in the same layout.

Shard files are read by several threads, each into its pinned buffers in turn, and copied from there
asynchronously: a copy straight from pageable memory runs at a fraction of the bus. Every part of a
shard becomes one allocation; tensors are places in it, as the layout says.
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import PARTS, RankLayout, TensorSpec

#: Bytes of a pinned buffer, buffers of a thread, and threads that read. Large buffers, since
#: Python's lock passes some ten thousand pieces a second in all; with two a thread reads into one
#: while the other is copied. The bytes of all are a power of two: what PyTorch rounds up to.
STAGE_BYTES = 16 << 20
BUFFERS = 2
THREADS = min(16, os.cpu_count() or 1)
#: Bytes that an allocation is longer: the kernel copies scales in whole 16 bytes.
SLACK = 256


@dataclass(kw_only=True, slots=True)
class Weights:
    """One rank's weights on a device."""

    layout: RankLayout
    parts: dict[str, Tensor]  # uint8, SLACK longer than the part's data

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
    threads: int = THREADS,
) -> Weights:
    """Copy a rank's shard to a device. `done` is told of bytes that have been handed over.

    Raises ArtifactError if a file cannot be read to its end.
    """
    layout = artifact.layouts[rank]
    parts = {part: _allocate(layout, part, device) for part in PARTS}
    files = []
    for part in PARTS:
        first = layout.part(part)[0]
        name, start = artifact.locate(rank, first)
        files.append((artifact.path / name, start, part_bytes(layout, part), parts[part]))
    copy_files(files, device, done, threads)
    return Weights(layout=layout, parts=parts)


def copy_files(
    files: list[tuple[Path, int, int, Tensor]],
    device: torch.device,
    done: Callable[[int], object],
    threads: int = THREADS,
) -> None:
    """Copy (file, offset, bytes) to the start of a uint8 tensor on the device, for each."""
    pieces = _pieces(files)
    # One allocation: pinning is slow. PyTorch keeps it, for the next call of this process.
    stages = _pinned(threads * BUFFERS * STAGE_BYTES).view(threads, BUFFERS, STAGE_BYTES)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(buffers: Tensor) -> None:
        try:
            _copy_pieces(pieces, buffers, lock, device, done, errors)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    workers = [threading.Thread(target=work, args=(own,), daemon=True) for own in stages]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    torch.cuda.synchronize(device)


def _pieces(
    files: list[tuple[Path, int, int, Tensor]],
) -> Iterator[tuple[Path, int, int, Tensor]]:
    """(file, offset, bytes, where to) of at most STAGE_BYTES."""
    for path, start, length, target in files:
        for offset in range(0, length, STAGE_BYTES):
            count = min(STAGE_BYTES, length - offset)
            yield path, start + offset, count, target[offset : offset + count]


def _copy_pieces(
    pieces: Iterator[tuple[Path, int, int, Tensor]],
    buffers: Tensor,
    lock: threading.Lock,
    device: torch.device,
    done: Callable[[int], object],
    errors: list[BaseException],
) -> None:
    """One thread's share: read into one of its buffers while the others are being copied."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)  # this thread's
    ring = [
        (buffer, memoryview(buffer.numpy()), torch.cuda.Event())  # type: ignore[no-untyped-call]
        for buffer in buffers
    ]
    opened: dict[Path, int] = {}
    try:
        for buffer, memory, copied in itertools.cycle(ring):
            if errors:
                break
            with lock:
                piece = next(pieces, None)
            if piece is None:
                break
            path, offset, count, target = piece
            if path not in opened:
                opened[path] = _open(path)
            copied.synchronize()
            _read(opened[path], path, offset, memory[:count])
            target.copy_(buffer[:count], non_blocking=True)
            copied.record(stream)
            with lock:
                done(count)
    finally:
        for fd in opened.values():
            os.close(fd)
        stream.synchronize()  # the buffers may go to another call


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(path, error) from None


def _read(fd: int, path: Path, offset: int, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        try:
            count = os.preadv(fd, [into[filled:]], offset + filled)
        except OSError as error:
            raise _unreadable(path, error) from None
        if count == 0:
            raise ArtifactError(f"{path} ends early", fix="dsv2mk verify DIR tells more")
        filled += count


def _unreadable(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{path}: {error.strerror}", fix="dsv2mk verify DIR tells more")


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
