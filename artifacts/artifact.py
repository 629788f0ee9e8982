"""A built artifact: open it, map its tensors, check it, compare two of them."""

import math
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsv2mk.artifacts.container import ContainerError, ShardFile, read_header, shard_file
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_range
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import PARTS, RankLayout, TensorSpec
from dsv2mk.manifests.manifest import MANIFEST_NAME, Manifest, describe_changes, parse_manifest

_REBUILD = "Build it again: dsv2mk build SNAPSHOT --tp N --out DIR --overwrite"


@dataclass(kw_only=True, frozen=True)
class Artifact:
    """An artifact whose manifest has been read and whose shard files have the right headers."""

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
        """A tensor's bytes, mapped. KeyError for a name that the rank does not have.

        The mapping is private: what is written to it never reaches the file.
        """
        spec = self.layouts[rank].tensors[name]
        file_name, start = self.locate(rank, spec)
        with open(self.path / file_name, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(mapping)[start : start + spec.nbytes]

    def verify(
        self, sample: float = 100.0, done: Callable[[int], object] = lambda count: None
    ) -> dict[str, str]:
        """Hash the files and compare with the manifest; the problem of each damaged file.

        With `sample` below 100 only that percentage of each file's chunks is read, and at least
        one: a quick look, not a proof. `done` is told the bytes of each chunk.
        """
        problems: dict[str, str] = {}
        seen: dict[tuple[int, int], tuple[tuple[str, ...], str | None]] = {}
        for name, entry in sorted(self.manifest.files.items()):
            if problem := self.file_problem(name):
                problems[name] = problem
                continue
            with open(self.path / name, "rb") as file:
                info = os.fstat(file.fileno())
                known = seen.get((info.st_dev, info.st_ino))
                if known is not None and known[0] == entry.chunks:
                    found = known[1]  # the replicated part is one file under several names
                else:
                    found = _hash_problem(file.fileno(), entry.size, entry.chunks, sample, done)
                    seen[info.st_dev, info.st_ino] = (entry.chunks, found)
            if found is None and digest_of(entry.chunks) != entry.digest:
                found = "the digest in the manifest is not that of its chunk list"
            if found is not None:
                problems[name] = found
        return problems

    def bytes_to_verify(self, sample: float = 100.0) -> int:
        """How many bytes `verify` will report, at most."""
        return sum(
            sum(chunk_range(index, entry.size)[1] for index in _sampled(len(entry.chunks), sample))
            for entry in self.manifest.files.values()
        )

    def locate(self, rank: int, spec: TensorSpec) -> tuple[str, int]:
        """(file name, offset in that file) of a tensor."""
        name = self.layouts[rank].file_name(spec.part)
        return name, self._shards[name].data_start + spec.offset


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artifact folder. Raises ArtifactError."""
    file = path / MANIFEST_NAME
    try:
        return parse_manifest(file.read_bytes())
    except FileNotFoundError:
        what = "is not an artifact: it has no manifest.json" if path.is_dir() else "does not exist"
        raise ArtifactError(
            f"{path} {what}", fix="Build one: dsv2mk build SNAPSHOT --tp N --out DIR"
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
    changes: list[tuple[str, str]] = []
    for name in sorted({*a.files, *b.files}):
        if name not in a.files:
            changes.append(("+", name))
        elif name not in b.files:
            changes.append(("-", name))
        elif (a.files[name].size, a.files[name].chunks) != (
            b.files[name].size,
            b.files[name].chunks,
        ):
            changes.append(("M", name))
    for section in sorted({*a.data, *b.data} - {"files", "tensors"}):
        for line in describe_changes(a.data.get(section), b.data.get(section), section):
            sign = {": added": "+", ": removed": "-"}.get(line[line.rfind(":") :], "M")
            changes.append((sign, line))
    return changes


def _sampled(count: int, sample: float) -> list[int]:
    """Indices of the chunks that a sample looks at: all, or a new random choice each time."""
    if sample >= 100:
        return list(range(count))
    return sorted(random.sample(range(count), min(count, max(1, math.ceil(count * sample / 100)))))


def _hash_problem(
    fd: int, size: int, chunks: tuple[str, ...], sample: float, done: Callable[[int], object]
) -> str | None:
    for index in _sampled(len(chunks), sample):
        start, length = chunk_range(index, size)
        try:
            found = hash_range(fd, start, length)
        except (OSError, EOFError) as error:
            return f"chunk {index} cannot be read: {error}"
        done(length)
        if found != chunks[index]:
            return f"chunk {index} (from byte {start}): expected {chunks[index]}, found {found}"
    return None
