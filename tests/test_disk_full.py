"""Disks that fill up or fail under a build: nothing is lost, and nothing bad is kept."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import JOBS, PARTIAL, json_build, recorded_jobs
from helpers import SINGLE, Call, names, read_bytes, slow


class FullDisk:
    """From the chosen write on, there is no space."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int) -> None:
        self.room = -1  # writes that still succeed; -1: any number
        self.calls = 0
        for name in ("pwrite", "write"):
            patch.setattr(os, name, self._hook(getattr(os, name), error))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)

    def _hook(self, real: Callable[..., int], error: int) -> Callable[..., int]:
        def hooked(fd: int, data: Any, *rest: int) -> int:
            self.calls += 1
            if 0 <= self.room < self.calls:
                raise OSError(error, os.strerror(error))
            return real(fd, data, *rest)

        return hooked


@pytest.mark.parametrize(
    ("overwrite", "error", "step"),
    [
        (False, errno.ENOSPC, 1),
        slow(True, errno.ENOSPC, 1),
        (False, errno.EDQUOT, 9),
        (True, errno.EDQUOT, 9),
    ],
)
def test_disk_full_at_any_write(
    few: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
    error: int,
    step: int,
) -> None:
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out) + (["--overwrite"] if overwrite else [])
    expected, old = read_bytes(few / "artifact"), read_bytes(few / "old")
    disk = FullDisk(monkeypatch, error)
    assert dsv2mk(*args[: len(args) - overwrite]).code == 0
    wrong: list[str] = []
    for room in range(0, disk.calls, step):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        if overwrite:
            shutil.copytree(few / "old", out)
        disk.calls, disk.room = 0, room
        stopped = dsv2mk(*args)
        disk.room = -1
        failed = stopped.json["error"]
        done = recorded_jobs(out.parent / PARTIAL)
        kept = read_bytes(out) == old if overwrite else not out.exists()
        again = dsv2mk(*args)
        checks = {
            f"exit {stopped.code}": stopped.code == failed["exit_code"] == 13,
            f"no path in {failed}": str(out.parent) in failed["message"],
            f"no need in {failed}": re.search(r"\d [KM]?B free \(", failed.get("expected", "")),
            f"no free in {failed}": re.search(r"\d [KMGT]?B$", failed.get("found", "")),
            "old artifact harmed": kept,
            f"again: {again}": again.code == 0 and again.json["resumed_jobs"] == len(done),
            "another result": again.code == 0 and read_bytes(out) == expected,
            f"left {names(out.parent)}": names(out.parent) == {"artifact"},
        }
        wrong += [f"{room}: {what}" for what, right in checks.items() if not right]
    assert wrong == []


def test_no_room_for_the_margin_is_said_before_any_work(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    total = shutil.disk_usage(few).total
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", str(total / 2**30 + 1))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("it works"))
    done = dsv2mk(*args)
    failed = done.json["error"]
    assert done.code == 13
    assert failed["kind"] == "no space"
    assert str(out.parent) in failed["message"]
    assert "DSV2MK_CACHE_SAFETY_GIB" in failed["fix"]
    assert not out.exists()
    monkeypatch.undo()


@pytest.mark.slow
def test_a_small_disk_that_fills_up(
    few: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one where this process may mount; else its kernel is played by a hook."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    real = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0")
    filler, calls, pwrite = disk / "filler", 0, os.pwrite

    def filling(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 30 and real:  # somebody else writes to the same disk
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if calls >= 30 and not real:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    try:
        out = disk / "artifact"
        args = json_build(few / "snapshot", out)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", filling)
            stopped = dsv2mk(*args)
        failed = stopped.json["error"]
        assert stopped.code == 13
        assert str(disk) in failed["message"]
        assert not real or failed["found"] == "0 B"
        done = recorded_jobs(disk / PARTIAL)
        assert done
        if real:
            assert dsv2mk(*args).code == 13  # still full
            filler.unlink()
        again = dsv2mk(*args)
        assert (again.code, again.json["resumed_jobs"]) == (0, len(done))
        assert read_bytes(out) == read_bytes(few / "artifact")
    finally:
        if real:
            subprocess.run(["umount", str(disk)], check=True)


# ---- disks that fail ----


class FailedSync:
    """One sync of a shard fails, and what was not synced there is lost; the next one succeeds.

    So the kernel does it: it reports a write that failed to one caller only.
    """

    def __init__(self, patch: pytest.MonkeyPatch, partial: Path, error: int, fail_at: int) -> None:
        self.recorded: list[str] | None = None  # jobs, as it failed
        self._calls = 0
        self._unsynced: dict[int, list[tuple[int, int]]] = {}
        lock, pwrite = threading.Lock(), os.pwrite

        def write(fd: int, data: Any, offset: int) -> int:
            with lock:
                self._unsynced.setdefault(fd, []).append((offset, len(data)))
                return pwrite(fd, data, offset)

        def sync(fd: int) -> None:
            if not os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
                return  # the journal
            with lock:
                self._calls += 1
                lost = self._unsynced.pop(fd, [])
                if self._calls != fail_at:
                    return
                for offset, length in lost:
                    pwrite(fd, b"\xa5" * length, offset)
                self.recorded = recorded_jobs(partial)
            time.sleep(0.3)  # the other workers come to their syncs meanwhile
            raise OSError(error, os.strerror(error))

        patch.setattr(os, "pwrite", write)
        patch.setattr(os, "fdatasync", sync)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fail_at", [1, 5, 8, 15])  # 5 files are synced after each of 4 jobs
def test_no_job_counts_after_a_sync_that_failed(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, error: int, fail_at: int
) -> None:
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out, workers=4)
    with monkeypatch.context() as patch:
        disk = FailedSync(patch, out.parent / PARTIAL, error, fail_at)
        stopped = dsv2mk(*args)
    assert stopped.code == stopped.json["error"]["exit_code"] == (13 if error != errno.EIO else 2)
    assert disk.recorded is not None
    assert len(disk.recorded) < JOBS
    assert recorded_jobs(out.parent / PARTIAL) == disk.recorded
    assert not out.exists()
    again = dsv2mk(*args)
    assert (again.code, again.json["resumed_jobs"]) == (0, len(disk.recorded))
    assert read_bytes(out) == read_bytes(few / "artifact")


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("share", [0.5, 1])
def test_a_read_that_fails_once_loses_no_work(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, error: int, share: float
) -> None:
    """Unlike a bad value, which no other try can use."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    size = (few / "snapshot" / SINGLE).stat().st_size
    calls, fail_at, preadv = 0, 0, os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        if os.fstat(fd).st_size == size:  # the input
            calls += 1
            if calls == fail_at:
                raise OSError(error, os.strerror(error))
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert dsv2mk(*json_build(few / "snapshot", few / "count")).code == 0
        calls, fail_at = 0, int(calls * share)
        stopped = dsv2mk(*args)
    failed = stopped.json["error"]
    assert stopped.code == failed["exit_code"] == 10
    assert str(few / "snapshot" / SINGLE) in failed["message"]
    assert os.strerror(error) in failed["message"]
    done = recorded_jobs(out.parent / PARTIAL)
    assert 0 < len(done) < JOBS
    again = dsv2mk(*args)
    assert (again.code, again.json["resumed_jobs"]) == (0, len(done))
    assert read_bytes(out) == read_bytes(few / "artifact")


@pytest.mark.parametrize("name", ["rank-01.ffn", "rank-00.replicated", "rank-00.partitioned"])
@pytest.mark.parametrize("when", [10, 40])
def test_a_file_taken_away_while_it_is_written(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, name: str, when: int
) -> None:
    """The build goes on writing to it, and finds no error; but there is no such file."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    calls, pwrite = 0, os.pwrite

    def taking(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == when:
            (out.parent / PARTIAL / "artifact" / f"{name}.safetensors").unlink()
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", taking)
        stopped = dsv2mk(*args)
    assert calls >= when
    assert stopped.code in (2, 11)
    assert "Traceback" not in stopped.err
    assert name in stopped.json["error"]["message"]
    assert not out.exists()
    assert dsv2mk(*args).code == 0
    assert read_bytes(out) == read_bytes(few / "artifact")
    assert names(out.parent) == {"artifact"}
