"""`--json`: one object on stdout from every command, whatever happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Call


def commands(snapshot: Path, built: Path, out: Path) -> dict[str, tuple[int, list[object]]]:
    """A line for each command, with its exit code."""
    ids = ["--token-ids", "1,2"]
    return {
        "synth": (0, ["synth", out / "s", "--geometry", "tiny", "--layers", 1]),
        "plan": (0, ["plan", snapshot, "--tp", 3]),
        "build": (0, ["build", snapshot, "--tp", 1, "--out", out / "a", "--workers", 1]),
        "build again": (0, ["build", snapshot, "--tp", 2, "--out", built]),
        "verify": (0, ["verify", built, "--sample", 50]),
        "inspect": (0, ["inspect", built, "--rank", 1]),
        "inspect a tensor": (0, ["inspect", built, "embed", "--stats"]),
        "diff": (0, ["diff", built, built]),
        "generate": (0, ["generate", built, *ids, "--max-new", 2]),
        "no command": (2, ["melt"]),
        "no option": (2, ["plan", snapshot, "--tp", 2, "--gpu"]),
        "no argument": (2, ["diff", built]),
        "no number": (2, ["plan", snapshot, "--tp", "two"]),
        "no size": (2, ["synth", out / "s", "--geometry", "tiny", "--max-shard-size", "1 parsec"]),
        "a size of 5000 digits": (
            2,
            ["synth", out / "s", "--geometry", "tiny", "--max-shard-size", "9" * 5000],
        ),
        "no preset": (2, ["synth", out / "s", "--geometry", "gigantic"]),
        "synth over a folder": (2, ["synth", snapshot, "--geometry", "tiny"]),
        "synth under a file": (2, ["synth", snapshot / "config.json" / "s", "--geometry", "tiny"]),
        "plan for 5": (10, ["plan", snapshot, "--tp", 5]),
        "plan of nothing": (10, ["plan", out / "absent", "--tp", 2]),
        "build from nothing": (10, ["build", out / "absent", "--tp", 2, "--out", out / "a"]),
        "build of another": (2, ["build", snapshot, "--tp", 1, "--out", built]),
        "build into the input": (2, ["build", snapshot, "--tp", 1, "--out", snapshot / "a"]),
        "build under a file": (
            2,
            ["build", snapshot, "--tp", 1, "--out", built / "config.json" / "a"],
        ),
        "verify nothing": (11, ["verify", out / "absent"]),
        "verify too much": (2, ["verify", built, "--sample", 101]),
        "verify nan": (2, ["verify", built, "--sample", "nan"]),
        "inspect no tensor": (2, ["inspect", built, "bias"]),
        "inspect no rank": (2, ["inspect", built, "--rank", 2]),
        "inspect stats of all": (2, ["inspect", built, "--stats"]),
        "diff with nothing": (11, ["diff", built, out / "absent"]),
        "generate from nothing": (11, ["generate", out / "absent", *ids, "--max-new", 2]),
        "generate past the vocabulary": (
            2,
            ["generate", built, "--token-ids", 301, "--max-new", 1],
        ),
        "generate no ids": (2, ["generate", built, "--token-ids", "a", "--max-new", 1]),
        "generate to nowhere": (
            2,
            ["generate", built, *ids, "--max-new", 1, "--logits", out / "absent" / "x"],
        ),
    }


@pytest.mark.parametrize("case", commands(Path(), Path(), Path()))
def test_json_is_one_object_on_stdout(
    case: str, snapshot: Path, built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    expected, args = commands(snapshot, built, tmp_path / "out")[case]

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    code, out, err = dsv2mk(*args, "--json")
    assert code == expected, (out, err)
    data = json.loads(out, parse_constant=no_constant)
    assert isinstance(data, dict)
    assert out.endswith("}\n")
    assert len(out.splitlines()) == 1
    assert "Traceback" not in err
    if expected:
        assert data.keys() == {"error"}
        assert data["error"]["exit_code"] == expected
        assert data["error"]["message"]
        assert data["error"]["kind"]
    else:
        assert "error" not in data


def test_json_of_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file name may be any bytes; the answer is one JSON object all the same."""
    command = os.path.join(os.path.dirname(sys.executable), "dsv2mk")
    name = os.fsencode(tmp_path) + b"/\xff"
    for options in ([], ["--json"]):
        done = subprocess.run(
            [command, "verify", name, *options], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 11
        assert b"Traceback" not in done.stderr
        if options:
            assert json.loads(done.stdout)["error"]["exit_code"] == 11
        else:
            assert len(done.stderr.splitlines()) == 1
