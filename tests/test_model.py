"""The reference decoder against transformers, across numbers of ranks, and where scores tie."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import YARN, edit_json, make_artifact, make_snapshot, small_config, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import UsageError
from dsv2mk.manifests.geometry import preset_config
from dsv2mk.pipeline.synth import byte_tokenizer
from dsv2mk.runner.reference import ReferenceDecoder, generate, greedy

Mutant = Callable[[Path], DeepseekV2ForCausalLM]

POSITIONS = 72
MSCALE = 0.1 * math.log(40)  # of YARN's factor: m(x) = MSCALE * x + 1

#: What differs from helpers.small_config: 3 layers, the first dense, 8 experts in 4 groups,
#: q_lora, mscale 1.0 and mscale_all_dim 0.707, 16 positions before YaRN, every width with an edge.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "edges": {},
    "whole-blocks": {
        "hidden_size": 384,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "vocab_size": 256,
    },
    "lite": {  # as V2-Lite: greedy, no q_lora, factor 1, tables of its own for theta
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "rope_theta": 500,
    },
    "no-yarn": {"rope_scaling": None},
    "no-yarn-no-q-lora": {"rope_scaling": None, "q_lora_rank": None},
    "yarn-without-mscale": {
        "rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k},
    },
    "yarn-ramp": {  # some pairs lie on the ramp between kept and slowed down
        "qk_rope_head_dim": 32,
        "rope_scaling": {**YARN, "mscale": 0.707, "original_max_position_embeddings": 64},
    },
    "no-dense-layer": {"first_k_dense_replace": 0, "moe_intermediate_size": 40},
    "only-dense-layers": {"first_k_dense_replace": 3},
    "tied": {"tie_word_embeddings": True, "n_shared_experts": 1},
    "eps": {"rms_norm_eps": 1e-5},
    "v2-routing": {
        "moe_intermediate_size": 136,
        "n_routed_experts": 32,
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 16.0,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- an independent model: transformers in fp32 on weights that went through FP8 ----


def hf_model(config: dict[str, Any]) -> DeepseekV2ForCausalLM:
    model = DeepseekV2ForCausalLM._from_config(
        DeepseekV2Config.from_dict(json.loads(json.dumps(config))),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    return model.eval()


_INTO_A_NORM = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")


def save_random(path: Path, config: dict[str, Any], max_shard_size: str) -> None:
    """A bf16 checkpoint as transformers writes it, of activations that are neither tiny nor huge.

    Where rms_norm_eps is not the latent norms' 1e-6, what goes into either kind of norm is so
    small that its epsilon counts.
    """
    model = hf_model(config)
    rng = torch.Generator().manual_seed(11)
    small = 0.005 if config["rms_norm_eps"] != 1e-6 else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=rng)
            if values.ndim == 1:
                values = 1 + 0.3 * values
            elif "embed" in name:
                values *= small
            else:
                values /= math.sqrt(values.shape[-1])
            if name.endswith(tuple(f"{proj}.weight" for proj in _INTO_A_NORM)):
                values *= small
            elif name.endswith("experts.down_proj"):
                values *= small * 4 / config["routed_scaling_factor"]
            elif name.endswith(("gate.weight", "q_b_proj.weight", "q_proj.weight")):
                values *= 2
            parameter.copy_(values)
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size=max_shard_size)


def through_fp8(weight: Tensor) -> Tensor:
    """[rows, columns] quantised and dequantised, block by block, in float64."""
    wide, out = weight.double(), torch.empty(weight.shape, dtype=torch.float64)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = wide[row : row + 128, column : column + 128]
            scale = 2.0**-126
            while block.abs().max() > 448 * scale:
                scale *= 2
            rounded = (block / scale).float().to(torch.float8_e4m3fn)
            out[row : row + 128, column : column + 128] = rounded.double() * scale
    return out.float()


def stored_weights(path: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def dequantised(path: Path) -> dict[str, Tensor]:
    """All weights as the artifact should hold them, fp32, under their names in the checkpoint."""
    stored = stored_weights(path)
    out: dict[str, Tensor] = {}
    for name, weight in stored.items():
        is_ffn = ".mlp." in name and "_proj.weight" in name
        scale = stored.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            continue
        if scale is not None:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = weight.float() * wide[: weight.shape[0], : weight.shape[1]]
            out[name] = value if is_ffn else value.bfloat16().float()
        else:
            out[name] = through_fp8(weight) if is_ffn else weight.float()
    return out


def load_weights(model: DeepseekV2ForCausalLM, weights: dict[str, Tensor]) -> None:
    """Load by checkpoint names; transformers keeps a layer's experts in two tensors."""
    state = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(model.config.first_k_dense_replace, model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [
                    weights[f"{prefix}{expert}.{kind}_proj.weight"]
                    for expert in range(model.config.n_routed_experts)
                ]
            )
            for kind in ("gate", "up", "down")
        )
        state[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}down_proj"] = down
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)


class RoundedCache(DynamicCache):
    """Keeps what the latent cache in bf16 keeps."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key.bfloat16().float(), value.bfloat16().float(), *args, **kwargs)


def hf_logits(
    model: DeepseekV2ForCausalLM, tokens: list[int], cache: DynamicCache | None = None
) -> Tensor:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        return model(ids, use_cache=cache is not None, past_key_values=cache).logits[0]


def hf_reference(path: Path, **changes: Any) -> DeepseekV2ForCausalLM:
    """The model of a checkpoint, some fields of its config changed."""
    model = hf_model({**json.loads((path / "config.json").read_text()), **changes})
    load_weights(model, dequantised(path))
    return model


def count_experts(model: DeepseekV2ForCausalLM) -> list[set[int]]:
    """Filled, as the model runs, with the experts that each MoE layer chooses."""
    used: list[set[int]] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            used.append(chosen := set())

            def note(_: Any, __: Any, output: Any, chosen: set[int] = chosen) -> None:
                chosen.update(output[2].flatten().tolist())

            layer.mlp.gate.register_forward_hook(note)
    return used


def decode(artifact: Artifact, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    decoder = ReferenceDecoder(artifact, cache_dtype=dtype)
    return torch.stack([decoder.step(token) for token in tokens])


def differences(found: Tensor, expected: Tensor) -> Tensor:
    """[positions] largest difference over the largest logit."""
    assert found.shape == expected.shape
    return (found - expected).abs().amax(1) / expected.abs().amax(1)


def random_tokens(config: dict[str, Any], count: int, seed: int = 5) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(config["vocab_size"], (count,), generator=rng).tolist()


# ---- transformers ----


@pytest.mark.parametrize("name", GEOMETRIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, index = small_config(**GEOMETRIES[name]), list(GEOMETRIES).index(name)
    snapshot, tokens = tmp_path / "snapshot", random_tokens(config, POSITIONS)
    several = index % 2 == 0
    save_random(snapshot, config, "500KB" if several else "5GB")
    assert (len(list(snapshot.glob("*.safetensors"))) > 1) == several
    model = hf_reference(snapshot)
    used = count_experts(model)
    expected = hf_logits(model, tokens)
    assert len(used) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert all(len(experts) == config["n_routed_experts"] for experts in used)
    assert expected.argmax(1).unique().numel() > POSITIONS / 3  # not a model of one answer

    artifact = make_artifact(snapshot, 1 + index % 3, tmp_path / "artifact")
    found = decode(artifact, tokens)
    exact = differences(found, expected)
    assert float(exact.max()) < 1e-4
    assert torch.equal(found.argmax(1), expected.argmax(1))

    # A cache in bf16 is a rounding that transformers can repeat; where a value lies between two
    # bf16 numbers either may be taken, so this bound is wider and a few positions may pass it.
    rounded = decode(artifact, tokens, torch.bfloat16)
    same = differences(rounded, hf_logits(model, tokens, RoundedCache()))
    assert float(same.median()) < 2e-3
    assert int((same > 5e-3).sum()) <= 3
    loss = differences(rounded, found)
    assert 1e-3 < float(loss.median()) < 0.03
    print(
        f"{name}: fp32 cache {exact.max():.1e}; bf16 cache {same.max():.1e} from the same "
        f"rounding in transformers, {loss.max():.1e} (median {loss.median():.1e}) from fp32"
    )


def _rope(**changes: Any) -> Mutant:
    """Another softmax scale or rope, the factor on cos and sin kept unless it is named."""
    factor = {"attention_factor": (MSCALE + 1) / (MSCALE * 0.707 + 1)}
    yarn = {**YARN, "rope_theta": 10000, "rope_type": "yarn", **factor, **changes}
    del yarn["type"]
    return lambda path: hf_reference(path, rope_parameters=yarn)


def _rope_halves(path: Path) -> DeepseekV2ForCausalLM:
    """Pairs (i, i + half) instead of (2i, 2i + 1)."""
    model = hf_reference(path)
    config, weights = model.config, dequantised(path)
    width = config.qk_rope_head_dim
    halves = [*range(0, width, 2), *range(1, width, 2)]
    for name, weight in weights.items():
        if name.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            heads = config.num_attention_heads if "q_b" in name else 1
            rope = weight.view(heads, -1, weight.shape[1])[:, -width:]
            rope.copy_(rope[:, halves].clone())
    load_weights(model, weights)
    return model


def _latent_eps(path: Path) -> DeepseekV2ForCausalLM:
    model = hf_reference(path)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
    return model


def _not_quantised(path: Path) -> DeepseekV2ForCausalLM:
    model = hf_reference(path)
    load_weights(model, {name: value.float() for name, value in stored_weights(path).items()})
    return model


#: Mistakes that the comparison has to notice: (geometry, the model that makes it).
MUTANTS: dict[str, tuple[str, Mutant]] = {
    "mscale-for-mscale-all-dim": ("edges", _rope(mscale_all_dim=1.0)),
    "no-softmax-factor": ("edges", _rope(mscale_all_dim=None)),
    "no-rope-magnitude": ("edges", _rope(attention_factor=1.0)),
    "ramp-of-another-length": ("yarn-ramp", _rope(mscale=0.707, attention_factor=1.0)),
    "no-yarn": ("edges", lambda path: hf_reference(path, rope_parameters=None)),
    "rope-halves": ("edges", _rope_halves),
    "eps-of-other-norms": ("eps", lambda path: hf_reference(path, rms_norm_eps=1e-6)),
    "eps-of-latent-norms": ("eps", _latent_eps),
    "not-quantised": ("edges", _not_quantised),
    "greedy": ("edges", lambda path: hf_reference(path, topk_method="greedy")),
    "not-scaled": ("v2-routing", lambda path: hf_reference(path, routed_scaling_factor=1.0)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_would_notice(name: str, tmp_path: Path) -> None:
    geometry, mutant = MUTANTS[name]
    config = small_config(**GEOMETRIES[geometry])
    save_random(tmp_path / "snapshot", config, "5GB")
    tokens = random_tokens(config, POSITIONS)
    right = hf_logits(hf_reference(tmp_path / "snapshot"), tokens)
    change = differences(hf_logits(mutant(tmp_path / "snapshot"), tokens), right)
    assert float(change[1:].median()) > 1e-3
    if "rope" in name or "mscale" in name or "factor" in name:
        assert float(change[0]) < 1e-5  # one position has nothing to weigh: it always looks right


# ---- numbers of ranks ----


@pytest.mark.parametrize("dtype", ["bf16", "fp8-block"])
def test_every_number_of_ranks_gives_the_same(dtype: str, tmp_path: Path) -> None:
    config = small_config()
    snapshot = make_snapshot(tmp_path / "snapshot", config, dtype=dtype, max_shard_size=700_000)
    prompt = random_tokens(config, 6)
    logits: dict[int, Tensor] = {}
    tokens: dict[int, list[int]] = {}
    for ranks in (1, 2, 3, 4, 6, 8):
        artifact = make_artifact(snapshot, ranks, tmp_path / f"artifact-{ranks}")
        assert len(artifact.layouts) == ranks
        steps = list(
            generate(ReferenceDecoder(artifact, torch.float32), prompt, 20, stop=frozenset())
        )
        logits[ranks] = torch.stack([step for step, _ in steps])
        assert [token for _, token in steps[:5]] == [None] * 5
        tokens[ranks] = [token for _, token in steps if token is not None]
    assert len(tokens[1]) == 20
    assert all(tokens[ranks] == tokens[1] for ranks in tokens)
    apart = {ranks: float((logits[ranks] - logits[1]).abs().max()) for ranks in logits}
    assert max(apart.values()) < 1e-5
    print(f"{dtype}: {apart}")

    fed = [*prompt, *tokens[1][:-1]]
    if dtype == "fp8-block":
        assert any(name.endswith("_scale_inv") for name in stored_weights(snapshot))
        edit_json(snapshot / "config.json", quantization_config=None)  # transformers gets bf16
    expected = hf_logits(hf_reference(snapshot), fed)
    assert float(differences(logits[1], expected).max()) < 1e-4
    assert tokens[1] == expected[5:].argmax(1).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "ranks"),
    [(301, 8), (301, 2), (25, 24), (9, 8)],  # the last two: ranks without a row of their own
)
def test_padding_rows_are_never_chosen(vocab_size: int, ranks: int, tmp_path: Path) -> None:
    """Every real logit is negative, so that a padding row's zero would win."""
    config = small_config(vocab_size=vocab_size, num_hidden_layers=1, first_k_dense_replace=0)
    snapshot = make_snapshot(tmp_path / "snapshot", config)
    weights = load_file(snapshot / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # the residual stream is the embedding
    embed, head = weights["model.embed_tokens.weight"].abs_(), weights["lm_head.weight"]
    head.copy_(-head.abs())
    save_file(weights, snapshot / "model.safetensors")
    artifact = make_artifact(snapshot, ranks, tmp_path / "artifact")
    assert artifact.layouts[0].tensors["lm_head"].shape[0] * ranks > vocab_size

    fed, decoder = [vocab_size - 1, 0, 3], ReferenceDecoder(artifact)
    logits = torch.stack([decoder.step(token) for token in fed])
    hidden = embed[fed].double()
    hidden /= (hidden.square().mean(1, keepdim=True) + 1e-6).sqrt()
    expected = hidden * weights["model.norm.weight"].double() @ head.double().T
    assert bool((expected < 0).all())
    assert float((logits - expected).abs().max()) < 1e-4
    assert [greedy(row) for row in logits] == expected.argmax(1).tolist()


def test_a_step_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    config = small_config(num_hidden_layers=1, max_position_embeddings=3)
    snapshot = make_snapshot(tmp_path / "snapshot", config)
    artifact = make_artifact(snapshot, 1, tmp_path / "artifact")
    expected = decode(artifact, [5, 300, 0])
    decoder = ReferenceDecoder(artifact, torch.float32)
    for position, token in enumerate([5, 300, 0]):
        for bad in (-1, 301, 1 << 40):
            with pytest.raises(UsageError, match="0 to 300"):
                decoder.step(bad)
        assert decoder.position == position
        assert torch.equal(decoder.step(token), expected[position])
    with pytest.raises(UsageError, match="at most 3"):
        decoder.step(0)
    assert decoder.position == 3


# ---- equal scores ----

#: Expert -> which of the router's distinct rows it has. Groups are two experts wide, or four.
TIES = {
    "all equal": [0] * 8,
    "equal groups": [0, 1, 1, 0, 0, 1, 1, 0],
    "equal within groups": [0, 0, 1, 1, 2, 2, 3, 3],
    "groups cross": [0, 1, 2, 0, 1, 2, 0, 1],
    "32 experts": [2, 0, 3, 1, 1, 4, 0, 2, 3, 3, 1, 0, 4, 2, 2, 1] * 2,
}


def _select(logits: list[float], config: dict[str, Any], sign: int) -> list[int]:
    """Experts by (score, index): the lower index first for sign 1, the higher for -1."""
    size = len(logits) // config["n_group"]
    groups = sorted(
        range(config["n_group"]),
        key=lambda group: (-max(logits[group * size : (group + 1) * size]), sign * group),
    )[: config["topk_group"]]
    allowed = [expert for expert in range(len(logits)) if expert // size in groups]
    allowed.sort(key=lambda expert: (-logits[expert], sign * expert))
    return allowed[: config["num_experts_per_tok"]]


def _tied_router(
    config: dict[str, Any], rows: Tensor, pattern: list[int], sign: int
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = (hidden.view(-1, rows.shape[1]) @ rows.T)[:, pattern]
        chosen = torch.tensor([_select(row.tolist(), config, sign) for row in logits])
        scores = logits.softmax(1).gather(1, chosen)
        return logits, scores * config["routed_scaling_factor"], chosen

    return forward


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("method", ["group_limited_greedy", "greedy"])
def test_of_equal_scores_the_lower_index_wins(name: str, method: str, tmp_path: Path) -> None:
    pattern = TIES[name]
    many = GEOMETRIES["v2-routing"] if len(pattern) == 32 else {}
    one_group = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}
    config = small_config(topk_method=method, num_hidden_layers=2, **{**many, **one_group})
    snapshot = make_snapshot(tmp_path / "snapshot", config)
    weights = load_file(snapshot / "model.safetensors")
    router = weights["model.layers.1.mlp.gate.weight"]
    rows = router[: max(pattern) + 1].clone()
    router.copy_(rows[pattern])
    save_file(weights, snapshot / "model.safetensors")
    tokens, model = random_tokens(config, 24), hf_reference(snapshot)

    def expected(sign: int) -> Tensor:
        router = _tied_router(config, rows.float(), pattern, sign)
        model.model.layers[1].mlp.gate.forward = router
        return hf_logits(model, tokens)

    found = decode(make_artifact(snapshot, 2, tmp_path / "artifact"), tokens)
    assert float(differences(found, expected(1)).max()) < 1e-4
    assert float(differences(found, expected(-1)).max()) > 1e-2


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([2.0] * 70, 0),
        ([-5.0] * 40 + [-4.0] * 30, 40),
        ([-0.0, 0.0], 0),
        ([-math.inf, -1e38, -1e38], 1),
        ([0.0, math.inf, math.inf], 1),
    ],
)
def test_greedy_takes_the_lowest_of_equal_logits(logits: list[float], token: int) -> None:
    assert greedy(torch.tensor(logits)) == token


# ---- synthetic checkpoints ----


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


@pytest.mark.parametrize("name", ["tiny", pytest.param("deep", marks=pytest.mark.slow)])
def test_a_synthetic_checkpoint_behaves(name: str, tmp_path: Path) -> None:
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
    tied: bool, tmp_path: Path
) -> None:
    config = small_config(q_lora_rank=None, tie_word_embeddings=tied, first_k_dense_replace=0)
    snapshot = make_snapshot(tmp_path / "snapshot", config)
    _, _, logits, info = _watched(snapshot, [1, 2, 3])
    assert not any(info.values()), info
    assert bool(logits.isfinite().all())


BYTES = Tokenizer.from_str(json.dumps(byte_tokenizer(500, {"bos_token_id": 256})))


@given(st.text())
@settings(deadline=None)
def test_tokens_are_the_bytes_of_a_text(text: str) -> None:
    ids = BYTES.encode(text).ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@given(st.binary())
@settings(deadline=None)
def test_any_bytes_decode_as_utf8_does(data: bytes) -> None:
    assert BYTES.decode(list(data)) == data.decode(errors="replace")


def test_synth_writes_the_tokenizer(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "snapshot", tiny_config())
    tokenizer = Tokenizer.from_file(str(snapshot / "tokenizer.json"))
    assert tokenizer.encode("<bos>é<eos>").ids == [256, 0xC3, 0xA9, 257]
    assert tokenizer.decode([256, 0xC3, 0xA9, 257]) == "é"
    assert tokenizer.get_vocab_size() == 258
