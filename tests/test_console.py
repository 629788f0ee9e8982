"""What every command shares: streams closed or gone, bugs, sizes as text, progress."""

import io
import json
import os
import re
import subprocess
from pathlib import Path

import click
import pytest
from helpers import COMMAND, Call, build_args, read_bytes

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import Report, progress, reporting, run, size_text


def closed(streams: str, *args: object) -> subprocess.CompletedProcess[str]:
    """A command that a shell starts with some of its streams closed."""
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", COMMAND, *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(
    streams: str, few_shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file to be opened would have the number of one, and messages would end up there."""
    out = tmp_path / "artifact"
    done = closed(streams, *build_args(few_shared / "snapshot", out))
    assert (done.returncode, done.stderr) == (0, "")
    assert ("digest" in done.stdout) == (streams in ("<&-", "2>&-"))
    assert read_bytes(out) == read_bytes(few_shared / "artifact")
    assert closed(streams, "verify", out).returncode == 0
    assert closed(streams, "verify", tmp_path / "nope").returncode == 11


@pytest.mark.parametrize(
    ("args", "stream"),
    [
        (["verify", "nope", "--json"], "stdout"),
        (["verify", "nope"], "stderr"),
        (["inspect", "BUILT"], "stdout"),
        (["--help"], "stdout"),
        (["melt"], "stderr"),
    ],
)
def test_a_reader_that_has_gone(built: Path, tmp_path: Path, args: list[str], stream: str) -> None:
    """As in `dsv2mk ... | true`: no traceback, neither ours nor the interpreter's at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    line = [COMMAND, *(str(built) if arg == "BUILT" else arg for arg in args)]
    done = subprocess.run(line, **streams, cwd=tmp_path, timeout=60, text=True, check=False)
    os.close(writer)
    assert not done.stdout
    assert not done.stderr
    assert done.returncode in (2, 11)  # and not 1, which says that a check failed


def test_a_bug_keeps_its_traceback(
    built: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Artifact, "verify", lambda *_, **__: 1 // 0)
    plain, shown = dsv2mk("verify", built), dsv2mk("verify", built, "--json")
    assert (plain.code, shown.code) == (70, 70)
    for err in (plain.err, shown.err):
        assert err.count("Traceback") == 1
        assert "ZeroDivisionError" in err
    assert plain.out == ""
    assert "this is a bug of dsv2mk" in plain.err
    assert shown.out.count("\n") == 1
    error = json.loads(shown.out)["error"]
    assert (error["kind"], error["exit_code"]) == ("bug", 70)
    assert "ZeroDivisionError" in error["message"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (9.994e3, "9.99 KB"),
        (9.999e9, "10.0 GB"),
        (99.94e6, "99.9 MB"),
        (99.96e6, "100 MB"),
        (999.4e6, "999 MB"),
        (999.6e6, "1.00 GB"),
        (5_021_000_000, "5.02 GB"),
        (1e12, "1.00 TB"),
        (1e15, "1000 TB"),
    ],
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert size_text(count) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("code", [0, 1])
def test_what_another_process_says_is_not_printed(
    silent: bool, as_json: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    @reporting
    def command() -> Report:
        return Report(data={"a": 1}, text="some text", exit_code=code, silent=silent)

    assert run(command, ["--json"] if as_json else []) == code
    shown = "" if silent else '{"a": 1}\n' if as_json else "some text\n"
    assert capsys.readouterr() == (shown, "")


def test_progress_that_another_process_shows_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    with progress(1000, "load", silent=True) as bar:
        bar.update(500)
        bar.refresh()
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Bytes done and to do, rate and time left; what was done before counts as done."""
    monkeypatch.setattr("sys.stderr", stderr := kind())
    monkeypatch.setenv("COLUMNS", "100")
    with progress(4_000_000_000, "build", 1_000_000_000) as bar:
        bar.update(2_000_000_000)
        bar.refresh()
    shown = stderr.getvalue()
    if kind is Terminal:
        assert "build:  25%" in shown
        assert "1.00G/4.00G" in shown
        assert "build:  75%" in shown
        assert re.search(r"3\.00G/4\.00G \[\d\d:\d\d<.*B/s\]", shown)
    else:
        assert shown == ""
