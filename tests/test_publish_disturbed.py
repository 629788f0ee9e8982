"""Publishing while others publish, remove and collect, and on a disk that fills up."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Call
from stores import (
    files_of,
    hidden,
    make_chunky,
    name_of,
    objects_of,
    offered,
    put,
    size_of,
    variant,
)

from dsv2mk.artifacts import publish as publish_module
from dsv2mk.artifacts import transfer
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests.errors import SpaceError, UsageError


@pytest.fixture
def chunky(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose files have several chunks."""
    return make_chunky(artifact, monkeypatch)


# ---- others ----


def test_another_publisher_is_quicker(
    chunky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins and ends while ours waits for its first object to be on disk."""
    store, other = tmp_path / "store", variant(chunky, tmp_path / "other", "b")
    real, calls = os.fsync, []
    before = publish_module.create_store(store)

    def slow(fd: int) -> None:
        real(fd)
        if not calls and ".part" in os.readlink(f"/proc/self/fd/{fd}"):
            calls.append(fd)
            put(other, before.path, "v2")

    monkeypatch.setattr(os, "fsync", slow)
    put(chunky, store)
    assert calls
    assert offered(store, "v1") == files_of(chunky)
    assert offered(store, "v2") == files_of(other)
    assert hidden(store) == []


def test_a_part_that_a_third_has_begun_is_not_taken_for_ours(
    chunky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second has ended the object, which then was deleted: our part's name is another's now."""
    store, real, begun = tmp_path / "store", os.fsync, []

    def slow(fd: int) -> None:
        real(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not begun and path.suffix == ".part":
            begun.append(path)
            path.rename(path.with_name("ended"))
            path.write_bytes(b"begun")

    monkeypatch.setattr(os, "fsync", slow)
    put(chunky, store)
    assert len(begun) == 1
    begun[0].with_name("ended").unlink()
    assert offered(store, "v1") == files_of(chunky)
    assert hidden(store) == []


def disturb(
    monkeypatch: pytest.MonkeyPatch, name: str, times: int, action: Callable[[], None]
) -> list[str]:
    """Do something after a function of publish, as long as there are `times` left."""
    real, done = getattr(publish_module, name), []

    def disturbed(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        if len(done) < times:
            done.append(name)
            action()
        return result

    monkeypatch.setattr(publish_module, name, disturbed)
    return done


@pytest.mark.parametrize("trashed", [False, True])
def test_objects_that_are_taken_away_meanwhile_come_back(
    trashed: bool, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"

    def take() -> None:
        (store / "trash").mkdir(exist_ok=True)
        for path in list((store / "objects").glob("*/*")):
            path.rename(store / "trash" / path.name)
        if not trashed:
            shutil.rmtree(store / "trash")

    done = disturb(monkeypatch, "put_bundle", 1, take)
    copied = put(artifact, store).copied.written
    assert done == ["put_bundle"]
    assert copied == size_of(files_of(artifact)) * (1 if trashed else 2)
    assert offered(store, "v1") == files_of(artifact)


def test_a_bundle_that_is_removed_before_its_tag_is_there_comes_back(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"

    def take() -> None:
        for path in (store / "bundles").iterdir():
            path.unlink()

    done = disturb(monkeypatch, "set_tag", 2, take)
    put(artifact, store)
    assert len(done) == 2
    assert offered(store, "v1") == files_of(artifact)
    disturb(monkeypatch, "set_tag", 1000, take)
    with pytest.raises(UsageError, match="keep removing"):
        put(artifact, store)


def test_an_object_in_the_trash_is_taken_out_again(artifact: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(artifact, store)
    (store / "trash").mkdir()
    for path in list((store / "objects").glob("*/*")):
        path.rename(store / "trash" / path.name)
    done = put(artifact, store, "v2")
    assert done.copied.written == 0
    assert offered(store, "v2") == files_of(artifact)
    assert list((store / "trash").iterdir()) == []


def test_a_lease_names_all_objects_before_any_is_looked_at(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = tmp_path / "store", files_of(artifact)
    seen: list[set[str]] = []
    real = publish_module.restore

    def look(opened: Store, digest: str) -> bool:
        (lease,) = (store / "leases").iterdir()
        seen.append(set(json.loads(lease.read_bytes())["objects"]))
        return real(opened, digest)

    monkeypatch.setattr(publish_module, "restore", look)
    put(artifact, store)
    assert seen
    assert all(names == {name_of(data) for data in files.values()} for names in seen)
    assert list((store / "leases").iterdir()) == []


def test_a_lease_is_renewed_and_written_again(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarm: None
) -> None:
    store = tmp_path / "store"
    monkeypatch.setattr(publish_module, "_RENEW_SECONDS", 0.001)
    real = publish_module.put_bundle

    def slow(*args: Any) -> str:
        (lease,) = (store / "leases").glob("[0-9a-f]*")
        os.utime(lease, (1000, 1000))
        while lease.stat().st_mtime < 2000:
            pass
        lease.unlink()
        while not lease.exists():
            pass
        return real(*args)

    monkeypatch.setattr(publish_module, "put_bundle", slow)
    put(artifact, store)
    assert list((store / "leases").glob("[0-9a-f]*")) == []


# ---- space ----


def test_too_little_space_is_seen_ahead(
    chunky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, need = tmp_path / "store", size_of(files_of(chunky))
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: need - 1)
    with pytest.raises(SpaceError, match=rf"no space in {store}: expected .* free, found .* free"):
        put(chunky, store)
    assert objects_of(store) == {}
    assert not list(store.rglob(".*"))
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: need)
    put(chunky, store)
    assert offered(store, "v1") == files_of(chunky)


def every_step(patch: pytest.MonkeyPatch, name: str) -> Iterator[dict[str, int]]:
    """Let a system call succeed 0, 1, 2 ... times, then say that the disk is full."""
    real = getattr(os, name)
    count = {"left": 0, "failed": 0}

    def hooked(*args: Any, **more: Any) -> Any:
        if count["left"] == 0:
            count["failed"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count["left"] -= 1
        return real(*args, **more)

    for room in range(1000):
        count |= {"left": room, "failed": 0}
        patch.setattr(os, name, hooked)
        yield count
        patch.setattr(os, name, real)
        if not count["failed"]:
            return


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(
    call: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsv2mk: Call
) -> None:
    files, full = files_of(artifact), 0
    for number, count in enumerate(every_step(monkeypatch, call)):
        store = tmp_path / f"store{number}"
        done = dsv2mk("publish", "--copy", artifact, store, "--tag", "v1", "--json")
        if count["failed"]:
            full += 1
            assert done.code == 13
            assert done.json["error"]["kind"] == "no space"
        monkeypatch.undo()
        for name, data in objects_of(store).items() if store.exists() else []:
            assert data in files.values(), name
        if done.code == 0:
            assert offered(store, "v1") == files
        elif number % 5 == 0:
            put(artifact, store)
            assert offered(store, "v1") == files
        shutil.rmtree(store)
    assert full >= 10
