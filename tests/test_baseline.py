"""The stock way against the reference decoder: with its kernels in plain torch, and with Triton's.

Triton runs in its interpreter, in a process of its own: `python test_baseline.py MODE ...`.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import make_artifact, make_snapshot, slow, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import NodeError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import PARTS, RankLayout, group_layout
from dsv2mk.manifests.topology import Topology
from dsv2mk.runner import baseline
from dsv2mk.runner.baseline import TorchDecoder, by_library, rope_table, unit_list
from dsv2mk.runner.load import SLACK, Weights, part_bytes
from dsv2mk.runner.reference import ReferenceDecoder, greedy, route

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRIES: dict[str, dict[str, Any]] = {
    "edges": {},
    "lite": {
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_scaling": None,
    },
    "no-dense-layer": {"first_k_dense_replace": 0, "moe_intermediate_size": 40, "v_head_dim": 32},
    "only-dense-layers": {"first_k_dense_replace": 3},
    "few-rows": {"vocab_size": 9, "routed_scaling_factor": 16.0},  # of 8 ranks three have none
}


def load(artifact: Artifact, rank: int) -> Weights:
    layout = artifact.layouts[rank]
    sizes = {part: part_bytes(layout, part) + SLACK for part in PARTS}
    parts = {part: torch.zeros(size, dtype=torch.uint8) for part, size in sizes.items()}
    weights = Weights(layout=layout, parts=parts)
    for name in layout.tensors:
        data = bytearray(artifact.map_tensor(rank, name))
        weights.view(name).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return weights


class PlainOps:
    """`TritonOps` in plain torch, written another way: sums in float64."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout

    def matvec(self, w: Tensor, x: Tensor, out: Tensor) -> None:
        out.copy_(torch.einsum("brk,bk->br", w.double(), x.double()))

    def _norm(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x.double(), x.shape, gamma.double(), eps)

    def add_norm(self, h: Tensor, y: Tensor, gamma: Tensor, eps: float, x: Tensor) -> None:
        h += y
        y.zero_()
        x.copy_(self._norm(h, gamma, eps))

    def _rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        """[..., R], pairs side by side, to first elements of all pairs and then second ones."""
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.complex(*turn)
        return torch.cat([turned.real, turned.imag], -1)

    def latents(
        self, a: Tensor, q_norm: Any, kv_norm: Tensor, turn: Tensor, at: Tensor, q_in: Tensor, cache
    ) -> None:
        rest = a[q_in.shape[1] :] if q_norm is not None else a
        if q_norm is not None:
            q_in.copy_(self._norm(a[: q_in.shape[1]], q_norm, 1e-6))
        latent, key = rest[: len(kv_norm)], rest[len(kv_norm) :]
        rotated = self._rotate(key, turn[at].double()[0])
        cache[int(at)] = torch.cat([self._norm(latent, kv_norm, 1e-6), rotated])

    def attend(
        self, q_lat: Tensor, q: Tensor, cache: Tensor, turn: Tensor, at: Tensor, out: Tensor
    ) -> None:
        g = self.layout.geometry
        rotated = self._rotate(q[:, g.qk_nope_head_dim :], turn[at].double()[0])
        live = cache[: int(at) + 1].double()
        scores = torch.cat([q_lat.double(), rotated], 1) @ live.T * g.softmax_scale
        out.copy_(scores.softmax(1) @ live[:, : g.kv_lora_rank])

    def route(
        self, scores: Tensor, slots: Tensor, shares: Tensor, chosen: Tensor, first: int
    ) -> None:
        g, topology = self.layout.geometry, self.layout.topology
        size = baseline.routed_share(self.layout)
        for place, (expert, share) in enumerate(route(g, scores)):
            chosen[place] = expert
            begin = expert * g.expert_units
            units = range(begin, begin + g.expert_units)
            own = [u for u in units if topology.unit_rank(u) == self.layout.rank]
            entries = slice(place * size, (place + 1) * size)
            found = [first + topology.unit_slot(u) for u in own]
            slots[entries] = torch.tensor(found + [-1] * (size - len(own)), dtype=torch.int32)
            shares[entries] = share

    def units(
        self, w: dict[str, Tensor], x: Tensor, slots: Tensor, shares: Tensor, act: Tensor, y: Tensor
    ) -> None:
        for slot, share in zip(slots.tolist(), shares.tolist(), strict=True):
            if slot < 0:
                continue
            scale = w["ffn_gate_up_scale"][slot].double().repeat_interleave(128, 1)[:, : len(x)]
            gate, up = ((w["ffn_gate_up"][slot].double() * scale) @ x.double()).unbind(1)
            value = torch.nn.functional.silu(gate) * up * share
            scale = w["ffn_down_scale"][slot].double().repeat_interleave(128)[: len(x)]
            y += scale * (w["ffn_down"][slot].double() @ value)


class Sums:
    """`torch.distributed` of ranks that are threads; a rank's group is its number."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Tensor] = [torch.empty(0)] * ranks

    def get_world_size(self, group: int) -> int:
        return len(self.parts)

    def all_reduce(self, x: Tensor, group: int) -> None:
        self.parts[group] = x.clone()
        self.barrier.wait()
        x.copy_(torch.stack(self.parts).sum(0))
        self.barrier.wait()


def each_rank(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    out: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        out[rank] = work(rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def make(folder: Path, ranks: int, config: dict[str, Any]) -> Artifact:
    return make_artifact(make_snapshot(folder / "snapshot", config), ranks, folder / "artifact")


Choices = dict[int, list[int]]


def expected(
    artifact: Artifact, tokens: list[int], dtype: torch.dtype, choices: list[Choices]
) -> Tensor:
    """Logits of the reference with these experts at work: rounding may well choose others."""
    decoder = ReferenceDecoder(artifact, dtype)
    return torch.stack([decoder.step(*pair) for pair in zip(tokens, choices, strict=True)])


def run_through(decoder: TorchDecoder, tokens: list[int]) -> tuple[Tensor, list[Choices]]:
    """Logits [positions, rows], and the experts chosen."""
    steps = [(decoder.step(token).clone(), decoder.choices) for token in tokens]
    return torch.stack([logits for logits, _ in steps]), [choices for _, choices in steps]


def errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Of each position, the difference's norm over that of what is wanted."""
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1)


# ---- the decoder around the kernels ----

FAST = [("edges", 1), ("edges", 3), ("lite", 2), ("few-rows", 8)]
CASES = [(name, ranks) for name in GEOMETRIES for ranks in (1, 2, 3, 8)]


@pytest.mark.parametrize(
    ("name", "ranks"), [case if case in FAST else slow(*case) for case in CASES]
)
def test_logits_and_tokens_are_the_references(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(**GEOMETRIES[name])
    artifact, vocab = make(tmp_path, ranks, config), config["vocab_size"]
    monkeypatch.setattr(baseline, "dist", Sums(ranks))
    prompt, count = [token % vocab for token in (7, 300, 7)], 4
    reference = ReferenceDecoder(artifact, torch.float32)
    logits = [reference.step(token) for token in prompt]
    tokens = [greedy(logits[-1])]
    for _ in range(count):
        tokens.append(greedy(reference.step(tokens[-1])))

    def decode(rank: int) -> Any:
        group: Any = rank
        decoder = TorchDecoder(
            *(load(artifact, rank),),
            context=len(prompt) + count,
            group=group,
            dtype=torch.float32,
            ops=PlainOps(artifact.layouts[rank]),
        )
        runs = []
        for _ in range(2):  # the second one finds the first one's cache
            found = [decoder.step(token).clone() for token in prompt]
            chosen = [decoder.token]
            for _ in range(count // 2):
                assert len(decoder.run(2)) == 2
                chosen.append(decoder.token)
            with pytest.raises(UsageError, match="context is full"):
                decoder.run(1)
            assert decoder.position == len(prompt) + count
            runs.append((found, chosen))
            decoder.reset()
        return runs

    ended = each_rank(ranks, decode)
    for run in range(2):
        for position, wanted in enumerate(logits):
            rows = [found[position] for found, _ in (runs[run] for runs in ended)]
            assert torch.cat(rows).shape == wanted.shape
            torch.testing.assert_close(torch.cat(rows), wanted, rtol=1e-4, atol=1e-5)
        assert all(runs[run][1] == tokens[::2] for runs in ended)


def test_a_cache_and_activations_in_bf16_are_near(tmp_path: Path) -> None:
    artifact, tokens = make(tmp_path, 1, small_config()), [5, 17, 300, 5]
    ops = PlainOps(artifact.layouts[0])
    decoder = TorchDecoder(load(artifact, 0), context=4, ops=ops)
    found, choices = run_through(decoder, tokens)
    error = errors(found, expected(artifact, tokens, torch.bfloat16, choices))
    assert 1e-4 < float(error.min()) <= float(error.max()) < 0.02


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make(tmp_path, 2, small_config(num_hidden_layers=1))
    given: Any = {"context": 2, "ops": PlainOps(artifact.layouts[0]), "group": 0}
    monkeypatch.setattr(baseline, "dist", Sums(3))
    with pytest.raises(UsageError, match="2, one a rank"):
        TorchDecoder(load(artifact, 0), **given)
    monkeypatch.setattr(baseline, "dist", Sums(2))
    decoder = TorchDecoder(load(artifact, 0), **given)
    for token in (-1, 301):
        with pytest.raises(UsageError, match="0 to 300"):
            decoder.step(token)
    with pytest.raises(UsageError, match="at most 2 tokens"):
        decoder.run(3)
    assert decoder.position == 0


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": None}, {"qk_rope_head_dim": 32}])
def test_the_rope_table_turns_as_the_reference(changes: dict[str, Any]) -> None:
    geometry = Geometry.from_config(small_config(**changes))
    reference: Any = ReferenceDecoder.__new__(ReferenceDecoder)
    reference.geometry = geometry
    table = rope_table(geometry, 200)
    assert table.shape == (200, 2, geometry.qk_rope_head_dim // 2)
    x = torch.randn(3, geometry.qk_rope_head_dim, generator=torch.Generator().manual_seed(0))
    for position in (0, 1, 57, 199):
        angles = torch.tensor(geometry.inverse_frequencies(), dtype=torch.float64)
        wanted = reference._rotate(x, position * angles)
        cos, sin = table[position]
        even, odd = x[:, ::2], x[:, 1::2]
        torch.testing.assert_close(wanted[:, ::2], even * cos - odd * sin)
        torch.testing.assert_close(wanted[:, 1::2], even * sin + odd * cos)


@settings(max_examples=50)
@given(geometries(), st.integers(1, 8))
def test_lists_hold_all_units_that_are_always_at_work(geometry: Geometry, ranks: int) -> None:
    geometry = replace(geometry, num_attention_heads=ranks)
    topology = Topology(ranks=ranks)
    layouts = group_layout(geometry, topology)
    for layer in range(geometry.num_hidden_layers):
        dense = geometry.is_dense(layer)
        first = 0 if dense else geometry.n_routed_experts * geometry.expert_units
        found = []
        for layout in layouts:
            slots, shares = unit_list(layout, layer)
            routed = 0 if dense else geometry.num_experts_per_tok * baseline.routed_share(layout)
            assert slots[:routed].tolist() == [-1] * routed
            assert shares.tolist() == [1.0] * len(slots)
            start, end = layout.unit_offsets[layer : layer + 2]
            assert all(start <= slot < end for slot in slots[routed:].tolist())
            found += [(s - start) * ranks + layout.rank for s in slots[routed:].tolist()]
        assert sorted(found) == list(range(first, geometry.layer_units(layer)))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_library_multiplies_each_matrix_by_its_vector(batch: int) -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(batch, 20, 16, generator=generator).bfloat16()
    x = torch.randn(batch, 24, generator=generator)[:, :16]
    out = torch.zeros(batch, 20, dtype=torch.bfloat16)
    by_library(w, x, out)
    wanted = torch.stack([w[b].double() @ x[b].bfloat16().double() for b in range(batch)])
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)


def test_importing_it_imports_no_triton() -> None:
    code = "import sys, dsv2mk.runner.baseline; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_triton_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dsv2mk.runner.baseline_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    weights = load(make(tmp_path, 1, small_config(num_hidden_layers=1)), 0)
    with pytest.raises(NodeError, match="Triton cannot be imported") as raised:
        TorchDecoder(weights, context=2)
    assert raised.value.fix == "pip install triton"
    assert "dsv2mk.runner.baseline_kernels" not in sys.modules


# ---- Triton's kernels, in its interpreter ----

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def start(mode: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, mode, *map(str, args)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def wait(children: list[subprocess.Popen[str]]) -> None:
    try:
        said = [child.communicate(timeout=300)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert all(child.returncode == 0 for child in children), "\n".join(said)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("edges", 1), ("edges", 2), ("lite", 1)])
def test_triton_decodes_as_the_reference(name: str, ranks: int, tmp_path: Path) -> None:
    few = {"num_attention_heads": 4, "num_hidden_layers": 2}
    artifact = make(tmp_path, ranks, small_config(**{**GEOMETRIES[name], **few}))
    tokens = [3, 250, 3]
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        work = tmp_path / str(dtype)
        work.mkdir()
        wait([start("decode", artifact.path, rank, work, dtype, *tokens) for rank in range(ranks)])
        ended = [torch.load(work / str(rank)) for rank in range(ranks)]
        choices = ended[0][1]
        assert all(choices == each[1] for each in ended)
        found = torch.cat([logits for logits, _ in ended], 1)
        error = errors(found, expected(artifact, tokens, dtype, choices))
        print(f"{name}, {ranks} ranks, {dtype}: {error.tolist()}")
        assert float(error.max()) < most


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("what", ["attention", "routing"])
def test_triton_computes_what_plain_torch_does(what: str) -> None:
    wait([start(what)])


def decode(folder: str, rank: str, work: str, kind: str, *tokens: str) -> None:
    artifact, own = Artifact.open(Path(folder)), int(rank)
    ranks = len(artifact.layouts)
    if ranks > 1:
        store = f"file://{work}/store"
        dist.init_process_group("gloo", init_method=store, rank=own, world_size=ranks)
    dtype = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[kind]
    decoder = TorchDecoder(load(artifact, own), context=len(tokens), dtype=dtype)
    torch.save(run_through(decoder, [int(token) for token in tokens]), Path(work) / rank)
    if ranks > 1:
        dist.destroy_process_group()


def attention() -> None:
    """Over one token to a full cache, in few splits of several tiles and in many."""
    from dsv2mk.runner import baseline_kernels

    geometry = Geometry.from_config(small_config())
    layout = group_layout(geometry, Topology(ranks=1))[0]
    heads, context = geometry.num_attention_heads, 150
    generator = torch.Generator().manual_seed(2)
    q_lat = torch.randn(heads, geometry.kv_lora_rank, generator=generator)
    q = 4 * torch.randn(heads, geometry.qk_head_dim, generator=generator)
    cache = torch.randn(context, geometry.cache_width, generator=generator).bfloat16()
    turn = rope_table(geometry, context)
    for programs in (1, 4, 256):
        baseline_kernels._PROGRAMS = programs
        ops, plain = baseline_kernels.TritonOps(layout, context, cache.device), PlainOps(layout)
        for live in (1, 16, 17, 33, 100, context):
            poisoned, at = cache.clone(), torch.tensor([live - 1], dtype=torch.int32)
            poisoned[live:] = torch.nan
            outs = [torch.full_like(q_lat, torch.nan) for _ in range(2)]
            for each, out in zip((ops, plain), outs, strict=True):
                each.attend(q_lat, q, poisoned, turn, at, out)
            torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


def routing() -> None:
    """Random scores, and ones with ties, for every rank of several groups."""
    from dsv2mk.runner.baseline_kernels import TritonOps

    routings = (
        {},
        {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "num_experts_per_tok": 8},
        {"n_routed_experts": 35, "n_group": 5, "topk_group": 3, "num_experts_per_tok": 6},
        {"n_group": 8, "topk_group": 3, "moe_intermediate_size": 500},
    )
    generator = torch.Generator().manual_seed(3)
    for changes in routings:
        geometry = Geometry.from_config(small_config(**changes))
        for ranks in (1, 2, 3, 8):
            for layout in group_layout(geometry, Topology(ranks=ranks)):
                scores = torch.randn(geometry.n_routed_experts, generator=generator)
                for values in (scores, scores.round(), torch.zeros_like(scores), scores * 100):
                    first = layout.unit_offsets[1]
                    found = []
                    for ops in (TritonOps(layout, 32, scores.device), PlainOps(layout)):
                        slots, shares = unit_list(layout, 1)
                        chosen = torch.full([geometry.num_experts_per_tok], -1, dtype=torch.int32)
                        ops.route(values, slots, shares, chosen, first)
                        found.append((slots.tolist(), chosen.tolist(), shares))
                    assert found[0][:2] == found[1][:2]
                    torch.testing.assert_close(found[0][2], found[1][2])


if __name__ == "__main__":
    {"decode": decode, "attention": attention, "routing": routing}[sys.argv[1]](*sys.argv[2:])
