"""Builds that die or are interrupted at any step.

Whatever happens, the final name holds nothing or a whole artifact, and the same command, run again,
goes on from what is done and ends in the same bytes.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import JOBS, PARTIAL, Machine, Server, json_build, recorded_jobs
from helpers import COMMAND, Call, names, read_bytes, slow

# ---- inside this process ----


@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("workers", "stride"), [slow(1, 1), (2, 5)])
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
    args = [*json_build(few / "snapshot", out, workers=workers)]
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
    args = json_build(few / "snapshot", out)
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
    args = [*json_build(few / "snapshot", out), "--overwrite"]
    back = [*json_build(few / "other", out), "--overwrite"]
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
        places = [out, out.parent / PARTIAL / "old"]
        held = [read_bytes(path) for path in places if path.exists()]
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


@pytest.mark.parametrize("step", [1, 2])
def test_ctrl_c_at_the_ends(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """While it finishes, after all jobs: no traceback, and all is kept."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    calls, link = 0, os.rename if step == 1 else os.link
    name = "rename" if step == 1 else "link"

    def interrupted(*paths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == step:  # the first link is a probe, whether there are any
            raise KeyboardInterrupt
        link(*paths)

    monkeypatch.setattr(os, name, interrupted)
    stopped = dsv2mk(*args)
    assert (stopped.code, stopped.json["error"]["kind"]) == (130, "interrupted")
    assert not out.exists()
    again = dsv2mk(*args)
    assert (again.code, again.json["resumed_jobs"]) == (0, JOBS)
    assert read_bytes(out) == read_bytes(few / "artifact")


# ---- processes ----


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; a minute is longer than anything here takes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize(
    ("overwrite", "points", "placings", "least"),
    [
        (False, 1, 1, 3),
        slow(False, 6, 3, 20),
        slow(True, 4, 3, 20),
    ],
)
def test_sigkill_at_any_time(
    many_shared: Path,
    tmp_path: Path,
    server: Server,
    overwrite: bool,
    points: int,
    placings: int,
    least: int,
) -> None:
    """Kills spread over the whole build, around the rename, and in a row: `least` in all."""
    many, out = many_shared, tmp_path / "work" / "artifact"
    args = json_build(many / "snapshot", out, workers=2)
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

    def begun() -> list[str]:
        return recorded_jobs(out.parent / PARTIAL)

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
    for point in range(points):  # one kill, then to the end
        fresh()
        moment = took * (point + rng.random()) / points
        ended = one(lambda moment=moment: time.sleep(moment))
        assert ended or one()
    for _ in range(placings):
        fresh()
        ended = one(placing) or one(placing)
        assert ended or one()
    fresh()
    ended = False
    while not ended or kills < least:  # many in a row, and no other run in between
        if ended:
            fresh()
        ended = one(lambda: time.sleep(took * rng.uniform(0.1, 0.5)))
    for _ in range(20):  # until one has gone on from another's work, however the clock ran above
        if not resumed:
            fresh()
            ended = one(lambda: wait_for(lambda: begun() or server.printed()[0]))
            assert ended or one()
    assert resumed > 0


@pytest.mark.slow
def test_ctrl_c(many_shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "work" / "artifact"
    args = [COMMAND, *json_build(many_shared / "snapshot", out)]
    args.remove("--json")
    process = subprocess.Popen(
        args,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets what it starts in the background ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
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
    assert read_bytes(out) == read_bytes(many_shared / "artifact")
