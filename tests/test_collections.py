"""Several collections at once, a tag that is set while one works: nothing that is named goes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import objects_of, put

from dsv2mk.artifacts import collect as collect_module
from dsv2mk.artifacts.collect import check_store, collect, remove
from dsv2mk.artifacts.publish import retag
from dsv2mk.artifacts.store import DYING, Store
from dsv2mk.manifests.errors import ArtifactError


@pytest.fixture
def store(artifact: Path, tmp_path: Path) -> Store:
    """A store whose only bundle has been removed: every object may go."""
    put(artifact, tmp_path / "store", "v1")
    found = Store(tmp_path / "store")
    remove(found, "v1")
    return found


def before_the_first_claim(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something when a collection is about to give an object the name that only it knows."""
    done: list[bool] = []

    def rename(old: Any, new: Any) -> None:
        if Path(new).name.endswith(DYING) and not done:
            done.append(True)
            act()
        os.rename(old, new)

    monkeypatch.setattr(
        collect_module, "os", SimpleNamespace(**{**vars(os), "rename": rename}), raising=True
    )


def test_an_object_that_another_collection_moved_since_is_looked_at_again(
    artifact: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects_of(store.path)

    def others() -> None:
        put(artifact, store.path, "v2")  # takes all out of the trash
        assert objects_of(store.path) == before
        for name in before:  # a collection that had read the names before moves them again
            os.rename(store.object_place(name), store.trash_place(name))

    before_the_first_claim(monkeypatch, others)
    found = collect(store, 0)
    assert (found.objects, sorted(found.restored)) == ([], sorted(before))
    assert objects_of(store.path) == before
    assert check_store(store) == (len(before), {})


def test_a_publish_takes_back_what_is_about_to_be_deleted(
    artifact: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects_of(store.path)
    looks = collect_module._named
    calls: list[int] = []

    def named(*args: Any) -> set[str]:
        calls.append(1)
        if len(calls) == 3:  # all objects have names that only the collection knows
            assert objects_of(store.path) == {}
            assert put(artifact, store.path, "v2").copied.written == 0
        return looks(*args)

    monkeypatch.setattr(collect_module, "_named", named)
    assert collect(store, 0).objects == []
    assert objects_of(store.path) == before
    assert check_store(store) == (len(before), {})


@pytest.mark.parametrize("named", [True, False])
def test_what_a_collection_that_died_was_about_to_delete_is_decided_again(
    artifact: Path, store: Store, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects_of(store.path)
    if named:
        put(artifact, store.path, "v2")
    (store.path / "trash").mkdir(exist_ok=True)
    for name in before:
        os.rename(store.object_place(name), store.path / "trash" / f".{name}.0123.{DYING}")
    later = time.time() + 7200  # it may live for an hour
    assert not collect(store, 0).objects
    assert not objects_of(store.path)
    monkeypatch.setattr(collect_module, "_now", lambda *_: later)
    assert sorted(collect(store, 0).objects) == ([] if named else sorted(before))
    assert objects_of(store.path) == (before if named else {})
    assert not list((store.path / "trash").iterdir())


def test_a_tag_is_not_set_for_a_bundle_whose_objects_are_gone(
    artifact: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(artifact, store.path, "v2").bundle.digest
    bundle = store.bundle

    def slow(name: str) -> Any:
        """It is read, and then others remove it and all that it names."""
        found = bundle(name)
        monkeypatch.setattr(Store, "bundle", lambda self, name: bundle(name))
        files = store.files(found)
        monkeypatch.setattr(Store, "files", lambda self, bundle: files)
        remove(store, "v2")
        assert collect(store, 0).objects
        return found

    monkeypatch.setattr(Store, "bundle", lambda self, name: slow(name))
    with pytest.raises(ArtifactError, match="is missing"):
        retag(store, digest, "v3")
    assert store.tags() == {}
    assert store.bundle_digests() == []


def test_a_bundle_that_is_on_the_move_is_looked_for_again(
    artifact: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken to the trash and back whenever it is looked for: four times, then it rests."""
    put(artifact, store.path, "v2")
    before, bundle, misses = objects_of(store.path), Store.bundle, []

    def moving(self: Store, digest: str) -> Any:
        if len(misses) < 4:
            misses.append(digest)
            raise ArtifactError(f"bundle {digest}: No such file or directory")
        return bundle(self, digest)

    monkeypatch.setattr(Store, "bundle", moving)
    assert collect(store, 0).objects == []
    assert (len(misses), objects_of(store.path)) == (4, before)

    def missing(self: Store, digest: str) -> Any:
        raise ArtifactError(f"bundle {digest} is damaged")

    monkeypatch.setattr(Store, "bundle", missing)
    with pytest.raises(ArtifactError, match="is damaged"):  # one that stays so is not passed over
        collect(store, 0)
    assert objects_of(store.path) == before
