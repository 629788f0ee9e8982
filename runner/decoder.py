"""The decoder on a GPU: state in device memory, launches of the megakernel, what they leave.

With several ranks each process has such a decoder of its own rank. Rank 0's is the one that is
used; what is done to it (`reset`, `skip`, `place`, `run`), all ranks' `follow` does too.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv2mk.manifests.errors import ArtifactError, PeerError, StuckError, UsageError
from dsv2mk.manifests.sidecar import Sidecar
from dsv2mk.runner.device import DeviceFacts, Kernel, refuse_memory
from dsv2mk.runner.load import Weights
from dsv2mk.runner.world import World, leaving

#: Tokens of one launch at most: bounds what the kernel counts in 32 bits.
MOST_STEPS = 1024
#: Seconds that a wait inside the kernel may take.
DEFAULT_TIMEOUT = 10.0


def state_bytes(sidecar: Sidecar, context: int, *, trace: bool = False) -> dict[str, int]:
    """Bytes of device memory beside the weights, by purpose."""
    layers = sidecar.geometry.num_hidden_layers
    workspace = sidecar.workspace
    exchanges = layers + 1 if trace else 1
    return {
        "cache": layers * context * sidecar.cache_row * 2,
        "workspace": workspace["exchange_offset"] + exchanges * workspace["exchange_bytes"],
        "tokens and logits": 4 * (context + 1) + 4 * _logit_rows(sidecar) + (1 << 20),
    }


def _logit_rows(sidecar: Sidecar) -> int:
    """Rows of lm_head that a rank has."""
    return sidecar.topology.vocab_rows(sidecar.geometry)


@dataclass(kw_only=True, slots=True, frozen=True)
class Timed:
    """What a timed run measured."""

    seconds: float  # of all launches, by events
    samples: list[float]  # milliseconds a token, by the device's timer


def by_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that rank 0 calls and all other ranks carry out at the same time."""

    @functools.wraps(method)
    def wrapper(self: "GpuDecoder", *args: Any, **given: Any) -> Any:
        self.world.order(method.__name__, list(args), given)
        return method(self, *args, **given)

    return wrapper


class GpuDecoder:
    """Decodes one sequence with the megakernel, as one rank of `world`.

    context: tokens at most, no more than the model's; ctas: as `grid_size` says. A world of one
    and a cubin of several ranks: a loopback, in which this GPU plays rank 0 and is its own peer.
    A context manager: tells the other ranks when it is done, or why not.
    """

    def __init__(
        self,
        weights: Weights,
        kernel: Kernel,
        *,
        context: int,
        ctas: int,
        timeout: float = DEFAULT_TIMEOUT,
        trace: bool = False,
        world: World | None = None,
    ) -> None:
        sidecar, device = kernel.sidecar, kernel.device
        self.world = world or World()
        geometry = sidecar.geometry
        self.sidecar = sidecar
        self.context = context
        self.position = 0
        self.weights = weights
        self.kernel = kernel
        self.ctas = ctas
        self._timeout = timeout
        self._trace = sidecar.workspace["exchange_bytes"] if trace else 0
        shape = (geometry.num_hidden_layers, context, sidecar.cache_row)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._start = state_bytes(sidecar, context, trace=trace)["workspace"]  # of the logits
        rows = _logit_rows(sidecar)
        multicast = sidecar.collective == "multimem"
        self._shared = self.world.share(self._start + 4 * rows, device, multicast=multicast)
        self._workspace: Tensor = self._shared.own[: self._start]
        peers = list(self._shared.addresses)
        if self.world.size == 1:
            peers *= sidecar.topology.ranks
        if multicast:
            peers.append(self._shared.multicast)
        self._peers = torch.tensor(peers, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(context + 1, dtype=torch.int32, device=device)
        self._logits = self._logits_of(self.world.rank)
        self._times = torch.zeros(MOST_STEPS + 1, dtype=torch.int64, device=device)
        hops = len(sidecar.workspace["hops"])
        self._marks = torch.zeros(
            (geometry.num_hidden_layers + 1, hops, 2), dtype=torch.int64, device=device
        )
        self._status = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self._epoch = 0
        self._known = 0  # tokens [0, known) are placed
        self._dismissed = False

    @staticmethod
    def refuse_memory(
        sidecar: Sidecar, facts: DeviceFacts, weights: int, context: int, *, trace: bool = False
    ) -> None:
        """Raise NodeError if weights (bytes) and state do not fit."""
        state = state_bytes(sidecar, context, trace=trace)
        refuse_memory({"weights": weights, **state}, facts.free_memory)

    def __enter__(self) -> "GpuDecoder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with leaving(self.world, error):
            if error is None:
                self.dismiss()

    def follow(self) -> bool:
        """Carry out what rank 0 orders, until it is done; False at once on rank 0."""
        if self.world.leads:
            return False
        self.world.doing("decoding")
        for name, args, given in self.world.orders():
            getattr(self, name)(*args, **given)
        return True

    def dismiss(self) -> None:
        """Rank 0: no more orders."""
        if not self._dismissed:
            self._dismissed = True
            self.world.order("end")

    @by_all_ranks
    def reset(self, noise: int | None = None) -> None:
        """Start another sequence; noise: fill the cache with random bits of this seed first."""
        self.position = 0
        if noise is not None:
            generator = torch.Generator(self.cache.device).manual_seed(noise)
            self.cache.view(torch.int16).random_(-32768, 32768, generator=generator)

    @by_all_ranks
    def skip(self, tokens: int, seed: int = 0) -> None:
        """Start another sequence at position `tokens`, its cache filled with random values.

        For measurements at a context that would take long to decode.
        """
        self.position = 0
        self._room(tokens)
        generator = torch.Generator(self.cache.device).manual_seed(seed)
        self.cache.normal_(generator=generator)
        self._tokens[tokens] = 0
        self.position = tokens
        self._known = tokens + 1

    def step(self, token: int) -> Tensor:
        """Feed one token; logits [V] fp32 of the next, on the device, valid until the next call."""
        self.feed([token])
        return self.logits

    def feed(self, tokens: Sequence[int]) -> None:
        """Feed tokens that are given."""
        self.place(tokens)
        self.run(len(tokens))

    @by_all_ranks
    def place(self, tokens: Sequence[int]) -> None:
        """Put tokens at the positions to come; `run` takes them from there."""
        bad = [token for token in tokens if not 0 <= token < self.sidecar.geometry.vocab_size]
        if bad:
            raise UsageError(
                "token id", expected=f"0 to {self.sidecar.geometry.vocab_size - 1}", found=bad[0]
            )
        self._room(len(tokens))
        end = self.position + len(tokens)
        self._tokens[self.position : end] = torch.tensor(tokens, dtype=torch.int32)
        self._known = end

    @by_all_ranks
    def run(self, steps: int, *, timed: bool = False, marked: bool = False) -> Timed | None:
        """Decode `steps` tokens: placed ones as far as there are, then chosen ones.

        marked: note when each hop is reached. Raises StuckError if the kernel's watchdog ended a
        launch, PeerError if that is because another rank has ended.
        """
        self._room(steps)
        self.world.doing(f"decoding from position {self.position}")
        start, samples = self.position, []
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for first in range(0, steps, MOST_STEPS):
            count = min(MOST_STEPS, steps - first)
            self._launch(count, marked)
            if timed:
                self._wait(start)
                times = self._times[: count + 1].cpu()
                samples += (times.diff().double() / 1e6).tolist()
        events[1].record()
        self._wait(start)
        events[1].synchronize()
        if not timed:
            return None
        return Timed(seconds=events[0].elapsed_time(events[1]) / 1e3, samples=samples)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end), fed or chosen."""
        return [int(token) for token in self._tokens[start:end].cpu()]

    @property
    def logits(self) -> Tensor:
        """[V] fp32 of the last position, on the device; of a loopback, rank 0's rows.

        Other ranks' rows are read from their memory: they were written before those ranks took
        part in choosing the token, so before this rank's launch ended.
        """
        if self.world.size == 1:
            return self._logits
        ranks = range(self.world.size)
        every = torch.cat([self._logits_of(rank) for rank in ranks])
        vocabulary: int = self.sidecar.geometry.vocab_size
        return every[:vocabulary]

    def ranks_differ(self) -> str | None:
        """Which rank's all-reduced shares [R, H] are not bit-equal to this rank's, if any."""
        layers = self.sidecar.geometry.num_hidden_layers if self._trace else 1
        for rank in range(1, self.world.size):
            theirs = self._shared.of(rank)
            for layer in range(layers):
                for name in ("o", "down"):
                    start, end = self._place(name, layer)
                    if not torch.equal(theirs[start:end], self._workspace[start:end]):
                        return f"rank {rank} has another {name} of layer {layer}"
        return None

    def marked_step(self) -> Tensor:
        """Decode one token; [L + 1, hops, 2] ns: when CTA 0 arrived at each hop, and went on."""
        self.run(1, marked=True)
        return self._marks.cpu()

    def exchange(self, name: str, layer: int) -> Tensor:
        """A hop's buffer of a layer (fp32 words) after a traced step, on the device."""
        start, end = self._place(name, layer)
        shape = self.sidecar.workspace["exchange"][name][1]
        return self._workspace[start:end].view(torch.float32).view(shape)

    def _place(self, name: str, layer: int) -> tuple[int, int]:
        """[start, end) of a hop's buffer in the workspace."""
        workspace = self.sidecar.workspace
        offset, shape = workspace["exchange"][name]
        start = workspace["exchange_offset"] + offset + layer * self._trace
        return start, start + 4 * math.prod(shape)

    def _logits_of(self, rank: int) -> Tensor:
        """A rank's rows of the logits, in its memory."""
        shared = self._shared.of(rank)
        rows: Tensor = shared[self._start : self._start + 4 * _logit_rows(self.sidecar)]
        return rows.view(torch.float32)

    def _room(self, steps: int) -> None:
        if self.position + steps > self.context:
            raise UsageError(
                "context is full",
                expected=f"at most {self.context} tokens",
                found=self.position + steps,
            )

    def _launch(self, steps: int, marked: bool) -> None:
        self.kernel.launch(
            self.ctas,
            {
                "replicated": self.weights.base("replicated"),
                "partitioned": self.weights.base("partitioned"),
                "gate_up": self.weights.address("ffn_gate_up"),
                "gate_up_scale": self.weights.address("ffn_gate_up_scale"),
                "down": self.weights.address("ffn_down"),
                "down_scale": self.weights.address("ffn_down_scale"),
                "cache": self.cache.data_ptr(),
                "workspace": self._workspace.data_ptr(),
                "peers": self._peers.data_ptr(),
                "tokens": self._tokens.data_ptr(),
                "logits": self._logits.data_ptr(),
                "status": self._status.data_ptr(),
                "times": self._times.data_ptr(),
                "marks": self._marks.data_ptr() if marked else 0,
                "cache_tokens": self.context,
                # Of many tokens only the last one's would be left: leave the kernel as it runs.
                "trace": self._trace if steps == 1 else 0,
                "timeout": int(self._timeout * 1e9),
                "rank": self.weights.layout.rank,
                "position": self.position,
                "steps": steps,
                "known": self._known,
                "epoch": self._epoch,
            },
        )
        self.position += steps
        # The kernel counts in 32 bits and compares differences, so it may wrap around.
        self._epoch = (self._epoch + steps + 2**31) % 2**32 - 2**31

    def _wait(self, start: int) -> None:
        """Wait for what has been launched, and raise if the kernel or another rank gave up."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        if self.world.size == 1:
            done.synchronize()
        else:
            # The kernel ends by itself, whatever becomes of the others: its watchdog sees to that.
            # Not `synchronize`: a signal is to be noticed meanwhile.
            while not self._is_done(done):
                time.sleep(0.0002)
        if int(self._status[0]):
            self._give_up(start)
        self.world.look_if_told()

    def _is_done(self, event: Any) -> bool:
        try:
            return bool(event.query())
        except RuntimeError as error:
            if failure := self.world.failure():  # its memory may have gone with it
                raise PeerError(f"{failure}; {error}".splitlines()[0]) from None
            raise

    def _give_up(self, start: int) -> None:
        _, rank, cta, warp, layer, phase, position, expected, seen, *_ = self._status.tolist()
        self._status.zero_()
        phases = self.sidecar.phases
        name = phases[phase] if 0 <= phase < len(phases) else f"phase {phase}"
        where = (
            f"the kernel gave up after {self._timeout:g} s at position {position}: rank {rank}, "
            f"CTA {cta}, warp {warp} waited in layer {layer} for {name}"
        )
        try:
            failure = self.world.failure()
        except PeerError as error:  # torchrun has gone
            failure = error.what
        if failure:
            raise PeerError(f"{failure}; {where}", expected=expected, found=seen)
        if self.world.size == 1:  # ready for another sequence; else others may still be writing
            self._workspace.zero_()
            self._epoch, self.position = 0, start
        raise StuckError(where, expected=expected, found=seen)


def generate(
    decoder: GpuDecoder,
    token: int,
    max_new: int,
    stop: frozenset[int],
    note: Callable[[Tensor], None] | None,
    burst: int = 64,
) -> Iterator[int]:
    """Feed a token and decode greedily; ends after max_new tokens or one of `stop`.

    note: called with the logits [V] of each position; then a launch decodes one token, else
    `burst`. Raises ArtifactError if logits are not finite.
    """
    decoder.place([token])
    left = max_new
    while left:
        count = 1 if note else min(burst, left)
        start = decoder.position + 1
        decoder.run(count)
        if not decoder.logits.isfinite().all():
            raise ArtifactError(
                f"logits at position {decoder.position - 1} are not finite",
                fix="Are the weights damaged? dsv2mk verify DIR",
            )
        if note:
            note(decoder.logits)
        for new in decoder.tokens(start, start + count):
            yield new
            if new in stop:
                return
        left -= count
