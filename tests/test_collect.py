"""`gc` and `rm`: what nobody names goes, what anybody needs stays, whatever happens in between."""

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Call, flip_byte, slow_but, state
from stores import DAY, files_of, name_of, object_at, objects_of, offered, put, put_two, variant

from dsv2mk.artifacts import collect as collect_module
from dsv2mk.artifacts.collect import Collected, collect, remove
from dsv2mk.artifacts.publish import put_bundle, retag, set_tag
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests.errors import ArtifactError


@pytest.fixture
def two(artifact: Path, tmp_path: Path) -> Path:
    """A folder with artifacts `artifact` and `other`, and a store with both, a day old."""
    return put_two(artifact, tmp_path)


@pytest.fixture
def store(two: Path) -> Path:
    return two / "store"


def gc(store: Path, grace: float = DAY, **options: Any) -> Collected:
    return collect(Store(store), grace, **options)


def own(two: Path, folder: str, others: str) -> set[str]:
    """Objects of one artifact that the other does not have."""
    mine, theirs = files_of(two / folder), files_of(two / others)
    return {name_of(data) for data in set(mine.values()) - set(theirs.values())}


def all_names(folder: Path) -> set[str]:
    return {name_of(data) for data in files_of(folder).values()}


# ---- what goes ----


def test_nothing_that_is_named_goes(two: Path, store: Path) -> None:
    before = objects_of(store)
    assert gc(store, 0).objects == []
    assert objects_of(store) == before
    (store / "tags" / "v1").unlink()  # a bundle without a tag is a bundle
    assert gc(store, 0).objects == []
    assert objects_of(store) == before


def test_what_only_a_removed_bundle_named_goes(two: Path, store: Path) -> None:
    remove(Store(store), "v2")
    gone = own(two, "other", "artifact")
    assert len(gone) == 4  # the changed file, the manifest, a cubin and its sidecar
    size = sum(len(objects_of(store)[name]) for name in gone)
    planned = gc(store, dry_run=True)
    found = gc(store)
    assert set(planned.objects) == set(found.objects) == gone
    assert planned.nbytes == found.nbytes == size
    assert set(objects_of(store)) == all_names(two / "artifact")
    assert offered(store, "v1") == files_of(two / "artifact")
    assert list((store / "trash").iterdir()) == []
    assert gc(store).objects == []


def test_a_dry_run_changes_nothing(two: Path, store: Path) -> None:
    remove(Store(store), "v2")
    (store / "trash").mkdir(exist_ok=True)
    name = sorted(own(two, "other", "artifact"))[0]
    Store(store).object_place(name).rename(store / "trash" / name)
    before = {path: found for path, found in state(store).items() if path != str(store)}
    found = gc(store, dry_run=True)
    assert set(found.objects) == own(two, "other", "artifact")
    after = {path: found for path, found in state(store).items() if path != str(store)}
    assert after == before


def test_what_is_young_stays(two: Path, store: Path) -> None:
    remove(Store(store), "v2")
    gone = sorted(own(two, "other", "artifact"))
    now = time.time()
    for name, seconds in zip(gone, (30, 0, 90, 1000), strict=True):
        os.utime(Store(store).object_place(name), (now - seconds, now - seconds))
    assert set(gc(store, 60).objects) == set(gone[2:])
    assert set(gone[:2]) < set(objects_of(store))
    os.utime(Store(store).object_place(gone[0]), (now + 1000, now + 1000))
    assert gc(store, 0).objects == [gone[1]]


def test_what_dead_publishers_have_left_goes_when_it_is_old(two: Path, store: Path) -> None:
    folder = next((store / "objects").iterdir())
    digest = "ab" * 16
    old = [
        folder / f".{digest}.part",
        folder / f".{digest}.part.0123456789abcdef.tmp",
        store / "tags" / ".v1.0123456789abcdef.tmp",
        store / "bundles" / ".x.json.0123456789abcdef.tmp",
        store / ".store.json.0123456789abcdef.tmp",
        store / "leases" / f"{'1' * 32}.json",
    ]
    young = [folder / f".{'cd' * 16}.part", store / "leases" / f"{'2' * 32}.json"]
    foreign = [folder / "notes", store / "README", store / ".nfs0001"]
    for path in [*old, *young, *foreign]:
        path.write_bytes(b'{"objects":[]}' + b"." * (path.suffix == ".part"))
    for path in [*old, *foreign]:
        os.utime(path, (time.time() - 3700,) * 2)
    assert gc(store).others == []
    found = gc(store, 0)  # which spares for an hour what a living publisher may need
    assert set(found.others) == set(old)
    assert found.objects == []
    assert not [path for path in old if path.exists()]
    assert all(path.exists() for path in [*young, *foreign])


# ---- leases ----


def lease(store: Path, names: object, seconds: float = 0) -> Path:
    path = store / "leases" / f"{random.randbytes(16).hex()}.json"
    path.write_text(json.dumps({"objects": names}))
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_a_lease_protects_for_an_hour(two: Path, store: Path) -> None:
    remove(Store(store), "v2")
    gone = sorted(own(two, "other", "artifact"))
    lease(store, gone[:1], 3500)
    lease(store, gone[1:2], 3700)
    assert set(gc(store).objects) == set(gone[1:])
    assert gone[0] in objects_of(store)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"objects":1}', '{"objects":[1]}', '{"objects":["../x"]}', "\x00" * 20],
)
def test_a_damaged_lease_stops_a_collection_while_it_counts(
    text: str, two: Path, store: Path, dsv2mk: Call
) -> None:
    remove(Store(store), "v2")
    before = objects_of(store)
    path = lease(store, [])
    path.write_text(text)
    done = dsv2mk("gc", store)
    assert (done.code, f"lease {path} is damaged" in done.err) == (11, True)
    assert objects_of(store) == before
    os.utime(path, (time.time() - 3700,) * 2)
    assert set(gc(store).objects) == own(two, "other", "artifact")


# ---- damage ----


def flip(path: Path) -> None:
    flip_byte(path, 5)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 0)])
def test_a_damaged_bundle_stops_a_collection(
    damage: Callable[[Path], None], two: Path, store: Path, dsv2mk: Call
) -> None:
    """Nobody knows what it names."""
    (store / "tags" / "v2").unlink()
    before = objects_of(store)
    digest = (store / "tags" / "v1").read_text().strip()
    path = store / "bundles" / f"{digest}.json"
    damage(path)
    for options in ([], ["--dry-run"]):
        done = dsv2mk("gc", store, "--grace", "0s", *options)
        assert (done.code, f"bundle {path} is damaged" in done.err) == (11, True)
    assert objects_of(store) == before
    put(two / "artifact", store)
    assert gc(store, 0).objects == []
    damage(path)
    assert dsv2mk("rm", store, digest).code == 0  # the way out
    assert set(gc(store, 0).objects) == own(two, "artifact", "other")


def test_a_missing_or_damaged_manifest_stops_a_collection(two: Path, store: Path) -> None:
    path = object_at(store, (two / "artifact" / "manifest.json").read_bytes())
    data = path.read_bytes()
    before = objects_of(store)
    flip(path)
    with pytest.raises(ArtifactError, match=f"object {path} is damaged"):
        gc(store, 0)
    path.unlink()
    with pytest.raises(ArtifactError, match=f"object {path} cannot be read: No such file"):
        gc(store, 0)
    path.write_bytes(data)
    assert objects_of(store) == before


# ---- in between ----


def at_second_look(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], after: bool = False
) -> None:
    """Do something when objects are in the trash, before or after names are read again."""
    real, looks = collect_module._named, []

    def look(*args: Any) -> set[str]:
        looks.append(1)
        if len(looks) == 2 and not after:
            action()
        found = real(*args)
        if len(looks) == 2 and after:
            action()
        return found

    monkeypatch.setattr(collect_module, "_named", look)


def test_a_bundle_that_comes_meanwhile_keeps_its_objects(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (store / "tags" / "v2").read_text().strip()
    encoded = (store / "bundles" / f"{digest}.json").read_bytes()
    remove(Store(store), "v2")
    at_second_look(monkeypatch, lambda: put_bundle(Store(store), encoded))
    found = gc(store)
    assert found.objects == []
    assert set(found.restored) == own(two, "other", "artifact")
    set_tag(Store(store), "v3", digest)
    assert offered(store, "v3") == files_of(two / "other")


def test_a_lease_that_comes_meanwhile_keeps_its_objects(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(Store(store), "v2")
    gone = sorted(own(two, "other", "artifact"))
    at_second_look(monkeypatch, lambda: lease(store, gone[:2]))
    found = gc(store)
    assert (set(found.objects), set(found.restored)) == (set(gone[2:]), set(gone[:2]))
    assert set(gone[:2]) < set(objects_of(store))


@pytest.mark.parametrize("after", [False, True])
def test_a_publish_meanwhile_loses_nothing(
    after: bool, two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its objects in the trash and takes them out, before or after the second look."""
    remove(Store(store), "v2")
    at_second_look(monkeypatch, lambda: put(two / "other", store, "v3"), after)
    assert gc(store).objects == []
    assert offered(store, "v3") == files_of(two / "other")


def test_what_was_touched_meanwhile_stays(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(Store(store), "v2")
    gone = sorted(own(two, "other", "artifact"))
    at_second_look(monkeypatch, lambda: os.utime(store / "trash" / gone[0]))
    assert set(gc(store).objects) == set(gone[1:])
    monkeypatch.undo()
    assert gc(store).restored == [gone[0]]
    assert gone[0] in objects_of(store)


@pytest.mark.parametrize("named", [False, True])
def test_a_collection_that_died_is_ended_by_the_next(
    named: bool, two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    digest = (store / "tags" / "v2").read_text().strip()
    encoded = (store / "bundles" / f"{digest}.json").read_bytes()
    remove(Store(store), "v2")
    at_second_look(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        gc(store)
    monkeypatch.undo()
    gone = own(two, "other", "artifact")
    assert {path.name for path in (store / "trash").iterdir()} == gone
    if named:
        put_bundle(Store(store), encoded)
    found = gc(store)
    assert set(found.restored if named else found.objects) == gone
    assert list((store / "trash").iterdir()) == []
    assert set(objects_of(store)) == all_names(two / "artifact") | (gone if named else set())


def test_another_collection_ends_what_a_third_left(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one goes through the same names."""
    (store / "trash").mkdir()
    moved = objects_of(store)
    for path in list((store / "objects").glob("*/*")):
        path.rename(store / "trash" / f".{path.name}.0123456789abcdef.dying")
    later = time.time() + 2 * DAY
    monkeypatch.setattr(collect_module, "_now", lambda *_: later)
    real, ended = collect_module.put_back, []

    def put_back(store: Store, trashed: Path, path: Path) -> None:
        if not ended:
            ended.append(trashed)
            gc(store.path)
        real(store, trashed, path)

    monkeypatch.setattr(collect_module, "put_back", put_back)
    assert gc(store).objects == []
    assert ended
    assert objects_of(store) == moved
    assert list((store / "trash").iterdir()) == []


def test_verify_takes_objects_out_of_the_trash(two: Path, store: Path, dsv2mk: Call) -> None:
    (store / "trash").mkdir()
    for path in list((store / "objects").glob("*/*")):
        path.rename(store / "trash" / path.name)
    assert dsv2mk("verify", store).code == 0
    assert list((store / "trash").iterdir()) == []
    assert offered(store, "v2") == files_of(two / "other")


# ---- rm ----


def test_rm_of_a_tag_keeps_a_bundle_that_has_another(two: Path, store: Path, dsv2mk: Call) -> None:
    digest = (store / "tags" / "v1").read_text().strip()
    assert dsv2mk("tag", store, "v1", "v3").code == 0
    assert dsv2mk("rm", store, "v1", "--json").json == {"tags": ["v1"], "digest": None}
    assert offered(store, "v3") == files_of(two / "artifact")
    assert dsv2mk("rm", store, "v3", "--json").json == {"tags": ["v3"], "digest": digest}
    assert [bundle["tags"] for bundle in dsv2mk("ls", store, "--json").json["bundles"]] == [["v2"]]
    assert dsv2mk("rm", store, "v3").code == 11


def test_rm_of_a_bundle_removes_its_tags_and_signatures(
    two: Path, store: Path, dsv2mk: Call
) -> None:
    digest = (store / "tags" / "v1").read_text().strip()
    (store / "bundles" / f"{digest}.0123456789abcdef.sig").write_text("a signature")
    assert dsv2mk("tag", store, "v1", "v3").code == 0
    found = dsv2mk("rm", store, digest[:12], "--json").json
    assert found == {"tags": ["v1", "v3"], "digest": digest}
    assert [path.name for path in (store / "tags").iterdir()] == ["v2"]
    assert len(list((store / "bundles").iterdir())) == 1


def test_rm_of_a_damaged_or_dangling_tag(two: Path, store: Path, dsv2mk: Call) -> None:
    (store / "tags" / "bad").write_text("half")
    (store / "tags" / "lost").write_text("ab" * 32 + "\n")
    for name in ("bad", "lost"):
        assert dsv2mk("rm", store, name, "--json").json == {"tags": [name], "digest": None}
    assert dsv2mk("ls", store).code == 0


def at_removal(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[str]:
    """Do something when a bundle has come into the trash; once."""
    real, seen = os.rename, []

    def renaming(old: Path, new: Path) -> None:
        real(old, new)
        if Path(new).parent.name == "trash" and not seen:
            seen.append(Path(new).name)
            action()

    monkeypatch.setattr(os, "rename", renaming)
    return seen


def test_a_bundle_that_is_tagged_while_it_is_removed_stays(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (store / "tags" / "v1").read_text().strip()
    seen = at_removal(monkeypatch, lambda: set_tag(Store(store), "v3", digest))
    assert remove(Store(store), "v1") == (["v1"], None)
    assert re.fullmatch(rf"\.{digest}\.json\.[0-9a-f]{{16}}\.dying", seen[0])
    assert offered(store, "v3") == files_of(two / "artifact")
    assert list((store / "trash").iterdir()) == []


@pytest.mark.parametrize("by_tag", [False, True])
def test_whoever_tags_what_is_being_removed_puts_it_back(
    by_tag: bool, two: Path, store: Path, monkeypatch: pytest.MonkeyPatch, dsv2mk: Call
) -> None:
    """Its look at the bundle comes after ours at the tags."""
    digest = (store / "tags" / "v1").read_text().strip()
    again = (
        (lambda: retag(Store(store), digest, "v3"))
        if by_tag
        else (lambda: put(two / "artifact", store, "v3"))
    )
    seen = at_removal(monkeypatch, again)
    real = Store.tags
    monkeypatch.setattr(
        Store, "tags", lambda self: {n: d for n, d in real(self).items() if n != "v3"}
    )
    assert remove(Store(store), "v1") == (["v1"], None)
    assert seen
    monkeypatch.undo()
    assert offered(store, "v3") == files_of(two / "artifact")
    assert gc(store, 0).objects == []


def test_a_bundle_is_served_until_it_is_decided_that_it_goes(
    two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a collection takes it for one."""
    digest = (store / "tags" / "v1").read_text().strip()
    looks: list[bool] = []

    def look() -> None:
        opened = Store(store)
        named = opened.files(opened.bundle(digest))
        looks.append(opened.has_bundle(digest) and len(named) == 11)
        found = gc(store, 0, dry_run=True)
        looks.append(found.objects == [])

    at_removal(monkeypatch, look)
    assert remove(Store(store), "v1") == (["v1"], digest)
    assert looks == [True, True]
    assert not Store(store).has_bundle(digest)


@pytest.mark.parametrize("tagged", [False, True])
def test_a_removal_that_died_is_ended_by_a_collection(
    tagged: bool, two: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    digest = (store / "tags" / "v1").read_text().strip()
    at_removal(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        remove(Store(store), "v1")
    monkeypatch.undo()
    if tagged:
        set_tag(Store(store), "v3", digest)
        assert Store(store).resolve("v3") == digest  # it is read in the trash
    found = gc(store, 0)
    if tagged:
        assert found.objects == []
        assert offered(store, "v3") == files_of(two / "artifact")
    else:
        assert set(found.objects) == own(two, "artifact", "other")
        assert not Store(store).has_bundle(digest)
    assert list((store / "trash").iterdir()) == []


# ---- commands ----


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604_800)],
)
def test_grace_is_a_time(
    text: str, seconds: int, store: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        collect_module, "collect", lambda store, grace, dry_run: asked.append(grace) or Collected()
    )
    assert dsv2mk("gc", store, "--grace", text).code == 0
    assert asked == [seconds]


@pytest.mark.parametrize("text", ["", "h", "-1h", "1", "1w", "1.5h", "1h ", "nan", "9" * 20 + "s"])
def test_another_grace_is_refused(text: str, store: Path, dsv2mk: Call) -> None:
    before = objects_of(store)
    assert dsv2mk("gc", store, "--grace", text).code == 2
    assert objects_of(store) == before


def test_gc_reports_what_it_did(two: Path, store: Path, dsv2mk: Call) -> None:
    remove(Store(store), "v2")
    gone = own(two, "other", "artifact")
    size = sum(len(objects_of(store)[name]) for name in gone)
    for options, what in ((["--dry-run"], "would delete"), ([], "deleted")):
        text = dsv2mk("gc", store, *options) if options else None
        found = dsv2mk("gc", store, "--json", *options).json
        assert (set(found["objects"]), found["bytes"], found["others"]) == (gone, size, [])
        assert found["dry_run"] == bool(options)
        if text is not None:
            assert f"{what} 4 objects and 0 other files" in text.out
    assert "deleted 0 objects" in dsv2mk("gc", store).out


# ---- any order ----


@pytest.mark.parametrize("seed", slow_but(range(8), 0))
def test_in_any_order_what_is_tagged_is_whole(
    seed: int, built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    rng, store = random.Random(seed), tmp_path / "store"
    folders = [variant(built, tmp_path / f"a{number}", str(number)) for number in range(3)]
    files = [files_of(folder) for folder in folders]
    put(folders[0], store, "base")
    tags, bundles = {"base": 0}, {0}  # a bundle that has lost its tag to another one stays
    for _ in range(25):
        action, tag, which = rng.choice("ptrgv"), rng.choice("xyz"), rng.randrange(3)
        if action == "p":
            put(folders[which], store, tag)
            tags[tag] = which
            bundles.add(which)
        elif action == "t":
            old = rng.choice(sorted(tags))
            assert dsv2mk("tag", store, old, tag).code == 0
            tags[tag] = tags[old]
        elif action == "r" and tag in tags:
            assert dsv2mk("rm", store, tag).code == 0
            removed = tags.pop(tag)
            if removed not in tags.values():
                bundles.discard(removed)
        elif action == "g":
            gc(store, 0)
            wanted = {name_of(d) for number in bundles for d in files[number].values()}
            assert set(objects_of(store)) == wanted
        elif action == "v" and (store / "trash").is_dir():
            for path in rng.sample(list((store / "objects").glob("*/*")), 3):
                path.rename(store / "trash" / path.name)
            assert dsv2mk("verify", store).code == 0
        for name, number in tags.items():
            if rng.random() < 0.3:
                assert offered(store, name) == files[number]
    for name, number in tags.items():
        assert offered(store, name) == files[number]
    shutil.rmtree(store)
