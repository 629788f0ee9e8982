"""What a build would make of a snapshot: sizes, memory, disk. No tensor data is read."""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv2mk.artifacts.shards import shard_file
from dsv2mk.manifests.geometry import units_of
from dsv2mk.manifests.layout import PARTS, RankLayout, group_layout
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.reader import BAND_BYTES
from dsv2mk.pipeline.snapshot import Snapshot
from dsv2mk.pipeline.work import own_files, safety_margin

#: Resident memory of a build before its first worker, interpreter and libraries: an upper bound.
_BASE_BYTES = 600_000_000


@dataclass(kw_only=True, slots=True, frozen=True)
class RankPlan:
    """One rank of a plan."""

    rank: int
    files: list[str]
    file_bytes: int
    units: int
    token_bytes: int  # weight bytes that a decoded token reads, in the mean over routing


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """What would be built."""

    input_bytes: int
    input_files: int
    input_dtypes: list[str]
    ranks: list[RankPlan]
    group_bytes: int
    disk_bytes: int
    disk_margin: int
    disk_free: int
    workers: int
    worker_bytes: int  # upper bound of the memory of one worker
    base_bytes: int  # upper bound of what the process takes beside its workers
    memory_bytes: int  # of the build: both together
    cache_bytes_per_position: int  # bf16, on every rank

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        return asdict(self)


def make_plan(snapshot: Snapshot, ranks: int, out: Path, workers: int) -> Plan:
    """Plan a build to `out`, whose file system is asked for its free space.

    Raises InputError if the geometry cannot be dealt to that many ranks, UsageError if
    DSV2MK_CACHE_SAFETY_GIB is no number.
    """
    worker_bytes = _worker_bytes(snapshot)
    g = snapshot.geometry
    layouts = group_layout(g, Topology(ranks=ranks))
    place = Path(os.path.realpath(out))
    while not place.exists():
        place = place.parent
    planned = [_plan_rank(layout) for layout in layouts]
    return Plan(
        input_bytes=snapshot.nbytes,
        input_files=len(snapshot.headers),
        input_dtypes=sorted({tensor.dtype for tensor in snapshot.used}),
        ranks=planned,
        group_bytes=sum(rank.file_bytes for rank in planned),
        disk_bytes=sum(file.size for file in own_files(layouts)),
        disk_margin=safety_margin(),
        disk_free=shutil.disk_usage(place).free,
        workers=workers,
        worker_bytes=worker_bytes,
        base_bytes=_BASE_BYTES,
        memory_bytes=_BASE_BYTES + workers * worker_bytes,
        cache_bytes_per_position=g.num_hidden_layers * g.cache_width * 2,
    )


def _plan_rank(layout: RankLayout) -> RankPlan:
    files = [shard_file(layout, part) for part in PARTS]
    return RankPlan(
        rank=layout.rank,
        files=[file.name for file in files],
        file_bytes=sum(file.size for file in files),
        units=layout.unit_offsets[-1],
        token_bytes=layout.token_bytes(),
    )


def _worker_bytes(snapshot: Snapshot) -> int:
    """Upper bound of one worker's memory: see Packer for what it holds.

    The output of each FFN's down projection, kept for each of the three widths; a unit of gate and
    up; bands of the input, which may be fp32 and pass through float32 on their way to bf16.
    """
    g = snapshot.geometry
    widths = {g.moe_intermediate_size, g.shared_width, g.intermediate_size}
    buffers = (2 + sum(units_of(width) for width in widths)) * BLOCK * g.hidden_size
    widest = max(tensor.row_bytes for tensor in snapshot.used)
    band = max(BAND_BYTES, BLOCK * max(widest, 4 * g.hidden_size), 4 * BLOCK * max(widths))
    return buffers + 8 * band
