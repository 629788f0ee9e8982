"""The head: final norm, lm_head, and the argmax over all CTAs and ranks.

Contract
--------
Each CTA computes its run of vocabulary rows; each warp keeps the best of its rows, then the CTA
the best of its warps, and the hop `best` carries one (value, token) a CTA to all. Every CTA picks
the same winner: the highest value, of equals the lowest token. Rows that pad the vocabulary never
win. A value that is not a number never wins either; if none is a number, token 0 does.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env
from dsv2mk.kernel.gemv import long_rows, reduce_lanes
from dsv2mk.kernel.hops import arrive, is_collective, is_multimem, multicast, sync, wait
from dsv2mk.kernel.plan import MAX_CTAS, WARPS
from dsv2mk.kernel.stream import land, release, run_of

_NONE = 0x7FFFFFFF


@cute.jit
def better(value, token, other, other_token):
    """The higher of two (value, token); of equals the lower token."""
    if other > value or (other == value and other_token < token):
        value, token = other, other_token
    return value, token


@cute.jit
def _best_of_warp(value, token):
    for mask in (16, 8, 4, 2, 1):
        other = ptx.shuffle_xor(value, mask)
        other_token = ptx.bits(ptx.shuffle_xor(ptx.as_f32(token), mask))
        value, token = better(value, token, other, other_token)
    return value, token


@cute.jit
def head(env: Env, chunk):
    """lm_head of the normed state in x, and arrival at `best`; the number of the chunk after it."""
    env = env.again()
    g, plan = env.plan.geometry, env.plan
    layer = Int32(g.num_hidden_layers)
    matrix = plan.lm_head
    first, last = run_of(env, "lm_head")
    rows = matrix.chunk_rows
    start = env.param("rank") * matrix.rows
    out = env.param("logits")
    best, winner = Float32(-math.inf), Int32(_NONE)
    for index in cutlass.range(first + env.warp, last, WARPS, unroll=1):
        at = chunk + index - first
        data = land(env, at, layer)
        sums = [Float32(0.0) for _ in range(rows)]
        sums = long_rows(env, data, env.at("x"), matrix.width, rows, sums)
        release(env, at)
        for row in cutlass.range_constexpr(rows):
            value = reduce_lanes(sums[row], 32)
            token = start + index * rows + row
            if token < g.vocab_size:
                best, winner = better(best, winner, value, token)
                if env.lane == 0 and out != 0:
                    ptx.stg_f32(out + Int64(index * rows + row) * 4, value)
    if env.lane == 0:
        ptx.sts_f32(env.at("best") + env.warp * 8, best)
        ptx.sts(env.at("best") + env.warp * 8 + 4, winner)
    sync(env)
    if env.warp == 0:
        best, winner = Float32(-math.inf), Int32(_NONE)
        if env.lane < WARPS:
            best = ptx.lds_f32(env.at("best") + env.lane * 8)
            winner = ptx.lds(env.at("best") + env.lane * 8 + 4)
        best, winner = _best_of_warp(best, winner)
        if env.lane == 0:
            _publish(env, best, winner)
    arrive(env, "best", layer)
    return chunk + last - first


@cute.jit
def _publish(env: Env, value, token):
    """Store the CTA's best with every rank."""
    offset = env.plan.exchange_offset + env.plan.exchange["best"][0]
    mine = Int64(env.param("rank") * MAX_CTAS + env.cta) * 8
    if const_expr(is_multimem(env, "best")):
        ptx.multimem_st2_f32(multicast(env) + Int64(offset) + mine, value, ptx.as_f32(token))
    elif const_expr(is_collective(env, "best")):
        for rank in cutlass.range_constexpr(env.plan.ranks):
            at = ptx.ldg_64(env.param("peers") + 8 * rank) + Int64(offset) + mine
            ptx.stg2_f32(at, value, ptx.as_f32(token))
    else:
        at = env.param("workspace") + Int64(offset) + mine
        ptx.stg2_f32(at, value, ptx.as_f32(token))


@cute.jit
def choose(env: Env, n):
    """Wait for all CTAs' best; the winner, known to the threads of warp 0."""
    env = env.again()
    wait(env, "best", n, Int32(env.plan.geometry.num_hidden_layers))
    best, winner = Float32(-math.inf), Int32(_NONE)
    if env.warp == 0:
        for rank in cutlass.range_constexpr(env.plan.ranks):
            source = env.exchange("best", 0) + rank * MAX_CTAS * 8
            for cta in cutlass.range(env.lane, env.ctas, 32, unroll=1):
                value, token = ptx.ld2_f32(source + Int64(cta) * 8)
                best, winner = better(best, winner, value, ptx.bits(token))
        best, winner = _best_of_warp(best, winner)
        if winner == _NONE:
            winner = Int32(0)
    return winner
