"""Give a file the bytes of another without copying them: shared extents, else a second name."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

_FICLONE = 0x40049409

#: Whether a file may get a second name, by what `os.stat` tells of it.
MayLink = Callable[[os.stat_result], bool]


def never(info: os.stat_result) -> bool:
    """No file."""
    return False


def ours(info: os.stat_result) -> bool:
    """A file of this user."""
    return info.st_uid == os.geteuid()


def frozen(info: os.stat_result) -> bool:
    """A file of this user that nobody may write to."""
    return ours(info) and not info.st_mode & 0o222


def freeze(fd: int) -> None:
    """Take from all the right to write to a file."""
    info = os.fstat(fd)
    if info.st_mode & 0o222:
        os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o555)


def share(source: int, path: Path, may_link: MayLink) -> bool:
    """Make a new file at `path` of what is open as `source`; whether the file system could.

    A second name is only given to a file that all may read who might read a new one, and the file
    is read-only then.
    """
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return True
    except OSError:
        new, acl = os.fstat(target), _acl(target)
    finally:
        os.close(target)
    path.unlink(missing_ok=True)
    info = os.fstat(source)
    readers = new.st_mode & 0o444
    others = readers & stat.S_IRGRP and new.st_gid != info.st_gid
    if not may_link(info) or readers & ~info.st_mode or others or acl != _acl(source):
        return False
    try:
        # What is open, whatever its name leads to now.
        os.link(f"/proc/self/fd/{source}", path, src_dir_fd=source)
        freeze(source)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _acl(fd: int) -> bytes | None:
    try:
        return os.getxattr(fd, "system.posix_acl_access")
    except (OSError, AttributeError):  # has none; there are none here
        return None


def same(source: int, path: Path) -> bool:
    """Whether `path` is a name of what is open as `source`."""
    try:
        return os.path.samestat(os.fstat(source), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
