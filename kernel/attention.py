"""MLA over the compressed cache, with W_UK and W_UV absorbed. Shapes for one rank's h heads.

| phase | reads | computes | leaves |
|---|---|---|---|
| project | qkv [q_lora+C+R] | q = q_b @ norm(q_a) | q [h, N+R] |
| append | qkv | by the scout: norm(kv_c), rope(k_pe), bf16 | the token's cache row |
| absorb | q [h, :N] | q_lat[h] = W_UK[h] @ q[h, :N] | q_lat [h, C] |
| attend | q_lat, q [h, N:], cache [T, C+R] | softmax and sum of a run | partial [16, C], (m, l) |
| merge | partials | latent = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s | (in shared memory) |
| value | latent | value[h] = W_UV[h] @ latent[h] | value [h, V] |

Attend: a CTA takes one tile of 16 heads and one run of tokens (`kv_run`), in passes of 64 tokens,
eight KV chunks of eight. Scores are log2-scaled. fp32 queries and probabilities are split into two
bf16 (a = hi + lo, relative error 2^-17) and multiplied on the tensor cores, so that the cache, bf16
in memory, is the only rounding. Warps: for scores, warp w takes two chunks from 2 (w % 4) on and
every fourth k-step from w / 4 on; for the softmax, head w; for the sums, columns [32 w, 32 w + 32).

The rows of a chunk past the live length are never read from memory: they are zeroed in the slot,
and their scores are masked.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.gemv import (
    CONSUMER_THREADS,
    consume,
    load_gamma,
    load_pairs,
    load_vectors,
    norm,
    place,
    reduce_lanes,
)
from dsv2mk.kernel.hops import appended, poll, signal, sync, target_of
from dsv2mk.kernel.plan import KV_CHUNK, KV_CHUNKS, TILE, lanes_of, vector_bytes
from dsv2mk.kernel.stream import land, release, run_of, slot_address
from dsv2mk.manifests.geometry import LATENT_NORM_EPS

_PASS = KV_CHUNK * KV_CHUNKS
#: Warps that share the k-steps of a pair of chunks.
_PARTS = 4
#: Runs whose partial results a thread fetches at a time.
_MERGED = 8


# ---- RoPE ----


@cute.jit
def store_turns(env: Env):
    """At launch: the turns a position of each pair, fp64."""
    for pair, frequency in enumerate(env.plan.geometry.inverse_frequencies()):
        if env.thread == pair:
            ptx.sts_f64(env.at("turns") + pair * 8, frequency / (2 * math.pi))


@cute.jit
def store_position(env: Env, position):
    """At each token: (cos, sin) of each pair's angle, and the CTA's run of the cache.

    Turns are reduced in fp64.
    """
    env = env.again()
    g = env.plan.geometry
    if env.thread == CONSUMER_THREADS - 1:
        ptx.sts(env.at("position"), position)
        ptx.sts4(env.at("kv_run"), *kv_run(env, position))
    if env.thread < g.qk_rope_head_dim // 2:
        turns = ptx.lds_f64(env.at("turns") + env.thread * 8) * position.to(Float64)
        angle = ptx.turn_fraction(turns) * Float32(2 * math.pi)
        magnitude = Float32(g.rope_magnitude)
        at = env.at("rope") + env.thread * 8
        ptx.sts2_f32(at, ptx.cos(angle) * magnitude, ptx.sin(angle) * magnitude)


def rotate(env: Env, pair, a, b):
    """Turn the adjacent values (a, b) of a pair by its angle."""
    at = env.at("rope") + pair * 8
    cos, sin = ptx.lds_f32(at), ptx.lds_f32(at + 4)
    return a * cos - b * sin, b * cos + a * sin


# ---- projections ----


@cute.jit
def project(env: Env, chunk, x_from: cutlass.Constexpr, layer):
    """q of all heads. x_from: `latent` (norm the query latent first) or `hidden` (x is there)."""
    g = env.plan.geometry
    x, out = env.at("x"), env.exchange("q", layer)
    if const_expr(x_from == "latent"):
        gamma = load_gamma(env, env.layer_weight("q_a_norm", layer), g.q_lora_rank)
        values = load_pairs(env, env.exchange("qkv", layer), g.q_lora_rank)
        norm(env, x, values, gamma, g.q_lora_rank, LATENT_NORM_EPS)

    def emit(row, value):
        ptx.stg_f32(out + Int64(row) * 4, value)

    return consume(env, chunk, "q_b", lambda row: x, emit, layer)


@cute.jit
def absorb(env: Env, chunk, layer):
    """q_lat of the heads whose W_UK rows the CTA owns."""
    env = env.again()
    g, plan = env.plan.geometry, env.plan
    first, last = run_of(env, "w_uk")
    head = first * plan.w_uk.chunk_rows // g.kv_lora_rank
    end = (last * plan.w_uk.chunk_rows + g.kv_lora_rank - 1) // g.kv_lora_rank
    x, out = env.at("x"), env.exchange("q_lat", layer)
    stride = g.qk_head_dim * 4
    source = env.exchange("q", layer) + Int64(head) * stride
    load_vectors(env, x, source, stride, cutlass.max(end - head, 0), g.qk_nope_head_dim)

    def x_of(row):
        return x + (row // g.kv_lora_rank - head) * vector_bytes(g.qk_nope_head_dim)

    def emit(row, value):
        ptx.stg_f32(out + Int64(row) * 4, value)

    return consume(env, chunk, "w_uk", x_of, emit, layer)


# ---- the cache ----


def cache_row(env: Env, layer, token):
    """Address of a token's row of a layer's cache."""
    index = Int64(layer) * env.param("cache_tokens") + Int64(token)
    return env.param("cache") + index * (2 * env.plan.cache_row)


@cute.jit
def append(env: Env, n, layer, position):
    """The last CTA's scout: put the token's row into the cache, and say so with a hop's arrival."""
    g = env.plan.geometry
    rank = g.kv_lora_rank
    if env.lane == 0:
        poll(env, "qkv", target_of(env, "qkv", n), where("qkv", layer))
    ptx.sync_warp()
    source = env.exchange("qkv", layer) + (g.qkv_a_rows - g.cache_width) * 4
    gamma = env.layer_weight("kv_a_norm", layer)
    row = cache_row(env, layer, position)
    square = Float32(0.0)
    for element in cutlass.range(2 * env.lane, rank, 64, unroll=4):
        a, b = ptx.ld2_f32(source + Int64(element) * 4)
        square = ptx.fma(b, b, ptx.fma(a, a, square))
    square = reduce_lanes(square, 32)
    scale = ptx.rsqrt(ptx.fma(square, Float32(1.0 / rank), Float32(LATENT_NORM_EPS)))
    for element in cutlass.range(2 * env.lane, rank, 64, unroll=2):
        a, b = ptx.ld2_f32(source + Int64(element) * 4)  # again: registers are few here
        word = ptx.ldg(gamma + Int64(element) * 2)
        word = ptx.pack_bf16(a * scale * ptx.bf16_low(word), b * scale * ptx.bf16_high(word))
        ptx.stg(row + Int64(element) * 2, word)
    if env.lane < g.qk_rope_head_dim // 2:
        a, b = ptx.ld2_f32(source + Int64(rank + 2 * env.lane) * 4)
        a, b = rotate(env, env.lane, a, b)
        ptx.stg(row + Int64(rank + 2 * env.lane) * 2, ptx.pack_bf16(a, b))
    ptx.fence_async()
    ptx.sync_warp()
    if env.lane == 0:
        signal(env, appended(env))


@cute.jit
def kv_run(env: Env, position):
    """(tile, first token, end token, runs) of the CTA: its heads, its run of the live tokens.

    There are as many runs as passes, at most one a CTA of the tile, of nearly equal length.
    """
    tiles = env.plan.tiles
    live = position + 1
    runs = cutlass.min(env.ctas // tiles, (live + _PASS - 1) // _PASS)
    each = ((live + runs - 1) // runs + KV_CHUNK - 1) // KV_CHUNK * KV_CHUNK
    runs = (live + each - 1) // each
    first = cutlass.min(env.cta // tiles * each, live)
    return env.cta % tiles, first, cutlass.min(first + each, live), runs


# ---- attend ----


def split(a, b):
    """Words (hi, lo) of two bf16 each, with (a, b) = hi + lo."""
    hi = ptx.pack_bf16(a, b)
    return hi, ptx.pack_bf16(a - ptx.bf16_low(hi), b - ptx.bf16_high(hi))


@cute.jit
def _load_queries(env: Env, tile, hi, lo, layer):
    """Queries of the tile, log2-scaled, as [16, cache_row] bf16 twice; zeros past the last head."""
    g, plan = env.plan.geometry, env.plan
    scale = Float32(g.softmax_scale * math.log2(math.e))
    row_bytes = plan.cache_row * 2
    fours = g.kv_lora_rank // 4
    pairs = g.qk_rope_head_dim // 2
    turning = [Float32(0.0), Float32(0.0)]  # loaded here, so that one latency covers all loads
    if env.thread < TILE * pairs:
        head = tile * TILE + env.thread // pairs
        if head < plan.heads:
            element = head * g.qk_head_dim + g.qk_nope_head_dim + 2 * (env.thread % pairs)
            turning = ptx.ld2_f32(env.exchange("q", layer) + Int64(element) * 4)
    for index in cutlass.range(env.thread, TILE * fours, CONSUMER_THREADS, unroll=4):
        row, element = index // fours, index % fours * 4
        head = tile * TILE + row
        at = row * row_bytes + element * 2
        a, b, c, d = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        if head < plan.heads:
            source = env.exchange("q_lat", layer) + Int64(head * g.kv_lora_rank + element) * 4
            a, b, c, d = ptx.ld4_f32(source)
        high, low = split(a * scale, b * scale)
        high2, low2 = split(c * scale, d * scale)
        ptx.sts2(hi + at, high, high2)
        ptx.sts2(lo + at, low, low2)
    if env.thread < TILE * pairs:
        row, pair = env.thread // pairs, env.thread % pairs
        at = row * row_bytes + (g.kv_lora_rank + 2 * pair) * 2
        a, b = rotate(env, pair, turning[0], turning[1])
        high, low = split(a * scale, b * scale)
        ptx.sts(hi + at, high)
        ptx.sts(lo + at, low)
    sync(env)


@cute.jit
def _scores(env: Env, first_data, second_data, hi, lo, out, part):
    """Scores [16, 8] of two chunks over every fourth k-step from `part` on.

    They go to `out`, in rows of score_row, the second chunk's behind the first's.
    """
    plan = env.plan
    row_bytes = plan.cache_row * 2
    steps = plan.geometry.cache_width // 16
    a_at = (env.lane % 16) * row_bytes + env.lane // 16 * 16
    b_at = env.lane // 4 * row_bytes + env.lane % 4 * 4
    sums = [Float32(0.0) for _ in range(16)]
    for turn in cutlass.range_constexpr(-(-steps // _PARTS)):
        step = turn * _PARTS + part
        if step < steps:
            high, low = ptx.ldmatrix(hi + a_at + step * 32), ptx.ldmatrix(lo + a_at + step * 32)
            for chunk in cutlass.range_constexpr(2):
                data = first_data if chunk == 0 else second_data
                at = data + b_at + step * 32
                b0, b1 = ptx.lds(at), ptx.lds(at + 16)
                c = ptx.mma_k16(sums[8 * chunk : 8 * chunk + 4], high, b0, b1)
                d = ptx.mma_k16(sums[8 * chunk + 4 : 8 * chunk + 8], low, b0, b1)
                for i in cutlass.range_constexpr(4):
                    sums[8 * chunk + i], sums[8 * chunk + 4 + i] = c[i], d[i]
    at = out + (env.lane // 4 * plan.score_row + env.lane % 4 * 2) * 4
    for chunk in cutlass.range_constexpr(2):
        s = sums[8 * chunk : 8 * chunk + 8]
        below = at + 8 * plan.score_row * 4
        ptx.sts2_f32(at + chunk * (KV_CHUNK * 4), s[0] + s[4], s[1] + s[5])
        ptx.sts2_f32(below + chunk * (KV_CHUNK * 4), s[2] + s[6], s[3] + s[7])


@cute.jit
def _zero_rows(env: Env, data, rows):
    """Zero the rows of a chunk that are not live, by one warp."""
    row_bytes = env.plan.cache_row * 2
    for at in cutlass.range(
        rows * row_bytes + env.lane * 16, KV_CHUNK * row_bytes, 32 * 16, unroll=1
    ):
        ptx.sts4(data + at, Int32(0), Int32(0), Int32(0), Int32(0))
    if rows < KV_CHUNK:
        ptx.fence_async()  # comes before the next copy into the slot


@cute.jit
def attend(env: Env, chunk, layer):
    """The CTA's run of tokens for its tile of heads; the number of the chunk after it."""
    env = env.again()
    g, plan = env.plan.geometry, env.plan
    tile, first, end, _ = ptx.lds4(env.at("kv_run"))
    chunks = (end - first + KV_CHUNK - 1) // KV_CHUNK
    hi = env.at("x")
    lo = hi + TILE * plan.cache_row * 2
    scores = lo + TILE * plan.cache_row * 2
    p_hi = scores + _PARTS * TILE * plan.score_row * 4
    p_lo = p_hi + TILE * plan.p_row * 2
    corrections = env.at("correction")
    if chunks > 0:
        _load_queries(env, tile, hi, lo, layer)
        highest, total = Float32(-math.inf), Float32(0.0)
        sums = [Float32(0.0) for _ in range(16)]
        part, own = env.warp // _PARTS, env.warp % _PARTS * 2
        for done in cutlass.range(0, chunks, KV_CHUNKS, unroll=1):
            count = cutlass.min(chunks - done, KV_CHUNKS)
            if own < count:
                at = chunk + done + own
                data = land(env, at, layer)
                behind = slot_address(env, at + 1)
                if own + 1 < count:
                    behind = land(env, at + 1, layer)
                if part == 0:
                    _zero_rows(env, data, end - first - (done + own) * KV_CHUNK)
                    if own + 1 < count:
                        _zero_rows(env, behind, end - first - (done + own + 1) * KV_CHUNK)
                out = scores + part * (TILE * plan.score_row * 4) + own * (KV_CHUNK * 4)
                _scores(env, data, behind, hi, lo, out, part)
            sync(env)

            # Softmax of head `warp`; a lane has two tokens.
            at = scores + env.warp * (plan.score_row * 4) + env.lane * 8
            a, b = Float32(0.0), Float32(0.0)
            for piece in cutlass.range_constexpr(_PARTS):
                share = ptx.lds2(at + piece * (TILE * plan.score_row * 4))
                a, b = a + ptx.as_f32(share[0]), b + ptx.as_f32(share[1])
            left = end - first - done * KV_CHUNK - 2 * env.lane
            if left < 1:
                a = Float32(-math.inf)
            if left < 2:
                b = Float32(-math.inf)
            top = ptx.maximum(a, b)
            for mask in (16, 8, 4, 2, 1):
                top = ptx.maximum(top, ptx.shuffle_xor(top, mask))
            top = ptx.maximum(top, highest)
            correction = ptx.exp2(highest - top)
            a, b = ptx.exp2(a - top), ptx.exp2(b - top)
            total = total * correction + reduce_lanes(a + b, 32)
            highest = top
            at = env.warp * (plan.p_row * 2) + env.lane * 4
            high, low = split(a, b)
            ptx.sts(p_hi + at, high)
            ptx.sts(p_lo + at, low)
            if env.lane == 0:
                ptx.sts_f32(corrections + env.warp * 4, correction)
            sync(env)

            if env.warp * 32 < g.kv_lora_rank:
                row = env.lane // 4
                upper = ptx.lds_f32(corrections + row * 4)
                lower = ptx.lds_f32(corrections + row * 4 + 32)
                for tile_n in cutlass.range_constexpr(4):
                    sums[4 * tile_n] = sums[4 * tile_n] * upper
                    sums[4 * tile_n + 1] = sums[4 * tile_n + 1] * upper
                    sums[4 * tile_n + 2] = sums[4 * tile_n + 2] * lower
                    sums[4 * tile_n + 3] = sums[4 * tile_n + 3] * lower
                for step in cutlass.range(count, unroll=2):
                    data = slot_address(env, chunk + done + step)  # landed: see `_scores` above
                    at = row * (plan.p_row * 2) + step * (KV_CHUNK * 2) + env.lane % 4 * 4
                    below = at + 8 * plan.p_row * 2
                    hi0, hi1 = ptx.lds(p_hi + at), ptx.lds(p_hi + below)
                    lo0, lo1 = ptx.lds(p_lo + at), ptx.lds(p_lo + below)
                    column = env.warp * 32 + env.lane // 8 * 8
                    v = ptx.ldmatrix_transposed(
                        data + env.lane % 8 * (plan.cache_row * 2) + column * 2
                    )
                    for tile_n in cutlass.range_constexpr(4):
                        c = sums[4 * tile_n : 4 * tile_n + 4]
                        c = ptx.mma_k8(c, hi0, hi1, v[tile_n])
                        c = ptx.mma_k8(c, lo0, lo1, v[tile_n])
                        for i in cutlass.range_constexpr(4):
                            sums[4 * tile_n + i] = c[i]
            sync(env)
            if env.warp < count:
                release(env, chunk + done + env.warp)

        item = Int64(env.cta) * TILE
        if env.lane == 0:
            ml = env.exchange("partial_ml", layer) + (item + Int64(env.warp)) * 8
            ptx.stg2_f32(ml, highest, total)
        if env.warp * 32 < g.kv_lora_rank:
            out = env.exchange("partial", layer) + item * (g.kv_lora_rank * 4)
            for tile_n in cutlass.range_constexpr(4):
                column = env.warp * 32 + tile_n * 8 + env.lane % 4 * 2
                at = out + Int64(env.lane // 4 * g.kv_lora_rank + column) * 4
                ptx.stg2_f32(at, sums[4 * tile_n], sums[4 * tile_n + 1])
                at = at + 8 * g.kv_lora_rank * 4
                ptx.stg2_f32(at, sums[4 * tile_n + 2], sums[4 * tile_n + 3])
    return chunk + chunks


# ---- merge and W_UV ----


@cute.jit
def merge_value(env: Env, chunk, layer):
    """Merge the runs of the CTA's heads, and its rows of W_UV; the number of the chunk after it."""
    env = env.again()
    g, plan = env.plan.geometry, env.plan
    width = g.kv_lora_rank
    first, last = run_of(env, "w_uv")
    head = first * plan.w_uv.chunk_rows // g.v_head_dim
    heads = (last * plan.w_uv.chunk_rows + g.v_head_dim - 1) // g.v_head_dim - head
    if first == last:
        heads = Int32(0)
    runs = ptx.lds(env.at("kv_run") + 12)
    x = env.at("x")
    for index in cutlass.range(env.thread, heads * width, CONSUMER_THREADS, unroll=1):
        own, column = index // width, index % width
        latent = _merge(env, head + own, column, runs, layer)
        ptx.sts_f32(x + own * vector_bytes(width) + place(column, lanes_of(width)), latent)
        if env.param("trace") != 0:
            at = env.exchange("latent", layer) + Int64((head + own) * width + column) * 4
            ptx.stg_f32(at, latent)
    sync(env)
    out = env.exchange("value", layer)

    def x_of(row):
        return x + (row // g.v_head_dim - head) * vector_bytes(width)

    def emit(row, value):
        ptx.stg_f32(out + Int64(row) * 4, value)

    return consume(env, chunk, "w_uv", x_of, emit, layer)


@cute.jit
def _merge(env: Env, head, column, runs, layer):
    """One value of a head's latent: sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s, in run order."""
    plan = env.plan
    width = plan.geometry.kv_lora_rank
    step = plan.tiles * TILE  # rows from a run's tile to the next run's
    values = env.exchange("partial", layer) + Int64(head * width + column) * 4
    weights = env.exchange("partial_ml", layer) + Int64(head) * 8
    highest, total, latent = Float32(-math.inf), Float32(0.0), Float32(0.0)
    for start in cutlass.range(0, runs, _MERGED, unroll=1):
        loaded = [_no_run() for _ in range(_MERGED)]
        for i in cutlass.range_constexpr(_MERGED):
            if start + i < runs:
                row = Int64((start + i) * step)
                value = ptx.ld_f32(values + row * (width * 4))
                loaded[i] = [*ptx.ld2_f32(weights + row * 8), value]
        top = highest
        for m, _, _ in loaded:
            top = ptx.maximum(top, m)
        correction = ptx.exp2(highest - top)
        total, latent = total * correction, latent * correction
        for m, length, value in loaded:
            weight = ptx.exp2(m - top)
            total = ptx.fma(weight, length, total)
            latent = ptx.fma(weight, value, latent)
        highest = top
    return ptx.divide(latent, total)


def _no_run():
    """(m, l, o) of a run that is not there: it weighs nothing."""
    return [Float32(-math.inf), Float32(0.0), Float32(0.0)]
