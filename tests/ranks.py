"""A rank that the tests start as a process, also `python ranks.py SCENARIO ...` by torchrun.

It tells the tests what it does in lines of JSON on stdout, the last its exit code.

Also a GpuDecoder whose state lies in the host's memory, and a stand-in for the kernel that ranks
can run together.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from fake_gpu import make_sidecar
from torch import Tensor

from dsv2mk.artifacts import console
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.geometry import Geometry, preset_config
from dsv2mk.manifests.layout import RankLayout
from dsv2mk.runner import world as world_module
from dsv2mk.runner.decoder import GpuDecoder, generate
from dsv2mk.runner.world import Shared, World, leaving

#: 4 layers. Two ranks have 251 rows of the vocabulary each, and so one that there is no token for.
GEOMETRY = Geometry.from_config({**preset_config("tiny"), "vocab_size": 501})
#: Longer than any test; a rank that waits so is killed.
LONG = 100.0


# ---- a decoder in the host's memory ----


def host_decoder(
    kernel: Any,
    geometry: Geometry = GEOMETRY,
    *,
    ranks: int = 1,
    world: World | None = None,
    context: int = 16,
    trace: bool = True,
    timeout: float = 2.5,
) -> Any:
    """A GpuDecoder whose state lies in the host's memory; the kernel gets sidecar and device."""
    addresses = {
        **{"replicated": 1000, "partitioned": 2000, "ffn_gate_up": 3000},
        **{"ffn_gate_up_scale": 4000, "ffn_down": 5000, "ffn_down_scale": 6000},
    }
    kernel.device = torch.device("cpu")
    kernel.sidecar = make_sidecar(
        geometry,
        ranks=ranks,
        workspace={
            "exchange_offset": 512,
            "exchange_bytes": 1024,
            "counters": {},
            "exchange": {
                **{"qkv": [0, [6]], "act": [256, [3, 4]]},
                **{"o": [512, [ranks, 5]], "down": [768, [ranks, 5]]},
            },
            "hops": ["qkv", "q", "route", "down", "best"],
        },
    )
    rank = 0 if world is None else world.rank
    layout: Any = SimpleNamespace(
        base=addresses.__getitem__,
        address=addresses.__getitem__,
        layout=RankLayout(geometry=geometry, topology=kernel.sidecar.topology, rank=rank),
    )
    zeros = torch.zeros

    def unpinned(*shape: Any, pin_memory: bool = False, **given: Any) -> Tensor:
        return zeros(*shape, **given)

    with mock.patch.object(torch, "zeros", unpinned):
        return GpuDecoder(
            layout, kernel, context=context, ctas=9, timeout=timeout, trace=trace, world=world
        )


class Launches:
    """A kernel that only notes what it is launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, int]]] = []

    def launch(self, ctas: int, arguments: dict[str, int]) -> None:
        self.calls.append((ctas, dict(arguments)))

    def ended(self) -> bool:
        return True


# ---- a kernel of several ranks ----


def logit(token: int, position: int, row: int) -> float:
    """No two rows have one: 509 is a prime number."""
    return float((31 * token + 17 * position + 101 * row) % 509)


class Together:
    """A kernel whose steps end once all ranks have come to them, by counters in their memory.

    It knows nothing but its arguments. From position `hangs` on this rank no longer comes, until
    twice as long again as the others wait for it. Runs whenever somebody looks for its end.
    """

    def __init__(self, hangs: int | None = None) -> None:
        self.hangs = hangs
        self.launched: list[Iterator[None]] = []

    def launch(self, ctas: int, arguments: dict[str, int]) -> None:
        pointers = {"cache", "workspace", "peers", "tokens", "logits", "status", "times"}
        shown = {name: value for name, value in arguments.items() if name not in pointers}
        say(launch=shown | {"marks": bool(shown["marks"]), "ctas": ctas})
        self.launched.append(self._run(arguments))

    def ended(self) -> bool:
        while self.launched:
            for _ in self.launched[0]:
                return False
            self.launched.pop(0)
        return True

    def _run(self, given: dict[str, int]) -> Iterator[None]:
        vocabulary, ranks = self.sidecar.geometry.vocab_size, self.sidecar.topology.ranks
        count = -(-vocabulary // ranks)
        rows = (ctypes.c_float * count).from_address(given["logits"])
        tokens = (ctypes.c_int32 * (given["cache_tokens"] + 1)).from_address(given["tokens"])
        peers = (ctypes.c_int64 * ranks).from_address(given["peers"])
        come = [ctypes.c_int64.from_address(peer) for peer in peers]
        status = (ctypes.c_int32 * 16).from_address(given["status"])
        wait = given["timeout"] / 1e9
        for position in range(given["position"], given["position"] + given["steps"]):
            token = tokens[position]
            for row in range(count):
                rows[row] = logit(token, position, given["rank"] * count + row)
            until = time.monotonic() + wait
            if position == self.hangs:
                say(hangs=position)
                until += 2 * wait
            else:
                come[given["rank"]].value += 1
            while min(one.value for one in come) <= position:
                if time.monotonic() > until:
                    status[:9] = [1, given["rank"], 5, 6, 3, 2, position, 120, 119]
                    return
                yield
            if position + 1 >= given["known"]:
                every = [logit(token, position, row) for row in range(vocabulary)]
                tokens[position + 1] = every.index(max(every))


class Event:
    """torch.cuda's, of what `kernel` was launched with."""

    kernel: Any = None

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return bool(self.kernel.ended())

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Mapped(World):
    """Ranks whose memory lies in files that all have mapped."""

    def share(self, size: int, device: Any, *, multicast: bool = False) -> Shared:
        folder = Path(os.environ["RANKS_FOLDER"])
        memory = [
            torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.uint8)
            for rank in range(self.size)
        ]
        addresses = [one.data_ptr() for one in memory]
        return Shared(
            own=memory[self.rank], addresses=addresses, multicast=0, of=memory.__getitem__
        )

    def close(self, *, failed: bool = False) -> None:
        super().close(failed=failed)
        if os.environ.get("RANKS_LINGER") == str(self.rank):
            time.sleep(1)


# ---- scenarios ----


def say(**what: Any) -> None:
    # Read while this process goes on, also one that will be killed.
    print(json.dumps(what), flush=True)


def hang() -> None:
    say(hangs=True)
    time.sleep(LONG)


def give_orders(world: World) -> None:
    """Orders with arguments of all kinds; rank 2 is slow to take them."""
    world.agree({"world size": 3, "context": 5, "seed": None, "own GPU": f"uuid {world.rank}"})
    time.sleep(0.2 * world.rank)
    say(came=time.monotonic())
    world.meet("loaded")
    say(met=time.monotonic())
    world.group()  # is left in peace
    if not world.leads:
        world.order("mine", [])  # not this rank's to give
        for name, args, given in world.orders():
            say(order=[name, args, given])
            time.sleep(0.1 if world.rank == 2 else 0)
        return
    for number in range(20):
        world.order("count", [number])
    world.order("place", [[5, 0, 499]])
    world.order("run", [3], {"timed": True, "marked": False, "noise": None, "name": "x y"})
    world.order("end")
    say(ended=True)


def agree(world: World, name: str, *values: str) -> None:
    """One fact, of each rank its own value."""
    world.agree({"first": 1, name: json.loads(values[world.rank]), "last": 2})
    say(agreed=True)


def fail(world: World, kind: str) -> None:
    """Rank 1 fails at what it does; the others wait for it."""
    world.doing("loading")
    if world.rank == 1:
        if kind == "artifact":
            raise ArtifactError("rank-01.ffn.safetensors ends early", fix="dsv2mk verify DIR")
        raise ZeroDivisionError("division by zero\nand more")
    world.meet("loaded")


def hang_before(world: World) -> None:
    """Rank 1 never comes to agree."""
    if world.rank == 1:
        hang()
    say(waits=True)
    world.agree({})


def hang_amid(world: World, who: str) -> None:
    """A rank no longer takes part after three orders."""
    for number in range(5 if world.leads else 0):
        if number == 3 and who == "0":
            hang()
        world.order("count", [number])
        say(gave=number)
    if not world.leads:
        for _, (number,), _ in world.orders():
            say(took=number)
            if number == 2 and world.rank == int(who):
                hang()


def idle(world: World) -> None:
    """All wait for orders that nobody gives, or for one who does not take one."""
    say(waits=True)
    if world.leads:
        world._wait("never", 1)
    for _ in world.orders():
        pass


def join(world: World) -> None:
    say(joined=world.rank)


def decode(world: World, hangs: str = "none") -> None:
    """Logits and tokens of all ranks together; with `hangs` rank 1 stops at that position."""
    at = None if hangs == "none" else int(hangs)
    kernel = Together(at if world.rank == 1 else None)
    Event.kernel, torch.cuda.Event = kernel, Event  # type: ignore[assignment,misc]
    timeout = 20.0 if at is None else 2.0
    with host_decoder(kernel, ranks=2, world=world, context=40, timeout=timeout) as decoder:
        if decoder.follow():
            say(position=decoder.position, epoch=decoder._epoch)
            return
        decoder.reset(noise=1)
        decoder.feed([7, 500, 0])
        say(logits=decoder.logits.tolist())
        say(step=decoder.step(9).tolist())
        noted: list[list[float]] = []
        new = generate(decoder, 4, 3, frozenset(), lambda row: noted.append(row.tolist()))
        say(new=list(new), noted=noted)
        say(new=list(generate(decoder, 250, 20, frozenset(), None, burst=8)))
        decoder.marked_step()
        say(differ=differences(decoder), position=decoder.position, epoch=decoder._epoch)


def differences(decoder: GpuDecoder) -> list[str | None]:
    """What is found without, and with each of some bytes of rank 1 changed."""
    found = [decoder.ranks_differ()]
    theirs = decoder._shared.of(1)
    # Of layer 0 and 3 the first and last byte of each; a byte past, which is nobody's.
    for place in (512, 551, 552, 768, 807, 3 * 1024 + 551, 3 * 1024 + 768, 3 * 1024 + 808):
        theirs[512 + place] ^= 128
        found.append(decoder.ranks_differ())
        theirs[512 + place] ^= 128
    return [*found, decoder.ranks_differ()]


SCENARIOS: dict[str, Callable[..., None]] = {
    **{"give-orders": give_orders, "agree": agree, "fail": fail, "hang-before": hang_before},
    **{"hang-amid": hang_amid, "idle": idle, "join": join, "decode": decode},
}


@click.command()
@click.argument("scenario")
@click.argument("args", nargs=-1)
def program(scenario: str, args: tuple[str, ...]) -> None:
    world = Mapped.join()
    say(pid=os.getpid(), rank=world.rank)
    with leaving(world, None):
        SCENARIOS[scenario](world, *args)


def find_ended(rank: int) -> None:
    """Have the others come to know of a rank's process only when that has ended."""
    own, size, watch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.pidfd_open
    others = iter([other for other in range(size) if other != own])

    def late(pid: int) -> int:
        if next(others) == rank:
            with suppress(ProcessLookupError):
                while True:
                    os.kill(pid, 0)
                    time.sleep(0.01)
        return watch(pid)

    os.pidfd_open = late  # type: ignore[assignment]


def main(args: list[str]) -> None:
    if "RANKS_ENDED" in os.environ:
        find_ended(int(os.environ["RANKS_ENDED"]))
    world_module.JOIN_TIMEOUT = float(os.environ.get("RANKS_JOIN", "30"))
    world_module.ANSWER_TIMEOUT = float(os.environ.get("RANKS_ANSWER", "30"))
    code = console.run(program, args)
    say(code=code)
    sys.exit(code)


def start(args: list[str], env: dict[str, str], out: str, err: str) -> None:
    """`main` of a process that has been forked."""
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.update(env)
    main(args)


if __name__ == "__main__":
    main(sys.argv[1:])
