"""A built artifact: open it, map its tensors, check it, compare two of them."""

import math
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsv2mk.artifacts.container import ContainerError, read_header
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_range
from dsv2mk.artifacts.shards import ShardFile, shard_file
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import PARTS, RankLayout, TensorSpec
from dsv2mk.manifests.manifest import MANIFEST_NAME, FileEntry, Manifest, changes, parse_manifest

_REBUILD = "Build it again: dsv2mk build SNAPSHOT --tp N --out DIR --overwrite"


@dataclass(kw_only=True, frozen=True)
class Artifact:
    """An artifact whose manifest has been read; `open` has checked its files' headers too."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> "Artifact":
        """Read the manifest and the headers of all shards; no tensor data.

        Raises ArtifactError if the folder is no artifact, a file is missing or has another size,
        or a header is not what the manifest's geometry and topology give.
        """
        artifact = cls(path=path, manifest=read_manifest(path))
        for name in sorted(artifact.manifest.files):
            if problem := artifact.file_problem(name):
                raise ArtifactError(f"{path / name}: {problem}", fix=_REBUILD)
        return artifact

    @property
    def layouts(self) -> list[RankLayout]:
        """Layout of each rank."""
        return self.manifest.layouts

    @cached_property
    def _shards(self) -> dict[str, ShardFile]:
        files = (shard_file(layout, part) for layout in self.layouts for part in PARTS)
        return {file.name: file for file in files}

    def file_problem(self, name: str) -> str | None:
        """What is wrong with a file's size or header, or None."""
        path, entry = self.path / name, self.manifest.files[name]
        try:
            size = path.stat().st_size
            if size != entry.size:
                return f"expected {entry.size} bytes, found {size}"
            if name in self._shards and read_header(path).encoded != self._shards[name].header:
                return "the header is not what the manifest gives"
        except ContainerError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

    def map_tensor(self, rank: int, name: str) -> memoryview:
        """A tensor's bytes, mapped read-only. KeyError for a name that the rank does not have."""
        spec = self.layouts[rank].tensors[name]
        file_name, start = self.locate(rank, spec)
        before = start % mmap.ALLOCATIONGRANULARITY
        with open(self.path / file_name, "rb") as file:
            mapping = mmap.mmap(
                file.fileno(), before + spec.nbytes, access=mmap.ACCESS_READ, offset=start - before
            )
        return memoryview(mapping)[before:]

    def verify(
        self, sample: float = 100.0, done: Callable[[int], object] = lambda count: None
    ) -> dict[str, str]:
        """Hash the files and compare with the manifest; the problem of each damaged file.

        With `sample` below 100 only that percentage of each file's chunks is read, and at least
        one: a quick look, not a proof. `done` is told the bytes of each chunk.
        """
        problems: dict[str, str] = {}
        hashed: dict[tuple[object, ...], str | None] = {}
        for name, entry in sorted(self.manifest.files.items()):
            problem = self.file_problem(name)
            if problem is None:
                same = self._identity(name, entry)
                if same not in hashed:
                    hashed[same] = _hash_problem(self.path / name, entry, sample, done)
                problem = hashed[same]
            if problem is None and digest_of(entry.chunks) != entry.digest:
                problem = "the digest in the manifest is not that of its chunk list"
            if problem is not None:
                problems[name] = problem
        return problems

    def bytes_to_verify(self, sample: float = 100.0) -> int:
        """How many bytes `verify` will read, if all files are there."""
        entries = {
            self._identity(name, entry): entry for name, entry in self.manifest.files.items()
        }
        return sum(
            sum(chunk_range(index, entry.size)[1] for index in _sampled(len(entry.chunks), sample))
            for entry in entries.values()
        )

    def _identity(self, name: str, entry: FileEntry) -> tuple[object, ...]:
        """Equal for names of one file (the replicated part) that must hold the same."""
        try:
            info = os.stat(self.path / name)
        except OSError:
            return (name,)
        return info.st_dev, info.st_ino, entry.chunks

    def locate(self, rank: int, spec: TensorSpec) -> tuple[str, int]:
        """(file name, offset in that file) of a tensor."""
        name = self.layouts[rank].file_name(spec.part)
        return name, self._shards[name].data_start + spec.offset


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artifact folder. Raises ArtifactError."""
    file = path / MANIFEST_NAME
    try:
        if file.exists() and not file.is_file():
            raise ArtifactError(f"{file} is not a regular file")  # a pipe would wait for ever
        return parse_manifest(file.read_bytes())
    except FileNotFoundError:
        what = "is not an artifact: it has no manifest.json" if path.is_dir() else "does not exist"
        raise ArtifactError(
            f"{path} {what}",
            fix="Build one in a new folder: dsv2mk build SNAPSHOT --tp N --out DIR",
        ) from None
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}") from None
    except ArtifactError as error:
        raise ArtifactError(
            f"{path}: {error.what}",
            expected=error.expected,
            found=error.found,
            fix=error.fix or _REBUILD,
        ) from None


def diff(a: Manifest, b: Manifest) -> list[tuple[str, str]]:
    """What turns artifact a into b, as (sign, text): `+` added, `-` removed, `M` modified.

    Files first, by name; then each fact of the manifest that differs.
    """
    out: list[tuple[str, str]] = []
    for name in sorted({*a.files, *b.files}):
        if name not in a.files:
            out.append(("+", name))
        elif name not in b.files:
            out.append(("-", name))
        elif (a.files[name].size, a.files[name].chunks) != (
            b.files[name].size,
            b.files[name].chunks,
        ):
            out.append(("M", name))
    for section in sorted({*a.data, *b.data} - {"files", "tensors"}):
        out += changes(a.data[section], b.data[section], section)
    return out


def _sampled(count: int, sample: float) -> list[int]:
    """Indices of the chunks that a sample looks at: all, or a new random choice each time."""
    if sample >= 100:
        return list(range(count))
    return sorted(random.sample(range(count), min(count, max(1, math.ceil(count * sample / 100)))))


def _hash_problem(
    path: Path, entry: FileEntry, sample: float, done: Callable[[int], object]
) -> str | None:
    try:
        with open(path, "rb") as file:
            for index in _sampled(len(entry.chunks), sample):
                start, length = chunk_range(index, entry.size)
                found = hash_range(file.fileno(), start, length)
                done(length)
                if found != entry.chunks[index]:
                    wanted = entry.chunks[index]
                    return f"chunk {index} (from byte {start}): expected {wanted}, found {found}"
    except (OSError, EOFError) as error:
        return f"cannot be read: {error}"
    return None
