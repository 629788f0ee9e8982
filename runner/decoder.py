"""The decoder on a GPU: state in device memory, launches of the megakernel, what they leave."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv2mk.manifests.errors import ArtifactError, StuckError, UsageError
from dsv2mk.manifests.sidecar import Sidecar
from dsv2mk.runner.device import DeviceFacts, Kernel, refuse_memory
from dsv2mk.runner.load import Weights

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
        "tokens and logits": 4 * (context + 1) + 4 * sidecar.geometry.vocab_size + (1 << 20),
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class Timed:
    """What a timed run measured."""

    seconds: float  # of all launches, by events
    samples: list[float]  # milliseconds a token, by the device's timer


class GpuDecoder:
    """Decodes one sequence with the megakernel. One rank.

    context: tokens at most, no more than the model's; ctas: as `grid_size` says.
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
    ) -> None:
        sidecar, device = kernel.sidecar, kernel.device
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
        size = state_bytes(sidecar, context, trace=trace)["workspace"]
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._peers = torch.tensor([self._workspace.data_ptr()], dtype=torch.int64, device=device)
        self._tokens = torch.zeros(context + 1, dtype=torch.int32, device=device)
        self._logits = torch.zeros(geometry.vocab_size, device=device)
        self._times = torch.zeros(MOST_STEPS + 1, dtype=torch.int64, device=device)
        hops = len(sidecar.workspace["hops"])
        self._marks = torch.zeros(
            (geometry.num_hidden_layers + 1, hops, 2), dtype=torch.int64, device=device
        )
        self._profile = False
        self._status = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self._epoch = 0
        self._known = 0  # tokens [0, known) are placed

    @staticmethod
    def refuse_memory(
        sidecar: Sidecar, facts: DeviceFacts, weights: int, context: int, *, trace: bool = False
    ) -> None:
        """Raise NodeError if weights (bytes) and state do not fit."""
        state = state_bytes(sidecar, context, trace=trace)
        refuse_memory({"weights": weights, **state}, facts.free_memory)

    def reset(self, noise: int | None = None) -> None:
        """Start another sequence; noise: fill the cache with random bits of this seed first."""
        self.position = 0
        if noise is not None:
            generator = torch.Generator(self.cache.device).manual_seed(noise)
            self.cache.view(torch.int16).random_(-32768, 32768, generator=generator)

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
        return self._logits

    def feed(self, tokens: Sequence[int]) -> None:
        """Feed tokens that are given."""
        self.place(tokens)
        self.run(len(tokens))

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

    def run(self, steps: int, *, timed: bool = False) -> Timed | None:
        """Decode `steps` tokens: placed ones as far as there are, then chosen ones.

        Raises StuckError if the kernel's watchdog ended a launch.
        """
        self._room(steps)
        start, samples = self.position, []
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for first in range(0, steps, MOST_STEPS):
            count = min(MOST_STEPS, steps - first)
            self._launch(count)
            if timed:
                times = self._times[: count + 1].cpu()
                samples += (times.diff().double() / 1e6).tolist()
        events[1].record()
        events[1].synchronize()
        self._raise_if_stuck(start)
        if not timed:
            return None
        return Timed(seconds=events[0].elapsed_time(events[1]) / 1e3, samples=samples)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end), fed or chosen."""
        return [int(token) for token in self._tokens[start:end].cpu()]

    @property
    def logits(self) -> Tensor:
        """[V] fp32 of the last position, on the device."""
        return self._logits

    def marked_step(self) -> Tensor:
        """Decode one token; [L + 1, hops, 2] ns: when CTA 0 arrived at each hop, and went on."""
        self._profile = True
        try:
            self.run(1)
        finally:
            self._profile = False
        return self._marks.cpu()

    def exchange(self, name: str, layer: int) -> Tensor:
        """A hop's buffer of a layer (fp32 words) after a traced step, on the device."""
        workspace = self.sidecar.workspace
        offset, shape = workspace["exchange"][name]
        start = workspace["exchange_offset"] + offset + layer * self._trace
        size = 4 * math.prod(shape)
        return self._workspace[start : start + size].view(torch.float32).view(shape)

    def _room(self, steps: int) -> None:
        if self.position + steps > self.context:
            raise UsageError(
                "context is full",
                expected=f"at most {self.context} tokens",
                found=self.position + steps,
            )

    def _launch(self, steps: int) -> None:
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
                "marks": self._marks.data_ptr() if self._profile else 0,
                "cache_tokens": self.context,
                "trace": self._trace,
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

    def _raise_if_stuck(self, start: int) -> None:
        if not int(self._status[0]):
            return
        _, rank, cta, warp, layer, phase, position, expected, seen, *_ = self._status.tolist()
        self._status.zero_()
        self._workspace.zero_()
        self._epoch, self.position = 0, start
        phases = self.sidecar.phases
        name = phases[phase] if 0 <= phase < len(phases) else f"phase {phase}"
        raise StuckError(
            f"the kernel gave up after {self._timeout:g} s at position {position}: rank {rank}, "
            f"CTA {cta}, warp {warp} waited in layer {layer} for {name}",
            expected=expected,
            found=seen,
        )


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
