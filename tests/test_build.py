"""`build`, `plan` and `synth`: same input, same bytes; what is refused; where inputs are found."""

import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import edit_json, make_snapshot, read_bytes, small_config
from safetensors import safe_open
from safetensors.torch import load_file

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import run
from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.geometry import Geometry, preset_config
from dsv2mk.pipeline import build as build_module
from dsv2mk.pipeline.cli import cli

COMMAND = os.path.join(os.path.dirname(sys.executable), "dsv2mk")
SINGLE = "model.safetensors"
CONFIG = small_config()


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Call = Callable[..., Done]


@pytest.fixture
def dsv2mk(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process."""

    def call(*args: object) -> Done:
        code = run(cli, [str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a snapshot and its artifact for 2 ranks; the tests change only copies."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.1")
        make_snapshot(folder / "snapshot", CONFIG)
        assert run(cli, build_args(folder / "snapshot", folder / "artifact")) == 0
        yield folder


@pytest.fixture
def snapshot(shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shared / "snapshot", tmp_path / "snapshot")


@pytest.fixture
def artifact(shared: Path, tmp_path: Path) -> Path:
    """What a build of `snapshot` gives. No input is remembered."""
    return shutil.copytree(shared / "artifact", tmp_path / "artifact")


def build_args(snapshot: object, out: object, ranks: int = 2) -> list[str]:
    return ["build", str(snapshot), "--tp", str(ranks), "--out", str(out), "--workers", "2"]


def state(folder: Path) -> dict[str, Any]:
    """Everything that a write to a folder would change, below it and in itself."""
    out: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        out[str(path)] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, content)
    return out


def names(folder: Path) -> set[str]:
    """What lies in a folder, the tests' cache aside."""
    return {path.name for path in folder.iterdir()} - {"cache"}


def data_start(path: Path) -> int:
    """Where tensor data starts in a safetensors file."""
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return 8 + length


def flip_byte(path: Path, at: int = -1) -> None:
    """Flip the lowest bit of a byte: in bf16, fp8 and ASCII digits another good value."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def memory_of_inputs() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "dsv2mk" / "inputs"


# ---- same input, same bytes ----


@pytest.mark.parametrize(("workers", "where"), [(1, "a"), (2, "b/c"), (5, "other name")])
def test_bytes_depend_on_neither_workers_nor_folder(
    shared: Path, tmp_path: Path, dsv2mk: Call, workers: int, where: str
) -> None:
    out = tmp_path / where
    args = build_args(shared / "snapshot", out)
    assert dsv2mk(*args, "--workers", workers).code == 0
    assert read_bytes(out) == read_bytes(shared / "artifact")
    assert names(out.parent) == {out.name}  # nothing else is left


def test_bytes_depend_on_no_environment(shared: Path, snapshot: Path, tmp_path: Path) -> None:
    done = spawn(
        *build_args("snapshot", "artifact"),
        PWD=str(tmp_path),
        HOME=str(tmp_path),
        USER="someone",
        LOGNAME="someone",
        HOSTNAME="elsewhere",
        LC_ALL="C",
        TZ="Pacific/Auckland",
        PYTHONHASHSEED="7",
        NUMBA_NUM_THREADS="1",
    )
    assert done.code == 0, done.err
    built = read_bytes(tmp_path / "artifact")
    assert built == read_bytes(shared / "artifact")
    text = built["manifest.json"].decode()
    for secret in (str(tmp_path), str(shared), "someone", "elsewhere", socket.gethostname()):
        assert re.search(rf"\b{re.escape(secret)}\b", text) is None
    assert "/" not in text.replace('"artifacts/', "").replace('"manifests/', "").replace(
        '"pipeline/', ""
    )
    # A time in seconds, milli- or nanoseconds has at least 10 digits; no size here has.
    assert re.search(r"[:,\[]\d{10,}[,\]}]", text) is None


def test_sharding_of_the_input_changes_only_the_source(
    shared: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    make_snapshot(tmp_path / "sharded", CONFIG, max_shard_size=400_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 5
    assert dsv2mk(*build_args(tmp_path / "sharded", tmp_path / "artifact")).code == 0
    a, b = read_bytes(shared / "artifact"), read_bytes(tmp_path / "artifact")
    manifests = [json.loads(files.pop("manifest.json")) for files in (a, b)]
    assert a == b
    sources = [manifest["source"].pop("files") for manifest in manifests]
    assert manifests[0] == manifests[1]
    assert set(sources[0]) == {SINGLE}
    assert set(sources[1]) == {p.name for p in (tmp_path / "sharded").glob("*.safetensors")}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, dsv2mk: Call, umask: int) -> None:
    snapshot, out = tmp_path / "snapshot", tmp_path / "artifact"
    before = os.umask(umask)
    try:
        config = small_config(num_hidden_layers=1)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert dsv2mk("synth", snapshot, "--geometry", tmp_path / "config.json").code == 0
        assert dsv2mk(*build_args(snapshot, out)).code == 0
        flip_byte(snapshot / SINGLE)
        assert dsv2mk(*build_args(snapshot, out), "--overwrite").code == 0
    finally:
        os.umask(before)
    for folder in (snapshot, out):
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == dict.fromkeys(modes, 0o666 & ~umask)


# ---- up to date, changed, damaged ----


def test_second_build_writes_nothing(
    snapshot: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artifact"
    args = build_args(snapshot, out)
    first = dsv2mk(*args, "--json").json
    assert first["up_to_date"] is False
    before = state(out), state(snapshot)

    read: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        read.append(preadv(fd, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    assert "up to date" in dsv2mk(*args).out
    assert read == []  # the input's hashes are remembered
    (remembered,) = memory_of_inputs().iterdir()
    good = remembered.read_bytes()
    for damaged in (None, b"", b"{}", b"[]", b"\xff\xfe", good[:-1], b'{"files":3,"stamps":{}}'):
        read.clear()
        if damaged is None:
            shutil.rmtree(memory_of_inputs())
        else:
            remembered.write_bytes(damaged)
        again = dsv2mk(*args, "--json")
        assert (again.code, again.json["up_to_date"]) == (0, True)
        assert again.json["digest"] == first["digest"]
        assert sum(read) == first["input_bytes"]  # hashed, and remembered again
        assert json.loads(remembered.read_bytes()) == json.loads(good)
    assert (state(out), state(snapshot)) == before
    assert names(tmp_path) == {"artifact", "snapshot"}


def test_same_content_with_other_times_is_up_to_date(
    snapshot: Path, artifact: Path, dsv2mk: Call
) -> None:
    args = build_args(snapshot, artifact)
    for _ in range(2):
        assert "up to date" in dsv2mk(*args).out
        os.utime(snapshot / SINGLE, (1, 1))
        shutil.copytree(snapshot, snapshot.with_name("copy"))  # other inodes
        shutil.rmtree(snapshot)
        os.rename(snapshot.with_name("copy"), snapshot)


def change_byte(snapshot: Path) -> None:
    """Even with the old time of change put back."""
    info = (snapshot / SINGLE).stat()
    flip_byte(snapshot / SINGLE)
    os.utime(snapshot / SINGLE, ns=(info.st_atime_ns, info.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "byte": (change_byte, 2, r"source\.files\.model\.safetensors\.digest"),
    "config": (
        lambda s: edit_json(s / "config.json", routed_scaling_factor=2.5),
        2,
        r"geometry\.routed_scaling_factor",
    ),
    "tokenizer": (
        lambda s: edit_json(s / "tokenizer.json", version="1.1"),
        2,
        r"source\.copied\.tokenizer\.json",
    ),
    "licence": (
        lambda s: (s / "LICENSE-MODEL").write_text("new"),
        2,
        r"source\.copied\.LICENSE-MODEL: added",
    ),
    "ranks": (lambda s: None, 3, r"topology\.ranks: 2 -> 3"),
    "code": (lambda s: None, 2, r"code\.pipeline/pack\.py"),
}


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_named_and_replaced_only_on_request(
    snapshot: Path,
    artifact: Path,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    remembered: bool,
) -> None:
    change, ranks, named = CHANGES[kind]
    if remembered:
        assert "up to date" in dsv2mk(*build_args(snapshot, artifact)).out
    change(snapshot)
    if kind == "code":
        hashes = {**build_module.code_hashes(), "pipeline/pack.py": "0" * 64}
        monkeypatch.setattr(build_module, "code_hashes", lambda: hashes)
    before = state(artifact)
    args = build_args(snapshot, artifact, ranks)
    refused = dsv2mk(*args)
    assert refused.code == 2
    assert re.search(named, refused.err)
    assert "--overwrite" in refused.err
    assert state(artifact) == before

    replaced = dsv2mk(*args, "--overwrite", "--json")
    assert (replaced.code, replaced.json["up_to_date"]) == (0, False)
    assert dsv2mk(*build_args(snapshot, tmp_path / "fresh", ranks)).code == 0
    assert read_bytes(artifact) == read_bytes(tmp_path / "fresh")
    assert "up to date" in dsv2mk(*args).out
    assert names(tmp_path) == {"snapshot", "artifact", "fresh"}


def test_a_refusal_leaves_nothing_behind(snapshot: Path, artifact: Path, dsv2mk: Call) -> None:
    assert dsv2mk(*build_args(snapshot, artifact, 3)).code == 2
    assert names(artifact.parent) == {"snapshot", "artifact"}


FOREIGN: dict[str, dict[str, bytes]] = {
    "a file": {"": b"mine"},
    "other files": {"thesis.tex": b"mine"},
    "a folder": {"sub/thesis.tex": b"mine"},
    "a shard without a manifest": {"rank-00.ffn.safetensors": b"mine"},
    # Many a web application and browser extension has a file of this name.
    "another manifest.json": {"manifest.json": b'{"name": "my app"}', "thesis.tex": b"mine"},
}


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_artifact_is_never_replaced(
    snapshot: Path, tmp_path: Path, dsv2mk: Call, kind: str, options: list[str]
) -> None:
    out = tmp_path / "precious"
    for name, data in FOREIGN[kind].items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    before = state(out)
    done = dsv2mk(*build_args(snapshot, out), *options)
    assert done.code == 2
    assert str(out) in done.err
    assert state(out) == before


def test_an_empty_folder_is_filled(shared: Path, tmp_path: Path, dsv2mk: Call) -> None:
    (tmp_path / "artifact").mkdir()
    assert dsv2mk(*build_args(shared / "snapshot", tmp_path / "artifact")).code == 0
    assert read_bytes(tmp_path / "artifact") == read_bytes(shared / "artifact")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shard cut": lambda a: cut(a / "rank-01.ffn.safetensors"),
    "shard gone": lambda a: (a / "rank-00.replicated.safetensors").unlink(),
    "header": lambda a: flip_byte(a / "rank-01.partitioned.safetensors", 20),
    "manifest cut": lambda a: cut(a / "manifest.json"),
    "manifest edited": lambda a: edit_json(a / "manifest.json", schema=7),
    "tokenizer gone": lambda a: (a / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_artifact_is_named_and_rebuilt_on_request(
    shared: Path, snapshot: Path, artifact: Path, dsv2mk: Call, kind: str
) -> None:
    DAMAGES[kind](artifact)
    before = state(artifact)
    refused = dsv2mk(*build_args(snapshot, artifact))
    assert refused.code == 11
    assert str(artifact) in refused.err
    assert "--overwrite" in refused.err
    assert state(artifact) == before
    assert dsv2mk(*build_args(snapshot, artifact), "--overwrite").code == 0
    assert read_bytes(artifact) == read_bytes(shared / "artifact")


@pytest.mark.parametrize("name", ["rank-00.ffn.safetensors", "tokenizer.json"])
def test_overwrite_mends_what_verify_complains_of(
    shared: Path, snapshot: Path, artifact: Path, dsv2mk: Call, name: str
) -> None:
    """Sizes and headers are right, so only reading the file tells; `verify` says --overwrite."""
    flip_byte(artifact / name)
    complaint = dsv2mk("verify", artifact)
    assert complaint.code == 1
    assert name in complaint.out
    assert dsv2mk(*build_args(snapshot, artifact), "--overwrite").code == 0
    assert read_bytes(artifact) == read_bytes(shared / "artifact")


# ---- places ----


@pytest.mark.parametrize("out", ["snapshot", "snapshot/artifact", ".", "link/artifact"])
def test_out_and_snapshot_are_apart(snapshot: Path, tmp_path: Path, dsv2mk: Call, out: str) -> None:
    (tmp_path / "link").symlink_to(snapshot)
    before = state(snapshot)
    done = dsv2mk(*build_args(snapshot, tmp_path / out), "--overwrite")
    assert done.code == 2
    assert "lie in one another" in done.err
    assert state(snapshot) == before
    assert names(tmp_path) == {"snapshot", "link"}


@pytest.mark.parametrize("exists", [True, False])
def test_out_may_be_a_link(shared: Path, tmp_path: Path, dsv2mk: Call, exists: bool) -> None:
    target = tmp_path / "big disk" / "target"
    target.mkdir(parents=True) if exists else target.parent.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    for expected in (False, True):
        done = dsv2mk(*build_args(shared / "snapshot", link), "--json")
        assert done.json["up_to_date"] is expected
        assert link.readlink() == target
        assert read_bytes(target) == read_bytes(shared / "artifact")
    # The work is done on the disk that the link leads to.
    assert names(tmp_path) == {"big disk", "link"}
    assert names(target.parent) == {"target"}


@pytest.mark.parametrize("out", ["art", "./art/", "x/../art", "../work/art"])
def test_relative_paths(
    shared: Path,
    snapshot: Path,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
    out: str,
) -> None:
    (tmp_path / "work" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert dsv2mk(*build_args("../snapshot", out)).code == 0
    assert read_bytes(tmp_path / "work" / "art") == read_bytes(shared / "artifact")
    assert names(tmp_path / "work") == {"x", "art"}


STRANGE = ["a b", " ", "ünï☃", 'it\'s "q" $HOME;*?[x]\\', "-v", "new\nline", "%s{0}", "..."]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRANGE, os.fsdecode(b"not utf-8 \xff\xfe")])
def test_strange_names(shared: Path, snapshot: Path, tmp_path: Path, name: str) -> None:
    """In a process of its own, since arguments and output are bytes; as in a UTF-8 locale."""
    source, out = tmp_path / "in" / name, tmp_path / "out" / name
    source.parent.mkdir()
    os.rename(snapshot, source)
    shutil.copytree(shared / "artifact", out)
    env = {"PYTHONIOENCODING": "utf-8:strict"}
    done = spawn(*build_args(source, out), "--json", **env)
    assert (done.code, done.err) == (0, "")
    assert done.json["up_to_date"] is True
    assert done.json["path"] == str(out)
    done = spawn(*build_args(source, out), **env)
    assert (done.code, done.err) == (0, "")
    refused = spawn(*build_args(source, out, 3), **env)
    assert refused.code == 2
    assert "topology.ranks: 2 -> 3" in refused.err
    assert refused.err.count("\n") == 1  # no traceback
    assert names(tmp_path / "in") == {name}


def test_snapshot_from_the_environment(
    snapshot: Path, artifact: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["build", "--tp", "2", "--out", artifact]
    unset = dsv2mk(*args)
    assert unset.code == 2
    assert "DSV2MK_SNAPSHOT" in unset.err
    monkeypatch.setenv("DSV2MK_SNAPSHOT", str(snapshot))
    assert "up to date" in dsv2mk(*args).out
    monkeypatch.setenv("DSV2MK_SNAPSHOT", str(snapshot / "nowhere"))
    assert dsv2mk(*args).code == 10
    assert "up to date" in dsv2mk("build", snapshot, *args[1:]).out  # the argument comes first


# ---- the hub's cache ----

MAIN, OLD = "1" * 40, "2" * 40


@pytest.fixture
def hub(shared: Path, tmp_path: Path) -> Path:
    """HF_HOME with org/name in it, as huggingface_hub lays it out: two revisions, read-only."""
    repo = tmp_path / "hf" / "hub" / "models--org--name"
    for revision, branch in ((MAIN, "main"), (OLD, "v0.5")):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / branch).write_text(revision)
        folder = repo / "snapshots" / revision
        folder.mkdir(parents=True)
        (repo / "blobs").mkdir(exist_ok=True)
        for path in (shared / "snapshot").iterdir():
            data = path.read_bytes()
            if path.name == "tokenizer_config.json":
                data += revision.encode()  # so that the two differ
            if path.suffix == ".safetensors":  # LFS
                name = hashlib.sha256(data).hexdigest()
            else:  # as `git hash-object` names it
                name = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            (repo / "blobs" / name).write_bytes(data)
            (folder / path.name).symlink_to(f"../../blobs/{name}")
    for path in sorted((tmp_path / "hf").rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    return tmp_path / "hf"


@pytest.mark.slow
def test_a_repo_id_is_found_in_the_cache_and_only_read(
    shared: Path, hub: Path, tmp_path: Path
) -> None:
    before = state(hub)
    for out, options, env in (
        ("a", [], {"HF_HOME": str(hub)}),
        ("b", ["--revision", OLD], {"HF_HUB_CACHE": str(hub / "hub"), "HF_HUB_OFFLINE": "1"}),
        ("b", ["--revision", "v0.5"], {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}),
    ):
        args = [*build_args("org/name", tmp_path / out), "--check-hashes", *options, "--json"]
        done = spawn(*args, **env)
        assert done.code == 0, done.err
    assert done.json["up_to_date"] is True  # two names of one revision
    assert state(hub) == before

    expected = read_bytes(shared / "artifact")
    for out, revision in (("a", MAIN), ("b", OLD)):
        built = read_bytes(tmp_path / out)
        assert built.pop("tokenizer_config.json").endswith(revision.encode())
        assert all(built[name] == expected[name] for name in set(built) - {"manifest.json"})


@pytest.mark.parametrize(
    ("name", "options", "code", "said"),
    [
        ("org/other", [], 10, "hf download org/other"),
        ("org/name", ["--revision", "v9"], 10, "hf download org/name --revision v9"),
        ("org/name", ["--revision", "3" * 40], 10, "neither a folder nor in the hub cache"),
        ("org--/..name", [], 10, "neither a folder nor in the hub cache"),
        ("no/such/folder", [], 10, "not a folder"),
        (".", ["--revision", "main"], 2, "--revision is for a repo id"),
    ],
)
def test_a_snapshot_that_is_not_found(
    hub: Path, name: str, options: list[str], code: int, said: str
) -> None:
    done = spawn("plan", name, "--tp", "1", *options, HF_HOME=str(hub), HF_HUB_OFFLINE="1")
    assert done.code == code
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json"])
def test_check_hashes_names_a_file_with_wrong_bytes(
    hub: Path, tmp_path: Path, dsv2mk: Call, name: str
) -> None:
    folder = hub / "hub" / "models--org--name" / "snapshots" / MAIN
    args = [*build_args(folder, tmp_path / "artifact"), "--check-hashes"]
    blob = (folder / name).resolve()
    blob.chmod(0o644)
    good = blob.read_bytes()
    at = -1 if name == SINGLE else re.search(rb"\d", good).start()  # still JSON
    flip_byte(blob, at)
    assert len(blob.read_bytes()) == len(good)
    done = dsv2mk(*args)
    assert done.code == 10
    assert name in done.err
    assert not (tmp_path / "artifact").exists()
    blob.write_bytes(good)
    assert dsv2mk(*args).code == 0


def test_check_hashes_of_a_download_to_a_folder(
    snapshot: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """`hf download --local-dir` keeps commit, etag and time beside the files."""
    args = [*build_args(snapshot, tmp_path / "artifact"), "--check-hashes"]
    unknown = dsv2mk(*args)
    assert unknown.code == 2
    assert "tells no hashes" in unknown.err
    kept = snapshot / ".cache" / "huggingface" / "download" / f"{SINGLE}.metadata"
    kept.parent.mkdir(parents=True)
    etag = hashlib.sha256((snapshot / SINGLE).read_bytes()).hexdigest()
    kept.write_text(f"{MAIN}\n{etag}\n1700000000.0\n")
    assert dsv2mk(*args).code == 0
    flip_byte(snapshot / SINGLE)
    assert dsv2mk(*args).code == 10


def test_a_link_without_its_blob(hub: Path, tmp_path: Path, dsv2mk: Call) -> None:
    folder = hub / "hub" / "models--org--name" / "snapshots" / MAIN
    blob = (folder / SINGLE).resolve()
    blob.parent.chmod(0o755)
    blob.unlink()
    done = dsv2mk(*build_args(folder, tmp_path / "artifact"))
    assert done.code == 10
    assert SINGLE in done.err
    assert blob.name in done.err


# ---- plan ----


def make_holes(path: Path, fill: bytes = b"") -> None:
    """Keep a safetensors file's header; its data becomes a hole, or is filled with one byte."""
    size, start = path.stat().st_size, data_start(path)
    os.truncate(path, start)
    os.truncate(path, size)
    if fill:
        path.write_bytes(path.read_bytes()[:start] + fill * (size - start))


@pytest.mark.parametrize("fill", [b"", b"\xff"], ids=["holes", "nan"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_plan_tells_what_a_build_makes(
    shared: Path,
    snapshot: Path,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    fill: bytes,
) -> None:
    out = tmp_path / "artifact"
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.25")
    built = dsv2mk(*build_args(snapshot, out, ranks), "--json").json
    make_holes(snapshot / SINGLE, fill)
    before = state(snapshot)
    plan = dsv2mk("plan", snapshot, "--tp", ranks, "--out", tmp_path / "to" / "be", "--json").json
    assert state(snapshot) == before
    assert names(tmp_path) == {"snapshot", "artifact"}

    assert plan["input_bytes"] == built["input_bytes"]
    assert plan["input_bytes"] == sum(
        t.nbytes for t in load_file(shared / "snapshot" / SINGLE).values()
    )
    assert (plan["input_files"], plan["input_fp8"]) == (1, False)
    assert plan["disk_margin"] == 1 << 28
    assert plan["cache_bytes_per_position"] == 3 * (24 + 8) * 2  # layers * (kv_lora + rope), bf16
    shards = {path.name: path.stat() for path in out.glob("*.safetensors")}
    assert sorted(name for rank in plan["ranks"] for name in rank["files"]) == sorted(shards)
    on_disk = {info.st_ino: info.st_size for info in shards.values()}
    assert plan["disk_bytes"] == sum(on_disk.values())
    assert plan["group_bytes"] == sum(info.st_size for info in shards.values())
    for number, rank in enumerate(plan["ranks"]):
        assert rank["rank"] == number
        assert rank["file_bytes"] == sum(shards[name].st_size for name in rank["files"])
        with safe_open(out / f"rank-{number:02d}.ffn.safetensors", "pt") as ffn:
            assert rank["units"] == ffn.get_slice("ffn_down").get_shape()[0]
    # All units: 2 of the dense layer (200), 2 for each of 8 experts (136) and 3 shared (272).
    assert sum(rank["units"] for rank in plan["ranks"]) == 2 + 2 * (8 * 2 + 3)


def test_plan_of_the_whole_model_from_headers(tmp_path: Path, dsv2mk: Call) -> None:
    """471 GB of holes: whoever reads data here does not come back."""
    config = preset_config("deepseek-v2")
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, shape in checkpoint_tensors(Geometry.from_config(config)).items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(tmp_path / SINGLE, 8 + len(header) + end)

    plan = dsv2mk("plan", tmp_path, "--tp", "8", "--out", tmp_path, "--json").json
    assert round(plan["input_bytes"] / 1e8) == 4715
    assert {round(rank["token_bytes"] / 1e7) for rank in plan["ranks"]} == {502}
    # 160 experts of 12 units and 24 shared ones in 59 layers, 96 in the dense one.
    assert [rank["units"] for rank in plan["ranks"]] == [(59 * (160 * 12 + 24) + 96) // 8] * 8
    free = shutil.disk_usage(tmp_path).free
    assert abs(plan["disk_free"] - free) < free / 4 + (1 << 30)
    shown = dsv2mk("plan", tmp_path, "--tp", "8").out
    assert "471" in shown
    assert "5.02 GB" in shown


def test_plan_and_build_refuse_the_same(snapshot: Path, tmp_path: Path, dsv2mk: Call) -> None:
    sharded = make_snapshot(tmp_path / "sharded", CONFIG, max_shard_size=2_000_000)
    missing = sorted(sharded.glob("*.safetensors"))[1]
    missing.unlink()
    for source, ranks, named in (
        (snapshot, 5, "a divisor of the 24 heads"),
        (snapshot, 48, "a divisor of the 24 heads"),
        (sharded, 2, missing.name),
    ):
        planned = dsv2mk("plan", source, "--tp", ranks)
        built = dsv2mk(*build_args(source, tmp_path / "artifact", ranks))
        assert (planned.code, built.code) == (10, 10)
        assert named in planned.err
        assert planned.err == built.err
        assert names(tmp_path) == {"snapshot", "sharded"}


@pytest.mark.parametrize("margin", ["", "much", "-1", "nan", "inf", "1e400"])
def test_a_margin_that_is_no_number(
    snapshot: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, margin: str
) -> None:
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", margin)
    for args in (["plan", snapshot, "--tp", "2"], build_args(snapshot, tmp_path / "artifact")):
        done = dsv2mk(*args)
        assert done.code == 2
        assert "DSV2MK_CACHE_SAFETY_GIB" in done.err


# ---- synth ----


def test_synth_follows_from_seed_and_name_alone(tmp_path: Path) -> None:
    one, same, other = (
        make_snapshot(tmp_path / name, CONFIG, seed=seed)
        for name, seed in (("one", 7), ("same", 7), ("other", 8))
    )
    assert read_bytes(one) == read_bytes(same)
    sharded = make_snapshot(tmp_path / "sharded", CONFIG, seed=7, max_shard_size=300_000)
    # One layer less: the tensors that are left keep their values.
    fewer = make_snapshot(tmp_path / "fewer", small_config(num_hidden_layers=2), seed=7)

    a, b, c = (load_file(folder / SINGLE) for folder in (one, other, fewer))
    assert all(not torch.equal(a[name], b[name]) for name in a)
    damped = ("o_proj.weight", "down_proj.weight")  # scaled by the number of layers
    kept = [name for name in c if not name.endswith(damped)]
    assert all(torch.equal(a[name], c[name]) for name in kept)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = {name: load_file(sharded / name) for name in set(index["weight_map"].values())}
    assert {path.name for path in sharded.glob("*.safetensors")} == set(files)
    assert len(files) > 5
    assert set(index["weight_map"]) == set(a)
    assert all(torch.equal(files[index["weight_map"][name]][name], a[name]) for name in a)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in a.values())
    for tensors in files.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 300_000


def test_synth_fp8_is_the_bf16_one_quantised(tmp_path: Path) -> None:
    plain = load_file(make_snapshot(tmp_path / "plain", CONFIG) / SINGLE)
    folder = make_snapshot(tmp_path / "fp8", CONFIG, dtype="fp8-block")
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert given["quant_method"] == "fp8"
    assert given["weight_block_size"] == [128, 128]
    fp8 = load_file(folder / SINGLE)
    linear = {name for name in plain if re.search(r"_proj(_with_mqa)?\.weight$", name)}
    assert set(fp8) == set(plain) | {f"{name}_scale_inv" for name in linear}
    for name in set(plain) - linear:
        assert torch.equal(fp8[name], plain[name])
    powers = 0
    for name in linear:
        weight, scale = fp8[name], fp8[f"{name}_scale_inv"]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        rows, columns = plain[name].shape
        assert scale.shape == (-(-rows // 128), -(-columns // 128))
        wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        expected = plain[name].double()
        # Half a step of E4M3 (2^-4 of the value, or 2^-10 where subnormal) and of bf16 (2^-9).
        allowed = expected.abs() * (2**-4 + 2**-8) + wide * 2**-10
        assert ((weight.double() * wide - expected).abs() <= allowed).all()
        assert weight[:128, :128].double().abs().max() == 448
        powers += int((torch.frexp(scale)[0] == 0.5).sum())
    assert powers == 0  # as DeepSeek's: nothing may take such scales for powers of two


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda out: out.symlink_to("nowhere")])
def test_synth_needs_a_new_folder(tmp_path: Path, dsv2mk: Call, make: Any) -> None:
    out = tmp_path / "out"
    make(out)
    before = out.lstat()
    done = dsv2mk("synth", out, "--geometry", "tiny")
    assert done.code == 2
    assert str(out) in done.err
    assert out.lstat() == before
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("layers", [1, 2])
def test_synth_layers(tmp_path: Path, dsv2mk: Call, layers: int) -> None:
    out = tmp_path / "out"
    done = dsv2mk("synth", out, "--geometry", "tiny", "--layers", layers, "--json")
    assert done.code == 0
    config = json.loads((out / "config.json").read_text())
    assert config == {**preset_config("tiny"), "num_hidden_layers": layers}
    tensors = load_file(out / SINGLE)
    found = {int(m[1]) for name in tensors if (m := re.search(r"\.layers\.(\d+)\.", name))}
    assert found == set(range(layers))
    assert done.json["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        *((["--max-shard-size", size], 2) for size in ("0", "0GB", "-1", "1.5GB", "5XB", "", "GB")),
        (["--layers", "0"], 2),
        (["--seed", "-1"], 2),
        (["--dtype", "int4"], 2),
        (["--geometry", "deepseek-v9"], 2),
        (["--geometry", "/"], 10),
    ],
)
def test_synth_refuses(tmp_path: Path, dsv2mk: Call, options: list[str], code: int) -> None:
    done = dsv2mk("synth", tmp_path / "out", "--geometry", "tiny", *options)
    assert done.code == code
    assert options[0].lstrip("-") in done.err or options[1] in done.err
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("text", "limit"), [("300KB", 300_000), ("300 kb", 300_000), ("300KiB", 307_200), ("1M", 10**6)]
)
def test_synth_shard_sizes(tmp_path: Path, dsv2mk: Call, text: str, limit: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out, twin = tmp_path / "out", tmp_path / "twin"
    args = ["synth", out, "--geometry", tmp_path / "config.json", "--max-shard-size", text]
    assert dsv2mk(*args).code == 0
    assert read_bytes(out) == read_bytes(make_snapshot(twin, CONFIG, max_shard_size=limit))


def test_an_interrupted_synth_leaves_nothing(
    tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    assert dsv2mk("synth", tmp_path / "out", "--geometry", "tiny").code == 130
    assert names(tmp_path) == set()


def test_the_shared_artifact_is_sound(shared: Path) -> None:
    """What most tests here compare with."""
    assert Artifact.open(shared / "artifact").verify() == {}
