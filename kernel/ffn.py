"""FFN units: E4M3 gate/up and down of the units at work, always-on and routed ones alike.

Contract
--------
A unit is 128 columns of an FFN's intermediate dimension. The units at work on a rank are numbered
from 0: first the always-on ones (all of a dense layer's, or the shared experts'), whose slots in
the shard are contiguous, then those of the routed experts, whose slots the scout lists.

`gate_up` leaves act[i] = silu(gate @ x) * (up @ x) * weight, [units, 128] fp32, each pair of rows
computed by one warp of the CTA that owns it. `down` gives the CTA's own rows of H the sum over all
of the rank's units: every CTA reads its few rows of every unit. So nothing is reduced over CTAs.

Scales (fp32, one a 128 x 128 block) come with the rows in the slot, behind the weights.

Down keeps one sum a lane and group of four rows in registers over all units of the warp, and
reduces over lanes and warps once, at the end, in a fixed order. A vector act[i] is stored as

    element e: lane l = e / 16, quarter f = e / 4 % 4; address (f * 8 + l) * 16 + e % 4 * 4
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env
from dsv2mk.kernel.gemv import CONSUMER_THREADS, load_x, reduce_lanes
from dsv2mk.kernel.hops import publish_row, sync
from dsv2mk.kernel.plan import DOWN_STEP, STEP, WARPS
from dsv2mk.kernel.stream import deal, land, open_slot, release, run_of, slot_address
from dsv2mk.manifests.scheme import BLOCK

_LANES = BLOCK // DOWN_STEP


@dataclass(kw_only=True)
class Units:
    """The units of a layer that are at work on this rank."""

    always: Any  # Int32: number of always-on units
    slot: Any  # Int32: slot of the first of them in the shard
    routed_slot: Any  # Int32: slot of the layer's first routed unit


def rank_units(env: Env, units):
    """How many of the first `units` units of a layer this rank owns."""
    ranks = env.plan.ranks
    return units if ranks == 1 else (units - env.param("rank") + (ranks - 1)) // ranks


def units_of(env: Env, layer):
    """The always-on units of a layer, and where its routed ones start."""
    g = env.plan.geometry
    dense_layers = g.first_k_dense_replace
    dense = Int32(rank_units(env, g.layer_units(0) if dense_layers else 0))
    routed = Int32(rank_units(env, g.routed_units))
    total = Int32(rank_units(env, g.routed_units + g.shared_units))
    is_dense = layer < dense_layers
    start = cutlass.select_(is_dense, layer * dense, dense_layers * dense + (layer - dense_layers) * total)
    return Units(
        always=cutlass.select_(is_dense, dense, total - routed),
        slot=cutlass.select_(is_dense, start, start + routed),
        routed_slot=start,
    )


# ---- gate and up ----


@cute.jit
def push_gate_up(env: Env, policy, chunk, slot, index, layer):
    """Issue one chunk of pairs, and the unit's scales; `index` counts from the unit's first pair."""
    plan = env.plan
    matrix = plan.gate_up
    scales = 8 * plan.blocks
    count = Int32(matrix.chunk_bytes + scales)
    if open_slot(env, chunk, matrix.window, count, layer) != 0:
        if env.lane == 0:
            bar = env.at("full") + (chunk % plan.slots) * 8
            at = slot_address(env, chunk)
            pairs = Int64(slot) * BLOCK + Int64(index * matrix.chunk_rows)
            source = env.param("gate_up") + pairs * matrix.row_bytes
            ptx.bulk_copy(at, source, Int32(matrix.chunk_bytes), bar, policy)
            source = env.param("gate_up_scale") + Int64(slot) * scales
            ptx.bulk_copy(at + plan.slot, source, Int32(scales), bar, policy)


@cute.jit
def _pairs(env: Env, data, scales, x, count: cutlass.Constexpr):
    """Lanes' shares of gate and up of `count` pairs: [gate, up] a pair."""
    plan = env.plan
    width = plan.geometry.hidden_size
    sums = [Float32(0.0) for _ in range(2 * count)]
    for step in cutlass.range(width // (32 * STEP), unroll=4):
        xs = load_x(x, step, 32, env.lane)
        at = data + env.lane * STEP + step * (32 * STEP)
        block = scales + (2 * step + env.lane // 16) * 4
        for part in cutlass.range_constexpr(2):
            scale = ptx.lds_f32(block + part * (4 * plan.blocks))
            for row in cutlass.range_constexpr(count):
                words = ptx.lds2(at + (2 * row + part) * width)
                product = Float32(0.0)
                for i, value in enumerate(ptx.e4m3x4(words[0]) + ptx.e4m3x4(words[1])):
                    product = ptx.fma(value, xs[i], product)
                sums[2 * row + part] = ptx.fma(product, scale, sums[2 * row + part])
    return sums


@cute.jit
def gate_up_chunk(env: Env, chunk, unit, first_pair, weight, layer):
    """One warp: the pairs of a chunk; unit: its number among those at work."""
    matrix = env.plan.gate_up
    data = land(env, chunk, layer)
    out = env.exchange("act", layer) + Int64(unit * BLOCK + first_pair) * 4
    together = min(2, matrix.chunk_rows)
    for row in cutlass.range_constexpr(0, matrix.chunk_rows, together):
        at = data + row * matrix.row_bytes
        sums = _pairs(env, at, data + env.plan.slot, env.at("x"), together)
        for i in cutlass.range_constexpr(together):
            gate = reduce_lanes(sums[2 * i], 32)
            up = reduce_lanes(sums[2 * i + 1], 32)
            if const_expr(row + i + 1 == matrix.chunk_rows):
                release(env, chunk)
            if env.lane == 0:
                bottom = Float32(1.0) + ptx.exp2(gate * Float32(-math.log2(math.e)))
                act = ptx.divide(gate, bottom) * up * weight
                ptx.stg_f32(out + (row + i) * 4, act)


@cute.jit
def always_on(env: Env, chunk, units, layer):
    """gate and up of the always-on units; the number of the chunk after them."""
    env = env.again()
    matrix = env.plan.gate_up
    first, last = deal(env, units.always * matrix.chunks)
    for index in cutlass.range(first + env.warp, last, WARPS, unroll=1):
        unit, pair = index // matrix.chunks, index % matrix.chunks * matrix.chunk_rows
        at = chunk + index - first
        gate_up_chunk(env, at, unit, pair, Float32(1.0), layer)
    return chunk + last - first


@cute.jit
def routed(env: Env, chunk, units, count, layer):
    """gate and up of the routed units, of which the scout has listed `count`."""
    env = env.again()
    matrix = env.plan.gate_up
    first, last = deal(env, count * matrix.chunks)
    for index in cutlass.range(first + env.warp, last, WARPS, unroll=1):
        unit, pair = index // matrix.chunks, index % matrix.chunks * matrix.chunk_rows
        weight = ptx.lds_f32(env.at("unit_weight") + unit * 4)
        at = chunk + index - first
        gate_up_chunk(env, at, units.always + unit, pair, weight, layer)
    return chunk + last - first


# ---- down ----


@cute.jit
def slot_of(env: Env, units, index):
    """Slot in the shard of the index-th unit at work."""
    slot = units.slot + index
    if index >= units.always:
        slot = ptx.lds(env.at("unit") + (index - units.always) * 4)
    return slot


@cute.jit
def push_down(env: Env, policy, chunk, units, count, layer):
    """Issue the CTA's rows of all `count` units at work; the number of the chunk after them."""
    plan = env.plan
    hidden = plan.geometry.hidden_size
    first, end = run_of(env, "rows")
    groups = (count + plan.down_units - 1) // plan.down_units
    at = chunk
    for top in cutlass.range(first, end, plan.down_rows, unroll=1):
        rows = cutlass.min(end - top, plan.down_rows)
        for group in cutlass.range(groups, unroll=1):
            here = cutlass.min(count - group * plan.down_units, plan.down_units)
            size = here * (rows * BLOCK + plan.down_scale)
            if open_slot(env, at, plan.down_window, size, layer) != 0:
                if env.lane < here:
                    slot = slot_of(env, units, group * plan.down_units + env.lane)
                    bar = env.at("full") + (at % plan.slots) * 8
                    data = slot_address(env, at)
                    source = env.param("down") + (Int64(slot) * hidden + Int64(top)) * BLOCK
                    to = data + env.lane * (plan.down_rows * BLOCK)
                    ptx.bulk_copy(to, source, rows * BLOCK, bar, policy)
                    source = env.param("down_scale") + Int64(slot) * (4 * plan.blocks)
                    to = data + plan.slot + env.lane * plan.down_scale
                    size = Int32(plan.down_scale)
                    ptx.bulk_copy(to, source & Int64(-16), size, bar, policy)
            at = at + 1
    return at


@cute.jit
def down(env: Env, chunk, units, count, layer):
    """This rank's share of the CTA's rows of H; the number of the chunk after them."""
    env = env.again()
    plan = env.plan
    _load_act(env, count, layer)
    turns = plan.down_rows // 4
    first, end = run_of(env, "rows")
    groups = (count + plan.down_units - 1) // plan.down_units
    own = env.lane // _LANES
    lane = env.lane % _LANES
    at = chunk
    for top in cutlass.range(first, end, plan.down_rows, unroll=1):
        rows = cutlass.min(end - top, plan.down_rows)
        sums = [Float32(0.0) for _ in range(turns)]
        for group in cutlass.range(env.warp, groups, WARPS, unroll=1):
            data = land(env, at + group, layer)
            for i in cutlass.range(plan.down_units, unroll=1):
                index = group * plan.down_units + i
                if index < count:
                    xs = []
                    for part in cutlass.range_constexpr(4):
                        at_x = env.at("x") + index * (4 * BLOCK) + lane * 16 + part * (16 * _LANES)
                        xs += ptx.lds4_f32(at_x)
                    slot = slot_of(env, units, index)
                    address = env.param("down_scale") + Int64(slot) * (4 * plan.blocks)
                    scales = data + plan.slot + i * plan.down_scale + (address & Int64(15)).to(Int32)
                    for turn in cutlass.range_constexpr(turns):
                        row = turn * 4 + own
                        words = ptx.lds4(data + i * (plan.down_rows * BLOCK) + row * BLOCK + lane * 16)
                        product = Float32(0.0)
                        for part in cutlass.range_constexpr(4):
                            for j, value in enumerate(ptx.e4m3x4(words[part])):
                                product = ptx.fma(value, xs[4 * part + j], product)
                        scale = ptx.lds_f32(scales + (top + row) // BLOCK * 4)
                        sums[turn] = ptx.fma(product, scale, sums[turn])
            release(env, at + group)
        for turn in cutlass.range_constexpr(turns):
            total = reduce_lanes(sums[turn], _LANES)
            if lane == 0:
                row = turn * 4 + own
                ptx.sts_f32(env.at("down") + (env.warp * plan.down_rows + row) * 4, total)
        sync(env)
        if env.thread < rows:
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(WARPS):
                total = total + ptx.lds_f32(
                    env.at("down") + (warp * plan.down_rows + env.thread) * 4
                )
            publish_row(env, "down", layer, top + env.thread, total)
        sync(env)
        at = at + groups
    return at


@cute.jit
def _load_act(env: Env, count, layer):
    """Fetch act of all units at work. Ends with the consumers in step."""
    source = env.exchange("act", layer)
    for index in cutlass.range(env.thread, count * (BLOCK // 4), CONSUMER_THREADS, unroll=8):
        unit, element = index // (BLOCK // 4), index % (BLOCK // 4) * 4
        a, b, c, d = ptx.ld4_f32(source + Int64(index) * 16)
        part, lane = element // 4 % 4, element // DOWN_STEP
        at = env.at("x") + unit * (4 * BLOCK) + (part * _LANES + lane) * 16
        ptx.sts4(at, ptx.bits(a), ptx.bits(b), ptx.bits(c), ptx.bits(d))
    sync(env)
