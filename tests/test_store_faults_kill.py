"""Stores whose users die at any step, or all work at the same time."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import names
from store_children import call, count_steps, die_after, die_at_step, loop, wait
from stores import (
    chunk_everywhere,
    files_of,
    hidden,
    manifest_again,
    offered,
    put,
    size_of,
    variant,
)

from dsv2mk.artifacts import collect, pull, store_commands  # noqa: F401  (chunks are small there)
from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.store import Store

pytestmark = pytest.mark.slow

STEPS = 60  # points that are spread over all steps
TIMES = 15  # points in time


@pytest.fixture
def place(few: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`artifact` and `old`, which share few files and have files of several chunks."""
    chunk_again(few, monkeypatch)
    return few


def chunk_again(few: Path, patch: pytest.MonkeyPatch) -> None:
    manifests = {name: read_manifest(few / name) for name in ("artifact", "old")}
    chunk_everywhere(patch)
    for name, manifest in manifests.items():
        again = manifest_again(few / name, manifest)
        assert sum(len(entry.chunks) for entry in again.files.values()) > 20


def points(steps: int, seconds: float, log: Path) -> list[Callable[[list[object]], bool]]:
    """Ways to kill a command: at steps from the first to the last, and at times."""
    assert steps >= STEPS
    rng = random.Random(1)
    chosen = sorted({1 + round(n * (steps - 1) / (STEPS - 1)) for n in range(STEPS)})
    assert chosen[0] == 1
    assert chosen[-1] == steps
    at_steps = [lambda args, n=n: die_at_step(args, n, log) for n in chosen]
    moments = [seconds * (n + rng.random()) / TIMES for n in range(TIMES)]
    return at_steps + [lambda args, t=t: die_after(args, t, log) for t in moments]


def age(store: Path) -> None:
    """Let all that is left be as old as after two hours."""
    for path in [*store.rglob(".*"), *(store / "leases").iterdir()]:
        before = path.stat().st_mtime - 7200
        os.utime(path, (before, before))


HOW = pytest.mark.parametrize("how", [["--copy"], []], ids=["copied", "linked"])


@HOW
@pytest.mark.parametrize("first", [True, False])
def test_a_publisher_that_is_killed(
    first: bool, how: list[str], place: Path, tmp_path: Path
) -> None:
    """What was there stays; what it has done is taken up; nothing of it stays behind."""
    store, log = tmp_path / "store", tmp_path / "log"
    args = ["publish", place / "artifact", store, "--tag", "v1", "--json", *how]
    new, old = files_of(place / "artifact"), files_of(place / "old")

    def fresh() -> None:
        shutil.rmtree(store, ignore_errors=True)
        if not first:
            put(place / "old", store, "old")

    fresh()
    steps, seconds = count_steps(args, log)
    killed = reused = resumed = tagged = 0
    for kill in points(steps, seconds, log):
        fresh()
        killed += kill(args)
        tags = names(store / "tags") if (store / "tags").exists() else set()
        tags = {name for name in tags if not name.startswith(".")}
        assert tags <= {"v1", "old"}
        assert first or "old" in tags
        for tag in tags:
            assert offered(store, tag) == (old if tag == "old" else new)
            assert call("pull", store, tag, tmp_path / "out").code == 0
            assert files_of(tmp_path / "out") == (old if tag == "old" else new)
            shutil.rmtree(tmp_path / "out")
        tagged += "v1" in tags
        if (store / "store.json").exists():
            found = call("verify", store)
            assert found.code == 0, found
        again = call(*args)
        assert again.code == 0, again
        done = again.json
        counts = [done[f"bytes_{what}"] for what in ("written", "resumed", "shared", "reused")]
        assert sum(counts) == size_of(new)
        assert how or counts[0] <= len(new["manifest.json"])  # the rest is linked
        resumed += counts[1] > 0
        reused += counts[3] > 0
        assert offered(store, "v1") == new
        age(store)
        assert call("gc", store, "--grace", "0s").code == 0
        assert hidden(store) == []
        assert offered(store, "v1") == new
        assert first or offered(store, "old") == old
        assert files_of(place / "artifact") == new
    assert killed >= 50
    assert resumed >= 5 or not how
    assert reused >= 10
    assert 0 < tagged < STEPS


@HOW
@pytest.mark.parametrize("add", [False, True])
def test_a_pull_that_is_killed(add: bool, how: list[str], place: Path, tmp_path: Path) -> None:
    """The folder is absent or whole; one that is added to never has a file that is not whole."""
    store, log, out = tmp_path / "store", tmp_path / "log", tmp_path / "node" / "out"
    put(place / "artifact", store)
    args = ["pull", store, "v1", out, "--json", *how]
    files = files_of(place / "artifact")

    def fresh() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if add:
            assert call(*args, "--rank", 0).code == 0

    fresh()
    steps, seconds = count_steps(args, log)
    kills = points(steps, seconds, log) if steps >= STEPS else None
    if kills is None:  # each of its steps, and times
        kills = [lambda args, n=n: die_at_step(args, n, log) for n in range(1, steps + 1)]
        kills += [lambda args, n=n: die_after(args, seconds * n / 40, log) for n in range(40)]
    killed = resumed = whole = 0
    for kill in kills:
        fresh()
        before = set(files_of(out)) if add else set()
        killed += kill(args)
        found = files_of(out) if out.exists() else {}
        assert add or found in ({}, files)
        assert before <= set(found)
        assert found == {name: files[name] for name in found}
        whole += found == files
        again = call(*args)
        assert again.code == 0, again
        resumed += again.json["bytes_resumed"] > 0
        assert how or again.json["bytes_written"] <= len(files["manifest.json"])
        assert files_of(out) == files
        assert names(out.parent) == {"out"}
    assert offered(store, "v1") == files
    assert killed >= min(50, steps)  # those at steps are sure
    assert resumed >= 10 or not how
    assert 0 < whole < len(kills)


def test_all_at_once_lose_nothing(place: Path, tmp_path: Path) -> None:
    """Two publish, prove and remove what shares shards; two collect; one reads what stays,
    and one looks at all that is there.

    Every other time files are linked rather than copied.

    For longer than a minute, so that every one of them meets every other at many steps.
    """
    store, seconds = tmp_path / "store", 63.0
    sources = {"p0": place / "artifact", "p1": variant(place / "artifact", tmp_path / "b", "b")}
    expected = {tag: files_of(folder) for tag, folder in sources.items()}
    expected["keep"] = files_of(place / "old")
    put(place / "old", store, "keep")
    assert len(set(expected["p0"].values()) & set(expected["p1"].values())) >= 5
    shard = max(path.stat().st_size for path in sources["p0"].iterdir())

    def how(number: int) -> list[str]:
        return [] if number % 2 else ["--copy"]

    def pulled(tag: str, out: Path, number: int) -> int:
        shutil.rmtree(out, ignore_errors=True)
        done = call("pull", store, tag, out, "--json", *how(number // 2))
        if done.code == 0:
            assert files_of(out) == expected[tag]
        else:
            assert done.code == 11, done
            assert not out.exists()
        return done.code

    def publishes(tag: str) -> Callable[[int], str]:
        def work(number: int) -> str:
            done = call("publish", sources[tag], store, "--tag", tag, "--json", *how(number))
            assert done.code == 0, done
            replaced = [line for line in done.err.splitlines() if "replaced" in line]
            assert all(" is another name of " in line for line in replaced), replaced
            assert pulled(tag, tmp_path / f"own-{tag}", number) == 0
            verified = call("verify", f"{store}::{tag}")
            assert verified.code == 0, verified
            if number % 4 != 3:
                removed = call("rm", store, tag)
                assert removed.code == 0, removed
                time.sleep(0.1 * (number % 2))  # at times both are gone, with what they share
            if done.json["bytes_shared"]:
                return "linked"
            return "copied" if done.json["bytes_written"] >= shard else "reused"

        return work

    def collects(number: int) -> str:
        done = call("gc", store, "--grace", "0s", "--json")
        assert done.code == 0, done
        return "deleted" if done.json["objects"] else "nothing"

    def reads(number: int) -> str:
        assert pulled("keep", tmp_path / "read", number) == 0
        verified = call("verify", f"{store}::keep")
        assert verified.code == 0, verified
        return str(pulled(("p0", "p1")[number % 2], tmp_path / "maybe", number))

    def looks(number: int) -> str:
        """What is removed meanwhile is not damage."""
        for command in ("ls", "verify"):
            done = call(command, store)
            assert done.code == 0, done
        return "right"

    works = {"p0": publishes("p0"), "p1": publishes("p1"), "gc": collects, "gc2": collects}
    works |= {"reader": reads, "looker": looks}
    logs = {name: tmp_path / f"{name}.json" for name in works}
    pids = [loop(work, seconds, logs[name]) for name, work in works.items()]
    assert [wait(pid) for pid in pids] == [0] * 6
    counts = {name: json.loads(log.read_text()) for name, log in logs.items()}
    print(json.dumps(counts))
    assert min(sum(found.values()) for found in counts.values()) >= 20, counts
    assert counts["gc"].get("deleted", 0) >= 5, counts  # it had something to do
    for kind in ("linked", "copied"):  # which of both finds a shard gone is chance
        assert sum(counts[tag].get(kind, 0) for tag in sources) >= 5, counts
    for tag, folder in sources.items():
        put(folder, store, tag)
    assert call("verify", store).code == 0
    age(store)
    assert call("gc", store, "--grace", "0s").code == 0
    assert hidden(store) == []
    assert {tag: offered(store, tag) for tag in expected} == expected
    assert sorted(Store(store).tag_names()) == sorted(expected)
