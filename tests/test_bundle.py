"""The form of a bundle: literal bytes, what is refused, what it says about files."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.manifests.bundle import Bundle, cubin_arch, make_bundle
from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.manifest import CHUNK_BYTES, FileEntry

A, B = "0a" * 16, "1b" * 16
ARTIFACT = "c5" * 32
STEM = "cubin/dsv2mk.sm_90a.tp2.0123456789abcdef"
LITERAL = (
    b'{"artifact":"' + ARTIFACT.encode() + b'","files":{'
    b'"cubin/dsv2mk.sm_90a.tp2.0123456789abcdef.cubin":{"chunks":["' + A.encode() + b'"],'
    b'"digest":"' + B.encode() + b'","size":5},'
    b'"cubin/dsv2mk.sm_90a.tp2.0123456789abcdef.json":{"chunks":[],'
    b'"digest":"' + B.encode() + b'","size":0},'
    b'"manifest.json":{"chunks":["' + A.encode() + b'","' + B.encode() + b'"],'
    b'"digest":"' + A.encode() + b'","size":67108865}},"schema":1}'
)
FILES = {
    f"{STEM}.cubin": FileEntry(size=5, digest=B, chunks=(A,)),
    f"{STEM}.json": FileEntry(size=0, digest=B, chunks=()),
    "manifest.json": FileEntry(size=CHUNK_BYTES + 1, digest=A, chunks=(A, B)),
}


def test_a_bundle_is_these_bytes() -> None:
    bundle = Bundle.parse(LITERAL)
    assert bundle == Bundle(artifact=ARTIFACT, files=FILES)
    assert bundle.encoded == LITERAL
    assert bundle.digest == hashlib.sha256(LITERAL).hexdigest()
    assert bundle.archs == ["sm_90a"]


def test_the_arch_is_in_a_cubins_name() -> None:
    assert cubin_arch(f"{STEM}.json") == "sm_90a"
    assert cubin_arch("cubin/dsv2mk.sm_100a.tp8.multimem.00.cubin") == "sm_100a"
    assert cubin_arch("manifest.json") is None
    assert cubin_arch("rank-00.ffn.safetensors") is None


# ---- what is refused ----


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


ENTRY = {"chunks": [A], "digest": B, "size": 5}
BAD_NAMES = (
    *("../manifest.json", "/manifest.json", "a/b", "cubin/../x.json", "..", ".", "", ".hidden"),
    *("cubin/dsv2mk.x.json/..", "cubin/notes.txt", "cubin/", "other/dsv2mk.a.tp1.0.cubin"),
    *("manifest.json\n", "a b", "ä", f"{STEM}.ptx", "cubin/dsv2mk.sm_90a.tp2.0.cubin"),
    *("cubin/dsv2mk.sm_90a.tp2.0.json", "cubin//dsv2mk.sm_90a.tp2.0.json", "a\0", "a\\b:"),
)
BAD = {
    **{f"name {name!r}": at("files", name, value=ENTRY) for name in BAD_NAMES},
    "no manifest": without("files", "manifest.json"),
    "no artifact": without("artifact"),
    "no files": without("files"),
    "files is a list": at("files", value=[]),
    "another section": at("time", value=1),
    "schema 2": at("schema", value=2),
    "schema true": at("schema", value=True),
    "schema 1.0": at("schema", value=1.0),
    "schema missing": without("schema"),
    "artifact in capitals": at("artifact", value="C5" * 32),
    "artifact too short": at("artifact", value="c5" * 31),
    "artifact with a newline": at("artifact", value="c5" * 32 + "\n"),
    "artifact is a number": at("artifact", value=5),
    "size negative": at("files", "manifest.json", "size", value=-1),
    "size true": at("files", f"{STEM}.cubin", "size", value=True),
    "size 5.0": at("files", f"{STEM}.cubin", "size", value=5.0),
    "size of other chunks": at("files", "manifest.json", "size", value=CHUNK_BYTES),
    "chunks of another size": at("files", f"{STEM}.cubin", "chunks", value=[A, A]),
    "chunks is text": at("files", f"{STEM}.cubin", "chunks", value="a"),
    "a chunk that is a number": at("files", f"{STEM}.cubin", "chunks", value=[1]),
    "a chunk in capitals": at("files", f"{STEM}.cubin", "chunks", value=["0A" * 16]),
    "a digest with a path": at("files", f"{STEM}.cubin", "digest", value="../" + A[3:]),
    "a digest too long": at("files", f"{STEM}.cubin", "digest", value=A + "0"),
    "an entry with more": at("files", f"{STEM}.cubin", "mode", value=1),
    "an entry with less": without("files", f"{STEM}.cubin", "digest"),
    "an entry that is none": at("files", f"{STEM}.cubin", value=None),
    "blake3 null": at("blake3", value=None),
    "blake3 of one file only": at("blake3", value={"manifest.json": ["d" * 64, "d" * 64]}),
    "blake3 of another count": at("blake3", value={name: ["d" * 64] for name in FILES}),
    "blake3 too short": at(
        "blake3", value={n: ["d" * 63] * len(entry.chunks) for n, entry in FILES.items()}
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bundle_of_another_form_is_refused(case: str) -> None:
    data = json.loads(LITERAL)
    BAD[case](data)
    encoded = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert encoded != LITERAL
    with pytest.raises(ArtifactError, match=r"^some/file") as refused:
        Bundle.parse(encoded, "some/file")
    assert refused.value.exit_code == 11


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        LITERAL[:-1],
        LITERAL + b"\n",
        b" " + LITERAL,
        LITERAL.replace(b'"schema":1', b'"schema": 1'),
        LITERAL.replace(b'"schema":1', b'"schema":1,"schema":1'),
        b"[" * 100_000,
    ],
)
def test_bytes_that_are_not_canonical_are_refused(encoded: bytes) -> None:
    with pytest.raises(ArtifactError):
        Bundle.parse(encoded)


@settings(max_examples=300)
@given(st.integers(0, len(LITERAL) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_gives_another_bundle(place: int, value: int) -> None:
    changed = LITERAL[:place] + bytes([value]) + LITERAL[place + 1 :]
    try:
        bundle = Bundle.parse(changed)
    except ArtifactError:
        assert changed != LITERAL
    else:
        assert bundle.encoded == changed
        assert (bundle == Bundle.parse(LITERAL)) == (changed == LITERAL)


_HEX = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def entries(draw: st.DrawFn) -> FileEntry:
    size = draw(st.integers(0, 3 * CHUNK_BYTES))
    count = -(-size // CHUNK_BYTES)
    chunks = draw(st.lists(_HEX, min_size=count, max_size=count))
    return FileEntry(size=size, digest=draw(_HEX), chunks=tuple(chunks))


@settings(max_examples=100)
@given(entries(), st.lists(st.tuples(entries(), entries()), max_size=3), st.booleans())
def test_what_is_written_is_what_is_read(
    manifest: FileEntry, cubins: list[tuple[FileEntry, FileEntry]], signed: bool
) -> None:
    files = {"manifest.json": manifest}
    for number, (cubin, sidecar) in enumerate(cubins):
        files[f"cubin/dsv2mk.sm_{number}a.tp1.ff.cubin"] = cubin
        files[f"cubin/dsv2mk.sm_{number}a.tp1.ff.json"] = sidecar
    blake3 = {name: ("e" * 64,) * len(entry.chunks) for name, entry in files.items()}
    bundle = Bundle(artifact=ARTIFACT, files=files, blake3=blake3 if signed else None)
    assert Bundle.parse(bundle.encoded) == bundle
    assert bundle.archs == [f"sm_{number}a" for number in range(len(cubins))]


# ---- with a manifest ----


def entry_of(data: bytes) -> FileEntry:
    return FileEntry(size=len(data), digest=A, chunks=(B,))


def test_the_table_has_every_file(built: Path) -> None:
    manifest = read_manifest(built)
    bundle = make_bundle(manifest, {"manifest.json": entry_of(manifest.encoded)})
    assert bundle.artifact == hashlib.sha256((built / "manifest.json").read_bytes()).hexdigest()
    table = bundle.table(manifest)
    assert set(table) == {path.name for path in built.iterdir()}
    assert table["config.json"] == manifest.files["config.json"]
    assert table["manifest.json"] == entry_of(manifest.encoded)


def test_a_bundle_that_does_not_fit_its_manifest_is_refused(built: Path) -> None:
    manifest = read_manifest(built)
    own = {"manifest.json": entry_of(manifest.encoded)}
    bundle = make_bundle(manifest, own)
    with pytest.raises(ArtifactError, match="manifest: expected"):
        replace(bundle, artifact=ARTIFACT).table(manifest)
    with pytest.raises(ArtifactError, match=r"config\.json is in the manifest"):
        make_bundle(manifest, {**own, "config.json": entry_of(b"a")})
    hashes = {
        name: ["f" * 64] * len(entry.chunks) for name, entry in {**manifest.files, **own}.items()
    }
    assert make_bundle(manifest, own, hashes).blake3 is not None
    for name in ("rank-00.ffn.safetensors", "manifest.json"):
        for wrong in ([], ["f" * 64] * 2):
            with pytest.raises(ArtifactError, match="blake3"):
                make_bundle(manifest, own, {**hashes, name: wrong})
        with pytest.raises(ArtifactError, match="blake3"):
            make_bundle(manifest, own, {n: h for n, h in hashes.items() if n != name})
    with pytest.raises(ArtifactError, match="blake3"):
        make_bundle(manifest, own, {**hashes, "more": ["f" * 64]})


def test_a_name_outside_of_the_folder_never_gets_into_a_bundle(built: Path) -> None:
    manifest = read_manifest(built)
    own = {"manifest.json": entry_of(manifest.encoded), "../x": entry_of(b"x")}
    with pytest.raises(ArtifactError, match=r"file name '\.\./x'"):
        make_bundle(manifest, own)


def test_canonical_form_is_the_projects(built: Path) -> None:
    manifest = read_manifest(built)
    bundle = make_bundle(manifest, {"manifest.json": entry_of(manifest.encoded)})
    assert bundle.encoded == canonical_json(json.loads(bundle.encoded))
