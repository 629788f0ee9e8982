"""From a command line to a decoder, on a GPU that is only said to be there: what is refused."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import facts, make_sidecar, put_cubin
from helpers import Call, flip_byte, make_artifact
from test_node import VARIABLES, commands, refusal

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.session import GpuOptions, open_gpu
from dsv2mk.runner.world import World

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (*VARIABLES, "DSV2MK_CUBIN_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one(shared: Path, tmp_path: Path) -> Artifact:
    """An artifact of 1 rank."""
    return make_artifact(shared / "snapshot", 1, tmp_path / "one")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Facts to change. Weights are not loaded: `Loads` is raised with what they would be loaded by.

    The kernel can be loaded, and has room for one CTA a multiprocessor.
    """

    def load(*args: Any) -> None:
        raise Loads(*args)

    changes: dict[str, Any] = {}
    kernel = SimpleNamespace(most_per_multiprocessor=lambda: 1)
    monkeypatch.setattr(
        "dsv2mk.runner.device.facts_of", lambda index: facts(identity=f"uuid {index}", **changes)
    )
    monkeypatch.setattr("dsv2mk.runner.device.Kernel", lambda *_: kernel)
    for name in ("load_weights", "dummy_weights"):
        monkeypatch.setattr(f"dsv2mk.runner.load.{name}", load)
    return changes


class Loads(Exception):
    """Raised in place of loading weights."""


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., "Ranked"]:
    """Sets what a command joins."""

    def change(rank: int, size: int) -> Ranked:
        world = Ranked(rank, size)
        monkeypatch.setattr(World, "join", lambda: world)
        return world

    return change


class Ranked(World):
    """One rank of a world whose others do as it does. Notes what it tells them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, rank)
        self.facts: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.closed: list[bool] = []

    def agree(self, facts: Any) -> None:
        self.facts.append(dict(facts))

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_processes_must_be_as_many_as_ranks(
    size: int, one: Artifact, device: Any, dsv2mk: Call, ranked: Callable[..., Ranked]
) -> None:
    """Told before a cubin is looked for; or by the cubin, without an artifact. Also the others."""
    cubin = put_cubin(one.path.parent / "cubins", make_sidecar(one.manifest.geometry))
    dummy = [*commands(one.path)[0], "--load-format", "dummy"]
    without = ["bench", "--load-format", "dummy", "--cubin", cubin]
    for command in (*commands(one.path), dummy, without):
        world = ranked(size - 1, size)
        error = refusal(dsv2mk, command)
        assert (error["what"], error["found"]) == ("world size", str(size))
        assert error["expected"].startswith("1,")
        assert error["fix"] == "Start it without torchrun"
        assert [str(told) for told in world.errors] == [error["message"]] * 2  # text and JSON
        assert (world.closed, world.facts) == ([True] * 2, [])


@pytest.mark.parametrize("size", ["0", "-1", "x", "", "1.0"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK"])
def test_a_launch_with_no_numbers_is_refused(
    name: str, size: str, built: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, size)
    for command in commands(built):
        code, said = (12, "no CUDA device 0") if (name, size) == ("LOCAL_RANK", "0") else (2, name)
        assert said in refusal(dsv2mk, command, code)["message"]


def test_an_artifact_of_several_ranks_needs_torchrun(
    built: Path, device: Any, dsv2mk: Call, ranked: Callable[..., Ranked]
) -> None:
    geometry = Artifact.open(built).manifest.geometry
    cubin = put_cubin(built.parent / "cubins", make_sidecar(geometry, ranks=2))
    without: list[object] = ["bench", "--load-format", "dummy"]
    for size in (1, 3):
        ranked(size - 1, size)
        for command in (*commands(built), without):
            error = refusal(dsv2mk, [*command, "--cubin", cubin])
            assert (error["what"], error["found"]) == ("world size", str(size))
            assert error["expected"].startswith("2,")
            assert error["fix"] == "torchrun --nproc_per_node=2 -m dsv2mk.runner ..."


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_loads_its_shard_once_all_agree(
    rank: int, built: Path, device: Any, tmp_path: Path, ranked: Callable[..., Ranked]
) -> None:
    artifact = Artifact.open(built)
    sidecar = make_sidecar(artifact.manifest.geometry, ranks=2)
    options = gpu_options_of(cubin=put_cubin(tmp_path / "cubins", sidecar), ctas=100)
    for seed in (None, 17):
        world = ranked(rank, 2)
        with pytest.raises(Loads) as loads:
            open_gpu(artifact, options, tokens=30, trace=True, seed=seed)
        first, second, third, *_ = loads.value.args
        cuda = torch.device("cuda", rank)
        if seed is None:
            assert (first, second, third) == (artifact, rank, cuda)
        else:
            assert (first, second, third) == (artifact.layouts[rank], cuda, seed)
        assert world.facts == [
            {
                **{"world size": 2, "manifest digest": artifact.manifest.digest},
                **{"kernel key": sidecar.kernel_key, "CTAs": 100, "context": 30, "trace": True},
                **{"seed of the weights": seed, "own GPU": f"uuid {rank}"},
            }
        ]
        assert world.errors == [loads.value]
        assert world.closed == [True]


def gpu_options_of(**given: Any) -> GpuOptions:
    plain = {"cubin": None, "context": None, "ctas": 0, "timeout": 10.0, "verify": "none"}
    return GpuOptions(**{**plain, "collective": "p2p", **given})


def loads(dsv2mk: Call, command: list[object]) -> bool:
    """Whether a command gets as far as loading weights."""
    done = dsv2mk(*command)
    return (done.code, "Loads" in done.err) == (70, True)


def test_a_loopback_is_one_process_for_all_ranks(
    built: Path, one: Artifact, device: Any, dsv2mk: Call, ranked: Callable[..., Ranked]
) -> None:
    geometry = Artifact.open(built).manifest.geometry
    cubin = put_cubin(one.path.parent / "cubins", make_sidecar(geometry, ranks=2))
    dummy: list[object] = ["bench", "--load-format", "dummy"]
    ranked(0, 1)
    two = ["--cubin", cubin, "--loopback", 2]
    measure, *others = commands(built)
    for command in others:  # tokens of a loopback are not the model's
        assert dsv2mk(*command, *two).code == 2
    for command in (measure, dummy):
        assert loads(dsv2mk, [*command, *two])
        error = refusal(dsv2mk, [*command, *two, "--collective", "multimem"], 2)
        assert "--loopback needs --collective p2p" in error["message"]
        done = dsv2mk(*command, *two, "--loopback", 1)
        assert (done.code, "'--loopback': 1" in done.err) == (2, True)
    for folder, expected in ((built, 2), (one.path, 1)):
        measure, *_ = commands(folder)
        error = refusal(dsv2mk, [*measure, "--cubin", cubin, "--loopback", 3], 2)
        assert (error["what"], error["found"]) == ("--loopback", "3")
        assert error["expected"] == f"the artifact's {expected} ranks"
    error = refusal(dsv2mk, [*dummy, "--cubin", cubin, "--loopback", 3])
    assert (error["expected"], error["found"]) == ("3", "2")
    assert "ranks" in error["what"]
    ranked(1, 2)
    for command in (commands(built)[0], dummy):
        error = refusal(dsv2mk, [*command, *two], 2)
        assert error["what"] == "--loopback is for one process"
        assert error["found"] == "2 of torchrun"


def test_a_cubin_of_another_collective_is_refused(
    built: Path, device: Any, dsv2mk: Call, ranked: Callable[..., Ranked]
) -> None:
    geometry = Artifact.open(built).manifest.geometry
    cubin = put_cubin(built.parent / "cubins", make_sidecar(geometry, ranks=2))
    for command in commands(built):
        ranked(0, 2)
        assert loads(dsv2mk, [*command, "--cubin", cubin])
        ranked(0, 2)
        error = refusal(dsv2mk, [*command, "--cubin", cubin, "--collective", "multimem"])
        assert (error["expected"], error["found"]) == ("multimem", "p2p")


#: (of the device, of the sidecar, part of the message)
NO_FIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "arch": ({"capability": (10, 0)}, {}, "expected sm_100a, found sm_90a"),
    "no arch": ({"capability": (12, 0)}, {}, "found 12.0"),
    "driver": ({"driver": 11080}, {}, "found 11.8"),
    "shared memory": ({"shared_memory": 100}, {}, "found 100"),
    "memory": ({"free_memory": 10**6}, {}, "GPU memory: expected .* found 0.00 GB"),
    "ranks": ({}, {"ranks": 2}, "expected 1, found 2"),
}


@pytest.mark.parametrize("name", NO_FIT)
def test_what_does_not_fit_is_refused_before_it_is_loaded(
    name: str, one: Artifact, device: dict[str, Any], dsv2mk: Call
) -> None:
    of_device, of_sidecar, said = NO_FIT[name]
    device |= of_device
    put_cubin(one.path / "cubin", make_sidecar(one.manifest.geometry, **of_sidecar))
    for command in commands(one.path):
        assert re.search(said, refusal(dsv2mk, command)["message"])


@pytest.mark.parametrize(
    ("option", "value", "code", "expected"),
    [
        ("--context", 2561, 2, "to 2560"),  # the model's
        ("--context", 1, 2, "to 2560"),
        ("--ctas", 2, 12, "3 to 132 CTAs"),
        ("--ctas", 133, 12, "3 to 132 CTAs"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_it_is_loaded(
    option: str, value: int, code: int, expected: str, one: Artifact, device: Any, dsv2mk: Call
) -> None:
    put_cubin(one.path / "cubin", make_sidecar(one.manifest.geometry))
    for command in commands(one.path):
        error = refusal(dsv2mk, [*command, option, value], code)
        assert error["expected"].endswith(expected)
        assert error["found"] == str(value)


def test_what_is_measured_must_fit_the_model_s_context(
    one: Artifact, device: Any, dsv2mk: Call
) -> None:
    cubin = put_cubin(one.path / "cubin", make_sidecar(one.manifest.geometry))
    lengths = ["--input-len", 1500, "--output-len", 1061]
    for what in ([one.path], ["--load-format", "dummy", "--cubin", cubin]):
        error = refusal(dsv2mk, ["bench", *what, *lengths, "--context", 2560], 2)
        assert error["what"] == "--input-len + --output-len do not fit the model's context"
        assert (error["expected"], error["found"]) == ("at most 2560 tokens", "2561")
    lengths[-1] = 1029
    error = refusal(dsv2mk, ["bench", one.path, *lengths, "--profile"], 2)
    assert ("+ 32 of --profile" in error["what"], error["found"]) == (True, "2561")


def test_what_fits_exactly_is_loaded(one: Artifact, device: Any, dsv2mk: Call) -> None:
    put_cubin(one.path / "cubin", make_sidecar(one.manifest.geometry))
    bench = ["bench", one.path, "--input-len", 1500, "--output-len", 1060]
    for options in ([], ["--context", 2560], ["--ctas", 3], ["--ctas", 132]):
        assert loads(dsv2mk, [*bench, *options])


@pytest.mark.parametrize("verify", [None, "sample", "full"])
def test_damage_is_found_before_the_reference_decoder_maps_it(
    verify: str | None, one: Artifact, dsv2mk: Call
) -> None:
    """Files here have one chunk each: a sample, which is the default, is all."""
    flip_byte(one.path / "rank-00.ffn.safetensors")
    args = ["--token-ids", "1", "--max-new", 1, "--backend", "reference"]
    args += [] if verify is None else ["--verify", verify]
    error = refusal(dsv2mk, ["generate", one.path, *args], 11)
    assert os.fspath(one.path / "rank-00.ffn.safetensors") in error["message"]
    assert "chunk 0 (from byte 0)" in error["message"]


def test_weights_are_proved_as_asked_while_they_are_loaded(
    one: Artifact, device: Any, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_cubin(one.path / "cubin", make_sidecar(one.manifest.geometry))
    monkeypatch.setattr(Artifact, "verify", lambda *_: pytest.fail("read before it is loaded"))
    asked: list[str] = []

    def load(
        artifact: Artifact, rank: int, device: object, done: object, verify: str
    ) -> SimpleNamespace:
        asked.append(verify)
        raise Loads

    monkeypatch.setattr("dsv2mk.runner.load.load_weights", load)
    for command in commands(one.path):
        for options in ([], ["--verify", "none"], ["--verify", "sample"], ["--verify", "full"]):
            assert loads(dsv2mk, [*command, *options])
    assert asked == ["sample", "none", "sample", "full"] * 3


class Opened:
    """Of a GpuDecoder, what it is made of."""

    def __init__(self, weights: Any, kernel: Any, **given: Any) -> None:
        self.weights = weights

    @staticmethod
    def refuse_memory(*_: object, trace: bool) -> None:
        pass


@pytest.mark.parametrize("seed", [None, 3])
def test_what_opening_takes_is_noted_by_purpose(
    seed: int | None, one: Artifact, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still but for the device, a cubin's search, its load, and the weights."""
    clock = [100.0]

    def takes(seconds: float, value: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            clock[0] += seconds
            return value

        return call

    hashed = 0.25 if seed is None else 0.0
    weights = SimpleNamespace(seconds_hashed=hashed)
    kernel = SimpleNamespace(most_per_multiprocessor=lambda: 1)
    found = make_sidecar(one.manifest.geometry), b""
    monkeypatch.setattr("dsv2mk.runner.device.facts_of", takes(16.0, facts(identity="uuid")))
    monkeypatch.setattr("dsv2mk.runner.cubins.find_cubin", takes(2.0, found))
    monkeypatch.setattr("dsv2mk.runner.device.refuse_misfit", takes(64.0, None))  # counts for none
    monkeypatch.setattr("dsv2mk.runner.device.Kernel", takes(4.0, kernel))
    for name in ("load_weights", "dummy_weights"):
        monkeypatch.setattr(f"dsv2mk.runner.load.{name}", takes(8.0, weights))
    monkeypatch.setattr("dsv2mk.runner.decoder.GpuDecoder", Opened)
    monkeypatch.setattr(
        "dsv2mk.runner.session.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    options = gpu_options_of()
    assert open_gpu(one, options, tokens=3, seed=seed).weights is weights
    wanted = {"device": 16.0, "cubin_load": 6.0, "verify": hashed, "copy": 8.0 - hashed}
    assert options.start_up == wanted
