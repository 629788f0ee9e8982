"""How fast a build is, against the plain way and a plain copy of the same files. No test.

Everything is measured in one run, in turns, on one checkpoint whose pages are in the cache; rates
are GB/s of bf16 input. `make bench-build` runs it with the defaults.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dsv2mk.artifacts.console import table_text
from dsv2mk.artifacts.hashing import hash_file
from dsv2mk.manifests.geometry import preset_config
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.pipeline.quantise import quantise_band
from dsv2mk.pipeline.reader import Reader, band_rows
from dsv2mk.pipeline.snapshot import Snapshot
from dsv2mk.pipeline.synth import synth

PROGRAM = Path(sys.executable).with_name("dsv2mk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("build"))
    parser.add_argument("--output-json", type=Path, default=Path("build/bench-build.json"))
    parser.add_argument(
        "--quantisers", action="store_true", help="Only compare numba, torch and numpy, in memory."
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quantisers:
        compare_quantisers(options)
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir)).resolve()
    try:
        result = measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.output_json.parent.mkdir(parents=True, exist_ok=True)
    options.output_json.write_text(json.dumps(result, indent=2) + "\n")
    report(result)
    print(f"\nwritten: {options.output_json}")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    source = make(folder / "input", options.geometry, options.layers)
    snapshot = Snapshot.open(source)
    files = [source / name for name in sorted(snapshot.headers)]
    size = snapshot.nbytes
    out = folder / "artifact"

    def whole_build() -> None:
        run_build(source, out, options.tp, options.workers)
        shutil.rmtree(out)

    stages: dict[str, tuple[int, Callable[[], None]]] = {
        # name: (bytes of bf16 input that it is for, what to run)
        "copy": (size, lambda: copy(files, folder / "copy", sync=False)),
        "copy, fsync": (size, lambda: copy(files, folder / "copy", sync=True)),
        "build": (size, whole_build),
        "plain way, 1 core": (size, lambda: plain_way(files, folder / "plain")),
        "read, 1 core": (size, lambda: read(snapshot)),
        "quantise, 1 core": quantise_stage(snapshot),
        "quantise plainly, 1 core": plain_quantise_stage(snapshot),
        "hash, 1 core": (size, lambda: hash_all(files)),
        "write, fsync": write_stage(folder / "written", size),
    }
    for path in files:  # into the page cache
        hash_file(path)
    whole_build()  # compiles, and warms up
    rates: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(options.rounds):
        for name, (amount, stage) in stages.items():
            started = time.perf_counter()
            stage()
            rates[name].append(amount / (time.perf_counter() - started) / 1e9)
    memory = measure_memory(folder, source, options)
    return {
        "command": f"python tests/bench_build.py --geometry {options.geometry} "
        f"--layers {options.layers} --tp {options.tp} --workers {options.workers} "
        f"--rounds {options.rounds}",
        "machine": machine(folder),
        "input": {"geometry": options.geometry, "layers": options.layers, "bytes": size},
        "ranks": options.tp,
        "workers": options.workers,
        "gb_s": {name: spread(values) for name, values in rates.items()},
        "ratios": ratios(rates),
        "memory": memory,
    }


# ---- what is compared ----


#: Runs a command and prints its peak memory in KiB. A process of its own, since the kernel counts
#: the memory of the process that forks to the one that is forked.
_PEAK = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run_build(source: Path, out: Path, ranks: int, workers: int) -> int:
    """The command, as a process of its own, start included; its peak memory in bytes."""
    build = [PROGRAM, "build", source, "--tp", str(ranks), "--out", out, "--workers", str(workers)]
    process = subprocess.run(
        [sys.executable, "-S", "-c", _PEAK, *build],
        stdout=subprocess.PIPE,
        env={**os.environ, "DSV2MK_CACHE_SAFETY_GIB": "0"},
        check=True,
    )
    return int(process.stdout.splitlines()[-1]) * 1024


def copy(files: list[Path], out: Path, *, sync: bool) -> None:
    out.mkdir()
    for path in files:
        shutil.copyfile(path, out / path.name)
        if sync:
            fd = os.open(out / path.name, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    shutil.rmtree(out)


def plain_way(files: list[Path], out: Path) -> None:
    """load_file, float32 division, cast, save_file: what a script of a few lines does."""
    out.mkdir()
    for path in files:
        tensors = load_file(path)
        quantised: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if ".mlp." in name and tensor.ndim == 2 and not name.endswith("mlp.gate.weight"):
                quantised[name], quantised[name + "_scale_inv"] = plain_quantise(tensor)
            else:
                quantised[name] = tensor
        save_file(quantised, out / path.name)
    shutil.rmtree(out)


def plain_quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantised.view(padded.shape)[:rows, :columns].contiguous(), scale


def read(snapshot: Snapshot) -> None:
    """Read every tensor as a build does, hashing as it passes."""
    reader = Reader()
    for tensor in snapshot.used:
        for _ in reader.bands(tensor, band_rows(tensor)):
            pass


def expert(snapshot: Snapshot) -> np.ndarray:
    """A routed expert's gate projection, as bf16 bits, from the cache hierarchy's far end."""
    name = next(name for name in snapshot.tensors if name.endswith("experts.0.gate_proj.weight"))
    return np.array(Reader().whole(snapshot.tensors[name]))


def quantise_stage(snapshot: Snapshot) -> tuple[int, Callable[[], None]]:
    copies = [expert(snapshot) for _ in range(64)]  # more than any cache holds
    rows, columns = copies[0].shape
    out = np.empty((BLOCK, columns), np.uint8).reshape(-1)
    scales = np.empty(-(-columns // BLOCK), np.float32)

    def stage() -> None:
        for weight in copies:
            for first in range(0, rows, BLOCK):
                band = weight[first : first + BLOCK]
                quantise_band(band, out, scales, row_stride=columns, block_stride=BLOCK)

    stage()  # loads the machine code
    return sum(weight.nbytes for weight in copies), stage


def plain_quantise_stage(snapshot: Snapshot) -> tuple[int, Callable[[], None]]:
    copies = [torch.from_numpy(expert(snapshot)).view(torch.bfloat16) for _ in range(16)]

    def stage() -> None:
        for weight in copies:
            plain_quantise(weight)

    return sum(weight.nbytes for weight in copies), stage


def hash_all(files: list[Path]) -> None:
    for path in files:
        hash_file(path)


def write_stage(path: Path, size: int) -> tuple[int, Callable[[], None]]:
    """Writes as many bytes as an artifact has for `size` bytes of input: about half."""
    block = np.random.default_rng(0).integers(0, 255, 4 << 20, np.uint8).tobytes()

    def stage() -> None:
        with open(path, "wb", buffering=0) as file:
            for _ in range(size // 2 // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        path.unlink()

    return size, stage


def measure_memory(folder: Path, big: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Peak resident memory of the command on the input and on one a quarter as large or less."""
    small = make(folder / "small", options.geometry, 1)
    out: dict[str, Any] = {}
    for name, source in (("small", small), ("big", big)):
        peaks = {}
        for workers in (1, options.workers):
            peaks[str(workers)] = run_build(source, folder / "memory", options.tp, workers)
            shutil.rmtree(folder / "memory")
        nbytes = Snapshot.open(source).nbytes
        out[name] = {"input_bytes": nbytes, "peak_rss_bytes_by_workers": peaks}
    return out


def compare_quantisers(options: argparse.Namespace) -> None:
    """One core, a band of 128 rows that stays in the cache: which library is the fastest?"""
    rng = torch.Generator().manual_seed(0)
    weight = (torch.randn(BLOCK, 5120, generator=rng) * 0.02).bfloat16()
    bits = weight.view(torch.uint16).numpy()
    outs = {name: np.zeros(bits.size, np.uint8) for name in ("numba", "torch", "numpy")}
    scales = np.empty(bits.shape[1] // BLOCK, np.float32)
    strides = {"row_stride": bits.shape[1], "block_stride": BLOCK}
    table = byte_table()
    runs: dict[str, Callable[[], object]] = {
        "numba": lambda: quantise_band(bits, outs["numba"], scales, **strides),
        "torch": lambda: quantise_band(bits, outs["torch"], scales, device="cpu:0", **strides),
        "numpy": lambda: table_quantise(bits, table, outs["numpy"].reshape(bits.shape)),
        "plain": lambda: plain_quantise(weight),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(options.rounds * 5):
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(20):
                run()
            rates[name].append(20 * bits.nbytes / (time.perf_counter() - started) / 1e9)
    assert (outs["numba"] == outs["torch"]).all()
    assert (outs["numba"] == outs["numpy"]).all()
    result = {
        "command": f"python tests/bench_build.py --quantisers --rounds {options.rounds}",
        "what": "GB/s of bf16, one core, 128 x 5120 in the cache; equal bytes checked",
        "machine": machine(Path.cwd()),
        "gb_s": {name: spread(values) for name, values in rates.items()},
    }
    options.output_json.parent.mkdir(parents=True, exist_ok=True)
    options.output_json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["gb_s"], indent=2))


def byte_table() -> np.ndarray:
    """E4M3 byte of each bf16 magnitude from 2^-19 up to 2^9, by its bits less those of 2^-19."""
    magnitudes = np.arange((127 - 19) << 7, (127 + 9) << 7, dtype=np.uint32) << 16
    values = torch.from_numpy(magnitudes.view(np.float32)).clamp(max=448.0)
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def table_quantise(bits: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """By numpy: dividing by 2^k subtracts k << 7 from the bits; the table does the rounding."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    amax = magnitude.max(0).reshape(-1, BLOCK).max(1)
    exponent = (amax >> 7) - 135 + ((amax & 0x7F) > 0x60)
    index = magnitude - np.repeat((exponent + 127 - 19) << 7, BLOCK)
    np.bitwise_or(
        np.take(table, index, mode="clip"), ((bits >> 8) & 0x80).astype(np.uint8), out=out
    )


# ---- around it ----


def make(path: Path, geometry: str, layers: int) -> Path:
    synth(path, {**preset_config(geometry), "num_hidden_layers": layers})
    return path


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def ratios(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Round by round, so that a drift of the machine does not show."""
    pairs = {
        "build / copy": ("build", "copy"),
        "build / copy, fsync": ("build", "copy, fsync"),
        "build / plain way": ("build", "plain way, 1 core"),
        "quantise / plain way": ("quantise, 1 core", "plain way, 1 core"),
        "quantise / quantise plainly": ("quantise, 1 core", "quantise plainly, 1 core"),
        "hash / copy": ("hash, 1 core", "copy"),
    }
    return {
        name: spread([x / y for x, y in zip(rates[a], rates[b], strict=True)])
        for name, (a, b) in pairs.items()
    }


def machine(folder: Path) -> dict[str, Any]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "file_system": kind,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(result: dict[str, Any]) -> None:
    rows = [["GB/s of bf16 input", "median", "min", "max"]]
    for name, values in result["gb_s"].items():
        rows.append([name, *(f"{values[key]:.2f}" for key in ("median", "min", "max"))])
    rows.append(["", "", "", ""])
    rows.append(["ratio", "median", "min", "max"])
    for name, values in result["ratios"].items():
        rows.append([name, *(f"{values[key]:.2f}" for key in ("median", "min", "max"))])
    print(table_text(rows, frozenset((1, 2, 3))))
    print()
    for name, entry in result["memory"].items():
        peaks = ", ".join(
            f"{peak / (1 << 30):.2f} GiB with {workers} worker(s)"
            for workers, peak in entry["peak_rss_bytes_by_workers"].items()
        )
        print(f"peak memory, {name} input of {entry['input_bytes'] / 1e9:.2f} GB: {peaks}")


if __name__ == "__main__":
    main()
