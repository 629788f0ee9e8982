"""Artifacts and stores for the tests, and a second reading of a store's form."""

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fake_gpu import CUBIN, make_sidecar, put_cubin

from dsv2mk.artifacts import signing
from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.hashing import hash_file
from dsv2mk.artifacts.publish import Published, create_store, publish
from dsv2mk.artifacts.store import Store
from dsv2mk.manifests import manifest as manifest_module
from dsv2mk.manifests.manifest import CHUNK_BYTES, Manifest, make_manifest

#: Seconds, for which objects that nobody names are kept.
DAY = 86400
#: Divides no file's size: of some files the last chunk is a short one.
CHUNK = 20_000


def chunk_everywhere(patch: pytest.MonkeyPatch, size: int = CHUNK) -> None:
    """Let chunks be small, in every module that knows their size."""
    modules = [m for name, m in sys.modules.items() if name.startswith("dsv2mk.")]
    for module in modules:
        if getattr(module, "CHUNK_BYTES", None) == CHUNK_BYTES:
            patch.setattr(module, "CHUNK_BYTES", size)


def manifest_again(folder: Path, old: Manifest | None = None) -> Manifest:
    """Write a manifest for the files as they are now and for the present size of chunks."""
    old = old or read_manifest(folder)
    own = ("schema", "geometry", "topology", "scheme", "layout_version", "source", "code")
    sections = {name: old.data[name] for name in own}
    entries = {name: hash_file(folder / name) for name in old.files}
    manifest = make_manifest(sections, entries, old.data["tools"])
    (folder / "manifest.json").write_bytes(manifest.encoded)
    return manifest


def variant(folder: Path, out: Path, text: str) -> Path:
    """An artifact that differs in one small file."""
    shutil.copytree(folder, out)
    (out / "generation_config.json").write_text(json.dumps({"note": text}))
    manifest_again(out)
    return out


def put_two(artifact: Path, folder: Path) -> Path:
    """Artifacts `artifact` and `other` in a folder, and a day-old `store` with both: `v1`, `v2`."""
    other = variant(artifact, folder / "other", "b")
    add_cubin(other)
    put(artifact, folder / "store", "v1")
    put(other, folder / "store", "v2")
    age(folder / "store", DAY + 60)
    return folder


def add_cubin(folder: Path, arch: str = "sm_90a", cubin: bytes = CUBIN, **options: Any) -> Path:
    """A cubin in an artifact's folder; where it is."""
    manifest = read_manifest(folder)
    given = {"geometry": manifest.geometry, "ranks": manifest.topology.ranks, **options}
    return put_cubin(folder / "cubin", make_sidecar(arch=arch, cubin=cubin, **given), cubin=cubin)


def age(store: Path, seconds: float) -> None:
    """Let every file be that old."""
    then = time.time() - seconds
    for path in store.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def put(folder: Path, store: Path, tag: str = "v1", **options: Any) -> Published:
    """Publish copies, which may be damaged without harm to the folder."""
    return publish(folder, create_store(store), tag, **{"links": False, **options})


def blake3_of(data: bytes | bytearray | memoryview) -> str:
    state = signing.hasher()
    state.update(data)
    return str(state.hexdigest())


def files_of(folder: Path) -> dict[str, bytes]:
    """What a publish of a folder has to offer: every file below it but PTX."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".ptx"
    }


def name_of(data: bytes) -> str:
    """The name of the object that holds these bytes."""
    size = manifest_module.CHUNK_BYTES
    chunks = (data[at : at + size] for at in range(0, len(data), size))
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, chunks)))


def objects_of(store: Path) -> dict[str, bytes]:
    """Objects by name; each lies where its name says and is what it says."""
    found = {}
    for path in (store / "objects").glob("*/*"):
        if path.name.startswith("."):
            continue
        assert path.parent.name == path.name[:2]
        found[path.name] = path.read_bytes()
        assert name_of(found[path.name]) == path.name
    return found


def hidden(store: Path) -> list[str]:
    """Parts, temporaries and leases."""
    paths = [*store.rglob(".*"), *(store / "leases").glob("*")]
    return sorted(path.name for path in paths)


def offered(store: Path, tag: str) -> dict[str, bytes]:
    """Every file of a tagged bundle, read by the letter of the store's form."""
    digest = (store / "tags" / tag).read_text().removesuffix("\n")
    bundle = (store / "bundles" / f"{digest}.json").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() == digest
    objects, data = objects_of(store), json.loads(bundle)
    entries = dict(data["files"])
    manifest = objects[entries["manifest.json"]["digest"]]
    assert hashlib.sha256(manifest).hexdigest() == data["artifact"]
    entries |= json.loads(manifest)["files"]
    return {name: objects[entry["digest"]] for name, entry in entries.items()}


def object_at(store: Path, data: bytes) -> Path:
    """Where the object with these bytes is."""
    return Store(store).object_place(name_of(data))


def size_of(files: dict[str, bytes]) -> int:
    """Bytes of the objects that hold these files."""
    return sum(len(data) for data in set(files.values()))


def make_chunky(artifact: Path, patch: pytest.MonkeyPatch) -> Path:
    """Let chunks be small and an artifact's files have several."""
    old = read_manifest(artifact)
    chunk_everywhere(patch)
    manifest = manifest_again(artifact, old)
    assert len(manifest.files["rank-00.ffn.safetensors"].chunks) > 5
    return artifact
