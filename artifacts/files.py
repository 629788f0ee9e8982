"""Files and folders that are whole or absent: syncs, renames, a lock that dies with its holder."""

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

from dsv2mk.manifests.errors import UsageError


def lock_folder(folder: Path) -> int:
    """Make a folder and take the lock in it; the lock lasts until the descriptor is closed.

    Raises UsageError if another process holds it.
    """
    while True:
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # whoever held it has just removed the folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(folder / "lock")):
                return fd
        except FileNotFoundError:
            pass  # removed between open and lock: this is no longer the lock
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"another build is writing {folder}", fix="Wait for it, or name another --out"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return fd  # no locks here: see to it that two builds do not share an output
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset of an open file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def link_or_copy(existing: Path, name: Path) -> None:
    """A second name for a file, or a copy where the file system has no hard links."""
    name.unlink(missing_ok=True)
    try:
        os.link(existing, name)
    except OSError:
        shutil.copyfile(existing, name)
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def replace_folder(new: Path, final: Path) -> None:
    """Give `new` its final name; a folder that has that name takes the place of `new`.

    In one step where the system can exchange two names (renameat2). Where it cannot (NFS, say),
    the final name is absent for a moment: `recover_folder` mends what that moment leaves if it is
    cut short.
    """
    if not final.exists() or not any(final.iterdir()):
        os.rename(new, final)
    elif not _exchange(new, final):
        os.rename(final, _aside(final))
        os.rename(new, final)
    sync_folder(final.parent)
    recover_folder(final)


def recover_folder(final: Path) -> None:
    """End a replacement that was cut short: put the old folder back, or remove it if replaced."""
    if final.exists():
        shutil.rmtree(_aside(final), ignore_errors=True)
    elif _aside(final).exists():
        os.rename(_aside(final), final)


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _exchange(a: Path, b: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0)
