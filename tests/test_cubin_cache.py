"""The kernel key and the cache of compiled kernels: hits, misses, damage, several processes."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import COMMAND, Call, flip_byte, names, read_bytes, tiny_config

from dsv2mk.kernel import key as keys
from dsv2mk.kernel.cache import get_compiled
from dsv2mk.kernel.compile import Compiled
from dsv2mk.kernel.key import key_digest, make_key
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.topology import Topology

pytest.register_assert_rewrite("fake_compiler")

from fake_compiler import FakeCompiler, clean_environment  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TINY = Geometry.from_config(tiny_config())
MODULES = [path for folder in ("kernel", "manifests") for path in (ROOT / folder).glob("*.py")]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clean_environment(monkeypatch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where entries lie."""
    return tmp_path / "cache" / "dsv2mk" / "cubin"


def get(geometry: Geometry = TINY, ranks: int = 1, arch: str = "sm_90a") -> tuple[Compiled, bool]:
    return get_compiled(geometry, Topology(ranks=ranks), arch)


def entry(folder: Path) -> Path:
    """The only one."""
    (found,) = folder.iterdir()
    return found


# ---- hits and misses ----


def test_a_second_call_is_a_hit(compiler: FakeCompiler, folder: Path) -> None:
    (first, was_there), (second, is_there) = get(), get()
    assert (was_there, is_there, len(compiler.requests)) == (False, True, 1)
    assert (second.cubin, second.ptx) == (first.cubin, first.ptx)
    assert second.sidecar.encoded == first.sidecar.encoded
    assert entry(folder).name == first.sidecar.kernel_key
    encoded = first.sidecar.encoded
    assert json.loads(encoded)["cubin_sha256"] == hashlib.sha256(first.cubin).hexdigest()
    assert read_bytes(entry(folder)) == {
        "kernel.cubin": first.cubin,
        "kernel.json": encoded + b"\n",
        "kernel.ptx": first.ptx,
    }


def test_who_asks_the_compiler_for_files_gets_them_though_the_kernel_is_there(
    compiler: FakeCompiler, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = get()
    monkeypatch.setenv("CUTE_DSL_KEEP", "sass")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path / "dump"))
    again, was_there = get()
    assert (was_there, len(compiler.requests), (tmp_path / "dump").is_dir()) == (False, 2, True)
    assert again.sidecar.encoded == first.sidecar.encoded
    assert len(names(entry(folder))) == 3


def test_the_cache_folder_can_be_named(
    compiler: FakeCompiler, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV2MK_CUBIN_CACHE", str(tmp_path / "a" / "b"))
    assert (get()[1], get()[1]) == (False, True)
    assert len(names(entry(tmp_path / "a" / "b"))) == 3
    assert not folder.exists()


Patch = Callable[[pytest.MonkeyPatch], object]

MISSES: dict[str, tuple[dict[str, Any], Patch]] = {
    "arch": ({"arch": "sm_100a"}, lambda _: None),
    "ranks": ({"ranks": 2}, lambda _: None),
    "geometry": ({"geometry": replace(TINY, vocab_size=501)}, lambda _: None),
    "a number that the code has compiled in": (
        {"geometry": replace(TINY, rms_norm_eps=2e-6)},
        lambda _: None,
    ),
    "source": ({}, lambda patch: patch.setattr(keys, "sources", lambda: {"kernel/a.py": "0"})),
    "wheel": ({}, lambda patch: patch.setattr(keys, "fingerprint", lambda: {"python": "4.0"})),
    "scheme": ({}, lambda patch: patch.setattr(keys, "SCHEME", {"name": "other"})),
    "layout": ({}, lambda patch: patch.setattr(keys, "LAYOUT_VERSION", 1 << 20)),
}


# A sidecar of another layout is not read back, as it should be.
@pytest.mark.parametrize("case", [case for case in MISSES if case != "layout"])
def test_another_key_is_a_miss(
    case: str, compiler: FakeCompiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    other, patch = MISSES[case]
    patch(monkeypatch)
    (_, first), (_, second) = get(**other), get(**other)
    assert (first, second, len(compiler.requests)) == (False, True, 2)
    assert len(names(folder)) == 2


@pytest.mark.parametrize("case", MISSES)
def test_a_key_names_what_differs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(geometry: Geometry = TINY, ranks: int = 1, arch: str = "sm_90a") -> str:
        return key_digest(make_key(geometry, Topology(ranks=ranks), arch))

    before = digest()
    assert digest() == before
    other, patch = MISSES[case]
    patch(monkeypatch)
    assert digest(**other) != before


# ---- what the key is made of ----


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the modules, which the key is then made from."""
    for name in ("kernel", "manifests"):
        shutil.copytree(ROOT / name, tmp_path / "tree" / name)
    place = SimpleNamespace(files=lambda package: tmp_path / "tree" / package.split(".")[1])
    monkeypatch.setattr(keys, "resources", place)
    return tmp_path / "tree"


def test_the_key_has_every_module(tree: Path) -> None:
    expected = {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*.py")
    }
    assert {"kernel/ptx.py", "manifests/geometry.py"} <= set(expected)
    assert keys.sources.__wrapped__() == expected


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.parent.name + "/" + path.name)
def test_an_edited_module_changes_the_key(path: Path, tree: Path) -> None:
    before = keys.sources.__wrapped__()
    flip_byte(tree / path.parent.name / path.name, at=3)
    assert keys.sources.__wrapped__() != before


def test_a_new_module_changes_the_key_and_other_files_do_not(tree: Path) -> None:
    before = keys.sources.__wrapped__()
    (tree / "kernel" / "notes.txt").touch()
    (tree / "manifests" / "presets" / "tiny.json").unlink()
    assert keys.sources.__wrapped__() == before
    (tree / "kernel" / "new.py").touch()
    assert keys.sources.__wrapped__() != before


RECORD = ["a/b.so,sha256=11,5", "a/c.py,sha256=22,6"]


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, list[str]]]:
    """(version, RECORD) of the compiler's wheels; the tests change it."""
    found = dict.fromkeys(keys._WHEELS, ("4.8.1", RECORD))

    def distribution(name: str) -> Any:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        version, lines = found[name]
        texts = {"RECORD": "\n".join(lines) + "\n"}
        return SimpleNamespace(version=version, read_text=texts.get)

    place = SimpleNamespace(
        distribution=distribution, PackageNotFoundError=metadata.PackageNotFoundError
    )
    monkeypatch.setattr(keys, "metadata", place)
    return found


@pytest.mark.parametrize("name", keys._WHEELS)
@pytest.mark.parametrize(
    ("version", "lines", "same"),
    [
        ("4.8.2", RECORD, False),
        ("4.8.1", ["a/b.so,sha256=12,5", RECORD[1]], False),
        ("4.8.1", RECORD[:1], False),
        ("4.8.1", [*RECORD, "a/d.so,sha256=33,7"], False),
        ("4.8.1", RECORD[::-1], True),
        ("4.8.1", ["../../../bin/tool,sha256=55,9", *RECORD], True),  # it names its own place
        ("4.8.1", ["bin/tool,sha256=66,9", *RECORD], True),
        ("4.8.1", [*RECORD, "a/__pycache__/c.pyc,,", "a-1.dist-info/INSTALLER,sha256=4,4"], True),
    ],
)
def test_another_wheel_changes_the_fingerprint(
    name: str, version: str, lines: list[str], same: bool, wheels: dict[str, Any]
) -> None:
    before = keys.fingerprint.__wrapped__()
    wheels[name] = (version, lines)
    assert (keys.fingerprint.__wrapped__() == before) is same


@pytest.mark.parametrize("name", keys._WHEELS)
def test_a_wheel_that_is_missing_is_named(name: str, wheels: dict[str, Any]) -> None:
    del wheels[name]
    with pytest.raises(InputError, match=rf"no package {name}\. pip install 'dsv2mk\[build\]'"):
        keys.fingerprint.__wrapped__()


# ---- damage ----


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flip(path: Path) -> None:
    """A byte that the entry's hashes cover: in the sidecar, one of the key."""
    flip_byte(path, at=max(path.read_bytes().find(b"layout_version") - 20, 8))


def edit_sidecar(path: Path) -> None:
    """One digit of what a launch needs."""
    data = path.read_bytes()
    assert data.count(b'"max_ctas":256') == 1
    path.with_name("kernel.json").write_bytes(data.replace(b'"max_ctas":256', b'"max_ctas":257'))


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *((part, act) for part in ("cubin", "ptx", "json") for act in (empty, truncate, flip)),
        *((part, Path.unlink) for part in ("cubin", "ptx", "json")),
        pytest.param(
            "json",
            edit_sidecar,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_entry_is_made_again(
    part: str, damage: Callable[[Path], object], compiler: FakeCompiler, folder: Path
) -> None:
    first, _ = get()
    whole = read_bytes(entry(folder))
    damage(entry(folder) / f"kernel.{part}")
    assert entry(folder).is_dir()
    second, cached = get()
    assert second.cubin == first.cubin
    assert second.sidecar.encoded == first.sidecar.encoded
    assert (cached, len(compiler.requests)) == (False, 2)
    assert read_bytes(entry(folder)) == whole
    assert get()[1]


def test_an_entry_under_another_name_is_made_again(compiler: FakeCompiler, folder: Path) -> None:
    first, _ = get()
    get(ranks=2)
    other = next(path for path in folder.iterdir() if path.name != first.sidecar.kernel_key)
    shutil.rmtree(folder / first.sidecar.kernel_key)
    shutil.copytree(other, folder / first.sidecar.kernel_key)
    again, cached = get()
    assert not cached
    assert again.sidecar.encoded == first.sidecar.encoded
    assert get()[1]


def test_a_compiler_that_fails_leaves_nothing(compiler: FakeCompiler, tmp_path: Path) -> None:
    compiler.fails = True
    with pytest.raises(RuntimeError, match="the compiler failed:\nno luck"):
        get()
    assert list(tmp_path.rglob("*")) == []
    compiler.fails = False
    assert not get()[1]


# ---- several processes ----


@pytest.mark.parametrize("damaged", [False, True])
def test_an_entry_that_another_process_made_meanwhile_is_used(
    damaged: bool, compiler: FakeCompiler, folder: Path, tmp_path: Path
) -> None:
    get()
    whole, place = read_bytes(entry(folder)), entry(folder)
    place.rename(tmp_path / "other")
    if damaged:
        empty(tmp_path / "other" / "kernel.ptx")
    inode = (tmp_path / "other").stat().st_ino
    compiler.meanwhile = lambda: (tmp_path / "other").rename(place)
    made, cached = get()
    assert not cached
    assert read_bytes(entry(folder)) == whole
    assert made.sidecar.encoded + b"\n" == whole["kernel.json"]
    assert (place.stat().st_ino == inode) is not damaged


def test_a_file_where_the_cache_should_be_is_named(
    compiler: FakeCompiler, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSV2MK_CUBIN_CACHE", str(tmp_path / "file"))
    done = dsv2mk("cubin", "--geometry", "tiny", "--out", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert str(tmp_path / "file") in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_named(
    compiler: FakeCompiler, folder: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    done = dsv2mk("cubin", "--geometry", "tiny", "--out", tmp_path / "out")
    folder.chmod(0o700)
    assert (done.code, done.out) == (2, "")
    assert str(folder) in done.err
    assert names(folder) == set()


@pytest.mark.slow
def test_eight_processes_make_one_entry(folder: Path, tmp_path: Path) -> None:
    args = ["cubin", "--geometry", "tiny", "--arch", "sm_90a", "--json"]
    (tmp_path / "here").mkdir()
    started = [
        subprocess.Popen(
            [COMMAND, *args, "--out", str(tmp_path / f"out-{index}")],
            cwd=tmp_path / "here",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(8)
    ]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        assert len(json.loads(out)["cubins"]) == 1
    files = read_bytes(tmp_path / "out-0")
    assert len(files) == 3
    assert all(read_bytes(tmp_path / f"out-{index}") == files for index in range(8))
    assert sorted(read_bytes(entry(folder)).values()) == sorted(files.values())
    assert names(tmp_path) == {"here", *(f"out-{index}" for index in range(8))}
    assert names(tmp_path / "here") == set()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_entry_that_is_no_folder_is_replaced(
    kind: str, compiler: FakeCompiler, folder: Path
) -> None:
    get()
    place = entry(folder)
    shutil.rmtree(place)
    place.touch() if kind == "file" else place.symlink_to("nowhere")
    assert (get()[1], get()[1]) == (False, True)
    assert len(names(place)) == 3
