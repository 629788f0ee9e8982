"""Stores on disks that fill up or are other ones, and stores that another user reads."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Call, flip_byte, names, state
from store_children import as_user
from stores import (
    add_cubin,
    files_of,
    hidden,
    make_chunky,
    object_at,
    objects_of,
    offered,
    put,
    size_of,
)

from dsv2mk.artifacts import collect, pull, store_commands  # noqa: F401  (chunks are small there)


@pytest.fixture
def source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact with a cubin, whose files have several chunks."""
    make_chunky(artifact, monkeypatch)
    add_cubin(artifact)
    return artifact


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    put(source, tmp_path / "store")
    return tmp_path / "store"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 8 MiB; whether it is a real one, which takes the right to mount."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    real = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield bool(real)
    finally:
        if real:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["publish", "pull"])
@pytest.mark.parametrize("room", [0, 1, 6, 12])
def test_a_disk_that_somebody_fills_up(
    command: str,
    room: int,
    source: Path,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some writes; a hook plays a full disk where none may be mounted."""
    files, calls = files_of(source), 0
    with small_disk(tmp_path / "disk") as real:
        place = tmp_path / "disk" / ("store" if command == "publish" else "out")
        filler = tmp_path / "disk" / "filler"
        if command == "publish":
            args: list[object] = ["publish", source, place, "--tag", "v1", "--json", "--copy"]
        else:
            put(source, tmp_path / "store")
            args = ["pull", tmp_path / "store", "v1", place, "--json", "--copy"]

        def fill() -> None:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass

        def filling(name: str) -> Callable[..., Any]:
            own = getattr(os, name)

            def hooked(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == room + 1 and real:
                    fill()
                if calls > room and not real:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return own(*args)

            return hooked

        with monkeypatch.context() as patch:
            for name in ("pwrite", "copy_file_range"):
                patch.setattr(os, name, filling(name))
            full = dsv2mk(*args)
        error = full.json["error"]
        assert (full.code, error["kind"]) == (13, "no space")
        assert str(tmp_path / "disk") in error["message"]
        assert re.search(r"\d [KM]?B free", error["expected"])
        assert not real or error["found"] == "0 B free"
        if command == "pull":
            assert not place.exists()
        else:
            assert set(objects_of(place).values()) < set(files.values())
            assert not list((place / "tags").glob("*")) + list((place / "bundles").glob("*.json"))
        if real:
            assert dsv2mk(*args).code == 13  # it is still full
            filler.unlink()
        again = dsv2mk(*args)
        assert again.code == 0, again
        kept = again.json["bytes_resumed"] + again.json.get("bytes_reused", 0)
        assert kept > 0 or room < 2
        assert (offered(place, "v1") if command == "publish" else files_of(place)) == files


def test_a_store_that_another_user_may_only_read(source: Path, store: Path, tmp_path: Path) -> None:
    """Run as root: by the user 65534. Otherwise by the same user, without the right to write."""
    uid = 65534 if os.getuid() == 0 else os.getuid()
    place = Path(tempfile.mkdtemp()).resolve()  # tests' own folders are closed to others
    try:
        place.chmod(0o755)
        shared, own = Path(shutil.copytree(store, place / "store")), place / "own"
        shutil.copytree(source, place / "source")
        own.mkdir()
        own.chmod(0o777)
        for path in [shared, *shared.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = state(shared)
        reads: list[list[object]] = [
            ["ls", shared],
            ["verify", shared],
            ["verify", f"{shared}::v1"],
            ["diff", f"{shared}::v1", place / "source"],
            ["pull", shared, "v1", own / "all"],
            ["pull", shared, "v1", own / "part", "--rank", "0"],
            ["pull", shared, "v1", own / "part"],
            ["gc", shared, "--dry-run"],
        ]
        writes: list[list[object]] = [
            ["publish", place / "source", shared, "--tag", "v2"],
            ["tag", shared, "v1", "v2"],
            ["rm", shared, "v1"],
            ["gc", shared],
        ]
        done = as_user(uid, place / "log", reads + writes)
        for command, found in zip(reads, done, strict=False):
            assert found.code == 0, (command, found)
        for command, found in zip(writes, done[len(reads) :], strict=True):
            assert (found.code, found.out) == (2, ""), (command, found)
            assert len(found.err.splitlines()) == 1, (command, found)
            assert "ermission denied" in found.err
            assert str(shared) in found.err
        assert state(shared) == before
        for name in ("all", "part"):
            assert files_of(own / name) == files_of(source)
            assert (own / name).stat().st_uid == uid
    finally:
        for path in place.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(place)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not there or not another file system")
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


def test_a_store_on_another_file_system(
    source: Path,
    tmp_path: Path,
    elsewhere: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Than the artifact, the folder for temporary files, and what is pulled."""
    files = files_of(source)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert tempfile.gettempdir() == str(tmp_path)
    here = names(tmp_path)
    assert elsewhere.stat().st_dev != tmp_path.stat().st_dev
    assert dsv2mk("publish", "--copy", source, elsewhere / "store", "--tag", "v1").code == 0
    assert names(tmp_path) == here
    assert offered(elsewhere / "store", "v1") == files
    assert dsv2mk("pull", "--copy", elsewhere / "store", "v1", tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == files
    assert (
        dsv2mk("publish", "--copy", tmp_path / "out", tmp_path / "store", "--tag", "v1").code == 0
    )
    assert dsv2mk("pull", "--copy", tmp_path / "store", "v1", elsewhere / "out").code == 0
    assert files_of(elsewhere / "out") == files
    again = dsv2mk(
        "publish", "--copy", elsewhere / "out", elsewhere / "store", "--tag", "v2", "--json"
    )
    assert (again.json["bytes_written"], again.json["bytes_reused"]) == (0, size_of(files))
    flip_byte(object_at(elsewhere / "store", files["tokenizer.json"]))
    assert dsv2mk("pull", "--copy", elsewhere / "store", "v1", tmp_path / "damaged").code == 11
    assert not (tmp_path / "damaged").exists()
    assert dsv2mk("gc", elsewhere / "store", "--grace", "0s").code == 0
    assert hidden(elsewhere / "store") == []
