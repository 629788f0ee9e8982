"""Weights on their way to a GPU: sizes, chunks, reads, proofs, random values; no GPU takes part."""

import errno
import math
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from helpers import flip_byte, make_artifact, small_config, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries
from torch import Tensor

from dsv2mk.artifacts.container import read_header
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import PARTS, RankLayout
from dsv2mk.manifests.topology import Topology
from dsv2mk.runner import load
from dsv2mk.runner.load import (
    SLACK,
    Source,
    Weights,
    dummy_weights,
    part_bytes,
    weight_bytes,
)

ITEM = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}


def layout_of(config: dict[str, Any], ranks: int = 1, rank: int = 0) -> RankLayout:
    geometry = Geometry.from_config(config)
    return RankLayout(geometry=geometry, topology=Topology(ranks=ranks), rank=rank)


# ---- sizes ----


@settings(max_examples=50)
@given(geometries(), st.data())
def test_sizes_are_those_of_the_tensors(geometry: Geometry, data: st.DataObject) -> None:
    heads = geometry.num_attention_heads
    ranks = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    rank = data.draw(st.integers(0, ranks - 1))
    layout = RankLayout(geometry=geometry, topology=Topology(ranks=ranks), rank=rank)
    sizes = dict.fromkeys(PARTS, 0)
    for spec in layout.tensors.values():
        sizes[spec.part] += math.prod(spec.shape) * ITEM[spec.dtype]
    assert {part: part_bytes(layout, part) for part in PARTS} == sizes
    assert weight_bytes(layout) == sum(sizes.values()) + 3 * SLACK


def test_sizes_are_those_of_the_files(shared: Path, tmp_path: Path) -> None:
    artifact = make_artifact(shared / "snapshot", 3, tmp_path / "artifact")
    for layout in artifact.layouts:
        for part in PARTS:
            path = artifact.path / layout.file_name(part)
            header = len(read_header(path).encoded)
            assert path.stat().st_size - header == part_bytes(layout, part)
            assert artifact.locate(layout.rank, layout.part(part)[0]) == (path.name, header)


# ---- chunks ----


def source(path: Path, start: int, end: int, target: Any = None, **given: Any) -> Source:
    if target is None:
        target = torch.empty(max(end - start, 0) + SLACK, dtype=torch.uint8)
    opener = partial(os.open, path, os.O_RDONLY)
    return Source(open=opener, label=str(path), start=start, end=end, target=target, **given)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100), st.booleans()), max_size=4),
    st.integers(1, 20),
)
def test_chunks_hold_each_byte_of_data_once_and_of_headers_what_is_hashed(
    files: list[tuple[int, int, bool]], most: int
) -> None:
    sources = []
    for number, (start, length, hashed) in enumerate(files):
        wanted = {0: "any"} if hashed and start + length else {}
        sources.append(source(Path(f"f{number}"), start, start + length, wanted=wanted))
    with mock.patch.object(load, "CHUNK_BYTES", most):
        chunks = list(load._chunks(sources))
    found = [
        (one.label, at) for one, index in chunks for at in range(index * most, most + index * most)
    ]
    assert len(set(found)) == len(found)
    assert found == sorted(found)
    for one in sources:
        of_file = {at for path, at in found if path == one.label}
        assert of_file >= set(range(one.start, one.end))
        if one.wanted:
            assert 0 in of_file
        elif one.start >= most:
            assert 0 not in of_file


# ---- reads ----


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank-00.ffn.safetensors"
    path.write_bytes(bytes(index % 251 for index in range(1000)))
    return path


def read(path: Path, offset: int, count: int) -> bytes:
    into = bytearray(b"\xee" * count)
    fd = os.open(path, os.O_RDONLY)
    try:
        load._read(fd, source(path, 0, 1000), offset, memoryview(into))
    finally:
        os.close(fd)
    return bytes(into)


@pytest.mark.parametrize(("offset", "count"), [(0, 1000), (0, 1), (999, 1), (1, 998), (1000, 0)])
@pytest.mark.parametrize("at_once", [1000, 300, 1])
def test_what_is_read_is_the_file_s(
    offset: int, count: int, at_once: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system gives less than was asked for."""
    preadv = os.preadv

    def less(fd: int, buffers: list[memoryview], at: int) -> int:
        return preadv(fd, [buffers[0][:at_once]], at)

    monkeypatch.setattr(os, "preadv", less)
    assert read(file, offset, count) == file.read_bytes()[offset : offset + count]


@pytest.mark.parametrize(("offset", "count"), [(0, 1001), (999, 2), (1000, 1), (5000, 1)])
def test_a_file_that_ends_early_is_refused(offset: int, count: int, file: Path) -> None:
    with pytest.raises(ArtifactError, match="ends early") as refused:
        read(file, offset, count)
    assert str(file) in str(refused.value)
    assert "dsv2mk verify" in str(refused.value)
    assert refused.value.exit_code == 11


def test_a_file_that_cannot_be_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ArtifactError, match=f"{file}: Input/output error"):
        read(file, 0, 10)


# ---- copies ----


class LateStream:
    """Copies nothing before it is waited for."""

    current = threading.local()

    def __init__(self, device: object) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def run(self, end: int) -> None:
        for target, source in self.copies[self.done : end]:
            target.copy_(source)
        self.done = max(self.done, end)

    def synchronize(self) -> None:
        self.run(len(self.copies))


class LateEvent:
    stream: LateStream | None = None

    def record(self, stream: LateStream) -> None:
        self.stream, self.end = stream, len(stream.copies)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.end)


class LateTarget:
    """Of a tensor on the host, what is copied to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, place: slice) -> "LateTarget":
        return LateTarget(self.tensor[place])

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        assert self.tensor.shape == source.shape
        LateStream.current.stream.copies.append((self.tensor, source))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams as late as they can be; buffers of 7 bytes, and chunks of 31."""
    on_the_host(monkeypatch)
    monkeypatch.setattr(load, "STAGE_BYTES", 7)
    monkeypatch.setattr(load, "CHUNK_BYTES", 31)


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU stand in for those of a GPU."""

    def set_stream(stream: LateStream) -> None:
        LateStream.current.stream = stream

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(load, "_pinned", lambda count: torch.zeros(count, dtype=torch.uint8))


def copy(sources: list[Source], threads: int) -> list[int]:
    told: list[int] = []
    for one in sources:
        one.target = LateTarget(one.target)  # type: ignore[assignment]
    load.copy_files(sources, torch.device("cpu"), told.append, threads)
    return told


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_buffer_is_filled_again_only_once_it_is_copied(
    threads: int, late: None, file: Path, tmp_path: Path
) -> None:
    data = file.read_bytes()
    second = tmp_path / "second"
    second.write_bytes(data[::-1])
    targets = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
    sources = [
        source(file, 0, 1000, targets[0]),
        source(second, 3, 993, targets[1]),
        source(file, 9, 9, targets[2]),
    ]
    told = copy(sources, threads)
    assert bytes(targets[0].tolist()) == data
    assert bytes(targets[1].tolist()) == data[::-1][3:993] + bytes(10)
    assert not targets[2].any()
    # 32 chunks of 31 and one of 8; 31 - 3, 31 of 31, and one of 1.
    assert sorted(told) == [1, 8, 28] + [31] * 63


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_ends_all_reading(threads: int, late: None, file: Path) -> None:
    target = torch.zeros(10**6, dtype=torch.uint8)
    with pytest.raises(ArtifactError, match="ends early"):
        copy([source(file, 0, 10**6, target)], threads)
    assert bytes(target[:992].tolist()) == file.read_bytes()[:992]  # of whole chunks
    absent = file.with_name("absent")
    with pytest.raises(ArtifactError, match=f"{absent}: No such file"):
        copy([source(absent, 0, 10, target)], threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_who_is_told_may_end_it(threads: int, late: None, tmp_path: Path) -> None:
    """All threads stop, though only one of them was told to."""
    told: list[int] = []

    def done(count: int) -> None:
        told.append(count)
        if len(told) == 2:
            raise KeyboardInterrupt

    path, size = tmp_path / "file", 31 * 20_000
    path.write_bytes(bytes(size))
    target: Any = LateTarget(torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(KeyboardInterrupt):
        load.copy_files([source(path, 0, size, target)], torch.device("cpu"), done, threads)
    assert len(told) < 10_000


# ---- proofs ----


def digests(data: bytes, chunk: int = 31) -> dict[int, str]:
    parts = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    return {at: xxhash.xxh3_128_hexdigest(part) for at, part in enumerate(parts)}


#: Shorter than a chunk, a chunk, a multiple, one more, one less.
SIZES = [1, 30, 31, 32, 61, 62, 63, 310, 1000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("header", [0, 5, 31, 40, 62])
def test_every_chunk_is_proved_as_it_is_copied(
    size: int, header: int, late: None, tmp_path: Path
) -> None:
    """A header too, though it goes nowhere: one that fills a chunk, or more."""
    path, data = tmp_path / "file", bytes(index % 251 for index in range(size))
    path.write_bytes(data)
    start = min(header, size)
    for threads in (1, 2):
        target = torch.zeros(size, dtype=torch.uint8)
        told = copy([source(path, start, size, target, wanted=digests(data))], threads)
        assert bytes(target.tolist()) == data[start:] + bytes(start)
        assert (sum(told), len(told)) == (size - start, math.ceil(size / 31))


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_byte_is_found_in_its_chunk_and_in_no_other(
    size: int, late: None, tmp_path: Path
) -> None:
    path, data = tmp_path / "file", bytes(index % 251 for index in range(size))
    good, target = digests(data), torch.zeros(size, dtype=torch.uint8)
    for place in {0, 6, 7, 30, 31, 61, size // 2, size - 1} & set(range(size)):
        path.write_bytes(data)
        flip_byte(path, place)
        bad = place // 31
        with pytest.raises(ArtifactError) as refused:
            copy([source(path, 10, size, target, wanted=good)], 2)
        error = refused.value
        assert error.what == f"{path}: chunk {bad} (from byte {31 * bad})"
        assert (error.expected, error.exit_code) == (good[bad], 11)
        assert error.found == digests(path.read_bytes())[bad]
        others = {at: digest for at, digest in good.items() if at != bad}
        copy([source(path, 10, size, target, wanted=others)], 2)


def test_what_is_hashed_is_what_is_copied(
    late: None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes under the reader: a byte is other the second time that it is read."""
    seen: set[int] = set()
    preadv = os.preadv

    def once(fd: int, buffers: list[memoryview], at: int) -> int:
        count = preadv(fd, buffers, at)
        if at in seen:
            buffers[0][0] ^= 1
        seen.add(at)
        return count

    monkeypatch.setattr(os, "preadv", once)
    data, target = file.read_bytes(), torch.zeros(1000, dtype=torch.uint8)
    copy([source(file, 0, 1000, target, wanted=digests(data))], 1)
    assert bytes(target.tolist()) == data
    assert len(seen) == 32 * 5 + 2  # 31 bytes in 5 pieces, 8 in 2


# ---- places on the device ----


def weights_of(layout: RankLayout) -> Weights:
    parts = {
        part: torch.zeros(part_bytes(layout, part) + SLACK, dtype=torch.uint8) for part in PARTS
    }
    return Weights(layout=layout, parts=parts)


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 4, "q_lora_rank": None}])
def test_tensors_lie_where_the_layout_says(changes: dict[str, Any]) -> None:
    weights = weights_of(layout_of(tiny_config(**changes), ranks=2, rank=1))
    for number, name in enumerate(weights.layout.tensors):
        weights.view(name).fill_(number + 1)
    for part in PARTS:
        data = weights.parts[part]
        position = 0
        for spec in weights.layout.part(part):  # in the order of a file's bytes
            number = list(weights.layout.tensors).index(spec.name) + 1
            assert weights.address(spec.name) == weights.base(part) + position
            assert set(data[position : position + spec.nbytes].tolist()) == {number}
            position += spec.nbytes
        assert data[position:].tolist() == [0] * SLACK
    assert all(weights.address(name) for name in weights.layout.tensors)
    absent = {"router", "q_a_norm"} if changes else set()
    assert {name for name in ("router", "q_a_norm") if not weights.address(name)} == absent


# ---- random weights ----


def filled(layout: RankLayout, seed: int) -> dict[str, Tensor]:
    weights, generator = weights_of(layout), torch.Generator().manual_seed(seed)
    for name, spec in layout.tensors.items():
        load._fill(weights.view(name), spec, layout, generator)
    assert all(not weights.parts[part][-SLACK:].any() for part in PARTS)
    return {name: weights.view(name) for name in layout.tensors}


KINDS = {
    **{"BF16": torch.bfloat16, "F32": torch.float32},
    **{"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32},
}


@pytest.mark.parametrize("config", [tiny_config(), small_config(first_k_dense_replace=2)])
def test_random_weights_are_of_unit_size_to_what_they_are_applied(config: dict[str, Any]) -> None:
    layout = layout_of(config, ranks=2, rank=1)
    first, again, other = filled(layout, 0), filled(layout, 0), filled(layout, 1)
    for name, spec in layout.tensors.items():
        assert torch.equal(first[name], again[name])
        values = first[name].view(KINDS[spec.dtype]).double()
        if name == "ffn_unit_offset":
            assert values.tolist() == list(layout.unit_offsets)
        elif name.endswith("norm"):
            assert set(values.tolist()) == {1.0}
        elif spec.dtype == "F32":
            width = config["hidden_size" if "gate_up" in name else "moe_intermediate_size"]
            (scale,) = set(values.tolist())
            assert math.frexp(scale)[0] == 0.5  # a power of two
            assert 0.7 < scale * 16 * width**0.5 < 1.5
        else:
            assert not torch.equal(first[name], other[name])
            wanted = 16 if spec.dtype == "F8_E4M3" else spec.shape[-1] ** -0.5
            wanted = 1 if name == "embed" else wanted
            assert bool(values.isfinite().all())
            assert float(values.std()) == pytest.approx(wanted, rel=0.05)
            assert abs(float(values.mean())) < 0.05 * wanted


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_what_ranks_share_is_equal_and_all_else_their_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    layouts = [layout_of(tiny_config(), ranks=2, rank=rank) for rank in (0, 1, 0)]
    here = torch.device("cpu")
    first, second, again = (dummy_weights(layout, here, seed) for layout in layouts)
    other = dummy_weights(layouts[0], here, seed ^ 1)
    drawn = {"embed", "router", "lm_head", "ffn_gate_up", "ffn_down"}
    assert drawn < set(layouts[0].tensors)
    for name, spec in layouts[0].tensors.items():
        assert torch.equal(first.view(name), again.view(name))
        mine, theirs = first.view(name), second.view(name)
        constant = spec.dtype == "F32" or name.endswith("norm")
        if constant:
            assert mine[:4].tolist() * (len(theirs) // 4) == theirs.tolist()
        elif spec.part == "replicated":
            assert torch.equal(mine, theirs)
        elif name == "ffn_unit_offset":
            assert theirs.view(torch.int32).tolist() == list(layouts[1].unit_offsets)
        else:
            least = min(len(mine), len(theirs))  # of units, one rank may have more
            alike = (mine[:least] == theirs[:least]).double().mean()
            assert alike < 0.25  # half of a bf16 is sign and exponent
        if not constant and name != "ffn_unit_offset":
            assert not torch.equal(mine, other.view(name))
