"""From the start of a process to the first token, in one run: `python tests/bench_start.py WHERE`.

WHERE is an artifact's folder or STORE::NAME, of one rank. In turns, in random order: the runner
that decodes one token, for each way to verify; and a process that brings the same tensors to the
same GPU with safetensors, and decodes nothing. Seconds are of whole processes, imports included.
Files are read once before, so that they come from the page cache; with --cold that is emptied
before each process, which takes root, and only the default way to verify is measured. Prints one
JSON object.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.hashing import hash_file
from dsv2mk.manifests.layout import PARTS

_SAFETENSORS = """
import sys
import torch
from safetensors.torch import load_file
held = [load_file(path, device="cuda:0") for path in sys.argv[1:]]
torch.cuda.synchronize()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    artifact = Artifact.open(args.where)
    layout = artifact.layouts[0]
    files = [artifact.file_path(layout.file_name(part)) for part in PARTS]
    for path in [] if args.cold else files:
        hash_file(path)  # into the page cache
    runner = [sys.executable, "-m", "dsv2mk.runner", "generate", args.where]
    runner += ["--backend", "gpu", "--token-ids", "0", "--max-new", "1", "--json"]
    kinds = ["sample"] if args.cold else ["none", "sample", "full"]
    commands = {
        **{f"verify {kind}": [*runner, "--verify", kind] for kind in kinds},
        "safetensors": [sys.executable, "-c", _SAFETENSORS, *map(str, files)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    rng = random.Random(0)
    warm = 0 if args.cold else 1  # rounds that do not count
    for number in range(args.rounds + warm):
        for name, command in rng.sample(sorted(commands.items()), len(commands)):
            if args.cold:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            if number >= warm:
                seconds[name].append(time.perf_counter() - started)
    plain = statistics.median(seconds["safetensors"])
    print(
        json.dumps(
            {
                "cold": args.cold,
                "bytes": sum(path.stat().st_size for path in files),
                "seconds": seconds,
                "safetensors_over_runner": {
                    name: plain / statistics.median(values)
                    for name, values in seconds.items()
                    if name != "safetensors"
                },
                "device": torch.cuda.get_device_name(0),
                "digest": artifact.manifest.digest,
            }
        )
    )


if __name__ == "__main__":
    main()
