"""`build`: same input, same bytes; what is up to date, changed or damaged; where it may write."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import JOBS
from helpers import (
    SINGLE,
    Call,
    build_args,
    edit_json,
    flip_byte,
    make_snapshot,
    names,
    read_bytes,
    small_config,
    spawn,
    state,
)

from dsv2mk.pipeline import build as build_module

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


def test_more_workers_than_jobs(few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def counting(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counting)
    out = few / "work" / "artifact"
    assert dsv2mk(*build_args(few / "snapshot", out, workers=100_000)).code == 0
    assert 1 < len(started) <= JOBS
    assert read_bytes(out) == read_bytes(few / "artifact")


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
    make_snapshot(tmp_path / "sharded", small_config(), max_shard_size=400_000)
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


def memory_of_inputs() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "dsv2mk" / "inputs"


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


def test_up_to_date_where_nothing_can_be_written(
    snapshot: Path, artifact: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another user; hooks, since the superuser may write everywhere."""
    mkdir = os.mkdir

    def no_mkdir(path: Any, *args: Any) -> None:
        if Path(path).parent == tmp_path and Path(path).name != "cache":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "mkdir", no_mkdir)
    before = state(artifact)
    args = build_args(snapshot, artifact)
    for _ in range(2):  # hashed, then remembered
        done = dsv2mk(*args)
        assert (done.code, done.err) == (0, "")
        assert "up to date" in done.out
    (snapshot / "LICENSE").write_text("new")
    changed = dsv2mk(*args)
    assert changed.code == 2
    assert "source.copied.LICENSE added" in changed.err
    refused = dsv2mk(*args, "--overwrite")
    assert refused.code == 2
    assert "Permission denied" in refused.err
    assert state(artifact) == before
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
        r"source\.copied\.LICENSE-MODEL added",
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
    assert names(tmp_path) == {"snapshot", "artifact"}

    replaced = dsv2mk(*args, "--overwrite", "--json")
    assert (replaced.code, replaced.json["up_to_date"]) == (0, False)
    assert dsv2mk(*build_args(snapshot, tmp_path / "fresh", ranks)).code == 0
    assert read_bytes(artifact) == read_bytes(tmp_path / "fresh")
    assert "up to date" in dsv2mk(*args).out
    assert names(tmp_path) == {"snapshot", "artifact", "fresh"}


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


def test_out_on_a_mount_point_is_refused_before_any_work(
    snapshot: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renamed. A real one where this process may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "link").symlink_to(disk)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    real = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    if not real:
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("it works"))
    try:
        for out in (disk, tmp_path / "link"):
            done = dsv2mk(*build_args(snapshot, out), "--overwrite")
            assert done.code == 2
            assert f"{disk} is a mount point" in done.err
        assert names(disk) == set()
        assert names(tmp_path) == {"snapshot", "disk", "link"}
    finally:
        if real:
            subprocess.run(["umount", str(disk)], check=True)


def test_out_that_is_a_link_to_itself_is_refused(
    snapshot: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for out in (tmp_path / "loop", tmp_path / "loop" / "artifact"):
        done = dsv2mk(*build_args(snapshot, out))
        assert done.code in (2, 10)
        assert len(done.err.splitlines()) == 1
        assert "loop" in done.err
    assert os.readlink(tmp_path / "loop") == "loop"


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
