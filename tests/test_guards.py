"""The shape of the code: packages, what a folder and a command may import, what CODE names."""

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Call, make_artifact, names, slow_but, state

from dsv2mk.pipeline.build import CODE
from dsv2mk.pipeline.cli import COMMANDS

# ---- sources ----

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("artifacts", "kernel", "manifests", "pipeline", "runner")

#: What a folder may import of ours, beside itself.
MAY_IMPORT = {
    "manifests": set[str](),
    "artifacts": {"manifests"},
    "pipeline": {"manifests", "artifacts", "kernel"},
    "kernel": {"manifests"},
    "runner": {"manifests", "artifacts"},
}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_packages_are_the_folders_with_an_init() -> None:
    settings_ = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tool = settings_["tool"]["setuptools"]
    hidden = (path for path in ROOT.rglob("__init__.py") if "dsv2mk" not in path.parts[-3:])
    found = sorted(
        "dsv2mk." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in hidden
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in ("build", "dist", "tests")
    )
    assert tool["packages"] == found
    assert found == [f"dsv2mk.{folder}" for folder in FOLDERS]
    assert not (ROOT / "__init__.py").exists()
    assert tool["package-dir"] == {"dsv2mk": "."}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert modules
    for path in modules:
        for name in imports(path):
            top, *rest = name.split(".")
            assert top not in FOLDERS, f"{path}: {name} is imported past the package"
            if top == "dsv2mk":
                assert rest[0] in MAY_IMPORT[folder] | {folder}, f"{path}: {name}"
            elif folder == "manifests":
                assert top in sys.stdlib_module_names, f"{path}: {name}"


def test_code_names_all_modules_that_decide_bytes() -> None:
    """CODE is what pack, shards and jobs reach by import, without errors and package inits."""
    reached: set[str] = set()
    waiting = ["pipeline/pack.py", "artifacts/shards.py", "pipeline/jobs.py"]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        for name in imports(ROOT / module):
            top, *rest = name.split(".")
            if top == "dsv2mk":
                # `from dsv2mk.a.b import c`, or `from dsv2mk.a import b`
                paths = ["/".join(rest[:count]) + ".py" for count in range(2, len(rest) + 1)]
                found = [path for path in paths if (ROOT / path).is_file()]
                assert found, f"{module}: {name}"
                waiting += found
    assert sorted(CODE) == sorted(reached - {"manifests/errors.py"})
    assert list(CODE) == sorted(set(CODE))


# ---- commands ----

#: Not nvidia_cutlass_dsl: its wheel imports that, which only sets a path, in every process.
_COMPILERS = {"cutlass", "huggingface_hub", "numba", "transformers", "triton"}


def _modules(args: list[str], cwd: Path) -> tuple[str, set[str]]:
    """(stdout, sys.modules) after a command in a process of its own."""
    code = (
        "import json, sys\n"
        "from dsv2mk.artifacts.console import run\n"
        "from dsv2mk.pipeline.cli import cli\n"
        f"code = run(cli, {args!r})\n"
        "json.dump(sorted(sys.modules), sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("ranks", slow_but([1, 4], 4))
def test_generate_needs_the_artifact_and_no_compiler(
    ranks: int, snapshot: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    built = make_artifact(snapshot, ranks, tmp_path / "built").path
    args = ["--prompt", "dé", "--max-new", "3", "--ignore-eos"]
    expected = dsv2mk("generate", "--json", built, *args).json
    shutil.rmtree(snapshot)
    shutil.rmtree(tmp_path / "cache")
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    built.rename(moved)
    out, modules = _modules(["generate", "--json", str(moved), *args], tmp_path)
    found = json.loads(out)
    for result in (found, expected):
        del result["tokens_per_s"]
    assert found == expected
    assert {"torch", "tokenizers", "dsv2mk.runner.reference"} <= modules
    assert not _COMPILERS & {name.split(".")[0] for name in modules}
    ours = {name for name in modules if name.startswith(("dsv2mk.pipeline.", "dsv2mk.kernel"))}
    assert ours == {"dsv2mk.pipeline.cli"}
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["moved"]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_light(command: str | None, tmp_path: Path) -> None:
    out, modules = _modules([*([command] if command else []), "--help"], tmp_path)
    assert "Usage: dsv2mk" in out
    heavy = {*_COMPILERS, "numpy", "safetensors", "tokenizers", "torch"}
    assert not heavy & {name.split(".")[0] for name in modules}


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None  # as if it were not installed
from dsv2mk.artifacts.console import run
from dsv2mk.pipeline.cli import cli
snapshot, artifact = sys.argv[1:]
for args in (
    ["synth", "s", "--geometry", "tiny", "--layers", "1"],
    ["plan", snapshot, "--tp", "2", "--out", "new/out"],
    ["generate", artifact, "--token-ids", "1,2", "--max-new", "1"],
    ["build", snapshot, "--tp", "2", "--out", artifact],
    ["build", snapshot, "--tp", "2", "--out", "new/out"],
    ["build", snapshot, "--tp", "1", "--out", artifact, "--overwrite"],
):
    print("exit", run(cli, args), *args[:1], flush=True)
"""


def test_only_a_build_that_works_needs_numba(
    snapshot: Path, artifact: Path, tmp_path: Path
) -> None:
    """It is in the extra `build`, which those who only decode do not install."""
    before = state(artifact)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA, str(snapshot), str(artifact)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    exits = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("exit")]
    assert exits == [
        ["0", "synth"],
        ["0", "plan"],
        ["0", "generate"],
        ["0", "build"],  # up to date
        ["2", "build"],
        ["2", "build"],
    ], done.stderr
    assert done.stderr.count("dsv2mk[build]") == 2
    assert "Traceback" not in done.stderr
    assert state(artifact) == before
    assert names(tmp_path) - {"new"} == {"artifact", "s", "snapshot"}
    assert list(tmp_path.glob("new/*")) == []
