"""The runner on bundles of a store, on folders with one rank, and what it proves as it loads."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from fake_gpu import CUBIN, make_sidecar
from helpers import Call, flip_byte, make_artifact, state
from test_bench import Measured
from test_load import on_the_host

from dsv2mk.artifacts import hashing, signing
from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests import manifest as manifest_module
from dsv2mk.manifests.errors import ArtifactError, NodeError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import PARTS
from dsv2mk.pipeline import work as work_module
from dsv2mk.runner import bench as bench_module
from dsv2mk.runner import load
from dsv2mk.runner.cubins import find_cubin
from dsv2mk.runner.load import Weights, load_weights
from dsv2mk.runner.session import check

CHUNK = 16384

OTHERS = [f"rank-01.{part}.safetensors" for part in PARTS]


# ---- a store, written by the letter of its form ----


def encode(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parts_of(data: bytes, chunk: int) -> list[bytes]:
    return [data[at : at + chunk] for at in range(0, len(data), chunk)]


def entry_of(data: bytes, chunk: int) -> dict[str, Any]:
    chunks = [xxhash.xxh3_128_hexdigest(part) for part in parts_of(data, chunk)]
    digest = xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, chunks)))
    return {"size": len(data), "digest": digest, "chunks": chunks}


class Shelf:
    """A store with one bundle, `v1`, and where its files are."""

    def __init__(
        self, path: Path, folder: Path, cubins: dict[str, bytes], chunk: int, signed: bool
    ) -> None:
        self.path, self.where = path, f"{path}::v1"
        files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()} | cubins
        entries = {name: entry_of(data, chunk) for name, data in files.items()}
        self.objects = {
            name: path / "objects" / entry["digest"][:2] / entry["digest"]
            for name, entry in entries.items()
        }
        for name, data in files.items():
            self.objects[name].parent.mkdir(parents=True, exist_ok=True)
            self.objects[name].write_bytes(data)
        bundle = {
            "schema": 1,
            "artifact": sha256(files["manifest.json"]).hexdigest(),
            "files": {name: entries[name] for name in ("manifest.json", *cubins)},
        }
        if signed:
            bundle["blake3"] = {
                name: [sha256(part).hexdigest() for part in parts_of(data, chunk)]
                for name, data in files.items()
            }
        self.bundle = encode(bundle)
        self.digest = sha256(self.bundle).hexdigest()
        for name, data in {
            "store.json": b'{"schema":1}',
            f"bundles/{self.digest}.json": self.bundle,
            "tags/v1": f"{self.digest}\n".encode(),
        }.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)


def cubin_files(geometry: Geometry, **sidecar: Any) -> dict[str, bytes]:
    side = make_sidecar(geometry, **sidecar)
    stem = f"cubin/{side.file_stem}"
    return {f"{stem}.cubin": sidecar.get("cubin", CUBIN), f"{stem}.json": side.encoded}


@pytest.fixture
def shelve(built: Path, tmp_path: Path) -> Callable[..., Shelf]:
    """Makes a store of an artifact of 2 ranks, or of another folder."""

    def make(
        *sidecars: dict[str, Any],
        folder: Path = built,
        chunk: int = manifest_module.CHUNK_BYTES,
        signed: bool = False,
    ) -> Shelf:
        geometry = Artifact.open(folder).manifest.geometry
        cubins: dict[str, bytes] = {}
        for sidecar in sidecars:
            cubins |= cubin_files(geometry, **sidecar)
        return Shelf(tmp_path / "store", folder, cubins, chunk, signed)

    return make


IDS = ["--token-ids", "1,2", "--max-new", 3, "--ignore-eos", "--json"]

# ---- folders with one rank ----


def test_a_folder_of_one_rank_opens_for_that_rank_alone(artifact: Path) -> None:
    whole = Artifact.open(artifact)
    tensors = {name: bytes(whole.map_tensor(0, name)) for name in whole.layouts[0].tensors}
    assert whole.own_files == whole.manifest.files
    for name in OTHERS:
        (artifact / name).unlink()
    one = Artifact.open(artifact, 0)
    assert {name: bytes(one.map_tensor(0, name)) for name in tensors} == tensors
    assert set(whole.manifest.files) - set(one.own_files) == set(OTHERS)
    told: list[int] = []
    assert one.verify(100, told.append) == {}
    assert sum(told) == one.bytes_to_verify() == sum(e.size for e in one.own_files.values())
    for rank in (None, 1):
        with pytest.raises(ArtifactError, match=f"{artifact / 'rank-01'}.*No such file") as refused:
            Artifact.open(artifact, rank)
        assert "dsv2mk pull STORE NAME DIR" in str(refused.value)
    assert Artifact.open(artifact, 7).own_files.keys() == {
        name for name in whole.manifest.files if not name.startswith("rank-")
    }


def test_other_ranks_files_are_not_looked_at(artifact: Path) -> None:
    for name in OTHERS:
        (artifact / name).write_bytes(b"no header")
    Artifact.open(artifact, 0)
    for name in ("rank-00.ffn.safetensors", "config.json"):
        data = (artifact / name).read_bytes()
        (artifact / name).write_bytes(data[:-1])
        with pytest.raises(ArtifactError, match=f"{artifact / name}: expected {len(data)} bytes"):
            Artifact.open(artifact, 0)
        (artifact / name).write_bytes(data)
    Artifact.open(artifact, 0)


@pytest.mark.parametrize(
    ("command", "rank", "opened"),
    [
        (["generate", "--backend", "reference", "--token-ids", "1", "--max-new", 1], 0, None),
        (["generate", "--backend", "gpu", "--token-ids", "1", "--max-new", 1], 0, 0),
        (["generate", "--backend", "gpu", "--token-ids", "1", "--max-new", 1], 3, 3),
        (["bench"], 0, 0),
        (["bench"], 5, 5),
        (["gate", "--backend", "gpu"], 0, None),  # with the reference decoder
        (["gate", "--backend", "gpu"], 2, 2),
        (["gate", "--backend", "gpu", "--reference", "any"], 0, 0),
    ],
)
def test_a_rank_opens_its_own_files(
    command: list[object],
    rank: int,
    opened: int | None,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def note(where: object, rank: int | None = None, trust: object = ()) -> Artifact:
        asked.append((where, rank, trust))
        raise ArtifactError("seen")

    monkeypatch.setattr(Artifact, "open", note)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", str(rank))
    name, *options = command
    assert dsv2mk(name, "s::v1", *options, "--trust", "k", "--trust", "l").code == 11
    assert asked == [("s::v1", opened, (Path("k"), Path("l")))]


# ---- bundles ----


def test_a_bundle_is_used_in_place(shelve: Callable[..., Shelf], built: Path, dsv2mk: Call) -> None:
    shelf = shelve({"ranks": 2})
    before, whole = state(shelf.path), Artifact.open(built)
    for where in (
        shelf.where,
        f"{shelf.path}::{shelf.digest}",
        f"{shelf.path}::{shelf.digest[:8]}",
    ):
        artifact = Artifact.open(where)
        assert (artifact.where, artifact.manifest.digest) == (where, whole.manifest.digest)
        assert {name: artifact.file_path(name) for name in artifact.entries} == shelf.objects
        for rank in (0, 1):
            for name in whole.layouts[rank].tensors:
                assert artifact.map_tensor(rank, name) == whole.map_tensor(rank, name)
        assert artifact.verify() == {}
    expected = dsv2mk("generate", built, *IDS).json
    found = dsv2mk("generate", shelf.where, *IDS).json
    assert {**found, "tokens_per_s": 0} == {**expected, "tokens_per_s": 0}
    assert state(shelf.path) == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip_byte])
@pytest.mark.parametrize(
    "name",
    ["manifest.json", "tokenizer.json", "generation_config.json", "rank-01.ffn.safetensors"],
)
def test_a_damaged_object_is_told_with_its_file_and_bundle(
    name: str, damage: Callable[[Path], object], shelve: Callable[..., Shelf], dsv2mk: Call
) -> None:
    """All of it is used by the reference decoder; a flipped byte of a shard is found by sample."""
    shelf = shelve()
    damage(shelf.objects[name])
    ids = [part for part in IDS if part != "--ignore-eos"]
    done = dsv2mk("generate", shelf.where, "--backend", "reference", *ids)
    assert (done.code, done.json["error"]["exit_code"]) == (11, 11)
    message = done.json["error"]["message"]
    assert str(shelf.objects[name]) in message
    assert name in message
    assert shelf.digest in message or shelf.where in message


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_what_is_read_on_the_host_is_proved_before_a_gpu_is_looked_for(
    name: str, shelve: Callable[..., Shelf], dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("dsv2mk.runner.commands.open_gpu", lambda *_, **__: pytest.fail("opened"))
    shelf = shelve()
    flip_byte(shelf.objects[name])
    args = ["--prompt", "a", "--max-new", 1, "--backend", "gpu", "--verify", "none"]
    done = dsv2mk("generate", shelf.where, *args)
    assert (done.code, str(shelf.objects[name]) in done.err) == (11, True)


def test_another_rank_s_object_may_be_damaged(shelve: Callable[..., Shelf]) -> None:
    shelf = shelve()
    shelf.objects["rank-01.ffn.safetensors"].unlink()
    artifact = Artifact.open(shelf.where, 0)
    assert artifact.verify() == {}
    for rank in (None, 1):
        with pytest.raises(ArtifactError, match="No such file"):
            Artifact.open(shelf.where, rank)


def test_an_object_in_the_trash_is_used_there(shelve: Callable[..., Shelf]) -> None:
    shelf = shelve()
    path = shelf.objects["rank-00.ffn.safetensors"]
    (shelf.path / "trash").mkdir()
    path.rename(shelf.path / "trash" / path.name)
    artifact = Artifact.open(shelf.where)
    assert artifact.file_path("rank-00.ffn.safetensors") == shelf.path / "trash" / path.name
    assert artifact.verify() == {}


def test_names_that_lead_nowhere_are_refused(
    shelve: Callable[..., Shelf], built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    shelf = shelve()
    for where, said in (
        (f"{shelf.path}::v2", "one of: v1"),
        (f"{tmp_path / 'absent'}::v1", "absent does not exist"),
        (f"{built}::v1", "is not a store"),
    ):
        for command in (["generate", where, *IDS], ["gate", where, "--reference", "f"]):
            done = dsv2mk(*command, "--backend", "reference")
            assert (done.code, said in done.out + done.err) == (11, True)


def test_an_output_is_not_put_into_the_store(
    shelve: Callable[..., Shelf], dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelve()
    before = state(shelf.path)
    monkeypatch.setenv("DSV2MK_STORE", str(shelf.path))
    for where in (shelf.where, "::v1"):
        args = ["--backend", "reference", "--logits", shelf.path / "tags" / "v2"]
        done = dsv2mk("generate", where, *IDS, *args)
        assert (done.code, "outside of the artifact" in done.out) == (2, True)
    assert state(shelf.path) == before


def test_what_publish_writes_is_what_is_read_here(
    shelve: Callable[..., Shelf], artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """The store of these tests byte for byte; and one rank of it, pulled, opens for that rank."""
    geometry = Artifact.open(artifact).manifest.geometry
    (artifact / "cubin").mkdir()
    for name, data in cubin_files(geometry, ranks=2).items():
        (artifact / name).write_bytes(data)
    shelf, other = shelve({"ranks": 2}), tmp_path / "other"
    assert dsv2mk("publish", "--copy", artifact, other, "--tag", "v1").code == 0
    stores = [
        {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        for top in (shelf.path, other)
    ]
    assert stores[0] == stores[1]
    assert dsv2mk("pull", "--copy", other, "v1", tmp_path / "pulled", "--rank", 1).code == 0
    pulled, whole = Artifact.open(tmp_path / "pulled", 1), Artifact.open(shelf.where)
    for name in whole.layouts[1].tensors:
        assert pulled.map_tensor(1, name) == whole.map_tensor(1, name)
    assert find_cubin("sm_90a", geometry, 2, None, pulled)[1] == CUBIN
    with pytest.raises(ArtifactError, match="rank-00"):
        Artifact.open(tmp_path / "pulled")


# ---- cubins of a bundle ----


def test_a_cubin_is_chosen_by_its_sidecar_and_others_are_not_read(
    shelve: Callable[..., Shelf],
) -> None:
    mine = b"\x7fELF of mine"
    shelf = shelve({"ranks": 2, "cubin": mine}, {"ranks": 2, "arch": "sm_100a"})
    for name, path in shelf.objects.items():
        if name.startswith("cubin/dsv2mk.sm_100a") and name.endswith(".cubin"):
            path.unlink()
    artifact = Artifact.open(shelf.where, 0)
    sidecar, cubin = find_cubin("sm_90a", artifact.manifest.geometry, 2, None, artifact)
    assert (cubin, sidecar.arch) == (mine, "sm_90a")
    with pytest.raises(ArtifactError, match="No such file") as refused:
        find_cubin("sm_100a", artifact.manifest.geometry, 2, None, artifact)
    assert "dsv2mk.sm_100a.tp2" in str(refused.value)


@pytest.mark.parametrize("kind", ["cubin", "json"])
def test_a_damaged_cubin_of_a_bundle_is_refused(kind: str, shelve: Callable[..., Shelf]) -> None:
    shelf = shelve({"ranks": 2})
    (name,) = [name for name in shelf.objects if name.endswith(f".{kind}") and "cubin/" in name]
    artifact, good = Artifact.open(shelf.where), shelf.objects[name].read_bytes()
    assert artifact.read(name) == good
    for bad in (good[:-1], good + b"x", b"x" + good[1:], b""):
        shelf.objects[name].write_bytes(bad)
        with pytest.raises(ArtifactError, match=name) as refused:
            find_cubin("sm_90a", artifact.manifest.geometry, 2, None, artifact)
        assert str(shelf.objects[name]) in str(refused.value)


def test_what_a_bundle_offers_is_listed_where_nothing_fits(shelve: Callable[..., Shelf]) -> None:
    shelf = shelve({"ranks": 2}, {"ranks": 2, "arch": "sm_100a"}, {"ranks": 4, "arch": "sm_100a"})
    artifact = Artifact.open(shelf.where)
    geometry = artifact.manifest.geometry
    offers = f"{shelf.where} has sm_100a tp2 p2p, sm_100a tp4 p2p, sm_90a tp2 p2p"
    for arch, ranks, collective, expected, found in (
        ("sm_103a", 2, "p2p", "sm_103a", "sm_100a, sm_90a"),
        ("sm_100a", 8, "p2p", "8", "2, 4"),
        ("sm_90a", 2, "multimem", "multimem", "p2p"),
    ):
        with pytest.raises(NodeError) as refused:
            find_cubin(arch, geometry, ranks, None, artifact, collective=collective)
        assert (refused.value.expected, refused.value.found) == (expected, f"{found}; {offers}")


def test_a_bundle_without_cubins_says_so(shelve: Callable[..., Shelf], built: Path) -> None:
    artifact = Artifact.open(shelve().where)
    with pytest.raises(NodeError, match=f"no cubin in {artifact.where} and the cache") as refused:
        find_cubin("sm_90a", artifact.manifest.geometry, 2, None, artifact)
    assert refused.value.found == f"{artifact.where} has no cubins"
    folder = Artifact.open(built)  # has no folder of cubins
    with pytest.raises(NodeError, match="no cubin in the artifact and the cache"):
        find_cubin("sm_90a", folder.manifest.geometry, 2, None, folder)


# ---- signed bundles ----


@pytest.fixture
def sha_for_blake3(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, list[bytes], Any]]:
    """Stand-ins for two packages: sha256 for BLAKE3, and every signature is good. What was checked.

    What is tested here is which bytes are compared with which hashes.
    """
    checked: list[tuple[bytes, list[bytes], Any]] = []

    def check(bundle: bytes, signatures: list[bytes], trusted: Any) -> str:
        checked.append((bundle, list(signatures), trusted))
        if b"good" not in signatures:
            raise ArtifactError("the bundle has no valid signature of a trusted key")
        return "id"

    monkeypatch.setattr(signing, "check", check)
    monkeypatch.setattr(signing, "hasher", sha256)
    return checked


def test_a_signature_is_checked_before_a_bundle_is_used(
    shelve: Callable[..., Shelf], sha_for_blake3: list[Any]
) -> None:
    shelf = shelve(signed=True)
    keys = [Path("a"), Path("b")]
    shelf.objects["manifest.json"].rename(shelf.path / "aside")
    with pytest.raises(ArtifactError, match="no valid signature"):
        Artifact.open(shelf.where, trust=keys)
    assert sha_for_blake3 == [(shelf.bundle, [], keys)]
    (shelf.path / "bundles" / f"{shelf.digest}.0a.sig").write_bytes(b"good")
    (shelf.path / "bundles" / f"{shelf.digest}.0b.sig").write_bytes(b"bad")
    with pytest.raises(ArtifactError, match=r"No such file.* manifest\.json"):
        Artifact.open(shelf.where, trust=keys)
    (shelf.path / "aside").rename(shelf.objects["manifest.json"])
    assert Artifact.open(shelf.where, trust=keys).signed
    assert not Artifact.open(shelf.where).signed
    assert sha_for_blake3[1:] == [(shelf.bundle, [b"good", b"bad"], keys)] * 2


def test_what_has_no_signature_cannot_be_trusted(
    shelve: Callable[..., Shelf], built: Path, sha_for_blake3: list[Any]
) -> None:
    with pytest.raises(UsageError, match="--trust is for a bundle"):
        Artifact.open(built, trust=[Path("key")])
    shelf = shelve()
    (shelf.path / "bundles" / f"{shelf.digest}.0a.sig").write_bytes(b"good")
    with pytest.raises(ArtifactError, match="no blake3 hashes"):
        Artifact.open(shelf.where, trust=[Path("key")])


def test_all_of_a_signed_bundle_is_proved_by_the_signed_hashes(
    shelve: Callable[..., Shelf],
    snapshot: Path,
    tmp_path: Path,
    sha_for_blake3: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk, also with --verify none; xxh3 is not asked, which lets a forger's bytes pass."""
    for module in (manifest_module, hashing, work_module, signing, load):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(load, "STAGE_BYTES", 5000)
    on_the_host(monkeypatch)
    folder = make_artifact(snapshot, 2, tmp_path / "chunked").path
    shelf = shelve({"ranks": 2}, folder=folder, chunk=CHUNK, signed=True)
    (shelf.path / "bundles" / f"{shelf.digest}.0a.sig").write_bytes(b"good")
    artifact, signed = Artifact.open(shelf.where, trust=[Path("key")]), json.loads(shelf.bundle)
    names = [artifact.layouts[1].file_name(part) for part in PARTS]

    def load_it(verify: str) -> Weights:
        return load_weights(artifact, 1, torch.device("cpu"), lambda _: None, verify, 2)

    with monkeypatch.context() as patch:
        patch.setattr(xxhash, "xxh3_128", lambda *_: pytest.fail("asked"))
        for verify in ("none", "sample", "full"):
            assert load_it(verify).seconds_hashed > 0
    for name in names:
        assert artifact.to_prove(name, "none") == dict(enumerate(signed["blake3"][name]))
        flip_byte(shelf.objects[name], CHUNK)
        with pytest.raises(ArtifactError, match=f"{name} of .*: chunk 1 ") as refused:
            load_it("none")
        assert refused.value.expected == signed["blake3"][name][1]
        assert str(shelf.objects[name]) in str(refused.value)
        assert "chunk 1 " in artifact.verify(0)[name]
        with pytest.raises(ArtifactError, match=r"chunk 1 .*dsv2mk verify"):
            check(artifact, "none")  # for the reference decoder
        flip_byte(shelf.objects[name], CHUNK)
    assert artifact.verify(0) == {}
    assert artifact.bytes_to_verify(0) == Artifact.open(shelf.where).bytes_to_verify(100)
    for name in ("tokenizer.json", *(name for name in shelf.objects if "cubin/" in name)):
        assert artifact.read(name) == shelf.objects[name].read_bytes()
        flip_byte(shelf.objects[name])
        with pytest.raises(ArtifactError, match="is damaged"):
            artifact.read(name)


def test_a_real_signature_is_demanded_and_the_real_hash_is_blake3(
    artifact: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    pytest.importorskip("cryptography")
    blake3 = pytest.importorskip("blake3").blake3
    secret, public = signing.make_keys(tmp_path, "key")
    _, other = signing.make_keys(tmp_path, "other")
    store = tmp_path / "store"
    assert dsv2mk("publish", "--copy", artifact, store, "--tag", "v1", "--sign", secret).code == 0
    where, expected = f"{store}::v1", dsv2mk("generate", artifact, *IDS).json["token_ids"]
    args = ["generate", where, *IDS, "--backend", "reference", "--verify", "none", "--trust"]
    assert dsv2mk(*args, other, "--trust", public).json["token_ids"] == expected
    assert dsv2mk(*args, other).code == 11
    opened = Artifact.open(where, trust=[public])
    for name in ("config.json", "rank-00.ffn.safetensors"):
        data = (artifact / name).read_bytes()
        assert opened.to_prove(name, "none") == {0: blake3(data).hexdigest()}
        hashed = opened.new_hash()
        hashed.update(memoryview(data))
        assert hashed.hexdigest() == blake3(data).hexdigest()
    flip_byte(opened.file_path("rank-01.ffn.safetensors"))
    done = dsv2mk(*args, public)
    assert (done.code, "rank-01.ffn.safetensors" in done.out) == (11, True)


# ---- from the start to the first token ----


@pytest.mark.parametrize("as_json", [False, True])
def test_bench_tells_what_its_start_took(
    as_json: bool, shelve: Callable[..., Shelf], dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock doubles each time that it is looked at."""
    decoder, looks = Measured(ranks=2), iter(range(99))

    def opened(artifact: Artifact, options: Any, **_: Any) -> Measured:
        options.start_up.update({"device": 9.5, "cubin_load": 0.25, "verify": 0.5, "copy": 0.75})
        return decoder

    monkeypatch.setattr("dsv2mk.runner.commands.open_gpu", opened)
    monkeypatch.setattr(
        "dsv2mk.runner.commands.time", SimpleNamespace(perf_counter=lambda: 2.0 ** next(looks))
    )
    monkeypatch.setattr(bench_module, "read_bandwidth", lambda device: 4.0)
    monkeypatch.setattr(bench_module, "memory_used", lambda device: 123)
    monkeypatch.setattr(bench_module, "device_facts", lambda index: {})
    args = ["--input-len", 5, "--output-len", 8, "--warmup", 0, "--iters", 1]
    done = dsv2mk("bench", shelve().where, *args, *(["--json"] if as_json else []))
    assert done.code == 0
    # Started at 1; opened the artifact from 2 to 4, the decoder from 8 to 16; launched at 32.
    wanted = {
        **{"import": 1.0, "open": 2.0},
        **{"device": 9.5, "cubin_load": 0.25, "verify": 0.5, "copy": 0.75},
        **{"first_launch": 64.0 - 32.0, "to_first_token": 128.0 - 1.0},
    }
    assert decoder.calls[:3] == ["reset", [0], "reset"]
    if as_json:
        assert done.json["start_up"] == wanted
        assert done.json["seconds_to_open"] == 8.0
    else:
        (row,) = [line for line in done.out.splitlines() if line.startswith("start-up s")]
        assert row.split()[2:] == [
            word for name, seconds in wanted.items() for word in (name, f"{seconds:.2f}")
        ]
