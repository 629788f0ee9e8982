"""The work of one build: its jobs on several threads, its journal, its hashes.

Everything is written in a private folder beside the output, `.<name>.partial`:

    lock            held (flock) by the build that works here
    journal.jsonl   what is done: see artifacts/journal.py
    artifact/       the files, at their final size from the start
    placing         from just before artifact/ gets its final name: its inode
    old             an artifact that artifact/ is about to replace, where names cannot be exchanged

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
from typing import Any

from dsv2mk.artifacts.console import message, progress, size_text
from dsv2mk.artifacts.files import can_link, link_or_copy, sync_folder, write_file
from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_file, hash_range
from dsv2mk.artifacts.journal import Journal
from dsv2mk.artifacts.shards import ShardFile, ShardWriter, shard_file
from dsv2mk.manifests.errors import SpaceError, UsageError
from dsv2mk.manifests.layout import PARTS, RankLayout
from dsv2mk.manifests.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    change_text,
    changes,
    make_manifest,
)
from dsv2mk.pipeline.jobs import job_extents, jobs
from dsv2mk.pipeline.reader import BadInput, Reader
from dsv2mk.pipeline.snapshot import Snapshot

JOURNAL = "journal.jsonl"
PLACING = "placing"

_TOOLS = ("dsv2mk", "numba", "numpy", "torch", "xxhash")


class Work:
    """One build in its private folder. Raises SpaceError if the disk would be full."""

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
        self._todo = jobs(snapshot.geometry)
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._stop = threading.Event()
        self._journal = Journal(folder / JOURNAL)
        try:
            self._take_up(folder)
            missing = bytes_missing(folder, layouts)
            if missing + safety_margin() > shutil.disk_usage(folder).free:
                raise no_space(folder, missing)
            self._folder.mkdir(exist_ok=True)
            self._shards = ShardWriter(self._folder, self._files.values())
        except BaseException:
            self._journal.close()
            if self._todo == jobs(snapshot.geometry):
                (folder / JOURNAL).unlink()  # nothing was done: nothing is to be kept
            raise

    # ---- before ----

    def _take_up(self, folder: Path) -> None:
        """Go on from what the journal says, or start over with nothing in artifact/."""
        identity = {**self._sections, "stamps": self._snapshot.stamps}
        found = self._journal.records[0] if self._journal.records else None
        if found is None or not self._journal.records[1:]:
            why = None  # nothing was done
        elif found != identity:
            why = change_text(changes(found, identity)[0])
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
        self._todo = [job for job in jobs(self._snapshot.geometry) if job not in done]
        self._chunk_jobs = {
            chunk: remaining - done
            for chunk, remaining in self._plan_chunks().items()
            if chunk not in self._chunks
        }

    def _plan_chunks(self) -> dict[tuple[str, int], set[str]]:
        """For each chunk of each file, the jobs that write into it."""
        chunk_jobs: dict[tuple[str, int], set[str]] = {}
        for name, file in self._files.items():
            for index in range(-(-file.size // CHUNK_BYTES)):
                chunk_jobs[name, index] = set()
            for spec in file.layout.part(file.part):
                for job, start, end in job_extents(file.layout, spec):
                    first, last = file.data_start + start, file.data_start + end - 1
                    for index in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1):
                        chunk_jobs[name, index].add(job)
        return chunk_jobs

    # ---- jobs ----

    def run(self, workers: int, device: str) -> None:
        """Run the jobs that are left. Stops all workers at the first error, or at Ctrl-C.

        Raises BadInput for values that cannot be stored, InputError if a file cannot be read, and
        OSError if one cannot be written.
        """
        done = sum(self._snapshot.tensors[name].stored.nbytes for name in self._digests)
        with progress(self._snapshot.nbytes, "build", done) as bar:
            workers = max(1, min(workers, len(self._todo)))
            pool = ThreadPoolExecutor(workers)
            queue = iter(self._todo)
            loops = [pool.submit(self._worker, queue, bar, device) for _ in range(workers)]
            try:
                for loop in wait(loops, return_when=FIRST_EXCEPTION).done:
                    loop.result()
            finally:
                self._stop.set()
                _shut_down(pool)
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
        packer = Packer(self._snapshot, self._layouts, reader, self._shards, device)
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
        """Put a job's bytes on disk, then its record, then hash the chunks that it completed.

        One at a time, and none after one that failed: the system reports a failed write once, and
        another worker's sync would pass.
        """
        with self._commit_lock:
            if self._stop.is_set():
                raise _Stopped
            try:
                self._shards.sync()
                self._journal.append({"job": job, "digests": digests})
            except BaseException:
                self._stop.set()
                raise
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
        digest = hash_range(self._shards.fileno(name), start, length)
        self._journal.append({"file": name, "chunk": index, "xxh3": digest})
        with self._lock:
            self._chunks[name, index] = digest
            self._chunk_jobs.pop((name, index), None)

    # ---- after ----

    def finish(self) -> Manifest:
        """Complete the folder: the other ranks' replicated part, small files, the manifest."""
        if self._snapshot.has_changed():
            raise BadInput(
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
        self._shards.sync()
        sync_folder(self._folder)
        return manifest

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        self._shards.close()


class _Stopped(Exception):
    """Raised in a worker when another one has failed or the user has interrupted."""


def _shut_down(pool: ThreadPoolExecutor) -> None:
    """Wait for the workers, whatever happens: files must not be closed under them."""
    while True:
        try:
            pool.shutdown()
            return
        except KeyboardInterrupt:
            continue


def inode(folder: Path) -> str:
    """What tells a folder from another that has taken its name."""
    info = folder.stat()
    return f"{info.st_dev} {info.st_ino}"


def safety_margin() -> int:
    """Bytes of disk that a build leaves free: DSV2MK_CACHE_SAFETY_GIB, 1 by default.

    Raises UsageError for what is no number.
    """
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
    if not can_link(folder):
        missing += (len(layouts) - 1) * shard_file(layouts[0], "replicated").size
    return missing


def no_space(folder: Path, missing: int, kept: bool = False) -> SpaceError:
    """The error for a build's private folder whose disk lacks `missing` bytes and the margin."""
    what_then = "What is done is kept: free some space and run the same command again"
    free, margin = shutil.disk_usage(folder).free, safety_margin()
    return SpaceError(
        f"no space for the artifact in {folder.parent}",
        expected=f"{size_text(missing + margin)} free "
        f"({size_text(missing)} and a margin of {size_text(margin)})",
        found=size_text(free),
        fix=f"{what_then if kept else 'Free some space, or build elsewhere with --out'}. "
        "DSV2MK_CACHE_SAFETY_GIB sets the margin",
    )
