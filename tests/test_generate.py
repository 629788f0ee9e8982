"""The command `generate`, and what it may read and import."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import edit_json, make_artifact, make_snapshot, read_bytes, small_config
from safetensors.torch import load_file

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import run
from dsv2mk.pipeline.cli import COMMANDS, cli
from dsv2mk.runner.reference import ReferenceDecoder

CONFIG = small_config(num_hidden_layers=2, max_position_embeddings=24)
PROMPT = "dé"  # three bytes, so three tokens
IDS = [0x64, 0xC3, 0xA9]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "snapshot", CONFIG)


@pytest.fixture
def artifact(snapshot: Path, tmp_path: Path) -> Path:
    return make_artifact(snapshot, 3, tmp_path / "artifact").path


def generate(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """The command's JSON; it must end well."""
    capsys.readouterr()
    assert run(cli, ["generate", "--json", *map(str, args)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """(exit code, message) of a command that must fail, the same with and without --json."""
    capsys.readouterr()
    plain = run(cli, ["generate", *map(str, args)])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    code = run(cli, ["generate", "--json", *map(str, args)])
    found = json.loads(capsys.readouterr().out)
    assert code == plain != 0
    assert set(found) == {"error"}
    message: str = found["error"]["message"]
    assert message in err
    return code, message


def prompt(ids: list[int]) -> list[str]:
    return ["--token-ids", ",".join(map(str, ids))]


# ---- what it prints ----


def test_text_and_token_ids_are_the_same_prompt(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_text = generate(capsys, artifact, "--prompt", PROMPT, "--max-new", 6)
    by_ids = generate(capsys, artifact, *prompt(IDS), "--max-new", 6)
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

    assert run(cli, ["generate", str(artifact), "--prompt", PROMPT, "--max-new", "6"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{PROMPT}{by_ids['text']}\n"
    assert "6 tokens" in err


@pytest.mark.parametrize("cache", ["bf16", "fp32"])
@pytest.mark.parametrize("ids", [[7], IDS, [300, 0, 257, 256, 300]])
def test_logits_are_the_decoders_and_give_the_tokens(
    cache: str, ids: list[int], artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "logits.safetensors"
    file.write_bytes(b"an older file")
    result = generate(
        capsys, artifact, *prompt(ids), "--max-new", 5, "--ignore-eos", "--logits", file,
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


def test_others_may_read_the_logits_as_any_other_file(artifact: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        args = ["generate", str(artifact), *prompt(IDS), "--max-new", "1"]
        assert run(cli, [*args, "--logits", str(tmp_path / "logits")]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "logits").stat().st_mode & 0o777 == 0o640


def test_the_context_can_be_filled(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = generate(capsys, artifact, *prompt(IDS), "--max-new", 21, "--ignore-eos")
    assert len(result["token_ids"]) == 21


# ---- where it stops ----


@pytest.mark.parametrize("where", ["generation", "a list", "config", "config only", "elsewhere"])
def test_it_stops_at_the_end_of_sequence_token(
    where: str,
    snapshot: Path,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = generate(capsys, artifact, *prompt(IDS), "--max-new", 6, "--ignore-eos")["token_ids"]
    first = free[0]
    if where == "config only":
        (snapshot / "generation_config.json").unlink()
    eos = {"generation": first, "a list": [first, 5], "elsewhere": 5}.get(where)
    if eos is not None or where == "config":
        edit_json(snapshot / "generation_config.json", eos_token_id=eos)
    edit_json(snapshot / "config.json", eos_token_id=first)
    again = make_artifact(snapshot, 2, tmp_path / "again").path
    stopped = generate(capsys, again, *prompt(IDS), "--max-new", 6)
    if where == "elsewhere":  # generation_config.json comes before config.json
        assert 5 not in free
        assert (stopped["token_ids"], stopped["stopped"]) == (free, "length")
        return
    assert (stopped["token_ids"], stopped["stopped"]) == ([first], "eos")
    onwards = generate(capsys, again, *prompt(IDS), "--max-new", 6, "--ignore-eos")
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
    name: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, exit_code, part = REFUSED[name]
    before = read_bytes(artifact)
    code, message = refusal(capsys, artifact, *args, "--logits", tmp_path / "logits")
    assert code == exit_code
    assert part in message
    assert read_bytes(artifact) == before
    assert not (tmp_path / "logits").exists()


def test_text_needs_the_tokenizer(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (snapshot / "tokenizer.json").unlink()
    artifact = make_artifact(snapshot, 1, tmp_path / "artifact").path
    code, message = refusal(capsys, artifact, "--prompt", "a", "--max-new", 2)
    assert (code, "tokenizer.json" in message) == (2, True)
    result = generate(capsys, artifact, *prompt(IDS), "--max-new", 2, "--ignore-eos")
    assert (result["text"], len(result["token_ids"])) == (None, 2)
    args = ["generate", str(artifact), *prompt(IDS), "--max-new", "2", "--ignore-eos"]
    assert run(cli, args) == 0
    assert capsys.readouterr().out == f"{','.join(map(str, result['token_ids']))}\n"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda path: shutil.rmtree(path), "does not exist"),
        (lambda path: (path / "manifest.json").unlink(), "no manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest"),
        (lambda path: (path / "rank-02.ffn.safetensors").unlink(), "rank-02.ffn.safetensors"),
        (lambda path: os.truncate(path / "rank-01.ffn.safetensors", 9), "rank-01.ffn.safetensors"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
    ],
    ids=["no folder", "no manifest", "no JSON", "no rank 2", "a cut file", "no config"],
)
def test_a_damaged_artifact_is_refused(
    damage: Any, part: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(artifact)
    code, message = refusal(capsys, artifact, *prompt(IDS), "--max-new", 2)
    assert code == 11
    assert part in message


def test_logits_that_are_no_numbers_are_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the headers do not show: a weight that was turned into a NaN."""
    opened = Artifact.open(artifact)
    for rank, layout in enumerate(opened.layouts):
        name, offset = opened.locate(rank, layout.tensors["final_norm"])
        with open(artifact / name, "r+b") as file:
            file.seek(offset)
            file.write(b"\xc0\x7f")
    code, _ = refusal(
        capsys, artifact, *prompt(IDS), "--max-new", 2, "--logits", tmp_path / "logits"
    )
    assert code == 11
    assert not (tmp_path / "logits").exists()


@pytest.mark.parametrize("target", ["missing/logits", "a-file/logits", "a-folder"])
def test_logits_that_cannot_be_stored_leave_nothing(
    target: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("kept")
    (tmp_path / "a-folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    code, message = refusal(
        capsys, artifact, *prompt(IDS), "--max-new", 2, "--logits", tmp_path / target
    )
    assert code == 2
    assert target.split("/")[0] in message
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "a-file").read_text() == "kept"


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


# ---- what it reads and imports ----

_COMPILERS = {"cutlass", "huggingface_hub", "nvidia_cutlass_dsl", "numba", "transformers", "triton"}


def _modules(args: list[str], cwd: Path) -> tuple[str, set[str]]:
    """(stdout, sys.modules) after a command in a process of its own."""
    code = (
        "import json, sys\n"
        "from dsv2mk.artifacts.console import run\n"
        "from dsv2mk.pipeline.cli import cli\n"
        f"code = run(cli, {args!r})\n"
        "json.dump(sorted(sys.modules), sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_needs_the_artifact_and_no_compiler(
    ranks: int, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = make_artifact(snapshot, ranks, tmp_path / "built").path
    args = ["--prompt", PROMPT, "--max-new", "3", "--ignore-eos"]
    expected = generate(capsys, built, *args)
    shutil.rmtree(snapshot)
    shutil.rmtree(tmp_path / "cache")
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    built.rename(moved)
    out, modules = _modules(["generate", "--json", str(moved), *args], tmp_path)
    found = json.loads(out)
    for result in (found, expected):
        del result["tokens_per_s"]
    assert found == expected
    assert {"torch", "tokenizers", "dsv2mk.runner.reference"} <= modules
    assert not _COMPILERS & {name.split(".")[0] for name in modules}
    ours = {name for name in modules if name.startswith(("dsv2mk.pipeline.", "dsv2mk.kernel"))}
    assert ours == {"dsv2mk.pipeline.cli"}
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["moved"]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_light(command: str | None, tmp_path: Path) -> None:
    out, modules = _modules([*([command] if command else []), "--help"], tmp_path)
    assert "Usage: dsv2mk" in out
    heavy = {*_COMPILERS, "numpy", "safetensors", "tokenizers", "torch"}
    assert not heavy & {name.split(".")[0] for name in modules}


def test_the_installed_command_decodes(artifact: Path, tmp_path: Path) -> None:
    script = [Path(sys.executable).with_name("dsv2mk"), "generate", artifact, "--max-new", "2"]
    args = [*map(str, script), *prompt(IDS), "--ignore-eos"]
    done = subprocess.run([*args, "--json"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    assert b"2 tokens" in done.stderr
