"""The forms that a checkpoint may have: dtypes, FP8, tied embeddings, an index; it is only read."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import INDEX, Call, assert_refused, build_args, hub_snapshot, read_bytes, state
from reference_shards import (
    PLAIN,
    SMALL,
    Checkpoint,
    Config,
    Tensors,
    build_and_check,
    check_artifact,
    copy_of,
    with_plain,
    write_checkpoint,
)
from safetensors.torch import save_file

from dsv2mk.manifests.errors import InputError
from dsv2mk.pipeline.snapshot import Snapshot


def test_dtypes_may_differ_inside_a_checkpoint(tmp_path: Path, small: Tensors) -> None:
    """fp32 and fp16 with more digits than bf16 has: what is kept is rounded from those."""
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for index, (name, tensor) in enumerate(small.items()):
        wide = tensor.float() * (1 + torch.rand(tensor.shape, generator=generator) / 64)
        is_norm = "norm" in name
        dtype = (
            torch.float32 if is_norm else (torch.bfloat16, torch.float16, torch.float32)[index % 3]
        )
        tensors[name] = wide.to(dtype)
    kinds = {(n.split(".")[-2], t.dtype) for n, t in tensors.items()}
    assert ("norm", torch.float32) in kinds
    for dtype in (torch.float16, torch.float32):
        assert {"down_proj", "up_proj"} & {name for name, kind in kinds if kind == dtype}
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    build_and_check(snapshot, 4, tmp_path / "out")


@pytest.mark.parametrize("present", [True, False])
def test_tied_embeddings(tmp_path: Path, small: Tensors, present: bool) -> None:
    tensors = copy_of(small)
    del tensors["lm_head.weight"]
    if present:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = {**SMALL, "tie_word_embeddings": True}
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 4, tmp_path / "out")


def test_inv_freq_is_ignored(tmp_path: Path, small: Tensors) -> None:
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)
    }
    snapshot = write_checkpoint(tmp_path / "s", {**small, **extra}, SMALL)
    build_and_check(snapshot, 2, tmp_path / "out", Checkpoint(small, SMALL))


def test_the_index_says_where_tensors_are(tmp_path: Path, small: Tensors) -> None:
    """Odd names and a folder; what the index does not name is not read, whatever it looks like."""
    files = ["model-1-of-000163.safetensors", "weights.st", "sub/part .bin", "model.safetensors"]
    weight_map = {name: files[index % 4] for index, name in enumerate(small)}
    snapshot = write_checkpoint(tmp_path / "s", small, SMALL, weight_map)
    (snapshot / "consolidated.safetensors").write_bytes(b"not one of them")
    # The same names once more, with other values, in a file that the index does give, for others.
    other = next(name for name, file in weight_map.items() if file != "weights.st")
    stale = {n: t for n, t in small.items() if weight_map[n] == "weights.st"}
    save_file({**stale, other: torch.zeros_like(small[other])}, snapshot / "weights.st")
    build_and_check(snapshot, 2, tmp_path / "out", Checkpoint(small, SMALL))


@pytest.mark.parametrize("remembered", [True, False])
def test_an_index_that_turns_to_another_file_is_a_change(
    tmp_path: Path, small: Tensors, dsv2mk: Call, remembered: bool
) -> None:
    """Two files hold a tensor, and only the index says which counts; no weight file changes."""
    files = ["a.safetensors", "b.safetensors"]
    weight_map = {name: files[index % 2] for index, name in enumerate(small)}
    snapshot = write_checkpoint(tmp_path / "s", small, SMALL, weight_map)
    name = "model.norm.weight"
    here, there = sorted(files, key=lambda file: file != weight_map[name])
    held = {n: t for n, t in small.items() if weight_map[n] == there}
    save_file({**held, name: -small[name]}, snapshot / there)
    args = build_args(snapshot, tmp_path / "out")
    assert dsv2mk(*args).code == 0
    assert "up to date" in dsv2mk(*args).out
    before = read_bytes(tmp_path / "out")
    if not remembered:
        shutil.rmtree(tmp_path / "cache")
    info = (snapshot / INDEX).stat()
    index = json.loads((snapshot / INDEX).read_text())
    index["weight_map"][name] = there
    (snapshot / INDEX).write_text(json.dumps(index))
    os.utime(snapshot / INDEX, ns=(info.st_atime_ns, info.st_mtime_ns))
    refused = dsv2mk(*args)
    assert refused.code == 2
    for file in files:  # what each gives is not what it gave
        assert f"source.files.{file}.digest" in refused.err
    assert read_bytes(tmp_path / "out") == before
    assert here != there


# ---- the small files ----


def test_what_no_artifact_can_hold_is_left_out(
    snapshot: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    """A name that a manifest may not have, and a folder; other licences go with the artifact."""
    (snapshot / "LICENSE with space").write_text("none")
    (snapshot / "LICENSES").mkdir()
    (snapshot / "LICENSES" / "MIT.txt").write_text("none")
    (snapshot / "LICENSE-CODE").write_text("free")
    for _ in range(2):
        assert dsv2mk(*build_args(snapshot, tmp_path / "out")).code == 0
    files = read_bytes(tmp_path / "out")
    assert {name for name in files if name.startswith("LICENSE")} == {"LICENSE-CODE"}
    assert files["LICENSE-CODE"] == b"free"
    assert dsv2mk("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "LICENSE"])
def test_a_small_file_that_was_not_downloaded_is_named(
    snapshot: Path, dsv2mk: Call, name: str
) -> None:
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to("../blobs/absent")
    assert_refused(dsv2mk, snapshot, str(snapshot / name), "a link to ../blobs/absent")


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "config.json", INDEX])
def test_a_pipe_in_place_of_a_small_file_is_refused_at_once(
    snapshot: Path, dsv2mk: Call, alarm: None, name: str
) -> None:
    (snapshot / name).unlink(missing_ok=True)
    os.mkfifo(snapshot / name)
    with pytest.raises(InputError):  # a command would take the alarm for a bug
        Snapshot.open(snapshot)
    assert_refused(dsv2mk, snapshot, str(snapshot / name), "not a regular file")


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("links", [False, True])
def test_the_input_is_never_written(
    tmp_path: Path, small: Tensors, dsv2mk: Call, links: bool, bad: bool
) -> None:
    tensors = copy_of(small)
    if bad:
        tensors["model.norm.weight"][0] = float("inf")
    snapshot = write_checkpoint(tmp_path / "input", tensors, SMALL)
    folder = snapshot
    if links:
        folder = tmp_path / "hub"
        snapshot = hub_snapshot(folder, "main", snapshot)
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state(folder)
    assert dsv2mk(*build_args(snapshot, tmp_path / "out")).code == (10 if bad else 0)
    assert state(folder) == before
    if not bad:
        check_artifact(tmp_path / "out", Checkpoint(small, SMALL), 2)


# ---- block-FP8 ----


def test_fp8_weights_and_scales_in_different_files(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    tensors, config = small_fp8
    weight_map = {n: "b.bin" if n.endswith("_inv") else "a.bin" for n in tensors}
    assert set(weight_map.values()) == {"a.bin", "b.bin"}
    snapshot = write_checkpoint(tmp_path / "s", tensors, config, weight_map)
    build_and_check(snapshot, 6, tmp_path / "out", Checkpoint(tensors, config))


def test_fp8_bytes_and_scales_pass_through(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    """Even those that quantising would not have given: any byte but NaN, any scale."""
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    rng = np.random.default_rng(6)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            raw = torch.from_numpy(rng.choice(codes, tuple(tensor.shape)))
            tensors[name] = raw.view(torch.float8_e4m3fn)
        elif name.endswith("_inv"):
            scale = rng.uniform(0.5, 1, tuple(tensor.shape)) * 2.0 ** rng.integers(-40, 40)
            tensors[name] = torch.from_numpy(scale.astype(np.float32))
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 4, tmp_path / "out")


@pytest.mark.parametrize(
    "listed",
    [
        [name.removesuffix(".weight") for name in PLAIN],
        ["layers.0.self_attn.o_proj", "experts.2.up_proj", "lm_head"],
    ],
)
def test_modules_that_are_not_converted_are_bf16(
    tmp_path: Path, small_fp8: tuple[Tensors, Config], listed: list[str]
) -> None:
    tensors, config = with_plain(small_fp8, PLAIN, listed)
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 3, tmp_path / "out")


def test_a_listed_router_is_not_the_gate_projection(
    tmp_path: Path, small_fp8: tuple[Tensors, Config]
) -> None:
    """`mlp.gate` names a module, and `mlp.gate_proj` is another one, which stays FP8."""
    tensors, config = with_plain(small_fp8, [], ["lm_head", "mlp.gate"])
    build_and_check(write_checkpoint(tmp_path / "s", tensors, config), 2, tmp_path / "out")
