"""Damaged artifacts: what `verify` and loading find, by sample or in full; what refuses them."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from helpers import Call, flip_byte, make_artifact
from safetensors.torch import load_file
from test_load import on_the_host

from dsv2mk.artifacts import artifact as artifact_module
from dsv2mk.artifacts import hashing
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.container import read_header
from dsv2mk.manifests import manifest as manifest_module
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.layout import PARTS
from dsv2mk.pipeline import work as work_module
from dsv2mk.runner import load
from dsv2mk.runner.load import SLACK, Weights, load_weights, weight_bytes


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


# ---- as weights are loaded ----


@pytest.fixture
def host(chunked: Artifact, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """`chunked`, to be loaded into the host's memory; buffers are smaller, and fit no chunk."""
    monkeypatch.setattr(load, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(load, "STAGE_BYTES", 5000)
    on_the_host(monkeypatch)
    return chunked


def load_from(artifact: Artifact, rank: int, verify: str, threads: int = 3) -> Weights:
    told: list[int] = []
    weights = load_weights(artifact, rank, torch.device("cpu"), told.append, verify, threads)
    assert sum(told) == weight_bytes(artifact.layouts[rank]) - 3 * SLACK
    return weights


@pytest.mark.parametrize("verify", ["none", "sample", "full"])
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_the_file_s_bytes(rank: int, verify: str, host: Artifact) -> None:
    """As the safetensors library reads them."""
    weights = load_from(host, rank, verify)
    found = 0
    for part in PARTS:
        path = host.path / host.layouts[rank].file_name(part)
        for name, tensor in load_file(path).items():
            assert torch.equal(weights.view(name), tensor.contiguous().view(-1).view(torch.uint8))
            found += 1
    assert found == len(host.layouts[rank].tensors)
    assert (weights.seconds_hashed > 0) == (verify != "none")


def places_of(path: Path) -> list[int]:
    """In the header, the first byte of data, where chunks meet, the last."""
    size = path.stat().st_size
    return [9, 4096, CHUNK - 1, CHUNK, 2 * CHUNK, size - 1]


@pytest.mark.parametrize("part", PARTS)
def test_damage_is_found_as_weights_are_loaded(part: str, host: Artifact) -> None:
    """By file and chunk, also in a header; of another rank's files nothing is read."""
    name = host.layouts[1].file_name(part)
    path = host.path / name
    if part == "replicated":  # one file with two names
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    for place in places_of(path):
        flip_byte(path, place)
        with pytest.raises(ArtifactError) as refused:
            load_from(host, 1, "full")
        index = place // CHUNK
        assert refused.value.what == f"{path}: chunk {index} (from byte {index * CHUNK})"
        assert refused.value.expected == host.manifest.files[name].chunks[index]
        load_from(host, 1, "none")
        load_from(host, 0, "full")
        flip_byte(path, place)
    load_from(host, 1, "full")


def test_a_sample_of_all_finds_any_damage(host: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_module, "SAMPLE", 99.99)  # of few chunks: all
    path = host.path / "rank-00.ffn.safetensors"
    for place in places_of(path):
        flip_byte(path, place)
        with pytest.raises(ArtifactError, match=f"chunk {place // CHUNK} "):
            load_from(host, 0, "sample")
        flip_byte(path, place)


def test_a_sample_is_a_twentieth_of_each_file_s_chunks_each_time_others(
    host: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = xxhash.xxh3_128

    class Counts:
        def __init__(self) -> None:
            self.state = new()
            hashed.append(0)

        def update(self, data: memoryview) -> None:
            hashed[-1] += len(data)
            self.state.update(data)

        def hexdigest(self) -> str:
            return str(self.state.hexdigest())

    monkeypatch.setattr(xxhash, "xxh3_128", Counts)
    chosen = set()
    for verify, share in (("none", 0.0), ("sample", 0.05), ("full", 1.0)):
        for _ in range(8):
            hashed: list[int] = []
            load_from(host, 0, verify, threads=1)
            wanted = 0
            for part in PARTS:
                name = host.layouts[0].file_name(part)
                count = len(host.manifest.files[name].chunks)
                wanted += min(count, max(math.ceil(count * share), share > 0))
            assert len(hashed) == wanted
            chosen.add((verify, *host.to_prove("rank-00.ffn.safetensors", "sample")))
    assert len([one for one in chosen if one[0] == "sample"]) > 1
    sizes = [host.manifest.files[host.layouts[0].file_name(part)].size for part in PARTS]
    assert sum(hashed) == sum(sizes)  # headers too


def test_a_damaged_sample_of_one_chunk_is_refused(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files smaller than a chunk: any sample is all of them."""
    monkeypatch.setattr(load, "STAGE_BYTES", 1 << 16)
    on_the_host(monkeypatch)
    for index, name in enumerate(("replicated", "partitioned", "ffn")):
        folder = shutil.copytree(built, tmp_path / str(index))
        flip_byte(folder / f"rank-01.{name}.safetensors")
        artifact = Artifact.open(folder)
        with pytest.raises(ArtifactError, match=rf"rank-01\.{name}\.safetensors: chunk 0 "):
            load_from(artifact, 1, "sample")


# ---- what one rank needs ----


def test_a_folder_of_one_rank_is_verified_as_that(artifact: Path, dsv2mk: Call) -> None:
    """As `pull --rank 1` leaves it."""
    for path in artifact.glob("rank-00.*"):
        path.unlink()
    done = dsv2mk("verify", artifact, "--json")
    assert done.code == 1
    assert {name[:8] for name in done.json["problems"]} == {"rank-00."}
    done = dsv2mk("verify", artifact, "--rank", 1, "--json")
    assert (done.code, done.json["ok"], done.json["problems"]) == (0, True, {})
    assert done.json["files"] == len(list(artifact.iterdir())) - 1  # the manifest
    assert f"ok: {done.json['files']} files of" in dsv2mk("verify", artifact, "--rank", 1).out
    with open(artifact / "rank-01.ffn.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    done = dsv2mk("verify", artifact, "--rank", 1, "--json")
    assert (done.code, list(done.json["problems"])) == (1, ["rank-01.ffn.safetensors"])


def test_a_rank_that_is_not_there_is_refused(artifact: Path, tmp_path: Path, dsv2mk: Call) -> None:
    done = dsv2mk("verify", artifact, "--rank", 2)
    assert (done.code, done.err) == (2, "dsv2mk: --rank: expected 0 to 1, found 2\n")
    store = tmp_path / "store"
    dsv2mk("publish", "--copy", artifact, store, "--tag", "v1")
    for where in (store, f"{store}::v1"):
        done = dsv2mk("verify", where, "--rank", 0)
        assert (done.code, "expected an artifact's folder" in done.err) == (2, True)
