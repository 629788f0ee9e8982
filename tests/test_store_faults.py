"""Stores that are damaged or forged: nothing of that is ever served."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from helpers import Call, names, state
from stores import (
    CHUNK,
    add_cubin,
    files_of,
    hidden,
    make_chunky,
    name_of,
    object_at,
    offered,
    put,
)

from dsv2mk.artifacts import collect, pull, store_commands  # noqa: F401  (chunks are small there)
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import ArtifactError


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


# ---- damaged objects ----


def damages(data: bytes, other: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What a file may be in place of these bytes; None: missing."""
    size = len(data)
    yield "missing", None
    for at in sorted({0, 7, size // 2, CHUNK - 1, CHUNK, size - CHUNK, size - 1}):
        if 0 <= at < size:
            yield f"byte {at}", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    yield "byte 0, all bits", bytes([data[0] ^ 255]) + data[1:]
    for length in sorted({0, 1, size // 2, size // CHUNK * CHUNK, size - 1} - {size}):
        yield f"cut to {length}", data[:length]
    yield "one byte more", data + b"\0"
    yield "a chunk more", data + data[:CHUNK]
    yield "another object", other
    yield "zeros", bytes(size)


@pytest.mark.slow
def test_no_damage_of_any_object_is_served_and_a_publish_mends_it(
    source: Path, store: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    files = files_of(source)
    contents = {data: name for name, data in sorted(files.items(), reverse=True)}
    assert len(contents) >= 11
    big = max(contents, key=len)
    tried = resumed = 0
    for data, name in contents.items():
        path, out = object_at(store, data), tmp_path / "out"
        other = big if data != big else min(contents, key=len)
        for what, damaged in damages(data, other):
            case = f"{name}: {what}"
            shutil.rmtree(tmp_path / ".out.pull", ignore_errors=True)  # it may hold it whole
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            pulled = dsv2mk("pull", "--copy", store, "v1", out, "--json")
            assert (pulled.code, pulled.json["error"]["kind"]) == (
                11,
                "artifact damaged or missing",
            ), case
            assert str(path) in pulled.json["error"]["message"], case
            assert not out.exists(), case
            for where in (store, f"{store}::v1"):
                verified = dsv2mk("verify", where)
                assert verified.code in (1, 11), case
                assert str(path) in verified.out + verified.err, case
            if not name.startswith("cubin/"):
                assert refused_or_found(f"{store}::v1", path), case
            mended = dsv2mk("publish", "--copy", source, store, "--tag", "v1", "--json")
            assert (mended.code, mended.json["bytes_written"]) == (0, len(data)), case
            assert offered(store, "v1") == files, case
            tried += 1
        again = dsv2mk("pull", "--copy", store, "v1", out, "--json")  # what was whole was kept
        resumed += again.json["bytes_resumed"] > 0
        assert files_of(out) == files, name
        shutil.rmtree(out)
    assert hidden(store) == []
    assert tried >= 130
    assert resumed >= 5
    print(f"{tried} damages")


def refused_or_found(where: str, path: Path) -> bool:
    """Whether opening an artifact names the object, or a look at its files finds it."""
    try:
        opened = Artifact.open(where)
        return any(opened.file_path(name) == path for name in opened.verify())
    except ArtifactError as error:
        return str(path) in str(error)


# ---- forged bundles ----


def encode(data: object) -> bytes:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def forge(store: Path, data: object, tag: str = "forged") -> Path:
    """A bundle with these values under the name that its bytes give, and a tag."""
    encoded = encode(data)
    digest = hashlib.sha256(encoded).hexdigest()
    path = store / "bundles" / f"{digest}.json"
    path.write_bytes(encoded)
    (store / "tags" / tag).write_text(f"{digest}\n")
    return path


def bundle_of(store: Path, tag: str = "v1") -> dict[str, Any]:
    digest = (store / "tags" / tag).read_text().strip()
    return json.loads((store / "bundles" / f"{digest}.json").read_bytes())


def edits(value: Any) -> Iterator[Any]:
    """Every value that differs from this one in one field: changed, removed or added."""
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield {(k + "x" if k == key else k): v for k, v in value.items()}
            for changed in edits(value[key]):
                yield {**value, key: changed}
        yield {**value, "more": {}}
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield value[:index] + value[index + 1 :]
            for changed in edits(entry):
                yield [*value[:index], changed, *value[index + 1 :]]
        yield [*value, *value[:1]]
    elif isinstance(value, str):
        last = "0" if value[-1] != "0" else "1"
        yield from (value[:-1] + last, value[:-1], value.upper(), "", None, 7, [value])
    else:
        yield from (value + 1, value - 1, -1, 1 << 70, str(value), None, float(value), True)


def assert_never_served(dsv2mk: Call, store: Path, tag: str, out: Path, case: object) -> None:
    around = state(out.parent)
    pulled = dsv2mk("pull", "--copy", store, tag, out, "--json")
    assert pulled.code == 11, (case, pulled)
    assert not out.exists(), case
    shutil.rmtree(out.parent / f".{out.name}.pull", ignore_errors=True)
    assert state(out.parent).keys() == around.keys(), case
    verified = dsv2mk("verify", f"{store}::{tag}")
    assert verified.code in (1, 11), (case, verified)
    assert verified.out + verified.err, case
    assert "Traceback" not in verified.err, case


def test_no_edit_of_a_bundle_is_served(
    source: Path, store: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """Neither under its old name nor under the name that its new bytes give."""
    good, files = bundle_of(store), files_of(source)
    digest = (store / "tags" / "v1").read_text().strip()
    place = store / "bundles" / f"{digest}.json"
    encoded, out, tried = place.read_bytes(), tmp_path / "node" / "out", 0
    out.parent.mkdir()
    for edited in edits(good):
        if encode(edited) == encoded:
            continue
        place.write_bytes(encode(edited))
        assert_never_served(dsv2mk, store, "v1", out, edited)
        place.write_bytes(encoded)
        forged = forge(store, edited)
        assert_never_served(dsv2mk, store, "forged", out, edited)
        forged.unlink()
        tried += 1
    assert tried >= 90
    print(f"{tried} edits")
    assert offered(store, "v1") == files


def test_a_bundle_under_another_name_is_not_served(
    store: Path, source: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    digest = (store / "tags" / "v1").read_text().strip()
    place, out = store / "bundles" / f"{digest}.json", tmp_path / "out"
    for other in ("0" * 64, "f" * 64, digest[::-1], digest[1:] + digest[:1]):
        place.rename(place.with_name(f"{other}.json"))
        (store / "tags" / "v1").write_text(f"{other}\n")
        for name in ("v1", other):
            refused = dsv2mk("pull", "--copy", store, name, out, "--json")
            assert refused.code == 11
            assert other in refused.json["error"]["message"]
        assert dsv2mk("pull", "--copy", store, digest, out).code == 11
        assert not out.exists()
        place.with_name(f"{other}.json").unlink()
        put(source, store)
        assert offered(store, "v1") == files_of(source)


NAMES = [
    *("..", ".", "", "/", "/etc/evil", "../evil", "a/../../evil", "cubin/../../evil", "cubin/.."),
    *("cubin//evil", "cubin/", "cubin", "a\0b", "cubin/a\0.cubin", "\0", "a/b", ".hidden", "a\nb"),
    *("~/evil", "evil\\..", "./manifest.json", "cubin/../manifest.json", "-rf", "ä", "evil/"),
]


@pytest.mark.parametrize("inside", ["bundle", "manifest"])
def test_no_name_leads_out_of_a_folder(
    inside: str, store: Path, source: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    data = bundle_of(store)
    manifest = json.loads((source / "manifest.json").read_bytes())
    evil = b"evil"
    object_at(store, evil).parent.mkdir(exist_ok=True)
    object_at(store, evil).write_bytes(evil)
    entry = {"size": 4, "digest": name_of(evil), "chunks": [hash_of(evil)]}
    out = tmp_path / "node" / "out"
    out.parent.mkdir()
    for name in NAMES:
        if inside == "bundle":
            forged = {**data, "files": {**data["files"], name: entry}}
        else:
            text = encode({**manifest, "files": {**manifest["files"], name: entry}})
            object_at(store, text).parent.mkdir(exist_ok=True)
            object_at(store, text).write_bytes(text)
            chunks = [hash_of(text[at : at + CHUNK]) for at in range(0, len(text), CHUNK)]
            own = {"size": len(text), "digest": name_of(text), "chunks": chunks}
            forged = {
                **data,
                "artifact": hashlib.sha256(text).hexdigest(),
                "files": {**data["files"], "manifest.json": own},
            }
        path = forge(store, forged)
        assert_never_served(dsv2mk, store, "forged", out, name)
        assert dsv2mk("gc", store, "--grace", "0s").code == 11, name  # it may name anything
        path.unlink()
    (store / "tags" / "forged").unlink()
    assert names(tmp_path / "node") == set()
    assert not list(tmp_path.rglob("*evil*"))
    assert len(NAMES) >= 20
    assert offered(store, "v1") == files_of(source)


def hash_of(chunk: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(chunk)


# ---- tags ----


@pytest.mark.parametrize("kind", ["half", "no end", "empty", "binary", "long", "nowhere", "upper"])
def test_a_damaged_tag_is_named_and_mended(
    kind: str, store: Path, source: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    tag, out = store / "tags" / "v1", tmp_path / "out"
    good = tag.read_bytes()
    tag.write_bytes(
        {
            "half": good[:31],
            "no end": good[:-1],
            "empty": b"",
            "binary": bytes(range(256)),
            "long": good * 1000,
            "nowhere": b"0" * 64 + b"\n",
            "upper": good.upper(),
        }[kind]
    )
    assert_tag_is_named(dsv2mk, store, out)
    mended = [("tag", store, good[:64].decode(), "v1"), ("publish", source, store, "--tag", "v1")]
    for command in mended:
        bad = tag.read_bytes()
        assert dsv2mk(*command).code == 0
        assert tag.read_bytes() == good
        assert dsv2mk("verify", store).code == 0
        tag.write_bytes(bad)
    put(source, store)
    assert offered(store, "v1") == files_of(source)


def assert_tag_is_named(dsv2mk: Call, store: Path, out: Path) -> None:
    for command in (["pull", store, "v1", out], ["verify", f"{store}::v1"], ["verify", store]):
        done = dsv2mk(*command)
        assert done.code == (1 if command[-1] == store else 11)
        assert "v1" in done.out + done.err
        assert len(done.err.splitlines()) <= 1
    assert dsv2mk("ls", store).code == 1
    assert not out.exists()


def test_a_tag_that_is_a_link_or_a_folder_is_not_followed(
    store: Path, source: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    tag, good = store / "tags" / "v1", (store / "tags" / "v1").read_bytes()
    (tmp_path / "outside").write_bytes(good)
    before = state(tmp_path / "outside")
    for target in (tmp_path / "outside", tmp_path / "absent", Path("v1"), Path("../../outside")):
        tag.unlink()
        tag.symlink_to(target)
        assert_tag_is_named(dsv2mk, store, tmp_path / "out")
        put(source, store)
        assert not tag.is_symlink()
        assert tag.read_bytes() == good
    assert state(tmp_path / "outside") == before
    tag.unlink()
    (tag / "within").mkdir(parents=True)
    assert_tag_is_named(dsv2mk, store, tmp_path / "out")
    refused = dsv2mk("publish", "--copy", source, store, "--tag", "v1")
    assert (refused.code, len(refused.err.splitlines())) == (11, 1)
    assert f"{tag} is a folder" in refused.err
    assert hidden(store) == []
