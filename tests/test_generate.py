"""The command `generate`: what it prints and stores, where it stops, what it refuses."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Call, edit_json, make_artifact, make_snapshot, read_bytes, small_config, state
from safetensors.torch import load_file

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.runner.reference import ReferenceDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = small_config(num_hidden_layers=2, max_position_embeddings=24)
PROMPT = "dé"  # three bytes, so three tokens
IDS = [0x64, 0xC3, 0xA9]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "snapshot", CONFIG)


@pytest.fixture
def artifact(snapshot: Path, tmp_path: Path) -> Path:
    return make_artifact(snapshot, 3, tmp_path / "artifact").path


def generate(dsv2mk: Call, *args: object) -> dict[str, Any]:
    """The command's JSON; it must end well."""
    done = dsv2mk("generate", "--json", *args)
    assert done.code == 0
    return done.json


def refusal(dsv2mk: Call, *args: object) -> tuple[int, str]:
    """(exit code, message) of a command that must fail, the same with and without --json."""
    plain, shown = dsv2mk("generate", *args), dsv2mk("generate", "--json", *args)
    assert plain.out == ""
    assert "Traceback" not in plain.err
    assert shown.code == plain.code != 0
    assert set(shown.json) == {"error"}
    message: str = shown.json["error"]["message"]
    assert message in plain.err
    return shown.code, message


def prompt(ids: list[int]) -> list[str]:
    return ["--token-ids", ",".join(map(str, ids))]


# ---- what it prints ----


def test_text_and_token_ids_are_the_same_prompt(artifact: Path, dsv2mk: Call) -> None:
    by_text = generate(dsv2mk, artifact, "--prompt", PROMPT, "--max-new", 6)
    by_ids = generate(dsv2mk, artifact, *prompt(IDS), "--max-new", 6)
    for result in (by_text, by_ids):
        assert result.pop("tokens_per_s") > 0
    assert by_text == by_ids
    assert by_ids["prompt_token_ids"] == IDS
    assert len(by_ids["token_ids"]) == 6
    assert by_ids["backend"] == "reference"
    assert by_ids["cache_dtype"] == "bf16"
    assert by_ids["stopped"] == "length"
    assert by_ids["digest"] == Artifact.open(artifact).manifest.digest
    data = bytes(token for token in by_ids["token_ids"] if token < 256)
    assert by_ids["text"] == data.decode(errors="replace")

    code, out, err = dsv2mk("generate", artifact, "--prompt", PROMPT, "--max-new", 6)
    assert (code, out) == (0, f"{PROMPT}{by_ids['text']}\n")
    assert "6 tokens" in err


@pytest.mark.parametrize("cache", ["bf16", "fp32"])
@pytest.mark.parametrize("ids", [[7], IDS, [300, 0, 257, 256, 300]])
def test_logits_are_the_decoders_and_give_the_tokens(
    cache: str, ids: list[int], artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    file = tmp_path / "logits.safetensors"
    file.write_bytes(b"an older file")
    result = generate(
        dsv2mk, artifact, *prompt(ids), "--max-new", 5, "--ignore-eos", "--logits", file,
        "--cache-dtype", cache,
    )  # fmt: skip
    new = result["token_ids"]
    assert len(new) == 5
    stored = load_file(file)
    assert set(stored) == {"logits", "token_ids"}
    assert stored["logits"].dtype == torch.float32
    assert stored["logits"].shape == (len(ids) + 4, CONFIG["vocab_size"])
    assert stored["token_ids"].tolist() == [*ids, *new]
    assert stored["logits"].argmax(1)[len(ids) - 1 :].tolist() == new
    decoder = ReferenceDecoder(
        Artifact.open(artifact), {"bf16": torch.bfloat16, "fp32": torch.float32}[cache]
    )
    expected = torch.stack([decoder.step(token) for token in [*ids, *new[:-1]]])
    assert torch.equal(stored["logits"], expected)
    other = ReferenceDecoder(
        Artifact.open(artifact), {"fp32": torch.bfloat16, "bf16": torch.float32}[cache]
    )
    assert not torch.equal(torch.stack([other.step(token) for token in ids]), expected[: len(ids)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("artifact", "cache", "logits.safetensors", "snapshot")
    ]


def test_others_may_read_the_logits_as_any_other_file(
    artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    before = os.umask(0o027)
    try:
        args = ["generate", artifact, *prompt(IDS), "--max-new", 1]
        assert dsv2mk(*args, "--logits", tmp_path / "logits").code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "logits").stat().st_mode & 0o777 == 0o640


def test_the_context_can_be_filled(artifact: Path, dsv2mk: Call) -> None:
    result = generate(dsv2mk, artifact, *prompt(IDS), "--max-new", 21, "--ignore-eos")
    assert len(result["token_ids"]) == 21


def test_the_installed_command_decodes(artifact: Path, tmp_path: Path) -> None:
    script = [Path(sys.executable).with_name("dsv2mk"), "generate", artifact, "--max-new", "2"]
    args = [*map(str, script), *prompt(IDS), "--ignore-eos"]
    done = subprocess.run([*args, "--json"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    assert b"2 tokens" in done.stderr


# ---- where it stops ----


@pytest.mark.parametrize("where", ["generation", "a list", "config", "config only", "elsewhere"])
def test_it_stops_at_the_end_of_sequence_token(
    where: str,
    snapshot: Path,
    artifact: Path,
    tmp_path: Path,
    dsv2mk: Call,
) -> None:
    free = generate(dsv2mk, artifact, *prompt(IDS), "--max-new", 6, "--ignore-eos")["token_ids"]
    first = free[0]
    if where == "config only":
        (snapshot / "generation_config.json").unlink()
    eos = {"generation": first, "a list": [first, 5], "elsewhere": 5}.get(where)
    if eos is not None or where == "config":
        edit_json(snapshot / "generation_config.json", eos_token_id=eos)
    edit_json(snapshot / "config.json", eos_token_id=first)
    again = make_artifact(snapshot, 2, tmp_path / "again").path
    stopped = generate(dsv2mk, again, *prompt(IDS), "--max-new", 6)
    if where == "elsewhere":  # generation_config.json comes before config.json
        assert 5 not in free
        assert (stopped["token_ids"], stopped["stopped"]) == (free, "length")
        return
    assert (stopped["token_ids"], stopped["stopped"]) == ([first], "eos")
    onwards = generate(dsv2mk, again, *prompt(IDS), "--max-new", 6, "--ignore-eos")
    assert (onwards["token_ids"], onwards["stopped"]) == (free, "length")


# ---- what it refuses ----

#: (arguments after the folder, exit code, part of the message)
REFUSED = {
    "no prompt": (["--max-new", "2"], 2, "either --prompt or --token-ids"),
    "two prompts": (["--prompt", "a", "--token-ids", "1", "--max-new", "2"], 2, "either"),
    "two, one empty": (["--prompt", "", "--token-ids", "1", "--max-new", "2"], 2, "either"),
    "empty text": (["--prompt", "", "--max-new", "2"], 2, "at least one token"),
    "no UTF-8": (["--prompt", "a\udcff", "--max-new", "2"], 2, "--prompt"),
    "empty list": (["--token-ids", "", "--max-new", "2"], 2, "--token-ids"),
    "no number": (["--token-ids", "1,x", "--max-new", "2"], 2, "1,x"),
    "trailing comma": (["--token-ids", "1,", "--max-new", "2"], 2, "1,"),
    "no integer": (["--token-ids", "1.5", "--max-new", "2"], 2, "1.5"),
    "past the vocabulary": (["--token-ids", "1,301", "--max-new", "2"], 2, "0 to 300, found 301"),
    "negative": (["--token-ids", "-1", "--max-new", "2"], 2, "found -1"),
    "too many new": (["--token-ids", "1,2,3", "--max-new", "22"], 2, "found 3 + 22"),
    "too long": (["--token-ids", ",".join("1" * 24), "--max-new", "1"], 2, "at most 24 tokens"),
    "nothing to do": (["--token-ids", "1", "--max-new", "0"], 2, "--max-new"),
    "no --max-new": (["--token-ids", "1"], 2, "--max-new"),
    "cache of int8": (["--token-ids", "1", "--max-new", "1", "--cache-dtype", "int8"], 2, "int8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_command_line_is_refused(
    name: str, artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    args, exit_code, part = REFUSED[name]
    before = read_bytes(artifact)
    code, message = refusal(dsv2mk, artifact, *args, "--logits", tmp_path / "logits")
    assert code == exit_code
    assert part in message
    assert read_bytes(artifact) == before
    assert not (tmp_path / "logits").exists()


def test_text_needs_the_tokenizer(snapshot: Path, tmp_path: Path, dsv2mk: Call) -> None:
    (snapshot / "tokenizer.json").unlink()
    artifact = make_artifact(snapshot, 1, tmp_path / "artifact").path
    code, message = refusal(dsv2mk, artifact, "--prompt", "a", "--max-new", 2)
    assert (code, "tokenizer.json" in message) == (2, True)
    result = generate(dsv2mk, artifact, *prompt(IDS), "--max-new", 2, "--ignore-eos")
    assert (result["text"], len(result["token_ids"])) == (None, 2)
    code, out, _ = dsv2mk("generate", artifact, *prompt(IDS), "--max-new", 2, "--ignore-eos")
    assert (code, out) == (0, f"{','.join(map(str, result['token_ids']))}\n")


def test_logits_that_are_no_numbers_are_refused(
    artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """What the headers do not show: a weight that was turned into a NaN."""
    opened = Artifact.open(artifact)
    for rank, layout in enumerate(opened.layouts):
        name, offset = opened.locate(rank, layout.tensors["final_norm"])
        with open(artifact / name, "r+b") as file:
            file.seek(offset)
            file.write(b"\xc0\x7f")
    code, _ = refusal(
        dsv2mk, artifact, *prompt(IDS), "--max-new", 2, "--logits", tmp_path / "logits"
    )
    assert code == 11
    assert not (tmp_path / "logits").exists()


NO_PLACE = ["missing/logits", "a-file/logits", "a-folder", "a-pipe", "a-socket", "loop", "loop/x"]


@pytest.mark.parametrize("target", [*NO_PLACE, "to a-pipe", "to missing"])
def test_logits_that_cannot_be_stored_leave_nothing(
    target: str, artifact: Path, tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before decoding, which takes long; what is no file is neither written nor replaced."""
    place = tmp_path / "place"
    (place / "a-folder").mkdir(parents=True)
    (place / "a-file").write_text("kept")
    os.mkfifo(place / "a-pipe")
    (place / "loop").symlink_to("loop")
    (place / "to a-pipe").symlink_to("a-pipe")
    (place / "to missing").symlink_to("missing/logits")
    monkeypatch.setattr(ReferenceDecoder, "__init__", lambda *_: pytest.fail("it decodes"))
    monkeypatch.chdir(place)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("a-socket")
        before = state(place)
        args = [artifact, *prompt(IDS), "--max-new", 2, "--logits", place / target]
        code, message = refusal(dsv2mk, *args)
        assert state(place) == before
    assert code == 2
    assert target.split("/")[0] in message


@pytest.mark.parametrize("exists", [True, False])
def test_logits_go_where_a_link_leads(
    exists: bool, artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_text("older")
    link.symlink_to("elsewhere/target")
    generate(dsv2mk, artifact, *prompt(IDS), "--max-new", 1, "--logits", link)
    assert os.readlink(link) == "elsewhere/target"
    assert not target.is_symlink()
    assert load_file(target)["logits"].shape == (3, CONFIG["vocab_size"])
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.slow
def test_logits_that_grow_too_large_leave_nothing(artifact: Path, tmp_path: Path) -> None:
    """The file's limit stands in for a disk that fills up half-way."""
    args = ["generate", str(artifact), *prompt(IDS), "--max-new", "2", "--logits", "out/logits"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "logits").write_text("kept")
    code = (
        "import resource, sys\n"
        "from dsv2mk.artifacts.console import run\n"
        "from dsv2mk.pipeline.cli import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"sys.exit(run(cli, {args!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-Bc", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert [path.name for path in out.iterdir()] == ["logits"]
    assert (out / "logits").read_text() == "kept"
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
