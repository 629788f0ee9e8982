"""The work of one build: its jobs on several threads, its journal, its hashes.

Everything is written in a private folder beside the output, `.<name>.partial`:

    lock            held (flock) by the build that works here
    journal.jsonl   what is done: see artifacts/journal.py
    artifact/       the files, at their final size from the start
    placing         from just before artifact/ gets its final name: its inode

Threads are enough: file access, hashing and quantising all run without the interpreter's lock.
"""

import os
import platform
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv2mk.artifacts.console import message, progress, size_text
from dsv2mk.artifacts.container import ShardFile, shard_file
from dsv2mk.artifacts.files import link_or_copy, sync_folder, write_all, write_file
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_file, hash_range
from dsv2mk.artifacts.journal import Journal
from dsv2mk.manifests.errors import InputError, SpaceError, UsageError
from dsv2mk.manifests.layout import PARTS, RankLayout
from dsv2mk.manifests.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    describe_changes,
    make_manifest,
)
from dsv2mk.pipeline.jobs import job_extents, jobs
from dsv2mk.pipeline.snapshot import Reader, Snapshot

if TYPE_CHECKING:
    from dsv2mk.pipeline.quantise import Array

JOURNAL = "journal.jsonl"
PLACING = "placing"

_TOOLS = ("dsv2mk", "numba", "numpy", "torch", "xxhash")


class Work:
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
        self._files = {file.name: file for file in own_files(layouts)}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._fds: dict[str, int] = {}
        self._journal = Journal(folder / JOURNAL)
        try:
            self._take_up(folder)
            self._check_space()
            self._open_files()
        except BaseException:
            self.close()
            raise

    # ---- before ----

    def _take_up(self, folder: Path) -> None:
        """Go on from what the journal says, or start over with nothing in artifact/."""
        identity = {**self._sections, "stamps": self._snapshot.stamps}
        found = self._journal.records[0] if self._journal.records else None
        if found is None:
            why = None
        elif found != identity:
            why = describe_changes(found, identity)[0]
        elif not self._is_ours(folder / PLACING):
            why = "its files are not those of its journal"
        else:
            (folder / PLACING).unlink(missing_ok=True)
            self._replay(self._journal.records[1:])
            return
        if why is not None:
            message(f"started over, the unfinished build does not fit: {why}")
        shutil.rmtree(self._folder, ignore_errors=True)
        (folder / PLACING).unlink(missing_ok=True)
        self._journal.restart(identity)
        self._replay([])

    def _is_ours(self, placing: Path) -> bool:
        """Whether artifact/ holds what the journal says, and not an old artifact exchanged."""
        try:
            for name, file in self._files.items():
                if (self._folder / name).stat().st_size != file.size:
                    return False
            return not placing.exists() or placing.read_text() == inode(self._folder)
        except OSError:
            return False

    def _replay(self, records: list[dict[str, Any]]) -> None:
        """Take over what is done."""
        self._todo, self._chunk_jobs = self._plan_jobs()
        self._digests: dict[str, str] = {}
        self._chunks: dict[tuple[str, int], str] = {}
        done: set[str] = set()
        for record in records:
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

    def _plan_jobs(self) -> tuple[list[str], dict[tuple[str, int], set[str]]]:
        """All jobs, and for each chunk of each file the jobs that write into it."""
        chunk_jobs: dict[tuple[str, int], set[str]] = {}
        for name, file in self._files.items():
            for index in range(-(-file.size // CHUNK_BYTES)):
                chunk_jobs[name, index] = set()
            for spec in file.layout.part(file.part):
                for job, start, end in job_extents(file.layout, spec):
                    first, last = file.data_start + start, file.data_start + end - 1
                    for index in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1):
                        chunk_jobs[name, index].add(job)
        return jobs(self._snapshot.geometry), chunk_jobs

    def _check_space(self) -> None:
        missing = bytes_missing(self._folder.parent, self._layouts)
        if missing + safety_margin() > shutil.disk_usage(self._folder.parent).free:
            raise no_space(self._folder.parent, missing)

    def _open_files(self) -> None:
        self._folder.mkdir(exist_ok=True)
        for name, file in self._files.items():
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
            self._fds[name] = fd
            os.ftruncate(fd, file.size)
            write_all(fd, file.header, 0)

    # ---- jobs ----

    def run(self, workers: int, device: str) -> None:
        """Run the jobs that are left. Stops all workers at the first error, or at Ctrl-C."""
        total = self._snapshot.nbytes
        with progress(total, "build") as bar, ThreadPoolExecutor(workers) as pool:
            if self._todo:
                bar.update(
                    sum(self._snapshot.tensors[name].stored.nbytes for name in self._digests)
                )
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
        start, length = chunk_range(index, self._files[name].size)
        digest = hash_range(self._fds[name], start, length)
        self._journal.append({"file": name, "chunk": index, "xxh3": digest})
        with self._lock:
            self._chunks[name, index] = digest
            self._chunk_jobs.pop((name, index), None)

    def write(self, rank: int, part: str, offset: int, data: "Array") -> None:
        """Sink: write contiguous data into a part's file."""
        name = self._layouts[rank].file_name(part)
        start = self._files[name].data_start + offset
        write_all(self._fds[name], data.reshape(-1).view("u1").data, start)

    # ---- after ----

    def finish(self) -> Manifest:
        """Complete the folder: the other ranks' replicated part, small files, the manifest."""
        if self._snapshot.has_changed():
            raise InputError(
                f"{self._snapshot.path} changed while it was read",
                fix="Leave the input alone and build again",
            )
        entries: dict[str, FileEntry] = {}
        for name, file in self._files.items():
            chunks = tuple(self._chunks[name, i] for i in range(-(-file.size // CHUNK_BYTES)))
            entries[name] = FileEntry(size=file.size, digest=digest_of(chunks), chunks=chunks)
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


def inode(folder: Path) -> str:
    """What tells a folder from another that has taken its name."""
    info = folder.stat()
    return f"{info.st_dev} {info.st_ino}"


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


def own_files(layouts: list[RankLayout]) -> list[ShardFile]:
    """The files that a build writes: of the replicated part only rank 0's, which all share."""
    return [
        shard_file(layout, part)
        for layout in layouts
        for part in PARTS
        if part != "replicated" or layout.rank == 0
    ]


def bytes_missing(folder: Path, layouts: list[RankLayout]) -> int:
    """Bytes that the finished artifact takes on disk beyond what a build's folder holds."""
    missing = 0
    for file in own_files(layouts):
        try:
            there = (folder / "artifact" / file.name).stat().st_blocks * 512
        except OSError:
            there = 0
        missing += max(0, file.size - there)
    return missing


def no_space(folder: Path, missing: int) -> SpaceError:
    """The error for a build's private folder whose disk lacks `missing` bytes and the margin."""
    free, margin = shutil.disk_usage(folder).free, safety_margin()
    return SpaceError(
        f"no space for the artifact in {folder.parent}",
        expected=f"{size_text(missing + margin)} free "
        f"({size_text(missing)} and a margin of {size_text(margin)})",
        found=size_text(free),
        fix="Free some space or build elsewhere with --out; what is done is kept. "
        "DSV2MK_CACHE_SAFETY_GIB sets the margin",
    )
