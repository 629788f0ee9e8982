"""Geometries, snapshots, artifacts, files and commands for the tests."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.geometry import preset_config
from dsv2mk.manifests.layout import TensorSpec
from dsv2mk.pipeline.build import build
from dsv2mk.pipeline.snapshot import Snapshot
from dsv2mk.pipeline.synth import synth

COMMAND = os.path.join(os.path.dirname(sys.executable), "dsv2mk")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


class GONE:
    """In place of a value: there is none."""


def slow(*values: object) -> Any:
    """A parameter of the long half of the tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(values: Iterable[object], *fast: object) -> list[object]:
    """Parameters of which all but some are slow."""
    return [value if value in fast else slow(value) for value in values]


# ---- geometries, snapshots, artifacts ----


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The preset `tiny` with some fields changed; a change of heads sets the kv heads too."""
    config = {**preset_config("tiny"), **changes}
    config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def small_config(**changes: Any) -> dict[str, Any]:
    """A small geometry with 24 heads, which 1, 2, 3, 4, 6 and 8 divide; every width has an edge."""
    small = {
        "hidden_size": 192,
        "intermediate_size": 200,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 136,
        "n_group": 4,
        "n_routed_experts": 8,
        "num_attention_heads": 24,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_scaling": YARN,
        "topk_group": 2,
        "vocab_size": 301,
    }
    return tiny_config(**{**small, **changes})


def make_snapshot(path: Path, config: dict[str, Any], **options: Any) -> Path:
    """A synthetic checkpoint."""
    synth(path, config, **options)
    return path


def hub_snapshot(
    repo: Path, revision: str, source: Path, change: Callable[[str, bytes], bytes] | None = None
) -> Path:
    """A revision in a repository of the hub's cache: links to blobs that are named by a hash."""
    folder, blobs = repo / "snapshots" / revision, repo / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for path in source.iterdir():
        data = path.read_bytes()
        if change is not None:
            data = change(path.name, data)
        if path.suffix == ".safetensors":  # LFS
            name = hashlib.sha256(data).hexdigest()
        else:  # as `git hash-object` names it
            name = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (blobs / name).write_bytes(data)
        (folder / path.name).symlink_to(f"../../blobs/{name}")
    return folder


def spec(name: str, dtype: str, shape: tuple[int, ...], offset: int = 0) -> TensorSpec:
    """A tensor as a layout describes it."""
    return TensorSpec(
        name=name, part="ffn", dtype=dtype, axis="other", shape=shape, origin=(), offset=offset
    )


def make_artifact(snapshot: Path, ranks: int, out: Path, **options: Any) -> Artifact:
    """Build and open an artifact."""
    build(Snapshot.open(snapshot), ranks, out, **{"workers": 2, **options})
    return Artifact.open(out)


# ---- files ----


def read_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names(folder: Path) -> set[str]:
    """What lies in a folder, the tests' cache aside."""
    return {path.name for path in folder.iterdir()} - {"cache"}


def state(folder: Path) -> dict[str, Any]:
    """Everything that a write to a folder would change, below it and in itself."""
    out: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        out[str(path)] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, content)
    return out


def flip_byte(path: Path, at: int = -1, mask: int = 1) -> None:
    """Flip bits of a byte; the lowest: in bf16, fp8 and ASCII digits another good value."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ mask]))


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    data = json.loads(path.read_text())
    for name, value in changes.items():
        data.pop(name, None)
        if value is not None:
            data[name] = value
    path.write_text(json.dumps(data))


# ---- commands ----


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Call = Callable[..., Done]


def build_args(snapshot: object, out: object, ranks: int = 2, workers: int = 2) -> list[str]:
    options = ["--tp", str(ranks), "--out", str(out), "--workers", str(workers)]
    return ["build", str(snapshot), *options]


def spawn(*args: object, **env: str) -> Done:
    """Run a command in a process of its own, with more environment; PWD sets where it runs."""
    done = subprocess.run(
        [COMMAND, *map(str, args)],
        env={**os.environ, **env},
        cwd=env.get("PWD"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def assert_refused(
    dsv2mk: Call, snapshot: Path, *said: str, ranks: int = 2, early: bool = True
) -> None:
    """`build` and, unless it takes tensor data to see, `plan` refuse a checkpoint.

    They say why in one line or one JSON object, and leave nothing.
    """
    place = snapshot.parent / "place"
    place.mkdir()
    out = place / "made" / "out" if early else place / "out"
    commands: list[list[object]] = [[*build_args(snapshot, out, ranks)]]
    if early:
        commands.append(["plan", snapshot, "--tp", ranks, "--out", out])
    found = []
    for command in commands:
        plain, shown = dsv2mk(*command), dsv2mk(*command, "--json")
        error = shown.json["error"]
        found.append((plain.err, error))
        assert (plain.code, plain.out) == (10, "")
        assert (shown.code, shown.err) == (10, "")
        assert (error["exit_code"], error["kind"]) == (10, "input refused")
        assert len(plain.err.splitlines()) == 1
        for words in said:
            assert words in error["message"]
            assert words in plain.err
        assert found[0] == (plain.err, error)
    assert list(place.iterdir()) == []
