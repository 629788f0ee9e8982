"""Stores that share files with folders: what their tests have in common."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from stores import (
    chunk_everywhere,
    manifest_again,
    put,
)

from dsv2mk.artifacts import collect, pull, share, signing, store_commands, transfer  # noqa: F401
from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.store import Store
from dsv2mk.artifacts.transfer import Copied

SHARD = "rank-01.ffn.safetensors"
OTHER = 12345  # a user, and a group
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")


def make_source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose files have several chunks; equal ones are one, as in a build."""
    old = read_manifest(artifact)
    for path in artifact.iterdir():
        path.chmod(0o644)
    (artifact / "rank-01.replicated.safetensors").unlink()
    os.link(*(artifact / f"rank-0{rank}.replicated.safetensors" for rank in (0, 1)))
    chunk_everywhere(monkeypatch)
    manifest_again(artifact, old)
    return artifact


def publish(folder: Path, store: Path, **options: Any) -> Copied:
    return put(folder, store, **{"links": True, **options}).copied


def get(store: Path, dest: Path, **options: Any) -> Copied:
    opened = Store.open(store)
    return pull.pull(opened, opened.resolve("v1"), dest, **options).copied


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def objects(store: Path) -> set[int]:
    return inodes(store / "objects")


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def beside(folder: Path) -> int:
    """Bytes of what is always copied: what the manifest does not name."""
    return (folder / "manifest.json").stat().st_size


def dated(path: Path) -> tuple[int, ...]:
    """What a file is, but for when it was read."""
    info = path.stat()
    return info.st_ino, info.st_mode, info.st_nlink, info.st_mtime_ns, info.st_ctime_ns


def flip(path: Path, at: int) -> None:
    """Change a byte in place, as root may also of a file that is read-only."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def across_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.link` fails for what is linked by its descriptor: the names are on two file systems."""
    real = os.link

    def link(old: Any, new: Any, **options: Any) -> None:
        if str(old).startswith("/proc/"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(old, new, **options)

    monkeypatch.setattr(os, "link", link)
