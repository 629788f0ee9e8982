"""Pulling: whole or one rank's part, into nothing or into what is there, interrupted, damaged."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import Call, flip_byte, names, state
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    CHUNK,
    add_cubin,
    chunk_everywhere,
    files_of,
    manifest_again,
    object_at,
    put,
    variant,
)

from dsv2mk.artifacts import pull as pull_module
from dsv2mk.artifacts import signing, transfer
from dsv2mk.artifacts.artifact import Artifact, read_manifest
from dsv2mk.artifacts.pull import Pulled
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests.errors import ArtifactError, SpaceError, UsageError
from dsv2mk.manifests.layout import PARTS

SHARD = "rank-00.ffn.safetensors"
REPLICATED = [f"rank-0{rank}.replicated.safetensors" for rank in range(2)]


@pytest.fixture
def source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact with two cubins, whose files have several chunks."""
    old = read_manifest(artifact)
    chunk_everywhere(monkeypatch)
    manifest_again(artifact, old)
    for arch in ("sm_90a", "sm_100a"):
        add_cubin(artifact, arch)
    return artifact


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    put(source, tmp_path / "store")
    return tmp_path / "store"


def get(store: Path, dest: Path, tag: str = "v1", **options: Any) -> Pulled:
    opened = Store.open(store)
    return pull_module.pull(opened, opened.resolve(tag), dest, **{"links": False, **options})


def of_rank(files: dict[str, bytes], rank: int) -> dict[str, bytes]:
    others = {f"rank-0{1 - rank}.{part}.safetensors" for part in PARTS}
    return {name: data for name, data in files.items() if name not in others}


def unique_bytes(files: dict[str, bytes]) -> int:
    return sum(len(data) for data in set(files.values()))


# ---- what comes ----


def test_what_is_pulled_is_what_was_published(source: Path, store: Path, tmp_path: Path) -> None:
    before = state(store)
    done = get(store, tmp_path / "new" / "out")
    files = files_of(source)
    assert files_of(tmp_path / "new" / "out") == files
    assert set(done.added) == set(done.files) == set(files)
    assert done.copied.written == unique_bytes(
        {n: d for n, d in files.items() if "json" not in n}
    ) + (sum(len(data) for name, data in files.items() if "json" in name))
    assert os.path.samefile(*(tmp_path / "new" / "out" / name for name in REPLICATED))
    assert Artifact.open(tmp_path / "new" / "out").verify() == {}
    assert names(tmp_path / "new") == {"out"}
    assert state(store) == before


def test_a_rank_gets_its_own_part_and_the_rest_later(
    source: Path, store: Path, tmp_path: Path
) -> None:
    out, files = tmp_path / "out", files_of(source)
    get(store, out, rank=1)
    assert files_of(out) == of_rank(files, 1)
    assert Artifact.open(out, rank=1).verify() == {}
    (out / "mine.txt").write_text("not of the artifact")
    before = state(out)
    done = get(store, out, rank=0)
    # The replicated part is there under another name: it is one file with two.
    assert done.copied.written == sum(len(files[name]) for name in done.added) - len(
        files[REPLICATED[0]]
    )
    assert os.path.samefile(*(out / name for name in REPLICATED))
    assert files_of(out) == {**files, "mine.txt": b"not of the artifact"}
    after = state(out)
    linked = {str(out), str(out / REPLICATED[1])}  # one more link
    assert {path for path in before if before[path] != after[path]} == linked
    assert Artifact.open(out).verify() == {}
    assert get(store, out).added == ()
    assert state(out) == after


def test_only_some_cubins(source: Path, store: Path, tmp_path: Path) -> None:
    files = files_of(source)
    for archs in (["sm_90a"], [], ["sm_100a", "sm_90a"]):
        out = tmp_path / "-".join(["out", *archs])
        get(store, out, archs=archs)
        assert set(files_of(out)) == {
            n for n in files if not n.startswith("cubin/") or any(f".{a}." in n for a in archs)
        }
    out = tmp_path / "out"
    done = get(store, out, archs=["sm_100a"])
    assert len(done.added) == 2
    with pytest.raises(UsageError, match="no cubin for sm_103a: found sm_100a, sm_90a"):
        get(store, out, archs=["sm_103a"])
    with pytest.raises(UsageError, match="expected 0 to 1, found 2"):
        get(store, out, rank=2)


def test_without_links_and_without_the_kernels_help(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any, **more: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", none)
    monkeypatch.setattr(os, "copy_file_range", none)
    get(store, tmp_path / "out", rank=0)
    get(store, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source)


def test_what_the_kernel_copies_wrong_is_seen(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back: then the bytes come through memory."""
    real, wrong = os.copy_file_range, []

    def damaging(source: int, target: int, count: int, start: int, to: int) -> int:
        count = real(source, target, count, start, to)
        os.pwrite(target, b"\xa5\x5a", to)
        wrong.append(to)
        return count

    monkeypatch.setattr(os, "copy_file_range", damaging)
    get(store, tmp_path / "out")
    assert wrong
    assert files_of(tmp_path / "out") == files_of(source)


# ---- what is there ----


def test_another_artifact_is_refused(source: Path, store: Path, tmp_path: Path) -> None:
    put(variant(source, tmp_path / "other", "b"), store, "v2")
    get(store, tmp_path / "out")
    before = state(tmp_path / "out")
    with pytest.raises(UsageError, match=r"is another artifact: expected .*, found"):
        get(store, tmp_path / "out", "v2")
    assert state(tmp_path / "out") == before
    assert names(tmp_path) >= {"out"}
    assert not (tmp_path / ".out.pull").exists()


def test_a_folder_or_file_that_is_no_artifact_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("folder", "file"):
        with pytest.raises(UsageError, match="is not an artifact"):
            get(store, tmp_path / name)
    assert (tmp_path / "folder" / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    get(store, tmp_path / "empty")
    assert Artifact.open(tmp_path / "empty").verify() == {}


def test_a_damaged_file_that_is_there_is_named(source: Path, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    get(store, out, rank=0)
    flip_byte(out / SHARD, 2 * CHUNK)
    with pytest.raises(ArtifactError, match=f"{out / SHARD} is damaged: chunk 2 .*Remove"):
        get(store, out)
    assert not (out / REPLICATED[1]).exists()
    (out / SHARD).unlink()
    get(store, out)
    assert files_of(out) == files_of(source)


def test_two_pulls_to_one_place_do_not_meet(store: Path, tmp_path: Path) -> None:
    with (
        pull_module._private(tmp_path / "out"),
        pytest.raises(UsageError, match="another pull is writing"),
    ):
        get(store, tmp_path / "out")
    get(store, tmp_path / "out")
    assert not (tmp_path / ".out.pull").exists()


# ---- interrupted ----


def begin_pull(dest: Path, name: str, data: bytes) -> Path:
    """What a pull that was killed has left."""
    path = dest.parent / f".{dest.name}.pull" / "artifact" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_pull_is_taken_up_chunk_by_chunk(source: Path, store: Path, tmp_path: Path) -> None:
    out, files = tmp_path / "out", files_of(source)
    part = begin_pull(out, SHARD, files[SHARD][: 4 * CHUNK + 7])
    flip_byte(part, CHUNK)
    begin_pull(out, "config.json", files["config.json"])
    begin_pull(out, "strange.bin", b"of another bundle")
    done = get(store, out)
    assert done.copied.kept == 3 * CHUNK + len(files["config.json"])
    assert files_of(out) == files
    assert not (tmp_path / ".out.pull").exists()


def test_a_link_that_was_left_is_not_written_through(
    source: Path, store: Path, tmp_path: Path
) -> None:
    """A pull of another bundle had linked a file of the destination."""
    out, files = tmp_path / "out", files_of(source)
    get(store, out, rank=0)
    part = begin_pull(out, REPLICATED[1], b"")
    part.unlink()
    os.link(out / SHARD, part)
    other = begin_pull(out, "rank-01.ffn.safetensors", b"")
    other.unlink()
    os.link(out / SHARD, other)
    get(store, out)
    assert files_of(out) == files


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_was_left_the_result_is_right(
    data: st.DataObject, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        old = read_manifest(shared / "artifact")
        chunk_everywhere(patch)
        source = shutil.copytree(shared / "artifact", folder / "source")
        manifest_again(source, old)
        put(source, folder / "store")
        files = files_of(source)
        for name in data.draw(st.sets(st.sampled_from(sorted(files)))):
            size = data.draw(st.integers(0, len(files[name]) + 10))
            part = begin_pull(folder / "out", name, files[name])
            os.truncate(part, size)
            if size:
                flip_byte(part, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 255)))
        rank = data.draw(st.sampled_from([None, 0, 1]))
        get(folder / "store", folder / "out", rank=rank)
        assert files_of(folder / "out") == (files if rank is None else of_rank(files, rank))
        assert names(folder) == {"out", "source", "store"}
    shutil.rmtree(folder)


# ---- damage and space ----


def test_a_damaged_object_is_named_and_the_rest_is_kept(
    source: Path, store: Path, tmp_path: Path
) -> None:
    files, out = files_of(source), tmp_path / "out"
    path = object_at(store, files[SHARD])
    flip_byte(path, 5 * CHUNK + 1)
    with pytest.raises(ArtifactError) as refused:
        get(store, out)
    assert f"object {path} chunk 5 (from byte 100000): expected " in str(refused.value)
    assert f"it is {SHARD} of bundle " in str(refused.value)
    assert not out.exists()
    path.unlink()
    with pytest.raises(ArtifactError, match=f"object {path} cannot be read: No such file"):
        get(store, out)
    put(source, store)
    done = get(store, out)
    assert done.copied.kept > 0
    assert files_of(out) == files


def test_other_ranks_objects_need_not_be_there(source: Path, store: Path, tmp_path: Path) -> None:
    files = files_of(source)
    object_at(store, files[SHARD]).unlink()
    get(store, tmp_path / "out", rank=1)
    assert files_of(tmp_path / "out") == of_rank(files, 1)


def test_an_object_in_the_trash_is_used_there(source: Path, store: Path, tmp_path: Path) -> None:
    (store / "trash").mkdir()
    for path in list((store / "objects").glob("*/*")):
        path.rename(store / "trash" / path.name)
    before = state(store)
    get(store, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source)
    assert state(store) == before


def test_too_little_space_is_seen_ahead(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: 1000)
    with pytest.raises(SpaceError, match=r"expected .*MB free, found 1.00 KB free"):
        get(store, tmp_path / "out")
    assert names(tmp_path) == {"artifact", "store"}
    assert not (tmp_path / ".out.pull").exists()


def test_a_disk_that_fills_up_keeps_what_is_done(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsv2mk: Call
) -> None:
    files, kept = files_of(source), 0
    for room in range(0, 200, 20):
        left = [room]
        real = os.copy_file_range

        def hooked(*args: Any, left: list[int] = left, real: Any = real) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "copy_file_range", hooked)
            done = dsv2mk("pull", "--copy", store, "v1", tmp_path / "out", "--json")
        assert done.code == 13
        assert "free some space" in done.json["error"]["fix"]
        assert not (tmp_path / "out").exists()
        kept = max(kept, room * CHUNK)
        if room >= 60:
            break
    done = dsv2mk("pull", "--copy", store, "v1", tmp_path / "out", "--json")
    assert done.json["bytes_resumed"] >= CHUNK * 20
    assert files_of(tmp_path / "out") == files


# ---- signed ----


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "keys"
    folder.mkdir()
    return [path for name in ("a", "b") for path in signing.make_keys(folder, name)]


def test_a_trusted_bundle_comes(
    source: Path, tmp_path: Path, keys: list[Path], dsv2mk: Call
) -> None:
    store, (private, public, _, other) = tmp_path / "store", keys
    assert dsv2mk("publish", source, store, "--tag", "v1", "--sign", private).code == 0
    done = dsv2mk(
        "pull", "--copy", store, "v1", tmp_path / "out", "--trust", other, "--trust", public
    )
    assert done.code == 0
    assert files_of(tmp_path / "out") == files_of(source)
    assert dsv2mk("pull", "--copy", store, "v1", tmp_path / "out", "--trust", public).code == 0
    refused = dsv2mk("pull", "--copy", store, "v1", tmp_path / "no", "--trust", other)
    assert (refused.code, "no valid signature" in refused.err) == (11, True)
    assert not (tmp_path / "no").exists()


def test_a_bundle_that_is_not_signed_is_not_trusted(
    source: Path, store: Path, tmp_path: Path, keys: list[Path]
) -> None:
    digest = Store.open(store).resolve("v1")
    encoded = Store.open(store).bundle_bytes(digest)
    with pytest.raises(ArtifactError, match="no signature"):
        get(store, tmp_path / "out", trust=[keys[1]])
    key, signature = signing.sign(encoded, keys[0])
    (store / "bundles" / f"{digest}.{key}.sig").write_bytes(signature)
    with pytest.raises(ArtifactError, match="has no blake3 hashes"):
        get(store, tmp_path / "out", trust=[keys[1]])
    assert not (tmp_path / "out").exists()


def test_nothing_of_a_bundle_is_read_before_its_signature(
    store: Path, tmp_path: Path, keys: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("was read")

    monkeypatch.setattr(pull_module.Bundle, "parse", never)
    monkeypatch.setattr(Store, "manifest", never)
    with pytest.raises(ArtifactError, match="no valid signature"):
        get(store, tmp_path / "out", trust=[keys[1]])


def test_bytes_that_were_not_signed_are_refused_though_their_xxh3_fits(
    source: Path, tmp_path: Path, keys: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can write to a store can make xxh3 fit; here nobody looks at it."""
    store, files = tmp_path / "store", files_of(source)
    put(source, store, sign=keys[0])
    flip_byte(object_at(store, files[SHARD]), 3 * CHUNK)
    real = transfer._File._copy_by_kernel
    monkeypatch.setattr(transfer._File, "_copy_by_kernel", lambda *args: real(*args) or True)
    with pytest.raises(ArtifactError, match=rf"{SHARD}: chunk 3 is not what was signed"):
        get(store, tmp_path / "out", trust=[keys[1]])
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_proved_too(
    source: Path, tmp_path: Path, keys: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    put(source, store, sign=keys[0])
    get(store, out, rank=0)
    flip_byte(out / SHARD, 3 * CHUNK)
    monkeypatch.setattr(pull_module, "check_files", lambda *args: {})
    with pytest.raises(ArtifactError, match=rf"{SHARD}: chunk 3 is not what was signed"):
        get(store, out, trust=[keys[1]])
