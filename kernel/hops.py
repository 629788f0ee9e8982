"""Hops: after one, every CTA has what the others computed. And the watchdog in every wait.

Contract
--------
`arrive(name)`, by all consumer threads: everything that the CTA's consumers have stored so far is
part of the hop. `wait(name, n)`, by all consumer threads: returns once every CTA (of every rank,
where the hop is an all-reduce) has arrived for the n-th time since the workspace was zeroed.

Why a hop orders
----------------
A consumer's stores to the exchange come before the named barrier in `arrive`; thread 0 passes that
barrier and then adds to the counter with `red.release`. Release is cumulative: it covers what
thread 0 observed through the barrier. The reading CTA's thread 0 sees the count with `ld.acquire`
and then passes a barrier with its CTA, so all of its threads are after all stores of all CTAs. They
read with `ld.relaxed.gpu`, which no L1 line can serve.

Counters only grow, and go on over launches (`epoch` counts decoded tokens), so nothing is ever
reset; targets are compared by the sign of a 32-bit difference, so wrapping is harmless.

Why buffers may be reused
-------------------------
Each hop has its own buffer, written once a layer. All CTAs take part in every hop, in one order:
qkv, q (where q_lora is not null), q_lat, partial, value, o, route (MoE layers), act, down. A CTA
that writes the buffer of hop X for layer l + 1 has passed the last hop before it, and every CTA
arrived at that hop after it had finished reading X of layer l:

| buffer | read between | next written after the hop |
|---|---|---|
| qkv | qkv and q_lat, by consumers and scouts | down |
| q | q (or qkv) and partial | qkv, or down where q_lora is null |
| q_lat | q_lat and partial | q, or qkv |
| partial | partial and value | q_lat |
| value | value and o | partial |
| o | o and act | value |
| route | route and act, by scouts; a CTA's consumers wait for its scout | o |
| act | act and down | o |
| down | down and the next qkv (or best) | act |
| best | best and the next token's qkv | down |

The scout of the last CTA appends to the cache and arrives at the hop after qkv as one arrival
more. Consumers do not wait for `route`: their scout does, and hands them the list of routed units
over an mbarrier.

The watchdog
------------
Every wait, on a counter or on an mbarrier, looks at the global timer once it has taken a while.
After `timeout` ns (consumers: three quarters of it), or as soon as another CTA has given up, it gives up too: the first one describes
itself in the status block (words: 1, rank, CTA, warp, layer, phase, position, expected, seen), all
later waits of the CTA return at once, no copy is issued any more, and the launch ends with the
token. Values computed meanwhile are garbage, but no address depends on a value that is not bounded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.plan import HOPS, WARPS

#: Named barrier of the consumer warps.
CONSUMERS = 1


def sync(env: Env) -> None:
    """All consumer threads of the CTA meet."""
    ptx.barrier(CONSUMERS, 32 * WARPS)


@cute.jit
def give_up(env: Env, started, at, expected, seen):
    """Called while waiting: 1 if the wait is to end without what it waits for."""
    out = ptx.lds_volatile(env.at("abort"))
    if out == 0:
        if ptx.ld_relaxed(env.counter("abort")) != 0:
            out = Int32(1)
        # Consumers first: producer and scout wait for them, so theirs is the telling phase.
        bound = env.param("timeout")
        if env.warp < WARPS:
            bound = bound - (bound >> 2)
        if ptx.now() - started > bound:
            out = Int32(1)
            if ptx.claim(env.counter("abort")) == 0:
                status = env.param("status")
                position = ptx.lds_volatile(env.at("position"))
                words = (env.param("rank"), env.cta, env.warp, at >> 5, at & 31, position)
                for index, word in enumerate((*words, expected, seen)):
                    ptx.st_system(status + (4 * index + 4), word)
                ptx.fence_system()
                ptx.st_system(status, Int32(1))
        if out != 0:
            ptx.sts(env.at("abort"), Int32(1))
    return out


@cute.jit
def wait_mbarrier(env: Env, bar, parity, at):
    """Wait for a phase of an mbarrier; any number of threads."""
    done = ptx.mbarrier_try(bar, parity)
    if done == 0:
        started = ptx.now()
        while done == 0:
            done = ptx.mbarrier_try(bar, parity)
            if done == 0:
                done = give_up(env, started, at, parity, Int32(0))


@cute.jit
def wait_word(env: Env, addr, target, at):
    """Wait until a word of shared memory, which only grows, has reached its target."""
    seen = ptx.lds_acquire(addr)
    if seen < target:
        started = ptx.now()
        spins = Int32(0)
        while seen < target:
            seen = ptx.lds_acquire(addr)
            spins = spins + 1
            if (spins & 1023) == 0:
                if give_up(env, started, at, target, seen) != 0:
                    seen = target


@cute.jit
def poll(env: Env, name: cutlass.Constexpr, target, at):
    """Wait until a counter has reached its target; one thread."""
    scope = "sys" if is_collective(env, name) else "gpu"
    counter = env.counter(name)
    seen = ptx.ld_acquire(counter, scope)
    if seen - target < 0:
        started = ptx.now()
        spins = Int32(0)
        while seen - target < 0:
            seen = ptx.ld_acquire(counter, scope)
            spins = spins + 1
            if (spins & 1023) == 0:
                if give_up(env, started, at, target, seen) != 0:
                    seen = target


def is_collective(env: Env, name: str) -> bool:
    """Whether a hop is an all-reduce over the ranks."""
    return env.plan.ranks > 1 and name in ("o", "down", "best")


def arrivals(env: Env, name: str):
    """Arrivals that make up a hop: the CTAs, and the scout that appends to the cache."""
    ranks = env.plan.ranks if is_collective(env, name) else 1
    return env.ctas * ranks + (1 if name == appended(env) else 0)


def appended(env: Env) -> str:
    """The hop after which the token's own row is in the cache."""
    return "q" if env.plan.geometry.q_lora_rank else "q_lat"


def target_of(env: Env, name: str, n):
    """Count at which the n-th use (from 0) of a hop is complete."""
    return arrivals(env, name) * (Int32(n) + 1)


@cute.jit
def signal(env: Env, name: cutlass.Constexpr):
    """One arrival, by one thread."""
    if const_expr(is_collective(env, name)):
        for rank in cutlass.range_constexpr(env.plan.ranks):
            peer = ptx.ldg_64(env.param("peers") + 8 * rank)
            ptx.red_release(peer + Int64(env.plan.counters[name]), Int32(1), "sys")
    else:
        ptx.red_release(env.counter(name), Int32(1), "gpu")


@cute.jit
def arrive(env: Env, name: cutlass.Constexpr, layer):
    """The CTA's consumers are done with their share of a hop."""
    sync(env)
    if env.thread == 0:
        signal(env, name)
        _mark(env, name, layer, 0)


@cute.jit
def wait(env: Env, name: cutlass.Constexpr, n, layer):
    """Wait for the n-th use of a hop."""
    if env.thread == 0:
        poll(env, name, target_of(env, name, n), where(name, layer))
        _mark(env, name, layer, 1)
    sync(env)


@cute.jit
def _mark(env: Env, name: cutlass.Constexpr, layer, side: cutlass.Constexpr):
    """Note the time, for a profile: CTA 0's thread 0 has arrived (side 0), or goes on (1)."""
    if env.cta == 0 and env.param("marks") != 0:
        index = (layer * len(HOPS) + HOPS.index(name)) * 2 + side
        ptx.stg_64(env.param("marks") + Int64(index) * 8, ptx.now())


@cute.jit
def publish_row(env: Env, name: cutlass.Constexpr, layer, row, value):
    """Store this rank's share of one row of an all-reduce with every rank."""
    if const_expr(is_collective(env, name)):
        offset = env.plan.exchange_offset + env.plan.exchange[name][0]
        mine = (env.param("rank") * env.plan.geometry.hidden_size + row) * 4
        for rank in cutlass.range_constexpr(env.plan.ranks):
            peer = ptx.ldg_64(env.param("peers") + 8 * rank)
            at = peer + Int64(offset) + Int64(layer) * env.param("trace") + Int64(mine)
            ptx.stg_f32(at, value)
    else:
        ptx.stg_f32(env.exchange(name, layer) + Int64(row) * 4, value)
