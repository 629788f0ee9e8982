"""Publishing: what is copied and what is not; damaged sources and objects; what was begun."""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import CUBIN
from helpers import Call, flip_byte, state
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    CHUNK,
    add_cubin,
    blake3_of,
    chunk_everywhere,
    files_of,
    hidden,
    make_chunky,
    manifest_again,
    name_of,
    object_at,
    objects_of,
    offered,
    put,
    size_of,
    variant,
)

from dsv2mk.artifacts import publish as publish_module
from dsv2mk.artifacts import signing, transfer
from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests.errors import ArtifactError, UsageError

SHARD = "rank-00.ffn.safetensors"


@pytest.fixture
def chunky(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose files have several chunks."""
    return make_chunky(artifact, monkeypatch)


# ---- what is copied ----


def test_a_second_publish_copies_nothing(artifact: Path, tmp_path: Path, dsv2mk: Call) -> None:
    store, files = tmp_path / "store", files_of(artifact)
    first = dsv2mk("publish", "--copy", artifact, store, "--tag", "v1", "--json").json
    inodes = {path: path.stat().st_ino for path in (store / "objects").glob("*/*")}
    second = dsv2mk("publish", "--copy", artifact, store, "--tag", "v2", "--json").json
    keys = ("bytes_written", "bytes_resumed", "bytes_reused")
    assert [first[key] for key in keys] == [size_of(files), 0, 0]
    assert [second[key] for key in keys] == [0, 0, size_of(files)]
    assert first["digest"] == second["digest"]
    assert {path: path.stat().st_ino for path in (store / "objects").glob("*/*")} == inodes
    assert offered(store, "v1") == offered(store, "v2") == files


def test_artifacts_that_share_files_share_objects(artifact: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(artifact, store)
    other = variant(artifact, tmp_path / "other", "b")
    done = put(other, store, "v2")
    new = [(other / name).read_bytes() for name in ("generation_config.json", "manifest.json")]
    assert done.copied.written == sum(map(len, new))
    assert done.reused == size_of(files_of(other)) - done.copied.written
    assert offered(store, "v1") == files_of(artifact)
    assert offered(store, "v2") == files_of(other)


def test_the_source_is_not_touched(artifact: Path, tmp_path: Path) -> None:
    before = state(artifact)
    put(artifact, tmp_path / "store")
    assert state(artifact) == before


def test_cubins_go_along(artifact: Path, tmp_path: Path) -> None:
    for arch in ("sm_90a", "sm_100a"):
        add_cubin(artifact, arch, cubin=CUBIN + arch.encode())
    (artifact / "cubin" / "dsv2mk.sm_90a.tp2.0.ptx").write_text("no PTX in a store")
    (artifact / "cubin" / "notes.json").write_text("{}")
    done = put(artifact, tmp_path / "store")
    files = files_of(artifact)
    del files["cubin/notes.json"]
    assert offered(tmp_path / "store", "v1") == files
    assert done.bundle.archs == ["sm_100a", "sm_90a"]
    for archs in (["sm_90a"], ["sm_100a", "sm_90a"], []):
        chosen = put(artifact, tmp_path / "store", "v2", archs=archs)
        assert chosen.bundle.archs == sorted(archs)
        assert set(offered(tmp_path / "store", "v2")) == {
            n for n in files if not n.startswith("cubin/") or any(f".{a}." in n for a in archs)
        }
    with pytest.raises(UsageError, match="no cubin for sm_103a: found sm_100a, sm_90a"):
        put(artifact, tmp_path / "store", "v3", archs=["sm_103a"])


def test_a_cubin_of_another_model_stays_behind(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_cubin(artifact)
    other = add_cubin(artifact, ranks=1, note="of one rank")
    assert put(artifact, tmp_path / "store").bundle.archs == ["sm_90a"]
    names = {name for name in offered(tmp_path / "store", "v1") if name.startswith("cubin/")}
    assert len(names) == 2
    assert not [name for name in names if other.stem in name]
    assert f"left out: {other.with_suffix('.json')}" in capsys.readouterr().err


def test_a_cubin_that_is_not_its_sidecars_is_refused(artifact: Path, tmp_path: Path) -> None:
    cubin = add_cubin(artifact)
    flip_byte(cubin)
    with pytest.raises(ArtifactError, match=f"{cubin} is not that of"):
        put(artifact, tmp_path / "store")
    cubin.unlink()
    with pytest.raises(ArtifactError, match=f"{cubin}: No such file"):
        put(artifact, tmp_path / "store")
    assert objects_of(tmp_path / "store") == {}


def test_files_and_folders_follow_the_umask_and_objects_are_read_only(
    artifact: Path, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        put(artifact, tmp_path / "store")
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = 0o440 if path.parent.parent.name == "objects" else 0o640
        assert mode == (0o750 if path.is_dir() else wanted), path


def test_another_folder_is_not_made_a_store(artifact: Path, tmp_path: Path) -> None:
    before = state(artifact)
    with pytest.raises(UsageError, match=r"is not a store and holds config\.json"):
        put(artifact, artifact)
    assert state(artifact) == before
    (tmp_path / "empty").mkdir()
    put(artifact, tmp_path / "empty")
    assert offered(tmp_path / "empty", "v1") == files_of(artifact)


# ---- damaged sources and objects ----


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("damage", [flip_byte, cut, lengthen, Path.unlink])
def test_a_damaged_source_is_refused_and_never_published(
    damage: Callable[[Path], None], artifact: Path, tmp_path: Path
) -> None:
    names = sorted(read_manifest(artifact).files)
    names.remove("rank-01.replicated.safetensors")  # its bytes come from rank 0's
    assert len(names) == 9
    for name in names:
        source = shutil.copytree(artifact, tmp_path / name / "source")
        damage(source / name)
        with pytest.raises(ArtifactError, match=f"{source / name}: ") as refused:
            put(source, tmp_path / name / "store")
        if damage is flip_byte:
            assert "chunk 0 (from byte 0): expected" in str(refused.value)
        store = tmp_path / name / "store"
        whole = {name_of(data) for data in files_of(artifact).values()}
        assert set(objects_of(store)) < whole
        assert not list(store.glob("tags/*")) + list(store.glob("bundles/*"))
        assert list((store / "leases").iterdir()) == []
        put(artifact, store)  # and a whole one goes on from there
        assert offered(store, "v1") == files_of(artifact)


def test_the_damaged_chunk_is_named(chunky: Path, tmp_path: Path) -> None:
    flip_byte(chunky / SHARD, 3 * CHUNK + 5)
    with pytest.raises(ArtifactError, match=rf"{chunky / SHARD}: chunk 3 \(from byte 60000\)"):
        put(chunky, tmp_path / "store")


def test_a_manifest_whose_digests_are_not_of_their_chunks_is_refused(
    artifact: Path, tmp_path: Path
) -> None:
    data = json.loads((artifact / "manifest.json").read_text())
    data["files"]["config.json"]["digest"] = "ab" * 16
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (artifact / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"digest of config\.json"):
        put(artifact, tmp_path / "store")


@pytest.mark.parametrize("damage", [flip_byte, cut, lengthen])
def test_a_damaged_object_is_replaced(
    damage: Callable[[Path], None],
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, files = tmp_path / "store", files_of(artifact)
    put(artifact, store)
    for data in set(files.values()):
        damage(object_at(store, data))
    done = put(artifact, store, "v2")
    assert done.copied.written == size_of(files)
    assert done.reused == 0
    said = capsys.readouterr().err
    for data in set(files.values()):
        assert f"replaced: object {object_at(store, data)} is damaged" in said
    assert offered(store, "v1") == offered(store, "v2") == files


def test_a_damaged_bundle_is_replaced(artifact: Path, tmp_path: Path) -> None:
    digest = put(artifact, tmp_path / "store").bundle.digest
    flip_byte(tmp_path / "store" / "bundles" / f"{digest}.json", 20)
    put(artifact, tmp_path / "store", "v2")
    assert offered(tmp_path / "store", "v1") == files_of(artifact)


def test_a_folder_of_one_rank_is_enough_where_the_store_has_the_rest(
    artifact: Path, tmp_path: Path
) -> None:
    files = files_of(artifact)
    put(artifact, tmp_path / "store")
    for path in artifact.glob("rank-01.*"):
        path.unlink()
    put(artifact, tmp_path / "store", "v2")
    assert offered(tmp_path / "store", "v2") == files
    with pytest.raises(ArtifactError, match=r"rank-01\.\w+\.safetensors: cannot be read"):
        put(artifact, tmp_path / "empty")


# ---- interrupted ----


def parts_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.rglob(".*.part")}


def begin_part(store: Path, data: bytes, content: bytes | None = None) -> Path:
    """The part of an object with these bytes, with all of them or another content."""
    path = object_at(store, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data if content is None else content)
    return part


def test_a_part_is_taken_up_chunk_by_chunk(chunky: Path, tmp_path: Path) -> None:
    store, data = tmp_path / "store", (chunky / SHARD).read_bytes()
    put(variant(chunky, tmp_path / "other", "b"), store, "other")
    object_at(store, data).unlink()
    part = begin_part(store, data)
    flip_byte(part, 2 * CHUNK)
    os.truncate(part, 4 * CHUNK + 100)
    inode = part.stat().st_ino
    done = put(chunky, store)
    new = [(chunky / name).read_bytes() for name in ("generation_config.json", "manifest.json")]
    assert done.copied.kept == 3 * CHUNK  # 0, 1 and 3
    assert done.copied.written == len(data) - 3 * CHUNK + sum(map(len, new))
    assert object_at(store, data).stat().st_ino == inode
    assert offered(store, "v1") == files_of(chunky)
    assert hidden(store) == []


def test_a_part_that_is_too_long_or_nonsense_does_no_harm(chunky: Path, tmp_path: Path) -> None:
    store, data = tmp_path / "store", (chunky / SHARD).read_bytes()
    publish_module.create_store(store)
    begin_part(store, data, data + b"more" * CHUNK)
    tokenizer = (chunky / "tokenizer.json").read_bytes()
    begin_part(store, tokenizer, os.urandom(len(tokenizer) + 5))
    done = put(chunky, store)
    assert done.copied.kept == len(data)
    assert offered(store, "v1") == files_of(chunky)
    assert hidden(store) == []


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_a_part_holds_the_object_is_right(
    data: st.DataObject, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        old = read_manifest(shared / "artifact")
        chunk_everywhere(patch)
        source = shutil.copytree(shared / "artifact", folder / "source")
        manifest_again(source, old)
        store, whole = folder / "store", (source / SHARD).read_bytes()
        publish_module.create_store(store)
        part = begin_part(store, whole)
        size = data.draw(st.integers(0, len(whole) + CHUNK))
        os.truncate(part, size)
        flips = data.draw(st.sets(st.integers(0, max(0, size - 1)), max_size=4)) if size else set()
        for at in flips:
            flip_byte(part, at, mask=255)
        chunks = range(-(-len(whole) // CHUNK))
        ends = [min((index + 1) * CHUNK, len(whole)) for index in chunks]
        kept = sum(
            ends[index] - index * CHUNK
            for index in chunks
            if ends[index] <= size and not any(index * CHUNK <= at < ends[index] for at in flips)
        )
        done = put(source, store)
        assert done.copied.kept == kept
        assert offered(store, "v1") == files_of(source)
        assert hidden(store) == []
    shutil.rmtree(folder)


def test_a_part_that_is_not_ours_is_left_alone(
    chunky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to another user."""
    store, data = tmp_path / "store", (chunky / SHARD).read_bytes()
    publish_module.create_store(store)
    part = begin_part(store, data, data[:CHUNK])
    before = state(part)
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_RDWR and not flags & os.O_EXCL and Path(os.fsdecode(path)) == part:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert put(chunky, store).copied.kept == 0
    monkeypatch.undo()
    assert state(part) == before
    chunk_everywhere(monkeypatch)
    assert offered(store, "v1") == files_of(chunky)
    assert hidden(store) == [part.name]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_hard_links_are_not_needed(
    code: int, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any, **more: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", none)
    put(artifact, tmp_path / "store")
    assert put(artifact, tmp_path / "store", "v2").copied.written == 0
    assert offered(tmp_path / "store", "v2") == files_of(artifact)
    assert hidden(tmp_path / "store") == []


# ---- shared extents ----


@pytest.fixture
def reflink(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system that shares extents: what FICLONE gives, by copying. How often it was asked."""
    asked: list[int] = []

    def clone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        asked.append(source)
        os.pwrite(target, os.pread(source, 1 << 30, 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    return asked


def test_where_extents_can_be_shared_nothing_is_written(
    chunky: Path, tmp_path: Path, reflink: list[int]
) -> None:
    done = put(chunky, tmp_path / "store")
    files = files_of(chunky)
    assert done.copied == transfer.Copied(shared=size_of(files))
    assert len(reflink) == len(set(files.values()))
    assert offered(tmp_path / "store", "v1") == files
    assert hidden(tmp_path / "store") == []


def test_shared_extents_need_no_space(
    chunky: Path, tmp_path: Path, reflink: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: 0)
    put(chunky, tmp_path / "store")
    assert offered(tmp_path / "store", "v1") == files_of(chunky)


def test_shared_extents_of_a_damaged_source_are_not_published(
    chunky: Path, tmp_path: Path, reflink: list[int]
) -> None:
    whole = files_of(chunky)
    flip_byte(chunky / SHARD, CHUNK)
    with pytest.raises(ArtifactError, match=rf"{SHARD}: chunk 1 "):
        put(chunky, tmp_path / "store")
    assert reflink
    assert name_of(whole[SHARD]) not in objects_of(tmp_path / "store")
    assert parts_of(tmp_path / "store") == {}  # nobody takes it for one


# ---- signed ----


def test_a_signed_bundle_has_the_hashes_of_every_chunk(chunky: Path, tmp_path: Path) -> None:
    private, public = signing.make_keys(tmp_path, "key")
    store = tmp_path / "store"
    bundle = put(chunky, store, sign=private).bundle
    files = files_of(chunky)
    assert bundle.blake3 == {
        name: tuple(blake3_of(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
        for name, data in files.items()
    }
    (signature,) = (store / "bundles").glob("*.sig")
    key = signing.key_id(signing.load_public(public))
    assert signature.name == f"{bundle.digest}.{key}.sig"
    assert signing.check(bundle.encoded, [signature.read_bytes()], [public]) == key
    assert Store(store).signature_places(bundle.digest) == [signature]
    assert offered(store, "v1") == files


def test_a_key_that_cannot_be_read_is_refused_before_anything_is_copied(
    artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="absent"):
        put(artifact, tmp_path / "store", sign=tmp_path / "absent")
    assert objects_of(tmp_path / "store") == {}
