"""Builds that are killed, interrupted, out of space, in each other's way, or fed a moving input.

Whatever happens, the final name holds nothing or a whole artifact, and the same command, run again,
goes on from what is done and ends in the same bytes.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import edit_json, make_snapshot, read_bytes, small_config

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import run
from dsv2mk.artifacts.journal import Journal
from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.pipeline.build import build
from dsv2mk.pipeline.cli import cli
from dsv2mk.pipeline.pack import Packer
from dsv2mk.pipeline.snapshot import Snapshot

COMMAND = os.path.join(os.path.dirname(sys.executable), "dsv2mk")
SINGLE = "model.safetensors"
PARTIAL = ".artifact.partial"

#: 4 jobs and few writes: small enough to be killed at every one of them.
FEW = small_config(
    hidden_size=128,
    moe_intermediate_size=128,
    n_group=1,
    n_routed_experts=2,
    n_shared_experts=1,
    num_attention_heads=2,
    num_experts_per_tok=1,
    num_hidden_layers=2,
    topk_group=1,
)
JOBS = 4

#: 15 jobs that take some time.
MANY = small_config(
    hidden_size=384,
    intermediate_size=600,
    moe_intermediate_size=250,
    n_routed_experts=12,
    num_hidden_layers=13,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """few/ and many/, each a snapshot, its artifact for 2 ranks, and an `old` one of other input.

    The tests change only copies.
    """
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.1")
        for name, config in (("few", FEW), ("many", MANY)):
            place = folder / name
            make_snapshot(place / "snapshot", config)
            make_snapshot(place / "other", config, seed=1)
            for source, out in (("snapshot", "artifact"), ("other", "old")):
                assert run(cli, build_args(place / source, place / out)) == 0
        yield folder


@pytest.fixture
def few(shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shared / "few", tmp_path / "few")


def build_args(snapshot: Path, out: Path, ranks: int = 2, workers: int = 1) -> list[str]:
    options = ["--tp", str(ranks), "--out", str(out), "--workers", str(workers)]
    return ["build", str(snapshot), *options, "--json"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def recorded_jobs(partial: Path) -> list[str]:
    """Jobs in whole lines of a journal."""
    try:
        lines = (partial / "journal.jsonl").read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return []
    return [record["job"] for line in lines if "job" in (record := json.loads(line))]


def flip_byte(path: Path, at: int = -1) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


# ---- death at every step, inside this process ----


class Killed(BaseException):
    """The process is dead: nothing catches this."""


def drop_locks() -> None:
    """What the kernel does for a process that is dead, and cannot do for this one."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
            if os.path.basename(os.readlink(f"/proc/self/fd/{fd}").split(" (")[0]) == "lock":
                os.close(int(fd))


class Machine:
    """Counts what a build does to the disk, and dies just before the chosen step.

    Once dead, no thread does anything more. A write that it dies in is done by half. If the power
    fails too, everything that was not synced is garbage. (Nothing is synced really: that is slow.)
    """

    STEPS = ("pwrite", "ftruncate", "fdatasync", "fsync", "link", "rename", "replace", "unlink")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.die_at = 0
        self.power_fails = False
        self.steps: list[str] = []
        self.jobs: list[str] = []  # that were started
        self._dead = False
        self._unsynced: dict[int, list[tuple[int, int]]] = {}
        self._shards: set[int] = set()
        self._lock = threading.RLock()
        self._real: dict[str, Any] = {name: getattr(os, name) for name in (*self.STEPS, "rmdir")}
        for name in self._real:
            patch.setattr(os, name, self._hook(name))
        append, pack = Journal.append, Packer.run

        def step_append(journal: Journal, record: dict[str, Any]) -> None:
            self._step("append")
            append(journal, record)

        def note_job(packer: Packer, job: str) -> None:
            self.jobs.append(job)
            pack(packer, job)

        patch.setattr(Journal, "append", step_append)
        patch.setattr(Packer, "run", note_job)

    def build(self, args: Sequence[str], die_at: int = 0, power_fails: bool = False) -> int | None:
        """The exit code, or None if it died at step `die_at` (0: never)."""
        self.die_at, self.power_fails, self._dead = die_at, power_fails, False
        self.steps, self.jobs, self._unsynced, self._shards = [], [], {}, set()
        try:
            code = run(cli, list(args))
        except Killed:
            drop_locks()
            return None
        finally:
            self.die_at, self._dead = 0, False
        return code

    def last(self, name: str) -> int:
        """The last step of this name in the last build."""
        return len(self.steps) - self.steps[::-1].index(name)

    def _hook(self, name: str) -> Callable[..., Any]:
        def hooked(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._step(name, *args)
                if name in ("fdatasync", "fsync"):
                    self._unsynced.pop(args[0], None)
                    return None
                if name == "pwrite":
                    fd, data, offset = args
                    self._shards.add(fd)
                    self._unsynced.setdefault(fd, []).append((offset, len(data)))
                return self._real[name](*args, **kwargs)

        return hooked

    def _step(self, name: str, *args: Any) -> None:
        with self._lock:
            if self._dead:
                raise Killed
            self.steps.append(name)
            if len(self.steps) != self.die_at:
                return
            self._dead = True
            if name == "pwrite":
                fd, data, offset = args
                half = len(data) // 2
                self._real["pwrite"](fd, data[:half], offset)
                self._unsynced.setdefault(fd, []).append((offset, half))
            if self.power_fails:
                for fd, ranges in self._unsynced.items():
                    for offset, length in ranges:
                        self._real["pwrite"](fd, b"\xa5" * length, offset)
                if name in ("fdatasync", "fsync") and args[0] not in self._shards:
                    self._tear(name, args[0])
            raise Killed

    def _tear(self, name: str, fd: int) -> None:
        """A file that was just written: the journal loses the end of a line, others a half."""
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return  # a folder
        lost = 3 if name == "fdatasync" else info.st_size - info.st_size // 2
        path = os.readlink(f"/proc/self/fd/{fd}")
        os.truncate(path, info.st_size - lost)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("workers", "stride"), [(1, 1), (2, 5)])
def test_death_at_every_step(
    few: Path,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    workers: int,
    stride: int,
    overwrite: bool,
    power_fails: bool,
) -> None:
    work, out = few / "work", few / "work" / "artifact"
    args = [*build_args(few / "snapshot", out, workers=workers)]
    args += ["--overwrite"] if overwrite else []
    expected, old = read_bytes(few / "artifact"), read_bytes(few / "old")
    allowed = [old, expected] if overwrite else [expected]

    def fresh() -> None:
        for folder in (work, Path(os.environ["XDG_CACHE_HOME"])):
            shutil.rmtree(folder, ignore_errors=True)
        work.mkdir()
        if overwrite:
            shutil.copytree(few / "old", out)

    fresh()
    assert machine.build(args) == 0
    assert read_bytes(out) == expected
    steps = machine.steps
    kinds = {"pwrite", "ftruncate", "fdatasync", "fsync", "append", "link", "replace", "unlink"}
    assert set(steps) >= kinds | {"rmdir"} | (set() if overwrite else {"rename"})
    capsys.readouterr()

    wrong: list[str] = []
    for die_at in range(1, len(steps) + 1, stride):
        fresh()
        if machine.build(args, die_at, power_fails) is not None:
            assert workers > 1  # which may take a step less
            continue
        died, started, done = machine.steps[-1], machine.jobs, recorded_jobs(work / PARTIAL)
        whole = not out.exists() or read_bytes(out) in allowed
        capsys.readouterr()
        code = machine.build(args)
        printed = capsys.readouterr()
        report = json.loads(printed.out)
        redone = set(started) & set(machine.jobs)
        checks = {
            "half an artifact under the final name": whole and (overwrite <= out.exists()),
            f"exit {code} {printed.out} {printed.err}": code == 0,
            "another result": code == 0 and read_bytes(out) == expected,
            f"left {names(work)}": names(work) == {"artifact"},
            f"{redone} redone": len(redone) <= workers,
            f"{done} recorded, {machine.jobs} run": not set(done) & set(machine.jobs),
            "resumed_jobs": report.get("up_to_date") or report.get("resumed_jobs") == len(done),
        }
        wrong += [f"{die_at} {died}: {what}" for what, right in checks.items() if not right]
    assert wrong == []


def test_death_while_starting_over(few: Path, machine: Machine) -> None:
    """Nothing of the build that is given up gets into the one that starts over."""
    out, licence = few / "work" / "artifact", few / "snapshot" / "LICENSE"
    args = build_args(few / "snapshot", out)
    assert machine.build(args) == 0
    rename = machine.last("rename")
    for die_at in range(1, 16):
        shutil.rmtree(out, ignore_errors=True)
        licence.write_text("for a while")
        assert machine.build(args, rename) is None
        assert (out.parent / PARTIAL / "artifact" / "LICENSE").exists()
        licence.unlink()
        assert machine.build(args, die_at) is None
        died = machine.steps[-1]
        assert machine.build(args) == 0
        assert read_bytes(out) == read_bytes(few / "artifact"), f"{die_at} {died}"


def test_death_between_the_renames_where_nothing_can_be_exchanged(
    few: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without renameat2 the old artifact steps aside first; later builds must not trip over it."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    out = few / "work" / "artifact"
    out.parent.mkdir()
    args = [*build_args(few / "snapshot", out), "--overwrite"]
    back = [*build_args(few / "other", out), "--overwrite"]
    expected, old = read_bytes(few / "artifact"), read_bytes(few / "old")
    shutil.copytree(few / "old", out)
    assert machine.build(args) == 0
    assert read_bytes(out) == expected
    assert machine.steps.count("rename") >= 2
    wrong: list[str] = []
    absent = 0
    # From a little before the first of them: the number of steps differs by what is remembered.
    for die_at in range(machine.steps.index("rename") - 1, len(machine.steps) + 1):
        assert machine.build(back) == 0
        assert read_bytes(out) == old
        if machine.build(args, die_at) is not None:
            continue
        died = machine.steps[-1]
        absent += not out.exists()
        held = [read_bytes(path) for path in out.parent.iterdir() if path.name != PARTIAL]
        code = machine.build(args)
        checks = {
            "no whole artifact": old in held or expected in held,
            f"exit {code}": code == 0,
            "another result": code == 0 and read_bytes(out) == expected,
            f"left {names(out.parent)}": names(out.parent) == {"artifact"},
        }
        wrong += [f"{die_at} {died}: {what}" for what, right in checks.items() if not right]
    assert absent  # it did die between the two
    assert wrong == []


# ---- a journal that is damaged or speaks of something else ----


@pytest.fixture
def complete(few: Path, machine: Machine) -> tuple[Path, Path, list[str]]:
    """(private folder of a build that died just before its last rename, output, command)."""
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out)
    assert machine.build(args) == 0
    die_at = machine.last("rename")
    shutil.rmtree(out)
    assert machine.build(args, die_at) is None
    assert len(recorded_jobs(out.parent / PARTIAL)) == JOBS
    return out.parent / PARTIAL, out, args


def resume(machine: Machine, args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run to the end; the report, with what was said on stderr."""
    capsys.readouterr()
    code = machine.build(args)
    printed = capsys.readouterr()
    assert code == 0, printed
    return {**json.loads(printed.out), "said": printed.err}


@pytest.mark.slow
def test_a_journal_cut_anywhere(
    few: Path,
    complete: tuple[Path, Path, list[str]],
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    partial, out, args = complete
    expected = read_bytes(few / "artifact")
    (partial / "placing").unlink()  # it knows the very folder, and what follows works on copies
    kept = shutil.move(partial, few / "kept")
    data = (kept / "journal.jsonl").read_bytes()
    tail = data.rindex(b"\n", 0, -1) + 1  # every byte of the last line, some of the others
    for length in [*range(0, tail, 97), *range(tail, len(data))]:
        shutil.copytree(kept, partial)
        os.truncate(partial / "journal.jsonl", length)
        done = recorded_jobs(partial)
        assert resume(machine, args, capsys)["resumed_jobs"] == len(done)
        assert sorted([*done, *machine.jobs]) == ["embed", "head", "layer 0", "layer 1"]
        assert read_bytes(out) == expected
        shutil.rmtree(out)


def test_every_cut_of_a_journal_keeps_its_whole_lines(tmp_path: Path) -> None:
    path, identity = tmp_path / "journal.jsonl", {"é": [1]}
    records = [
        {"job": "a b", "digests": {"t": "0"}},
        {"file": "x", "chunk": 3, "xxh3": "1"},
        {"job": "\n☃", "digests": {}},
    ]
    last = {"job": "next", "digests": {}}
    journal = Journal(path)
    journal.restart(identity)
    for record in records:
        journal.append(record)
    journal.close()
    data = path.read_bytes()
    for length in range(len(data) + 1):
        whole = data[:length].count(b"\n")
        path.write_bytes(data[:length])
        journal = Journal(path)
        assert journal.records == [identity, *records][:whole]
        journal.append(last)
        journal.close()
        lines = path.read_bytes().splitlines()
        assert [json.loads(line) for line in lines] == [
            *[identity, *records][:whole],
            last,
        ]


GARBAGE = [
    b"\0" * 512,
    b"\0" * 512 + b"\n",
    b"\xff\xfe\n",
    b'{"job":"head","dig',
    b"[]\n",
    b"3\n",
    b"\n",
    b"{}\n",
    b'{"job":"head"}\n',
    b'{"job":"layer 0","digests":3}\n',
    b'{"file":"rank-00.ffn.safetensors"}\n',
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_a_journal(
    few: Path,
    complete: tuple[Path, Path, list[str]],
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    garbage: bytes,
) -> None:
    partial, out, args = complete
    lines = (partial / "journal.jsonl").read_bytes().splitlines(keepends=True)
    jobs = [at for at, line in enumerate(lines) if b'"job"' in line]
    kept = lines[: jobs[2]]  # two jobs; what follows the garbage does not count either
    (partial / "journal.jsonl").write_bytes(b"".join([*kept, garbage, *lines[jobs[2] :]]))
    assert resume(machine, args, capsys)["resumed_jobs"] == 2
    assert len(machine.jobs) == JOBS - 2
    assert read_bytes(out) == read_bytes(few / "artifact")
    assert names(out.parent) == {"artifact"}


def stale_leftovers(few: Path, partial: Path) -> None:
    """As if death had come after an old artifact had been exchanged, and the new one had gone."""
    (partial / "placing").write_text("0" * 64)
    shutil.rmtree(partial / "artifact")
    shutil.copytree(few / "old", partial / "artifact")


Spoil = Callable[[Path, Path], object]
SPOILED: dict[str, Spoil] = {
    "shard gone": lambda few, p: (p / "artifact" / "rank-01.ffn.safetensors").unlink(),
    "shard cut": lambda few, p: os.truncate(p / "artifact" / "rank-01.ffn.safetensors", 5000),
    "shards gone": lambda few, p: shutil.rmtree(p / "artifact"),
    "exchanged": stale_leftovers,
    "input": lambda few, p: flip_byte(few / "snapshot" / SINGLE),
    "config": lambda few, p: edit_json(few / "snapshot" / "config.json", bos_token_id=9),
    "geometry": lambda few, p: edit_json(few / "snapshot" / "config.json", rms_norm_eps=1e-5),
    "ranks": lambda few, p: None,
}


@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_done_does_not_fit(
    few: Path,
    complete: tuple[Path, Path, list[str]],
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Started over, saying so."""
    partial, out, args = complete
    SPOILED[kind](few, partial)
    if kind == "ranks":
        args = build_args(few / "snapshot", out, ranks=1)
    report = resume(machine, args, capsys)
    assert report["resumed_jobs"] == 0
    assert len(machine.jobs) == JOBS
    fresh = few / "fresh"
    assert machine.build([fresh if arg == str(out) else arg for arg in map(str, args)]) == 0
    assert read_bytes(out) == read_bytes(fresh)
    assert names(out.parent) == {"artifact"}
    assert "started over" in report["said"]


def test_a_damaged_old_artifact_never_comes_back(few: Path, machine: Machine) -> None:
    """It has the manifest, and the sizes, of the new one that it was exchanged with."""
    out = few / "work" / "artifact"
    args = [*build_args(few / "snapshot", out), "--overwrite"]
    shutil.copytree(few / "artifact", out)
    for at in (20, -1):  # the header, which a build looks at, and data
        flip_byte(out / "rank-00.ffn.safetensors", at)
    assert machine.build(args) == 0
    assert read_bytes(out) == read_bytes(few / "artifact")
    # The last sync is that of the folder in which the two were exchanged.
    exchanged = machine.last("fsync")
    for at in (20, -1):
        flip_byte(out / "rank-00.ffn.safetensors", at)
    assert machine.build(args, exchanged) is None
    assert read_bytes(out) == read_bytes(few / "artifact")
    shutil.rmtree(out)
    assert machine.build(args) == 0
    assert read_bytes(out) == read_bytes(few / "artifact")


# ---- no space ----


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


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("overwrite", [False, True])
def test_disk_full_at_any_write(
    few: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
    error: int,
) -> None:
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out) + (["--overwrite"] if overwrite else [])
    expected, old = read_bytes(few / "artifact"), read_bytes(few / "old")
    disk = FullDisk(monkeypatch, error)
    assert run(cli, args[: len(args) - overwrite]) == 0
    writes, step = disk.calls, 1 if error == errno.ENOSPC else 9
    wrong: list[str] = []
    for room in range(0, writes, step):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        if overwrite:
            shutil.copytree(few / "old", out)
        capsys.readouterr()
        disk.calls, disk.room = 0, room
        code = run(cli, args)
        disk.room = -1
        failed = json.loads(capsys.readouterr().out)["error"]
        done = recorded_jobs(out.parent / PARTIAL)
        kept = read_bytes(out) == old if overwrite else not out.exists()
        again = run(cli, args)
        report = json.loads(capsys.readouterr().out)
        checks = {
            f"exit {code}": code == failed["exit_code"] == 13,
            f"no path in {failed}": str(out.parent) in failed["message"],
            f"no need in {failed}": re.search(r"\d [KM]?B free \(", failed.get("expected", "")),
            f"no free in {failed}": re.search(r"\d [KMGT]?B$", failed.get("found", "")),
            "old artifact harmed": kept,
            f"again: {report}": again == 0 and report["resumed_jobs"] == len(done),
            "another result": again == 0 and read_bytes(out) == expected,
            f"left {names(out.parent)}": names(out.parent) == {"artifact"},
        }
        wrong += [f"{room}: {what}" for what, right in checks.items() if not right]
    assert wrong == []


def test_no_room_for_the_margin_is_said_before_any_work(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out)
    total = shutil.disk_usage(few).total
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", str(total / 2**30 + 1))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("it works"))
    assert run(cli, args) == 13
    failed = json.loads(capsys.readouterr().out)["error"]
    assert failed["kind"] == "no space"
    assert str(out.parent) in failed["message"]
    assert "DSV2MK_CACHE_SAFETY_GIB" in failed["fix"]
    assert not out.exists()
    monkeypatch.undo()


@pytest.mark.slow
def test_a_small_disk_that_fills_up(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
        args = build_args(few / "snapshot", out)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", filling)
            assert run(cli, args) == 13
        failed = json.loads(capsys.readouterr().out)["error"]
        assert str(disk) in failed["message"]
        assert not real or failed["found"] == "0 B"
        done = recorded_jobs(disk / PARTIAL)
        assert done
        if real:
            assert run(cli, args) == 13  # still full
            capsys.readouterr()
            filler.unlink()
        assert run(cli, args) == 0
        assert json.loads(capsys.readouterr().out)["resumed_jobs"] == len(done)
        assert read_bytes(out) == read_bytes(few / "artifact")
    finally:
        if real:
            subprocess.run(["umount", str(disk)], check=True)


# ---- an input that moves ----


def cut_input(snapshot: Path) -> None:
    os.truncate(snapshot / SINGLE, (snapshot / SINGLE).stat().st_size // 3)


def replace_input(snapshot: Path) -> None:
    """Another file of the same name and size, as rsync or a download puts it in place."""
    shutil.copy(snapshot.parent / "other" / SINGLE, snapshot / "new")
    os.replace(snapshot / "new", snapshot / SINGLE)


MOVES = {
    "byte": lambda snapshot: flip_byte(snapshot / SINGLE),
    "cut": cut_input,
    "replaced": replace_input,
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("when", [1, 8, -1], ids=["first", "early", "last"])
@pytest.mark.parametrize("kind", MOVES)
def test_input_changed_while_it_is_read(
    few: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    when: int,
    workers: int,
) -> None:
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out, workers=workers)
    (few / "work").mkdir()
    size = (few / "snapshot" / SINGLE).stat().st_size
    calls, preadv = 0, os.preadv
    last = [0]

    def moving(fd: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        if os.fstat(fd).st_size == size:  # the input
            calls += 1
            if calls == (when if when > 0 else last[0]):
                MOVES[kind](few / "snapshot")
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", moving)
        assert when > 0 or run(cli, build_args(few / "snapshot", few / "count")) == 0
        last[0], calls = calls, 0
        capsys.readouterr()
        code = run(cli, args)
    failed = json.loads(capsys.readouterr().out)["error"]
    assert code == failed["exit_code"] == 10
    assert str(few / "snapshot") in failed["message"]
    assert "while it was read" in failed["message"]
    assert names(out.parent) == set()
    if kind != "cut":  # left alone, the new input builds
        assert run(cli, args) == 0
        assert json.loads(capsys.readouterr().out)["resumed_jobs"] == 0
        assert Artifact.open(out).verify() == {}


def swap_tensors(snapshot: Path) -> None:
    """The same tensors in another order in a file of the same size."""
    data = (snapshot / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    a, b = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    header[a], header[b] = header[b], header[a]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (length - len(text))
    (snapshot / SINGLE).write_bytes(data[:8] + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [swap_tensors, lambda snapshot: edit_json(snapshot / "config.json", routed_scaling_factor=2)],
    ids=["header", "config"],
)
def test_input_changed_after_it_was_opened(few: Path, change: Callable[[Path], object]) -> None:
    """With --check-hashes there are minutes between the two: old headers, new bytes."""
    opened = Snapshot.open(few / "snapshot")
    change(few / "snapshot")
    out = few / "work" / "artifact"
    with pytest.raises(InputError, match="changed"):
        build(opened, 2, out, workers=1)
    assert not out.exists()


def test_input_changed_after_it_was_read_is_not_taken_for_the_old_one(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of an input goes with the stamps from before it was read."""
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out)
    rename = os.rename

    def late(*paths: Any) -> None:
        flip_byte(few / "snapshot" / SINGLE)
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", late)
        assert run(cli, args) == 0
    assert read_bytes(out) == read_bytes(few / "artifact")
    capsys.readouterr()
    assert run(cli, args) == 2
    assert "source.files" in capsys.readouterr().out


# ---- processes ----


SERVER = """
import json, os, sys
from dsv2mk.artifacts.console import run
from dsv2mk.pipeline.cli import cli
import dsv2mk.pipeline.commands, dsv2mk.pipeline.build, dsv2mk.pipeline.hub, dsv2mk.pipeline.pack
for line in sys.stdin:
    order = json.loads(line)
    pids = []
    for number in range(order["count"]):
        pid = os.fork()
        if pid == 0:
            for fd, name in ((1, "out"), (2, "err")):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(f"{order['log']}.{number}.{name}", flags), fd)
            os.environ.update(order["env"])
            try:
                code = run(cli, order["args"])
            except BaseException as error:
                sys.stderr.write(f"Traceback {error!r}")
                code = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    sys.stdin.readline()  # until then an ended one stays a zombie, and its id its own
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids]), flush=True)
"""


class Server:
    """Starts builds as processes of their own, without 2 s of imports for each."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, args: Sequence[str], count: int = 1) -> list[int]:
        """Start `count` equal commands; their process ids."""
        for path in self._log.parent.glob(f"{self._log.name}.*"):
            path.unlink()
        env = {key: os.environ[key] for key in ("XDG_CACHE_HOME", "DSV2MK_CACHE_SAFETY_GIB")}
        order = {"args": list(args), "count": count, "env": env, "log": str(self._log)}
        return self._ask(json.dumps(order))

    def wait(self) -> list[int]:
        """Their exit codes; -9 for one that was killed."""
        return self._ask("")

    def printed(self, number: int = 0) -> tuple[str, str]:
        """What one of them has printed so far, on stdout and on stderr."""
        paths = [Path(f"{self._log}.{number}.{name}") for name in ("out", "err")]
        out, err = (path.read_text() if path.exists() else "" for path in paths)
        return out, err

    def _ask(self, line: str) -> list[int]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log")
    yield server
    server.close()


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; a minute is longer than anything here takes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_sigkill_at_any_time(shared: Path, tmp_path: Path, server: Server, overwrite: bool) -> None:
    """Kills spread over the whole build, in a row or each with a rest, and around the rename."""
    many, out, workers = shared / "many", tmp_path / "work" / "artifact", 2
    args = build_args(many / "snapshot", out, workers=workers)
    args += ["--overwrite"] if overwrite else []
    expected, old = read_bytes(many / "artifact"), read_bytes(many / "old")
    allowed = [old, expected] if overwrite else [expected]
    manifests = [files["manifest.json"] for files in allowed]
    rng = random.Random(1)
    kills = resumed = 0
    done: list[str] = []

    def fresh() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        done.clear()
        if overwrite:
            shutil.copytree(many / "old", out)

    def one(moment: Callable[[], object] | None = None) -> bool:
        """A run that is killed at a moment, if any; whether it came to its end before that."""
        nonlocal kills, resumed
        (pid,) = server.start(args)
        if moment is not None:
            moment()
            os.kill(pid, signal.SIGKILL)  # of no effect if it has ended: it is waited for below
        (code,) = server.wait()
        assert code in (0, -signal.SIGKILL), server.printed()
        if out.exists():
            assert read_bytes(out) in allowed
        assert out.exists() or not overwrite
        if code == 0:
            report = json.loads(server.printed()[0])
            assert report["up_to_date"] or report["resumed_jobs"] == len(done)
            resumed += report["resumed_jobs"]
            assert read_bytes(out) == expected
            assert names(out.parent) == {"artifact"}
            return True
        kills += 1
        now = recorded_jobs(out.parent / PARTIAL)
        if now or not out.exists():  # else it was about to clear up
            assert now[: len(done)] == done  # no job's record is lost
            assert len(set(now)) == len(now)  # none was done twice
            done[:] = now
        return False

    def placing() -> None:
        mark, manifest = out.parent / PARTIAL / "placing", out / "manifest.json"
        while not mark.exists():
            if overwrite:
                assert manifest.read_bytes() in manifests  # at all times
            if server.printed()[0]:
                return

    fresh()
    started = time.monotonic()
    assert one()
    took = time.monotonic() - started
    points = 4 if overwrite else 6
    for point in range(points):  # one kill, then to the end
        fresh()
        moment = took * (point + rng.random()) / points
        ended = one(lambda moment=moment: time.sleep(moment))
        assert ended or one()
    for _ in range(3):
        fresh()
        ended = one(placing) or one(placing)
        assert ended or one()
    fresh()
    ended = False
    while not ended or kills < 20:  # many in a row, and no other run in between
        if ended:
            fresh()
        ended = one(lambda: time.sleep(took * rng.uniform(0.1, 0.5)))
    assert resumed > 0


@pytest.mark.slow
def test_ctrl_c(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "work" / "artifact"
    args = [COMMAND, *build_args(shared / "many" / "snapshot", out)]
    args.remove("--json")
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: recorded_jobs(out.parent / PARTIAL) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    lines = [line for line in said.splitlines() if line]
    assert 1 <= len(lines) <= 2
    assert "Traceback" not in said
    assert str(out.parent / PARTIAL) in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    assert not out.exists()
    done = recorded_jobs(out.parent / PARTIAL)
    assert done
    again = subprocess.run([*args, "--json"], capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert json.loads(again.stdout)["resumed_jobs"] == len(done)
    assert read_bytes(out) == read_bytes(shared / "many" / "artifact")


@pytest.mark.parametrize("step", [1, 2])
def test_ctrl_c_at_the_ends(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """While it finishes, after all jobs: no traceback, and all is kept."""
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out)
    calls, link = 0, os.rename if step == 1 else os.link
    name = "rename" if step == 1 else "link"

    def interrupted(*paths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        link(*paths)

    monkeypatch.setattr(os, name, interrupted)
    assert run(cli, args) == 130
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "interrupted"
    assert not out.exists()
    assert run(cli, args) == 0
    assert json.loads(capsys.readouterr().out)["resumed_jobs"] == JOBS
    assert read_bytes(out) == read_bytes(few / "artifact")


def spawn(args: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run([COMMAND, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_second_build_of_the_same_output(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process comes while the first writes; also one that would build something else."""
    out = few / "work" / "artifact"
    args = build_args(few / "snapshot", out)
    seen: list[tuple[int, str]] = []
    calls, pwrite = 0, os.pwrite

    def meeting(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 20:
            seen.append(spawn(args))
            seen.append(spawn([*build_args(few / "other", out, ranks=1), "--overwrite"]))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", meeting)
    assert run(cli, args) == 0
    assert len(seen) == 2
    for code, text in seen:
        assert code == 2
        assert "another build is writing" in text
        assert str(out.parent / PARTIAL) in text
    assert json.loads(capsys.readouterr().out)["resumed_jobs"] == 0
    assert read_bytes(out) == read_bytes(few / "artifact")


def test_a_build_that_begins_while_another_clears_up(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step of that the first one is in place, and the second is done or told to wait."""
    out = few / "work" / "artifact"
    first = [*build_args(few / "snapshot", out), "--overwrite"]
    second = [*build_args(few / "other", out), "--overwrite"]
    expected, old = read_bytes(few / "artifact"), read_bytes(few / "old")
    calls = meet_at = 0
    seen: list[int] = []

    def meet(real: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if out.exists() and read_bytes(out) == expected and not seen:
                calls += 1
                if calls == meet_at:
                    seen.append(-1)
                    capsys.readouterr()
                    seen[0] = run(cli, second)
                    said = capsys.readouterr().out
                    assert seen[0] == 0 or "another build is writing" in said
            return real(*args, **kwargs)

        return hooked

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, meet(getattr(os, name)))
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    wrong: list[str] = []
    while calls >= meet_at:
        shutil.rmtree(few / "work", ignore_errors=True)
        shutil.copytree(few / "old", out)
        seen.clear()
        calls, meet_at = 0, meet_at + 1
        capsys.readouterr()
        code = run(cli, first)
        said = capsys.readouterr().out
        if seen:
            checks = {
                f"exit {code} {said}": code == 0,
                f"second: exit {seen}": seen[0] in (0, 2),
                "another result": read_bytes(out) == (old if seen[0] == 0 else expected),
                f"left {names(out.parent)}": names(out.parent) == {"artifact"},
            }
            wrong += [f"{meet_at}: {what}" for what, right in checks.items() if not right]
    assert meet_at > len(expected)  # the old artifact's files and some more were removed
    assert wrong == []


@pytest.mark.slow
def test_several_at_once(shared: Path, tmp_path: Path, server: Server) -> None:
    """Some build, the others find it in use or done; nobody is told anything else."""
    out = tmp_path / "work" / "artifact"
    args = build_args(shared / "few" / "snapshot", out)
    for _ in range(8):
        server.start(args, count=4)
        codes = server.wait()
        built = 0
        for number, code in enumerate(codes):
            printed, said = server.printed(number)
            report = json.loads(printed)
            assert said == ""
            if code:
                assert code == 2
                assert "another build is writing" in report["error"]["message"]
            else:
                built += not report["up_to_date"]
        assert built == 1
        assert read_bytes(out) == read_bytes(shared / "few" / "artifact")
        assert names(out.parent) == {"artifact"}
        shutil.rmtree(out)


# ---- memory ----


def hollow_snapshot(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint of zeros that takes no space: a header and a hole. Returns its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, shape in checkpoint_tensors(Geometry.from_config(config)).items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(folder / SINGLE, 8 + len(header) + end)
    return end


#: Between the two, since a process counts as its own what the one that starts it had resident.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, peaks, bounds, workers = [], [], [], 2
    for layers in (2, 9):
        config = small_config(
            hidden_size=1024,
            moe_intermediate_size=384,
            n_routed_experts=16,
            num_hidden_layers=layers,
        )
        snapshot = tmp_path / f"snapshot-{layers}"
        sizes.append(hollow_snapshot(snapshot, config))
        assert run(cli, ["plan", str(snapshot), "--tp", "2", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        bounds.append(plan["base_bytes"] + workers * plan["worker_bytes"])
        args = build_args(snapshot, tmp_path / f"artifact-{layers}", workers=workers)
        measured = [sys.executable, "-c", MEASURE, COMMAND, *args]
        peaks.append(int(subprocess.run(measured, capture_output=True, check=True).stdout) * 1024)
    assert sizes[1] > 4 * sizes[0]
    assert sizes[1] - sizes[0] > 250_000_000
    assert abs(peaks[1] - peaks[0]) < 150_000_000
    for peak, bound in zip(peaks, bounds, strict=True):
        assert 50_000_000 < peak < bound
