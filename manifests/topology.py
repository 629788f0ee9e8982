"""Who owns what: TP = EP = R ranks.

Heads are split evenly, vocabulary rows in equal runs (the last ones padded with zero rows), and
FFN units round-robin over their index in the layer. Everything else is replicated.
"""

from dataclasses import dataclass

from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry


@dataclass(kw_only=True, slots=True, frozen=True)
class Topology:
    """R ranks that decode together."""

    ranks: int

    def check(self, geometry: Geometry) -> None:
        """Raise InputError if the geometry cannot be dealt to this many ranks."""
        if self.ranks < 1 or geometry.num_attention_heads % self.ranks:
            raise InputError(
                "number of ranks (--tp)",
                expected=f"a divisor of the {geometry.num_attention_heads} heads",
                found=self.ranks,
            )

    def heads(self, geometry: Geometry) -> int:
        """Heads of each rank; rank r owns [r * heads, (r + 1) * heads)."""
        return geometry.num_attention_heads // self.ranks

    def vocab_rows(self, geometry: Geometry) -> int:
        """Rows of lm_head that each rank stores, padding included."""
        return -(-geometry.vocab_size // self.ranks)

    def vocab_range(self, geometry: Geometry, rank: int) -> tuple[int, int]:
        """[start, end) of the vocabulary rows that a rank owns; what is stored past it is zero."""
        rows = self.vocab_rows(geometry)
        start = min(rank * rows, geometry.vocab_size)
        return start, min(start + rows, geometry.vocab_size)

    def unit_rank(self, unit: int) -> int:
        """Owner of a unit. Unit u of routed expert e has index e * U + u; shared ones follow."""
        return unit % self.ranks

    def unit_slot(self, unit: int) -> int:
        """Place of a unit among its owner's units of the layer."""
        return unit // self.ranks

    def rank_units(self, units: int, rank: int) -> int:
        """How many of a layer's units a rank owns."""
        return len(range(rank, units, self.ranks))
