"""Checkpoints that are refused, by file, tensor and value, and leave nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import INDEX, Call, assert_refused, edit_json, hub_snapshot
from reference_shards import (
    PLAIN,
    SMALL,
    Config,
    Tensors,
    build_and_check,
    copy_of,
    with_plain,
    write_checkpoint,
)

# ---- values ----

#: A tensor of every kind that a build reads.
KINDS = [
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.1.self_attn.q_a_proj",
    "model.layers.0.self_attn.q_a_layernorm",
    "model.layers.1.self_attn.q_b_proj",
    "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "model.layers.1.self_attn.kv_a_layernorm",
    "model.layers.0.self_attn.kv_b_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.0.post_attention_layernorm",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts.3.gate_proj",
    "model.layers.1.mlp.experts.0.up_proj",
    "model.layers.1.mlp.experts.2.down_proj",
    "model.layers.1.mlp.shared_experts.gate_proj",
    "model.layers.1.mlp.shared_experts.up_proj",
    "model.layers.1.mlp.shared_experts.down_proj",
    "model.norm",
    "lm_head",
]


def test_the_kinds_are_all_kinds(small: Tensors) -> None:
    def kind(name: str) -> tuple[str, bool, bool]:
        return name.split(".")[-1], "shared" in name, ".experts." in name

    assert {kind(name) for name in KINDS} == {kind(n.removesuffix(".weight")) for n in small}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_is_refused(
    tmp_path: Path,
    small: Tensors,
    dsv2mk: Call,
    kind: str,
    dtype: torch.dtype,
) -> None:
    """Value and position differ from case to case: first, last, in the middle, past a block."""
    case = KINDS.index(kind) + (torch.bfloat16, torch.float16, torch.float32).index(dtype)
    value, word = [("nan", "NaN"), ("inf", "infinite"), ("-inf", "infinite")][case % 3]
    name = f"{kind}.weight"
    shape = tuple(small[name].shape)
    spots = [tuple(n - 1 for n in shape), tuple(n * 2 // 3 for n in shape), (0,) * len(shape)]
    spot = spots[case // 3 % 3]
    tensors = {**small, name: small[name].to(dtype, copy=True)}
    tensors[name][spot] = float(value)
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    index = ", ".join(map(str, spot))
    said = f"{snapshot / 'model.safetensors'}: {name}[{index}] is {word}"
    assert_refused(dsv2mk, snapshot, said, early=False)


def test_fp32_past_bf16_is_refused_only_where_bf16_is_kept(
    tmp_path: Path, small: Tensors, dsv2mk: Call
) -> None:
    expert, norm = "model.layers.1.mlp.experts.1.down_proj.weight", "model.norm.weight"
    largest = torch.finfo(torch.float32).max
    tensors = {**small, expert: small[expert].float()}
    tensors[expert][150, 130] = -largest
    build_and_check(write_checkpoint(tmp_path / "good", tensors, SMALL), 2, tmp_path / "out")
    tensors[norm] = tensors[norm].float()
    tensors[norm][7] = largest
    snapshot = write_checkpoint(tmp_path / "s", tensors, SMALL)
    assert_refused(dsv2mk, snapshot, f"{norm}[7] is too large for bf16", early=False)


FP8_FFN = "model.layers.1.mlp.experts.1.down_proj.weight"
FP8_ATTENTION = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [FP8_FFN, FP8_FFN.replace("down", "gate"), FP8_ATTENTION])
def test_fp8_nan_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    name: str,
    byte: int,
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    tensors[name].view(torch.uint8)[133, 9] = byte
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(dsv2mk, snapshot, f"{name}[133, 9] is NaN", early=False)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.5"])
@pytest.mark.parametrize("name", [FP8_FFN, FP8_FFN.replace("down", "up"), FP8_ATTENTION])
def test_a_scale_that_is_none_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    name: str,
    value: str,
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    scale = name + "_scale_inv"
    tensors[scale][1, -1] = float(value)
    last = tensors[scale].shape[1] - 1
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(dsv2mk, snapshot, f"{scale}[1, {last}] is {value}", early=False)


def test_a_scale_that_takes_fp8_attention_past_fp32_is_refused(
    tmp_path: Path, small_fp8: tuple[Tensors, Config], dsv2mk: Call
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    tensors[FP8_ATTENTION].view(torch.uint8)[:] = 0
    tensors[FP8_ATTENTION].view(torch.uint8)[200, 3] = 0x7E
    tensors[FP8_ATTENTION + "_scale_inv"][1, 0] = 1e36
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(dsv2mk, snapshot, f"{FP8_ATTENTION}_scale_inv[1, 0] is ", early=False)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path, small: Tensors, dsv2mk: Call) -> None:
    tensors = copy_of(small)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7, 191] += 1
    config = {**SMALL, "tie_word_embeddings": True}
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    said = ("lm_head.weight differs from model.embed_tokens.weight in row 7",)
    assert_refused(dsv2mk, snapshot, *said, early=False)


# ---- tensors ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "no quantization_config"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": None}, "quant_method"),
        ({"weight_block_size": [64, 64]}, "[64, 64]"),
        ({"weight_block_size": [1, 128]}, "[1, 128]"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"fmt": "e5m2"}, "e5m2"),
        ("fp8", "quantization_config"),
    ],
)
def test_other_quantisation_is_refused_by_name(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    changes: Any,
    said: str,
) -> None:
    tensors, config = small_fp8[0], dict(small_fp8[1])
    quantization = config.pop("quantization_config")
    if changes is not None:
        is_map = isinstance(changes, dict)
        config["quantization_config"] = {**quantization, **changes} if is_map else changes
    assert_refused(dsv2mk, write_checkpoint(tmp_path / "s", tensors, config), said)


@pytest.mark.parametrize("listed", [5, [7], "lm_head"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_list_of_modules_that_is_none_is_refused(
    tmp_path: Path,
    small: Tensors,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    listed: Any,
    plain: bool,
) -> None:
    """A string is no list of its letters, which would let bf16 pass for FP8 everywhere."""
    tensors, config = with_plain(small_fp8, [], listed)
    snapshot = write_checkpoint(tmp_path / "s", small if plain else tensors, config)
    assert_refused(dsv2mk, snapshot, "modules_to_not_convert")


@pytest.mark.parametrize("listed", [None, [], ["lm_head", "layers.1.mlp.gate"]])
@pytest.mark.parametrize("name", PLAIN)
def test_bf16_under_an_fp8_config_is_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    name: str,
    listed: list[str] | None,
) -> None:
    tensors, config = with_plain(small_fp8, [name], listed)
    snapshot = write_checkpoint(tmp_path / "s", tensors, config)
    assert_refused(dsv2mk, snapshot, name, "F8_E4M3", "BF16")


Edit = Callable[[Tensors], object]


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(FP8_FFN + "_scale_inv"), [FP8_FFN, "no " + FP8_FFN + "_scale_inv"]),
        (
            _set("model.layers.0.self_attn.o_proj.weight_scale_inv", lambda s: s.T),
            ["o_proj.weight_scale_inv", "F32 [2, 3]", "F32 [3, 2]"],
        ),
        (_set(FP8_FFN + "_scale_inv", lambda s: s[:1]), ["F32 [2, 2]", "F32 [1, 2]"]),
        (_set(FP8_FFN + "_scale_inv", lambda s: s.bfloat16()), ["F32 [2, 2]", "BF16 [2, 2]"]),
        (_set(FP8_FFN + "_scale_inv", lambda s: s.reshape(-1)), ["F32 [4]"]),
        (
            _set(FP8_FFN, lambda w: w.float().to(torch.float8_e5m2)),
            [FP8_FFN, "F8_E5M2"],
        ),
        (
            _set("model.layers.1.mlp.gate.weight", lambda w: w.to(torch.float8_e4m3fn)),
            ["model.layers.1.mlp.gate.weight", "F8_E4M3"],
        ),
        (
            lambda t: t.__setitem__("model.norm.weight_scale_inv", torch.ones(1)),
            ["model.norm.weight_scale_inv", "not a tensor of this geometry"],
        ),
    ],
)
def test_fp8_tensors_that_do_not_fit_are_refused(
    tmp_path: Path,
    small_fp8: tuple[Tensors, Config],
    dsv2mk: Call,
    edit: Edit,
    said: list[str],
) -> None:
    tensors, config = copy_of(small_fp8[0]), small_fp8[1]
    edit(tensors)
    assert_refused(dsv2mk, write_checkpoint(tmp_path / "s", tensors, config), *said)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings is false"]),
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight missing"]),
        (
            lambda t: t.__setitem__("model.norm.weighs", t.pop("model.norm.weight")),
            ["model.norm.weight"],
        ),
        (
            lambda t: [
                t.pop(f"model.layers.1.mlp.experts.3.{n}_proj.weight") for n in ("up", "gate")
            ],
            ["model.layers.1.mlp.experts.3.gate_proj.weight and 1 more missing"],
        ),
        (
            lambda t: t.__setitem__("model.layers.1.mlp.experts.4.up_proj.weight", torch.ones(2)),
            ["model.layers.1.mlp.experts.4.up_proj.weight", "not a tensor of this geometry"],
        ),
        (
            lambda t: t.__setitem__("model.layers.0.self_attn.q_b_proj.bias", torch.ones(2)),
            ["q_b_proj.bias", "not a tensor of this geometry"],
        ),
        (
            lambda t: t.__setitem__("model.layers.0.self_attn.rotary_emb.cos", torch.ones(2)),
            ["rotary_emb.cos", "not a tensor of this geometry"],
        ),
        (
            _set("model.layers.1.mlp.experts.0.down_proj.weight", lambda w: w.T),
            ["experts.0.down_proj.weight: shape", "[192, 136]", "[136, 192]"],
        ),
        (
            _set("model.embed_tokens.weight", lambda w: w[:-1]),
            ["model.embed_tokens.weight: shape", "[9, 192]", "[8, 192]"],
        ),
        (_set("model.norm.weight", lambda w: w[None]), ["[192]", "[1, 192]"]),
        (_set("model.norm.weight", lambda w: w.double()), ["model.norm.weight", "F64"]),
        (_set("lm_head.weight", lambda w: w.to(torch.int8)), ["lm_head.weight", "I8"]),
        (
            _set(PLAIN[0], lambda w: w.to(torch.float8_e4m3fn)),
            [PLAIN[0], "no quantization_config", "F8_E4M3"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path,
    small: Tensors,
    dsv2mk: Call,
    edit: Edit,
    said: list[str],
) -> None:
    tensors = copy_of(small)
    edit(tensors)
    assert_refused(dsv2mk, write_checkpoint(tmp_path / "s", tensors, SMALL), *said)


# ---- the index and the files ----

SPLIT = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def split_checkpoint(path: Path, tensors: Tensors) -> tuple[Path, dict[str, str]]:
    weight_map = {name: SPLIT[index % 2] for index, name in enumerate(tensors)}
    return write_checkpoint(path, tensors, SMALL, weight_map), weight_map


@pytest.mark.parametrize("file", [*SPLIT, INDEX, "config.json"])
def test_a_missing_file_is_named(tmp_path: Path, small: Tensors, dsv2mk: Call, file: str) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / file).unlink()
    assert_refused(dsv2mk, snapshot, str(snapshot / file), "No such file")


@pytest.mark.parametrize("file", [*SPLIT, INDEX, "config.json"])
def test_a_dangling_link_is_named_with_its_target(
    tmp_path: Path, small: Tensors, dsv2mk: Call, file: str
) -> None:
    """A download to the hub's cache that was broken off."""
    plain, _ = split_checkpoint(tmp_path / "plain", small)
    snapshot = hub_snapshot(tmp_path / "hub", "main", plain)
    target = os.readlink(snapshot / file)
    (snapshot / target).unlink()
    assert_refused(dsv2mk, snapshot, str(snapshot / file), f"link to {target}")


@pytest.mark.parametrize(
    "file",
    [
        "../plain.safetensors",
        "sub/../../plain.safetensors",
        "/etc/hostname",
        "..",
        "",
        ".",
        "a\0b",
        7,
        None,
        ["model-1-of-2.safetensors"],
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(
    tmp_path: Path, small: Tensors, dsv2mk: Call, file: Any
) -> None:
    snapshot, weight_map = split_checkpoint(tmp_path / "s", small)
    # What it would find there is a good file.
    (tmp_path / "plain.safetensors").write_bytes((snapshot / SPLIT[0]).read_bytes())
    name = next(name for name, place in weight_map.items() if place == SPLIT[0])
    edit_json(snapshot / INDEX, weight_map={**weight_map, name: file})
    assert_refused(dsv2mk, snapshot, name, "a file inside the folder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ("{}", "weight_map"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, small: Tensors, dsv2mk: Call, text: str, said: str
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / INDEX).write_text(text)
    assert_refused(dsv2mk, snapshot, INDEX, said)


def test_a_tensor_that_is_not_where_the_index_says_is_named(
    tmp_path: Path, small: Tensors, dsv2mk: Call
) -> None:
    snapshot, weight_map = split_checkpoint(tmp_path / "s", small)
    name = next(name for name, place in weight_map.items() if place == SPLIT[0])
    edit_json(snapshot / INDEX, weight_map={**weight_map, name: SPLIT[1]})
    assert_refused(dsv2mk, snapshot, f"{snapshot / SPLIT[1]} does not hold {name}")


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, small: Tensors, dsv2mk: Call) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    (snapshot / SPLIT[0]).unlink()
    (snapshot / SPLIT[0]).mkdir()
    assert_refused(dsv2mk, snapshot, str(snapshot / SPLIT[0]))


@pytest.mark.parametrize(("more", "said"), [(-1, "truncated"), (1, "other bytes")])
def test_a_file_of_another_length_is_named(
    tmp_path: Path, small: Tensors, dsv2mk: Call, more: int, said: str
) -> None:
    snapshot, _ = split_checkpoint(tmp_path / "s", small)
    os.truncate(snapshot / SPLIT[1], os.path.getsize(snapshot / SPLIT[1]) + more)
    assert_refused(dsv2mk, snapshot, str(snapshot / SPLIT[1]), said)
