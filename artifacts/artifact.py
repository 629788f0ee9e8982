"""A built artifact: open it, map its tensors, check it, compare two of them."""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from dsv2mk.artifacts.container import ContainerError, read_header
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_range, sampled
from dsv2mk.artifacts.shards import ShardFile, shard_file
from dsv2mk.artifacts.store import Store, resolve
from dsv2mk.manifests.bundle import Bundle
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.layout import PARTS, RankLayout, TensorSpec
from dsv2mk.manifests.manifest import MANIFEST_NAME, FileEntry, Manifest, changes, parse_manifest

#: Percent of each file's chunks that a sample is.
SAMPLE = 5.0

_REBUILD = "Build it again: dsv2mk build SNAPSHOT --tp N --out DIR --overwrite"
_PULL = "Pull the other ranks too: dsv2mk pull STORE NAME DIR. Or build it again"


@dataclass(kw_only=True, frozen=True)
class Artifact:
    """An artifact whose manifest has been read; `open` has checked its files' headers too.

    It lies in a folder, or in a store as a bundle, whose objects are used in place.
    """

    path: Path  # the folder; of a bundle, its store's
    manifest: Manifest
    rank: int | None = None  # whose shard is there; None: all ranks'
    store: Store | None = None
    bundle: Bundle | None = None
    given: str | None = None  # STORE::NAME
    signed: bool = False  # the bundle, by a key that is trusted

    @classmethod
    def open(
        cls, where: Path | str, rank: int | None = None, trust: Sequence[Path] = ()
    ) -> "Artifact":
        """Read the manifest and the headers of shards; no tensor data.

        where: a folder, or `STORE::NAME`. With a rank, other ranks' shards need not be there. With
        keys to trust, one of them must have signed the bundle. Raises ArtifactError if it is no
        artifact, a file is missing or has another size, or a header is not what the manifest's
        geometry and topology give.
        """
        found = resolve(where) if isinstance(where, str) else None
        if found is None:
            if trust:
                raise UsageError("--trust is for a bundle", expected="STORE::NAME", found=where)
            path = Path(where)
            artifact = cls(path=path, manifest=read_manifest(path), rank=rank)
        else:
            store, bundle = found
            if trust:
                from dsv2mk.artifacts import signing
                from dsv2mk.artifacts.pull import trusted_bundle

                bundle = trusted_bundle(store, bundle.digest, trust)
                signing.hasher()  # refused early where its package is not there
            artifact = cls(
                path=store.path,
                manifest=store.manifest(bundle),
                rank=rank,
                store=store,
                bundle=bundle,
                given=str(where),
                signed=bool(trust),
            )
        for name in sorted(artifact.own_files):
            if problem := artifact.file_problem(name):
                raise artifact._damage(name, problem)
        return artifact

    @property
    def where(self) -> str:
        """What the user calls it."""
        return self.given or str(self.path)

    @cached_property
    def entries(self) -> Mapping[str, FileEntry]:
        """Size and hashes of each file; of a bundle also of cubins and the manifest."""
        return self.bundle.table(self.manifest) if self.bundle else self.manifest.files

    @cached_property
    def own_files(self) -> dict[str, FileEntry]:
        """The manifest's files, without the shards of ranks that need not be there."""
        return {
            name: entry
            for name, entry in self.manifest.files.items()
            if self.rank is None
            or name not in self._shards
            or self._shards[name].layout.rank == self.rank
        }

    def file_path(self, name: str) -> Path:
        """Where a file lies."""
        if self.store is None:
            return self.path / name
        return self.store.object_path(self.entries[name].digest)

    def open_file(self, name: str) -> int:
        """A descriptor of a file. Raises OSError."""
        if self.store is None:
            return os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK)
        return self.store.open_object(self.entries[name].digest)

    def label(self, name: str) -> str:
        """A file as messages name it."""
        if self.store is None:
            return str(self.path / name)
        place = self.store.object_place(self.entries[name].digest)
        return f"{name} of {self.where} (object {place})"

    def _damage(self, name: str, problem: str) -> ArtifactError:
        if self.store is not None and self.bundle is not None:
            return self.store.damage(self.bundle, name, self.entries[name], problem)
        partial = name in self._shards and not os.path.lexists(self.path / name)
        return ArtifactError(f"{self.label(name)}: {problem}", fix=_PULL if partial else _REBUILD)

    def read(self, name: str) -> bytes:
        """A small file; one of a bundle is proved. Raises ArtifactError."""
        entry = self.entries[name]
        try:
            if self.store is None:
                return self.file_path(name).read_bytes()
            with open(self.store.open_object(entry.digest), "rb") as file:
                encoded = file.read(entry.size + 1)
        except OSError as error:
            raise self._damage(name, f"cannot be read: {error.strerror}") from None
        found = []
        for index in range(len(entry.chunks)):
            start, length = chunk_range(index, entry.size)
            state = self.new_hash()
            state.update(encoded[start : start + length])
            found.append(state.hexdigest())
        if len(encoded) != entry.size or found != list(self.to_prove(name, "full").values()):
            raise self._damage(name, "is damaged: it has other bytes than its hashes say")
        return encoded

    # ---- proofs ----

    def new_hash(self) -> Any:
        """A new state of the hash that `to_prove` has digests of."""
        if not self.signed:
            return xxhash.xxh3_128()
        from dsv2mk.artifacts import signing

        return signing.hasher()

    def to_prove(self, name: str, verify: str) -> dict[int, str]:
        """Digests of the chunks of a file to look at: none, a sample, or those of a full proof.

        BLAKE3 of a bundle that is signed, and then of all chunks; else xxh3.
        """
        if verify == "none" and not self.signed:
            return {}
        return self._sampled(name, 100.0 if verify == "full" else SAMPLE)

    def _sampled(self, name: str, sample: float) -> dict[int, str]:
        """Digest of each chunk that a sample looks at: all, or a new random choice each time."""
        digests = self.entries[name].chunks
        if self.signed:
            assert self.bundle is not None
            assert self.bundle.blake3 is not None
            digests = self.bundle.blake3[name]
        share = 100.0 if self.signed else sample
        return {index: digests[index] for index in sampled(len(digests), share)}

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
        entry = self.manifest.files[name]
        try:
            with open(self.open_file(name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    return f"expected {entry.size} bytes, found {size}"
                shard = self._shards.get(name)
                if shard and read_header(os.dup(file.fileno())).encoded != shard.header:
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
        with open(self.open_file(file_name), "rb") as file:
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
        for name, entry in sorted(self.own_files.items()):
            problem = self.file_problem(name)
            if problem is None:
                same = self._identity(name, entry)
                if same not in hashed:
                    hashed[same] = self._hash_problem(name, sample, done)
                problem = hashed[same]
            if problem is None and digest_of(entry.chunks) != entry.digest:
                problem = "the digest in the manifest is not that of its chunk list"
            if problem is not None:
                problems[name] = problem
        return problems

    def bytes_to_verify(self, sample: float = 100.0) -> int:
        """How many bytes `verify` will read, if all files are there."""
        names = {self._identity(name, entry): name for name, entry in self.own_files.items()}
        return sum(
            chunk_range(index, self.own_files[name].size)[1]
            for name in names.values()
            for index in self._sampled(name, sample)
        )

    def _hash_problem(self, name: str, sample: float, done: Callable[[int], object]) -> str | None:
        entry = self.own_files[name]
        wanted = self._sampled(name, sample)
        try:
            if self.signed:
                from dsv2mk.artifacts.signing import blake3_chunks

                hashes = dict(
                    enumerate(blake3_chunks(self.open_file(name), entry.size, self.label(name)))
                )
                done(entry.size)
            else:
                hashes = {}
            with open(self.open_file(name), "rb") as file:
                for index, expected in wanted.items():
                    start, length = chunk_range(index, entry.size)
                    if not self.signed:
                        hashes[index] = hash_range(file.fileno(), start, length)
                        done(length)
                    if hashes[index] != expected:
                        return (
                            f"chunk {index} (from byte {start}): expected {expected}, "
                            f"found {hashes[index]}"
                        )
        except (OSError, EOFError) as error:
            return f"cannot be read: {error}"
        return None

    def _identity(self, name: str, entry: FileEntry) -> tuple[object, ...]:
        """Equal for names of one file (the replicated part) that must hold the same."""
        try:
            info = os.stat(self.file_path(name))
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
