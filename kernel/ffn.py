"""FFN units: E4M3 gate/up and down of the units at work, always-on and routed ones alike.

Contract
--------
A unit is 128 columns of an FFN's intermediate dimension. The units at work on a rank are numbered
from 0: first the always-on ones (all of a dense layer's, or the shared experts'), whose slots in
the shard are contiguous, then those of the routed experts, whose slots the scout lists.

`gate_up` leaves act[i] = silu(gate @ x) * (up @ x) * weight, [units, 128] fp32, each pair of rows
computed by one warp of the CTA that owns it. `down` gives the CTA's own rows of H the sum over all
of the rank's units: every CTA reads its few rows of every unit. So nothing is reduced over CTAs.

Arithmetic
----------
E4M3 to fp16 is exact, and takes half an instruction an element; fp16 to fp32, multiply and add
would take two more. So the tensor cores multiply, with fp32 sums. The fp32 vector is split into two
fp16, v = hi + lo, after a power of two F has brought its largest magnitude near 2^10: the error is
below 2^-22 of the value and 2^-34 of the largest, and dividing by F is exact.

m16n8k16 multiplies a [16, 16] by b [16, 8]; a lane holds of b the four values k = {2 q, 2 q + 1,
2 q + 8, 2 q + 9} of column n, with n = lane / 4, q = lane % 4, and of a the same k of rows n and
n + 8. Which elements these k stand for is ours to choose, as long as a and b agree.

gate and up, a row at a time: a lane's elements of the row are its column n of b, and hi and lo of x
at the same elements its rows n and n + 8 of a. So each lane loads only x that belongs to its
weights. Of the product only the diagonal is meaningful: column n times rows n and n + 8.
The block scales go into x: x * scale of gate and of up are kept beside x for the unit at work.

down, eight rows at a time: row n is column n of b, hi and lo of act are rows 0 and 1 of a, and the
other rows are 0. The scale is the same for all 128 columns, and multiplies the sum.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env
from dsv2mk.kernel.gemv import CONSUMER_THREADS, reduce_lanes
from dsv2mk.kernel.hops import publish_row, sync
from dsv2mk.kernel.plan import STEP, WARPS, vector_bytes
from dsv2mk.kernel.stream import deal, is_mine, land, open_slot, release, run_of, slot_address
from dsv2mk.manifests.scheme import BLOCK

#: Rows of an n8 tile.
_ROWS = 8
#: Biased exponent that the largest magnitude is brought to: 2^10.
_TOP = 127 + 10


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


@cute.jit
def store_units(env: Env):
    """At launch: the rank's units of a dense layer, its routed and all its units of another."""
    g = env.plan.geometry
    dense = g.layer_units(0) if g.first_k_dense_replace else 0
    if env.thread == 0:
        for index, units in enumerate((dense, g.routed_units, g.routed_units + g.shared_units)):
            ptx.sts(env.at("units") + index * 4, Int32(rank_units(env, units)))


def units_of(env: Env, layer):
    """The always-on units of a layer, and where its routed ones start."""
    dense_layers = env.plan.geometry.first_k_dense_replace
    dense, routed, total = (ptx.lds(env.at("units") + index * 4) for index in range(3))
    is_dense = layer < dense_layers
    moe = dense_layers * dense + (layer - dense_layers) * total
    start = cutlass.select_(is_dense, layer * dense, moe)
    return Units(
        always=cutlass.select_(is_dense, dense, total - routed),
        slot=cutlass.select_(is_dense, start, start + routed),
        routed_slot=start,
    )


def power_for(top):
    """(F, 1 / F): a power of two that brings magnitudes up to `top` near 2^10."""
    exponent = cutlass.max((ptx.bits(top) >> 23) & 255, Int32(_TOP - 127 + 1))
    return ptx.as_f32((Int32(_TOP + 127) - exponent) << 23), ptx.as_f32(
        (exponent - (_TOP - 127)) << 23
    )


def split(a, b):
    """Words (hi, lo) of two fp16 each, with (a, b) = hi + lo."""
    hi = ptx.pack_f16(a, b)
    high_a, high_b = ptx.unpack_f16(hi)
    return hi, ptx.pack_f16(a - high_a, b - high_b)


# ---- gate and up ----


@cute.jit
def push_gate_up(env: Env, policy, chunk, slot, index, first, layer):
    """Issue one chunk of pairs, `index` counted from the unit's first.

    The unit's scales come with the first chunk that the CTA has of it: `first` for its run's.
    """
    plan = env.plan
    matrix = plan.gate_up
    scales = 8 * plan.blocks
    count = Int32(matrix.chunk_bytes)
    scaled = first or index == 0
    if scaled:
        count = count + scales
    if is_mine(env, chunk):
        if open_slot(env, chunk, matrix.window, count, layer) != 0:
            if env.lane == 0:
                bar = env.at("full") + (chunk % plan.slots) * 8
                at = slot_address(env, chunk)
                pairs = Int64(slot) * BLOCK + Int64(index * matrix.chunk_rows)
                source = env.param("gate_up") + pairs * matrix.row_bytes
                ptx.bulk_copy(at, source, Int32(matrix.chunk_bytes), bar, policy)
                if scaled:
                    source = env.param("gate_up_scale") + Int64(slot) * scales
                    ptx.bulk_copy(at + plan.slot, source, Int32(scales), bar, policy)


@cute.jit
def _scale_x(env: Env, scales):
    """Store x * scale * F, split, for gate and for up; 1 / F. Ends with the consumers in step."""
    plan = env.plan
    blocks = plan.blocks
    x = env.at("x")
    size = vector_bytes(plan.geometry.hidden_size)
    highest = Int32(0)
    for index in cutlass.range_constexpr(-(-2 * blocks // 32)):
        block = env.lane + 32 * index
        if block < 2 * blocks:
            highest = cutlass.max(highest, ptx.lds(scales + block * 4) & 0x7FFFFFFF)
    highest = ptx.as_f32(ptx.warp_max_u32(highest))
    power, undo = power_for(ptx.lds_f32(env.at("x_top")) * highest)
    for at in cutlass.range(env.thread, size // 16, CONSUMER_THREADS, unroll=1):
        # Sixteen bytes hold four elements: see gemv.place.
        block = at // 64 * 2 + at % 32 // 16
        values = ptx.lds4_f32(x + at * 16)
        for part in cutlass.range_constexpr(2):
            scale = ptx.lds_f32(scales + (block + part * blocks) * 4) * power
            hi, lo = split(values[0] * scale, values[1] * scale)
            hi2, lo2 = split(values[2] * scale, values[3] * scale)
            ptx.sts4(x + (part + 1) * size + at * 16, hi, lo, hi2, lo2)
    sync(env)
    return undo


@cute.jit
def _pairs(env: Env, data, count: cutlass.Constexpr):
    """Lanes' shares of F * gate and F * up of `count` pairs: [gate, up] a pair."""
    width = env.plan.geometry.hidden_size
    size = vector_bytes(width)
    # A row's even and odd products go to sums of their own where registers allow it.
    chains = 2 if count == 1 else 1
    sums = [Float32(0.0) for _ in range(8 * count * chains)]
    for step in cutlass.range(width // (32 * STEP), unroll=2):
        at = data + env.lane * STEP + step * (32 * STEP)
        for part in cutlass.range_constexpr(2):
            at_x = env.at("x") + (part + 1) * size + env.lane * 16 + step * 1024
            x0, x1 = ptx.lds4(at_x), ptx.lds4(at_x + 512)
            for row in cutlass.range_constexpr(count):
                words = ptx.lds2(at + (2 * row + part) * width)
                b = ptx.e4m3_to_f16(words[0]) + ptx.e4m3_to_f16(words[1])
                first = (2 * row + part) * 4 * chains
                second = first + 4 * (chains - 1)
                c = ptx.mma_f16(sums[first : first + 4], x0, b[0], b[1])
                for i in cutlass.range_constexpr(4):
                    sums[first + i] = c[i]
                c = ptx.mma_f16(sums[second : second + 4], x1, b[2], b[3])
                for i in cutlass.range_constexpr(4):
                    sums[second + i] = c[i]
    out = []
    column = env.lane // 4
    for row in cutlass.range_constexpr(2 * count):
        own = sums[row * 4 * chains : (row + 1) * 4 * chains]
        even, odd = own[0] + own[2], own[1] + own[3]
        if const_expr(chains == 2):
            even, odd = even + (own[4] + own[6]), odd + (own[5] + own[7])
        value = cutlass.select_(column % 2 == 0, even, odd)
        out.append(cutlass.select_(env.lane % 4 == column // 2, value, Float32(0.0)))
    return out


@cute.jit
def _gate_up_chunk(env: Env, chunk, unit, first_pair, undo, weight, layer):
    """One warp: the pairs of a chunk; unit: its number among those at work."""
    matrix = env.plan.gate_up
    data = land(env, chunk, layer)
    out = env.exchange("act", layer) + Int64(unit * BLOCK + first_pair) * 4
    together = min(2, matrix.chunk_rows)
    for row in cutlass.range_constexpr(0, matrix.chunk_rows, together):
        sums = _pairs(env, data + row * matrix.row_bytes, together)
        if const_expr(row + together == matrix.chunk_rows):
            release(env, chunk)
        for i in cutlass.range_constexpr(together):
            gate = reduce_lanes(sums[2 * i], 32) * undo
            up = reduce_lanes(sums[2 * i + 1], 32) * undo
            if env.lane == 0:
                bottom = Float32(1.0) + ptx.exp2(gate * Float32(-math.log2(math.e)))
                act = ptx.divide(gate, bottom) * up * weight
                ptx.stg_f32(out + (row + i) * 4, act)


@cute.jit
def gate_up(env: Env, chunk, offset, count, routed: cutlass.Constexpr, layer):
    """gate and up of `count` units, which are at work from number `offset` on.

    Returns the number of the chunk after them.
    """
    env = env.again()
    matrix = env.plan.gate_up
    first, last = deal(env, count * matrix.chunks)
    begin = first
    while begin < last:
        unit = begin // matrix.chunks
        end = cutlass.min((unit + 1) * matrix.chunks, last)
        start = chunk + begin - first
        scales = land(env, start, layer) + env.plan.slot
        undo = _scale_x(env, scales)
        weight = Float32(1.0)
        if const_expr(routed):
            weight = ptx.lds_f32(env.at("unit_weight") + unit * 4)
        for index in cutlass.range(begin + env.warp, end, WARPS, unroll=1):
            pair = index % matrix.chunks * matrix.chunk_rows
            at = chunk + index - first
            _gate_up_chunk(env, at, offset + unit, pair, undo, weight, layer)
        sync(env)
        begin = end
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
            if is_mine(env, at):
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
    tiles = plan.down_rows // _ROWS
    first, end = run_of(env, "rows")
    groups = (count + plan.down_units - 1) // plan.down_units
    at = chunk
    for top in cutlass.range(first, end, plan.down_rows, unroll=1):
        rows = cutlass.min(end - top, plan.down_rows)
        sums = [Float32(0.0) for _ in range(2 * tiles)]
        for group in cutlass.range(env.warp, groups, WARPS, unroll=1):
            data = land(env, at + group, layer)
            for i in cutlass.range(plan.down_units, unroll=1):
                index = group * plan.down_units + i
                if index < count:
                    slot = slot_of(env, units, index)
                    address = env.param("down_scale") + Int64(slot) * (4 * plan.blocks)
                    scales = data + plan.slot + i * plan.down_scale
                    scales = scales + (address & Int64(15)).to(Int32)
                    at_row = data + i * (plan.down_rows * BLOCK)
                    sums = _down_unit(env, at_row, scales, index, top, sums)
            release(env, at + group)
        for tile in cutlass.range_constexpr(tiles):
            for part in cutlass.range_constexpr(2):
                total = sums[2 * tile + part]
                total = total + ptx.shuffle_xor(total, 4)  # hi and lo
                if env.lane < 4:
                    row = tile * _ROWS + 2 * env.lane + part
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
def _down_unit(env: Env, data, scales, index, top, sums):
    """Add one unit's rows; sums: a lane's columns 2 q and 2 q + 1 of each tile of eight rows."""
    a = [Int32(0) for _ in range(16)]
    if env.lane < 8:
        # Lanes 0 to 3 hold row 0 of a, which is hi, lanes 4 to 7 row 1, which is lo.
        at = env.at("x") + index * (4 * BLOCK) + env.lane // 4 * (2 * BLOCK) + env.lane % 4 * 16
        a = ptx.lds4(at) + ptx.lds4(at + 64) + ptx.lds4(at + 128) + ptx.lds4(at + 192)
    undo = ptx.lds_f32(env.at("undo") + index * 4)
    zero = Int32(0)
    own = data + env.lane // 4 * BLOCK + env.lane % 4 * 16
    for tile in cutlass.range_constexpr(len(sums) // 2):
        c = [Float32(0.0) for _ in range(4)]
        for half in cutlass.range_constexpr(2):
            words = ptx.lds4(own + tile * (_ROWS * BLOCK) + half * (BLOCK // 2))
            for i in cutlass.range_constexpr(4):
                b = ptx.e4m3_to_f16(words[i])
                k = 2 * (4 * half + i)
                c = ptx.mma_f16(c, [a[k], zero, a[k + 1], zero], b[0], b[1])
        row = top + tile * _ROWS + env.lane % 4 * 2
        for part in cutlass.range_constexpr(2):
            scale = ptx.lds_f32(scales + (row + part) // BLOCK * 4) * undo
            sums[2 * tile + part] = ptx.fma(c[part], scale, sums[2 * tile + part])
    return sums


@cute.jit
def _load_act(env: Env, count, layer):
    """Fetch act of all units at work, scaled and split. Ends with the consumers in step.

    A warp has a unit at a time, a lane four of its elements. Element e is in half e / 64 of the
    unit, belongs to lane q = e / 16 % 4, and there to product e / 4 % 4. Stored are, for hi and
    then lo, [half, product / 2, q, product % 2] pairs of words.
    """
    source = env.exchange("act", layer)
    element = env.lane * 4
    product = element // 4 % 4
    place = element // 64 * 128 + product // 2 * 64 + element // 16 % 4 * 16 + product % 2 * 8
    for unit in cutlass.range(env.warp, count, WARPS, unroll=4):
        a, b, c, d = ptx.ld4_f32(source + Int64(unit * BLOCK + element) * 4)
        top = ptx.maximum(
            ptx.maximum(ptx.absolute(a), ptx.absolute(b)),
            ptx.maximum(ptx.absolute(c), ptx.absolute(d)),
        )
        top = ptx.as_f32(ptx.warp_max_u32(ptx.bits(top)))
        power, undo = power_for(top)
        hi, lo = split(a * power, b * power)
        hi2, lo2 = split(c * power, d * power)
        at = env.at("x") + unit * (4 * BLOCK) + place
        ptx.sts2(at, hi, hi2)
        ptx.sts2(at + 2 * BLOCK, lo, lo2)
        if env.lane == 0:
            ptx.sts_f32(env.at("undo") + unit * 4, undo)
    sync(env)
