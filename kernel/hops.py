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

With several ranks
------------------
`o`, `down` and `best` are collectives, the other hops are a rank's own. Every rank has a buffer
with a row for each rank. It writes its row into the buffers of all, and adds up its own buffer in
rank order (of `best`, it takes the best). So all ranks get equal bits, with either collective. All
ranks must launch the same number of CTAs. `Plan.collective` says how a row is written:

- p2p: R plain stores, one `fence.acq_rel.sys` and R `red.relaxed.sys`, through the addresses in
  `peers`. (R `red.release.sys` would each wait for the stores, one after the other.)
- multimem: one `multimem.st` and one `multimem.red`, through the workspaces' NVLink multicast
  address, entry R of `peers`: the switch passes them on to all ranks. It does not sum
  (`multimem.ld_reduce`): the order would be the switch's, so bits could change; and each of the N
  CTAs needs all of H, so N H values would come through it where R H are enough.

Why p2p orders, in words of the PTX ISA's memory model. N CTAs a rank; c is a CTA of any rank, d one
of rank q:

1. W, a weak store of a share to q by some thread of c, precedes the `barrier.sync` in `arrive`.
   That synchronizes the CTA's threads, so W precedes what thread 0 of c does next,
2. `fence.acq_rel.sys` and `red.relaxed.sys` on q's counter: a release pattern. Causality order is
   transitive, so it covers the stores of all threads of c, not only its own.
3. Thread 0 of d polls with `ld.acquire.sys`. A sum that has reached its target has passed through
   all N R reds, each an atomic of scope sys, so all of them precede the load in observation order,
   and each of the N R release patterns synchronizes with it.
4. A barrier, as in 1, and the read by some thread of d.

So W precedes the read in causality order, and the read returns it. As they do not race, neither
needs a scope: the read is `ld.relaxed.gpu` only to pass by the L1. The counter does: two operations
synchronize if the scope of each includes the other's thread, and gpu is one device's threads. (The
model speaks of one program's addresses. Processes map a peer's memory each at their own; we take
these for one address, as all that use peer memory do.) Data have no flags: the count says that
rows are there. A flag beside each value would save the wait of the release for the stores before
it, about a trip over NVLink a hop, for twice the bytes, and R H words to poll instead of one.

Why ranks may write a buffer again: all CTAs of all ranks arrive at each collective, and wait for
it. A CTA reads X, arrives at the next collective Y, and whoever writes X again has waited for Y:

- X = o of layer l: Y is down of l. It is written again in the next layer, or the next token.
- X = down of l: Y is o of l + 1, or best after the last layer. Written again after both that Y and
  the next o.
- X = best: Y is o of layer 0 of the next token, at which a CTA arrives after it has chosen. Written
  again after the down of that token's last layer.

Steps 1 to 4 with the read in place of W: it precedes the new store in causality order, so it cannot
return it. A launch's end and the next one's start are ordered by the stream, so this holds over
launches; ranks need not start together. Only the zeroes must be in all workspaces before any rank
starts.

multimem is the same chain, with `multimem.st.weak` for W and `multimem.red.release.sys` in 2. For
the PTX ISA a multicast address is a virtual address of one location on each device, for
`multimem.*` alone, whose qualifiers mean what they mean in the memory model. It is an alias of each
rank's own address, and aliases count as different proxies: an access through one precedes an access
through the other only if there is a `fence.proxy.alias` on the path. Thread 0 has it before the
red, so it is on every path from a store to a read, and from a read over Y to the next store. The
counter too is added to through one address and read through the other. No fence can stand between
a red and a poll that run at once, and taken literally the model does not let them synchronize: they
are not morally strong. The CUDA programming guide's example of a barrier over multicast does just
this, with a `fence.proxy.alias` between red and poll: hence the second one. The kernel with
multimem has been compiled and read, and never run.

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


def is_multimem(env: Env, name: str) -> bool:
    """Whether it is one that uses the multicast address."""
    return is_collective(env, name) and env.plan.collective == "multimem"


def multicast(env: Env):
    """Multicast address of the workspaces. Read where it is used: no register is kept for it."""
    return ptx.ldg_64(env.param("peers") + 8 * env.plan.ranks)


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
    if const_expr(is_multimem(env, name)):
        ptx.fence_alias()
        ptx.multimem_red_release(multicast(env) + Int64(env.plan.counters[name]), Int32(1))
        ptx.fence_alias()
    elif const_expr(is_collective(env, name)):
        ptx.fence_system()  # once: it waits for the stores over NVLink
        for rank in cutlass.range_constexpr(env.plan.ranks):
            peer = ptx.ldg_64(env.param("peers") + 8 * rank)
            ptx.red_relaxed_system(peer + Int64(env.plan.counters[name]), Int32(1))
    else:
        ptx.red_release(env.counter(name), Int32(1))


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
        if const_expr(is_multimem(env, name)):
            # Added up in this order: in another, ptxas spills with two ranks.
            at = Int64(mine + offset) + Int64(layer) * env.param("trace")
            ptx.multimem_st_f32(multicast(env) + at, value)
        else:
            for rank in cutlass.range_constexpr(env.plan.ranks):
                peer = ptx.ldg_64(env.param("peers") + 8 * rank)
                at = peer + Int64(offset) + Int64(layer) * env.param("trace") + Int64(mine)
                ptx.stg_f32(at, value)
    else:
        ptx.stg_f32(env.exchange(name, layer) + Int64(row) * 4, value)
