"""The scout: one warp beside the consumers that routes, and (in the last CTA) appends to the cache.

Contract
--------
Every CTA's scout chooses the experts from the same logits in the same way, lists the routed units
that its rank owns (slot in the shard, weight) in shared memory, and completes a phase of the
mbarrier `routed`. Consumers and producer wait for it: the consumers after the always-on units,
which need no routing, the producer before it issues the first routed unit.

The list may be rewritten in the next layer: the scout then has seen the hop `route`, at which this
CTA's consumers arrived after they had read the list; and the producers have issued all of the
layer before: see decode._meet_producers.

Choice: softmax over all experts in fp32; the groups with the highest maxima; experts outside of
them count 0; the highest num_experts_per_tok; weight = score * routed_scaling_factor. Of equals the
lower index wins: scores are not negative, so their bits order as unsigned words, and the winner is
the least index among those that hold the greatest word. An index is bounded whatever the logits.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv2mk.kernel import ptx
from dsv2mk.kernel.attention import append
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.ffn import units_of
from dsv2mk.kernel.gemv import reduce_lanes
from dsv2mk.kernel.hops import mark, poll, target_of


@cute.jit
def scout(env: Env):
    """All tokens of a launch."""
    env = env.again()
    g = env.plan.geometry
    layers = g.num_hidden_layers
    steps = env.param("steps")
    for step in cutlass.range(steps, unroll=1):
        if ptx.lds_volatile(env.at("abort")) == 0:
            position = env.param("position") + step
            token = env.param("epoch") + step
            for layer in cutlass.range(layers, unroll=1):
                if env.cta == env.ctas - 1:
                    append(env, token * layers + layer, layer, position)
                if layer >= g.first_k_dense_replace:
                    n = token * g.num_moe_layers + layer - g.first_k_dense_replace
                    _route(env, n, layer)


@cute.jit
def _route(env: Env, n, layer):
    if env.lane == 0:
        poll(env, "route", target_of(env, "route", n), where("route", layer))
    ptx.sync_warp()
    _scores(env, layer)
    _choose(env, layer)
    ptx.sync_warp()
    if env.lane == 0:
        ptx.mbarrier_arrive(env.at("routed"))
        mark(env, "route", layer, 1)


@cute.jit
def _best(score, index):
    """(word, index) of the greatest score over the warp; the lower index of equals."""
    word = ptx.warp_max_u32(score)
    if score != word:
        index = Int32(0x7FFFFFFF)
    return word, ptx.warp_min_u32(index)


@cute.jit
def _scores(env: Env, layer):
    """Leave the scores, as words, in shared memory: 0 outside of the chosen groups."""
    g = env.plan.geometry
    experts = g.n_routed_experts
    turns = -(-experts // 32)
    source = env.exchange("route", layer)
    logits = [Float32(-math.inf) for _ in range(turns)]
    top = Float32(-math.inf)
    for turn in cutlass.range_constexpr(turns):
        expert = env.lane + 32 * turn
        if expert < experts:
            logits[turn] = ptx.ld_f32(source + Int64(expert) * 4)
        top = ptx.maximum(top, logits[turn])
    for mask in (16, 8, 4, 2, 1):
        top = ptx.maximum(top, ptx.shuffle_xor(top, mask))
    total = Float32(0.0)
    for turn in cutlass.range_constexpr(turns):
        logits[turn] = ptx.exp2((logits[turn] - top) * Float32(math.log2(math.e)))
        total = total + logits[turn]
    total = reduce_lanes(total, 32)
    for turn in cutlass.range_constexpr(turns):
        expert = env.lane + 32 * turn
        if expert < experts:
            word = ptx.bits(ptx.divide(logits[turn], total))
            ptx.sts(env.at("scores") + expert * 4, word)
    ptx.sync_warp()
    if cutlass.const_expr(g.n_group > 1):
        each = g.experts_per_group
        best = Int32(0)
        if env.lane < g.n_group:
            for i in cutlass.range_constexpr(each):
                best = cutlass.max(best, ptx.lds(env.at("scores") + (env.lane * each + i) * 4))
        kept = Int32(0)  # this lane's group is chosen
        mine = best
        if env.lane >= g.n_group:
            mine = Int32(0)
        index = env.lane
        if env.lane >= g.n_group:
            index = Int32(0x7FFFFFFF)
        for _ in cutlass.range_constexpr(g.topk_group):
            word, winner = _best(mine, index)
            if winner == env.lane:
                kept = Int32(1)
                mine = Int32(0)
                index = Int32(0x7FFFFFFF)
        if env.lane < g.n_group:
            if kept == 0:
                for i in cutlass.range_constexpr(each):
                    ptx.sts(env.at("scores") + (env.lane * each + i) * 4, Int32(0))
        ptx.sync_warp()


@cute.jit
def _choose(env: Env, layer):
    """List the chosen experts' units that this rank owns."""
    g, plan = env.plan.geometry, env.plan
    experts = g.n_routed_experts
    turns = -(-experts // 32)
    words = [Int32(0) for _ in range(turns)]
    taken = [Int32(0) for _ in range(turns)]
    for turn in cutlass.range_constexpr(turns):
        expert = env.lane + 32 * turn
        if expert < experts:
            words[turn] = ptx.lds(env.at("scores") + expert * 4)
        else:
            taken[turn] = Int32(1)
    units = units_of(env, layer)
    listed = Int32(0)
    for choice in cutlass.range_constexpr(g.num_experts_per_tok):
        word, index = Int32(0), Int32(0x7FFFFFFF)
        for turn in cutlass.range_constexpr(turns):
            if taken[turn] == 0 and (index == 0x7FFFFFFF or words[turn] > word):
                word, index = words[turn], env.lane + 32 * turn
        word, expert = _best(word, index)
        for turn in cutlass.range_constexpr(turns):
            if expert == env.lane + 32 * turn:
                taken[turn] = Int32(1)
        weight = ptx.as_f32(word) * Float32(g.routed_scaling_factor)
        # Unit u of expert e has index e * U + u in the layer; owners take turns.
        first = expert * g.expert_units
        for turn in cutlass.range_constexpr(-(-g.expert_units // 32)):
            unit = env.lane + 32 * turn
            own = Int32(0)
            if unit < g.expert_units and (first + unit) % plan.ranks == env.param("rank"):
                own = Int32(1)
            mask = ptx.ballot(own)
            if own != 0:
                below = ptx.popcount(mask & ((Int32(1) << env.lane) - 1))
                at = (listed + below) * 4
                slot = units.routed_slot + (first + unit) // plan.ranks
                ptx.sts(env.at("unit") + at, slot)
                ptx.sts_f32(env.at("unit_weight") + at, weight)
            listed = listed + ptx.popcount(mask)
        if env.cta == 0 and env.lane == 0:
            at = env.exchange("chosen", layer) + 4 * choice
            ptx.stg(at, expert)
            ptx.stg_f32(at + 4 * g.num_experts_per_tok, weight)
    if env.lane == 0:
        ptx.sts(env.at("routed_count"), listed)
