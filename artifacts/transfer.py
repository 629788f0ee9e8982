"""Copy files chunk by chunk: every chunk is checked, and an interrupted copy is taken up again.

A file is written under a private name, its `part`, and gets its final name when it is whole and on
disk. Chunks that the part holds already are kept if their hashes are right. Where the file system
can share a file's bytes nothing is copied, only read back and hashed: see share.py.

Several processes may write one `shared` part: nothing but bytes that have been checked is written
to it, so that all write the same. So it is filled from memory: a copy within the kernel (as other
parts are filled) can be checked only when another may have given the part its name already.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dsv2mk.artifacts.console import size_text
from dsv2mk.artifacts.files import start_writing, temporary
from dsv2mk.artifacts.hashing import chunk_range, hash_range
from dsv2mk.artifacts.share import MayLink, ours, same, share
from dsv2mk.artifacts.store import bad_chunk
from dsv2mk.manifests.errors import SpaceError, UserError
from dsv2mk.manifests.manifest import FileEntry

THREADS = max(2, min(8, os.cpu_count() or 2))

#: Bytes read and hashed at a time: small enough to be hashed out of the cache.
_PIECE = 1 << 20
#: Bytes written at a time: the page cache takes large writes slowly.
_WRITE = 1 << 16
_FULL = (errno.ENOSPC, errno.EDQUOT)

Done = Callable[[int], object]


@dataclass(kw_only=True)
class Copy:
    """A file to be copied."""

    entry: FileEntry
    source: Callable[[], int]  # opens it for reading
    part: Path
    shared: bool  # others may write to the part
    may_link: MayLink  # whether it may become a second name of the source
    refuse: Callable[[str], UserError]  # the error for a source with this problem
    finish: Callable[[Path, int], object]  # the part is whole and on disk: its path, a descriptor
    how: str = "copied"  # "cloned", "linked": by `_share`
    own: bool = False  # the part has a name that nobody else takes up


@dataclass(kw_only=True)
class Copied:
    """Bytes of a transfer."""

    written: int = 0
    kept: int = 0  # were there: parts of an earlier try
    shared: int = 0  # take no space: the file system has them once

    def __iadd__(self, other: "Copied") -> "Copied":
        self.written += other.written
        self.kept += other.kept
        self.shared += other.shared
        return self


def transfer(copies: list[Copy], where: Path, done: Done) -> Copied:
    """Copy files into parts below `where`; `done` is told the bytes of each finished chunk.

    Raises SpaceError if the disk is or would be full, and what `refuse` gives for a source that
    cannot be read or is not what its entry says. What is done is kept in the parts.
    """
    total, lock, stop = Copied(), threading.Lock(), threading.Event()
    opened: list[_File] = []
    chunks = _chunks(copies, opened)

    def work() -> None:
        buffer = memoryview(bytearray(_PIECE))
        while not stop.is_set():
            with lock:
                file, index = next(chunks, (None, 0))
            if file is None:
                return
            kept = file.copy_chunk(index, buffer)
            length = chunk_range(index, file.copy.entry.size)[1]
            with lock:
                if not kept:
                    total.written += length
                elif file.copy.how == "copied":
                    total.kept += length
                else:
                    total.shared += length
                done(length)
                file.left -= 1
                whole = file.left == 0
            if whole:
                file.complete()

    with space_errors(where, lambda: sum(map(_missing, copies))):
        try:
            missing = sum(_missing(copy) for copy in copies if not _share(copy))
            if missing > free_bytes(where):
                raise no_space(where, missing)
            in_threads(work, sum(len(copy.entry.chunks) for copy in copies), stop)
        finally:
            for file in opened:
                file.close()
            for copy in copies:
                if copy.own:
                    with suppress(OSError):
                        copy.part.unlink()  # it was not finished
    return total


def check_files(
    files: Mapping[str, tuple[Callable[[], int], FileEntry]],
    done: Done = lambda count: None,
    indices: Callable[[FileEntry], Iterable[int] | None] = lambda entry: None,
) -> dict[str, str]:
    """Hash files, each opened by its function; what is wrong with those that are not right."""
    problems: dict[str, str] = {}
    lock, stop, queue = threading.Lock(), threading.Event(), iter(sorted(files.items()))

    def counted(count: int) -> None:
        with lock:
            done(count)

    def work() -> None:
        while not stop.is_set():
            with lock:
                key, (opener, entry) = next(queue, ("", (None, None)))
            if opener is None or entry is None:
                return
            try:
                with open(opener(), "rb") as file:
                    problem = bad_chunk(file.fileno(), entry, counted, indices(entry))
            except FileNotFoundError:
                problem = "is missing"
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            if problem is not None:
                with lock:
                    problems[key] = problem

    in_threads(work, len(files), stop)
    return problems


def in_threads(work: Callable[[], None], count: int, stop: threading.Event) -> None:
    """Run a function, which ends when `stop` is set, in several threads, for `count` things to do.

    The first error, or Ctrl-C, sets `stop` and is raised when all threads have ended: files must
    not be closed under them.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run) for _ in range(max(1, min(THREADS, count)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # whoever has not begun will do nothing
        while alive := [thread for thread in threads if thread.is_alive()]:
            with suppress(KeyboardInterrupt):
                alive[0].join()
    if errors:
        raise errors[0]


# ---- one file ----


@dataclass(kw_only=True)
class _File:
    """A file that is being copied."""

    copy: Copy
    source: int
    target: int
    there: int  # bytes that the part held at the start
    left: int  # chunks to do
    by_kernel: bool = True  # copy_file_range works
    changed: int = 0  # the target's st_mtime_ns when it was opened

    def copy_chunk(self, index: int, buffer: memoryview) -> bool:
        """Put a chunk into the part; whether it was there already."""
        expected = self.copy.entry.chunks[index]
        start, length = chunk_range(index, self.copy.entry.size)
        if start + length <= self.there:
            found = self._found(index)
            if found == expected:
                return True
            if self.copy.how == "linked":
                raise self.copy.refuse(_not(index, start, expected, found))
        if self.copy.shared or not self._copy_by_kernel(buffer, start, length, expected):
            self._copy_checked(buffer, index, expected)
        start_writing(self.target, start, length)
        return False

    def _copy_checked(self, buffer: memoryview, index: int, expected: str) -> None:
        """Read a chunk twice: to check it, and to write its pieces (from the processor's cache)."""
        start, length = chunk_range(index, self.copy.entry.size)
        state, digests = xxhash.xxh3_128(), []
        for position in range(start, start + length, _PIECE):
            piece = self._read(buffer, position, start + length)
            state.update(piece)
            digests.append(xxhash.xxh3_128_digest(piece))
        if (found := state.hexdigest()) != expected:
            raise self.copy.refuse(_not(index, start, expected, found))
        for number, digest in enumerate(digests):
            position = start + number * _PIECE
            piece = self._read(buffer, position, start + length)
            if xxhash.xxh3_128_digest(piece) != digest:
                raise self.copy.refuse(
                    f"chunk {index} (from byte {start}): it changes while it is read"
                )
            while piece:
                count = os.pwrite(self.target, piece[:_WRITE], position)
                piece, position = piece[count:], position + count

    def _read(self, buffer: memoryview, position: int, end: int) -> memoryview:
        """The next piece of the source."""
        piece, count = buffer[: end - position], 0
        while count < len(piece):
            try:
                more = os.preadv(self.source, [piece[count:]], position + count)
            except OSError as error:
                raise self.copy.refuse(f"cannot be read: {error.strerror}") from None
            if more == 0:
                raise self.copy.refuse(f"the file ends at byte {position + count}")
            count += more
        return piece

    def _copy_by_kernel(self, buffer: memoryview, start: int, length: int, expected: str) -> bool:
        """Copy within the kernel; whether what has come, read back piece by piece, is right."""
        state, position, end = xxhash.xxh3_128(), start, start + length
        while self.by_kernel and position < end:
            try:
                size = min(_PIECE, end - position)
                count = os.copy_file_range(self.source, self.target, size, position, position)
            except OSError as error:
                if error.errno in _FULL:
                    raise
                count = 0
            count = count and os.preadv(self.target, [buffer[:count]], position)
            if count == 0:
                self.by_kernel = False
            state.update(buffer[:count])
            position += count
        return position == end and state.hexdigest() == expected

    def complete(self) -> None:
        """All chunks are right: wait until they are on disk, and hand the part over."""
        if self.copy.how == "linked":
            self._check_again()
        os.fsync(self.target)
        self.copy.finish(self.copy.part, self.target)
        self.close()

    def _check_again(self) -> None:
        """Hash a file anew that somebody has written to, or touched, since it was opened.

        One that is touched again and again is right each time: by others that publish it too.
        """
        entry = self.copy.entry
        for _ in range(3):
            info = os.fstat(self.target)
            if info.st_size != entry.size:
                raise self.copy.refuse(f"expected {entry.size} bytes, found {info.st_size}")
            if info.st_mtime_ns == self.changed:
                return
            self.changed = info.st_mtime_ns
            for index, expected in enumerate(entry.chunks):
                if (found := self._found(index)) != expected:
                    start, _ = chunk_range(index, entry.size)
                    raise self.copy.refuse(_not(index, start, expected, found))

    def _found(self, index: int) -> str:
        """The hash of a chunk of the target."""
        try:
            return hash_range(self.target, *chunk_range(index, self.copy.entry.size))
        except EOFError:
            return "the end of the file"

    def close(self) -> None:
        """Close both files; once."""
        for fd in (self.source, self.target):
            if fd >= 0:
                os.close(fd)
        self.source = self.target = -1


def _not(index: int, start: int, expected: str, found: str) -> str:
    return f"chunk {index} (from byte {start}): expected {expected}, found {found}"


def _chunks(copies: list[Copy], opened: list[_File]) -> Iterator[tuple[_File, int]]:
    """Every chunk of every file; files are opened when it is their turn."""
    for copy in copies:
        file = _open(copy)
        opened.append(file)
        if not copy.entry.chunks:
            file.complete()
        for index in range(len(copy.entry.chunks)):
            yield file, index


def _open(copy: Copy) -> _File:
    source = _open_source(copy)
    try:
        target = _open_part(copy)
        there = os.fstat(target).st_size
        if there > copy.entry.size:
            os.ftruncate(target, copy.entry.size)
        if copy.shared:
            os.utime(target)  # a collection takes it for one in use
        changed = os.fstat(target).st_mtime_ns
    except BaseException:
        os.close(source)
        raise
    return _File(
        copy=copy,
        source=source,
        target=target,
        there=there,
        left=len(copy.entry.chunks),
        changed=changed,
    )


def _open_source(copy: Copy) -> int:
    try:
        source = copy.source()
    except OSError as error:
        raise copy.refuse(f"cannot be read: {error.strerror}") from None
    size = os.fstat(source).st_size
    if size != copy.entry.size:
        os.close(source)
        raise copy.refuse(f"expected {copy.entry.size} bytes, found {size}")
    return source


def _open_part(copy: Copy) -> int:
    """Open or make the part; one that is not ours is left to its owner."""
    if copy.how == "linked":
        try:
            return os.open(copy.part, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            copy.how = "copied"  # a collection took it for one that was left
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(2):
        with suppress(FileExistsError):
            return os.open(copy.part, flags | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            target = os.open(copy.part, flags)
            info = os.fstat(target)
            free = info.st_nlink == 1 and (ours(info) or not copy.shared)
            if stat.S_ISREG(info.st_mode) and free:
                return target
            os.close(target)  # another's, or another name of a file that is in use somewhere
        if copy.shared:
            copy.part, copy.own = temporary(copy.part), True
        else:
            copy.part.unlink(missing_ok=True)
    return os.open(copy.part, flags | os.O_CREAT | os.O_EXCL, 0o666)


def _share(copy: Copy) -> bool:
    """Let the part share the source's bytes, if the file system can.

    Nothing of it is checked yet, so others must not take it for a part.
    """
    if copy.entry.size == 0:
        return False
    source, part = _open_source(copy), temporary(copy.part)
    try:
        if not share(source, part, copy.may_link):
            return False
        how = "linked" if same(source, part) else "cloned"
        if copy.shared:
            try:
                os.utime(part)
            except FileNotFoundError:
                return False  # it was as old as the source: a collection took it for one left
            copy.part, copy.own = part, True
        else:
            os.rename(part, copy.part)
            part.unlink(missing_ok=True)  # both were names of one file: then nothing was done
        copy.how = how
        return True
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(source)


def _missing(copy: Copy) -> int:
    """Bytes of disk that a file takes beyond what its part has."""
    try:
        info = copy.part.lstat()
    except OSError:
        return copy.entry.size
    there = info.st_blocks * 512 if ours(info) or not copy.shared else 0
    return max(0, copy.entry.size - there)


# ---- space ----


def free_bytes(folder: Path) -> int:
    """Bytes that a user may still write to a folder's file system."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


def no_space(where: Path, needed: int) -> SpaceError:
    """The error for a file system on which there is no room for this many bytes."""
    return SpaceError(
        f"no space in {where}",
        expected=f"{size_text(needed)} free",
        found=f"{size_text(free_bytes(where))} free",
        fix="What is done is kept: free some space and run the same command again",
    )


@contextmanager
def space_errors(where: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn the system's error for a full file system into a SpaceError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise no_space(where, needed()) from None
