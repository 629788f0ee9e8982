"""Matrix-vector products: bf16 rows from the ring, an fp32 vector in shared memory, fp32 sums.

Contract
--------
`consume(name, x_of, emit)`, by all consumer warps: computes the CTA's run of rows. `x_of(row)` is
the shared-memory address of the vector that a row is multiplied with, `emit(row, value)` is called
by one lane for each row, in no order between rows.

A row is spread over `lanes` lanes, eight elements (16 bytes) each and step; short rows leave room
for several rows at a time. The vector is stored so that each of a lane's two 16-byte loads is free
of bank conflicts:

    element e of x:  step s = e / (8 lanes), lane l = e / 8 % lanes, half f = e / 4 % 2
    address:         ((2 s + f) * lanes + l) * 16 + e % 4 * 4

Sums run over a lane's elements in order of steps, then over lanes in a butterfly: one fixed order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env
from dsv2mk.kernel.hops import sync
from dsv2mk.kernel.plan import STEP, WARPS, lanes_of, vector_bytes
from dsv2mk.kernel.stream import land, release, run_of

#: Threads that consume.
CONSUMER_THREADS = 32 * WARPS
#: Rows that share the loads of x.
_SHARING = 2


def place(element, lanes: int):
    """Offset of a stored vector's element; of the first of a run, for a run that 4 divides."""
    step, lane, half = element // (STEP * lanes), element // STEP % lanes, element // 4 % 2
    return ((2 * step + half) * lanes + lane) * 16 + element % 4 * 4


def dot8(words, x, total):
    """total + the dot product of eight bf16 (four words) with eight fp32."""
    for i in range(4):
        total = ptx.fma(ptx.bf16_low(words[i]), x[2 * i], total)
        total = ptx.fma(ptx.bf16_high(words[i]), x[2 * i + 1], total)
    return total


@cute.jit
def reduce_lanes(value, lanes: cutlass.Constexpr):
    """Sum over each group of `lanes` lanes; all of them get it."""
    mask = lanes // 2
    while const_expr(mask > 0):
        value = value + ptx.shuffle_xor(value, mask)
        mask = mask // 2
    return value


@cute.jit
def load_x(x, step, lanes: cutlass.Constexpr, lane):
    """A lane's eight elements of a step."""
    at = x + lane * 16 + 2 * step * lanes * 16
    return ptx.lds4_f32(at) + ptx.lds4_f32(at + lanes * 16)


@cute.jit
def long_rows(env: Env, data, x, width: cutlass.Constexpr, rows: cutlass.Constexpr, sums):
    """Add the products of `rows` rows of 32 lanes; sums: a lane's share, a row each."""
    whole, left = width // (32 * STEP), width // STEP % 32
    for first in cutlass.range_constexpr(0, rows, _SHARING):
        for step in cutlass.range(whole, unroll=4):
            sums = _row_step(env, data, x, width, first, rows, step, sums)
        if const_expr(left > 0):
            if env.lane < left:
                sums = _row_step(env, data, x, width, first, rows, whole, sums)
    return sums


@cute.jit
def _row_step(
    env: Env,
    data,
    x,
    width: cutlass.Constexpr,
    first: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    step,
    sums,
):
    xs = load_x(x, step, 32, env.lane)
    for row in cutlass.range_constexpr(first, min(first + _SHARING, rows)):
        words = ptx.lds4(data + env.lane * 16 + step * (32 * STEP * 2) + row * width * 2)
        sums[row] = dot8(words, xs, sums[row])
    return sums


@cute.jit
def consume(
    env: Env,
    chunk,
    name: cutlass.Constexpr,
    x_of: cutlass.Constexpr,
    emit: cutlass.Constexpr,
    layer,
):
    """The CTA's run of rows of one layer of a matrix; the number of the chunk after it."""
    env = env.again()
    matrix = getattr(env.plan, name)
    first, last = run_of(env, name)
    rows, width = matrix.chunk_rows, matrix.width
    if const_expr(matrix.pieces > 1):
        width = matrix.width // matrix.pieces
        for group in cutlass.range(first, last, WARPS, unroll=1):
            count = cutlass.min(last - group, WARPS)
            if env.warp < count:
                at = chunk + (group - first) * matrix.pieces + env.warp
                row = group + env.warp
                sums = [Float32(0.0)]
                for piece in cutlass.range_constexpr(matrix.pieces):
                    data = land(env, at + piece * count, layer)
                    sums = long_rows(env, data, x_of(row) + piece * width * 4, width, 1, sums)
                    release(env, at + piece * count)
                total = reduce_lanes(sums[0], 32)
                if env.lane == 0:
                    emit(row, total)
    elif const_expr(lanes_of(width) == 32):
        for index in cutlass.range(first + env.warp, last, WARPS, unroll=1):
            at = chunk + index - first
            data = land(env, at, layer)
            sums = [Float32(0.0) for _ in range(rows)]
            sums = long_rows(env, data, x_of(index * rows), width, rows, sums)
            release(env, at)
            for row in cutlass.range_constexpr(rows):
                total = reduce_lanes(sums[row], 32)
                if env.lane == 0:
                    emit(index * rows + row, total)
    else:
        for index in cutlass.range(first + env.warp, last, WARPS, unroll=1):
            at = chunk + index - first
            data = land(env, at, layer)
            _short_rows(env, data, index * rows, width, rows, x_of, emit)
            release(env, at)
    return chunk + (last - first) * matrix.pieces


@cute.jit
def _short_rows(
    env: Env,
    data,
    first,
    width: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    x_of: cutlass.Constexpr,
    emit: cutlass.Constexpr,
):
    """A chunk of rows that are shorter than a warp: several at a time."""
    lanes = lanes_of(width)
    together = 32 // lanes
    lane = env.lane % lanes
    for turn in cutlass.range(-(-rows // together), unroll=4):
        row = turn * together + env.lane // lanes
        total = Float32(0.0)
        if row < rows and lane * STEP < width:
            xs = load_x(x_of(first + row), 0, lanes, lane)
            total = dot8(ptx.lds4(data + row * (width * 2) + lane * 16), xs, total)
        total = reduce_lanes(total, lanes)
        if lane == 0 and row < rows:
            emit(first + row, total)


# ---- vectors ----


@cute.jit
def load_vectors(env: Env, dst, source, stride, count, width: cutlass.Constexpr):
    """Fetch `count` vectors of another hop's buffer, `stride` bytes apart, and store them for use.

    Ends with the consumers in step.
    """
    env = env.again()
    fours = width // 4
    lanes = lanes_of(width)
    for index in cutlass.range(env.thread, count * fours, CONSUMER_THREADS, unroll=4):
        vector, element = index // fours, index % fours * 4
        a, b, c, d = ptx.ld4_f32(source + Int64(vector) * stride + Int64(element) * 4)
        at = dst + vector * vector_bytes(width) + place(element, lanes)
        ptx.sts4(at, ptx.bits(a), ptx.bits(b), ptx.bits(c), ptx.bits(d))
    sync(env)


def pairs_of(width: int) -> int:
    """Pairs of a vector that a consumer thread holds."""
    return -(-width // (2 * CONSUMER_THREADS))


def pair(env: Env, index: int):
    """First element of a thread's pair."""
    return 2 * (env.thread + index * CONSUMER_THREADS)


@cute.jit
def load_pairs(env: Env, source, width: cutlass.Constexpr):
    """A thread's pairs of an exchanged fp32 vector; zeros past its end."""
    env = env.again()
    out = [Float32(0.0) for _ in range(2 * pairs_of(width))]
    for index in cutlass.range_constexpr(pairs_of(width)):
        if const_expr((index + 1) * 2 * CONSUMER_THREADS <= width):
            out[2 * index], out[2 * index + 1] = ptx.ld2_f32(source + Int64(pair(env, index)) * 4)
        else:
            if pair(env, index) < width:
                out[2 * index], out[2 * index + 1] = ptx.ld2_f32(
                    source + Int64(pair(env, index)) * 4
                )
    return out


@cute.jit
def load_gamma(env: Env, source, width: cutlass.Constexpr):
    """A thread's words of a bf16 vector, a pair each; issue it before a wait."""
    env = env.again()
    out = [Int32(0) for _ in range(pairs_of(width))]
    for index in cutlass.range_constexpr(pairs_of(width)):
        if pair(env, index) < width:
            out[index] = ptx.ldg(source + Int64(pair(env, index)) * 2)
    return out


@cute.jit
def norm(
    env: Env,
    dst,
    values,
    gamma,
    width: cutlass.Constexpr,
    eps: cutlass.Constexpr,
    top: cutlass.Constexpr = False,
):
    """Store x * rsqrt(mean(x^2) + eps) * gamma for use. Ends with the consumers in step.

    top: leave the largest magnitude of the result in `x_top`.
    """
    env = env.again()
    square = Float32(0.0)
    for value in values:
        square = ptx.fma(value, value, square)
    square = reduce_lanes(square, 32)
    reduce = env.at("reduce")
    if env.lane == 0:
        ptx.sts_f32(reduce + env.warp * 4, square)
    if const_expr(top):
        highest = Int32(0)  # magnitudes order as their words
        for index in cutlass.range_constexpr(pairs_of(width)):
            low = ptx.absolute(values[2 * index] * ptx.bf16_low(gamma[index]))
            high = ptx.absolute(values[2 * index + 1] * ptx.bf16_high(gamma[index]))
            larger = ptx.maximum(low, high)
            highest = cutlass.max(highest, ptx.bits(larger))
        highest = ptx.warp_max_u32(highest)
        if env.lane == 0:
            ptx.sts(reduce + (WARPS + env.warp) * 4, highest)
    sync(env)
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(WARPS // 4):
        for part in ptx.lds4_f32(reduce + warp * 16):
            total = total + part
    scale = ptx.rsqrt(ptx.fma(total, Float32(1.0 / width), Float32(eps)))
    if const_expr(top):
        if env.warp == 0:
            highest = Int32(0)
            if env.lane < WARPS:
                highest = ptx.lds(reduce + (WARPS + env.lane) * 4)
            highest = ptx.warp_max_u32(highest)
            if env.lane == 0:
                ptx.sts_f32(env.at("x_top"), ptx.as_f32(highest) * scale)
    for index in cutlass.range_constexpr(pairs_of(width)):
        if pair(env, index) < width:
            a = values[2 * index] * scale * ptx.bf16_low(gamma[index])
            b = values[2 * index + 1] * scale * ptx.bf16_high(gamma[index])
            ptx.sts2_f32(dst + place(pair(env, index), lanes_of(width)), a, b)
    sync(env)
