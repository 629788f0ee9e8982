"""The kernel: three roles, and the order of phases in each. docs/walkthrough.md follows one token.

A CTA has 16 consumer warps, two producer warps (the weight stream), a scout warp (routing, cache
append) and a watchdog warp. The layer loop of the consumers and that of the producers are both
below: they must meet the same chunks in the same order.

The residual stream h [H] lives in the consumers' registers, the same in every CTA: each hop that
ends a block of a layer hands all CTAs all ranks' shares, and each adds them in rank order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from dsv2mk.kernel import attention, ffn, head, ptx, router, stream
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.gemv import consume, load_gamma, load_pairs, load_vectors, norm, pairs_of
from dsv2mk.kernel.hops import arrive, publish_row, sync, wait, wait_mbarrier, wait_word, watchdog
from dsv2mk.kernel.parameters import PARAMETERS
from dsv2mk.kernel.plan import (
    CONSUMER_REGISTERS,
    KV_CHUNK,
    PRODUCERS,
    SCOUT,
    SERVICE_REGISTERS,
    THREADS,
    WARPS,
    Plan,
    window_of,
)

#: Nanoseconds that a launch which gave up waits for copies that are on their way.
_DRAIN = 1_000_000


@cute.jit
def decode(env: Env):
    """One launch: `steps` tokens."""
    if env.thread == 0:
        for slot in cutlass.range_constexpr(env.plan.slots):
            ptx.mbarrier_init(env.at("full") + slot * 8, Int32(1))
            ptx.mbarrier_init(env.at("empty") + slot * 8, Int32(1))
        for name in ("routed", "old_kv", "new_kv"):
            ptx.mbarrier_init(env.at(name), Int32(1))
        for index in cutlass.range_constexpr(len(PRODUCERS)):
            ptx.sts(env.at("issued") + index * 4, Int32(0))
            ptx.sts(env.at("pushed") + index * 4, Int32(0))
        for name in ("abort", "finished", "routed_count"):
            ptx.sts(env.at(name), Int32(0))
        for warp in cutlass.range_constexpr(WARPS + 4):
            ptx.sts(env.at("waits") + warp * 16, Int32(0))
        ptx.sts(env.at("left"), env.param("steps"))
        ptx.mbarrier_init_fence()
    attention.store_turns(env)
    stream.store_runs(env)
    ffn.store_units(env)
    ptx.barrier(0, THREADS)
    if env.warp < WARPS:
        ptx.more_registers(CONSUMER_REGISTERS)
        consumers(env)
        if env.thread == 0:
            ptx.sts(env.at("finished"), Int32(1))
    else:
        ptx.fewer_registers(SERVICE_REGISTERS)
        if env.warp <= PRODUCERS[-1]:
            producer(env)
        elif env.warp == SCOUT:
            router.scout(env)
        else:
            watchdog(env)


# ---- consumers ----


@cute.jit
def consumers(env: Env):
    """All tokens of a launch."""
    env = env.again()
    if env.thread == 0:
        _note_time(env, Int32(0))
    token = ptx.ldg(env.param("tokens") + Int64(env.param("position")) * 4)
    chunk = Int32(0)
    running = env.param("steps") > 0
    while running:
        chunk = _token(env, chunk, token)
        token = _choose(env)
        running = ptx.lds(env.at("left")) > 0


def step_of(env: Env):
    """Number of the consumers' token in the launch."""
    return env.param("steps") - ptx.lds(env.at("left"))


@cute.jit
def _choose(env: Env):
    """The token at the next position: given, or the argmax. One token less is left, or none."""
    env = env.again()
    step = step_of(env)
    winner = head.choose(env, env.param("epoch") + step)
    if env.thread == 0:
        following = env.param("position") + step + 1
        place = env.param("tokens") + Int64(following) * 4
        if following < env.param("known"):
            winner = ptx.ldg(place)
        elif env.cta == 0:
            ptx.stg(place, winner)
        left = env.param("steps") - step - 1
        if ptx.lds_volatile(env.at("abort")) != 0:
            left = Int32(0)
        ptx.sts(env.at("token"), winner)
        ptx.sts(env.at("left"), left)
        _note_time(env, step + 1)
    sync(env)
    return ptx.lds(env.at("token"))


@cute.jit
def _note_time(env: Env, index):
    """CTA 0: the time at which a token was done, by one thread."""
    if ptx.renew(env.cta) == 0:
        if env.param("times") != 0:
            ptx.stg_64(env.param("times") + Int64(index) * 8, ptx.now())


@cute.jit
def _token(env: Env, chunk, token):
    """All layers and the head for one token; the number of the chunk after them."""
    env = env.again()
    g, plan = env.plan.geometry, env.plan
    layers, hidden = g.num_hidden_layers, g.hidden_size
    attention.store_position(env, env.param("position") + step_of(env))
    h = _embed(env, token)
    for index in cutlass.range(layers, unroll=1):
        layer = ptx.renew(index)  # else an address a tensor would be carried through the loop
        n = (env.param("epoch") + step_of(env)) * layers + layer
        gamma = load_gamma(env, env.layer_weight("attn_norm", layer), hidden)
        norm(env, env.at("x"), h, gamma, hidden, g.rms_norm_eps)
        chunk = _gemv_to(env, chunk, "qkv_a", "qkv", layer)
        if const_expr(g.q_lora_rank is None):
            chunk = attention.project(env, chunk, "hidden", layer)
        arrive(env, "qkv", layer)
        wait(env, "qkv", n, layer)
        _meet_producers(env, step_of(env) * layers + layer, layer)
        _open_cache(env, "old_kv")
        if const_expr(g.q_lora_rank is not None):
            chunk = attention.project(env, chunk, "latent", layer)
            arrive(env, "q", layer)
            wait(env, "q", n, layer)
            _open_cache(env, "new_kv")
        chunk = attention.absorb(env, chunk, layer)
        arrive(env, "q_lat", layer)
        wait(env, "q_lat", n, layer)
        if const_expr(g.q_lora_rank is None):
            _open_cache(env, "new_kv")
        chunk = attention.attend(env, chunk, layer)
        arrive(env, "partial", layer)
        wait(env, "partial", n, layer)
        chunk = attention.merge_value(env, chunk, layer)
        arrive(env, "value", layer)
        wait(env, "value", n, layer)
        width = plan.heads * g.v_head_dim
        load_vectors(env, env.at("x"), env.exchange("value", layer), 0, 1, width)
        chunk = _rows_to(env, chunk, "o", layer)
        arrive(env, "o", layer)
        gamma = load_gamma(env, env.layer_weight("ffn_norm", layer), hidden)
        wait(env, "o", n, layer)
        h = _add(env, h, "o", layer)

        norm(env, env.at("x"), h, gamma, hidden, g.rms_norm_eps, top=True)
        units = ffn.units_of(env, layer)
        count = units.always
        moe = layer - g.first_k_dense_replace
        if moe >= 0:
            chunk = _gemv_to(env, chunk, "router", "route", layer)
            arrive(env, "route", layer)
        chunk = ffn.gate_up(env, chunk, Int32(0), units.always, False, layer)
        if moe >= 0:
            n_routed = step_of(env) * g.num_moe_layers + moe
            routed = _routed(env, n_routed, layer)
            chunk = ffn.gate_up(env, chunk, units.always, routed, True, layer)
            count = count + routed
        arrive(env, "act", layer)
        wait(env, "act", n, layer)
        chunk = ffn.down(env, chunk, units, count, layer)
        arrive(env, "down", layer)
        wait(env, "down", n, layer)
        h = _add(env, h, "down", layer)
    gamma = load_gamma(env, env.weight("final_norm"), hidden)
    norm(env, env.at("x"), h, gamma, hidden, g.rms_norm_eps)
    return head.head(env, chunk)


@cute.jit
def _meet_producers(env: Env, n, layer):
    """The first thread waits until both producers are past all n layers of the launch before this.

    They are, unless a CTA owns next to nothing. But a producer that lagged by two layers would take
    a phase of `old_kv`, `new_kv` or `routed` for the one before it.
    """
    env = env.again()
    if env.thread == 0:
        for index in cutlass.range_constexpr(len(PRODUCERS)):
            wait_word(env, env.at("pushed") + index * 4, n, where("kv stream", layer))


@cute.jit
def _open_cache(env: Env, name: cutlass.Constexpr):
    """Tell the producers that the cache is complete: up to this token, or with it."""
    env = env.again()
    if env.thread == 0:
        ptx.mbarrier_arrive(env.at(name))


@cute.jit
def _embed(env: Env, token):
    """A thread's pairs of the token's row of embed."""
    hidden = env.plan.geometry.hidden_size
    words = load_gamma(env, env.weight("embed") + Int64(token) * (2 * hidden), hidden)
    h = []
    for word in words:
        h += [ptx.bf16_low(word), ptx.bf16_high(word)]
    return h


@cute.jit
def _add(env: Env, h, name: cutlass.Constexpr, layer):
    """h plus all ranks' shares of a block's output, in rank order."""
    hidden = env.plan.geometry.hidden_size
    for rank in cutlass.range(env.plan.ranks, unroll=1):
        share = load_pairs(env, env.exchange(name, layer) + Int64(rank) * (hidden * 4), hidden)
        for index in cutlass.range_constexpr(2 * pairs_of(hidden)):
            h[index] = h[index] + share[index]
    return h


@cute.jit
def _gemv_to(env: Env, chunk, matrix: cutlass.Constexpr, name: cutlass.Constexpr, layer):
    """A matrix times x, into a hop's buffer."""
    out = env.exchange(name, layer)

    def emit(row, value):
        ptx.stg_f32(out + Int64(row) * 4, value)

    x = env.at("x")
    return consume(env, chunk, matrix, lambda row: x, emit, layer)


@cute.jit
def _rows_to(env: Env, chunk, name: cutlass.Constexpr, layer):
    """A matrix times x, as this rank's share of an all-reduce."""
    x = env.at("x")

    def emit(row, value):
        publish_row(env, name, layer, row, value)

    return consume(env, chunk, name, lambda row: x, emit, layer)


@cute.jit
def _wait_routed(env: Env, n, layer):
    """Wait for the n-th routing of the launch; how many routed units it lists. Whole warps."""
    wait_mbarrier(env, env.at("routed"), n & 1, where("routed units", layer))
    return ptx.lds(env.at("routed_count"))


@cute.jit
def _routed(env: Env, n, layer):
    """`_wait_routed` for the consumers: one warp waits, so that all go on with one number."""
    env = env.again()
    if env.warp == 0:
        count = _wait_routed(env, n, layer)
        if env.lane == 0:
            ptx.sts(env.at("count"), count)
    sync(env)
    return ptx.lds(env.at("count"))


# ---- producer ----


@cute.jit
def producer(env: Env):
    """The weight stream of a launch."""
    env = env.again()
    layers = env.plan.geometry.num_hidden_layers
    policy = ptx.stream_policy()
    chunk = Int32(0)
    steps = env.param("steps")
    for step in cutlass.range(steps, unroll=1):
        position = env.param("position") + step
        if ptx.lds_volatile(env.at("abort")) == 0:
            for layer in cutlass.range(layers, unroll=1):
                chunk = _push_layer(env, policy, chunk, step, layer, position)
            at = Int32(layers)
            base = env.weight("lm_head")
            chunk = stream.push_matrix(env, policy, chunk, base, "lm_head", at)
    if ptx.lds_volatile(env.at("abort")) != 0:
        started = ptx.now()
        while ptx.now() - started < _DRAIN:
            ptx.sync_warp()


@cute.jit
def _push_layer(env: Env, policy, chunk, step, layer, position):
    g = env.plan.geometry
    n = step * g.num_hidden_layers + layer
    for name in ("qkv_a", "q_b", "w_uk"):
        chunk = _push(env, policy, chunk, name, layer, layer)
    wait_mbarrier(env, env.at("old_kv"), n & 1, where("kv stream", layer))
    chunk = _push_cache(env, policy, chunk, n, layer, position)
    for name in ("w_uv", "o"):
        chunk = _push(env, policy, chunk, name, layer, layer)
    units = ffn.units_of(env, layer)
    count = units.always
    moe = layer - g.first_k_dense_replace
    if moe >= 0:
        chunk = _push(env, policy, chunk, "router", moe, layer)
    matrix = env.plan.gate_up
    first, last = stream.deal(env, units.always * matrix.chunks)
    for index in cutlass.range(first, last, unroll=1):
        at = chunk + index - first
        slot = units.slot + index // matrix.chunks
        ffn.push_gate_up(env, policy, at, slot, index % matrix.chunks, index == first, layer)
    chunk = chunk + last - first
    if moe >= 0:
        routed = _wait_routed(env, step * g.num_moe_layers + moe, layer)
        first, last = stream.deal(env, routed * matrix.chunks)
        for index in cutlass.range(first, last, unroll=1):
            at = chunk + index - first
            slot = ptx.lds(env.at("unit") + index // matrix.chunks * 4)
            ffn.push_gate_up(env, policy, at, slot, index % matrix.chunks, index == first, layer)
        chunk = chunk + last - first
        count = count + routed
    chunk = ffn.push_down(env, policy, chunk, units, count, layer)
    if env.lane == 0:
        ptx.sts_release(env.at("pushed") + (env.warp - PRODUCERS[0]) * 4, n + 1)
    return chunk


@cute.jit
def _push(env: Env, policy, chunk, name: cutlass.Constexpr, index, layer):
    base = env.layer_weight(name, index)
    return stream.push_matrix(env, policy, chunk, base, name, layer)


@cute.jit
def _push_cache(env: Env, policy, chunk, n, layer, position):
    """The CTA's run of the cache, once it is written: its last row by this token's append."""
    row_bytes = env.plan.cache_row * 2
    _, first, end, _ = attention.kv_run(env, position)
    if end > position:
        wait_mbarrier(env, env.at("new_kv"), n & 1, where("kv stream", layer))
    ptx.fence_async()
    window = window_of(KV_CHUNK * row_bytes)
    at = chunk
    for token in cutlass.range(first, end, KV_CHUNK, unroll=1):
        count = cutlass.min(end - token, KV_CHUNK) * row_bytes
        source = attention.cache_row(env, layer, token)
        stream.push(env, policy, at, source, count, window, layer)
        at = at + 1
    return at


# ---- entry ----


def make_host(plan: Plan, name: str):
    """The function that `cute.compile` takes: the kernel's parameters, then the number of CTAs."""

    @cute.kernel
    def kernel(
        replicated: Int64,
        partitioned: Int64,
        gate_up: Int64,
        gate_up_scale: Int64,
        down: Int64,
        down_scale: Int64,
        cache: Int64,
        workspace: Int64,
        peers: Int64,
        tokens: Int64,
        logits: Int64,
        status: Int64,
        times: Int64,
        marks: Int64,
        cache_tokens: Int64,
        trace: Int64,
        timeout: Int64,
        rank: Int32,
        position: Int32,
        steps: Int32,
        known: Int32,
        epoch: Int32,
    ):
        given = locals()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        env = Env(
            plan=plan,
            params={name: given[name] for name, _ in PARAMETERS},
            smem=cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024).toint(),
            thread=thread,
            lane=thread % 32,
            warp=cute.arch.make_warp_uniform(thread // 32),
            cta=cta,
            ctas=ctas,
        )
        decode(env)

    kernel.set_name_prefix(name, remove_cutlass_symbol=True)

    @cute.jit
    def host(
        replicated: Int64,
        partitioned: Int64,
        gate_up: Int64,
        gate_up_scale: Int64,
        down: Int64,
        down_scale: Int64,
        cache: Int64,
        workspace: Int64,
        peers: Int64,
        tokens: Int64,
        logits: Int64,
        status: Int64,
        times: Int64,
        marks: Int64,
        cache_tokens: Int64,
        trace: Int64,
        timeout: Int64,
        rank: Int32,
        position: Int32,
        steps: Int32,
        known: Int32,
        epoch: Int32,
        ctas: Int32,
    ):
        kernel(
            replicated,
            partitioned,
            gate_up,
            gate_up_scale,
            down,
            down_scale,
            cache,
            workspace,
            peers,
            tokens,
            logits,
            status,
            times,
            marks,
            cache_tokens,
            trace,
            timeout,
            rank,
            position,
            steps,
            known,
            epoch,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            smem=plan.smem_bytes,
            cooperative=True,
            min_blocks_per_mp=1,
        )

    return host
