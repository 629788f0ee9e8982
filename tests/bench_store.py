"""How fast `publish` and `pull` are, hashes included, against plain copies. No test.

Everything is measured in one run, in turns, on one file system, of an artifact whose pages are in
the cache; rates are GB/s of the artifact's bytes. `publish` and `pull` make second names, or share
extents, where the file system can; with `--copy` they wait until all is on disk. A plain copy does
not, so there is one that is followed by a sync of its files.
`make bench-store` runs it with the defaults.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_build import PROGRAM, machine, spread

from dsv2mk.artifacts.hashing import hash_file

_OURS = """
import sys, time
from pathlib import Path
from dsv2mk.artifacts.publish import create_store, publish
from dsv2mk.artifacts.pull import pull
from dsv2mk.artifacts.store import Store
what, how, a, b = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
links = how == "linked"
print("ready", flush=True)
input()
begun = time.perf_counter()
if what == "publish":
    publish(a, create_store(b), "v1", links=links)
else:
    pull(Store.open(a), Store.open(a).resolve("v1"), b, links=links)
print(time.perf_counter() - begun)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build"))
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir)).resolve()
    try:
        result = measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    artifact = make(folder, options)
    files = {path.stat().st_ino: path for path in artifact.iterdir()}
    size = sum(path.stat().st_size for path in files.values())
    store, new = folder / "store", folder / "new"
    meter = Meter(artifact, folder / "spare")
    meter.ours("publish", "copied", artifact, store)
    stages: dict[str, Callable[[], float]] = {
        "cp": lambda: meter.plain("cp", "-r", "--preserve=links", artifact, new),
        "cp, sync": lambda: meter.plain("sh", "-c", _CP_SYNC, "sh", artifact, new),
        "publish": lambda: meter.ours("publish", "linked", artifact, new),
        "publish --copy": lambda: meter.ours("publish", "copied", artifact, new),
        "publish again": lambda: meter.ours("publish", "linked", artifact, store),
        "pull": lambda: meter.ours("pull", "linked", store, new),
        "pull --copy": lambda: meter.ours("pull", "copied", store, new),
        "pull again": lambda: meter.ours("pull", "linked", store, folder / "pulled"),
    }
    if shutil.which("rsync"):
        stages["rsync"] = lambda: meter.plain("rsync", "-aH", f"{artifact}/", new)
    meter.ours("pull", "copied", store, folder / "pulled")
    for path in [*files.values(), *(store / "objects").glob("*/*"), *(folder / "pulled").iterdir()]:
        hash_file(path)  # into the page cache
    rates: dict[str, list[float]] = {name: [] for name in stages}
    rng = random.Random(0)
    for number in range(options.rounds + 1):
        for name, stage in rng.sample(
            sorted(stages.items()), len(stages)
        ):  # no one is always first
            rate = size / stage() / 1e9
            shutil.rmtree(new, ignore_errors=True)
            if number:  # the first round warms up
                rates[name].append(rate)
    return {
        "command": f"python tests/bench_store.py --geometry {options.geometry} "
        f"--layers {options.layers} --tp {options.tp} --rounds {options.rounds}",
        "machine": machine(folder),
        "bytes": size,
        "rsync": "measured" if "rsync" in stages else "not installed: not measured",
        "gb_s": {name: spread(values) for name, values in rates.items()},
        "ratios": {
            f"{ours} / {plain}": spread([a / b for a, b in zip(*pair, strict=True)])
            for ours in ("publish", "pull", "publish --copy", "pull --copy")
            for plain in ("cp", "cp, sync", "rsync")
            if plain in rates
            for pair in [(rates[ours], rates[plain])]
        },
    }


_CP_SYNC = 'cp -r --preserve=links "$1" "$2" && find "$2" -exec sync {} +'


class Meter:
    """Measures seconds, each time with the memory that a copy has just given back.

    Memory that nobody has used for some seconds may cost more than the copy: a virtual machine
    has to get it from its host first.
    """

    def __init__(self, artifact: Path, spare: Path) -> None:
        self._artifact = artifact
        self._spare = spare

    def plain(self, *command: object) -> float:
        """Of a command."""
        self._warm()
        begun = time.perf_counter()
        subprocess.run([str(word) for word in command], check=True)
        return time.perf_counter() - begun

    def ours(self, *words: object) -> float:
        """Of a publish or a pull, without the 0.3 s of its start."""
        process = subprocess.Popen(
            [sys.executable, "-c", _OURS, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self._warm()
        said, _ = process.communicate("\n")
        assert process.returncode == 0
        return float(said)

    def _warm(self) -> None:
        subprocess.run(["cp", "-r", "--preserve=links", self._artifact, self._spare], check=True)
        os.sync()
        shutil.rmtree(self._spare)


def make(folder: Path, options: argparse.Namespace) -> Path:
    snapshot, artifact = folder / "snapshot", folder / "artifact"
    synth = ["synth", snapshot, "--geometry", options.geometry, "--layers", str(options.layers)]
    build = ["build", snapshot, "--tp", str(options.tp), "--out", artifact]
    for command in (synth, build):
        subprocess.run([PROGRAM, *command], stdout=subprocess.PIPE, check=True)
    shutil.rmtree(snapshot)
    return artifact


if __name__ == "__main__":
    main()
