"""The command `gate`: what it feeds and reports, what fails it, what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeDecoder, nearly_tied
from helpers import Call, Done, flip_byte, make_artifact, make_snapshot, names, small_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.reference import ReferenceDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 0, 300, 7, 7, 9, 12, 31, 200]
POSITIONS = len(PROMPT) + 3
CONFIG = small_config(num_hidden_layers=2, max_position_embeddings=40)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    snapshot = make_snapshot(tmp_path / "snapshot", CONFIG)
    return make_artifact(snapshot, 1, tmp_path / "artifact")


@pytest.fixture
def stored(artifact: Artifact, tmp_path: Path, dsv2mk: Call) -> Path:
    """Logits of PROMPT and three tokens that were chosen."""
    path = tmp_path / "logits"
    ids = ["--token-ids", ",".join(map(str, PROMPT)), "--max-new", 4, "--ignore-eos"]
    assert dsv2mk("generate", artifact.path, *ids, "--logits", path).code == 0
    return path


def reference_args(artifact: Artifact, stored: Path) -> list[object]:
    """Of damaged weights, too: nothing is hashed."""
    options = ["--backend", "reference", "--reference", stored, "--verify", "none"]
    return ["gate", artifact.path, *options]


def put_nan(artifact: Artifact, tensor: str, element: int = 0) -> None:
    """In a bf16 tensor."""
    name, offset = artifact.locate(0, artifact.layouts[0].tensors[tensor])
    with open(artifact.path / name, "r+b") as file:
        file.seek(offset + 2 * element)
        file.write(b"\xc0\x7f")


def edit(path: Path, change: Callable[[Tensor], object]) -> None:
    tensors = load_file(path)
    change(tensors["logits"])
    save_file(tensors, path)


def both(dsv2mk: Call, *args: object) -> tuple[int, dict[str, Any], Done]:
    """(exit code, JSON, the command that printed text)."""
    plain, shown = dsv2mk(*args), dsv2mk(*args, "--json")
    assert plain.code == shown.code
    assert "Traceback" not in plain.err + shown.err
    return shown.code, shown.json, plain


# ---- the reference decoder against logits that it has stored ----


@pytest.mark.parametrize("strict", [False, True])
def test_a_decoder_agrees_with_what_it_has_stored(
    strict: bool, artifact: Artifact, stored: Path, dsv2mk: Call
) -> None:
    args = [*reference_args(artifact, stored), "--free-run", 20, *(["--strict"] if strict else [])]
    code, data, plain = both(dsv2mk, *args)
    assert code == 0
    free_run = data.pop("free_run")
    assert (free_run["tokens"], free_run["slack"], "equal_to_reference" in free_run) == (
        *(20, 0.0, False),
    )
    rows = load_file(stored)["logits"].double().sort(descending=True).values
    bounds = 8 * 0.002 * rows.square().mean(1).sqrt()
    told = [int((rows[:, place] - rows[:, place + 1] > bounds).sum()) for place in (0, 4)]
    equal = {"bit_equal": True, "runs_bit_equal": True} if strict else {}
    assert data == {
        "backend": "reference",
        "positions": POSITIONS,
        "max_relative_error": 0.0,
        "largest_difference": 0.0,
        "top1_agreement": 1.0,
        "top1_agreement_where_told": 1.0,
        "top5_overlap": 1.0,
        "top5_overlap_where_told": 1.0,
        "positions_told": told,
        "tolerance": 0.002,
        **equal,
        "seed": 0,
        "digest": artifact.manifest.digest,
        "kernel_key": None,
        "ctas": None,
        "passed": True,
        "failures": [],
    }
    assert "FAILED" not in plain.out
    assert plain.out.splitlines()[0].split() == ["backend", "reference"]


def test_a_logit_that_was_edited_fails_its_position(
    artifact: Artifact, stored: Path, dsv2mk: Call
) -> None:
    edit(stored, lambda logits: logits[3].mul_(1.25))
    code, data, plain = both(dsv2mk, *reference_args(artifact, stored), "--free-run", 0)
    assert (code, data["passed"]) == (1, False)
    (failure,) = data["failures"]
    assert failure.startswith("position 3: relative error 2.00e-01")
    assert plain.out.splitlines()[-1] == f"FAILED {failure}"
    assert data["max_relative_error"] == pytest.approx(0.2)
    assert "free_run" not in data
    loose = [*reference_args(artifact, stored), "--free-run", 0, "--tolerance", 0.21]
    assert dsv2mk(*loose).code == 0


def test_strict_finds_a_bit(artifact: Artifact, stored: Path, dsv2mk: Call) -> None:
    def next_up(logits: Tensor) -> None:
        logits[-1, 17] = torch.nextafter(logits[-1, 17], torch.tensor(math.inf))

    edit(stored, next_up)
    args = [*reference_args(artifact, stored), "--free-run", 0]
    assert dsv2mk(*args).code == 0
    code, data, _ = both(dsv2mk, *args, "--strict")
    assert (code, data["bit_equal"], data["runs_bit_equal"]) == (1, False, True)
    assert [failure[:12] for failure in data["failures"]] == [f"position {POSITIONS - 1}:"]


def test_all_failures_are_in_the_json_and_some_in_the_text(
    artifact: Artifact, tmp_path: Path, dsv2mk: Call
) -> None:
    stored = tmp_path / "zeros"
    tokens = torch.arange(30, dtype=torch.int32)
    save_file({"logits": torch.ones(30, CONFIG["vocab_size"]), "token_ids": tokens}, stored)
    code, data, plain = both(dsv2mk, *reference_args(artifact, stored), "--free-run", 0)
    assert code == 1
    assert [failure.split(":")[0] for failure in data["failures"]] == [
        f"position {position}" for position in range(30)
    ]
    lines = [line for line in plain.out.splitlines() if line.startswith("FAILED")]
    assert lines == [f"FAILED {failure}" for failure in data["failures"][:20]]
    assert plain.out.splitlines()[-1] == "and 10 more"


@pytest.mark.parametrize("edited", [False, True])
def test_what_was_found_is_stored_whole(
    edited: bool, artifact: Artifact, stored: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    if edited:
        edit(stored, lambda logits: logits.neg_())
    out = tmp_path / "out" / "gate.json"
    out.parent.mkdir()
    out.write_text("an older file")
    args = [*reference_args(artifact, stored), "--free-run", 4, "--output-json", out]
    code, data, _ = both(dsv2mk, *args)
    assert code == (1 if edited else 0)
    assert json.loads(out.read_text()) == data
    assert names(out.parent) == {"gate.json"}


@pytest.mark.parametrize("position", [0, 3])
def test_what_is_no_number_is_told(
    position: int, artifact: Artifact, stored: Path, dsv2mk: Call
) -> None:
    edit(stored, lambda logits: logits[position].fill_(math.nan))
    done = dsv2mk(*reference_args(artifact, stored), "--free-run", 0, "--json")
    data = json.loads(done.out, parse_constant=lambda name: pytest.fail(name))
    assert done.code == 1
    assert data["failures"] == [f"position {position}: the reference's logits are not finite"]
    assert data["max_relative_error"] is None
    assert data["largest_difference"] is None


def test_damaged_weights_fail_the_gate(artifact: Artifact, stored: Path, dsv2mk: Call) -> None:
    put_nan(artifact, "final_norm")
    code, data, _ = both(dsv2mk, *reference_args(artifact, stored), "--free-run", 4)
    assert code == 1
    assert data["failures"] == [
        f"position {position}: logits are not finite" for position in range(POSITIONS)
    ]
    assert "free_run" not in data


def test_damaged_weights_that_only_a_free_run_meets_fail_the_gate(
    artifact: Artifact, stored: Path, dsv2mk: Call
) -> None:
    """The row of `embed` of a token that is chosen, but not among those that are fed first."""
    args = ["generate", artifact.path, "--backend", "reference", "--json"]
    ids = ["--token-ids", ",".join(map(str, PROMPT[:8])), "--max-new", 20, "--ignore-eos"]
    chosen = dsv2mk(*args, *ids).json["token_ids"]
    fed = load_file(stored)["token_ids"].tolist()
    place = next(at for at, token in enumerate(chosen[:-1]) if token not in fed)
    put_nan(artifact, "embed", chosen[place] * CONFIG["hidden_size"])
    code, data, _ = both(dsv2mk, *reference_args(artifact, stored), "--free-run", 20)
    (failure,) = data["failures"]
    assert code == 1
    assert failure.startswith(f"free-running decode: logits at position {8 + place} are not finite")
    assert "dsv2mk verify DIR" in failure
    last = [*reference_args(artifact, stored), "--free-run", place + 1]
    assert dsv2mk(*last).code == 0  # the token is chosen, and fed to nobody


def test_the_artifact_is_verified_first(artifact: Artifact, stored: Path, dsv2mk: Call) -> None:
    flip_byte(artifact.path / "rank-00.ffn.safetensors")
    args = ["gate", artifact.path, "--backend", "reference", "--reference", stored]
    args += ["--free-run", 0]
    for options in ([], ["--verify", "sample"], ["--verify", "full"]):
        assert dsv2mk(*args, *options).code == 11
    assert dsv2mk(*args, "--verify", "none").code != 11


# ---- a decoder that chooses other experts ----


@pytest.fixture
def on_gpu(dsv2mk: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`gate` of a decoder that runs here: its JSON."""

    def call(decoder: FakeDecoder, folder: Path, *args: object) -> dict[str, Any]:
        asked: list[bool] = []

        def opened(*_: object, tokens: int, trace: bool) -> FakeDecoder:
            asked.append(trace)
            return decoder

        monkeypatch.setattr("dsv2mk.runner.run_gate.open_gpu", opened)
        options = ["--backend", "gpu", "--positions", 8, "--free-run", 9, "--json", *args]
        done = dsv2mk("gate", folder, *options)
        assert asked == ["--reference" not in args]
        assert done.code == (1 if done.json["failures"] else 0)
        return done.json

    return call


@pytest.mark.parametrize(
    ("order", "followed"),
    [([0, 1, 3, 7, 2, 6, 5, 4], True), ([5, 6, 7, 4, 3, 0, 1, 2], False)],
    ids=["other experts", "another order"],
)
def test_experts_that_are_nearly_tied_may_be_others(
    order: list[int], followed: bool, tmp_path: Path, on_gpu: Callable[..., dict[str, Any]]
) -> None:
    ours = nearly_tied(tmp_path, "ours", [7, 6, 5, 4, 3, 2, 1, 0], CONFIG)
    theirs = FakeDecoder(nearly_tied(tmp_path, "theirs", order, CONFIG))
    data = on_gpu(theirs, ours.path, "--phases")
    assert data["failures"] == []
    assert data["max_relative_error"] < 1e-5
    assert max(data["phases"].values()) < 1e-3
    # Eight tokens are given and nine chosen, the last of them fed to nobody.
    for part, count in ((data, 8), (data["free_run"], 8 + 9 - 1)):
        assert part["choices_followed"] == (count if followed else 0)
        assert (part["largest_choice_slack"] > 0) == followed
        assert part["largest_choice_slack"] < 1e-3
    assert data["free_run"]["replay_equal"]
    assert data["free_run"]["equal_to_reference"] == 9


@pytest.fixture
def by_logit(artifact: Artifact) -> list[int]:
    """The experts of layer 1 by descending logit at the first position that the gate feeds."""
    (token,) = torch.randint(301, (1,), generator=torch.Generator().manual_seed(0)).tolist()
    reference = ReferenceDecoder(artifact)
    reference.trace = {}
    reference.step(token)
    return reference.trace[1, "route"].argsort(descending=True).tolist()


def test_an_expert_that_is_far_worse_fails(
    artifact: Artifact, by_logit: list[int], on_gpu: Callable[..., dict[str, Any]]
) -> None:
    """Though all that follows from it is right."""
    worst = by_logit[-1]
    bad = [worst ^ 1, worst, next(e for e in by_logit if e // 2 != worst // 2)]  # of two groups
    bad.sort(key=by_logit.index)
    decoder = FakeDecoder(artifact, choices_of=lambda at: {1: bad} if at == 0 else {})
    data = on_gpu(decoder, artifact.path)
    assert [text.split(", the")[0] for text in data["failures"]] == [
        f"{of}position 0: layer 1 chose experts {bad}" for of in ("", "free-running decode: ")
    ]
    assert data["max_relative_error"] == 0.0
    assert (data["choices_followed"], data["free_run"]["choices_followed"]) == (1, 1)
    assert 0.1 < data["largest_choice_slack"] <= 1


def test_experts_out_of_order_fail(
    artifact: Artifact, by_logit: list[int], on_gpu: Callable[..., dict[str, Any]]
) -> None:
    first = by_logit[0]
    order = [next(e for e in by_logit if e // 2 != first // 2), first, first ^ 1]
    order.sort(key=by_logit.index, reverse=True)
    decoder = FakeDecoder(artifact, choices_of=lambda at: {1: order} if at == 0 else {})
    data = on_gpu(decoder, artifact.path, "--free-run", 0)
    said = f"position 0: layer 1 lists experts {order} by weights that do not descend"
    assert [failure for failure in data["failures"] if failure.startswith(said)] != []


def test_numbers_that_are_no_experts_fail(
    artifact: Artifact, on_gpu: Callable[..., dict[str, Any]]
) -> None:
    def spoil(position: int, words: dict[tuple[str, int], Tensor]) -> None:
        words["chosen", 1].view(torch.int32)[0] = torch.tensor([2**31 - 1, -1, 0])

    data = on_gpu(FakeDecoder(artifact, spoil=spoil), artifact.path, "--free-run", 0, "--phases")
    assert [text.split(", the")[0] for text in data["failures"]] == [
        f"position {at}: layer 1 chose experts [2147483647, -1, 0]" for at in range(8)
    ]
    assert (data["max_relative_error"], data["largest_choice_slack"]) == (0.0, None)


def test_weights_that_are_wrong_are_a_phase(
    artifact: Artifact, on_gpu: Callable[..., dict[str, Any]]
) -> None:
    def spoil(position: int, words: dict[tuple[str, int], Tensor]) -> None:
        words["chosen", 1][1] *= 0.5

    data = on_gpu(FakeDecoder(artifact, spoil=spoil), artifact.path, "--phases")
    (failure,) = data["failures"]
    assert failure.startswith("position 0: layer 1, phase chosen, element [0]: ")
    assert data["phases"]["chosen"] == 0.5
    assert data["choices_followed"] == 0


@pytest.mark.parametrize("with_stored", [False, True])
def test_a_launch_of_many_tokens_chooses_as_steps_do(
    with_stored: bool, artifact: Artifact, stored: Path, on_gpu: Callable[..., dict[str, Any]]
) -> None:
    def launched(position: int, logits: Tensor) -> Tensor:
        return logits.roll(1) if decoder.launches[-1] > 1 and position == wrong else logits

    decoder = FakeDecoder(artifact, launched)
    args = ["--reference", stored] if with_stored else []
    for wrong in (-1, 7, 12, 15):
        data = on_gpu(decoder, artifact.path, *args)
        free = data["free_run"]
        said = [text for text in data["failures"] if "its replay step by step" in text]
        assert free["replay_equal"] == (wrong < 0)
        assert [text.split()[6] for text in said] == ([f"{wrong + 1},"] if wrong >= 0 else [])
        assert (len(data["failures"]) == len(said)) == (with_stored or wrong < 0)
        assert ("equal_to_reference" in free) == (not with_stored)
        assert ("choices_followed" in {**data, **free}) == (not with_stored)
        assert decoder.launches[-17:] == [8 + 9 - 1] + [1] * 16


# ---- what it refuses ----


def assert_refused(dsv2mk: Call, *args: object) -> str:
    code, data, plain = both(dsv2mk, *args)
    assert (code, plain.out) == (2, "")
    message: str = data["error"]["message"]
    assert plain.err == f"dsv2mk: {message}\n"
    return message


def test_a_reference_is_needed(artifact: Artifact, stored: Path, dsv2mk: Call) -> None:
    for backend in ([], ["--backend", "reference"], ["--backend", "auto"]):
        message = assert_refused(dsv2mk, "gate", artifact.path, *backend)
        assert "its own reference" in message
        assert "generate DIR --logits FILE" in message
        assert_refused(dsv2mk, "gate", artifact.path, *backend, "--phases")
        args = ["gate", artifact.path, *backend, "--reference", stored, "--phases"]
        assert "--phases" in assert_refused(dsv2mk, *args)
    args = ["gate", artifact.path, "--backend", "gpu", "--reference", stored, "--phases"]
    assert "without --reference" in assert_refused(dsv2mk, *args)


def of_another_model(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits[:, :-1].contiguous(), "token_ids": ids}


def of_a_wider_model(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": torch.cat([logits, logits[:, :1]], dim=1), "token_ids": ids}


def of_one_position(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits[0].clone(), "token_ids": ids}


def with_fewer_tokens(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids[:5].clone()}


def with_tokens_of_another(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids + 100}


def without_tokens(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits}


def without_logits(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"token_ids": ids}


def longer_than_the_context(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits.repeat(4, 1), "token_ids": ids.repeat(4)}


def of_no_position(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits[:0].clone(), "token_ids": ids}


def with_a_table_of_tokens(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": torch.stack([ids, ids], dim=1)}


def with_one_number(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids[0].clone()}


def with_broken_tokens(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids + 0.5}


def with_a_flag_a_position(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids > 7}


def with_a_token_below_zero(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "token_ids": ids - 1}


def of_doubles(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits.double(), "token_ids": ids}


#: (what is stored instead, part of the message)
FILES: list[Any] = [
    (of_another_model, f"found float32 [{POSITIONS}, 300]"),
    (of_a_wider_model, f"expected float32 [positions, 301], found float32 [{POSITIONS}, 302]"),
    (of_one_position, "found float32 [301]"),
    (of_doubles, f"found float64 [{POSITIONS}, 301]"),
    (with_fewer_tokens, f"expected int32 [{POSITIONS} or more], found int32 [5]"),
    (with_tokens_of_another, "0 to 300, found 400"),
    (without_tokens, "token_ids"),
    (without_logits, "logits"),
    (longer_than_the_context, f"expected at most 40 positions, found {4 * POSITIONS}"),
    (of_no_position, "expected at least 1 position, found 0"),
    (with_a_table_of_tokens, f"found int32 [{POSITIONS + 1}, 2]"),
    (with_one_number, "found int32 []"),
    (with_broken_tokens, f"found float32 [{POSITIONS + 1}]"),
    (with_a_flag_a_position, f"found bool [{POSITIONS + 1}]"),
    (with_a_token_below_zero, "0 to 300, found -1"),
]


@pytest.mark.parametrize(("change", "said"), FILES)
def test_logits_that_are_not_this_model_s_are_refused(
    change: Callable[[Tensor, Tensor], dict[str, Tensor]],
    said: str,
    artifact: Artifact,
    stored: Path,
    dsv2mk: Call,
) -> None:
    tensors = load_file(stored)
    save_file(change(tensors["logits"], tensors["token_ids"]), stored)
    args = [*reference_args(artifact, stored), "--free-run", 0]
    message = assert_refused(dsv2mk, *args)
    assert f"--reference {stored}" in message
    assert said in message


def test_a_free_run_has_to_fit_the_context(artifact: Artifact, stored: Path, dsv2mk: Call) -> None:
    args = [*reference_args(artifact, stored), "--free-run"]
    message = assert_refused(dsv2mk, *args, 33)
    assert "--free-run: expected at most 32 tokens, found 33" in message
    code, data, _ = both(dsv2mk, *args, 32)
    assert (code, data["free_run"]["tokens"]) == (0, 32)


def test_what_is_no_logits_file_is_refused(
    artifact: Artifact, stored: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    cut, absent = tmp_path / "cut", tmp_path / "absent"
    cut.write_bytes(stored.read_bytes()[:-1])
    for path in (cut, absent, tmp_path, artifact.path / "config.json"):
        message = assert_refused(dsv2mk, *reference_args(artifact, path))
        assert f"--reference {path}" in message
        assert "generate DIR --logits FILE" in message


def test_what_was_found_needs_a_place(
    artifact: Artifact, stored: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv2mk.runner.run_gate.run_gate", lambda *_: pytest.fail("it decodes"))
    for path in (tmp_path / "missing" / "file", tmp_path, stored / "file"):
        args = [*reference_args(artifact, stored), "--output-json", path]
        assert "--output-json" in assert_refused(dsv2mk, *args)
    assert not (tmp_path / "missing").exists()
