"""Safetensors files that are none: refused when read, and as part of a checkpoint."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SINGLE, Call, assert_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dsv2mk.artifacts.container import ContainerError, read_header


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header, JSON or bytes, whatever it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def two(*offsets: tuple[int, int]) -> dict[str, Any]:
    """Tensors a, b of as many bytes as their offsets say."""
    return {
        name: {"dtype": "U8", "shape": [max(0, end - start)], "data_offsets": [start, end]}
        for name, (start, end) in zip("ab", offsets, strict=True)
    }


FOUR = b"\1\2\3\4"
ONE = json.dumps(one()).encode()
TWICE = ONE[:-1] + b"," + ONE[1:]
MANY = b",".join(b'"model.layers.%d.weight":0' % layer for layer in range(40_000))

#: File -> what its refusal must say.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "7 bytes": (b"\1\0\0\0\0\0\0", "too few"),
    "no header": (raw(b""), "JSON"),
    "a length of 2^40": (raw({}, length=1 << 40), "1099511627776"),
    "a length of 2^64 - 1": (raw({}, length=(1 << 64) - 1), "18446744073709551615"),
    "a length 1 beyond the file": (raw({}, length=3), "header of 3 bytes"),
    "invalid UTF-8": (raw(b'{"\xff":1}'), "UTF-8"),
    "UTF-16": (raw("{}".encode("utf-16")), "UTF-8"),
    "no JSON": (raw(b"{a:1}"), "JSON"),
    "two objects": (raw(b"{}{}"), "JSON"),
    "NUL padding": (raw(b"{}\0\0"), "JSON"),
    "a control character": (raw(b'{"a\n":1}'), "JSON"),
    "leading space": (raw(b"  {}"), "object"),
    "array": (raw([]), "object"),
    "number": (raw(b"1"), "object"),
    "a name twice": (raw(TWICE, FOUR), "'a' stands twice"),
    "a name twice of 40000": (raw(b"{" + MANY + b',"a":0,"a":0}'), "'a' stands twice"),
    "a key twice": (raw(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' stands twice"),
    "a lone surrogate": (raw(ONE.replace(b'"a"', b'"\\ud800"'), FOUR), "header"),
    "overlap": (raw(two((0, 4), (2, 6)), b"123456"), "b at byte"),
    "the same place": (raw(two((0, 4), (0, 4)), FOUR), "overlaps"),
    "contained": (raw(two((0, 4), (1, 3)), FOUR), "overlaps"),
    "hole": (raw(two((0, 2), (3, 4)), FOUR), "hole"),
    "hole at the start": (raw(two((1, 2), (2, 4)), FOUR), "a at byte"),
    "out of range": (raw(one(offsets=[4, 8]), FOUR), "a at byte"),
    "truncated": (raw(one(), FOUR[:3]), "truncated"),
    "no data": (raw(one()), "truncated"),
    "trailing byte": (raw(one(), FOUR + b"\0"), "other bytes"),
    "trailing bytes and no tensor": (raw({}, FOUR), "other bytes"),
    "negative offset": (raw(one(offsets=[-4, 0]), FOUR), "data_offsets"),
    "offsets turned": (raw(one(offsets=[4, 0]), FOUR), "data_offsets"),
    "bool offset": (raw(one("U8", [1], [False, True]), b"\1"), "data_offsets"),
    "float offset": (raw(one(offsets=[0, 4.0]), FOUR), "data_offsets"),
    "three offsets": (raw(one(offsets=[0, 4, 4]), FOUR), "data_offsets"),
    "offsets null": (raw(one(offsets=None), FOUR), "data_offsets"),
    "offset past 2^63": (raw(one(offsets=[0, 1 << 64]), FOUR), "data_offsets"),
    "float shape": (raw(one(shape=[4.0]), FOUR), "shape"),
    "bool shape": (raw(one(shape=[4, True]), FOUR), "shape"),
    "negative shape": (raw(one(shape=[-2, -2]), FOUR), "shape"),
    "shape a number": (raw(one(shape=4), FOUR), "shape"),
    "shape NaN": (raw(one(shape=[math.nan]), FOUR), "shape"),
    "another shape": (raw(one(shape=[5]), FOUR), "data_offsets"),
    "another dtype": (raw(one("F32"), FOUR), "data_offsets"),
    "shape of 2^80": (raw(one(shape=[1 << 40, 1 << 40]), FOUR), "2^63"),
    "shape of 2^64": (raw(one(shape=[1 << 32, 1 << 32], offsets=[0, 0])), "2^63"),
    "shape of 400 axes": (raw(one(shape=[1 << 62] * 400), FOUR), "a"),
    "shape of 100000 axes": (raw(one(shape=[1 << 62] * 100_000), FOUR), "a"),
    "shape past 2^64 times 0": (raw(one(shape=[1 << 62, 4, 4, 0], offsets=[0, 0])), "a"),
    "a number of 5000 digits": (raw(b'{"a":' + b"9" * 5000 + b"}"), "JSON"),
    "unknown dtype": (raw(one("F7"), FOUR), "F7"),
    "dtype null": (raw(one(None), FOUR), "dtype"),
    "dtype a list": (raw(one([]), FOUR), "dtype"),
    "entry null": (raw({"a": None}), "a"),
    "entry without shape": (raw({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, FOUR), "entry"),
    "entry with more": (raw({"a": {**one()["a"], "x": 1}}, FOUR), "entry"),
    "100000 brackets": (raw(b'{"a":' + b"[" * 100_000), "JSON"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata nested": (raw({"__metadata__": {"a": {}}}), "__metadata__"),
    "metadata a list": (raw({"__metadata__": []}), "__metadata__"),
    "metadata a tensor": (raw({"__metadata__": one()["a"]}, FOUR), "__metadata__"),
}

#: What the library lets pass, though the format's description does not allow it.
LENIENT = ("leading space", "a name twice", "entry with more")


def with_weights(shared: Path, target: Path, weights: Callable[[Path], object]) -> Path:
    """A checkpoint whose only weight file is made by `weights`."""
    target.mkdir()
    shutil.copy(shared / "snapshot" / "config.json", target)
    weights(target / SINGLE)
    return target


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(
    case: str, shared: Path, tmp_path: Path, dsv2mk: Call, alarm: None
) -> None:
    """By the library, by itself, and as the file of a checkpoint."""
    data, word = HOSTILE[case]
    folder = with_weights(shared, tmp_path / "input", lambda path: path.write_bytes(data))
    if case not in LENIENT:
        with pytest.raises(SafetensorError):
            load_file(folder / SINGLE)
    with pytest.raises(ContainerError) as caught:
        read_header(folder / SINGLE)
    assert word in str(caught.value)
    if case.startswith("a name twice"):  # and it is not called bad JSON
        assert str(caught.value) == "'a' stands twice in the header"
    assert_refused(dsv2mk, folder, SINGLE, word)


NO_FILE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILE)
def test_what_is_no_file_is_refused_at_once(
    kind: str, shared: Path, tmp_path: Path, dsv2mk: Call, alarm: None
) -> None:
    folder = with_weights(shared, tmp_path / "input", NO_FILE[kind])
    with pytest.raises((ContainerError, IsADirectoryError)):
        read_header(folder / SINGLE)
    assert_refused(dsv2mk, folder, SINGLE)


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file that the library wrote, and its bytes."""
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    tensors = {"w": torch.ones(3, 5), "x.y": torch.ones(2, 2).half(), "z": torch.ones(1).bool()}
    save_file(tensors, path, {"format": "pt"})
    return path, path.read_bytes()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_raise_nothing_else(
    valid_file: tuple[Path, bytes], data: st.DataObject
) -> None:
    """And what is still taken for whole is so for the library, too."""
    path, content = valid_file
    header = 8 + int.from_bytes(content[:8], "little")
    flips = st.tuples(st.integers(0, header - 1), st.integers(1, 255))
    changed = bytearray(content)
    for at, mask in data.draw(st.lists(flips, min_size=1, max_size=4)):
        changed[at] ^= mask
    path.write_bytes(changed)
    try:
        found = read_header(path)
    except ContainerError:
        return
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(found.tensors)
