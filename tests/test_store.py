"""What a store holds and how it is read; damage of every kind is found and never served."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Call, flip_byte, state
from stores import add_cubin, files_of, name_of, object_at, objects_of, offered, put, variant

from dsv2mk.artifacts import store as store_module
from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.store import Store, resolve
from dsv2mk.manifests.errors import ArtifactError, UsageError


@pytest.fixture(scope="session")
def published(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `artifact`, that has a cubin, and `store`, where it is v1; for copies only."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(shared / "artifact", folder / "artifact")
    add_cubin(folder / "artifact")
    put(folder / "artifact", folder / "store")
    return folder


@pytest.fixture
def place(published: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(published, tmp_path / "place")


@pytest.fixture
def store(place: Path) -> Path:
    return place / "store"


def tagged(store: Path, tag: str = "v1") -> str:
    return (store / "tags" / tag).read_text().strip()


# ---- the form ----


def test_a_store_holds_each_file_once_under_its_hash(place: Path, store: Path) -> None:
    files = files_of(place / "artifact")
    assert len(files) == 13
    assert (store / "store.json").read_bytes() == b'{"schema":1}'
    assert objects_of(store) == {name_of(data): data for data in files.values()}
    assert len(objects_of(store)) == 12  # the replicated part is one
    assert offered(store, "v1") == files
    top = {"store.json", "objects", "bundles", "tags", "leases"}
    assert {path.name for path in store.iterdir()} == top
    assert [path.name for path in (store / "bundles").iterdir()] == [f"{tagged(store)}.json"]
    assert (store / "tags" / "v1").read_text() == tagged(store) + "\n"
    assert list((store / "leases").iterdir()) == []
    assert not list(store.rglob(".*"))


def test_a_bundle_is_read_in_place(place: Path, store: Path) -> None:
    named = resolve(f"{store}::v1")
    assert named is not None
    opened, bundle = named
    assert opened == Store.open(store)
    assert bundle.digest == tagged(store)
    assert opened.manifest(bundle).encoded == (place / "artifact" / "manifest.json").read_bytes()
    files = files_of(place / "artifact")
    table = opened.files(bundle)
    assert set(table) == set(files)
    for name, entry in table.items():
        assert opened.object_path(entry.digest).read_bytes() == files[name]
        assert opened.read(bundle, name, entry) == files[name]


def test_an_object_in_the_trash_is_read_there(place: Path, store: Path) -> None:
    """A collection that was cut short has left it there."""
    opened = Store.open(store)
    bundle = opened.bundle(tagged(store))
    files = files_of(place / "artifact")
    (store / "trash").mkdir()
    for name, entry in opened.files(bundle).items():
        if opened.object_place(entry.digest).exists():
            opened.object_place(entry.digest).rename(store / "trash" / entry.digest)
        assert opened.object_path(entry.digest) == store / "trash" / entry.digest
        assert opened.read(bundle, name, entry) == files[name]
    assert set(opened.files(bundle)) == set(files)


# ---- names ----


def test_a_bundle_is_found_by_its_tags_and_its_first_digits(store: Path) -> None:
    opened, digest = Store.open(store), tagged(store)
    for name in ("v1", digest, digest[:8], digest[:63]):
        assert opened.resolve(name) == digest
    for name in (digest[:7], digest + "0", digest.upper(), "v", "v1 ", "", "../tags/v1", "tags/v1"):
        with pytest.raises(ArtifactError, match=r"expected a digest or one of: v1, found") as error:
            opened.resolve(name)
        assert error.value.exit_code == 11


def test_digits_of_several_bundles_are_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store.open(store)
    both = ["12345678" + "0" * 56, "12345678" + "1" * 56]
    monkeypatch.setattr(Store, "bundle_digests", lambda self: both)
    with pytest.raises(UsageError, match=f"{both[0]}, {both[1]}"):
        opened.resolve("12345678")
    assert opened.resolve("123456781") == both[1]


def test_store_and_name_in_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSV2MK_STORE", raising=False)
    for text in ("", "place/store", str(store), f"{store}:v1"):
        assert resolve(text) is None
    relative = resolve("place/store::v1")
    assert relative is not None
    assert relative[1].digest == tagged(store)
    with pytest.raises(UsageError, match="DSV2MK_STORE"):
        resolve("::v1")
    monkeypatch.setenv("DSV2MK_STORE", str(store))
    default = resolve("::v1")
    assert default is not None
    assert default[0].path == store
    (tmp_path / "a::v1").mkdir()  # a folder of such a name is a folder
    assert resolve("a::v1") is None
    for text in ("b::v1", f"{store}::", f"{store}::v2"):
        with pytest.raises(ArtifactError):
            resolve(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"ab" * 32,
        b"ab" * 31 + b"\n",
        b"AB" * 32 + b"\n",
        b"ab" * 32 + b"\n\n",
        b"ab" * 32 + b"\r\n",
        b" " + b"ab" * 32 + b"\n",
        b"\xff" * 64 + b"\n",
        b"\0" * 65,
        b"../" + b"ab" * 30 + b"a\n",
        b"ab" * 100_000,
    ],
)
def test_a_tag_that_is_damaged_is_named_and_can_be_mended(
    text: bytes, store: Path, dsv2mk: Call
) -> None:
    digest = tagged(store)
    (store / "tags" / "v2").write_bytes(text)
    with pytest.raises(ArtifactError, match=f"tag {store}/tags/v2 is damaged") as refused:
        Store.open(store).resolve("v2")
    assert "dsv2mk tag STORE DIGEST v2" in str(refused.value)
    assert dsv2mk("pull", "--copy", store, "v2", store.parent / "out").code == 11
    assert not (store.parent / "out").exists()
    listed = dsv2mk("ls", store, "--json")
    assert listed.code == 1
    assert list(listed.json["problems"]) == [f"{store}/tags/v2"]
    assert [bundle["tags"] for bundle in listed.json["bundles"]] == [["v1"]]
    assert list(dsv2mk("verify", store, "--json").json["problems"]) == [f"{store}/tags/v2"]
    assert dsv2mk("tag", store, "v1", "v2").code == 0
    assert tagged(store, "v2") == digest
    assert dsv2mk("ls", store).code == 0


def test_a_tag_that_is_a_folder_or_a_pipe_is_refused(store: Path, alarm: None) -> None:
    (store / "tags" / "v2").mkdir()
    os.mkfifo(store / "tags" / "v3")
    for name in ("v2", "v3"):
        with pytest.raises(ArtifactError, match="not a regular file"):
            Store.open(store).resolve(name)


def test_a_tag_of_no_bundle_says_so(store: Path, dsv2mk: Call) -> None:
    (store / "bundles" / f"{tagged(store)}.json").unlink()
    done = dsv2mk("pull", "--copy", store, "v1", store.parent / "out")
    assert (done.code, f"names bundle {tagged(store)}, which is not there" in done.err) == (
        11,
        True,
    )
    assert list(dsv2mk("ls", store, "--json").json["problems"]) == [f"{store}/tags/v1"]
    assert list(dsv2mk("verify", store, "--json").json["problems"]) == [f"{store}/tags/v1"]


def test_what_is_no_store_is_refused(store: Path, tmp_path: Path, dsv2mk: Call) -> None:
    assert "does not exist" in dsv2mk("ls", tmp_path / "absent").err
    assert "has no store.json" in dsv2mk("ls", store / "tags").err
    for text in (b"", b'{"schema":2}', b'{"schema":1}\n', b"\xff"):
        (store / "store.json").write_bytes(text)
        done = dsv2mk("ls", store)
        assert (done.code, "store.json: expected {" in done.err) == (11, True)
        assert dsv2mk("verify", store).code == 11


# ---- damage ----


def test_a_bundle_with_any_byte_changed_is_never_served(store: Path) -> None:
    opened, digest = Store.open(store), tagged(store)
    path = store / "bundles" / f"{digest}.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ArtifactError, match=f"bundle {path} is damaged"):
            opened.bundle(digest)
    for changed in (b"", whole[:-1], whole + b"\n"):
        path.write_bytes(changed)
        with pytest.raises(ArtifactError, match=f"bundle {path} is damaged"):
            opened.bundle(digest)
    path.write_bytes(whole)
    assert opened.bundle(digest).encoded == whole


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def flip_first(path: Path) -> None:
    flip_byte(path, 0)


DAMAGES = (flip_first, flip_byte, cut, lengthen, Path.unlink)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_of_any_object_is_found_and_named(
    damage: Callable[[Path], None], place: Path, store: Path, dsv2mk: Call
) -> None:
    digest = tagged(store)
    for name, data in files_of(place / "artifact").items():
        path = object_at(store, data)
        damage(path)
        for where in (store, f"{store}::v1"):
            done = dsv2mk("verify", where, "--json")
            assert (done.code, done.json["ok"]) == (1, False)
            problems = done.json["problems"]
            if name == "manifest.json":  # without it nobody knows what else there is
                assert list(problems) == [f"{store}/bundles/{digest}.json"]
                assert str(path) in str(problems)
            else:
                assert list(problems) == [str(path)]
                assert f"{name} of bundle {digest}" in str(problems)
        text = dsv2mk("verify", store)
        assert (text.code, str(path) in text.out) == (1, True)
        pulled = dsv2mk("pull", "--copy", store, "v1", place / "out")
        assert (pulled.code, pulled.out) == (11, "")
        # Of one object with two names the first is told.
        told = name.replace("rank-01.replicated", "rank-00.replicated")
        assert f"{path} " in pulled.err
        assert f"{told} of bundle {digest}" in pulled.err
        assert not (place / "out").exists()
        shutil.rmtree(place / ".out.pull", ignore_errors=True)  # else it goes on from there
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert dsv2mk("verify", store).code == 0
    assert dsv2mk("pull", "--copy", store, "v1", place / "out").code == 0
    assert files_of(place / "out") == files_of(place / "artifact")


def test_a_sample_finds_damage_in_its_chunks(place: Path, store: Path, dsv2mk: Call) -> None:
    """Every file here is one chunk: the least sample reads all of them."""
    flip_byte(object_at(store, (place / "artifact" / "config.json").read_bytes()), 3)
    assert dsv2mk("verify", store, "--sample", "0").code == 1
    assert dsv2mk("verify", f"{store}::v1", "--sample", "1").code == 1


def test_a_manifest_that_is_whole_but_another_is_refused(
    place: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its xxh3 was made to fit; its sha256 cannot be."""
    opened = Store.open(store)
    bundle = opened.bundle(tagged(store))
    monkeypatch.setattr(store_module, "bad_chunk", lambda *args: None)
    path = object_at(store, (place / "artifact" / "manifest.json").read_bytes())
    flip_byte(path, 100)
    with pytest.raises(ArtifactError, match="is not the bundle's manifest"):
        opened.manifest(bundle)


# ---- commands ----


def test_ls_shows_what_there_is(place: Path, store: Path, dsv2mk: Call) -> None:
    second = put(variant(place / "artifact", place / "other", "b"), store, "v2")
    assert dsv2mk("tag", store, "v2", "latest").code == 0
    found = {bundle["digest"]: bundle for bundle in dsv2mk("ls", store, "--json").json["bundles"]}
    assert set(found) == {tagged(store), second.bundle.digest}
    for folder, tags in (("artifact", ["v1"]), ("other", ["latest", "v2"])):
        files = files_of(place / folder)
        one = found[tagged(store, tags[0])]
        assert one == {
            "digest": tagged(store, tags[0]),
            "tags": tags,
            "artifact": hashlib.sha256(files["manifest.json"]).hexdigest(),
            "ranks": 2,
            "archs": ["sm_90a"],
            "bytes": sum(len(data) for data in set(files.values())),
            "signed": False,
        }
    lines = dsv2mk("ls", store).out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["latest", "tag", "v1", "v2"]


def test_diff_compares_bundles_and_folders(place: Path, store: Path, dsv2mk: Call) -> None:
    other = variant(place / "artifact", place / "other", "b")
    put(other, store, "v2")
    by_folders = dsv2mk("diff", place / "artifact", other)
    assert by_folders.code == 1
    for a in (place / "artifact", f"{store}::v1"):
        for b in (other, f"{store}::v2"):
            assert dsv2mk("diff", a, b) == by_folders
        assert dsv2mk("diff", a, f"{store}::v1").code == 0
    assert dsv2mk("diff", f"{store}::v3", other).code == 11


def test_reading_writes_nothing(place: Path, store: Path, dsv2mk: Call) -> None:
    before = state(store)
    assert dsv2mk("ls", store).code == 0
    assert dsv2mk("verify", store).code == 0
    assert dsv2mk("verify", f"{store}::v1").code == 0
    assert dsv2mk("diff", f"{store}::v1", place / "artifact").code == 0
    assert dsv2mk("pull", "--copy", store, "v1", place / "out").code == 0
    assert dsv2mk("gc", store, "--dry-run").code == 0
    after = state(store)
    # A dry run asks the store's clock, by a file that it makes and removes.
    assert {name for name in before if before[name] != after[name]} <= {str(store)}
    assert set(before) == set(after)


def test_a_default_store_may_be_left_out(
    place: Path, store: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSV2MK_STORE", raising=False)
    wrong = dsv2mk("ls")
    assert (wrong.code, "DSV2MK_STORE" in wrong.err) == (2, True)
    monkeypatch.setenv("DSV2MK_STORE", str(store))
    listed = dsv2mk("ls")
    assert (listed.code, "v1" in listed.out) == (0, True)
    lines: list[list[object]] = [
        ["pull", "v1", place / "out"],
        ["publish", place / "out", "--tag", "v3"],
        ["tag", "v3", "v4"],
        ["rm", "v4"],
        ["gc"],
        ["verify", "::v3"],
        ["ls", store],
    ]
    for line in lines:
        assert dsv2mk(*line).code == 0, line
    assert tagged(store, "v3") == tagged(store)
    assert dsv2mk("pull", "--copy", store, "v1", place / "x", "y").code == 2
    assert dsv2mk("rm").code == 2


@pytest.mark.parametrize(
    "name", ["", "a/b", "../v1", ".v1", "a b", "é", "deadbeef", "0" * 64, "v\n"]
)
def test_what_cannot_be_a_tag_is_refused(name: str, store: Path, dsv2mk: Call) -> None:
    before = state(store)
    for line in (["tag", store, "v1", name], ["publish", store.parent / "artifact", store]):
        options = ["--tag", name] if line[0] == "publish" else []
        assert dsv2mk(*line, *options).code == 2
    assert state(store) == before


def test_the_manifests_of_a_store_are_those_of_the_artifact(place: Path, store: Path) -> None:
    named = resolve(f"{store}::v1")
    assert named is not None
    assert named[0].manifest(named[1]).digest == read_manifest(place / "artifact").digest
