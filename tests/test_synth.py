"""`synth`: what a synthetic checkpoint holds, and how transformers and its tokenizer take it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SINGLE,
    Call,
    make_artifact,
    make_snapshot,
    names,
    read_bytes,
    slow_but,
    small_config,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from reference_model import count_experts, decode, hf_logits, random_tokens
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV2ForCausalLM

from dsv2mk.manifests.geometry import preset_config
from dsv2mk.pipeline.synth import byte_tokenizer

CONFIG = small_config()


def test_synth_follows_from_seed_and_name_alone(tmp_path: Path) -> None:
    one, same, other = (
        make_snapshot(tmp_path / name, CONFIG, seed=seed)
        for name, seed in (("one", 7), ("same", 7), ("other", 8))
    )
    assert read_bytes(one) == read_bytes(same)
    sharded = make_snapshot(tmp_path / "sharded", CONFIG, seed=7, max_shard_size=300_000)
    # One layer less: the tensors that are left keep their values.
    fewer = make_snapshot(tmp_path / "fewer", small_config(num_hidden_layers=2), seed=7)

    a, b, c = (load_file(folder / SINGLE) for folder in (one, other, fewer))
    assert all(not torch.equal(a[name], b[name]) for name in a)
    damped = ("o_proj.weight", "down_proj.weight")  # scaled by the number of layers
    kept = [name for name in c if not name.endswith(damped)]
    assert all(torch.equal(a[name], c[name]) for name in kept)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = {name: load_file(sharded / name) for name in set(index["weight_map"].values())}
    assert {path.name for path in sharded.glob("*.safetensors")} == set(files)
    assert len(files) > 5
    assert set(index["weight_map"]) == set(a)
    assert all(torch.equal(files[index["weight_map"][name]][name], a[name]) for name in a)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in a.values())
    for tensors in files.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 300_000


def test_synth_fp8_is_the_bf16_one_quantised(tmp_path: Path) -> None:
    plain = load_file(make_snapshot(tmp_path / "plain", CONFIG) / SINGLE)
    folder = make_snapshot(tmp_path / "fp8", CONFIG, dtype="fp8-block")
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert given["quant_method"] == "fp8"
    assert given["weight_block_size"] == [128, 128]
    fp8 = load_file(folder / SINGLE)
    linear = {name for name in plain if re.search(r"_proj(_with_mqa)?\.weight$", name)}
    assert set(fp8) == set(plain) | {f"{name}_scale_inv" for name in linear}
    for name in set(plain) - linear:
        assert torch.equal(fp8[name], plain[name])
    powers = 0
    for name in linear:
        weight, scale = fp8[name], fp8[f"{name}_scale_inv"]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        rows, columns = plain[name].shape
        assert scale.shape == (-(-rows // 128), -(-columns // 128))
        wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        expected = plain[name].double()
        # Half a step of E4M3 (2^-4 of the value, or 2^-10 where subnormal) and of bf16 (2^-9).
        allowed = expected.abs() * (2**-4 + 2**-8) + wide * 2**-10
        assert ((weight.double() * wide - expected).abs() <= allowed).all()
        assert weight[:128, :128].double().abs().max() == 448
        powers += int((torch.frexp(scale)[0] == 0.5).sum())
    assert powers == 0  # as DeepSeek's: nothing may take such scales for powers of two


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda out: out.symlink_to("nowhere")])
def test_synth_needs_a_new_folder(tmp_path: Path, dsv2mk: Call, make: Any) -> None:
    out = tmp_path / "out"
    make(out)
    before = out.lstat()
    done = dsv2mk("synth", out, "--geometry", "tiny")
    assert done.code == 2
    assert str(out) in done.err
    assert out.lstat() == before
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("layers", [1, 2])
def test_synth_layers(tmp_path: Path, dsv2mk: Call, layers: int) -> None:
    out = tmp_path / "out"
    done = dsv2mk("synth", out, "--geometry", "tiny", "--layers", layers, "--json")
    assert done.code == 0
    config = json.loads((out / "config.json").read_text())
    assert config == {**preset_config("tiny"), "num_hidden_layers": layers}
    tensors = load_file(out / SINGLE)
    found = {int(m[1]) for name in tensors if (m := re.search(r"\.layers\.(\d+)\.", name))}
    assert found == set(range(layers))
    assert done.json["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        *((["--max-shard-size", size], 2) for size in ("0", "0GB", "-1", "1.5GB", "5XB", "", "GB")),
        (["--layers", "0"], 2),
        (["--seed", "-1"], 2),
        (["--dtype", "int4"], 2),
        (["--geometry", "deepseek-v9"], 2),
        (["--geometry", "/"], 10),
    ],
)
def test_synth_refuses(tmp_path: Path, dsv2mk: Call, options: list[str], code: int) -> None:
    done = dsv2mk("synth", tmp_path / "out", "--geometry", "tiny", *options)
    assert done.code == code
    assert options[0].lstrip("-") in done.err or options[1] in done.err
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("text", "limit"), [("300KB", 300_000), ("300 kb", 300_000), ("300KiB", 307_200), ("1M", 10**6)]
)
def test_synth_shard_sizes(tmp_path: Path, dsv2mk: Call, text: str, limit: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out, twin = tmp_path / "out", tmp_path / "twin"
    args = ["synth", out, "--geometry", tmp_path / "config.json", "--max-shard-size", text]
    assert dsv2mk(*args).code == 0
    assert read_bytes(out) == read_bytes(make_snapshot(twin, CONFIG, max_shard_size=limit))


def test_an_interrupted_synth_leaves_nothing(
    tmp_path: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    assert dsv2mk("synth", tmp_path / "out", "--geometry", "tiny").code == 130
    assert names(tmp_path) == set()


# ---- in transformers ----


def _watched(
    path: Path, tokens: list[int]
) -> tuple[list[float], list[set[int]], Tensor, dict[str, Any]]:
    """(rms of the hidden state after each layer, experts used in each, logits, loading info)."""
    model, info = DeepseekV2ForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    rms: list[float] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, __, output: rms.append(float(output.square().mean().sqrt()))
        )
    used = count_experts(model)
    return rms, used, hf_logits(model, tokens), info


#: DeepSeek-V2's depth and routing, everything else narrow.
DEEP = {
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_size": 64,
    "intermediate_size": 160,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
}


@pytest.mark.parametrize("name", slow_but(["tiny", "deep"], "tiny"))
def test_a_synthetic_checkpoint_behaves(name: str, tmp_path: Path, one_thread: None) -> None:
    """transformers loads it whole; activations neither die nor grow; experts take turns."""
    config = tiny_config() if name == "tiny" else {**preset_config("deepseek-v2"), **DEEP}
    snapshot = make_snapshot(tmp_path / "snapshot", config, max_shard_size=20_000_000)
    tokens = random_tokens(config, 64)
    rms, used, expected, info = _watched(snapshot, tokens)
    assert not any(info.values()), info
    assert len(rms) == config["num_hidden_layers"]
    assert len(used) == len(rms) - 1
    assert all(0.5 < value < 10 for value in rms), rms
    assert min(map(len, used)) > 0.8 * config["n_routed_experts"]
    assert bool(expected.isfinite().all())
    print(f"{name}: rms {min(rms):.2f} to {max(rms):.2f}, experts {min(map(len, used))}")

    artifact = make_artifact(snapshot, 4, tmp_path / "artifact")
    found = decode(artifact, tokens[:12], torch.bfloat16)
    # FP8 weights and a bf16 cache change the logits, but not what they are about.
    assert bool(found.isfinite().all())
    correlation = torch.corrcoef(torch.stack([found.flatten(), expected[:12].flatten()]))[0, 1]
    print(f"{name}: correlation {correlation:.4f}")
    assert float(correlation) > 0.8


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_finds_every_tensor_of_a_synthetic_checkpoint(
    tied: bool, tmp_path: Path, one_thread: None
) -> None:
    config = small_config(q_lora_rank=None, tie_word_embeddings=tied, first_k_dense_replace=0)
    snapshot = make_snapshot(tmp_path / "snapshot", config)
    _, _, logits, info = _watched(snapshot, [1, 2, 3])
    assert not any(info.values()), info
    assert bool(logits.isfinite().all())


# ---- the tokenizer ----

BYTES = Tokenizer.from_str(json.dumps(byte_tokenizer(500, {"bos_token_id": 256})))


@given(st.text())
def test_tokens_are_the_bytes_of_a_text(text: str) -> None:
    ids = BYTES.encode(text).ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@given(st.binary())
def test_any_bytes_decode_as_utf8_does(data: bytes) -> None:
    assert BYTES.decode(list(data)) == data.decode(errors="replace")


def test_synth_writes_the_tokenizer(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "snapshot", tiny_config())
    tokenizer = Tokenizer.from_file(str(snapshot / "tokenizer.json"))
    assert tokenizer.encode("<bos>é<eos>").ids == [256, 0xC3, 0xA9, 257]
    assert tokenizer.decode([256, 0xC3, 0xA9, 257]) == "é"
    assert tokenizer.get_vocab_size() == 258
