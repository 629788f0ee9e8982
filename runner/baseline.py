"""The stock way that the megakernel is compared with: PyTorch, Triton, a CUDA graph and NCCL.

The same decode step of the same rank on the same weights, in place: 14 launches a layer, all of a
token in one CUDA graph, and with several ranks two all-reduces a layer. Matrices are bf16 or E4M3
as stored; what goes into a bf16 matrix is bf16, or fp32 where that costs nothing; sums and the
residual stream are fp32. The FFN's sum over units is taken by atomics, in no fixed order.

The kernels are in `baseline_kernels`, which is imported, and Triton with it, by the first decoder.

Shapes: L layers, H hidden, C kv_lora, R rope, N nope, V v_head_dim, h heads of this rank, T
context, n units of this rank that may be at work in a layer, B = ceil(H / 128).
"""

import contextlib
import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsv2mk.manifests.errors import NodeError, UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import RankLayout
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.runner.load import Weights

_DTYPES = {
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "I32": torch.int32,
}


class TorchDecoder:
    """Decodes one sequence, position by position. One rank; all ranks step together.

    context: tokens at most. group: of the ranks, in their order; None is the default group.
    capture: replay a CUDA graph, on a GPU. dtype: of the cache, and of what goes into a large bf16
    matrix. ops: what computes; by default `TritonOps`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        context: int,
        group: dist.ProcessGroup | None = None,
        capture: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        ops: Any = None,
    ) -> None:
        self.layout, self.context, self.position = weights.layout, context, 0
        self.geometry = g = weights.layout.geometry
        self.device = weights.parts["replicated"].device
        self._group, self._ranks = group, self.layout.topology.ranks
        if self._ranks > 1 and dist.get_world_size(group) != self._ranks:
            found = dist.get_world_size(group)
            raise UsageError("processes", expected=f"{self._ranks}, one a rank", found=found)
        self._w = {
            name: weights.view(name).view(_DTYPES[spec.dtype]).view(spec.shape)
            for name, spec in self.layout.tensors.items()
        }
        heads, layers = self.layout.topology.heads(g), g.num_hidden_layers
        start, end = self.layout.topology.vocab_range(g, self.layout.rank)
        self._vocab_start, self._vocab_rows = start, end - start  # the rows past it are padding

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._token = make(1, dtype=torch.int64)
        self._at = make(1, dtype=torch.int32)  # the position, on the device
        self._turn = rope_table(g, context).to(self.device)
        self._cache = make(layers, context, g.cache_width, dtype=dtype)
        lists = [unit_list(self.layout, layer) for layer in range(layers)]
        self._slots = [slots.to(self.device) for slots, _ in lists]
        self._shares = [shares.to(self.device) for _, shares in lists]
        self._h = make(g.hidden_size)
        self._y = make(g.hidden_size)  # what is to be added to h
        self._x = make(1, g.hidden_size, dtype=dtype)
        self._a = make(1, g.qkv_a_rows)
        self._q_in = self._x if g.q_lora_rank is None else make(1, g.q_in, dtype=dtype)
        self._q = make(heads, g.qk_head_dim)
        self._q_lat = make(heads, g.kv_lora_rank)
        self._latent = make(heads, g.kv_lora_rank)
        self._value = make(heads, g.v_head_dim, dtype=dtype)
        self._scores = make(1, g.n_routed_experts)
        self._chosen = make(layers, g.num_experts_per_tok, dtype=torch.int32)
        self._act = make(max(len(slots) for slots in self._slots), BLOCK)
        self._logits = make(1, self.layout.topology.vocab_rows(g))
        self._best = make(self._ranks, 2, dtype=torch.float64)  # each rank's (logit, token)

        self._graph: Any = None
        with self._on_device():
            self.ops = ops or _triton_ops(self.layout, context, self.device)
            if capture and self.device.type == "cuda":
                self._capture()

    @property
    def token(self) -> int:
        """The token that the last step chose, over all ranks."""
        return int(self._token)

    @property
    def choices(self) -> dict[int, list[int]]:
        """layer -> experts that it chose for the last token, as `ReferenceDecoder` takes them."""
        layers = range(self.geometry.first_k_dense_replace, self.geometry.num_hidden_layers)
        return {layer: self._chosen[layer].tolist() for layer in layers}

    def reset(self) -> None:
        """Start another sequence."""
        self.position = 0
        self._at.zero_()

    def close(self) -> None:
        """Let go of the graph: before the process group is destroyed."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
            self._graph = None

    def step(self, token: int) -> Tensor:
        """Feed one token; fp32 logits [rows] of this rank's vocabulary, valid until the next call.

        Raises UsageError for a token outside of the vocabulary or where the context is full.
        """
        if not 0 <= token < self.geometry.vocab_size:
            expected = f"0 to {self.geometry.vocab_size - 1}"
            raise UsageError("token id", expected=expected, found=token)
        self._room(1)
        with self._on_device():
            self._token.fill_(token)
            self._advance()
        self.position += 1
        return self._logits[0, : self._vocab_rows]

    def run(self, steps: int) -> list[float]:
        """Feed the token last chosen, `steps` times; milliseconds of each, by events on a GPU."""
        self._room(steps)
        with self._on_device():
            marks = [self._mark()]
            for _ in range(steps):
                self._advance()
                marks.append(self._mark())
        self.position += steps
        if self.device.type != "cuda":
            return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        """This moment: an event that has been recorded, or seconds without a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _room(self, steps: int) -> None:
        if self.position + steps > self.context:
            expected, found = f"at most {self.context} tokens", self.position + steps
            raise UsageError("context is full", expected=expected, found=found)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        cuda = self.device.type == "cuda"
        return torch.cuda.device(self.device) if cuda else contextlib.nullcontext()

    def _advance(self) -> None:
        if self._graph is None:
            self._decode()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        """Choose the fastest of every operation, warm up on a side stream, capture."""
        self.ops.tune = True
        self._decode()
        self.ops.tune = False
        if self._ranks > 1:  # the same sums on all ranks, or they might choose other experts
            box = [self.ops.fastest]
            dist.broadcast_object_list(box, src=0, group=self._group)
            self.ops.fastest |= box[0]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.reset()
                self._y.zero_()  # tuning has added to it time and again
                self._decode()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog may ask for events of earlier collectives meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decode()
        self._graph = graph
        self.reset()
        torch.cuda.synchronize()

    # ---- one token: everything that the graph holds ----

    def _decode(self) -> None:
        g, w, ops = self.geometry, self._w, self.ops
        self._h.copy_(w["embed"].index_select(0, self._token)[0])
        for layer in range(g.num_hidden_layers):
            ops.add_norm(self._h, self._y, w["attn_norm"][layer], g.rms_norm_eps, self._x)
            self._attention(layer)
            ops.add_norm(self._h, self._y, w["ffn_norm"][layer], g.rms_norm_eps, self._x)
            self._feed_forward(layer)
        ops.add_norm(self._h, self._y, w["final_norm"], g.rms_norm_eps, self._x)
        ops.matvec(w["lm_head"][None], self._x, self._logits)
        self._choose()
        self._at.add_(1)

    def _attention(self, layer: int) -> None:
        """MLA over the latent cache with W_UK and W_UV absorbed: x to y."""
        w, ops, cache = self._w, self.ops, self._cache[layer]
        ops.matvec(w["qkv_a"][layer][None], self._x, self._a)
        q_norm = w["q_a_norm"][layer] if self.geometry.q_lora_rank else None
        kv_norm = w["kv_a_norm"][layer]
        ops.latents(self._a[0], q_norm, kv_norm, self._turn, self._at, self._q_in, cache)
        ops.matvec(w["q_b"][layer].flatten(0, 1)[None], self._q_in, self._q.view(1, -1))
        nope = self._q[:, : self.geometry.qk_nope_head_dim]
        ops.matvec(w["w_uk"][layer], nope, self._q_lat)
        ops.attend(self._q_lat, self._q, cache, self._turn, self._at, self._latent)
        ops.matvec(w["w_uv"][layer], self._latent, self._value)
        ops.matvec(w["o"][layer][None], self._value.view(1, -1), self._y[None])
        self._all_reduce(self._y)

    def _feed_forward(self, layer: int) -> None:
        """The units that are at work: x added to y, which is zero before."""
        w, slots, shares = self._w, self._slots[layer], self._shares[layer]
        if not self.geometry.is_dense(layer):
            router = w["router"][layer - self.geometry.first_k_dense_replace]
            self.ops.matvec(router[None], self._x, self._scores)
            first = self.layout.unit_offsets[layer]
            self.ops.route(self._scores[0], slots, shares, self._chosen[layer], first)
        if len(slots) and "ffn_down" in w:  # a rank of many may have no unit at all
            self.ops.units(self._w, self._x[0], slots, shares, self._act, self._y)
        self._all_reduce(self._y)

    def _choose(self) -> None:
        """The next token: the largest logit over all ranks."""
        logits = self._logits[0, : self._vocab_rows]
        if self._ranks == 1:
            self._token.copy_(logits.argmax())
            return
        self._best.zero_()
        mine = self._best[self.layout.rank]
        if self._vocab_rows:
            value, index = logits.max(0)
            mine[0].copy_(value)
            mine[1].copy_(index + self._vocab_start)
        else:
            mine[0].fill_(-torch.inf)
        self._all_reduce(self._best)
        self._token.copy_(self._best[:, 1].index_select(0, self._best[:, 0].argmax().view(1)))

    def _all_reduce(self, x: Tensor) -> None:
        if self._ranks > 1:
            dist.all_reduce(x, group=self._group)


def _triton_ops(layout: RankLayout, context: int, device: torch.device) -> Any:
    try:
        from dsv2mk.runner.baseline_kernels import TritonOps
    except ImportError as error:
        raise NodeError(f"Triton cannot be imported: {error}", fix="pip install triton") from None
    return TritonOps(layout, context, device)


def rope_table(geometry: Geometry, context: int) -> Tensor:
    """[context, 2, R / 2] fp32: cos and sin of each pair's angle, YaRN's magnitude on them."""
    frequencies = torch.tensor(geometry.inverse_frequencies(), dtype=torch.float64)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies
    return (geometry.rope_magnitude * torch.stack([angles.cos(), angles.sin()], 1)).float()


def routed_share(layout: RankLayout) -> int:
    """Units of one routed expert that this rank has at most."""
    return -(-layout.geometry.expert_units // layout.topology.ranks)


def unit_list(layout: RankLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Slots [n] int32 and weights [n] fp32 of the units of this rank that a layer puts to work.

    First `routed_share` entries for each expert that a token uses, which the router fills in: -1 is
    no unit. Then those that are always at work.
    """
    g, topology, first = layout.geometry, layout.topology, layout.unit_offsets[layer]
    routed = 0 if g.is_dense(layer) else g.num_experts_per_tok * routed_share(layout)
    always = range(0 if g.is_dense(layer) else g.routed_units, g.layer_units(layer))
    own = [unit for unit in always if topology.unit_rank(unit) == layout.rank]
    slots = [-1] * routed + [first + topology.unit_slot(unit) for unit in own]
    return torch.tensor(slots, dtype=torch.int32), torch.ones(len(slots))


def by_library(w: Tensor, x: Tensor, out: Tensor) -> None:
    """`TritonOps.matvec` by cuBLAS."""
    columns = x.to(w.dtype)[:, :, None]
    if out.dtype == w.dtype:
        torch.bmm(w, columns, out=out[:, :, None])
    else:
        torch.bmm(w, columns, out_dtype=out.dtype, out=out[:, :, None])
