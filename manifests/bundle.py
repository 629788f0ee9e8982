"""The bundle: canonical JSON that names an artifact and what goes with it, as a store holds them.

Its sha256 is the bundle's name. It lists the manifest and the files that the manifest does not list
(cubins and their sidecars); all others are derived from the manifest. A bundle that was signed
holds BLAKE3 hashes of all files besides, chunk by chunk: against attackers, where xxh3 is against
accidents.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsv2mk.manifests.canonical import FILE_NAME, canonical_json, parse_object
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_entry
from dsv2mk.manifests.sidecar import CUBIN_FILE, CUBIN_FOLDER

BUNDLE_SCHEMA = 1
SHA256 = re.compile(r"[0-9a-f]{64}")

_CUBIN = f"{CUBIN_FOLDER}/"
#: What reading values of unexpected types and shapes raises.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(kw_only=True, frozen=True)
class Bundle:
    """A bundle that has passed every check that needs no other file."""

    artifact: str  # sha256 of manifest.json: the artifact's identity
    files: Mapping[str, FileEntry]  # the manifest, and what it does not list
    blake3: Mapping[str, tuple[str, ...]] | None = None  # of all files, each chunk, hex

    @classmethod
    def parse(cls, encoded: bytes, where: object = "the bundle") -> "Bundle":
        """Check a bundle's form. Raises ArtifactError, naming `where`."""
        try:
            data = parse_object(encoded)
        except ValueError as error:
            raise ArtifactError(f"{where} is {error}") from None
        if data.get("schema") != BUNDLE_SCHEMA:
            raise ArtifactError(
                f"{where}: schema", expected=BUNDLE_SCHEMA, found=repr(data.get("schema"))
            )
        try:
            if canonical_json(data) != encoded:
                raise ValueError("not in canonical form")
            if type(data["schema"]) is not int or set(data) - {"blake3"} != {
                *("schema", "artifact", "files")
            }:
                raise ValueError(f"sections {sorted(data)}")
            if not _is_sha256(data["artifact"]):
                raise ValueError(f"artifact {data['artifact']!r}")
            files = {name: parse_entry(name, entry) for name, entry in data["files"].items()}
            _check_names(files)
            bundle = cls(artifact=data["artifact"], files=files, blake3=_blake3(data, files))
        except _MALFORMED as error:
            raise ArtifactError(f"{where} is damaged: {error}") from None
        return bundle

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes."""
        data: dict[str, Any] = {
            "schema": BUNDLE_SCHEMA,
            "artifact": self.artifact,
            "files": {
                name: {"size": e.size, "digest": e.digest, "chunks": list(e.chunks)}
                for name, e in self.files.items()
            },
        }
        if self.blake3 is not None:
            data["blake3"] = {name: list(chunks) for name, chunks in self.blake3.items()}
        return canonical_json(data)

    @property
    def digest(self) -> str:
        """sha256 of the canonical bytes, hex: the bundle's name."""
        return hashlib.sha256(self.encoded).hexdigest()

    @property
    def archs(self) -> list[str]:
        """Architectures that there are cubins for."""
        return sorted({arch for name in self.files if (arch := cubin_arch(name)) is not None})

    def table(self, manifest: Manifest) -> dict[str, FileEntry]:
        """All files, those of the artifact's manifest and those beside it.

        Raises ArtifactError if the bundle does not fit the manifest.
        """
        if manifest.digest != self.artifact:
            raise ArtifactError(
                f"bundle {self.digest}: manifest", expected=self.artifact, found=manifest.digest
            )
        if twice := sorted(set(manifest.files) & set(self.files)):
            raise ArtifactError(f"bundle {self.digest} is damaged: {twice[0]} is in the manifest")
        files = {**manifest.files, **self.files}
        if CUBIN_FOLDER in files:
            raise ArtifactError(f"bundle {self.digest} is damaged: file name {CUBIN_FOLDER!r}")
        if self.blake3 is not None:
            counts = {name: len(chunks) for name, chunks in self.blake3.items()}
            if counts != {name: len(entry.chunks) for name, entry in files.items()}:
                raise ArtifactError(
                    f"bundle {self.digest} is damaged: the blake3 hashes are of other files"
                )
        return files


def make_bundle(
    manifest: Manifest,
    files: Mapping[str, FileEntry],
    blake3: Mapping[str, list[str]] | None = None,
) -> Bundle:
    """A bundle of an artifact and of files that its manifest does not list."""
    hashes = None if blake3 is None else {name: tuple(chunks) for name, chunks in blake3.items()}
    bundle = Bundle(artifact=manifest.digest, files=files, blake3=hashes)
    bundle.table(manifest)
    return Bundle.parse(bundle.encoded)


def cubin_arch(name: str) -> str | None:
    """Architecture of a file that belongs to a cubin; None for other files."""
    return name.split(".")[1] if name.startswith(_CUBIN) else None


def _check_names(files: Mapping[str, FileEntry]) -> None:
    """Names lead nowhere out of a folder; every cubin has its sidecar."""
    if MANIFEST_NAME not in files:
        raise ValueError(f"no entry for {MANIFEST_NAME}")
    for name in files:
        if name.startswith(_CUBIN):
            if not CUBIN_FILE.fullmatch(name.removeprefix(_CUBIN)):
                raise ValueError(f"file name {name!r}")
            stem, _, kind = name.rpartition(".")
            other = {"cubin": "json", "json": "cubin"}.get(kind)  # no PTX
            if f"{stem}.{other}" not in files:
                raise ValueError(f"{name} is not one of a cubin and its sidecar")
        elif not FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r}")


def _blake3(
    data: Mapping[str, Any], files: Mapping[str, FileEntry]
) -> dict[str, tuple[str, ...]] | None:
    if "blake3" not in data:
        return None
    for name, chunks in data["blake3"].items():
        if type(chunks) is not list or not all(map(_is_sha256, chunks)):
            raise ValueError(f"blake3.{name}")
    for name, entry in files.items():
        if len(data["blake3"][name]) != len(entry.chunks):
            raise ValueError(f"blake3.{name}")
    return {name: tuple(chunks) for name, chunks in data["blake3"].items()}


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None
