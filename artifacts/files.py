"""Files and folders that are whole or absent: syncs, renames, a lock that dies with its holder."""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from dsv2mk.artifacts.console import message
from dsv2mk.manifests.errors import UsageError

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def lock_folder(folder: Path) -> int:
    """Make a folder and take the lock in it; the lock lasts until the descriptor is closed.

    Raises UsageError if another process holds it.
    """
    while True:
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # removed while pathlib looked what is there
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    raise
            continue
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
                os.close(fd)
                raise
            message(f"no locks on the file system of {folder}: do not run this twice at once")
            return fd
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def temporary(path: Path) -> Path:
    """A name beside a file that nobody else has."""
    return path.parent / f".{path.name.lstrip('.')}.{secrets.token_hex(8)}.tmp"


def place(new: Path, path: Path, *, replace: bool = False) -> bool:
    """Give a whole file its final name, unless another has it and is not to be replaced.

    Whether it has got the name; `new` is gone in any case.
    """
    if not replace:
        try:
            os.link(new, path)
        except FileExistsError:
            new.unlink(missing_ok=True)
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if path.exists():
                new.unlink(missing_ok=True)
                return False
        else:
            new.unlink(missing_ok=True)
            return True
    os.replace(new, path)
    new.unlink(missing_ok=True)  # both were names of one file: then nothing was done
    return True


def write_whole(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a small file so that it is there whole or not at all."""
    new = temporary(path)
    try:
        write_file(new, data)
        place(new, path, replace=replace)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def start_writing(fd: int, start: int, length: int) -> None:
    """Let the system begin to write a part of a file to disk, without waiting: a hint."""
    with suppress(AttributeError):  # only Linux has it
        write = 2  # SYNC_FILE_RANGE_WRITE
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(length), write)


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


def can_link(folder: Path) -> bool:
    """Whether the file system of a folder has hard links."""
    probe, link = folder / ".link", folder / ".linked"
    probe.touch()
    try:
        link.unlink(missing_ok=True)
        os.link(probe, link)
        link.unlink()
    except OSError:
        return False
    finally:
        probe.unlink()
    return True


def replace_folder(new: Path, final: Path, aside: Path) -> None:
    """Give `new` its final name; a folder that has that name takes the place of `new`.

    In one step where the system can exchange two names (renameat2). Where it cannot (NFS, say),
    the old folder is set aside, and the final name is absent for a moment: `recover_folder` puts
    it back if that moment is cut short.
    """
    if not final.exists() or not any(final.iterdir()):
        os.rename(new, final)
    elif not _exchange(new, final):
        os.rename(final, aside)
        os.rename(new, final)
    sync_folder(final.parent)


def recover_folder(final: Path, aside: Path) -> None:
    """Put back what `replace_folder` set aside and did not replace."""
    if aside.exists() and not final.exists():
        os.rename(aside, final)


def _exchange(a: Path, b: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2
    status: int = renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    return status == 0
