"""Give a file the bytes of another without copying them: shared extents, else a second name."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

_FICLONE = 0x40049409

#: Whether a file may get a second name, by what `os.stat` tells of it.
MayLink = Callable[[os.stat_result], bool]


def never(info: os.stat_result) -> bool:
    """No file."""
    return False


def ours(info: os.stat_result) -> bool:
    """A file of this user, who is to know that it is written once."""
    return info.st_uid == os.geteuid()


def frozen(info: os.stat_result) -> bool:
    """A file of this user that nobody may write to."""
    return ours(info) and not info.st_mode & 0o222


def share(source: int, path: Path, may_link: MayLink) -> bool:
    """Make a new file at `path` of what is open as `source`; whether the file system could.

    Only a file that all may read who might read a new one gets a second name.
    """
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return True
    except OSError:
        readers = os.fstat(target).st_mode & 0o444
    finally:
        os.close(target)
    path.unlink()
    info = os.fstat(source)
    if not may_link(info) or readers & ~info.st_mode:
        return False
    try:
        # What is open, whatever its name leads to now.
        os.link(f"/proc/self/fd/{source}", path, src_dir_fd=source)
    except OSError:
        return False
    return True


def same(source: int, path: Path) -> bool:
    """Whether `path` is a name of what is open as `source`."""
    try:
        return os.path.samestat(os.fstat(source), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
