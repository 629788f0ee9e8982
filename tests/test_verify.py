"""Damaged artifacts: what `verify` finds, whole or by sample, and which commands refuse them."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from helpers import Call, flip_byte, make_artifact

from dsv2mk.artifacts import hashing
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.container import read_header
from dsv2mk.manifests import manifest as manifest_module
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.pipeline import work as work_module


def files_of(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
    assert len(names) == 10  # 2 ranks of 3 parts, config, generation config, tokenizer and its own
    return names


def found_by_verify(dsv2mk: Call, folder: Path, *options: object) -> dict[str, str]:
    """The damaged files that `verify` names, in text and as JSON."""
    code, out, _ = dsv2mk("verify", folder, "--json", *options)
    data = json.loads(out)
    problems: dict[str, str] = data["problems"]
    assert data["ok"] == (not problems)
    assert code == (1 if problems else 0)
    code, out, _ = dsv2mk("verify", folder, *options)
    assert code == (1 if problems else 0)
    assert [line.split(":")[0] for line in out.splitlines()[:-1]] == list(problems)
    assert out.splitlines()[-1].startswith("damaged" if problems else "ok")
    return problems


def test_a_whole_artifact_passes(artifact: Path, dsv2mk: Call) -> None:
    assert found_by_verify(dsv2mk, artifact) == {}


def test_a_flipped_bit_anywhere_is_found(artifact: Path, dsv2mk: Call) -> None:
    for name in files_of(artifact):
        path = artifact / name
        content = path.read_bytes()
        rng = random.Random(name)
        places = {0, len(content) // 2, len(content) - 1, rng.randrange(len(content))}
        if name.endswith(".safetensors"):
            places |= {8, 4096}  # in the header; first byte of the data
        for place in sorted(places):
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            assert list(found_by_verify(dsv2mk, artifact)) == [name]
        path.write_bytes(content)
    assert found_by_verify(dsv2mk, artifact) == {}


def test_damage_of_the_shared_file_is_told_of_each_name(
    built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """The replicated part is one file under a name for each rank."""
    names = [f"rank-0{rank}.replicated.safetensors" for rank in range(2)]
    assert os.path.samefile(*(built / name for name in names))
    copy = shutil.copytree(built, tmp_path / "artifact")
    (copy / names[1]).unlink()
    os.link(copy / names[0], copy / names[1])
    flip_byte(copy / names[0], 5000)
    assert list(found_by_verify(dsv2mk, copy)) == names


def cut_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def empty_file(path: Path) -> None:
    os.truncate(path, 0)


def edit_header(path: Path) -> None:
    """Another metadata value of the same length: still a whole safetensors file."""
    changed = path.read_bytes().replace(b'"layout_version":"1"', b'"layout_version":"2"', 1)
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert read_header(path).metadata["layout_version"] == "2"


def break_header(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WRONG_SIZE = (cut_file, lengthen_file, empty_file, Path.unlink, folder_instead, pipe_instead)

WRONG_SIZE += (dangling_instead,)

DAMAGE = [
    *(("rank-01.ffn.safetensors", damage) for damage in (*WRONG_SIZE, edit_header, break_header)),
    *(("config.json", damage) for damage in WRONG_SIZE),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda v: getattr(v, "__name__", v))
def test_a_damaged_file_is_found_without_reading_data(
    name: str,
    damage: Callable[[Path], object],
    artifact: Path,
    dsv2mk: Call,
    alarm: None,
) -> None:
    """`verify` names it; `inspect` and `generate` refuse to start."""
    damage(artifact / name)
    assert list(found_by_verify(dsv2mk, artifact)) == [name]
    for command in (
        ("inspect", artifact),
        ("inspect", artifact, "embed", "--stats"),
        ("generate", artifact, "--token-ids", "1,2", "--max-new", 2),
    ):
        code, out, err = dsv2mk(*command)
        assert (code, out) == (11, "")
        assert len(err.splitlines()) == 1
        assert name in err
        code, out, err = dsv2mk(*command, "--json")
        assert (code, json.loads(out)["error"]["exit_code"], err) == (11, 11, "")


def commands_on(artifact: Path) -> list[tuple[object, ...]]:
    """All that read one."""
    return [
        ("verify", artifact),
        ("inspect", artifact),
        ("diff", artifact, artifact),
        ("generate", artifact, "--token-ids", "1", "--max-new", 1),
    ]


def test_an_edited_manifest_is_found(artifact: Path, dsv2mk: Call) -> None:
    path = artifact / "manifest.json"
    content = path.read_bytes()
    data = json.loads(content)
    name = "rank-00.ffn.safetensors"
    (chunk,), digest = data["files"][name]["chunks"], data["files"][name]["digest"]
    assert chunk != digest

    for old in (chunk, digest):  # another hash of the right form
        path.write_bytes(content.replace(old.encode(), b"0" * 32))
        assert list(found_by_verify(dsv2mk, artifact)) == [name]
    size = data["files"][name]["size"]
    path.write_bytes(content.replace(b'"size":%d' % size, b'"size":%d' % (size + 1)))
    assert name in found_by_verify(dsv2mk, artifact)

    for changed in (
        content + b"\n",
        content[:-1],
        b"",
        b"{",
        content.replace(b'"embed"', b'"embad"'),
    ):
        path.write_bytes(changed)
        for command in commands_on(artifact):
            code, out, err = dsv2mk(*command)
            assert (code, out) == (11, "")
            assert len(err.splitlines()) == 1
            assert str(artifact) in err


def test_what_is_no_artifact_is_refused(tmp_path: Path, dsv2mk: Call) -> None:
    file, folder, absent = tmp_path / "file", tmp_path / "folder", tmp_path / "absent"
    file.write_bytes(b"x")
    folder.mkdir()
    for path, said in ((file, ""), (folder, "no manifest.json"), (absent, "does not exist")):
        with pytest.raises(ArtifactError, match=path.name):
            Artifact.open(path)
        for command in commands_on(path):
            code, out, err = dsv2mk(*command)
            assert (code, out) == (11, "")
            assert len(err.splitlines()) == 1
            assert str(path) in err
            assert said in err


# ---- several chunks ----

CHUNK = 16384


@pytest.fixture
def chunked(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """An artifact with chunks of 16 KiB, so that its files have many."""
    for module in (manifest_module, hashing, work_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return make_artifact(snapshot, 2, tmp_path / "chunked")


def test_chunks_of_a_build_are_those_of_its_files(chunked: Artifact) -> None:
    """The build hashes as it writes, in any order; here the finished files are hashed."""
    assert len(chunked.manifest.files["rank-00.ffn.safetensors"].chunks) > 30
    for name, entry in chunked.manifest.files.items():
        content = (chunked.path / name).read_bytes()
        parts = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        assert entry.size == len(content)
        assert list(entry.chunks) == [xxhash.xxh3_128_hexdigest(part) for part in parts]


def test_each_chunk_is_looked_at(chunked: Artifact, dsv2mk: Call) -> None:
    name = "rank-01.partitioned.safetensors"
    path = chunked.path / name
    size = path.stat().st_size
    for index in range(math.ceil(size / CHUNK)):
        place = min(index * CHUNK + 8192, size - 1)
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), place)
            problems = chunked.verify()
            os.pwrite(file.fileno(), byte, place)
        assert list(problems) == [name]
        assert f"chunk {index} (from byte {index * CHUNK})" in problems[name]
    assert found_by_verify(dsv2mk, chunked.path) == {}


@pytest.mark.parametrize("sample", [0, 0.001, 25, 50, 99.9, 100])
def test_a_sample_reads_its_share_and_at_least_one_chunk(sample: float, chunked: Artifact) -> None:
    told: list[int] = []
    assert chunked.verify(sample, told.append) == {}
    entries = dict(chunked.manifest.files)
    # The replicated part is one file, and is read once.
    assert (
        entries.pop("rank-01.replicated.safetensors") == entries["rank-00.replicated.safetensors"]
    )
    counts = [len(entry.chunks) for entry in entries.values()]
    assert len(told) == sum(max(1, math.ceil(count * sample / 100)) for count in counts)
    assert all(told)


def test_a_sample_finds_damage_that_is_everywhere(chunked: Artifact, dsv2mk: Call) -> None:
    name = "rank-01.ffn.safetensors"
    content = bytearray((chunked.path / name).read_bytes())
    header = len(read_header(chunked.path / name).encoded)
    for at in range(header, len(content), 4096):
        content[at] ^= 1
    content[-1] ^= 1
    (chunked.path / name).write_bytes(content)
    for sample in (0, 1, 50):
        assert list(found_by_verify(dsv2mk, chunked.path, "--sample", sample)) == [name]


def test_a_sample_of_one_chunk_reads_it(artifact: Path, dsv2mk: Call) -> None:
    """Files here are smaller than a chunk: any sample is the whole file."""
    path = artifact / "rank-01.ffn.safetensors"
    flip_byte(path)
    assert list(found_by_verify(dsv2mk, artifact, "--sample", "50")) == [path.name]
