"""The host's side of decoding on a GPU, where no GPU takes part."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Event, Launches, host_decoder

from dsv2mk.kernel.parameters import PARAMETERS
from dsv2mk.manifests.errors import ArtifactError, StuckError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.runner.decoder import generate

GEOMETRY = Geometry.from_config(tiny_config())  # 4 layers, 500 tokens


def next_of(token: int, position: int) -> int:
    return (7 * token + 3 * position + 1) % 11


class Arithmetic:
    """Decodes by `next_of`; the logits are the position that was fed. Not finite from `bad` on."""

    def __init__(self, position: int, bad: float = math.inf) -> None:
        self.position = position
        self.bad = bad
        self.row: dict[int, int] = {}
        self.runs: list[int] = []
        self.logits = torch.zeros(3)

    def place(self, tokens: list[int]) -> None:
        self.row |= {self.position + index: token for index, token in enumerate(tokens)}

    def run(self, steps: int) -> None:
        self.runs.append(steps)
        for _ in range(steps):
            self.logits[1] = self.position if self.position < self.bad else math.nan
            self.row[self.position + 1] = next_of(self.row[self.position], self.position)
            self.position += 1

    def tokens(self, start: int, end: int) -> list[int]:
        return [self.row[position] for position in range(start, end)]


def expected(token: int, position: int, max_new: int, stop: frozenset[int]) -> list[int]:
    out: list[int] = []
    while len(out) < max_new and not (out and out[-1] in stop):
        token = next_of(token, position)
        position += 1
        out.append(token)
    return out


# ---- generate ----


@settings(max_examples=200)
@given(
    st.integers(0, 10),
    st.integers(0, 5),
    st.integers(1, 40),
    st.frozensets(st.integers(0, 12), max_size=2),
    st.integers(1, 9),
)
def test_bursts_give_the_tokens_of_single_steps(
    token: int, position: int, max_new: int, stop: frozenset[int], burst: int
) -> None:
    wanted = expected(token, position, max_new, stop)
    decoder: Any = Arithmetic(position)
    assert list(generate(decoder, token, max_new, stop, None, burst)) == wanted
    assert decoder.row[position] == token
    whole, rest = divmod(max_new, burst)
    launches = [burst] * whole + ([rest] if rest else [])
    assert decoder.runs == launches[: math.ceil(len(wanted) / burst)]

    decoder, seen = Arithmetic(position), []
    noted = generate(decoder, token, max_new, stop, lambda row: seen.append(float(row[1])), burst)
    assert list(noted) == wanted
    assert decoder.runs == [1] * len(wanted)
    assert seen == list(range(position, position + len(wanted)))


def test_a_launch_is_of_64_tokens() -> None:
    decoder: Any = Arithmetic(0)
    assert len(list(generate(decoder, 1, 130, frozenset(), None))) == 130
    assert decoder.runs == [64, 64, 2]


def test_tokens_come_as_they_are_decoded() -> None:
    decoder: Any = Arithmetic(0)
    tokens = generate(decoder, 1, 20, frozenset(), None, burst=8)
    assert [next(tokens) for _ in range(8)] == expected(1, 0, 8, frozenset())
    assert decoder.runs == [8]
    next(tokens)
    assert decoder.runs == [8, 8]


@pytest.mark.parametrize(("bad", "burst", "good"), [(0, 4, 0), (3, 1, 3), (6, 4, 4), (8, 4, 8)])
def test_logits_that_are_no_numbers_are_refused(bad: int, burst: int, good: int) -> None:
    decoder: Any = Arithmetic(0, bad)
    tokens = generate(decoder, 1, 20, frozenset(), None, burst)
    assert [next(tokens) for _ in range(good)] == expected(1, 0, good, frozenset())
    with pytest.raises(ArtifactError, match="not finite") as refused:
        next(tokens)
    assert f"position {good + burst - 1} " in str(refused.value)
    assert "dsv2mk verify" in str(refused.value)
    decoder, seen = Arithmetic(0, bad), []
    with pytest.raises(ArtifactError, match=f"position {bad} "):
        list(generate(decoder, 1, 20, frozenset(), lambda row: seen.append(float(row[1])), burst))
    assert seen == list(range(bad))


# ---- what is placed, launched and read back ----


def on_the_host(context: int = 16, **given: Any) -> Any:
    """A GpuDecoder whose state lies in the host's memory; no token is placed."""
    decoder = host_decoder(Launches(), GEOMETRY, context=context, **given)
    decoder._tokens.fill_(-1)
    return decoder


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched has ended at once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "kernel", Launches())


def test_a_launch_hands_over_every_parameter_of_the_kernel() -> None:
    decoder = on_the_host()
    decoder.place([5, 6, 7])
    decoder._launch(2, False)
    decoder._launch(4, True)
    decoder._launch(1, False)
    (ctas, first), (_, second), (_, third) = decoder.kernel.calls
    assert ctas == 9
    assert set(first) == {name for name, _ in PARAMETERS}
    pointers = {
        **{"replicated": 1000, "partitioned": 2000, "gate_up": 3000},
        **{"gate_up_scale": 4000, "down": 5000, "down_scale": 6000},
        **{name: getattr(decoder, f"_{name}").data_ptr() for name in ("workspace", "peers")},
        **{name: getattr(decoder, f"_{name}").data_ptr() for name in ("tokens", "logits")},
        **{name: getattr(decoder, f"_{name}").data_ptr() for name in ("status", "times")},
        "cache": decoder.cache.data_ptr(),
    }
    numbers = {"cache_tokens": 16, "timeout": 2_500_000_000, "rank": 0, "known": 3}
    changing = {"marks": 0, "position": 0, "steps": 2, "epoch": 0, "trace": 0}
    assert first == {**pointers, **numbers, **changing}
    changing = {"marks": decoder._marks.data_ptr(), "position": 2, "steps": 4, "epoch": 2}
    assert second == {**pointers, **numbers, **changing, "trace": 0}
    changing = {"marks": 0, "position": 6, "steps": 1, "epoch": 6}
    assert third == {**pointers, **numbers, **changing, "trace": 1024}  # of one token only
    assert decoder.position == 7


def test_the_epoch_wraps_around_as_the_kernel_s() -> None:
    decoder = on_the_host()
    decoder._epoch = 2**31 - 2
    steps = [3, 2**31 - 2, 2**31 - 1, 1]
    for count in steps:
        decoder._launch(count, False)
    wanted = [ctypes.c_int32(2**31 - 2 + sum(steps[:index])).value for index in range(4)]
    assert [call["epoch"] for _, call in decoder.kernel.calls] == wanted
    assert min(wanted) < 0 < max(wanted)


def test_tokens_are_placed_where_they_are_decoded() -> None:
    decoder = on_the_host(context=6)
    decoder.place([499, 0])
    assert decoder._tokens.tolist() == [499, 0, -1, -1, -1, -1, -1]
    decoder.position = 4
    decoder.place([3, 4])
    assert decoder._tokens.tolist() == [499, 0, -1, -1, 3, 4, -1]
    assert (decoder.tokens(3, 6), decoder._known) == ([-1, 3, 4], 6)


def test_what_has_no_room_or_no_token_is_refused_and_changes_nothing() -> None:
    decoder = on_the_host(context=6)
    decoder.position = 4
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: decoder.place([1, 2, 3]), "at most 6 tokens, found 7"),
        (lambda: decoder.run(3), "at most 6 tokens, found 7"),
        (lambda: decoder.place([1, 500]), "0 to 499, found 500"),
        (lambda: decoder.place([-1]), "0 to 499, found -1"),
    ]
    for call, said in refused:
        with pytest.raises(UsageError, match=said):
            call()
    assert decoder.kernel.calls == []
    assert (decoder.position, decoder._known) == (4, 0)
    assert set(decoder._tokens.tolist()) == {-1}
    assert not decoder.cache.any()


def test_another_sequence_may_start_on_noise() -> None:
    decoder = on_the_host()
    caches = []
    for noise in (None, 1, 1, 2):
        decoder.cache.zero_()
        decoder.position = 5
        decoder.reset(noise=noise)
        assert decoder.position == 0
        caches.append(decoder.cache.view(torch.int16).clone())
    assert not caches[0].any()
    assert torch.equal(caches[1], caches[2])
    assert not torch.equal(caches[1], caches[3])
    assert len(caches[1].unique()) > 5000  # of 5632: any bits, NaN among them
    assert not decoder.cache.isfinite().all()


def test_another_sequence_may_start_far_on() -> None:
    decoder = on_the_host()
    caches = []
    for tokens, seed in ((16, 3), (7, 3), (7, 4)):
        decoder.position = 16  # the last one has filled the cache
        decoder.skip(tokens, seed=seed)
        assert (decoder.position, decoder._known) == (tokens, tokens + 1)
        assert decoder.tokens(tokens, tokens + 1) == [0]
        caches.append(decoder.cache.clone())
    assert torch.equal(caches[0], caches[1])
    assert not torch.equal(caches[1], caches[2])
    assert bool(decoder.cache.isfinite().all())
    assert float(decoder.cache.float().std()) == pytest.approx(1, rel=0.1)
    with pytest.raises(UsageError, match="at most 16 tokens, found 17"):
        decoder.skip(17)


@pytest.mark.parametrize("trace", [0, 1024])
def test_an_exchange_is_read_where_the_sidecar_says(trace: int) -> None:
    decoder = on_the_host()
    decoder._trace = trace
    words = decoder._workspace.view(torch.int32)
    words.copy_(torch.arange(len(words)))
    for layer in (0, 3):
        start = (512 + layer * trace) // 4
        found = decoder.exchange("qkv", layer)
        assert (found.dtype, found.view(torch.int32).tolist()) == (
            *(torch.float32, list(range(start, start + 6))),
        )
        found = decoder.exchange("act", layer).view(torch.int32)
        assert found.tolist() == torch.arange(start + 64, start + 76).view(3, 4).tolist()


@pytest.mark.parametrize("steps", [1, 1024, 1025, 2500])
@pytest.mark.parametrize("timed", [False, True])
def test_a_run_is_launches_of_1024_tokens_at_most(steps: int, timed: bool, events: None) -> None:
    decoder = on_the_host(context=2600)
    stamps = iter(range(100))

    def launch(ctas: int, arguments: dict[str, int]) -> None:
        decoder.kernel.calls.append((ctas, dict(arguments)))
        first = 10**6 * next(stamps)
        count = arguments["steps"] + 1  # each token takes 3 ms more than the one before
        decoder._times[:count] = first + 1_500_000 * torch.arange(count) ** 2

    decoder.kernel.launch = launch
    decoder.place([3])
    done = decoder.run(steps, timed=timed, marked=steps == 1)
    counts = [1024] * (steps // 1024) + ([steps % 1024] if steps % 1024 else [])
    assert [call["steps"] for _, call in decoder.kernel.calls] == counts
    assert [call["position"] for _, call in decoder.kernel.calls] == [
        sum(counts[:index]) for index in range(len(counts))
    ]
    marks = {call["marks"] for _, call in decoder.kernel.calls}
    assert marks == {decoder._marks.data_ptr() if steps == 1 else 0}
    assert decoder.position == steps
    if timed:
        assert done.seconds == 1e-3
        assert done.samples == [1.5 * (2 * at + 1) for count in counts for at in range(count)]
    else:
        assert done is None


def test_marks_are_of_one_step(events: None) -> None:
    decoder = on_the_host()
    decoder._marks[4, 4, 1] = 17
    marks = decoder.marked_step()
    assert (marks.shape, int(marks.sum()), int(marks[4, 4, 1])) == ((5, 5, 2), 17, 17)
    decoder.feed([1])
    calls = [call["marks"] for _, call in decoder.kernel.calls]
    assert calls == [decoder._marks.data_ptr(), 0]


@pytest.mark.parametrize(("phase", "name"), [(2, "route"), (5, "drain"), (6, "phase 6")])
def test_a_kernel_that_gave_up_is_told_of_and_may_be_launched_again(
    phase: int, name: str, events: None
) -> None:
    decoder = on_the_host()
    decoder._wait(0)  # nothing is wrong
    decoder._workspace.fill_(1)
    decoder._epoch, decoder.position = 50, 9
    decoder._status[:9] = torch.tensor([1, 0, 17, 3, 2, phase, 8, 120, 119])
    with pytest.raises(StuckError) as stuck:
        decoder._wait(4)
    assert str(stuck.value) == (
        "the kernel gave up after 2.5 s at position 8: rank 0, CTA 17, warp 3 waited in layer 2 "
        f"for {name}: expected 120, found 119"
    )
    assert stuck.value.exit_code == 70
    assert (decoder._epoch, decoder.position) == (0, 4)
    assert not decoder._workspace.any()
    decoder._wait(4)
