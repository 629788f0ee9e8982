"""A second environment that has what a node has: the packages that the project says it needs.

It holds links to those packages of this environment, and no compiler, no hub and no tokenizers.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Call, Done
from packaging.requirements import Requirement
from stores import add_cubin

pytestmark = pytest.mark.slow

ABSENT = ["cutlass", "huggingface_hub", "numba", "tokenizers", "transformers", "zstandard"]
FOLDERS = ["artifacts", "kernel", "manifests", "pipeline", "runner"]
IDS = ["--token-ids", "1,2,3", "--max-new", 6, "--ignore-eos", "--backend", "reference", "--json"]
IMPORTS = """
import json, sys
import dsv2mk.runner.bench, dsv2mk.runner.commands, dsv2mk.runner.cubins, dsv2mk.runner.decoder
import dsv2mk.runner.load, dsv2mk.runner.reference, dsv2mk.runner.run_gate, dsv2mk.runner.session
import dsv2mk.runner.world
print(json.dumps(sorted(sys.modules)))
"""


def needed(name: str, extra: str = "") -> set[str]:
    """Distributions that one requires, and those that they require, if they are installed."""
    found: set[str] = set()
    todo = [(name, extra)]
    while todo:
        name, extra = todo.pop()
        for line in importlib.metadata.requires(name) or ():
            one = Requirement(line)
            if one.name in found or (one.marker and not one.marker.evaluate({"extra": extra})):
                continue
            try:
                importlib.metadata.distribution(one.name)
            except importlib.metadata.PackageNotFoundError:
                continue
            found.add(one.name)
            todo.append((one.name, ""))
    return found


def source_of(folder: str) -> Path:
    spec = importlib.util.find_spec(f"dsv2mk.{folder}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the second environment."""
    place = tmp_path_factory.mktemp("node") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in needed("dsv2mk") | needed("dsv2mk", "gpu"):
        one = importlib.metadata.distribution(name)
        tops = {path.parts[0] for path in one.files or () if path.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            link, real = packages / top, Path(str(one.locate_file(top)))
            if not top.endswith(".pth") and real.exists() and not link.is_symlink():
                link.symlink_to(real)
    (packages / "dsv2mk").mkdir()
    for folder in FOLDERS:
        (packages / "dsv2mk" / folder).symlink_to(source_of(folder))
    return place / "bin" / "python"


def call(node: Path, *args: object) -> Done:
    """Run the node's interpreter, elsewhere than in the sources."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [node, *map(str, args)], env=env, cwd=node.parent, capture_output=True, text=True
    )
    return Done(done.returncode, done.stdout, done.stderr)


def runner(node: Path, *args: object) -> Done:
    done = call(node, "-m", "dsv2mk.runner", *args)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def store(artifact: Path, tmp_path: Path, dsv2mk: Call) -> Path:
    add_cubin(artifact, "sm_90a")
    add_cubin(artifact, "sm_100a", b"\x7fELF of another")
    assert dsv2mk("publish", artifact, tmp_path / "store", "--tag", "v1").code == 0
    return tmp_path / "store"


@pytest.mark.parametrize("name", ABSENT)
def test_what_builds_is_not_on_the_node(node: Path, name: str) -> None:
    assert importlib.util.find_spec(name) is not None  # it is here
    done = call(node, "-c", f"import {name}")
    assert (done.code, done.err.splitlines()[-1]) == (
        1,
        f"ModuleNotFoundError: No module named '{name}'",
    )


def test_the_modules_of_the_node_come_from_its_environment(node: Path) -> None:
    done = call(node, "-c", "import dsv2mk.runner, sys, torch; print(sys.prefix, torch.__file__)")
    assert done.code == 0, done.err
    prefix, torch_file = done.out.split()
    assert Path(prefix) == node.parent.parent
    assert Path(torch_file).is_relative_to(prefix)
    assert call(node, "-c", "import pytest").code == 1


def test_everything_of_the_runner_is_imported_without_a_compiler(node: Path) -> None:
    done = call(node, "-c", IMPORTS)
    assert done.code == 0, done.err
    found = {name.split(".")[0] for name in json.loads(done.out)}
    assert "torch" in found
    assert not {*ABSENT, "nvidia_cutlass_dsl", "triton"} & found
    ours = {name.split(".")[1] for name in json.loads(done.out) if name.startswith("dsv2mk.")}
    assert ours == {"artifacts", "manifests", "runner"}


def test_a_node_lists_checks_and_gets_what_was_published(
    node: Path, store: Path, artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    assert runner(node, "ls", store, "--json").json == dsv2mk("ls", store, "--json").json
    assert runner(node, "verify", store, "--json").json["ok"]
    assert runner(node, "verify", f"{store}::v1", "--json").json["ok"]
    here = tmp_path / "here"
    runner(node, "pull", store, "v1", here, "--rank", 0, "--arch", "sm_90a")
    found = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    wanted = {
        str(path.relative_to(artifact)): path
        for path in artifact.rglob("*")
        if path.is_file()
        and not path.name.startswith("rank-01")
        and "sm_100a" not in path.name
        and path.suffix != ".ptx"
    }
    assert found == set(wanted)
    assert all((here / name).read_bytes() == path.read_bytes() for name, path in wanted.items())


def test_a_node_gives_the_tokens_of_the_building_environment(
    node: Path, store: Path, artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    expected = dsv2mk("generate", artifact, *IDS).json["token_ids"]
    assert len(expected) == 6
    here = tmp_path / "here"
    runner(node, "pull", store, "v1", here, "--rank", 0)
    done = call(node, "-m", "dsv2mk.runner", "generate", here, *IDS)  # it needs all ranks
    assert (done.code, done.json["error"]["kind"]) == (11, "artifact damaged or missing")
    assert "Pull the other ranks too" in done.json["error"]["fix"]
    runner(node, "pull", store, "v1", here)
    for where in (here, f"{store}::v1"):
        assert runner(node, "generate", where, *IDS).json["token_ids"] == expected


def test_a_node_without_the_packages_of_signatures_says_which_it_needs(
    node: Path, store: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key.pub"
    done = call(
        node, *("-m", "dsv2mk.runner", "pull", store, "v1", tmp_path / "here"), "--trust", key
    )
    assert done.code == 2
    assert "pip install 'dsv2mk[sign]'" in done.err
    assert not (tmp_path / "here").exists()
