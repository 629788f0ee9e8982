"""What does not fit this node: refused with exit code 12, before anything is loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import CUBIN, facts, make_sidecar
from helpers import Call, Done, tiny_config

from dsv2mk.manifests.errors import NodeError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.runner.decoder import GpuDecoder
from dsv2mk.runner.device import (
    Kernel,
    facts_of,
    grid_size,
    refuse_memory,
    refuse_misfit,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY = Geometry.from_config(tiny_config())
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of other processes
    for name in (*VARIABLES, "DSV2MK_CUBIN_CACHE"):
        monkeypatch.delenv(name, raising=False)


def assert_says(error: NodeError, expected: str, found: str, fix: str) -> None:
    assert error.exit_code == 12
    assert (error.expected, error.found) == (expected, found)
    assert f"expected {expected}, found {found}" in str(error)
    assert error.fix is not None
    assert fix in error.fix
    assert error.fix in str(error)


# ---- kernel and device ----

ONE_RANK, FOUR_RANKS = (f"{ranks}, one process a rank of the artifact" for ranks in (1, 4))
#: (of the sidecar, of the device, ranks of the artifact, processes, expected, found, fix)
MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int, str, str, str]] = {
    "a newer arch": ({"arch": "sm_100a"}, {}, 1, 1, "sm_90a", "sm_100a", "--arch sm_90a"),
    "an older arch": ({}, {"capability": (10, 3)}, 1, 1, "sm_103a", "sm_90a", "--arch sm_103a"),
    "driver": ({"minimum_driver": 12090}, {}, 1, 1, "at least 12.9", "12.8", "newer driver"),
    "driver, major": ({"minimum_driver": 13000}, {}, 1, 1, "at least 13.0", "12.8", "driver"),
    "a cubin of more ranks": ({"ranks": 2}, {}, 1, 1, "1", "2", "dsv2mk cubin"),
    "a cubin of fewer ranks": ({"ranks": 1}, {}, 2, 2, "2", "1", "dsv2mk cubin"),
    "too many processes": ({}, {}, 1, 2, ONE_RANK, "2", "without torchrun"),
    "no process": ({}, {}, 1, 0, ONE_RANK, "0", "without torchrun"),
    "one process": ({"ranks": 4}, {}, 4, 1, FOUR_RANKS, "1", "torchrun --nproc_per_node=4 -m"),
    "too few processes": ({"ranks": 4}, {}, 4, 3, FOUR_RANKS, "3", "--nproc_per_node=4"),
    "more processes": ({"ranks": 4}, {}, 4, 8, FOUR_RANKS, "8", "--nproc_per_node=4"),
    "shared memory": ({"shared_memory": 231_425}, {}, 1, 1, "at least 232449", "232448", "GPU"),
    "a small device": ({}, {"shared_memory": 10**5}, 1, 1, "at least 201024", "100000", "sm_90a"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_kernel_that_does_not_fit_is_refused(name: str) -> None:
    of_sidecar, of_device, ranks, world, expected, found, fix = MISFITS[name]
    sidecar = make_sidecar(GEOMETRY, **of_sidecar)
    with pytest.raises(NodeError) as refused:
        refuse_misfit(sidecar, facts(**of_device), ranks=ranks, world=world)
    assert_says(refused.value, expected, found, fix)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_a_kernel_that_just_fits_is_accepted(capability: tuple[int, int], arch: str) -> None:
    device = facts(capability=capability)
    assert device.arch == arch
    sidecar = make_sidecar(GEOMETRY, arch=device.arch, minimum_driver=12080, shared_memory=231_424)
    refuse_misfit(sidecar, device, ranks=1, world=1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_as_many_processes_as_ranks_are_accepted(ranks: int) -> None:
    refuse_misfit(make_sidecar(GEOMETRY, ranks=ranks), facts(), ranks=ranks, world=ranks)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 1), (11, 0), (12, 0), (0, 9)])
def test_other_devices_are_refused(capability: tuple[int, int]) -> None:
    known = "9.0 (sm_90a), 10.0 (sm_100a), 10.3 (sm_103a)"
    device = facts(capability=capability)
    with pytest.raises(NodeError, match="Some GPU") as refused:
        _ = device.arch
    assert_says(refused.value, known, "{}.{}".format(*capability), "--backend reference")
    with pytest.raises(NodeError, match="compute capability"):
        refuse_misfit(make_sidecar(GEOMETRY), device, ranks=1, world=1)


def test_without_a_gpu_there_are_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    archs = "a GPU of sm_90a or sm_100a or sm_103a"
    for available, count, index in ((False, 0, 0), (True, 1, 1), (True, 2, 7)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=available: here)
        monkeypatch.setattr(torch.cuda, "device_count", lambda here=count: here)
        with pytest.raises(NodeError, match=f"no CUDA device {index}") as refused:
            facts_of(index)
        assert_says(refused.value, archs, f"{count} devices", "--backend reference")


def test_without_the_driver_s_bindings_no_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NodeError, match="CUDA bindings") as refused:
        Kernel(CUBIN, make_sidecar(GEOMETRY), 0)
    assert refused.value.exit_code == 12
    assert "dsv2mk[gpu]" in str(refused.value)


# ---- memory ----


def test_memory_is_told_by_purpose() -> None:
    needed = {"weights": 3_000_000_000, "cache": 1_500_000_000, "workspace": 14_000_000}
    refuse_memory(needed, 4_514_000_000)  # exactly fits
    refuse_memory({}, 0)
    with pytest.raises(NodeError, match="GPU memory"):
        refuse_memory(needed, 4_513_999_999)
    with pytest.raises(NodeError) as refused:
        refuse_memory(needed, 1_250_000_000)
    parts = "weights 3.00 GB, cache 1.50 GB, workspace 0.01 GB"
    assert_says(refused.value, f"4.51 GB free ({parts})", "1.25 GB", "--context")


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("context", [1, 1000])
def test_a_decoder_needs_weights_cache_workspace_and_little_more(trace: bool, context: int) -> None:
    sidecar = make_sidecar(GEOMETRY)
    cache = 4 * context * 88 * 2  # layers, tokens, values of a row in bf16
    workspace = 512 + 1024 * (5 if trace else 1)  # an exchange for each layer, and one more
    rest = 4 * (context + 1) + 4 * 500 + (1 << 20)
    total = 12_345 + cache + workspace + rest
    args = (12_345, context)
    GpuDecoder.refuse_memory(sidecar, facts(free_memory=total), *args, trace=trace)
    with pytest.raises(NodeError):
        GpuDecoder.refuse_memory(sidecar, facts(free_memory=total - 1), *args, trace=trace)


def test_a_rank_of_several_has_its_rows_of_the_logits() -> None:
    sidecar, state = make_sidecar(GEOMETRY, ranks=8), 4 * 10 * 88 * 2 + 512 + 1024
    total = state + 4 * 11 + 4 * 63 + (1 << 20)  # an eighth of 500, rounded up
    GpuDecoder.refuse_memory(sidecar, facts(free_memory=total), 0, 10)
    with pytest.raises(NodeError):
        GpuDecoder.refuse_memory(sidecar, facts(free_memory=total - 1), 0, 10)


# ---- grid ----


@pytest.mark.parametrize(
    ("multiprocessors", "per_multiprocessor", "wanted", "ctas"),
    [
        (132, 1, 0, 132),
        (132, 2, 0, 132),  # one a multiprocessor is enough
        (256, 1, 0, 256),
        (300, 1, 0, 256),  # as many as the workspace is laid out for
        (3, 1, 0, 3),
        (132, 1, 3, 3),
        (132, 1, 132, 132),
        (132, 2, 133, 133),
        (132, 2, 256, 256),
    ],
)
def test_a_grid_that_can_be_co_resident_is_launched(
    multiprocessors: int, per_multiprocessor: int, wanted: int, ctas: int
) -> None:
    sidecar = make_sidecar(GEOMETRY)
    assert grid_size(sidecar, multiprocessors, per_multiprocessor, wanted) == ctas


@pytest.mark.parametrize(
    ("multiprocessors", "per_multiprocessor", "wanted", "most", "found"),
    [
        (132, 1, 2, 132, 2),
        (132, 1, 133, 132, 133),
        (132, 2, 257, 256, 257),
        (300, 1, 257, 256, 257),
        (2, 1, 0, 2, 2),
        (2, 1, 3, 2, 3),
        (132, 0, 0, 0, 0),  # something else has taken the shared memory
    ],
)
def test_a_grid_that_cannot_be_co_resident_is_refused(
    multiprocessors: int, per_multiprocessor: int, wanted: int, most: int, found: int
) -> None:
    with pytest.raises(NodeError, match="co-resident") as refused:
        grid_size(make_sidecar(GEOMETRY), multiprocessors, per_multiprocessor, wanted)
    assert_says(refused.value, f"3 to {most} CTAs", str(found), "--ctas")


# ---- commands without a GPU ----


def commands(artifact: Path) -> list[list[object]]:
    """All that decode on a GPU."""
    return [
        ["bench", artifact, "--input-len", 2, "--output-len", 2],
        ["generate", artifact, "--backend", "gpu", "--token-ids", "1", "--max-new", 1],
        ["gate", artifact, "--backend", "gpu", "--positions", 2, "--free-run", 0],
    ]


def assert_exit(plain: Done, shown: Done, code: int) -> dict[str, Any]:
    """The error object of a command that was refused, told in one line as well."""
    assert (plain.code, plain.out) == (code, "")
    assert (shown.code, shown.err) == (code, "")
    assert len(plain.err.splitlines()) == 1
    assert set(shown.json) == {"error"}
    error: dict[str, Any] = shown.json["error"]
    assert error["exit_code"] == code
    assert plain.err == f"dsv2mk: {error['message']}\n"
    return error


def refusal(dsv2mk: Call, command: list[object], code: int = 12) -> dict[str, Any]:
    return assert_exit(dsv2mk(*command), dsv2mk(*command, "--json"), code)


def test_commands_need_a_gpu(built: Path, dsv2mk: Call) -> None:
    for command in commands(built):
        error = refusal(dsv2mk, command)
        assert error["kind"] == "does not fit this node"
        assert error["what"] == "no CUDA device 0"
        assert "sm_90a" in error["expected"]
        assert error["found"].endswith("devices")
        assert error["fix"] == "Without a GPU: dsv2mk generate DIR --backend reference"


def test_bench_needs_an_artifact_or_a_cubin(tmp_path: Path, dsv2mk: Call) -> None:
    cubin = ["--cubin", tmp_path]
    for args in ([], cubin, ["--load-format", "dummy"]):
        assert "no artifact" in refusal(dsv2mk, ["bench", *args], 2)["message"]
    error = refusal(dsv2mk, ["bench", "--load-format", "dummy", *cubin])
    assert error["what"] == "no CUDA device 0"


def test_the_runner_is_a_program_of_its_own(built: Path, dsv2mk: Call) -> None:
    args = [sys.executable, "-m", "dsv2mk.runner", "bench", str(built)]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    plain = Done(done.returncode, done.stdout, done.stderr)
    error = assert_exit(plain, dsv2mk("bench", built, "--json"), 12)
    assert error["what"] == "no CUDA device 0"
    done = subprocess.run([*args, "--iters", "0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: python -m dsv2mk.runner bench ")


def test_generate_takes_the_reference_decoder_where_there_is_no_gpu(
    built: Path, dsv2mk: Call
) -> None:
    args = ["generate", built, "--token-ids", "1,2", "--max-new", 3, "--ignore-eos", "--json"]
    by_itself, asked = dsv2mk(*args), dsv2mk(*args, "--backend", "reference")
    assert by_itself.code == 0
    assert by_itself.json["backend"] == "reference"
    assert by_itself.json["token_ids"] == asked.json["token_ids"]
    assert "3 tokens" in by_itself.err
    assert "reference decoder" in by_itself.err
