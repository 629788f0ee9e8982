"""Where a snapshot is found: a path, the environment, the hub's cache; and `--check-hashes`."""

import hashlib
import re
from pathlib import Path

import pytest
from helpers import (
    SINGLE,
    Call,
    build_args,
    flip_byte,
    hub_snapshot,
    read_bytes,
    slow,
    spawn,
    state,
)


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


MAIN, OLD = "1" * 40, "2" * 40


@pytest.fixture
def hub(shared: Path, tmp_path: Path) -> Path:
    """HF_HOME with org/name in it, as huggingface_hub lays it out: two revisions, read-only."""
    repo = tmp_path / "hf" / "hub" / "models--org--name"
    for revision, branch in ((MAIN, "main"), (OLD, "v0.5")):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / branch).write_text(revision)

        def mark(name: str, data: bytes, revision: str = revision) -> bytes:
            return data + revision.encode() if name == "tokenizer_config.json" else data

        hub_snapshot(repo, revision, shared / "snapshot", mark)  # so that the two differ
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
        slow("org/name", ["--revision", "v9"], 10, "hf download org/name --revision v9"),
        slow("org/name", ["--revision", "3" * 40], 10, "neither a folder nor in the hub cache"),
        slow("org--/..name", [], 10, "neither a folder nor in the hub cache"),
        slow("no/such/folder", [], 10, "not a folder"),
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
