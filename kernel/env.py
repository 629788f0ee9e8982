"""What every part of the kernel is handed: plan, parameters of the launch, where a thread is.

Nothing in it changes during a launch, so that it may be used inside any loop. What does change (the
number of chunks that have passed the ring, the residual stream) is passed and returned.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Int32, Int64

from dsv2mk.kernel import ptx
from dsv2mk.kernel.plan import PHASES, Plan


@dataclass(kw_only=True, frozen=True)
class Env:
    """Constants of a thread. Frozen, so that the DSL does not carry it through loops."""

    plan: Plan
    params: dict[str, Any]
    smem: Any  # Int32: address of dynamic shared memory
    thread: Any  # Int32: within the CTA
    lane: Any
    warp: Any
    cta: Any
    ctas: Any  # CTAs of the grid

    def again(self) -> "Env":
        """The same, read anew.

        What a phase derives from it then lives in registers for the phase, not for the launch.
        """
        thread, cta, ctas = (ptx.special(name) for name in ("tid.x", "ctaid.x", "nctaid.x"))
        return replace(self, thread=thread, lane=thread & 31, warp=thread >> 5, cta=cta, ctas=ctas)

    def at(self, region: str) -> Any:
        """Address of a region of shared memory."""
        return self.smem + Int32(self.plan.smem[region])

    def param(self, name: str) -> Any:
        """A parameter of the launch."""
        return self.params[name]

    def weight(self, name: str) -> Any:
        """Address of a stored tensor that is not one of the FFN units'."""
        spec = self.plan.tensor(name)
        return self.params[spec.part] + Int64(spec.offset)

    def layer_weight(self, name: str, index: Any) -> Any:
        """Address of one layer's entry of a tensor stacked along layers."""
        return self.weight(name) + Int64(index) * self.plan.tensor(name).stride

    def exchange(self, name: str, layer: Any) -> Any:
        """Address of a hop's buffer in this rank's workspace."""
        return (
            self.params["workspace"]
            + Int64(self.plan.exchange_offset + self.plan.exchange[name][0])
            + Int64(layer) * self.params["trace"]
        )

    def counter(self, name: str) -> Any:
        """Address of a hop's counter, or of the abort word."""
        return self.params["workspace"] + Int64(self.plan.counters[name])


def where(phase: str, layer: Any) -> Any:
    """Layer and phase in one word, for the watchdog."""
    return Int32(layer) * 32 + PHASES.index(phase)
