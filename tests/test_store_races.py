"""Commands of a store that meet at one step, where only one order of theirs is told apart.

Each test says what one command stands at while others run; all of them must do what they say.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import Actor, hook, of, onto
from store_children import call
from stores import DAY, age, files_of, hidden, object_at, offered, put, put_two, variant

from dsv2mk.artifacts import publish as publish_module
from dsv2mk.artifacts import signing
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.collect import check_store, collect, remove
from dsv2mk.artifacts.publish import retag
from dsv2mk.artifacts.pull import pull
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.runner import load

TRASH = "/trash/"


@pytest.fixture
def two(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `put_two`, a day old; calls may stand still."""
    put_two(artifact, tmp_path)
    hook(monkeypatch)
    return tmp_path


@pytest.fixture
def store(two: Path) -> Store:
    return Store(two / "store")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return signing.make_keys(tmp_path, "key")


def sign(two: Path, tag: str, keys: tuple[Path, Path]) -> str:
    """Publish `artifact`, signed; the bundle's name."""
    return put(two / "artifact", two / "store", tag, sign=keys[0]).bundle.digest


# ---- what was done stays done ----


def test_a_signed_bundle_that_is_removed_while_it_gets_a_tag_keeps_its_signature(
    two: Path, store: Store, keys: tuple[Path, Path]
) -> None:
    digest = sign(two, "s", keys)
    tags = Actor(lambda: retag(store, digest, "t"))
    assert tags.go("mkdir", "before", of("/tags"))
    assert remove(store, "s") == (["s"], digest)
    tags.end()
    pull(store, store.resolve("t"), two / "out", trust=[keys[1]])


def test_a_removal_leaves_the_signature_of_a_bundle_that_is_there_again(
    two: Path, store: Store, keys: tuple[Path, Path]
) -> None:
    sign(two, "s", keys)
    removes = Actor(lambda: remove(store, "s"))
    assert removes.go("unlink", "after", lambda path, *_: TRASH in path)
    assert removes.go("listdir", "before", of("/bundles"))
    sign(two, "t", keys)
    removes.end()
    pull(store, store.resolve("t"), two / "out", trust=[keys[1]])


def test_a_signature_whose_removal_was_cut_short_is_decided_about(
    two: Path, store: Store, keys: tuple[Path, Path]
) -> None:
    digest = sign(two, "s", keys)
    (path,) = store.signature_places(digest)
    (store.path / "trash").mkdir(exist_ok=True)
    for there in (True, False):
        os.rename(path, store.dying(path.name))
        if not there:
            remove(store, digest)
        collect(store, 0)
        assert path.exists() == there
        assert not list((store.path / "trash").glob("*.sig*"))


def test_a_removal_by_digest_leaves_a_tag_that_has_moved_on(two: Path, store: Store) -> None:
    old, new = store.tag("v1"), store.tag("v2")
    retag(store, old, "latest")
    removes = Actor(lambda: remove(store, old))
    assert removes.go("rename", "before", of("/latest"))
    retag(store, new, "latest")
    assert removes.end() == (["v1"], old)
    assert store.tag("latest") == new
    assert hidden(store.path) == []


def test_a_removal_by_tag_removes_what_that_named_last(two: Path, store: Store) -> None:
    old, new = store.tag("v1"), store.tag("v2")
    retag(store, old, "latest")
    remove(store, "v1")
    removes = Actor(lambda: remove(store, "latest"))
    assert removes.go("rename", "before", of("/latest"))
    retag(store, new, "latest")
    assert removes.end() == (["latest"], None)  # v2 names it too
    assert store.bundle_digests() == sorted([old, new])


def test_two_removals_and_a_tag(two: Path, store: Store) -> None:
    """A bundle comes back while it is removed, and is removed again under the same name."""
    digest = store.tag("v1")
    first = Actor(lambda: remove(store, "v1"))
    assert first.go("unlink", "before", lambda path, *_: TRASH in path)
    put(two / "artifact", store.path, "v3")
    second = Actor(lambda: remove(store, "v3"))
    assert second.go("rename", "before", onto(TRASH))
    retag(store, digest, "v4")
    assert second.go("rename", "after", onto(TRASH))
    first.end()
    assert second.end() == (["v3"], None)
    assert offered(store.path, "v4") == files_of(two / "artifact")


def test_a_removal_while_another_puts_the_bundle_back(two: Path, store: Store) -> None:
    """That has both names for a moment: a rename from one to the other would do nothing."""
    digest = store.tag("v1")
    first = Actor(lambda: remove(store, "v1"))
    assert first.go("rename", "before", onto(TRASH))
    retag(store, digest, "v3")
    assert first.go("unlink", "before", lambda path, *_: TRASH in path)
    second = Actor(lambda: remove(store, "v3"))
    assert second.go("rename", "after", onto(TRASH))
    assert first.end() == (["v1"], None)
    assert second.end() == (["v3"], digest)
    assert not store.has_bundle(digest)


def test_an_object_that_is_in_its_place_and_in_the_trash(two: Path, store: Store) -> None:
    """One collection clears up while a slow one moves the good one to the same name."""
    for tag in ("v1", "v2"):
        remove(store, tag)
    path = shard(two)
    trash = str(store.trash_place(path.name))
    quick, slow = Actor(lambda: collect(store, 0)), Actor(lambda: collect(store, 0))
    assert slow.go("rename", "before", of(str(path)))
    put(two / "artifact", store.path, "v3")
    Path(trash).write_bytes(path.read_bytes())
    assert quick.go("rename", "before", of(trash))
    assert slow.go("rename", "after", of(str(path)))
    quick.end()
    slow.end()
    assert offered(store.path, "v3") == files_of(two / "artifact")


def test_a_tag_is_not_set_on_a_bundle_whose_objects_went(two: Path, store: Store) -> None:
    """It slept for longer than its lease counts."""
    digest = store.tag("v1")
    tags = Actor(lambda: retag(store, digest, "v3"))
    assert tags.go("mkdir", "before", of("/tags"))
    for tag in ("v1", "v2"):
        remove(store, tag)
    age(store.path, DAY)
    collect(store, 0)
    with pytest.raises(ArtifactError, match="is missing"):
        tags.end()
    assert not store.has_bundle(digest)


# ---- nothing is told to be damaged that is removed ----


def shard(two: Path) -> Path:
    """An object of both."""
    return object_at(two / "store", (two / "artifact" / "rank-00.ffn.safetensors").read_bytes())


def removal(two: Path, store: Store) -> None:
    remove(store, "v2")


def removal_and_collection(two: Path, store: Store) -> None:
    remove(store, "v2")
    assert collect(store, 0).objects


def another_name(two: Path, store: Store) -> None:
    digest = store.tag("v2")
    retag(store, store.tag("v1"), "v2")
    remove(store, digest)


@pytest.mark.parametrize("meanwhile", [removal, removal_and_collection, another_name])
@pytest.mark.parametrize("command", ["verify", "ls"])
@pytest.mark.parametrize(
    "at", ["/tags", "/tags/v2", "/bundles", "bundle", "/objects"], ids=lambda at: at.strip("/")
)
def test_a_store_that_is_looked_at_while_a_bundle_goes(
    at: str, command: str, meanwhile: Callable[..., None], two: Path, store: Store
) -> None:
    digest = store.tag("v2")
    manifest = object_at(store.path, (two / "other" / "manifest.json").read_bytes())
    places = {"bundle": f"{digest}.json", "/objects": str(manifest)}
    looks = Actor(lambda: call(command, store.path, "--json"))
    assert looks.go("listdir open stat", "before", of(places.get(at, at)))
    meanwhile(two, store)
    done = looks.end()
    assert done.code == 0, done


def test_objects_that_go_while_they_are_hashed_are_no_damage(two: Path, store: Store) -> None:
    checks = Actor(lambda: check_store(store))
    assert checks.go("listdir", "before", of("/tags"))  # it has read what there is
    removal_and_collection(two, store)
    assert checks.end()[1] == {}


def test_a_tag_that_moves_on_is_always_found(two: Path, store: Store) -> None:
    old, new = store.tag("v1"), store.tag("v2")
    retag(store, old, "latest")
    looks = Actor(lambda: store.resolve("latest"))
    assert looks.go("stat", "before", of(f"{old}.json"))
    retag(store, new, "latest")
    remove(store, "v1")
    assert looks.end() == new


def test_a_tagged_bundle_in_the_trash_is_there(two: Path, store: Store) -> None:
    """Until a removal that saw no tag has seen this one, or for good if it was killed."""
    digest = store.tag("v1")
    removes = Actor(lambda: remove(store, "v1"))
    assert removes.go("rename", "before", onto(TRASH))
    retag(store, digest, "v3")
    assert removes.go("rename", "after", onto(TRASH))
    assert store.resolve("v3") == store.resolve(digest) == digest
    listed = call("ls", store.path, "--json").json["bundles"]
    assert ["v3"] in [bundle["tags"] for bundle in listed]
    assert call("verify", store.path).code == 0
    removes.end()
    assert store.bundle_place(digest).exists()


def test_a_signed_bundle_is_written_again_with_its_signature(
    two: Path, store: Store, keys: tuple[Path, Path]
) -> None:
    """Somebody trusts the tag when it is there already, and the bundle not yet again."""
    publishes = Actor(lambda: sign(two, "t", keys))
    assert publishes.go("replace", "before", onto("/tags/t"))
    (digest,) = [digest for digest in store.bundle_digests() if store.signature_places(digest)]
    remove(store, digest)
    assert publishes.go("link", "before", onto(f"/bundles/{digest}.json"))
    later = threading.Timer(0.05, publishes.end)
    later.start()
    pull(store, store.resolve("t"), two / "out", trust=[keys[1]])
    later.join()


# ---- objects that a collection moves: it looked before they were named ----


@pytest.fixture
def collects(two: Path, store: Store) -> tuple[Actor, Path]:
    """A collection that is about to set an object aside, which nobody named when it looked."""
    for tag in ("v1", "v2"):
        remove(store, tag)
    path = shard(two)
    collection = Actor(lambda: collect(store, 0))
    assert collection.go("rename", "before", of(str(path)))
    return collection, path


def test_a_signed_publish(
    two: Path,
    store: Store,
    keys: tuple[Path, Path],
    collects: tuple[Actor, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collection, path = collects
    real, hashes = publish_module._blake3, []

    def blake3(*args: Any) -> Any:
        hashes.append(args)
        return real(*args)

    monkeypatch.setattr(publish_module, "_blake3", blake3)
    publishes = Actor(lambda: sign(two, "v3", keys))
    assert publishes.go("open", "before", lambda file, *_: bool(hashes) and file == str(path))
    assert collection.go("rename", "after", of(str(path)))
    publishes.end()
    collection.end()
    assert offered(store.path, "v3") == files_of(two / "artifact")


def test_whoever_opens_it(two: Path, store: Store, collects: tuple[Actor, Path]) -> None:
    collection, path = collects
    put(two / "artifact", store.path, "v3")
    opens = Actor(lambda: Artifact.open(f"{store.path}::v3"))
    assert opens.go("open", "before", of(str(path)))
    assert collection.go("rename", "after", of(str(path)))
    opens.end()
    collection.end()


def test_whoever_opens_it_where_the_publisher_could_not_touch_it(
    two: Path, store: Store, collects: tuple[Actor, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another user's: a collection moves it long after the publish has ended."""
    collection, path = collects
    real = os.utime

    def utime(what: Any, *args: Any, **more: Any) -> None:
        if isinstance(what, int) and os.readlink(f"/proc/self/fd/{what}") == str(path):
            raise PermissionError(1, "Operation not permitted")
        real(what, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", utime)
        put(two / "artifact", store.path, "v3")
    opens = Actor(lambda: Artifact.open(f"{store.path}::v3"))
    assert opens.go("open", "before", of(str(path)))
    assert collection.go("rename", "after", of(str(path)))
    assert opens.end().verify() == {}
    collection.end()
    assert offered(store.path, "v3") == files_of(two / "artifact")


def test_whoever_loads_it(
    two: Path, store: Store, collects: tuple[Actor, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collection, path = collects
    put(two / "artifact", store.path, "v3")
    artifact = Artifact.open(f"{store.path}::v3")
    opened: list[str] = []

    def copy_files(sources: list[load.Source], *_: object) -> float:
        assert collection.go("rename", "after", of(str(path)))
        for source in sources:
            os.close(load._open(source))
            opened.append(source.label)
        return 0.0

    monkeypatch.setattr(load, "copy_files", copy_files)
    load.load_weights(artifact, 0, torch.device("cpu"))
    collection.end()
    assert len(opened) == 3


def test_whoever_opens_it_while_two_collections_move_it(
    two: Path, store: Store, collects: tuple[Actor, Path]
) -> None:
    """It is in its place, in the trash and in its place, and each time has just left."""
    first, path = collects
    second = Actor(lambda: collect(store, 0))
    assert second.go("rename", "before", of(str(path)))
    put(two / "artifact", store.path, "v3")
    assert first.go("rename", "after", of(str(path)))
    opens = Actor(lambda: os.close(store.open_object(path.name)))
    assert opens.go("open", "after", of(str(path)))
    first.end()
    assert opens.go("open", "after", of(str(store.trash_place(path.name))))
    assert second.go("rename", "after", of(str(path)))
    opens.end()
    second.end()


# ---- publishers that sleep for longer than their lease counts ----


@pytest.mark.parametrize("last", [False, True])
def test_while_they_hash(
    last: bool,
    two: Path,
    store: Store,
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bundle is written before what it names is there again."""
    third = variant(two / "artifact", two / "third", "c")
    real, calls = signing.blake3_chunks, 0
    count = len(set(files_of(third).values()))

    def chunks(fd: int, size: int, where: object) -> list[str]:
        nonlocal calls
        calls += 1
        found = real(fd, size, where)
        if calls == (count if last else 1):
            for tag in store.tag_names():
                remove(store, tag)
            age(store.path, DAY)
            assert len(collect(store, 0).objects) >= count
        return found

    monkeypatch.setattr(signing, "blake3_chunks", chunks)
    publishes = Actor(lambda: put(third, store.path, "v3", sign=keys[0]))
    assert publishes.go("mkdir", "before", lambda path, *_: calls > 0 and "/objects/" in path)
    assert [call(name, store.path).code for name in ("gc", "ls", "verify")] == [0, 0, 0]
    publishes.end()
    assert offered(store.path, "v3") == files_of(third)


def test_when_a_copy_has_its_last_name_but_one(
    two: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = variant(two / "artifact", two / "third", "c")
    real, slept = os.rename, []

    def rename(old: Any, new: Any) -> None:
        real(old, new)
        if str(old).endswith(".part") and not slept:
            slept.append(new)
            age(store.path, DAY)
            collect(store, 0)

    monkeypatch.setattr(os, "rename", rename)
    put(third, store.path, "v3")
    assert slept
    assert offered(store.path, "v3") == files_of(third)


# ---- pulls into one folder ----


def test_a_folder_that_another_pull_has_made_since(two: Path, store: Store) -> None:
    out = two / "out"
    late = Actor(lambda: pull(store, store.resolve("v1"), out, rank=0))
    assert late.go("mkdir", "before", of(".out.pull"))
    pull(store, store.resolve("v1"), out, rank=1)
    late.end()
    assert files_of(out) == files_of(two / "artifact")
    assert not (two / ".out.pull").exists()


def test_a_folder_that_another_pull_has_completed_since(two: Path, store: Store) -> None:
    out = two / "out"
    late = Actor(lambda: pull(store, store.resolve("v1"), out))
    assert late.go("mkdir", "before", of(".out.pull"))
    pull(store, store.resolve("v1"), out)
    assert late.end().added == []
    assert files_of(out) == files_of(two / "artifact")
    assert not (two / ".out.pull").exists()


@pytest.mark.parametrize("at", ["lstat", "scandir"])
def test_the_private_folder_of_another_pull_goes(at: str, two: Path, store: Store) -> None:
    out = two / "out"
    pull(store, store.resolve("v1"), out, rank=0)
    other = Actor(lambda: pull(store, store.resolve("v1"), out))
    assert other.go("link", "before", onto(f"{out}/"))
    looks = Actor(lambda: pull(store, store.resolve("v1"), out, rank=0))
    assert looks.go(at, "before", lambda path, *_: ".out.pull/artifact" in path)
    other.end()
    looks.end()


def test_another_pull_gives_a_file_that_is_trusted_its_second_name(
    two: Path, store: Store, keys: tuple[Path, Path]
) -> None:
    out, digest = two / "out", sign(two, "s", keys)
    pull(store, digest, out, rank=0, trust=[keys[1]])
    looks = Actor(lambda: pull(store, digest, out, rank=0, trust=[keys[1]]))
    assert looks.go("stat", "before", of("out/rank-00.ffn.safetensors"))
    pull(store, digest, out, trust=[keys[1]])
    looks.end()
