"""`gate` and `generate` as on a GPU, with a decoder that runs here: what they ask of it."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeDecoder
from helpers import Call, make_artifact, make_snapshot, read_bytes, small_config
from safetensors.torch import load_file
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.world import World

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = small_config(num_hidden_layers=2, max_position_embeddings=200)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    snapshot = make_snapshot(tmp_path / "snapshot", CONFIG)
    return make_artifact(snapshot, 1, tmp_path / "artifact")


# ---- gate ----


def gate_gpu(
    dsv2mk: Call, monkeypatch: pytest.MonkeyPatch, decoder: FakeDecoder, *args: object
) -> tuple[int, dict[str, Any]]:
    asked: list[tuple[int, bool]] = []

    def opened(artifact: Artifact, options: object, *, tokens: int, trace: bool) -> FakeDecoder:
        asked.append((tokens, trace))
        return decoder

    monkeypatch.setattr("dsv2mk.runner.run_gate.open_gpu", opened)
    options = ["--backend", "gpu", "--positions", 6, "--free-run", 20, "--json", *args]
    done = dsv2mk("gate", decoder.artifact.path, *options)
    assert asked == [(6 + 20, True)]  # also without --phases: the experts chosen are read
    return done.code, done.json


def test_a_decoder_as_the_reference_passes(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = FakeDecoder(artifact)
    args = ["--phases", "--strict", "--seed", 3]
    code, data = gate_gpu(dsv2mk, monkeypatch, decoder, *args)
    assert (code, data["failures"], data["backend"]) == (0, [], "gpu")
    assert (data["positions"], data["max_relative_error"]) == (6, 0.0)
    kinds = ["act", "chosen", "down", "latent", "o", "q", "q_lat", "qkv", "route", "value"]
    assert data["phases"] == dict.fromkeys(kinds, 0.0)
    assert data["runs_bit_equal"]
    assert data["free_run"] == {
        **{"tokens": 20, "slack": 0.0, "equal_to_reference": 20, "replay_equal": True},
        **{"choices_followed": 0, "largest_choice_slack": 0.0},
        "distinct": data["free_run"]["distinct"],
    }
    assert (data["kernel_key"], data["ctas"], data["seed"]) == (decoder.sidecar.kernel_key, 7, 3)
    # Positions, two more runs of them, the free run in one launch, and token by token; each on a
    # noisy cache.
    assert decoder.launches == [1] * 18 + [6 + 20 - 1] + [1] * (6 + 20 - 1)
    assert len(decoder.noises) == 5
    assert None not in decoder.noises


def test_a_phase_that_differs_is_named(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(position: int, words: dict[tuple[str, int], Tensor]) -> None:
        if position >= 2:
            words["q_lat", 1][3, 4] += 100
            words["down", 1][0, 5] = math.nan

    decoder = FakeDecoder(artifact, spoil=spoil)
    code, data = gate_gpu(dsv2mk, monkeypatch, decoder, "--phases")
    (failure,) = data["failures"]
    assert code == 1
    assert failure.startswith("position 2: layer 1, phase q_lat, element [3, 4]: expected ")
    assert sorted(name for name, worst in data["phases"].items() if worst != 0) == ["down", "q_lat"]
    assert data["phases"]["down"] is None  # JSON has no infinity


def test_a_decoder_that_is_off_at_one_position_fails(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(position: int, logits: Tensor) -> Tensor:
        return logits.roll(1) if position == 4 else logits

    code, data = gate_gpu(dsv2mk, monkeypatch, FakeDecoder(artifact, off))
    assert code == 1
    assert [failure[:11] for failure in data["failures"]] == ["position 4:"]


def test_a_decoder_that_changes_from_run_to_run_fails_strict(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsteady(position: int, logits: Tensor) -> Tensor:
        return logits * (1 + len(decoder.noises) * 2**-20)

    decoder = FakeDecoder(artifact, unsteady)
    assert gate_gpu(dsv2mk, monkeypatch, decoder)[0] == 0
    code, data = gate_gpu(dsv2mk, monkeypatch, decoder, "--strict")
    assert (code, data["runs_bit_equal"]) == (1, False)
    assert data["failures"] == ["two runs of one decoder gave logits that are not bit-equal"]


def test_a_free_run_that_goes_astray_fails(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def astray(position: int, logits: Tensor) -> Tensor:
        return logits if position < 10 else torch.nn.functional.one_hot(torch.tensor(7), 301)

    code, data = gate_gpu(dsv2mk, monkeypatch, FakeDecoder(artifact, astray))
    assert (code, data["max_relative_error"]) == (1, 0.0)
    chosen = [f"free-running decode chose 7 for position {at}," for at in range(11, 26)]
    assert [failure[: len(chosen[-1])] for failure in data["failures"]] == chosen


@pytest.mark.parametrize("first", [0, 5, 10, 24])
def test_what_is_no_number_fails_wherever_it_begins(
    first: int, artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(position: int, logits: Tensor) -> Tensor:
        return logits if position < first else logits.clone().fill_(math.inf)

    code, data = gate_gpu(dsv2mk, monkeypatch, FakeDecoder(artifact, overflow))
    assert (code, "free_run" in data) == (1, False)
    assert (data["max_relative_error"] is None) == (first < 6)
    said = [f"position {position}: logits are not finite" for position in range(first, 6)]
    free = "free-running decode: logits at position 24 are not finite"
    assert [failure.split(". ")[0] for failure in data["failures"]] == (said or [free])


def test_what_is_longer_than_the_context_is_refused_before_a_gpu_is_looked_for(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv2mk.runner.run_gate.open_gpu", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr("dsv2mk.runner.run_gate.ReferenceDecoder", lambda *_: pytest.fail("read"))
    for args, said in (
        (["--positions", 201], "--positions: expected at most 200 positions, found 201"),
        (["--positions", 10**18], f"expected at most 200 positions, found {10**18}"),
        (["--free-run", 193], "--free-run: expected at most 192 tokens, found 193"),
        (["--positions", 3, "--free-run", 198], "expected at most 197 tokens, found 198"),
        (["--tolerance", "nan"], "--tolerance: expected a finite number, found nan"),
        (["--tolerance", "inf"], "--tolerance: expected a finite number, found inf"),
    ):
        done = dsv2mk("gate", artifact.path, "--backend", "gpu", *args)
        assert (done.code, done.out) == (2, "")
        assert said in done.err


@pytest.mark.parametrize(
    ("positions", "free_run", "tokens"), [(200, 1, 200), (3, 197, 200), (12, 10, 18), (12, 0, 12)]
)
def test_room_is_made_for_the_longer_run(
    positions: int,
    free_run: int,
    tokens: int,
    artifact: Artifact,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Opened(Exception):
        pass

    def opened(*_: object, tokens: int, trace: bool) -> FakeDecoder:
        raise Opened(tokens)

    monkeypatch.setattr("dsv2mk.runner.run_gate.open_gpu", opened)
    args = ["--backend", "gpu", "--positions", positions, "--free-run", free_run]
    done = dsv2mk("gate", artifact.path, *args)
    assert (done.code, f"Opened: {tokens}" in done.err) == (70, True)


def test_ranks_that_differ_fail_once(
    artifact: Artifact, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with the first position; the positions agree, and yet the gate fails."""
    decoder = FakeDecoder(artifact)
    decoder.world = World(0, 2)
    assert gate_gpu(dsv2mk, monkeypatch, decoder)[1]["ranks_bit_equal"] is True

    def differ() -> str | None:
        return f"rank 1, seen at {decoder.position}" if decoder.position >= 4 else None

    monkeypatch.setattr(decoder, "ranks_differ", differ)
    code, data = gate_gpu(dsv2mk, monkeypatch, decoder)
    assert (code, data["ranks_bit_equal"], data["max_relative_error"]) == (1, False, 0.0)
    assert data["failures"] == ["position 3: rank 1, seen at 4"]


@pytest.mark.parametrize("as_json", [False, True])
def test_another_rank_than_0_judges_and_prints_nothing(
    as_json: bool,
    artifact: Artifact,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = FakeDecoder(artifact)
    monkeypatch.setattr(decoder, "follow", lambda: True)
    monkeypatch.setattr("dsv2mk.runner.run_gate.open_gpu", lambda *_, **__: decoder)
    args = ["--backend", "gpu", "--output-json", tmp_path / "new", *(["--json"] * as_json)]
    assert dsv2mk("gate", artifact.path, *args) == (0, "", "")
    assert (decoder.launches, decoder.noises, decoder.errors) == ([], [], [None])
    assert not (tmp_path / "new").exists()


# ---- generate ----


@pytest.fixture
def decoder(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> FakeDecoder:
    """What `generate` gets; it must ask for room for all tokens."""
    fake = FakeDecoder(artifact)

    def opened(opened_: Artifact, options: object, *, tokens: int) -> FakeDecoder:
        assert opened_.path == artifact.path
        fake.room = tokens
        return fake

    monkeypatch.setattr("dsv2mk.runner.commands.open_gpu", opened)
    return fake


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ids", [[7], [5, 0, 300, 7]])
def test_tokens_and_logits_are_the_reference_s(
    keep: bool, ids: list[int], decoder: FakeDecoder, tmp_path: Path, dsv2mk: Call
) -> None:
    args = ["generate", decoder.artifact.path, "--max-new", 70, "--ignore-eos", "--json"]
    args += ["--token-ids", ",".join(map(str, ids))]
    results, files = {}, {}
    for backend in ("reference", "gpu"):
        files[backend] = tmp_path / backend
        more = ["--logits", files[backend]] if keep else []
        done = dsv2mk(*args, "--backend", backend, *more)
        assert done.code == 0
        results[backend] = done.json
        assert results[backend].pop("backend") == backend
        assert results[backend].pop("tokens_per_s") > 0
    assert results["gpu"] == results["reference"]
    assert len(results["gpu"]["token_ids"]) == 70
    assert decoder.room == len(ids) + 70
    before = len(ids) - 1  # in one launch, unless logits of each are wanted
    fed = [1] * before if keep else [before] if before else []
    assert decoder.launches == fed + ([1] * 70 if keep else [64, 6])
    assert decoder.noises == [None]
    assert decoder.errors == [None]
    if keep:
        stored = {backend: load_file(file) for backend, file in files.items()}
        assert stored["gpu"]["logits"].shape == (len(ids) + 69, 301)
        for name in ("logits", "token_ids"):
            assert torch.equal(stored["gpu"][name], stored["reference"][name])


def test_a_stop_token_ends_it(decoder: FakeDecoder, dsv2mk: Call) -> None:
    args = ["generate", decoder.artifact.path, "--token-ids", "5,6", "--json", "--backend"]
    free = dsv2mk(*args, "reference", "--max-new", 30, "--ignore-eos").json["token_ids"]
    # Three digits, as the token that it takes the place of: the file keeps its size.
    place = next(at for at in range(9, 30) if free[at] >= 100 and free[at] not in free[:at])
    eos = free[place]
    path = decoder.artifact.path / "generation_config.json"
    path.write_text(path.read_text().replace("257", str(eos)))
    assert str(eos) in path.read_text()
    assert path.stat().st_size == decoder.artifact.manifest.files[path.name].size
    done = dsv2mk(*args, "gpu", "--max-new", 30).json
    assert (done["token_ids"], done["stopped"]) == (free[: place + 1], "eos")


@pytest.mark.parametrize("as_json", [False, True])
def test_another_rank_than_0_follows_and_prints_nothing(
    as_json: bool,
    decoder: FakeDecoder,
    tmp_path: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "follow", lambda: True)
    args = ["--token-ids", "5,6", "--max-new", 3, "--backend", "gpu", "--logits", tmp_path / "new"]
    args += ["--json"] if as_json else []
    assert dsv2mk("generate", decoder.artifact.path, *args) == (0, "", "")
    assert (decoder.launches, decoder.noises, decoder.errors) == ([], [], [None])
    assert not (tmp_path / "new").exists()


def test_the_other_ranks_are_told_of_an_error(
    decoder: FakeDecoder, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "_logits_of", lambda _, logits: logits + math.inf)
    args = ["--token-ids", "5,6", "--max-new", 3, "--backend", "gpu"]
    assert dsv2mk("generate", decoder.artifact.path, *args).code == 11
    (error,) = decoder.errors
    assert "not finite" in str(error)


def test_what_only_the_reference_decoder_can_is_refused(decoder: FakeDecoder, dsv2mk: Call) -> None:
    args = ["generate", decoder.artifact.path, "--token-ids", "5", "--max-new", 1]
    done = dsv2mk(*args, "--backend", "gpu", "--cache-dtype", "fp32")
    assert (done.code, "--backend reference" in done.err) == (2, True)
    assert decoder.launches == []


@pytest.mark.parametrize("inside", ["manifest.json", "new.json"])
def test_an_output_is_not_put_into_the_artifact(
    inside: str, artifact: Artifact, dsv2mk: Call
) -> None:
    before = read_bytes(artifact.path)
    args = ("generate", artifact.path, "--token-ids", "1", "--max-new", 1)
    result = dsv2mk(*args, "--backend", "reference", "--logits", artifact.path / inside)
    assert (result.code, "outside of the artifact" in result.err) == (2, True)
    assert read_bytes(artifact.path) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--timeout", "nan"), "not a number of seconds"),
        (("--seed", str(2**63)), "--seed"),
    ],
)
def test_numbers_that_no_launch_takes_are_refused(
    args: tuple[str, str], said: str, tmp_path: Path, dsv2mk: Call
) -> None:
    for command in ("bench", "gate"):
        result = dsv2mk(command, tmp_path, *args)
        assert (result.code, said in result.err) == (2, True)


def test_a_pipe_is_no_reference(artifact: Artifact, tmp_path: Path, dsv2mk: Call) -> None:
    os.mkfifo(tmp_path / "pipe")
    args = ("gate", artifact.path, "--backend", "reference", "--reference", tmp_path / "pipe")
    assert dsv2mk(*args).code == 2
