"""The reference decoder across numbers of ranks, at refused steps, and where scores tie."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import edit_json, make_artifact, make_snapshot, slow_but, small_config
from reference_model import (
    GEOMETRIES,
    decode,
    differences,
    hf_logits,
    hf_reference,
    random_tokens,
    stored_weights,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv2mk.manifests.errors import UsageError
from dsv2mk.runner.reference import ReferenceDecoder, generate, greedy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", slow_but(["bf16", "fp8-block"], "fp8-block"))
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


@pytest.mark.parametrize("name", slow_but(TIES, "equal groups", "groups cross"))
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
