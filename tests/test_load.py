"""Weights on their way to a GPU: sizes, pieces, reads, random values; no GPU takes part."""

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import make_artifact, small_config, tiny_config
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
    STAGE_BYTES,
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


@settings(max_examples=50, deadline=None)
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


# ---- pieces ----

Piece = tuple[Path, int, int, Tensor]


def assert_cover(files: list[Piece], pieces: list[Piece], most: int) -> None:
    """Every byte of every file once, in order, to its own place."""
    left = list(pieces)
    for path, start, length, target in files:
        done = 0
        while done < length:
            piece_path, offset, count, to = left.pop(0)
            assert (piece_path, offset) == (path, start + done)
            assert 0 < count <= most
            assert to.numel() == count
            assert to.data_ptr() == target.data_ptr() + done
            done += count
        assert done == length
    assert left == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), max_size=4),
    st.integers(1, 20),
)
def test_pieces_cover_each_file_once_and_in_order(sizes: list[tuple[int, int]], most: int) -> None:
    files = [
        (Path(f"f{index}"), start, length, torch.empty(length + SLACK, dtype=torch.uint8))
        for index, (start, length) in enumerate(sizes)
    ]
    with mock.patch.object(load, "STAGE_BYTES", most):
        assert_cover(files, list(load._pieces(files)), most)


def test_a_piece_fits_a_buffer() -> None:
    for length in (1, STAGE_BYTES - 1, STAGE_BYTES, STAGE_BYTES + 1, 2 * STAGE_BYTES):
        files = [(Path("f"), 4096, length, torch.empty(length + SLACK, dtype=torch.uint8))]
        pieces = list(load._pieces(files))
        assert len(pieces) == math.ceil(length / STAGE_BYTES)
        assert_cover(files, pieces, STAGE_BYTES)


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
        load._read(fd, path, offset, memoryview(into))
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
        LateStream.current.stream.copies.append((self.tensor, source))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams as late as they can be, and buffers of 7 bytes."""

    def set_stream(stream: LateStream) -> None:
        LateStream.current.stream = stream

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(load, "_pinned", lambda count: torch.zeros(count, dtype=torch.uint8))
    monkeypatch.setattr(load, "STAGE_BYTES", 7)


def copy(files: list[tuple[Path, int, int, Tensor]], threads: int) -> list[int]:
    told: list[int] = []
    late_files: Any = [(*file, LateTarget(target)) for *file, target in files]
    load.copy_files(late_files, torch.device("cpu"), told.append, threads)
    return told


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_buffer_is_filled_again_only_once_it_is_copied(
    threads: int, late: None, file: Path, tmp_path: Path
) -> None:
    data = file.read_bytes()
    second = tmp_path / "second"
    second.write_bytes(data[::-1])
    targets = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
    files = [(file, 0, 1000, targets[0]), (second, 3, 990, targets[1]), (file, 9, 0, targets[2])]
    told = copy(files, threads)
    assert bytes(targets[0].tolist()) == data
    assert bytes(targets[1].tolist()) == data[::-1][3:993] + bytes(10)
    assert not targets[2].any()
    assert (sum(told), max(told), len(told)) == (1990, 7, 143 + 142)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_ends_all_reading(threads: int, late: None, file: Path) -> None:
    target = torch.zeros(10**6, dtype=torch.uint8)
    with pytest.raises(ArtifactError, match="ends early"):
        copy([(file, 0, 10**6, target)], threads)
    assert bytes(target[:994].tolist()) == file.read_bytes()[:994]  # of whole buffers
    absent = file.with_name("absent")
    with pytest.raises(ArtifactError, match=f"{absent}: No such file"):
        copy([(absent, 0, 10, target)], threads)


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
