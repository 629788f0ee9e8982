"""The ranks of a torchrun: who they are, what they agree on, and what one of them failing means.

Each process holds one rank and one GPU. Rank 0 leads: it gives orders, one at a time, which all
other ranks carry out as it does itself; so all enter the kernel together. Between launches they
talk through torchrun's store; inside the kernel through each other's GPU memory (`share`).

No wait here is for ever: whoever waits looks at the others, and raises PeerError if one has ended
or has told that it failed.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from dsv2mk.manifests.errors import NodeError, PeerError, UsageError, UserError

#: Seconds between two looks at the store, at first and after a while; and at other processes.
_POLL, _SLOW_POLL, _LOOK = 0.0002, 0.005, 0.05
#: Seconds to wait for all ranks to start; and, once told to end, for word of a rank that failed.
JOIN_TIMEOUT, _GRACE = 60.0, 2.0
#: Seconds that a rank which has loaded may take to answer: one that is alive does so at once.
ANSWER_TIMEOUT = 60.0

_FIX = "torchrun --nproc_per_node=R -m dsv2mk.runner ..."


@dataclass(kw_only=True, slots=True)
class Shared:
    """Memory that every rank can write: this rank's, and where each rank's is mapped here."""

    own: Any  # uint8 tensor
    addresses: list[int]  # by rank
    multicast: int  # address that writes to all ranks' memory at once; 0: there is none
    of: Callable[[int], Any]  # the memory of a rank as a uint8 tensor


class World:
    """The ranks of this launch, and this process's place among them."""

    def __init__(self, rank: int = 0, size: int = 1, index: int = 0, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.index = index  # of this process's device
        self._store = store
        self._what = "starting"
        self._orders = 0
        self._watched: dict[int, tuple[int | None, int]] = {}  # rank -> (pidfd, pid)
        self._told_to_end: float | None = None
        self._looked = 0.0
        self._handler: Any = None
        self._group = False

    @classmethod
    def join(cls) -> "World":
        """The world of torchrun's variables; without them this process is all of it.

        Raises UsageError for variables that torchrun does not set so, NodeError for ranks on
        several nodes, PeerError if a rank does not come.
        """
        size, index, rank, local = _variables()
        if size == 1:
            return cls(index=index)
        if local != size:
            raise NodeError(
                "ranks on several nodes: the kernel needs all ranks' memory mapped",
                expected=f"{size} processes on one node",
                found=local,
                fix=_FIX,
            )
        import torch.distributed as dist

        try:
            store, rank, size = next(
                dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT))  # type: ignore[attr-defined]
            )
        except (RuntimeError, ValueError) as error:
            raise NodeError(f"torchrun's store: {_first_line(error)}", fix=_FIX) from None
        world = cls(rank, size, index, dist.PrefixStore("dsv2mk", store))  # type: ignore[attr-defined]
        world._catch_termination()
        try:
            world._meet()
        except BaseException:
            world.close(failed=True)
            raise
        return world

    # ---- what a rank tells the others ----

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def doing(self, what: str) -> None:
        """Note what this rank is at, for what the others are told if it fails."""
        self._what = what

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise NodeError on every rank, with the first fact of a rank that differs from rank 0's.

        Facts named `own ...` must differ from rank to rank instead.
        """
        if self.size == 1:
            return
        self._set(f"facts/{self.rank}", dict(facts))
        seen: dict[str, int] = {}
        first = self._wait("facts/0", 0)
        for rank in range(self.size):
            theirs = self._wait(f"facts/{rank}", rank)
            for name, value in theirs.items():
                if name.startswith("own "):
                    other = seen.setdefault(f"{name}={value}", rank)
                    if other != rank:
                        raise NodeError(
                            f"ranks {other} and {rank} have one {name[4:]}", found=value, fix=_FIX
                        )
                elif value != first.get(name):
                    raise NodeError(
                        f"rank {rank} differs from rank 0: {name}",
                        expected=first.get(name),
                        found=value,
                    )

    def meet(self, where: str) -> None:
        """Return once all ranks have called it, however long that takes."""
        if self.size > 1:
            self._set(f"{where}/{self.rank}", True)
            for rank in range(self.size):
                self._wait(f"{where}/{rank}", rank)

    def order(
        self, name: str, args: Sequence[Any] = (), given: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Rank 0: tell all ranks to do this too, and wait until each has taken it."""
        if self.size == 1 or not self.leads:
            return
        self._orders += 1
        self._set("order", [self._orders, name, list(args), dict(given)])
        until = time.monotonic() + ANSWER_TIMEOUT
        for rank in range(1, self.size):
            self._wait(f"taken/{rank}", rank, self._orders, until)

    def orders(self) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        """Other ranks: what rank 0 orders, until it is done."""
        while True:
            _, name, args, given = self._wait("order", 0, lambda order: order[0] > self._orders)
            self._orders += 1
            self._set(f"taken/{self.rank}", self._orders)
            if name == "end":
                return
            yield name, args, given

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        if isinstance(error, PeerError):
            self._leave("blames", error.what)
        elif isinstance(error, KeyboardInterrupt):
            self._leave("interrupted")
        else:
            text = str(error) if isinstance(error, UserError) else _first_line(error)
            self._leave("failed", f"rank {self.rank} failed while {self._what}: {text}")

    def _leave(self, how: str, text: str = "") -> None:
        if self._store is not None:
            with suppress(PeerError, KeyboardInterrupt):  # torchrun has gone: nobody to tell
                self._set(f"left/{self.rank}", [how, text])

    def look(self) -> None:
        """Raise PeerError if another rank has failed or ended; KeyboardInterrupt if told to end."""
        failed = self.failure()
        if failed:
            raise PeerError(failed)
        if self._told_to_end is not None and time.monotonic() > self._told_to_end + _GRACE:
            raise KeyboardInterrupt

    def look_if_told(self) -> None:
        """`look`, if this process has been told to end."""
        if self._told_to_end is not None:
            self.look()

    def failure(self) -> str | None:
        """What is known of a rank that has failed or ended."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Before what they told: who tells something tells it before it ends.
        ended = [rank for rank, (fd, _) in self._watched.items() if _ended(fd)]
        told = {rank: self._get(f"left/{rank}") for rank in others if self._check(f"left/{rank}")}
        for wanted in ("failed", "blames"):
            for how, text in told.values():
                if how == wanted:
                    return str(text)
        for rank in ended:
            how, _ = told.get(rank, ("", ""))
            if how == "done" or (how == "interrupted" and self._told_to_end is not None):
                continue
            return f"rank {rank} (process {self._watched[rank][1]}) has ended"
        return None

    def close(self, *, failed: bool = False) -> None:
        """Leave."""
        if not failed:
            self._leave("done")
        for fd, _ in self._watched.values():
            if fd is not None:
                os.close(fd)
        self._watched.clear()
        if self._handler is not None and not failed:  # what failed is yet to be told
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
        if self._group and not failed:  # those that are gone could not answer
            import torch.distributed as dist

            self._group = False
            dist.destroy_process_group()

    # ---- memory ----

    def share(self, size: int, device: Any, *, multicast: bool = False) -> Shared:
        """Zeroed memory of `size` bytes that all ranks have mapped; all call it together.

        Raises NodeError where GPUs cannot map each other's memory, or `multicast` is asked for and
        is not there.
        """
        import torch

        if self.size == 1:
            own = torch.zeros(size, dtype=torch.uint8, device=device)
            return Shared(own=own, addresses=[own.data_ptr()], multicast=0, of=lambda rank: own)
        self._refuse_strangers(device.index)
        if not multicast:  # PyTorch would set it up for whoever can use it
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric

        try:
            group = self.group()
            torch.cuda.set_device(device)
            own = symmetric.empty(size, dtype=torch.uint8, device=device)
            own.zero_()
            torch.cuda.synchronize(device)
            self.meet("allocated")  # what follows waits for all ranks, and looks at none
            handle = symmetric.rendezvous(own, group)
        except RuntimeError as error:
            self.look()
            raise NodeError(f"symmetric memory: {_first_line(error)}") from None
        if multicast and not handle.multicast_ptr:
            raise NodeError(
                "NVLink multicast is not there, which this cubin needs",
                fix="Take a cubin of the default: dsv2mk cubin --collective p2p",
            )

        def of(rank: int) -> Any:
            return own if rank == self.rank else handle.get_buffer(rank, (size,), torch.uint8)

        return Shared(
            own=own,
            addresses=[int(address) for address in handle.buffer_ptrs],
            multicast=int(handle.multicast_ptr) if multicast else 0,
            of=of,
        )

    def group(self) -> Any:
        """PyTorch's process group of all ranks, on the CPU; made when it is first asked for."""
        import torch.distributed as dist

        if not self._group:
            self._while_looking(
                lambda: dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore("group", self._store),  # type: ignore[attr-defined]
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timedelta(seconds=JOIN_TIMEOUT),
                )
            )
            self._group = True
        return dist.group.WORLD

    def _while_looking(self, call: Callable[[], Any]) -> None:
        """Make a call that waits for other ranks, in a thread: this one looks at them meanwhile."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK)
            self.look()
        if errors:
            raise errors[0]

    def _refuse_strangers(self, index: int) -> None:
        import torch

        for other in range(torch.cuda.device_count()):
            if other >= self.size or other == index:
                continue
            if not torch.cuda.can_device_access_peer(index, other):
                raise NodeError(
                    f"GPU {index} cannot map the memory of GPU {other}",
                    expected="GPUs that can access each other's memory",
                    fix="nvidia-smi topo -p2p r shows which can",
                )

    # ---- the store ----

    def _meet(self) -> None:
        """Exchange process ids, and watch the processes."""
        self._set(f"joined/{self.rank}", [os.getpid(), _namespace()])
        until = time.monotonic() + JOIN_TIMEOUT
        for rank in range(self.size):
            if rank == self.rank:
                continue
            pid, namespace = self._wait(f"joined/{rank}", rank, until=until)
            if namespace == _namespace():
                fd = None  # it has ended since: what it told says whether that is an error
                with suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                self._watched[rank] = (fd, pid)

    def _wait(self, key: str, rank: int, good: Any = None, until: float | None = None) -> Any:
        """The value of a key that `rank` sets, once it is there and good (equal, or a test)."""
        started = time.monotonic()
        trouble: UserError | None = None
        while True:
            if self._check(key):
                value = self._get(key)
                if good is None or (good(value) if callable(good) else value == good):
                    return value
            if trouble is not None:
                raise trouble
            now = time.monotonic()
            if now > self._looked + _LOOK:
                self._looked = now
                try:
                    self.look()
                except PeerError as error:
                    trouble = error  # but it may have come since
                    continue
                if until is not None and now > until:
                    trouble = PeerError(f"rank {rank} has not answered in time ({key})")
                    continue
            time.sleep(max(_POLL, min(_SLOW_POLL, (now - started) / 1000)))

    def _set(self, key: str, value: Any) -> None:
        self._reach(lambda: self._store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        return json.loads(self._reach(lambda: self._store.get(key)))

    def _check(self, key: str) -> bool:
        return bool(self._reach(lambda: self._store.check([key])))

    def _reach(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            if self._told_to_end is not None:
                raise KeyboardInterrupt from None
            raise PeerError(f"torchrun has ended: {_first_line(error)}") from None

    # ---- signals ----

    def _catch_termination(self) -> None:
        """torchrun ends all ranks when one has failed: outlive that until it is known which."""
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._note_termination)

    def _note_termination(self, *_: object) -> None:
        self._told_to_end = time.monotonic()


@contextmanager
def leaving(world: World, error: BaseException | None) -> Iterator[None]:
    """The last that a rank does: tells the others of an error, its own or one of the body."""
    try:
        yield
    except BaseException as late:
        error = error or late
        raise
    finally:
        if error is not None:
            world.fail(error)
        world.close(failed=error is not None)


def _variables() -> tuple[int, int, int, int]:
    """(world size, device index, rank, ranks of this node): of torchrun, or one process."""
    size, index = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_RANK", "0")
    rank, local = os.environ.get("RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", size)
    try:
        numbers = [int(text) for text in (size, index, rank, local)]
    except ValueError:
        numbers = [0, 0, 0, 0]
    if numbers[0] < 1 or min(numbers) < 0 or numbers[2] >= numbers[0]:
        raise UsageError(
            "RANK, LOCAL_WORLD_SIZE, WORLD_SIZE and LOCAL_RANK",
            expected="integers, as torchrun sets them",
        )
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _namespace() -> str:
    """What makes two process ids comparable."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _ended(fd: int | None) -> bool:
    if fd is None:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
