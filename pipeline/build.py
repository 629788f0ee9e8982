"""Build an artifact: run the jobs on several threads, hash what they wrote, put it in place.

Everything is written in a private folder beside the output, `.<name>.partial`:

    lock            held (flock) by the build that works here
    journal.jsonl   what is done: see artifacts/journal.py
    artifact/       the files, at their final size from the start
    placing         from just before artifact/ gets its final name: the digest of its manifest

and `artifact/` is renamed to the output when it is complete and on disk. Threads are enough: file
access, hashing and quantising all run without the interpreter's lock.
"""

import errno
import hashlib
import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from importlib.resources import files as resource_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import message, progress, size_text
from dsv2mk.artifacts.container import encode_header
from dsv2mk.artifacts.files import (
    link_or_copy,
    lock_folder,
    replace_folder,
    sync_folder,
    write_all,
    write_file,
)
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_file, hash_range
from dsv2mk.artifacts.journal import Journal
from dsv2mk.manifests.errors import ArtifactError, InputError, SpaceError, UsageError
from dsv2mk.manifests.layout import PARTS, RankLayout, group_layout
from dsv2mk.manifests.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    deciding_sections,
    describe_changes,
    make_manifest,
)
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.jobs import job_extents, jobs
from dsv2mk.pipeline.remember import recall_source, remember_source
from dsv2mk.pipeline.snapshot import COMPANIONS, Reader, Snapshot

if TYPE_CHECKING:
    from dsv2mk.pipeline.quantise import Array

#: The modules whose source decides the bytes of a shard.
CODE = (
    "artifacts/container.py",
    "manifests/canonical.py",
    "manifests/checkpoint.py",
    "manifests/geometry.py",
    "manifests/layout.py",
    "manifests/scheme.py",
    "manifests/topology.py",
    "pipeline/jobs.py",
    "pipeline/pack.py",
    "pipeline/quantise.py",
    "pipeline/snapshot.py",
)

#: Names that an artifact's folder may hold; a folder with others is never replaced.
_ARTIFACT_FILE = re.compile(
    "|".join(
        (
            r"rank-\d+\.\w+\.safetensors|LICENSE.*",
            *map(re.escape, (MANIFEST_NAME, *COMPANIONS)),
        )
    )
)
_JOURNAL = "journal.jsonl"
_TOOLS = ("dsv2mk", "numba", "numpy", "torch", "xxhash")


@dataclass(kw_only=True)
class BuildResult:
    """What `build` did."""

    manifest: Manifest
    up_to_date: bool
    resumed_jobs: int = 0  # found done in the journal
    notes: list[str] = field(default_factory=list)


def code_hashes() -> dict[str, str]:
    """sha256 of each module in CODE."""
    out: dict[str, str] = {}
    for name in CODE:
        package, _, module = name.partition("/")
        source = resource_files(f"dsv2mk.{package}") / module
        out[name] = hashlib.sha256(source.read_bytes()).hexdigest()
    return out


def build(
    snapshot: Snapshot,
    ranks: int,
    out: Path,
    *,
    workers: int,
    device: str = "cpu",
    overwrite: bool = False,
) -> BuildResult:
    """Build the artifact `out` from a snapshot, or find that it is up to date.

    Raises InputError for input that cannot be built, UsageError if `out` is something else or in
    use, SpaceError if the disk is or would be full. In every case what `out` held stays whole, and
    work that was done is kept for the next try.
    """
    layouts = group_layout(snapshot.geometry, Topology(ranks=ranks))
    out = _check_place(out, snapshot)
    sections = deciding_sections(
        snapshot.geometry, Topology(ranks=ranks), snapshot.companions(), code_hashes()
    )
    with _locked(out.parent / f".{out.name}.partial") as folder:
        existing = _existing(out, sections, snapshot, overwrite)
        if existing is not None:
            (folder / _JOURNAL).unlink(missing_ok=True)
            return BuildResult(manifest=existing, up_to_date=True)
        work = _Work(folder, snapshot, layouts, sections)
        try:
            work.run(workers, device)
            manifest = work.finish()
        except KeyboardInterrupt:
            message(f"what is done is kept in {folder}; the same command goes on from there")
            raise
        except InputError:
            (folder / _JOURNAL).unlink()  # no other try with this input can use what is done
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(folder, work.bytes_missing()) from None
            raise
        finally:
            work.close()
        _put_in_place(folder, manifest, out)
        remember_source(snapshot, manifest.data["source"])
        (folder / _JOURNAL).unlink()
    return BuildResult(
        manifest=manifest, up_to_date=False, resumed_jobs=work.resumed_jobs, notes=work.notes
    )


class _Work:
    """One build in its private folder. Also the Sink of all its packers."""

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        layouts: list[RankLayout],
        sections: Mapping[str, Any],
    ) -> None:
        self._folder = folder / "artifact"
        self._snapshot = snapshot
        self._layouts = layouts
        self._sections = sections
        self.notes: list[str] = []
        self._headers = {
            layout.file_name(part): encode_header(layout.part(part), layout.metadata(part))
            for layout in layouts
            for part in _own_parts(layout)
        }
        self._sizes = {
            layout.file_name(part): len(self._headers[layout.file_name(part)])
            + sum(spec.nbytes for spec in layout.part(part))
            for layout in layouts
            for part in _own_parts(layout)
        }
        self._stamps = snapshot.stamps()
        self._journal = self._open_journal(folder)
        self._todo, self._chunk_jobs = self._plan_jobs()
        self._digests: dict[str, str] = {}
        self._chunks: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._read = 0
        self._fds: dict[str, int] = {}
        try:
            self._replay()
            self._check_space()
            self._open_files()
        except BaseException:
            self.close()
            raise

    # ---- before ----

    def _open_journal(self, folder: Path) -> Journal:
        """The journal of what artifact/ holds, or a new one and nothing in artifact/."""
        path = folder / _JOURNAL
        if not self._is_ours(folder / "placing"):
            path.unlink(missing_ok=True)
        identity = {**self._sections, "stamps": self._stamps}
        journal = Journal(path, identity)
        if not journal.resumed:
            if journal.found_identity is not None:
                changes = describe_changes(journal.found_identity, identity)
                self.notes.append(f"started over, since the unfinished build differs: {changes[0]}")
            shutil.rmtree(self._folder, ignore_errors=True)
        (folder / "placing").unlink(missing_ok=True)
        return journal

    def _is_ours(self, placing: Path) -> bool:
        """Whether artifact/ holds what the journal says, and not an old artifact exchanged."""
        try:
            if any((self._folder / n).stat().st_size != size for n, size in self._sizes.items()):
                return False
            if not placing.exists():
                return True
            manifest = (self._folder / MANIFEST_NAME).read_bytes()
            return placing.read_text() == hashlib.sha256(manifest).hexdigest()
        except OSError:
            return False

    def _plan_jobs(self) -> tuple[list[str], dict[tuple[str, int], set[str]]]:
        """All jobs, and for each chunk of each file the jobs that write into it."""
        chunk_jobs: dict[tuple[str, int], set[str]] = {}
        for layout in self._layouts:
            for part in _own_parts(layout):
                name = layout.file_name(part)
                for index in range(-(-self._sizes[name] // CHUNK_BYTES)):
                    chunk_jobs[name, index] = set()
                base = len(self._headers[name])
                for spec in layout.part(part):
                    for job, start, end in job_extents(layout, spec):
                        first, last = base + start, base + end - 1
                        for index in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1):
                            chunk_jobs[name, index].add(job)
        return jobs(self._snapshot.geometry), chunk_jobs

    def _replay(self) -> None:
        done: set[str] = set()
        for record in self._journal.records:
            if "job" in record:
                done.add(record["job"])
                self._digests |= record["digests"]
            else:
                self._chunks[record["file"], record["chunk"]] = record["xxh3"]
        self.resumed_jobs = len(done)
        self._todo = [job for job in self._todo if job not in done]
        self._chunk_jobs = {
            chunk: remaining - done
            for chunk, remaining in self._chunk_jobs.items()
            if chunk not in self._chunks
        }

    def bytes_missing(self) -> int:
        """Bytes that the finished artifact takes on disk beyond what is there already."""
        there = 0
        for name in self._sizes:
            try:
                there += (self._folder / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return max(0, sum(self._sizes.values()) - there)

    def _check_space(self) -> None:
        missing = self.bytes_missing()
        if missing + safety_margin() > shutil.disk_usage(self._folder.parent).free:
            raise _no_space(self._folder.parent, missing)

    def _open_files(self) -> None:
        self._folder.mkdir(exist_ok=True)
        for name, header in self._headers.items():
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
            self._fds[name] = fd
            os.ftruncate(fd, self._sizes[name])
            write_all(fd, header, 0)

    # ---- jobs ----

    def run(self, workers: int, device: str) -> None:
        """Run the jobs that are left. Stops all workers at the first error, or at Ctrl-C."""
        total = self._snapshot.nbytes
        with progress(total, "build") as bar, ThreadPoolExecutor(workers) as pool:
            if self._todo:
                bar.update(sum(self._bytes_of(name) for name in self._digests))
            queue = iter(self._todo)
            loops = [pool.submit(self._worker, queue, bar, device) for _ in range(workers)]
            try:
                for loop in wait(loops, return_when=FIRST_EXCEPTION).done:
                    loop.result()
            finally:
                self._stop.set()
        for chunk in [chunk for chunk, remaining in self._chunk_jobs.items() if not remaining]:
            self._hash_chunk(*chunk)

    def _worker(self, queue: Iterator[str], bar: Any, device: str) -> None:
        from dsv2mk.pipeline.pack import Packer  # brings torch and numba: not for "up to date"

        def done(count: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            with self._lock:
                bar.update(count)

        reader = Reader(done)
        packer = Packer(self._snapshot, self._layouts, reader, self, device)
        try:
            while True:
                with self._lock:
                    job = next(queue, None)
                if job is None:
                    return
                packer.run(job)
                self._commit(job, reader.digests)
                reader.digests = {}
        except _Stopped:
            return
        except BaseException:
            self._stop.set()
            raise

    def _commit(self, job: str, digests: dict[str, str]) -> None:
        """Put a job's bytes on disk, then its record, then hash the chunks that it completed."""
        for fd in self._fds.values():
            os.fdatasync(fd)
        self._journal.append({"job": job, "digests": digests})
        with self._lock:
            self._digests |= digests
            complete = []
            for chunk, remaining in self._chunk_jobs.items():
                if job in remaining:
                    remaining.discard(job)
                    if not remaining:
                        complete.append(chunk)
            for chunk in complete:
                del self._chunk_jobs[chunk]
        for chunk in complete:
            self._hash_chunk(*chunk)

    def _hash_chunk(self, name: str, index: int) -> None:
        start, length = chunk_range(index, self._sizes[name])
        digest = hash_range(self._fds[name], start, length)
        self._journal.append({"file": name, "chunk": index, "xxh3": digest})
        with self._lock:
            self._chunks[name, index] = digest
            self._chunk_jobs.pop((name, index), None)

    def write(self, rank: int, part: str, offset: int, data: "Array") -> None:
        """Sink: write contiguous data into a part's file."""
        name = self._layouts[rank].file_name(part)
        write_all(
            self._fds[name], data.reshape(-1).view("u1").data, len(self._headers[name]) + offset
        )

    def _bytes_of(self, tensor: str) -> int:
        return self._snapshot.tensors[tensor].stored.nbytes

    # ---- after ----

    def finish(self) -> Manifest:
        """Complete the folder: the other ranks' replicated part, small files, the manifest."""
        if self._snapshot.stamps() != self._stamps:
            raise InputError(
                f"{self._snapshot.path} changed while it was read",
                fix="Leave the input alone and build again",
            )
        entries: dict[str, FileEntry] = {}
        for name, size in self._sizes.items():
            chunks = tuple(self._chunks[name, i] for i in range(-(-size // CHUNK_BYTES)))
            entries[name] = FileEntry(size=size, digest=digest_of(chunks), chunks=chunks)
        first = self._layouts[0].file_name("replicated")
        for layout in self._layouts[1:]:
            name = layout.file_name("replicated")
            link_or_copy(self._folder / first, self._folder / name)
            entries[name] = entries[first]
        for name, data in self._snapshot.companion_files.items():
            write_file(self._folder / name, data)
            entries[name] = hash_file(self._folder / name)
        source = {**self._snapshot.companions(), **self._snapshot.identity(self._digests)}
        tools = {name: metadata.version(name) for name in _TOOLS}
        tools["python"] = platform.python_version()
        manifest = make_manifest({**self._sections, "source": source}, entries, tools)
        write_file(self._folder / MANIFEST_NAME, manifest.encoded)
        for fd in self._fds.values():
            os.fsync(fd)
        sync_folder(self._folder)
        return manifest

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class _Stopped(Exception):
    """Raised in a worker when another one has failed or the user has interrupted."""


def safety_margin() -> int:
    """Bytes of disk that a build leaves free: DSV2MK_CACHE_SAFETY_GIB, 1 by default."""
    text = os.environ.get("DSV2MK_CACHE_SAFETY_GIB", "1")
    try:
        margin = float(text) * (1 << 30)
        if margin >= 0:
            return int(margin)
    except (ValueError, OverflowError):
        pass
    raise UsageError("DSV2MK_CACHE_SAFETY_GIB", expected="a number of GiB", found=text)


def disk_bytes(layouts: list[RankLayout]) -> int:
    """Bytes that an artifact takes on disk, the replicated part once."""
    return sum(
        len(encode_header(layout.part(part), layout.metadata(part)))
        + sum(spec.nbytes for spec in layout.part(part))
        for layout in layouts
        for part in _own_parts(layout)
    )


def _own_parts(layout: RankLayout) -> tuple[str, ...]:
    """Parts with a file of their own: only rank 0 writes the replicated one."""
    return PARTS if layout.rank == 0 else tuple(part for part in PARTS if part != "replicated")


def _no_space(folder: Path, missing: int) -> SpaceError:
    free, margin = shutil.disk_usage(folder).free, safety_margin()
    return SpaceError(
        f"no space for the artifact in {folder.parent}",
        expected=f"{size_text(missing + margin)} free "
        f"({size_text(missing)} and a margin of {size_text(margin)})",
        found=size_text(free),
        fix="Free some space or build elsewhere with --out; what is done is kept. "
        "DSV2MK_CACHE_SAFETY_GIB sets the margin",
    )


def _check_place(out: Path, snapshot: Snapshot) -> Path:
    out = out.resolve()
    source = snapshot.path.resolve()
    if out == source or source in out.parents or out in source.parents:
        raise UsageError(f"--out {out} and the snapshot {source} lie in one another")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _existing(
    out: Path, sections: Mapping[str, Any], snapshot: Snapshot, overwrite: bool
) -> Manifest | None:
    """The manifest of `out` if that is what this build would give; None if there is work to do."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if foreign := _foreign(out):
        raise UsageError(
            f"{out} exists and is not an artifact: {foreign}", fix="Name another folder with --out"
        )
    again = "Add --overwrite to build it again; the old one stays until the new one is complete"
    try:
        manifest = Artifact.open(out).manifest
    except ArtifactError as error:
        if overwrite:
            return None
        raise ArtifactError(f"{out} is damaged: {error.what}", fix=again) from None
    old_source, copied = manifest.data["source"], snapshot.companions()
    new = {**sections, "source": {**old_source, **copied}}
    changes = describe_changes({section: manifest.data[section] for section in sections}, new)
    if not changes:
        source = {**copied, **recall_source(snapshot, _hash_input)}
        changes = describe_changes({"source": old_source}, {"source": source})
    if not changes and not (overwrite and _damaged(out)):
        return manifest
    if overwrite:
        for change in changes:
            message(f"changed: {change}")
        return None
    shown = "; ".join(changes[:5]) + ("; …" if len(changes) > 5 else "")
    raise UsageError(f"{out} was built from something else: {shown}", fix=again)


def _foreign(out: Path) -> str | None:
    """Why a folder must not be replaced: it holds what no build has put there."""
    if not out.is_dir():
        return "it is no folder"
    names = sorted(path.name for path in out.iterdir())
    if MANIFEST_NAME not in names:
        return f"it has no {MANIFEST_NAME}"
    unknown = [name for name in names if _ARTIFACT_FILE.fullmatch(name) is None]
    return f"it holds {unknown[0]}" if unknown else None


def _damaged(out: Path) -> bool:
    """Whether an artifact's bytes are not those of its manifest; reads all of them."""
    artifact = Artifact.open(out)
    with progress(artifact.bytes_to_verify(), "verify") as bar:
        return bool(artifact.verify(done=bar.update))


def _hash_input(snapshot: Snapshot) -> dict[str, str]:
    with progress(snapshot.nbytes, "hash input") as bar:
        return snapshot.hash_tensors(bar.update)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Hold the build's private folder. Raises UsageError if another build holds it."""
    fd = lock_folder(folder)
    try:
        yield folder
    finally:
        if not (folder / _JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing was begun, or all is done
        os.close(fd)


def _put_in_place(folder: Path, manifest: Manifest, out: Path) -> None:
    """Rename a complete artifact to its final name; an old one there is exchanged, then removed."""
    write_file(folder / "placing", manifest.digest.encode())
    sync_folder(folder)
    replace_folder(folder / "artifact", out)
