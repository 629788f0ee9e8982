"""Commands in forked processes: killed at a step, run as another user, or run again and again."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers import Done
from tqdm import tqdm

from dsv2mk.artifacts.console import run
from dsv2mk.pipeline.cli import cli

#: What changes files and folders.
STEPS = (
    *("pwrite", "copy_file_range", "ftruncate", "fsync", "utime", "mkdir"),
    *("link", "fchmod", "rename", "replace", "unlink", "rmdir"),
)


def call(*args: object) -> Done:
    """Run a command in this process, with what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(cli, [str(arg) for arg in args])
    return Done(code, out.getvalue(), err.getvalue())


def fork(work: Callable[[], object], log: Path) -> int:
    """Do something in a process, and a group, of its own; its result goes to `log` as JSON."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # its own is shared with the parent, and never let go
        text = json.dumps(work())
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.write(fd, text.encode())
        code = 0
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a process; -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_user(uid: int, log: Path, commands: Sequence[Sequence[object]]) -> list[Done]:
    """Run commands one after the other as another user."""
    log.touch()
    log.chmod(0o666)

    def work() -> list[Done]:
        if os.getuid() != uid:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        return [call(*command) for command in commands]

    assert wait(fork(work, log)) == 0
    return [Done(*found) for found in json.loads(log.read_text())]


# ---- death ----


def count_steps(args: Sequence[object], log: Path) -> tuple[int, float]:
    """How many steps and seconds a command takes."""

    def work() -> tuple[int, float]:
        begun = time.monotonic()
        taken = _hook_steps(0)
        assert call(*args).code == 0
        return len(taken), time.monotonic() - begun

    assert wait(fork(work, log)) == 0
    steps, seconds = json.loads(log.read_text())
    return steps, seconds


def die_at_step(args: Sequence[object], step: int, log: Path) -> bool:
    """Run a command that is killed (SIGKILL) just before a step; whether it came to that."""

    def work() -> int:
        _hook_steps(step)
        return call(*args).code

    code = wait(fork(work, log))
    assert code in (0, -signal.SIGKILL)
    assert code or json.loads(log.read_text()) == 0
    return code != 0


def die_after(args: Sequence[object], seconds: float, log: Path) -> bool:
    """Run a command and kill its group after a time; whether it was still running."""
    pid = fork(lambda: call(*args).code, log)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    code = wait(pid)
    assert code in (0, -signal.SIGKILL)
    assert code or json.loads(log.read_text()) == 0
    return code != 0


def _hook_steps(die_at: int) -> list[str]:
    """Count what this process does to the disk; it dies at a step, in a write by half."""
    taken: list[str] = []
    lock = threading.Lock()

    def hook(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*args: Any, **more: Any) -> Any:
            with lock:
                taken.append(name)
                if len(taken) == die_at:
                    if name == "pwrite":
                        fd, data, offset = args
                        real(fd, data[: len(data) // 2], offset)
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return hooked

    for name in STEPS:
        setattr(os, name, hook(name, getattr(os, name)))
    return taken


# ---- again and again ----


def loop(work: Callable[[int], str], seconds: float, log: Path) -> int:
    """Start a process that does something until a time is over, and counts what came of it."""

    def until() -> dict[str, int]:
        counts: dict[str, int] = {}
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            outcome = work(number)
            counts[outcome] = counts.get(outcome, 0) + 1
            number += 1
        return counts

    sys.stdout.flush()
    return fork(until, log)
