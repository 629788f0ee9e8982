"""The manifest: canonical JSON that names every file, tensor, hash and origin of an artifact.

Its sha256 is the artifact's identity. It holds no time, host, user or path, so that two builds of
one input are byte-identical.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsv2mk.manifests.canonical import FILE_NAME, canonical_json, parse_object
from dsv2mk.manifests.errors import ArtifactError, InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import LAYOUT_VERSION, PARTS, RankLayout, group_layout
from dsv2mk.manifests.scheme import SCHEME
from dsv2mk.manifests.topology import Topology

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
CHUNK_BYTES = 64 << 20

_SECTIONS = frozenset(
    (
        *("schema", "geometry", "topology", "scheme", "layout_version", "source", "code"),
        *("chunk_bytes", "files", "tensors", "tools"),
    )
)
#: What reading values of unexpected types and shapes raises.
_MALFORMED = (InputError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(kw_only=True, slots=True, frozen=True)
class FileEntry:
    """Size and hashes of one file of an artifact."""

    size: int
    digest: str  # xxh3-128 over the chunks' digests, hex
    chunks: tuple[str, ...]  # xxh3-128 of each CHUNK_BYTES, hex


@dataclass(kw_only=True, frozen=True)
class Manifest:
    """A manifest that has passed every check that needs no other file."""

    data: Mapping[str, Any]
    geometry: Geometry
    topology: Topology
    files: Mapping[str, FileEntry]

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes."""
        return canonical_json(self.data)

    @property
    def digest(self) -> str:
        """sha256 of the canonical bytes, hex: the artifact's identity."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def layouts(self) -> list[RankLayout]:
        """Layout of each rank, derived from geometry and topology."""
        return group_layout(self.geometry, self.topology)


def deciding_sections(
    geometry: Geometry, topology: Topology, source: object, code: Mapping[str, str]
) -> dict[str, Any]:
    """The sections that decide the bytes of the shards: all that a build needs to know ahead."""
    return {
        "schema": SCHEMA_VERSION,
        "geometry": geometry.to_json(),
        "topology": {"ranks": topology.ranks},
        "scheme": SCHEME,
        "layout_version": LAYOUT_VERSION,
        "source": source,
        "code": dict(code),
    }


def tensor_table(layouts: list[RankLayout]) -> dict[str, Any]:
    """The `tensors` section: dtype, owner, origin, and shape and data offset on each rank."""
    table: dict[str, Any] = {}
    for layout in layouts:
        for name, spec in layout.tensors.items():
            entry = table.setdefault(
                name,
                {
                    "dtype": spec.dtype,
                    "origin": list(spec.origin),
                    "owner": spec.owner,
                    "part": spec.part,
                    "ranks": {},
                },
            )
            entry["ranks"][str(layout.rank)] = {"offset": spec.offset, "shape": list(spec.shape)}
    return table


def make_manifest(
    sections: Mapping[str, Any], files: Mapping[str, FileEntry], tools: Mapping[str, str]
) -> Manifest:
    """Complete the deciding sections to a manifest."""
    geometry = Geometry.from_json(sections["geometry"])
    layouts = group_layout(geometry, Topology(ranks=sections["topology"]["ranks"]))
    data = {
        **sections,
        "chunk_bytes": CHUNK_BYTES,
        "files": {
            name: {"size": e.size, "digest": e.digest, "chunks": list(e.chunks)}
            for name, e in files.items()
        },
        "tensors": tensor_table(layouts),
        "tools": dict(tools),
    }
    return parse_manifest(canonical_json(data))


def parse_manifest(encoded: bytes) -> Manifest:
    """Check a manifest's form. Raises ArtifactError, saying what is wrong."""
    try:
        data = parse_object(encoded)
    except ValueError as error:
        raise ArtifactError(f"{MANIFEST_NAME} is {error}") from None
    if (data.get("schema"), data.get("layout_version")) != (SCHEMA_VERSION, LAYOUT_VERSION):
        raise ArtifactError(
            f"{MANIFEST_NAME}: schema and layout version",
            expected=f"{SCHEMA_VERSION} and {LAYOUT_VERSION}",
            found=f"{data.get('schema')!r} and {data.get('layout_version')!r}",
            fix="Build the artifact again with this version of dsv2mk",
        )
    try:
        if set(data) != _SECTIONS:
            raise ValueError(f"sections {sorted(set(data) ^ _SECTIONS)}")
        if canonical_json(data) != encoded:
            raise ValueError("not in canonical form")
        fixed = {"scheme": SCHEME, "chunk_bytes": CHUNK_BYTES, "schema": SCHEMA_VERSION}
        fixed["layout_version"] = LAYOUT_VERSION
        for section, value in fixed.items():
            if canonical_json(data[section]) != canonical_json(value):
                raise ValueError(f"{section} {data[section]!r}")
        ranks = data["topology"]["ranks"]
        if set(data["topology"]) != {"ranks"} or type(ranks) is not int:
            raise ValueError(f"topology {data['topology']!r}")
        geometry, topology = Geometry.from_json(data["geometry"]), Topology(ranks=ranks)
        layouts = group_layout(geometry, topology)
        if canonical_json(data["tensors"]) != canonical_json(tensor_table(layouts)):
            raise ValueError("tensors differ from what the geometry and topology give")
        files = {name: parse_entry(name, entry) for name, entry in data["files"].items()}
        for name in files:
            if not FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
                raise ValueError(f"file name {name!r}")
        shards = {layout.file_name(part) for layout in layouts for part in PARTS}
        if missing := sorted(shards - set(files)):
            raise ValueError(f"no entry for {missing[0]}")
        for section in ("code", "tools"):
            if not all(isinstance(value, str) for value in data[section].values()):
                raise ValueError(section)
        _check_source(data["source"], files)
    except _MALFORMED as error:
        raise ArtifactError(f"{MANIFEST_NAME} is damaged: {error}") from None
    return Manifest(data=data, geometry=geometry, topology=topology, files=files)


def changes(old: object, new: object, path: str = "") -> list[tuple[str, str]]:
    """Each leaf that differs between two JSON values, as (sign, text).

    `+` is only in the new one, `-` only in the old one, `M` differs: `path: old -> new`.
    """
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        out: list[tuple[str, str]] = []
        for key in sorted({*old, *new}):
            below = f"{path}.{key}" if path else str(key)
            if key in old and key in new:
                out += changes(old[key], new[key], below)
            else:
                out.append(("-" if key in old else "+", below))
        return out
    shown = [json.dumps(value, ensure_ascii=False) for value in (old, new)]
    return [("M", f"{path}: {shown[0]} -> {shown[1]}" if max(map(len, shown)) <= 80 else path)]


def change_text(change: tuple[str, str]) -> str:
    """One of `changes` as a line."""
    sign, text = change
    return {"+": f"{text} added", "-": f"{text} removed"}.get(
        sign, text if " -> " in text else f"{text} differs"
    )


def _check_source(source: Mapping[str, Any], files: Mapping[str, FileEntry]) -> None:
    if set(source) != {"copied", "files"}:
        raise ValueError("source")
    for name, sha256 in source["copied"].items():
        if not isinstance(sha256, str):
            raise ValueError(f"source.copied.{name}")
        if name not in files:
            raise ValueError(f"no entry for {name}")
    for name, entry in source["files"].items():
        if set(entry) != {"size", "digest"} or type(entry["size"]) is not int:
            raise ValueError(f"source.files.{name}")
        if not isinstance(entry["digest"], str) or not _HASH.fullmatch(entry["digest"]):
            raise ValueError(f"source.files.{name}")


def parse_entry(name: str, entry: Mapping[str, Any]) -> FileEntry:
    """A file's entry of a manifest or a bundle. Raises what malformed JSON raises."""
    size, digest, chunks = entry["size"], entry["digest"], entry["chunks"]
    if set(entry) != {"size", "digest", "chunks"} or type(size) is not int or size < 0:
        raise ValueError(f"files.{name}")
    if type(chunks) is not list or len(chunks) != -(-size // CHUNK_BYTES):
        raise ValueError(f"files.{name}: chunks do not match {size} bytes")
    if not all(isinstance(h, str) and _HASH.fullmatch(h) for h in [digest, *chunks]):
        raise ValueError(f"files.{name}: a hash that is not 32 hex digits")
    return FileEntry(size=size, digest=digest, chunks=tuple(chunks))
