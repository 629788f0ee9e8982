"""`plan` tells from headers alone what a build makes, needs and refuses."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    COMMAND,
    SINGLE,
    Call,
    assert_refused,
    build_args,
    names,
    small_config,
    state,
)
from safetensors import safe_open
from safetensors.torch import load_file

from dsv2mk.manifests.checkpoint import checkpoint_tensors
from dsv2mk.manifests.geometry import Geometry, preset_config


def data_start(path: Path) -> int:
    """Where tensor data starts in a safetensors file."""
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return 8 + length


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
    assert (plan["input_files"], plan["input_dtypes"]) == (1, ["BF16"])
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


def hollow_snapshot(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint of zeros that takes no space: a header and a hole. Returns its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, shape in checkpoint_tensors(Geometry.from_config(config)).items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(folder / SINGLE, 8 + len(header) + end)
    return end


def test_plan_of_the_whole_model_from_headers(tmp_path: Path, dsv2mk: Call) -> None:
    """471 GB of holes: whoever reads data here does not come back."""
    snapshot = tmp_path / "snapshot"
    hollow_snapshot(snapshot, preset_config("deepseek-v2"))
    plan = dsv2mk("plan", snapshot, "--tp", 8, "--out", tmp_path, "--json").json
    assert round(plan["input_bytes"] / 1e8) == 4715
    assert {round(rank["token_bytes"] / 1e7) for rank in plan["ranks"]} == {502}
    # 160 experts of 12 units and 24 shared ones in 59 layers, 96 in the dense one.
    assert [rank["units"] for rank in plan["ranks"]] == [(59 * (160 * 12 + 24) + 96) // 8] * 8
    free = shutil.disk_usage(tmp_path).free
    assert abs(plan["disk_free"] - free) < free / 4 + (1 << 30)
    shown = dsv2mk("plan", snapshot, "--tp", 8).out
    assert "471" in shown
    assert "5.02 GB" in shown


@pytest.mark.parametrize("ranks", [5, 48])
def test_plan_and_build_refuse_ranks(snapshot: Path, dsv2mk: Call, ranks: int) -> None:
    assert_refused(dsv2mk, snapshot, "a divisor of the 24 heads", ranks=ranks)


@pytest.mark.parametrize("margin", ["", "much", "-1", "nan", "inf", "1e400"])
def test_a_margin_that_is_no_number(
    snapshot: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, margin: str
) -> None:
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", margin)
    for args in (["plan", snapshot, "--tp", "2"], build_args(snapshot, tmp_path / "artifact")):
        done = dsv2mk(*args)
        assert done.code == 2
        assert "DSV2MK_CACHE_SAFETY_GIB" in done.err


#: Between the two, since a process counts as its own what the one that starts it had resident.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, dsv2mk: Call) -> None:
    sizes, peaks, bounds, workers = [], [], [], 2
    for layers in (2, 9):
        config = small_config(
            hidden_size=1024,
            moe_intermediate_size=384,
            n_routed_experts=16,
            num_hidden_layers=layers,
        )
        snapshot = tmp_path / f"snapshot-{layers}"
        sizes.append(hollow_snapshot(snapshot, config))
        plan = dsv2mk("plan", snapshot, "--tp", 2, "--json").json
        bounds.append(plan["base_bytes"] + workers * plan["worker_bytes"])
        args = build_args(snapshot, tmp_path / f"artifact-{layers}", workers=workers)
        measured = [sys.executable, "-c", MEASURE, COMMAND, *args]
        peaks.append(int(subprocess.run(measured, capture_output=True, check=True).stdout) * 1024)
    assert sizes[1] > 4 * sizes[0]
    assert sizes[1] - sizes[0] > 250_000_000
    assert abs(peaks[1] - peaks[0]) < 150_000_000
    for peak, bound in zip(peaks, bounds, strict=True):
        assert 50_000_000 < peak < bound
