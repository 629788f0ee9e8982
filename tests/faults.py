"""Builds that are disturbed: a machine that dies at a chosen step, and builds as processes."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import build_args, small_config

from dsv2mk.artifacts.console import run
from dsv2mk.artifacts.journal import Journal
from dsv2mk.pipeline.cli import cli
from dsv2mk.pipeline.pack import Packer

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


def json_build(snapshot: Path, out: Path, ranks: int = 2, workers: int = 1) -> list[str]:
    """With one worker, and a report as JSON."""
    return [*build_args(snapshot, out, ranks, workers), "--json"]


def recorded_jobs(partial: Path) -> list[str]:
    """Jobs in whole lines of a journal."""
    try:
        lines = (partial / "journal.jsonl").read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return []
    return [record["job"] for line in lines if "job" in (record := json.loads(line))]


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
