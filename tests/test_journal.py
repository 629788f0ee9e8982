"""What is done in an earlier build: a journal that is damaged, or speaks of something else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import JOBS, PARTIAL, Machine, json_build, recorded_jobs
from helpers import SINGLE, edit_json, flip_byte, names, read_bytes

from dsv2mk.artifacts.journal import Journal


@pytest.fixture
def complete(few: Path, machine: Machine) -> tuple[Path, Path, list[str]]:
    """(private folder of a build that died just before its last rename, output, command)."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
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
        args = json_build(few / "snapshot", out, ranks=1)
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
    args = [*json_build(few / "snapshot", out), "--overwrite"]
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
