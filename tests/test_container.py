"""Bytes at rest: the container, hashes, and how a damaged artifact or checkpoint is found out."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dsv2mk.artifacts import console, hashing
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.container import ContainerError, encode_header, read_header
from dsv2mk.artifacts.tensors import statistics
from dsv2mk.manifests import manifest as manifest_module
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import TensorSpec
from dsv2mk.pipeline import work as work_module
from dsv2mk.pipeline.cli import cli
from tests.helpers import edit_json, make_artifact, make_snapshot, small_config


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    code = console.run(cli, [str(arg) for arg in args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def alarm() -> Iterator[None]:
    """Fails a test that waits for ever."""

    def hangs(*_: object) -> None:
        raise AssertionError("waits for ever")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def spec(name: str, dtype: str, shape: tuple[int, ...], offset: int = 0) -> TensorSpec:
    return TensorSpec(
        name=name, part="ffn", dtype=dtype, axis="other", shape=shape, origin=(), offset=offset
    )


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


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case: str, tmp_path: Path, alarm: None) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[case][0])
    if case not in LENIENT:
        with pytest.raises(SafetensorError):
            load_file(path)
    with pytest.raises(ContainerError) as caught:
        read_header(path)
    assert HOSTILE[case][1] in str(caught.value)


def test_a_name_twice_is_not_called_bad_json(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(TWICE, FOUR))
    with pytest.raises(ContainerError, match=r"^'a' stands twice in the header$"):
        read_header(path)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NO_FILE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": make_fifo,
    "device": make_device,
}


@pytest.mark.parametrize("kind", NO_FILE)
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path: Path, alarm: None) -> None:
    path = tmp_path / "a.safetensors"
    NO_FILE[kind](path)
    with pytest.raises((ContainerError, IsADirectoryError)):
        read_header(path)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_snapshot(tmp_path_factory.mktemp("input") / "snapshot", small_config())


def with_weights(snapshot: Path, target: Path, weights: Callable[[Path], object]) -> Path:
    """A checkpoint whose only weight file is made by `weights`."""
    target.mkdir()
    shutil.copy(snapshot / "config.json", target)
    weights(target / "model.safetensors")
    return target


def refuses(
    capsys: pytest.CaptureFixture[str], folder: Path, place: Path, words: tuple[str, ...]
) -> None:
    """`plan` and `build` refuse a checkpoint in one line and leave nothing in `place`."""
    for command in ("plan", "build"):
        args = (command, folder, "--tp", 2, "--out", place / "made" / "out")
        code, out, err = run(capsys, *args)
        assert (code, out) == (10, "")
        assert len(err.splitlines()) == 1
        assert all(word in err for word in words), err
        code, out, err = run(capsys, *args, "--json")
        assert (code, err) == (10, "")
        error = json.loads(out)["error"]
        assert error["exit_code"] == 10
        assert all(word in error["message"] for word in words)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("case", HOSTILE)
def test_a_checkpoint_with_a_hostile_file_is_refused(
    case: str, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], alarm: None
) -> None:
    data, word = HOSTILE[case]
    folder = with_weights(snapshot, tmp_path / "input", lambda path: path.write_bytes(data))
    place = tmp_path / "place"
    place.mkdir()
    refuses(capsys, folder, place, ("model.safetensors", word))


@pytest.mark.parametrize("kind", NO_FILE)
def test_a_checkpoint_with_no_file_for_a_file_is_refused(
    kind: str, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], alarm: None
) -> None:
    folder = with_weights(snapshot, tmp_path / "input", NO_FILE[kind])
    place = tmp_path / "place"
    place.mkdir()
    refuses(capsys, folder, place, ("model.safetensors",))


def cut(data: bytes) -> bytes:
    return data[:-1]


def lengthen(data: bytes) -> bytes:
    return data + b"\0"


def rename_tensor(data: bytes) -> bytes:
    return data.replace(b'"model.norm.weight"', b'"model.norm.weighs"')


REAL_DAMAGE = {
    "cut short": (cut, "truncated"),
    "lengthened": (lengthen, "other bytes"),
    "a tensor renamed": (rename_tensor, "model.norm.weight"),
}


@pytest.mark.parametrize("case", REAL_DAMAGE)
def test_a_damaged_file_of_a_real_checkpoint_is_refused(
    case: str, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, word = REAL_DAMAGE[case]
    data = (snapshot / "model.safetensors").read_bytes()
    assert damage(data) != data
    place = tmp_path / "place"
    place.mkdir()
    folder = with_weights(snapshot, tmp_path / "input", lambda path: path.write_bytes(damage(data)))
    refuses(capsys, folder, place, (word,))


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file that the library wrote, and its bytes."""
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    tensors = {"w": torch.ones(3, 5), "x.y": torch.ones(2, 2).half(), "z": torch.ones(1).bool()}
    save_file(tensors, path, {"format": "pt"})
    return path, path.read_bytes()


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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


# ---- a damaged artifact ----


@pytest.fixture(scope="module")
def built(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.1")
        return make_artifact(snapshot, 2, tmp_path_factory.mktemp("artifact") / "a").path


@pytest.fixture
def artifact(built: Path, tmp_path: Path) -> Path:
    """A copy, in which no file is a link to another."""
    return shutil.copytree(built, tmp_path / "artifact")


def files_of(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
    assert len(names) == 10  # 2 ranks of 3 parts, config, generation config, tokenizer and its own
    return names


def found_by_verify(
    capsys: pytest.CaptureFixture[str], folder: Path, *options: object
) -> dict[str, str]:
    """The damaged files that `verify` names, in text and as JSON."""
    code, out, _ = run(capsys, "verify", folder, "--json", *options)
    data = json.loads(out)
    problems: dict[str, str] = data["problems"]
    assert data["ok"] == (not problems)
    assert code == (1 if problems else 0)
    code, out, _ = run(capsys, "verify", folder, *options)
    assert code == (1 if problems else 0)
    assert [line.split(":")[0] for line in out.splitlines()[:-1]] == list(problems)
    assert out.splitlines()[-1].startswith("damaged" if problems else "ok")
    return problems


def test_a_whole_artifact_passes(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found_by_verify(capsys, artifact) == {}


def test_a_flipped_bit_anywhere_is_found(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files_of(artifact):
        path = artifact / name
        content = path.read_bytes()
        rng = random.Random(name)
        places = {0, len(content) // 2, len(content) - 1, rng.randrange(len(content))}
        if name.endswith(".safetensors"):
            places |= {8, 4096}  # in the header; first byte of the data
        for place in sorted(places):
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            assert list(found_by_verify(capsys, artifact)) == [name]
        path.write_bytes(content)
    assert found_by_verify(capsys, artifact) == {}


def test_damage_of_the_shared_file_is_told_of_each_name(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replicated part is one file under a name for each rank."""
    names = [f"rank-0{rank}.replicated.safetensors" for rank in range(2)]
    assert os.path.samefile(*(built / name for name in names))
    copy = shutil.copytree(built, tmp_path / "artifact")
    (copy / names[1]).unlink()
    os.link(copy / names[0], copy / names[1])
    with open(copy / names[0], "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    assert list(found_by_verify(capsys, copy)) == names


def cut_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def empty_file(path: Path) -> None:
    os.truncate(path, 0)


def edit_header(path: Path) -> None:
    """Another metadata value of the same length: still a whole safetensors file."""
    changed = path.read_bytes().replace(b'"layout_version":"1"', b'"layout_version":"2"', 1)
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert read_header(path).metadata["layout_version"] == "2"


def break_header(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WRONG_SIZE = (cut_file, lengthen_file, empty_file, Path.unlink, folder_instead, pipe_instead)
WRONG_SIZE += (dangling_instead,)
DAMAGE = [
    *(("rank-01.ffn.safetensors", damage) for damage in (*WRONG_SIZE, edit_header, break_header)),
    *(("config.json", damage) for damage in WRONG_SIZE),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda v: getattr(v, "__name__", v))
def test_a_damaged_file_is_found_without_reading_data(
    name: str,
    damage: Callable[[Path], object],
    artifact: Path,
    capsys: pytest.CaptureFixture[str],
    alarm: None,
) -> None:
    """`verify` names it; `inspect` and `generate` refuse to start."""
    damage(artifact / name)
    assert list(found_by_verify(capsys, artifact)) == [name]
    for command in (
        ("inspect", artifact),
        ("inspect", artifact, "embed", "--stats"),
        ("generate", artifact, "--token-ids", "1,2", "--max-new", 2),
    ):
        code, out, err = run(capsys, *command)
        assert (code, out) == (11, "")
        assert len(err.splitlines()) == 1
        assert name in err
        code, out, err = run(capsys, *command, "--json")
        assert (code, json.loads(out)["error"]["exit_code"], err) == (11, 11, "")


def test_an_edited_manifest_is_found(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = artifact / "manifest.json"
    content = path.read_bytes()
    data = json.loads(content)
    name = "rank-00.ffn.safetensors"
    (chunk,), digest = data["files"][name]["chunks"], data["files"][name]["digest"]
    assert chunk != digest

    for old in (chunk, digest):  # another hash of the right form
        path.write_bytes(content.replace(old.encode(), b"0" * 32))
        assert list(found_by_verify(capsys, artifact)) == [name]
    size = data["files"][name]["size"]
    path.write_bytes(content.replace(b'"size":%d' % size, b'"size":%d' % (size + 1)))
    assert name in found_by_verify(capsys, artifact)

    for changed in (content + b"\n", content[:-1], b"", content.replace(b'"embed"', b'"embad"')):
        path.write_bytes(changed)
        for command in (
            ("verify", artifact),
            ("inspect", artifact),
            ("diff", artifact, artifact),
            ("generate", artifact, "--token-ids", "1", "--max-new", 1),
        ):
            code, out, err = run(capsys, *command)
            assert (code, out) == (11, "")
            assert len(err.splitlines()) == 1
            assert str(artifact) in err


def test_what_is_no_artifact_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for path in (file, tmp_path / "folder", tmp_path / "absent"):
        with pytest.raises(ArtifactError, match=path.name):
            Artifact.open(path)
        for command in ("verify", "inspect"):
            code, out, err = run(capsys, command, path)
            assert (code, out) == (11, "")
            assert str(path) in err


# ---- several chunks ----

CHUNK = 16384


@pytest.fixture
def chunked(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """An artifact with chunks of 16 KiB, so that its files have many."""
    for module in (manifest_module, hashing, work_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return make_artifact(snapshot, 2, tmp_path / "chunked")


def test_chunks_of_a_build_are_those_of_its_files(chunked: Artifact) -> None:
    """The build hashes as it writes, in any order; here the finished files are hashed."""
    assert len(chunked.manifest.files["rank-00.ffn.safetensors"].chunks) > 30
    for name, entry in chunked.manifest.files.items():
        content = (chunked.path / name).read_bytes()
        parts = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        assert entry.size == len(content)
        assert list(entry.chunks) == [xxhash.xxh3_128_hexdigest(part) for part in parts]


def test_each_chunk_is_looked_at(chunked: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    name = "rank-01.partitioned.safetensors"
    path = chunked.path / name
    size = path.stat().st_size
    for index in range(math.ceil(size / CHUNK)):
        place = min(index * CHUNK + 8192, size - 1)
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), place)
            problems = chunked.verify()
            os.pwrite(file.fileno(), byte, place)
        assert list(problems) == [name]
        assert f"chunk {index} (from byte {index * CHUNK})" in problems[name]
    assert found_by_verify(capsys, chunked.path) == {}


@pytest.mark.parametrize("sample", [0, 0.001, 25, 50, 99.9, 100])
def test_a_sample_reads_its_share_and_at_least_one_chunk(sample: float, chunked: Artifact) -> None:
    told: list[int] = []
    assert chunked.verify(sample, told.append) == {}
    entries = dict(chunked.manifest.files)
    # The replicated part is one file, and is read once.
    assert (
        entries.pop("rank-01.replicated.safetensors") == entries["rank-00.replicated.safetensors"]
    )
    counts = [len(entry.chunks) for entry in entries.values()]
    assert len(told) == sum(max(1, math.ceil(count * sample / 100)) for count in counts)
    assert all(told)


def test_a_sample_finds_damage_that_is_everywhere(
    chunked: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "rank-01.ffn.safetensors"
    content = bytearray((chunked.path / name).read_bytes())
    header = len(read_header(chunked.path / name).encoded)
    for at in range(header, len(content), 4096):
        content[at] ^= 1
    content[-1] ^= 1
    (chunked.path / name).write_bytes(content)
    for sample in (0, 1, 50):
        assert list(found_by_verify(capsys, chunked.path, "--sample", sample)) == [name]


def test_a_sample_of_one_chunk_reads_it(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files here are smaller than a chunk: any sample is the whole file."""
    path = artifact / "rank-01.ffn.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert list(found_by_verify(capsys, artifact, "--sample", "50")) == [path.name]


# ---- inspect ----


def test_inspect_shows_what_the_library_finds(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "inspect", built, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert {tensor["rank"] for tensor in data["tensors"]} == {0, 1}
    seen = set()
    for tensor in data["tensors"]:
        with safe_open(built / tensor["file"], "pt") as file:
            found = file.get_slice(tensor["name"])
            assert (found.get_dtype(), found.get_shape()) == (tensor["dtype"], tensor["shape"])
            raw_bytes = (
                file.get_tensor(tensor["name"]).flatten().view(torch.uint8).numpy().tobytes()
            )
        content = (built / tensor["file"]).read_bytes()
        start = tensor["offset"]
        assert content[start : start + tensor["bytes"]] == raw_bytes
        seen.add((tensor["file"], tensor["name"]))
    stored = {
        (path.name, name)
        for path in built.glob("*.safetensors")
        for name in read_header(path).tensors
    }
    assert seen == stored
    code, out, _ = run(capsys, "inspect", built)
    assert code == 0
    assert all(name in out for _, name in stored)


def test_statistics_of_every_tensor_equal_numpy(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("replicated", "partitioned", "ffn"):
        for name, tensor in load_file(built / f"rank-01.{part}.safetensors").items():
            code, out, _ = run(capsys, "inspect", built, name, "--rank", 1, "--stats", "--json")
            assert code == 0
            (entry,) = json.loads(out)["tensors"]
            assert (entry["rank"], entry["name"]) == (1, name)
            values = tensor.float().numpy().astype(np.float64)
            expected = {
                "min": values.min(),
                "max": values.max(),
                "mean": values.mean(),
                "rms": np.sqrt(np.square(values).mean()),
            }
            stats = entry["stats"]
            for key, value in expected.items():
                assert stats[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)
            assert (stats["zeros"], stats["not_finite"]) == ((values == 0).sum(), 0)


def test_statistics_leave_out_what_is_not_finite() -> None:
    values = np.array([np.nan, 3, -0.0, np.inf, -5, -np.inf, 0], np.float32)
    assert statistics(memoryview(bytearray(values.tobytes())), spec("x", "F32", (7,))) == {
        "min": -5.0,
        "max": 3.0,
        "mean": -0.5,
        "rms": math.sqrt(34 / 4),
        "zeros": 2,
        "not_finite": 3,
    }
    nothing = statistics(memoryview(bytearray(b"\x7f\xff")), spec("x", "F8_E4M3", (2,)))
    assert nothing == {"min": 0, "max": 0, "mean": 0, "rms": 0, "zeros": 0, "not_finite": 2}


# ---- diff ----


def changes(capsys: pytest.CaptureFixture[str], a: Path, b: Path) -> list[tuple[str, str]]:
    code, out, _ = run(capsys, "diff", a, b, "--json")
    data = json.loads(out)
    assert code == (0 if data["same"] else 1)
    listed = [(change["sign"], change["what"]) for change in data["changes"]]
    assert data["same"] == (not listed)
    code, out, _ = run(capsys, "diff", a, b)
    assert code == (0 if data["same"] else 1)
    assert [tuple(line.split(maxsplit=1)) for line in out.splitlines() if line] == listed
    return listed


def test_diff_of_one_artifact_is_empty(
    built: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(capsys, built, artifact) == []


def test_diff_of_other_ranks(
    built: Path, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = make_artifact(snapshot, 1, tmp_path / "single").path
    rank_1 = [f"rank-01.{part}.safetensors" for part in ("ffn", "partitioned", "replicated")]
    modified = [("M", f"rank-00.{part}.safetensors") for part in ("ffn", "partitioned")]
    assert changes(capsys, built, single) == [
        *modified,
        *(("-", name) for name in rank_1),
        ("M", "topology.ranks: 2 -> 1"),
    ]
    assert changes(capsys, single, built) == [
        *modified,
        *(("+", name) for name in rank_1),
        ("M", "topology.ranks: 1 -> 2"),
    ]


def test_diff_of_another_input(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_snapshot(tmp_path / "other", small_config(), seed=1)
    (other / "LICENSE").write_text("free")
    edit_json(other / "config.json", routed_scaling_factor=2.0)
    found = changes(capsys, built, make_artifact(other, 2, tmp_path / "b").path)
    signs = {what: sign for sign, what in found}
    assert signs.pop("LICENSE") == "+"
    assert signs.pop("source.copied.LICENSE: added") == "+"
    assert signs.pop('geometry.routed_scaling_factor: "4.0" -> "2.0"') == "M"
    assert set(signs.values()) == {"M"}
    files = [what for what in signs if ":" not in what]
    shards = {path.name for path in built.glob("*.safetensors")}
    assert set(files) == {*shards, "config.json"}
    reverse = changes(capsys, tmp_path / "b", built)
    assert ("-", "LICENSE") in reverse
    assert ("-", "source.copied.LICENSE: removed") in reverse


# ---- --json ----


def commands(snapshot: Path, built: Path, out: Path) -> dict[str, tuple[int, list[object]]]:
    """A line for each command, with its exit code."""
    ids = ["--token-ids", "1,2"]
    return {
        "synth": (0, ["synth", out / "s", "--geometry", "tiny", "--layers", 1]),
        "plan": (0, ["plan", snapshot, "--tp", 3]),
        "build": (0, ["build", snapshot, "--tp", 1, "--out", out / "a", "--workers", 1]),
        "build again": (0, ["build", snapshot, "--tp", 2, "--out", built]),
        "verify": (0, ["verify", built, "--sample", 50]),
        "inspect": (0, ["inspect", built, "--rank", 1]),
        "inspect a tensor": (0, ["inspect", built, "embed", "--stats"]),
        "diff": (0, ["diff", built, built]),
        "generate": (0, ["generate", built, *ids, "--max-new", 2]),
        "no command": (2, ["melt"]),
        "no option": (2, ["plan", snapshot, "--tp", 2, "--gpu"]),
        "no argument": (2, ["diff", built]),
        "no number": (2, ["plan", snapshot, "--tp", "two"]),
        "no size": (2, ["synth", out / "s", "--geometry", "tiny", "--max-shard-size", "1 parsec"]),
        "no preset": (2, ["synth", out / "s", "--geometry", "gigantic"]),
        "synth over a folder": (2, ["synth", snapshot, "--geometry", "tiny"]),
        "synth under a file": (2, ["synth", snapshot / "config.json" / "s", "--geometry", "tiny"]),
        "plan for 5": (10, ["plan", snapshot, "--tp", 5]),
        "plan of nothing": (10, ["plan", out / "absent", "--tp", 2]),
        "build from nothing": (10, ["build", out / "absent", "--tp", 2, "--out", out / "a"]),
        "build of another": (2, ["build", snapshot, "--tp", 1, "--out", built]),
        "build into the input": (2, ["build", snapshot, "--tp", 1, "--out", snapshot / "a"]),
        "build under a file": (
            2,
            ["build", snapshot, "--tp", 1, "--out", built / "config.json" / "a"],
        ),
        "verify nothing": (11, ["verify", out / "absent"]),
        "verify too much": (2, ["verify", built, "--sample", 101]),
        "inspect no tensor": (2, ["inspect", built, "bias"]),
        "inspect no rank": (2, ["inspect", built, "--rank", 2]),
        "inspect stats of all": (2, ["inspect", built, "--stats"]),
        "diff with nothing": (11, ["diff", built, out / "absent"]),
        "generate from nothing": (11, ["generate", out / "absent", *ids, "--max-new", 2]),
        "generate past the vocabulary": (
            2,
            ["generate", built, "--token-ids", 301, "--max-new", 1],
        ),
        "generate no ids": (2, ["generate", built, "--token-ids", "a", "--max-new", 1]),
        "generate to nowhere": (
            2,
            ["generate", built, *ids, "--max-new", 1, "--logits", out / "absent" / "x"],
        ),
    }


@pytest.mark.parametrize("case", commands(Path(), Path(), Path()))
def test_json_is_one_object_on_stdout(
    case: str, snapshot: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, args = commands(snapshot, built, tmp_path / "out")[case]

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    code, out, err = run(capsys, *args, "--json")
    assert code == expected, (out, err)
    data = json.loads(out, parse_constant=no_constant)
    assert isinstance(data, dict)
    assert out.endswith("}\n")
    assert len(out.splitlines()) == 1
    assert "Traceback" not in err
    if expected:
        assert data.keys() == {"error"}
        assert data["error"]["exit_code"] == expected
        assert data["error"]["message"]
        assert data["error"]["kind"]
    else:
        assert "error" not in data


def test_json_of_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file name may be any bytes; the answer is one JSON object all the same."""
    command = os.path.join(os.path.dirname(sys.executable), "dsv2mk")
    name = os.fsencode(tmp_path) + b"/\xff"
    for options in ([], ["--json"]):
        done = subprocess.run(
            [command, "verify", name, *options], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 11
        assert b"Traceback" not in done.stderr
        if options:
            assert json.loads(done.stdout)["error"]["exit_code"] == 11
        else:
            assert len(done.stderr.splitlines()) == 1
