# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The operations of `TorchDecoder` by Triton's kernels; importing this imports Triton.

Shapes: see baseline.py. Of a kernel's parameters those in capitals are constants.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv2mk.manifests.geometry import LATENT_NORM_EPS
from dsv2mk.manifests.layout import RankLayout
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.runner.baseline import by_library, routed_share

#: Ways to cut matrices up, of which the fastest is taken: (elements of a tile, columns, warps,
#: stages), (rows, columns, warps, stages), (rows, units that a program adds up, warps, stages).
_GEMV_TILES = (
    *((4096, 512, 4, 1), (4096, 1024, 4, 1), (2048, 1024, 4, 1), (8192, 1024, 8, 1)),
    *((4096, 512, 4, 4), (4096, 1024, 4, 3)),
)
_GATE_UP_TILES = ((8, 512, 4, 1), (4, 1024, 4, 1), (4, 512, 4, 4), (8, 512, 4, 3), (16, 512, 8, 3))
_DOWN_TILES = ((64, 12, 4, 1), (32, 12, 4, 1), (64, 12, 4, 3), (32, 12, 4, 4), (64, 6, 4, 3))
#: Heads and tokens of a tile of attention.
_HEADS, _TOKENS = 16, 16
#: Programs that attention is spread over, about: two a multiprocessor.
_PROGRAMS = 256


class TritonOps:
    """The operations of a decoder, each a launch or two of the kernels below.

    With `tune` set, whatever is met for the first time is timed in several ways, with cold caches.
    """

    def __init__(self, layout: RankLayout, context: int, device: torch.device) -> None:
        self.tune = False
        self._layout, self._g = layout, layout.geometry
        #: What was the fastest way, of each operation that was timed.
        self.fastest: dict[Any, str] = {}
        heads = layout.topology.heads(self._g)
        self._head_tiles = -(-heads // _HEADS)
        # A split takes two tiles at least, so that the loads of one overlap the sums of another.
        most = max(1, _PROGRAMS // self._head_tiles)
        self._splits = min(-(-context // (2 * _TOKENS)), most)
        #: Each split's sum over its tokens, and the (largest score, sum of weights) of it.
        partial = (self._splits, heads, self._g.kv_lora_rank)
        self._partial = torch.empty(partial, device=device)
        self._stats = torch.empty(self._splits, heads, 2, device=device)
        # Triton's interpreter, for tests without a GPU, cannot multiply bf16 tiles.
        self._dot = tl.bfloat16 if device.type == "cuda" else tl.float32

    def _run_fastest(self, key: Any, ways: dict[str, Callable[[], object]]) -> None:
        if self.tune and key not in self.fastest:
            times = {name: _milliseconds(way) for name, way in ways.items()}
            self.fastest[key] = min(times, key=times.__getitem__)
        ways[self.fastest.get(key, next(iter(ways)))]()

    def matvec(self, w: Tensor, x: Tensor, out: Tensor) -> None:
        """w [b, rows, k] bf16 by x [b, k] to out [b, rows]: b matrices, each by its own vector."""
        batch, rows, width = w.shape

        def way(size: int, columns: int, warps: int, stages: int) -> Callable[[], object]:
            columns = min(columns, _power(width))
            tile = min(size // columns, _power(rows))
            grid = (-(-rows // tile), batch)
            more = {"WIDTH": width, "ROWS": tile, "COLUMNS": columns, "STAGES": stages}
            args = (w, x, out, rows, x.stride(0))
            return lambda: _gemv[grid](*args, **more, num_warps=warps)

        ways = {f"triton {tile}": way(*tile) for tile in _GEMV_TILES}
        if w.device.type == "cuda":
            ways["cuBLAS"] = lambda: by_library(w, x, out)
        self._run_fastest((*w.shape, out.dtype), ways)

    def add_norm(self, h: Tensor, y: Tensor, gamma: Tensor, eps: float, x: Tensor) -> None:
        """h += y, y = 0, x = h normalised: [H] each."""
        width = len(h)
        more = {"WIDTH": width, "SIZE": _power(width)}
        _normalise[(1,)](h, y, gamma, x, eps, **more, num_warps=8)

    def latents(
        self, a: Tensor, q_norm: Any, kv_norm: Tensor, turn: Tensor, at: Tensor, q_in: Tensor, cache
    ) -> None:
        """a [q_lora + C + R]: q_in [q_lora] normalised, and a row of cache [T, C + R].

        The row is the latent, normalised, and the key, rotated: first elements of all pairs first.
        """
        q_lora, width, half = self._g.q_lora_rank or 0, self._g.kv_lora_rank, turn.shape[2]
        more = {"Q_LORA": q_lora, "LATENT": width, "HALF": half, "HALF_SIZE": _power(half)}
        more |= {"Q_SIZE": _power(q_lora), "SIZE": _power(width)}
        args = (a, kv_norm if q_norm is None else q_norm, kv_norm, turn, at, q_in, cache)
        grid = (2 if q_lora else 1,)
        _latents[grid](*args, LATENT_NORM_EPS, **more, num_warps=4)

    def attend(
        self, q_lat: Tensor, q: Tensor, cache: Tensor, turn: Tensor, at: Tensor, out: Tensor
    ) -> None:
        """Queries q_lat [h, C] and q [h, N + R] over the cache's live rows to out [h, C]."""
        heads, width = q_lat.shape
        nope, half = self._g.qk_nope_head_dim, turn.shape[2]
        scale = self._g.softmax_scale * 1.4426950408889634  # of powers of two
        both = {"LATENT": width, "TOKENS": _TOKENS}
        chunks = max(2, -(-len(cache) // (self._splits * _TOKENS)))
        more = {"CHUNKS": chunks, "NOPE": nope, "HALF": half, "HEADS": _HEADS, "DOT": self._dot}
        more |= {"SIZE": max(16, _power(width)), "HALF_SIZE": max(16, _power(half))}
        left = (self._partial, self._stats)
        sizes = (heads, self._splits)
        args = (q_lat, q, cache, turn, at, *left, *sizes, scale)
        grid = (self._head_tiles, self._splits)
        _attend[grid](*args, **both, **more, num_warps=8, num_stages=2)
        columns = min(128, _power(width))
        more = {"SPLITS": _power(self._splits), "COLUMNS": columns}
        grid = (heads, -(-width // columns))
        _merge[grid](*left, at, out, *sizes, **both, **more, num_warps=4)

    def route(
        self, scores: Tensor, slots: Tensor, shares: Tensor, chosen: Tensor, first: int
    ) -> None:
        """scores [E]: the experts chosen, and a layer's `unit_list`; its first slot is `first`."""
        g, topology = self._g, self._layout.topology
        more = {"GROUPS": g.n_group, "PER_GROUP": g.experts_per_group, "UNITS": g.expert_units}
        more |= {"TOP_GROUPS": g.topk_group, "TOP": g.num_experts_per_tok, "RANKS": topology.ranks}
        more |= {"GROUPS_SIZE": _power(g.n_group), "PER_GROUP_SIZE": _power(g.experts_per_group)}
        share = routed_share(self._layout)
        more |= {"SHARE": share, "SHARE_SIZE": _power(share)}
        args = (scores, slots, shares, chosen, first, g.routed_scaling_factor, self._layout.rank)
        _route[(1,)](*args, **more, num_warps=1)

    def units(
        self, w: dict[str, Tensor], x: Tensor, slots: Tensor, shares: Tensor, act: Tensor, y: Tensor
    ) -> None:
        """y [H] += of every unit at work: down @ (silu(gate @ x) * (up @ x) * share)."""
        hidden, count = len(x), len(slots)
        both = {"HIDDEN": hidden, "BLOCKS": -(-hidden // BLOCK)}
        gate_up = (w["ffn_gate_up"], w["ffn_gate_up_scale"], x, slots, shares, act)
        down = (w["ffn_down"], w["ffn_down_scale"], act, slots, y, count)

        def first(rows: int, columns: int, warps: int, stages: int) -> Callable[[], object]:
            columns = min(columns, _power(hidden))
            more = both | {"ROWS": rows, "COLUMNS": columns, "STAGES": stages}
            grid = (BLOCK // rows, count)
            return lambda: _gate_up[grid](*gate_up, **more, num_warps=warps)

        def second(rows: int, units: int, warps: int, stages: int) -> Callable[[], object]:
            more = both | {"ROWS": rows, "UNITS": units, "STAGES": stages}
            grid = (-(-hidden // rows), -(-count // units))
            return lambda: _down[grid](*down, **more, num_warps=warps)

        ways = {str(tile): first(*tile) for tile in _GATE_UP_TILES}
        self._run_fastest(("gate_up", count), ways)
        ways = {str(tile): second(*tile) for tile in _DOWN_TILES}
        self._run_fastest(("down", count), ways)


def _power(size: int) -> int:
    """The power of two at or above a size."""
    return 1 << max(0, size - 1).bit_length()


def _milliseconds(way: Callable[[], object]) -> float:
    try:
        return float(triton.testing.do_bench(way, warmup=5, rep=20))
    except (RuntimeError, TypeError):  # this GPU or PyTorch cannot
        return math.inf


# ---- kernels ----


@triton.jit
def _gemv(
    w, x, out, rows, x_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1)
    here = row < rows
    x += batch * x_stride
    w += (batch * rows + row).to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(w + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total += tile.to(tl.float32) * values[None, :]
    tl.store(out + batch * rows + row, tl.sum(total, 1), mask=here)


@triton.jit
def _normalise(h, y, gamma, x, eps, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    inside = i < WIDTH
    v = tl.load(h + i, mask=inside, other=0.0) + tl.load(y + i, mask=inside, other=0.0)
    tl.store(h + i, v, mask=inside)
    tl.store(y + i, tl.zeros_like(v), mask=inside)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    tl.store(x + i, v * scale * tl.load(gamma + i, mask=inside, other=0.0), mask=inside)


@triton.jit
def _latents(
    a, q_norm, kv_norm, turn, at, q_in, cache, eps, Q_LORA: tl.constexpr, LATENT: tl.constexpr,
    HALF: tl.constexpr, Q_SIZE: tl.constexpr, SIZE: tl.constexpr, HALF_SIZE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 1:
        j = tl.arange(0, Q_SIZE)  # Triton gives a name one type in both branches
        u = tl.load(a + j, mask=j < Q_LORA, other=0.0)
        q_scale = tl.rsqrt(tl.sum(u * u, 0) / Q_LORA + eps)
        q_gamma = tl.load(q_norm + j, mask=j < Q_LORA, other=0.0)
        tl.store(q_in + j, u * q_scale * q_gamma, mask=j < Q_LORA)
    else:
        position = tl.load(at)
        cache += position.to(tl.int64) * (LATENT + 2 * HALF)
        i = tl.arange(0, SIZE)
        v = tl.load(a + Q_LORA + i, mask=i < LATENT, other=0.0)
        scale = tl.rsqrt(tl.sum(v * v, 0) / LATENT + eps)
        gamma = tl.load(kv_norm + i, mask=i < LATENT, other=0.0)
        tl.store(cache + i, v * scale * gamma, mask=i < LATENT)
        r = tl.arange(0, HALF_SIZE)
        inside = r < HALF
        even = tl.load(a + Q_LORA + LATENT + 2 * r, mask=inside, other=0.0)
        odd = tl.load(a + Q_LORA + LATENT + 2 * r + 1, mask=inside, other=0.0)
        cos = tl.load(turn + position * 2 * HALF + r, mask=inside, other=0.0)
        sin = tl.load(turn + position * 2 * HALF + HALF + r, mask=inside, other=0.0)
        tl.store(cache + LATENT + r, even * cos - odd * sin, mask=inside)
        tl.store(cache + LATENT + HALF + r, even * sin + odd * cos, mask=inside)


@triton.jit
def _attend(
    q_lat, q, cache, turn, at, partial, stats, heads, splits, scale, LATENT: tl.constexpr,
    TOKENS: tl.constexpr, CHUNKS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, SIZE: tl.constexpr, HALF_SIZE: tl.constexpr,
):  # fmt: skip
    live = tl.load(at) + 1
    length = tl.cdiv(tl.cdiv(live, splits), TOKENS) * TOKENS
    split = tl.program_id(1)
    start = split * length
    if start >= live:
        return
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, SIZE)
    r = tl.arange(0, HALF_SIZE)
    own = (head < heads)[:, None] & (c < LATENT)[None, :]
    own_r = (head < heads)[:, None] & (r < HALF)[None, :]
    q_c = tl.load(q_lat + head[:, None] * LATENT + c[None, :], mask=own, other=0.0).to(DOT)
    pairs = q + head[:, None] * (NOPE + 2 * HALF) + NOPE + 2 * r[None, :]
    even = tl.load(pairs, mask=own_r, other=0.0)
    odd = tl.load(pairs + 1, mask=own_r, other=0.0)
    cos = tl.load(turn + (live - 1) * 2 * HALF + r, mask=r < HALF, other=0.0)[None, :]
    sin = tl.load(turn + (live - 1) * 2 * HALF + HALF + r, mask=r < HALF, other=0.0)[None, :]
    q_even = (even * cos - odd * sin).to(DOT)
    q_odd = (even * sin + odd * cos).to(DOT)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, SIZE], tl.float32)
    end = tl.minimum(start + length, live)
    for i in range(CHUNKS):  # as many as a full cache takes; past the end nothing is loaded
        t = start + i * TOKENS + tl.arange(0, TOKENS)
        row = cache + t.to(tl.int64) * (LATENT + 2 * HALF)
        inside = (t < end)[:, None] & (c < LATENT)[None, :]
        inside_r = (r < HALF)[:, None] & (t < end)[None, :]
        k = tl.load(row[:, None] + c[None, :], mask=inside, other=0.0).to(DOT)
        keys = row[None, :] + LATENT + r[:, None]
        k_even = tl.load(keys, mask=inside_r, other=0.0).to(DOT)
        k_odd = tl.load(keys + HALF, mask=inside_r, other=0.0).to(DOT)
        score = tl.dot(q_c, tl.trans(k))
        score = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even, score))
        score = tl.where((t < end)[None, :], score * scale, float("-inf"))
        now = tl.maximum(most, tl.max(score, 1))
        p = tl.exp2(score - now[:, None])
        fade = tl.exp2(most - now)
        weight = weight * fade + tl.sum(p, 1)
        total = tl.dot(p.to(DOT), k, total * fade[:, None])
        most = now
    place = split * heads + head
    tl.store(partial + place[:, None] * LATENT + c[None, :], total, mask=own)
    tl.store(stats + 2 * place, most, mask=head < heads)
    tl.store(stats + 2 * place + 1, weight, mask=head < heads)


@triton.jit
def _merge(
    partial, stats, at, out, heads, splits, LATENT: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    live = tl.load(at) + 1
    length = tl.cdiv(tl.cdiv(live, splits), TOKENS) * TOKENS
    head = tl.program_id(0)
    place = tl.arange(0, SPLITS) * heads + head
    used = tl.arange(0, SPLITS) < tl.cdiv(live, length)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.load(stats + 2 * place, mask=used, other=float("-inf"))
    weight = tl.load(stats + 2 * place + 1, mask=used, other=0.0)
    share = tl.exp2(most - tl.max(most, 0))
    inside = used[:, None] & (c < LATENT)[None, :]
    values = tl.load(partial + place[:, None] * LATENT + c[None, :], mask=inside, other=0.0)
    total = tl.sum(values * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + head * LATENT + c, total, mask=c < LATENT)


@triton.jit
def _route(
    scores, slots, shares, chosen, first, scale, rank, GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr, UNITS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP: tl.constexpr,
    RANKS: tl.constexpr, GROUPS_SIZE: tl.constexpr, PER_GROUP_SIZE: tl.constexpr,
    SHARE: tl.constexpr, SHARE_SIZE: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUPS_SIZE)
    member = tl.arange(0, PER_GROUP_SIZE)
    expert = group[:, None] * PER_GROUP + member[None, :]
    real = (group < GROUPS)[:, None] & (member < PER_GROUP)[None, :]
    score = tl.load(scores + expert, mask=real, other=float("-inf"))
    p = tl.exp(score - tl.max(tl.max(score, 1), 0))
    p = p / tl.sum(tl.sum(p, 1), 0)
    best = tl.where(group < GROUPS, tl.max(p, 1), -1.0)
    allowed = group < 0
    for _ in range(TOP_GROUPS):
        top = group == tl.min(tl.where(best == tl.max(best, 0), group, GROUPS_SIZE), 0)
        allowed = allowed | top
        best = tl.where(top, -1.0, best)
    p = tl.where(real, tl.where(allowed[:, None], p, 0.0), -1.0)
    k = tl.arange(0, SHARE_SIZE)
    for i in range(TOP):
        value = tl.max(tl.max(p, 1), 0)
        index = tl.min(tl.min(tl.where(p == value, expert, GROUPS * PER_GROUP), 1), 0)
        p = tl.where(expert == index, -1.0, p)
        tl.store(chosen + i, index)
        begin = index * UNITS  # this rank's units of the expert are every RANKS-th
        unit = begin + (rank + RANKS - begin % RANKS) % RANKS + k * RANKS
        slot = tl.where(unit < begin + UNITS, first + unit // RANKS, -1)
        tl.store(slots + i * SHARE + k, slot, mask=k < SHARE)
        tl.store(shares + i * SHARE + k, k * 0.0 + value * scale, mask=k < SHARE)


@triton.jit
def _gate_up(
    w, scales, x, slots, shares, act, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(1)
    slot = tl.load(slots + entry).to(tl.int64)
    if slot < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w += slot * (256 * HIDDEN) + row[:, None] * (2 * HIDDEN)  # a gate row, then its up row
    scales += slot * (2 * BLOCKS)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        both = w + column[None, :]
        values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        gate_x = values * tl.load(scales + column // 128, mask=inside, other=0.0)
        up_x = values * tl.load(scales + BLOCKS + column // 128, mask=inside, other=0.0)
        gate_w = tl.load(both, mask=inside[None, :], other=0.0)
        up_w = tl.load(both + HIDDEN, mask=inside[None, :], other=0.0)
        gate += gate_w.to(tl.float32) * gate_x[None, :]
        up += up_w.to(tl.float32) * up_x[None, :]
    g = tl.sum(gate, 1)
    value = g * tl.sigmoid(g) * tl.sum(up, 1) * tl.load(shares + entry)
    tl.store(act + entry * 128 + row, value)


@triton.jit
def _down(
    w, scales, act, slots, y, count, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 128)
    block = tl.program_id(0) * ROWS // 128
    total = tl.zeros([ROWS, 128], tl.float32)
    for i in tl.range(0, UNITS, num_stages=STAGES):
        entry = tl.program_id(1) * UNITS + i
        slot = tl.load(slots + entry, mask=entry < count, other=-1).to(tl.int64)
        own = slot >= 0
        inside = (row < HIDDEN)[:, None] & own
        tile = w + slot * (HIDDEN * 128) + row[:, None] * 128 + column[None, :]
        values = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + slot * BLOCKS + block, mask=own, other=0.0)
        part = tl.load(act + entry * 128 + column, mask=own, other=0.0) * scale
        total += values * part[None, :]
    tl.atomic_add(y + row, tl.sum(total, 1), mask=row < HIDDEN, sem="relaxed")
