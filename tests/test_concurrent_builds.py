"""Several builds of one output at a time: one builds, the others are told so."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import PARTIAL, Server, json_build
from helpers import Call, Done, names, read_bytes, spawn

from dsv2mk.artifacts.files import lock_folder


def test_second_build_of_the_same_output(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process comes while the first writes; also one that would build something else."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    seen: list[Done] = []
    calls, pwrite = 0, os.pwrite

    def meeting(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 20:
            seen.append(spawn(*args))
            seen.append(spawn(*json_build(few / "other", out, ranks=1), "--overwrite"))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", meeting)
    done = dsv2mk(*args)
    assert (done.code, done.json["resumed_jobs"]) == (0, 0)
    assert len(seen) == 2
    for refused in seen:
        assert refused.code == 2
        assert "another build is writing" in refused.out
        assert str(out.parent / PARTIAL) in refused.out
    assert read_bytes(out) == read_bytes(few / "artifact")


def test_a_build_that_begins_while_another_clears_up(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step of that the first one is in place, and the second is done or told to wait."""
    out = few / "work" / "artifact"
    first = [*json_build(few / "snapshot", out), "--overwrite"]
    second = [*json_build(few / "other", out), "--overwrite"]
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
                    met = dsv2mk(*second)
                    seen[0] = met.code
                    assert met.code == 0 or "another build is writing" in met.out
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
        code, said, _ = dsv2mk(*first)
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


def test_the_lock_is_removed_last(few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets it then has the folder for itself, and keeps what it puts there."""
    out = few / "work" / "artifact"
    partial = out.parent / PARTIAL
    shutil.copytree(few / "old", out)
    removed: list[str] = []
    unlink, rmdir = os.unlink, os.rmdir

    def unlinking(path: Any, **where: Any) -> None:
        removed.append(os.path.basename(path))
        unlink(path, **where)

    def another_begins(path: Any, **where: Any) -> None:
        removed.append(os.path.basename(path))
        if removed[-1] == PARTIAL:
            os.close(lock_folder(partial))
            (partial / "journal.jsonl").write_text("another's")
        rmdir(path, **where)

    monkeypatch.setattr(os, "unlink", unlinking)
    monkeypatch.setattr(os, "rmdir", another_begins)
    assert dsv2mk(*json_build(few / "snapshot", out), "--overwrite").code == 0
    assert removed.index("manifest.json") < removed.index("lock")  # of the old artifact
    assert removed[-2:] == ["lock", PARTIAL]
    assert names(partial) == {"lock", "journal.jsonl"}
    assert (partial / "journal.jsonl").read_text() == "another's"


def test_the_folder_of_the_lock_goes_while_another_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the system's word that something is there and the look at what it is."""
    folder, real, gone = tmp_path / PARTIAL, os.mkdir, []

    def mkdir(path: Any, *args: Any) -> None:
        try:
            real(path, *args)
        except FileExistsError:
            if not gone:
                gone.append(path)
                os.rmdir(path)
            raise

    folder.mkdir()
    monkeypatch.setattr(os, "mkdir", mkdir)
    os.close(lock_folder(folder))
    assert gone


@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "link"]
)
def test_something_else_has_the_folder_s_name(
    make: Callable[[Path], None], few: Path, dsv2mk: Call
) -> None:
    out = few / "work" / "artifact"
    out.parent.mkdir()
    make(out.parent / PARTIAL)
    done = dsv2mk(*json_build(few / "snapshot", out))
    assert done.code == 2
    assert done.json["error"]["message"] == f"File exists: {out.parent / PARTIAL}"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Some network file systems have none; any other error is one."""

    def refusing(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refusing)
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    for up_to_date in (False, True):
        done = dsv2mk(*args)
        if error == errno.EIO:
            assert done.code == 2
            assert os.strerror(error) in done.json["error"]["message"]
            continue
        assert (done.code, done.json["up_to_date"]) == (0, up_to_date)
        assert f"no locks on the file system of {out.parent / PARTIAL}" in done.err
        assert read_bytes(out) == read_bytes(few / "artifact")
        assert names(out.parent) == {"artifact"}


@pytest.mark.slow
def test_several_at_once(few_shared: Path, tmp_path: Path, server: Server) -> None:
    """Some build, the others find it in use or done; nobody is told anything else."""
    out = tmp_path / "work" / "artifact"
    args = json_build(few_shared / "snapshot", out)
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
        assert read_bytes(out) == read_bytes(few_shared / "artifact")
        assert names(out.parent) == {"artifact"}
        shutil.rmtree(out)
