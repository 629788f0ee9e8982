"""`python -m dsv2mk.runner` on a node imports neither a compiler nor what builds artifacts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Call

#: Not nvidia_cutlass_dsl: its wheel imports that, which only sets a path, in every process.
OTHERS = {"cutlass", "huggingface_hub", "numba", "transformers", "triton", "zstandard"}

AS_A_PROGRAM = """
import json, runpy, sys
sys.argv[:] = ["dsv2mk.runner", *sys.argv[1:]]
try:
    runpy.run_module("dsv2mk.runner", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""
AS_A_MODULE = """
import json, sys
import dsv2mk.runner.__main__
print(json.dumps([0, sorted(sys.modules)]), file=sys.stderr)
"""


def modules(code: str, *args: object) -> tuple[str, set[str]]:
    """(stdout, sys.modules) of a process; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True
    )
    ended, names = json.loads(done.stderr.splitlines()[-1])
    assert ended == 0, done.stderr
    found = set(names)
    assert not OTHERS & {name.split(".")[0] for name in found}
    ours = {name for name in found if name.startswith(("dsv2mk.pipeline", "dsv2mk.kernel"))}
    assert ours == set()
    return done.stdout, found


def test_the_module_is_light() -> None:
    _, found = modules(AS_A_MODULE)
    assert "dsv2mk.runner.commands" in found
    assert not {"torch", "numpy"} & found


COMMANDS = ["generate", "bench", "gate", "pull", "ls", "verify"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_is_light(command: list[str]) -> None:
    out, found = modules(AS_A_PROGRAM, *command, "--help")
    assert "Usage:" in out
    assert all(name in out for name in (command or COMMANDS))
    assert not {"torch", "numpy"} & found


IDS = ["--token-ids", "1,2", "--max-new", 2, "--ignore-eos", "--backend", "reference"]


def test_decoding_needs_no_compiler(built: Path, dsv2mk: Call) -> None:
    out, found = modules(AS_A_PROGRAM, "generate", built, *IDS, "--json")
    expected = dsv2mk("generate", built, *IDS, "--json").json["token_ids"]
    assert json.loads(out)["token_ids"] == expected
    assert {"torch", "dsv2mk.runner.reference"} <= found


def test_checking_needs_no_compiler(built: Path, tmp_path: Path, dsv2mk: Call) -> None:
    logits = tmp_path / "logits"
    assert dsv2mk("generate", built, *IDS, "--logits", logits).code == 0
    args = ["--backend", "reference", "--reference", logits, "--free-run", 0, "--json"]
    out, found = modules(AS_A_PROGRAM, "gate", built, *args)
    assert json.loads(out)["passed"]
    assert {"torch", "dsv2mk.runner.run_gate"} <= found


def test_a_node_gets_and_checks_an_artifact_without_a_compiler_or_torch(
    built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    store = tmp_path / "store"
    assert dsv2mk("publish", built, store, "--tag", "v1").code == 0
    out, found = modules(AS_A_PROGRAM, "ls", store, "--json")
    assert "v1" in out
    assert not {"torch", "numpy"} & found
    out, found = modules(AS_A_PROGRAM, "pull", store, "v1", tmp_path / "here", "--rank", 1)
    assert not {"torch", "numpy"} & found
    shards = sorted(path.name for path in (tmp_path / "here").glob("rank-*"))
    assert shards == [
        f"rank-01.{part}.safetensors" for part in ("ffn", "partitioned", "replicated")
    ]
    out, found = modules(AS_A_PROGRAM, "verify", f"{store}::v1", "--json")
    assert json.loads(out)["ok"]
    out, _ = modules(AS_A_PROGRAM, "generate", f"{store}::v1", *IDS, "--json")
    expected = dsv2mk("generate", built, *IDS, "--json").json["token_ids"]
    assert json.loads(out)["token_ids"] == expected
