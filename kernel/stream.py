"""The weight stream: every weight of a token passes through one ring of shared memory.

Contract
--------
Two producer warps walk through the phases of the decode in the order in which the consumers do, and
`push` each chunk that the CTA owns, one the even ones and one the odd ones. The consumers take
chunk c with `land` and hand its slot back with `release`. Both sides count chunks
from the start of the launch: chunk c lives in slot c % slots, and its use of the slot has parity
(c / slots) & 1. How many chunks a phase has is a function of the plan, the CTA, the position and,
for routed units, the routing, so both sides agree on it without talking.

A parity tells which of two phases is over, so nobody may ask for a phase that is two ahead or two
behind. The number of slots is even, so that a slot has one producer, and a producer waits for
phases of its own slots only, which it has opened in order itself; the producers may be any number
of chunks apart. A consumer looks at `issued`, by which the chunk's producer says that it has opened
the slot for it, before it looks at the parity.

A producer never waits for data that a chunk does not depend on. It runs ahead of the consumers
by as much as the ring holds, with two exceptions: KV chunks wait for the cache to be complete, and
routed units for the routing.

Window: before it issues chunk c, a producer waits until its chunk c - window has landed (windows
are even). So about 40 KiB are in flight, which is what HBM's latency needs; more would queue up in
front of the hops' loads and atomics.

Why a slot may be refilled: a consumer's lanes have read the chunk, `__syncwarp` orders the lanes,
lane 0 arrives on `empty`; the producer waits for that phase before it issues the next copy into the
slot. Why the data is seen: the copy engine completes the bytes on `full`, on which each lane waits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.hops import wait_mbarrier, wait_word
from dsv2mk.kernel.plan import PRODUCERS, WARPS


def deal(env: Env, total):
    """[first, end) of `total` things that the CTA owns: runs of equal length, give or take one."""
    return env.cta * total // env.ctas, (env.cta + 1) * total // env.ctas


@cute.jit
def store_runs(env: Env):
    """At launch: the CTA's run of everything that is dealt alike in each layer."""
    for index, total in enumerate(env.plan.runs.values()):
        if env.thread == index:
            first, end = deal(env, Int32(total))
            ptx.sts(env.at("runs") + index * 8, first)
            ptx.sts(env.at("runs") + index * 8 + 4, end)


def run_of(env: Env, name: str):
    """[first, end) chunks of a matrix that the CTA owns, or `rows` of H in down."""
    return ptx.lds2(env.at("runs") + list(env.plan.runs).index(name) * 8)


def slot_address(env: Env, chunk):
    """Shared-memory address of a chunk's slot."""
    plan = env.plan
    return env.at("ring") + (chunk % plan.slots) * (plan.slot + plan.scale_bytes)


def parity_of(env: Env, chunk):
    """Parity of a chunk's use of its slot."""
    return (chunk // env.plan.slots) & 1


@cute.jit
def land(env: Env, chunk, layer):
    """Wait until a chunk is there; its address."""
    at = where("weight stream", layer)
    wait_word(env, issued_word(env, chunk), chunk + 1, at)
    bar = env.at("full") + (chunk % env.plan.slots) * 8
    wait_mbarrier(env, bar, parity_of(env, chunk), at)
    return slot_address(env, chunk)


@cute.jit
def release(env: Env, chunk):
    """The warp has read a chunk."""
    ptx.sync_warp()
    if env.lane == 0:
        ptx.mbarrier_arrive(env.at("empty") + (chunk % env.plan.slots) * 8)


def is_mine(env: Env, chunk):
    """Whether this producer warp issues a chunk."""
    return (chunk & 1) == env.warp - PRODUCERS[0]


def issued_word(env: Env, chunk):
    """Where the producer of a chunk says how far it is."""
    return env.at("issued") + (chunk & 1) * 4


@cute.jit
def open_slot(env: Env, chunk, window: cutlass.Constexpr, count, layer):
    """Wait for a chunk's slot and its turn, and expect `count` bytes; 1 if copies may be issued.

    0 after the launch was given up.
    """
    slots = env.plan.slots
    assert window % 2 == 0
    assert window <= slots
    if chunk >= window:
        before = chunk - window
        bar = env.at("full") + (before % slots) * 8
        wait_mbarrier(env, bar, parity_of(env, before), where("weight stream", layer))
    if chunk >= slots:
        bar = env.at("empty") + (chunk % slots) * 8
        wait_mbarrier(env, bar, parity_of(env, chunk - slots), where("ring slot", layer))
    running = Int32(1)
    if ptx.lds_volatile(env.at("abort")) != 0:
        running = Int32(0)
    if running != 0:
        if env.lane == 0:
            ptx.mbarrier_expect(env.at("full") + (chunk % slots) * 8, count)
            ptx.sts_release(issued_word(env, chunk), chunk + 1)
    ptx.sync_warp()
    return running


@cute.jit
def push(env: Env, policy, chunk, source, count, window: cutlass.Constexpr, layer):
    """Issue one chunk of `count` contiguous bytes, by the producer warp whose chunk it is."""
    if is_mine(env, chunk):
        if open_slot(env, chunk, window, count, layer) != 0:
            if env.lane == 0:
                bar = env.at("full") + (chunk % env.plan.slots) * 8
                ptx.bulk_copy(slot_address(env, chunk), source, count, bar, policy)


@cute.jit
def push_matrix(env: Env, policy, chunk, base, name: cutlass.Constexpr, layer):
    """Issue a CTA's run of one layer of a matrix; the number of the chunk after it.

    Rows that are longer than a slot go piece by piece: sixteen rows' first pieces, then their
    second ones, so that a warp meets all pieces of its row and all warps have work.
    """
    matrix = getattr(env.plan, name)
    first, last = run_of(env, name)
    size = matrix.chunk_bytes
    if const_expr(matrix.pieces == 1):
        for index in cutlass.range(first, last, unroll=1):
            source = base + Int64(index) * size
            at = chunk + index - first
            push(env, policy, at, source, Int32(size), matrix.window, layer)
    else:
        at = chunk
        for group in cutlass.range(first, last, WARPS, unroll=1):
            rows = cutlass.min(last - group, WARPS)
            for piece in cutlass.range_constexpr(matrix.pieces):
                for row in cutlass.range(rows, unroll=1):
                    source = base + Int64(group + row) * matrix.row_bytes + piece * size
                    push(env, policy, at, source, Int32(size), matrix.window, layer)
                    at = at + 1
    return chunk + (last - first) * matrix.pieces
