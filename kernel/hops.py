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

With several ranks `o`, `down` and `best` are written by all of them, and the other hops are a
rank's own: what orders the ranks are `o` and `down` themselves, each between two uses of the other.
All ranks must launch the same number of CTAs.

The scout of the last CTA appends to the cache and arrives at the hop after qkv as one arrival
more. Consumers do not wait for `route`: their scout does, and hands them the list of routed units
over an mbarrier.

The watchdog
------------
Every wait, on a counter, an mbarrier or a word, notes in shared memory since when it has lasted.
One warp of the CTA reads these notes. If a wait has lasted for `timeout` ns (consumers: three
quarters of it), or another CTA has given up, it raises the CTA's abort flag, and the first CTA to
do so fills the status block (words: 1, rank, CTA, warp, layer, phase, position, expected, seen).
From then on all waits return at once, no copy is issued any more, and the launch ends with the
token. Values computed meanwhile are garbage, but no address depends on a value that is not bounded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from dsv2mk.kernel import ptx
from dsv2mk.kernel.env import Env, where
from dsv2mk.kernel.plan import HOPS, WARPS, WATCHDOG

#: Named barrier of the consumer warps.
CONSUMERS = 1


def sync(env: Env) -> None:
    """All consumer threads of the CTA meet."""
    ptx.barrier(CONSUMERS, 32 * WARPS)


@cute.jit
def wait_mbarrier(env: Env, bar, parity, at):
    """Wait for a phase of an mbarrier, or until the launch is given up; whole warps."""
    done = ptx.mbarrier_try(bar, parity)
    if done == 0:
        _announce(env, at, parity)
        while done == 0:
            done = ptx.mbarrier_try(bar, parity)
            if done == 0:
                done = ptx.lds_volatile(env.at("abort"))
        _withdraw(env)


@cute.jit
def wait_word(env: Env, addr, target, at):
    """Wait until a word of shared memory, which only grows, has reached its target; whole warps."""
    seen = ptx.lds_acquire(addr)
    if seen < target:
        _announce(env, at, target)
        while seen < target:
            seen = ptx.lds_acquire(addr)
            if ptx.lds_volatile(env.at("abort")) != 0:
                seen = target
        _withdraw(env)


@cute.jit
def poll(env: Env, name: cutlass.Constexpr, target, at):
    """Wait until a counter has reached its target; the first thread of a warp."""
    scope = "sys" if is_collective(env, name) else "gpu"
    counter = env.counter(name)
    seen = ptx.ld_acquire(counter, scope)
    if seen - target < 0:
        _announce(env, at, target)
        while seen - target < 0:
            seen = ptx.ld_acquire(counter, scope)
            ptx.sts(_waits(env) + 12, seen)
            if ptx.lds_volatile(env.at("abort")) != 0:
                seen = target
        _withdraw(env)


def _waits(env: Env):
    """A warp's four words for the watchdog: waiting since (0: not), where, expected, seen."""
    return env.at("waits") + env.warp * 16


def _clock():
    """The global timer in units of 1024 ns, 32 bits, never 0."""
    return (ptx.now() >> 10).to(Int32) | 1


@cute.jit
def _announce(env: Env, at, expected):
    if env.lane == 0:
        ptx.sts(_waits(env) + 4, at)
        ptx.sts(_waits(env) + 8, expected)
        ptx.sts(_waits(env) + 12, Int32(0))
        ptx.sts_release(_waits(env), _clock())


@cute.jit
def _withdraw(env: Env):
    if env.lane == 0:
        ptx.sts(_waits(env), Int32(0))


@cute.jit
def watchdog(env: Env):
    """The watchdog warp: look at each warp's wait every few microseconds, until the launch ends."""
    env = env.again()
    bound = (env.param("timeout") >> 10).to(Int32)
    # Consumers first: producer and scout wait for them, so theirs is the telling phase.
    if env.lane < WARPS:
        bound = bound - (bound >> 2)
    waits = env.at("waits") + env.lane * 16
    running = Int32(1)
    while running != 0:
        ptx.sleep(2000)
        since = Int32(0)
        if env.lane < WATCHDOG:
            since = ptx.lds_acquire(waits)
        late = Int32(0)
        if since != 0 and _clock() - since > bound:
            late = Int32(1)
        others = ptx.ballot(late)
        if others != 0 and ptx.lds_volatile(env.at("abort")) == 0:
            if late != 0 and (others & ((Int32(1) << env.lane) - 1)) == 0:
                if ptx.claim(env.counter("abort")) == 0:
                    _describe(env, waits)
        if ptx.ld_relaxed(env.counter("abort")) != 0:
            ptx.sts(env.at("abort"), Int32(1))
        if ptx.lds_volatile(env.at("finished")) != 0:
            running = Int32(0)


@cute.jit
def _describe(env: Env, waits):
    """Fill the status block with the wait of this lane's warp."""
    at = ptx.lds(waits + 4)
    words = (env.param("rank"), env.cta, env.lane, at >> 5, at & 31)
    more = (ptx.lds(env.at("position")), ptx.lds(waits + 8), ptx.lds(waits + 12))
    for index, word in enumerate(words + more):
        ptx.st_system(env.param("status") + (4 * index + 4), word)
    ptx.fence_system()
    ptx.st_system(env.param("status"), Int32(1))


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
    env = env.again()
    sync(env)
    if env.thread == 0:
        signal(env, name)
        mark(env, name, layer, 0)


@cute.jit
def wait(env: Env, name: cutlass.Constexpr, n, layer):
    """Wait for the n-th use of a hop."""
    env = env.again()
    if env.thread == 0:
        poll(env, name, target_of(env, name, n), where(name, layer))
        mark(env, name, layer, 1)
    sync(env)


@cute.jit
def mark(env: Env, name: cutlass.Constexpr, layer, side: cutlass.Constexpr):
    """Note the time, for a profile: CTA 0 has arrived (side 0), or goes on (1); one thread."""
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
