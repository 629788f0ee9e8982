"""What a second name must not reach: other files, other users, a store's soundness."""

import errno
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
from stores import (
    CHUNK,
    add_cubin,
    files_of,
    hidden,
    offered,
    put,
    size_of,
)

from dsv2mk.artifacts import publish as publish_module
from dsv2mk.artifacts import pull, share, signing, transfer
from dsv2mk.artifacts.transfer import Copied
from dsv2mk.manifests.errors import ArtifactError, SpaceError, UsageError
from dsv2mk.manifests.layout import PARTS


@pytest.fixture
def source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_source(artifact, monkeypatch)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


# ---- what else a link reaches ----


def owned(folder: Path, uid: int, gid: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, uid, gid)


@AS_ROOT
@pytest.mark.parametrize(("group", "copied"), [(777, True), (OTHER, False)])
def test_a_file_of_another_group_is_copied(
    group: int, copied: bool, source: Path, umask: Callable[[int], int], tmp_path: Path
) -> None:
    """A store whose objects are for its group alone; a new file there gets it by setgid."""
    store, files = tmp_path / "store", files_of(source)
    for folder in (store, tmp_path / "nodes"):
        folder.mkdir()
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
    owned(source, 0, OTHER)
    umask(0o007)
    small = beside(source)
    wanted = size_of(files) if copied else small
    assert publish(source, store) == Copied(written=wanted, shared=size_of(files) - wanted)
    assert {path.stat().st_gid for path in (store / "objects").glob("*/*")} == {group}
    os.chown(tmp_path / "nodes", 0, OTHER)
    done = get(store, tmp_path / "nodes" / "out")
    assert (done.shared == 0) is copied
    assert {path.stat().st_gid for path in (tmp_path / "nodes" / "out").iterdir()} == {OTHER}


def test_a_file_of_another_access_list_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may give every new file a list of who can read it."""
    new, real = b"of the store", os.getxattr

    def getxattr(fd: int, name: str) -> bytes:
        assert name == "system.posix_acl_access"
        if "/store/" in os.readlink(f"/proc/self/fd/{fd}"):
            return new
        return real(fd, name)

    monkeypatch.setattr(os, "getxattr", getxattr)
    size = size_of(files_of(source))
    assert publish(source, tmp_path / "store") == Copied(written=size)
    monkeypatch.delattr(os, "getxattr")  # a system without such lists
    assert publish(source, tmp_path / "another").shared == size - beside(source)


@AS_ROOT
def test_a_source_that_may_not_be_touched_is_copied(source: Path, tmp_path: Path) -> None:
    """A folder that is mounted read-only."""
    folder, size = tmp_path / "mounted", size_of(files_of(source))
    folder.mkdir()
    if subprocess.run(["mount", "--bind", source, folder], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        before = {path: dated(path) for path in source.rglob("*")}
        assert publish(folder, tmp_path / "store") == Copied(written=size)
        assert {path: dated(path) for path in source.rglob("*")} == before
    finally:
        subprocess.run(["umount", folder], check=True)


def test_where_nothing_is_linked_the_folder_is_not_touched(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: dated(path) for path in source.rglob("*")}
    across_file_systems(monkeypatch)
    publish(source, tmp_path / "store")
    assert {path: dated(path) for path in source.rglob("*")} == before


def test_what_a_symbolic_link_leads_to_is_copied(source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "cache" / "blob"
    elsewhere.parent.mkdir()
    (source / SHARD).rename(elsewhere)
    (source / SHARD).symlink_to(elsewhere)
    before = elsewhere.stat()
    done = publish(source, tmp_path / "store")
    assert done.written == before.st_size + beside(source)
    after = elsewhere.stat()
    assert (after.st_mode, after.st_nlink, after.st_mtime_ns) == (
        before.st_mode,
        1,
        before.st_mtime_ns,
    )


def test_no_right_but_reading_is_kept(source: Path, tmp_path: Path) -> None:
    (source / SHARD).chmod(0o6755)
    publish(source, tmp_path / "store")
    assert stat.S_IMODE((source / SHARD).stat().st_mode) == 0o555


def test_cubins_keep_their_dates(source: Path, tmp_path: Path) -> None:
    """The newest of those that fit is taken: what is published must not look newer."""
    paths = [add_cubin(source, arch) for arch in ("sm_90a", "sm_100a")]
    for age, path in enumerate(paths):
        os.utime(path, (1_000_000, 1_000_000 + age))
    before = [dated(path) for path in paths]
    store, out = tmp_path / "store", tmp_path / "out"
    for _ in range(2):
        publish(source, store)
    assert [dated(path) for path in paths] == before
    get(store, out)
    pulled = [dated(path) for path in (out / "cubin").iterdir()]
    for folder in (source, out):
        publish(folder, store)
    assert [dated(path) for path in (out / "cubin").iterdir()] == pulled


def test_copies_take_the_place_of_links(source: Path, tmp_path: Path) -> None:
    """`--copy` after a publish that has linked."""
    store, files = tmp_path / "store", files_of(source)
    publish(source, store)
    linked = size_of(files) - beside(source)
    assert put(source, store).copied == Copied(written=linked)
    assert not objects(store) & inodes(source)
    assert put(source, store).copied == Copied()
    flip(source / SHARD, 0)
    assert offered(store, "v1") == files


def test_copies_take_the_place_of_every_link(source: Path, tmp_path: Path) -> None:
    """Of equal files too, of which only one is the object; the folder is not touched."""
    store, out = tmp_path / "store", tmp_path / "out"
    publish(source, store)
    get(store, out, rank=1)
    get(store, out, links=False)
    for path in out.iterdir():
        path.chmod(0o644)
    before = {path: (path.stat().st_mode, path.stat().st_mtime_ns) for path in out.iterdir()}
    put(out, store, "v2")
    assert not objects(store) & inodes(out)
    assert {p: (p.stat().st_mode, p.stat().st_mtime_ns) for p in out.iterdir()} == before


def test_what_an_object_leads_to_is_not_touched(source: Path, tmp_path: Path) -> None:
    store, away, files = tmp_path / "store", tmp_path / "away", files_of(source)
    put(source, store)
    (path,) = [p for p in (store / "objects").glob("*/*") if p.read_bytes() == files[SHARD]]
    away.write_bytes(files[SHARD])
    path.unlink()
    path.symlink_to(away)
    before = dated(away)
    put(source, store)
    assert dated(away) == before
    assert offered(store, "v1") == files


def test_what_was_made_writable_is_not_any_more(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for how in (True, False):
        put(source, store, links=how)
        for path in (store / "objects").glob("*/*"):
            path.chmod(0o664)
        put(source, store, links=how)
        assert modes(store / "objects") == {0o444}


def signed(source: Path, folder: Path) -> tuple[Path, Path, Path]:
    """A store with a signed bundle, a place to pull to, and the public key."""
    private, public = signing.make_keys(folder, "key")
    publish(source, folder / "store", sign=private)
    return folder / "store", folder / "out", public


@pytest.mark.parametrize("keys", [True, False])
def test_no_file_is_linked_to_one_that_is_linked_to_the_store(
    keys: bool, source: Path, tmp_path: Path
) -> None:
    """A rank that was pulled before has a part that another rank needs too."""
    store, out, public = signed(source, tmp_path)
    get(store, out, rank=0)
    if keys:
        with pytest.raises(UsageError, match="is a link to a file elsewhere"):
            get(store, out, trust=[public])
        return
    done = get(store, out, links=False)
    new = [out / f"rank-01.{part}.safetensors" for part in PARTS]
    assert done == Copied(written=sum(path.stat().st_size for path in new))
    assert not {path.stat().st_ino for path in new} & objects(store)
    assert files_of(out) == files_of(source)


def test_a_pull_with_keys_that_was_stopped_is_taken_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has linked what the ranks share, in its private folder."""
    store, out, public = signed(source, tmp_path)
    get(store, out, trust=[public], rank=0)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull, "_put_in_place", stop)
        with pytest.raises(KeyboardInterrupt):
            get(store, out, trust=[public])
    assert (out / "rank-00.replicated.safetensors").stat().st_nlink == 2
    assert get(store, out, trust=[public], rank=0) == Copied()
    get(store, out, trust=[public])
    assert files_of(out) == files_of(source)
    assert not inodes(out) & objects(store)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_symbolic_link_in_a_folder_is_not_trusted_nor_linked(
    absolute: bool, source: Path, tmp_path: Path
) -> None:
    store, out, public = signed(source, tmp_path)
    get(store, out, rank=0, trust=[public])
    shared = out / "rank-00.replicated.safetensors"
    data = shared.read_bytes()
    (path,) = [p for p in (store / "objects").glob("*/*") if p.read_bytes() == data]
    shared.unlink()
    shared.symlink_to(path if absolute else Path("..") / path.relative_to(tmp_path))
    with pytest.raises(UsageError, match="is a link to a file elsewhere"):
        get(store, out, trust=[public])
    get(store, out)
    assert not (out / "rank-01.replicated.safetensors").is_symlink()
    assert files_of(out) == files_of(source)


def test_files_of_a_folder_may_be_links_among_themselves(source: Path, tmp_path: Path) -> None:
    store, out, public = signed(source, tmp_path)
    get(store, out, trust=[public], rank=0)
    get(store, out, trust=[public])
    names = [out / f"rank-0{rank}.replicated.safetensors" for rank in (0, 1)]
    assert names[0].samefile(names[1])
    assert get(store, out, trust=[public]) == Copied()


# ---- while it is published ----


def written_late(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None], times: int) -> None:
    """Do something when a file has been hashed, before it is asked whether it has changed."""
    real, left = transfer._File.complete, [times]

    def complete(self: Any) -> None:
        if left[0]:
            left[0] -= 1
            write()
        real(self)

    monkeypatch.setattr(transfer._File, "complete", complete)


def test_a_file_that_is_written_to_after_it_was_hashed_is_not_published(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = tmp_path / "store", files_of(source)
    opened = [os.open(path, os.O_WRONLY) for path in source.glob("rank-*")]

    def write() -> None:
        for fd in opened:
            os.pwrite(fd, b"?", 7)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "THREADS", 1)
        written_late(patch, write, 1)
        with pytest.raises(ArtifactError, match="chunk 0 "):
            publish(source, store)
    for fd in opened:
        os.close(fd)
    assert not (store / "tags" / "v1").exists()
    assert hidden(store) == []
    found = {path.read_bytes() for path in (store / "objects").glob("*/*")}
    assert found <= set(files.values())


@pytest.mark.parametrize("change", [-1, 1, CHUNK])
@pytest.mark.parametrize("method", ["copy_chunk", "complete"])
def test_a_file_that_gets_another_size_meanwhile_is_not_published(
    change: int, method: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = tmp_path / "store", files_of(source)
    real = getattr(transfer._File, method)

    def changed(self: Any, *args: Any) -> Any:
        size = self.copy.entry.size
        if self.copy.how == "linked" and size == len(files[SHARD]):
            os.truncate(source / SHARD, size + change)
        return real(self, *args)

    monkeypatch.setattr(transfer._File, method, changed)
    with pytest.raises(ArtifactError, match=SHARD) as raised:
        publish(source, store)
    assert re.search(r"found (\d+$|the end of the file)", str(raised.value).split(". ")[0])
    assert not (store / "tags" / "v1").exists()
    assert hidden(store) == []


@pytest.mark.parametrize("always", [True, False])
def test_a_file_that_is_touched_meanwhile_is_hashed_again(
    always: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other publishes of the same folder do, each time."""
    store, files = tmp_path / "store", files_of(source)

    def touch() -> None:
        for path in source.glob("rank-*"):
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    if always:
        real = transfer._File._found

        def found(self: Any, index: int) -> str:
            touch()
            return real(self, index)

        monkeypatch.setattr(transfer._File, "_found", found)
    else:
        written_late(monkeypatch, touch, 5)
    publish(source, store)
    assert offered(store, "v1") == files


@pytest.mark.parametrize("links", [True, False])
def test_a_source_that_is_wrong_leaves_no_names_behind(
    links: bool, source: Path, tmp_path: Path
) -> None:
    os.truncate(source / "tokenizer_config.json", 3)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="tokenizer_config"):
            publish(source, tmp_path / "store", links=links)
        assert [name for name in hidden(tmp_path / "store") if name.endswith(".tmp")] == []


def test_too_little_space_leaves_no_names_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / SHARD).chmod(0o600)  # must be copied
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: 0)
    with pytest.raises(SpaceError):
        publish(source, tmp_path / "store")
    assert hidden(tmp_path / "store") == []


def test_who_stops_it_leaves_no_names_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = share.share, [0]

    def stop(*args: Any) -> bool:
        done = real(*args)
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(transfer, "share", stop)
    with pytest.raises(KeyboardInterrupt):
        publish(source, tmp_path / "store")
    assert hidden(tmp_path / "store") == []


@AS_ROOT
def test_a_part_of_another_user_is_left_to_them(source: Path, tmp_path: Path) -> None:
    """They could write to it after it has become an object."""
    store, data = tmp_path / "store", (source / SHARD).read_bytes()
    put(source, store)
    (path,) = [p for p in (store / "objects").glob("*/*") if p.read_bytes() == data]
    part = path.with_name(f".{path.name}.part")
    path.unlink()
    part.write_bytes(data[:CHUNK])
    os.chown(part, OTHER, OTHER)
    flip(source / SHARD, CHUNK)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="chunk 1 "):
            put(source, store)
        assert hidden(store) == [part.name]  # no copy of ours, which nobody would take up
    flip(source / SHARD, CHUNK)
    assert put(source, store).copied == Copied(written=len(data))
    assert part.read_bytes() == data[:CHUNK]
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (os.geteuid(), 0o444)


@pytest.mark.parametrize("links", [True, False])
def test_an_object_that_cannot_be_put_in_its_place_leaves_no_names_behind(
    links: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged object of another user, in a folder from which only they may take it."""
    store = tmp_path / "store"
    put(source, store)
    size = (source / SHARD).stat().st_size
    (path,) = [p for p in (store / "objects").glob("*/*") if p.stat().st_size == size]
    flip(path, 3)

    def refuse(*_: Any, **__: Any) -> bool:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(publish_module, "place", refuse)
    with pytest.raises(PermissionError):
        publish(source, store, links=links)
    assert hidden(store) == []


@pytest.mark.parametrize("strange", [Path.mkdir, os.mkfifo, lambda p: p.symlink_to("nowhere")])
def test_what_is_no_part_is_left_alone(
    strange: Callable[[Path], object], source: Path, tmp_path: Path
) -> None:
    store, data = tmp_path / "store", (source / SHARD).read_bytes()
    put(source, store)
    (path,) = [p for p in (store / "objects").glob("*/*") if p.read_bytes() == data]
    path.unlink()
    part = path.with_name(f".{path.name}.part")
    strange(part)
    before = part.lstat()
    assert put(source, store).copied == Copied(written=len(data))
    assert part.lstat().st_ino == before.st_ino
    assert offered(store, "v1") == files_of(source)


def test_a_part_that_was_left_does_not_keep_from_linking(source: Path, tmp_path: Path) -> None:
    store, files = tmp_path / "store", files_of(source)
    put(source, store)
    for path in list((store / "objects").glob("*/*")):
        path.rename(path.with_name(f".{path.name}.part"))
    assert publish(source, store).shared == size_of(files) - beside(source)
    assert offered(store, "v1") == files
