"""Files that a store shares with a folder: second names where there can be some, else copies."""

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Call, names
from sharing import (
    AS_ROOT,
    OTHER,
    SHARD,
    across_file_systems,
    beside,
    dated,
    flip,
    get,
    inodes,
    make_source,
    modes,
    objects,
    publish,
)
from store_children import as_user
from stores import (
    CHUNK,
    files_of,
    hidden,
    offered,
    put,
    size_of,
)

from dsv2mk.artifacts import collect, share, signing, transfer
from dsv2mk.artifacts.share import MayLink
from dsv2mk.artifacts.store import Store
from dsv2mk.artifacts.transfer import Copied
from dsv2mk.manifests.errors import ArtifactError


@pytest.fixture
def source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_source(artifact, monkeypatch)


# ---- second names ----


def test_an_artifact_becomes_objects_without_a_copy(source: Path, tmp_path: Path) -> None:
    store, files, copied = tmp_path / "store", files_of(source), beside(source)
    manifest = dated(source / "manifest.json")
    assert publish(source, store) == Copied(shared=size_of(files) - copied, written=copied)
    assert inodes(source) - objects(store) == {(source / "manifest.json").stat().st_ino}
    assert dated(source / "manifest.json") == manifest
    assert offered(store, "v1") == files_of(source) == files
    assert modes(store / "objects") == {0o444}
    assert modes(source) == {0o444, 0o644}
    assert hidden(store) == []
    shutil.rmtree(source)
    assert offered(store, "v1") == files


def test_a_pull_gets_second_names_too_and_changes_nothing_in_the_store(
    source: Path, tmp_path: Path
) -> None:
    store, out, files = tmp_path / "store", tmp_path / "out", files_of(source)
    publish(source, store)
    shutil.rmtree(source)
    before = {path: path.stat() for path in store.rglob("*")}
    small = len(files["manifest.json"])
    assert get(store, out) == Copied(shared=size_of(files) - small, written=small)
    assert inodes(out) - objects(store) == {(out / "manifest.json").stat().st_ino}
    assert files_of(out) == files
    for path, info in before.items():
        after = path.stat()
        for what in ("st_ino", "st_mode", "st_size", "st_mtime_ns", "st_uid"):
            assert getattr(after, what) == getattr(info, what)
    assert names(tmp_path) == {"store", "out"}


@pytest.mark.parametrize("copied", [True, False])
def test_copies_are_made_on_request(copied: bool, source: Path, tmp_path: Path) -> None:
    """A copy is an object like others: whole, read-only; and can be linked by a pull."""
    store, files = tmp_path / "store", files_of(source)
    size = size_of(files)
    assert put(source, store).copied == Copied(written=size)
    assert not objects(store) & inodes(source)
    assert modes(store / "objects") == {0o444}
    assert modes(source) == {0o644}
    written = size if copied else beside(source)
    wanted = Copied(written=written, shared=size - written)
    assert get(store, tmp_path / "out", links=not copied) == wanted
    assert (not objects(store) & inodes(tmp_path / "out")) is copied
    assert modes(tmp_path / "out") == ({0o644} if copied else {0o444, 0o644})
    assert files_of(tmp_path / "out") == files


def test_the_commands_link_unless_told(source: Path, tmp_path: Path, dsv2mk: Call) -> None:
    size, small = size_of(files_of(source)), beside(source)
    for options, written in ((["--copy"], (size, size)), ([], (small, small))):
        store, out = tmp_path / f"store{len(options)}", tmp_path / f"out{len(options)}"
        commands = [["publish", source, store, "--tag", "v1"], ["pull", store, "v1", out]]
        for words, wanted in zip(commands, written, strict=True):
            done = dsv2mk(*words, *options, "--json")
            assert done.code == 0
            assert done.json["bytes_written"] == wanted
            assert done.json["bytes_shared"] == size - wanted
            assert done.json["bytes_resumed"] == 0
    done = dsv2mk("pull", tmp_path / "store0", "v1", tmp_path / "more")
    assert "; 15.6 KB written, 0 B taken up, " in done.out
    assert done.out.rstrip().endswith(" shared")


def test_what_a_rank_lacks_is_linked_later(source: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    publish(source, store)
    first = get(store, out, rank=0)
    more = get(store, out)
    assert files_of(out) == files_of(source)
    assert inodes(out) - objects(store) == {(out / "manifest.json").stat().st_ino}
    assert (first.written, more.written) == (beside(source), 0)
    assert first.written + first.shared + more.shared == size_of(files_of(source))


# ---- where there is no second name ----


def of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share.os, "geteuid", lambda: OTHER)


@pytest.mark.parametrize("cannot", [across_file_systems, of_another])
def test_else_a_copy_is_made(
    cannot: Callable[[pytest.MonkeyPatch], None],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, size = tmp_path / "store", size_of(files_of(source))
    with monkeypatch.context() as patch:
        cannot(patch)
        assert publish(source, store) == Copied(written=size)
        assert get(store, tmp_path / "out") == Copied(written=size)
    assert modes(source) == {0o644}
    assert modes(store / "objects") == {0o444}
    assert files_of(tmp_path / "out") == files_of(source) == offered(store, "v1")
    assert not objects(store) & inodes(tmp_path / "out")


def test_a_file_that_others_could_not_read_is_copied(source: Path, tmp_path: Path) -> None:
    """An object is for all whom the umask lets read."""
    (source / SHARD).chmod(0o600)
    data = (source / SHARD).read_bytes()
    done = publish(source, tmp_path / "store")
    copied = len(data) + beside(source)
    assert done == Copied(written=copied, shared=size_of(files_of(source)) - copied)
    assert modes(tmp_path / "store" / "objects") == {0o444}
    assert stat.S_IMODE((source / SHARD).stat().st_mode) == 0o600


def test_with_a_key_to_trust_a_pull_copies(source: Path, tmp_path: Path) -> None:
    """Whoever can write to the store could change a file of the node by its other name."""
    private, public = signing.make_keys(tmp_path, "key")
    store = tmp_path / "store"
    publish(source, store, sign=private)
    size = size_of(files_of(source))
    assert get(store, tmp_path / "out", trust=[public]) == Copied(written=size)
    assert not objects(store) & inodes(tmp_path / "out")


def test_an_object_that_may_be_written_to_is_copied(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(source, store)
    for path in (store / "objects").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert get(store, tmp_path / "out") == Copied(written=size_of(files_of(source)))


@AS_ROOT
def test_another_user_gets_copies_of_their_own(source: Path) -> None:
    """Neither of them can harm the other's."""
    place = Path("/tmp") / f"share-{os.getpid()}"
    place.mkdir()
    try:
        place.chmod(0o777)
        shutil.copytree(source, place / "source")
        publish(place / "source", place / "store")
        pulls = ["pull", place / "store", "v1", place / "out", "--json"]
        (done,) = as_user(OTHER, place / "log", [pulls])
        assert done.code == 0, done
        size = size_of(files_of(place / "source"))
        assert (done.json["bytes_written"], done.json["bytes_shared"]) == (size, 0)
        (done,) = as_user(OTHER, place / "log", [[*pulls[:3], place / "second", "--json"]])
        assert done.json["bytes_written"] == size
        own = ["publish", place / "out", place / "own", "--tag", "v1", "--json"]
        (done,) = as_user(OTHER, place / "log", [own])
        small = beside(place / "out")
        assert (done.json["bytes_written"], done.json["bytes_shared"]) == (small, size - small)
        # What the other one owns is copied, not linked, also by who may do anything.
        assert publish(place / "out", place / "third") == Copied(written=size)
    finally:
        shutil.rmtree(place)


# ---- shared extents ----


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Path]:
    """A real file system that shares extents."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with open(tmp_path / "image", "wb") as image:
        image.truncate(400 << 20)
    for command in (["mkfs.xfs", "-q", image.name], ["mount", "-o", "loop", image.name, folder]):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{command[0]} does not work here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("links", [True, False])
def test_extents_are_shared_rather_than_names(links: bool, source: Path, sharing: Path) -> None:
    """Nothing is written, and what is done to one file is not done to the other."""
    store, folder, files = sharing / "store", sharing / "folder", files_of(source)
    shutil.copytree(source, folder)
    assert publish(folder, store, links=links) == Copied(shared=size_of(files))
    assert get(store, sharing / "out", links=links) == Copied(shared=size_of(files))
    assert not inodes(folder) & objects(store)
    assert not inodes(sharing / "out") & objects(store)
    assert modes(folder) == modes(sharing / "out") == {0o644}
    for path in [*folder.iterdir(), *(sharing / "out").iterdir()]:
        flip(path, path.stat().st_size // 2)
    assert offered(store, "v1") == files


def test_extents_of_a_damaged_file_are_not_published(source: Path, sharing: Path) -> None:
    folder, store = sharing / "folder", sharing / "store"
    shutil.copytree(source, folder)
    flip(folder / SHARD, CHUNK)
    with pytest.raises(ArtifactError, match=f"{SHARD}: chunk 1 "):
        publish(folder, store)
    assert hidden(store) == []


# ---- damage ----


@pytest.mark.parametrize("at", [0, CHUNK, -1])
def test_a_damaged_source_is_not_published(at: int, source: Path, tmp_path: Path) -> None:
    store, files = tmp_path / "store", files_of(source)
    at %= len(files[SHARD])
    flip(source / SHARD, at)
    with pytest.raises(ArtifactError, match=rf"{SHARD}: chunk {at // CHUNK} "):
        publish(source, store)
    found = {path.read_bytes() for path in (store / "objects").rglob("*") if path.is_file()}
    assert found <= set(files.values()) - {files[SHARD]}
    assert hidden(store) == []
    assert not (store / "tags" / "v1").exists()
    flip(source / SHARD, at)
    publish(source, store)
    assert offered(store, "v1") == files


def test_a_damaged_object_is_not_pulled(source: Path, tmp_path: Path) -> None:
    store, out, files = tmp_path / "store", tmp_path / "out", files_of(source)
    put(source, store)
    path = next(p for p in store.rglob("*") if p.is_file() and p.read_bytes() == files[SHARD])
    flip(path, CHUNK + 1)
    with pytest.raises(ArtifactError, match="chunk 1 "):
        get(store, out)
    assert not out.exists()
    assert put(source, store).copied == Copied(written=len(files[SHARD]))
    done = get(store, out)
    assert files_of(out) == files
    assert done.shared + done.kept + done.written == size_of(files)
    assert done.written <= len(files[SHARD])
    assert {"store", "out"} <= names(tmp_path) <= {"store", "out", "artifact"}


def test_harm_through_the_other_name_is_found_and_mended(source: Path, tmp_path: Path) -> None:
    """What root writes into the folder is in the store: that serves it to nobody."""
    store, spare = tmp_path / "store", tmp_path / "spare"
    shutil.copytree(source, spare)
    publish(source, store)
    flip(source / SHARD, 5)
    with pytest.raises(ArtifactError, match="chunk 0 "):
        get(store, tmp_path / "out")
    with pytest.raises(ArtifactError, match=f"{SHARD}: chunk 0 "):
        publish(source, store)
    assert publish(spare, store).shared == len((spare / SHARD).read_bytes())
    get(store, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(spare) == offered(store, "v1")


# ---- what was left ----


def test_a_link_that_a_pull_has_left_is_taken_for_one(source: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    publish(source, store)
    folder = tmp_path / ".out.pull" / "artifact"
    folder.mkdir(parents=True)
    shutil.rmtree(source)
    get(store, tmp_path / "first")
    os.link(tmp_path / "first" / SHARD, folder / SHARD)
    os.link(tmp_path / "first" / "config.json", folder / "rank-00.ffn.safetensors")  # no such one
    files = files_of(tmp_path / "first")
    small = beside(out.parent / "first")
    assert get(store, out) == Copied(shared=size_of(files) - small, written=small)
    assert files_of(out) == files == offered(store, "v1")
    assert len(inodes(out) - objects(store)) == 1


def test_a_link_that_was_left_is_no_longer_one_with_copies(source: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    publish(source, store)
    folder = tmp_path / ".out.pull" / "artifact"
    folder.mkdir(parents=True)
    os.link(source / SHARD, folder / SHARD)
    files = files_of(source)
    assert get(store, out, links=False) == Copied(written=size_of(files))
    assert files_of(out) == files
    assert not objects(store) & inodes(out)


@pytest.fixture
def old(source: Path) -> Path:
    """Files that were written last week."""
    for path in source.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 7 * 86400))
    return source


def test_a_collection_does_not_take_what_is_being_linked(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs before the first name is given: temporaries of old files look new to it."""
    store, collected = tmp_path / "store", 0
    real = os.rename

    def rename(a: Any, b: Any, **options: Any) -> None:
        nonlocal collected
        if "objects" in str(a) and not collected:
            collected = 1
            before = {p for p in (store / "objects").rglob(".*") if p.is_file()}
            assert before
            collect.collect(Store.open(store), 3600.0)
            assert {p for p in (store / "objects").rglob(".*") if p.is_file()} == before
        real(a, b, **options)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(transfer, "THREADS", 1)
    publish(old, store)
    assert collected
    assert offered(store, "v1") == files_of(old)


def test_a_collection_that_looked_at_leases_before_takes_a_name_as_it_is_given(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is touched, a second name of an old file looks as if it had been left."""
    store, real, taken = tmp_path / "store", transfer.share, 0

    def share(source: int, part: Path, may_link: MayLink) -> bool:
        nonlocal taken
        if not real(source, part, may_link):
            return False
        if taken < 3:
            stale = collect._stale(Store.open(store), time.time() - 3600, set())
            assert [path for path, _ in stale] == [part]
            part.unlink()
            taken += 1
        return True

    monkeypatch.setattr(transfer, "share", share)
    publish(old, store)
    assert taken == 3
    assert offered(store, "v1") == files_of(old)
    assert hidden(store) == []


def test_a_collection_leaves_alone_what_a_lease_names(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old it looks: a publisher may hash for longer than an hour."""
    store = tmp_path / "store"
    real, before = os.rename, []

    def rename(a: Any, b: Any, **options: Any) -> None:
        if "objects" in str(a) and not before:
            before.extend(p for p in (store / "objects").rglob(".*") if p.is_file())
            for path in before:
                os.utime(path, (1_000_000, 1_000_000))
            done = collect.collect(Store.open(store), 0.0)
            assert done.others == []
        real(a, b, **options)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(transfer, "THREADS", 1)
    publish(source, store)
    assert len(before) > 5
    assert offered(store, "v1") == files_of(source)
    for path in before:
        path.touch()
        os.utime(path, (1_000_000, 1_000_000))
    done = collect.collect(Store.open(store), 0.0)
    assert sorted(done.others) == sorted(before)


def test_a_collection_counts_what_it_frees(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish(source, store)
    collect.remove(Store.open(store), "v1")
    for path in (store / "objects").glob("*/*"):
        os.utime(path, (1_000_000, 1_000_000))
    for dry_run in (True, False):
        done = collect.collect(Store.open(store), 0.0, dry_run=dry_run)
        assert len(done.objects) == len(set(files_of(source).values()))
        assert done.nbytes == beside(source)
    assert objects(store) == set()
