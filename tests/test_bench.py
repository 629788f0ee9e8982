"""Measurements of a decoder on a GPU, where no GPU takes part."""

import json
import statistics
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import make_sidecar
from helpers import Call, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import RankLayout
from dsv2mk.manifests.topology import Topology
from dsv2mk.runner import bench as bench_module
from dsv2mk.runner.bench import Request, bench, cache_bytes, memory_used, percentiles, profile
from dsv2mk.runner.decoder import Timed
from dsv2mk.runner.world import World

GEOMETRY = Geometry.from_config(tiny_config())  # 4 layers, 500 tokens


@given(st.lists(st.floats(0, 9), min_size=1, max_size=250))
def test_percentiles_are_samples(samples: list[float]) -> None:
    """The least sample that so many are not above."""
    found = percentiles(samples)
    assert list(found) == ["p50", "p90", "p99"]
    for share in (50, 90, 99):
        wanted = min(
            sample
            for sample in samples
            if 100 * sum(other <= sample for other in samples) >= share * len(samples)
        )
        assert found[f"p{share}"] == wanted


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_cache_that_a_token_reads_is_what_it_has_behind_it(inputs: int, outputs: int) -> None:
    request = Request(input_len=inputs, output_len=outputs, warmup=0, iterations=1)
    rows = [inputs + place + 1 for place in range(outputs)]
    wanted = Fraction(sum(rows), outputs) * 4 * 88 * 2
    assert cache_bytes(make_sidecar(GEOMETRY), request) == wanted


class Measured:
    """Every token of run r takes r ms. With `follows` it is of another rank than 0."""

    def __init__(self, follows: bool = False, **sidecar: Any) -> None:
        self.world, self.ctas, self.follows = World(index=3), 9, follows
        self.errors: list[BaseException | None] = []
        self.sidecar = make_sidecar(GEOMETRY, **sidecar)
        layout = RankLayout(geometry=GEOMETRY, topology=Topology(ranks=1), rank=0)
        self.weights = SimpleNamespace(layout=layout)
        self.cache = torch.zeros(1)
        self.logits = torch.zeros(4)
        self.calls: list[Any] = []
        self.runs = 0

    def __enter__(self) -> "Measured":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.errors.append(error)

    def follow(self) -> bool:
        return self.follows

    def reset(self) -> None:
        self.calls.append("reset")

    def feed(self, tokens: list[int]) -> None:
        self.calls.append(tokens)

    def skip(self, tokens: int, seed: int) -> None:
        self.calls.append((tokens, seed))

    def run(self, steps: int, *, timed: bool) -> Timed:
        assert timed
        self.runs += 1
        return Timed(seconds=2e-3 * self.runs * steps, samples=[float(self.runs)] * steps)


@pytest.mark.parametrize("skip", [False, True])
def test_a_measurement_leaves_the_warm_up_out(skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory is looked at before what the bandwidth is measured with is allocated.
    seen: list[str] = []
    monkeypatch.setattr(bench_module, "read_bandwidth", lambda _: seen.append("read") or 4.0)
    monkeypatch.setattr(bench_module, "memory_used", lambda _: seen.append("used") or 123)
    decoder: Any = Measured()
    request = Request(input_len=5, output_len=8, warmup=2, iterations=3, seed=7, skip_prompt=skip)
    data = bench(decoder, request)
    samples = [3.0] * 8 + [4.0] * 8 + [5.0] * 8
    assert data["samples_ms"] == samples
    assert data["ms_per_token"] == {"mean": 4.0, "p50": 4.0, "p90": 5.0, "p99": 5.0}
    assert data["ms_per_token_by_events"] == pytest.approx([6.0, 8.0, 10.0])
    assert data["tokens_per_s"] == 250.0
    weights = decoder.weights.layout.token_bytes()
    cache = round(9.5 * 4 * 88 * 2)
    assert data["bytes_per_token"] == weights + cache
    assert (data["weight_bytes_per_token"], data["cache_bytes_per_token"]) == (weights, cache)
    assert data["achieved_tb_s"] == pytest.approx((weights + cache) / 4e-3 / 1e12)
    assert data["share_of_read_bandwidth"] == pytest.approx(data["achieved_tb_s"] / 4)
    assert data["finite"] is True
    assert (data["memory_used"], seen) == (123, ["used", "read"])
    if skip:
        assert decoder.calls == [(5, 7)] * 5
    else:
        prompt = decoder.calls[1]
        assert decoder.calls == ["reset", prompt] * 5
        assert len(prompt) == 5
        assert all(0 <= token < 500 for token in prompt)


def test_a_profile_is_the_mean_over_layers_with_experts() -> None:
    """work: since the last hop's end; wait: until this hop's end."""
    hops = ("qkv", "q", "route", "down", "best")
    times = torch.randint(
        0, 10**6, (3, 5, len(hops), 2), generator=torch.Generator().manual_seed(0)
    )
    steps: list[Tensor] = list(times)
    decoder: Any = SimpleNamespace(sidecar=make_sidecar(GEOMETRY), marked_step=lambda: steps.pop(0))
    found = profile(decoder, 3)
    assert [part["hop"] for part in found] == ["qkv", "q", "down"]
    before = {"qkv": (-1, "down"), "q": (0, "qkv"), "down": (0, "q")}
    for part in found:
        hop = hops.index(part["hop"])
        back, last = before[part["hop"]]
        work, wait = [], []
        for step in times.double().tolist():
            for layer in (1, 2, 3):  # the first is dense
                arrived, gone = step[layer][hop]
                work.append(arrived - step[layer + back][hops.index(last)][1])
                wait.append(gone - arrived)
        assert part["work_us"] == pytest.approx(statistics.fmean(work) / 1e3)
        assert part["wait_us"] == pytest.approx(statistics.fmean(wait) / 1e3)


def test_memory_in_use_is_what_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    assert memory_used(torch.device("cpu")) == 70


# ---- the command ----


def bench_command(
    decoder: Measured, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, *args: object
) -> Any:
    def opened(artifact: object, options: Any, **given: Any) -> Measured:
        assert artifact is None
        assert given == {"tokens": 13, "asked": "--input-len + --output-len", "seed": 6}
        return decoder

    monkeypatch.setattr("dsv2mk.runner.commands.open_gpu", opened)
    monkeypatch.setattr(bench_module, "read_bandwidth", lambda device: 4.0)
    monkeypatch.setattr(bench_module, "memory_used", lambda device: 123)
    monkeypatch.setattr(bench_module, "device_facts", lambda index: {"name": f"GPU {index}"})
    lengths = ["--input-len", 5, "--output-len", 8, "--warmup", 1, "--iters", 2, "--seed", 6]
    return dsv2mk("bench", "--load-format", "dummy", "--cubin", "any", *lengths, *args)


@pytest.mark.parametrize(
    ("args", "ranks", "loopback", "collective"),
    [
        ([], 1, False, "p2p"),
        (["--loopback", 2], 2, True, "p2p"),
        (["--collective", "multimem"], 2, False, "multimem"),
    ],
)
def test_a_measurement_says_what_it_is_of(
    args: list[object],
    ranks: int,
    loopback: bool,
    collective: str,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, path = Measured(ranks=ranks), tmp_path / "measured"
    done = bench_command(decoder, dsv2mk, monkeypatch, *args, "--json", "--output-json", path)
    assert done.code == 0
    data = json.loads(path.read_text())
    assert data["samples_ms"] == [2.0] * 8 + [3.0] * 8
    assert done.json == {name: value for name, value in data.items() if name != "samples_ms"}
    wanted = {
        **{"memory_used": 123, "loopback": loopback, "collective": collective, "ranks": ranks},
        **{"kernel_key": decoder.sidecar.kernel_key, "ctas": 9, "device": {"name": "GPU 3"}},
        **{"cubin_sha256": decoder.sidecar.cubin_sha256, "load_format": "dummy", "digest": None},
        **{"layers": 4, "input_len": 5, "output_len": 8, "warmup": 1, "iterations": 2},
    }
    assert {name: data[name] for name in wanted} == wanted
    assert decoder.errors == [None]


@pytest.mark.parametrize("as_json", [False, True])
def test_another_rank_than_0_measures_and_prints_nothing(
    as_json: bool, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, path = Measured(follows=True), tmp_path / "measured"
    args = ["--output-json", path, *(["--json"] if as_json else [])]
    assert bench_command(decoder, dsv2mk, monkeypatch, *args) == (0, "", "")
    assert decoder.calls == []
    assert decoder.errors == [None]
    assert not path.exists()
