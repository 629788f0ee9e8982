"""`synth`, `plan` and `build`."""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv2mk.artifacts.console import Report, reporting, size_text, table_text
from dsv2mk.manifests.errors import UsageError
from dsv2mk.manifests.geometry import preset_names
from dsv2mk.pipeline.configs import named_config

if TYPE_CHECKING:
    from dsv2mk.pipeline.plan import Plan
    from dsv2mk.pipeline.snapshot import Snapshot

_PATH = click.Path(path_type=Path)
_TP = click.option("--tp", type=click.IntRange(1), required=True, metavar="N", help="Ranks.")
_REVISION = click.option("--revision", help="Of a repo id in the hub cache; default main.")
_WORKERS = click.option(
    "--workers", type=click.IntRange(1), help="Threads; default: the CPUs there are, 8 at most."
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def _bytes(_: object, __: object, text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]I?)?B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is not a size like 500MB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


@click.command()
@click.argument("out", type=_PATH)
@click.option(
    "--geometry",
    required=True,
    metavar="PRESET|FILE",
    help=f"{', '.join(preset_names())}, or a config.json.",
)
@click.option("--layers", type=click.IntRange(1), help="Use this many layers instead.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp8-block"]), default="bf16", show_default=True
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, callback=_bytes, metavar="BYTES"
)
@reporting
def synth(
    out: Path, geometry: str, layers: int | None, seed: int, dtype: str, max_shard_size: int
) -> Report:
    """Make a random checkpoint in exact Hugging Face form in the new folder OUT."""
    from dsv2mk.pipeline.synth import synth as make

    config = named_config(geometry, layers)
    started = time.perf_counter()
    size = make(out, config, seed=seed, dtype=dtype, max_shard_size=max_shard_size)
    data = {"path": str(out), "bytes": size, "seconds": time.perf_counter() - started}
    return Report(data=data, text=f"{out}: {size_text(size)}, {dtype}, seed {seed}")


@click.command()
@click.argument("snapshot", required=False)
@_TP
@_REVISION
@click.option("--out", type=_PATH, default=Path(), metavar="DIR", help="Whose disk to look at.")
@_WORKERS
@reporting
def plan(
    snapshot: str | None, tp: int, revision: str | None, out: Path, workers: int | None
) -> Report:
    """Show what a build of SNAPSHOT for N ranks would make; no tensor data is read."""
    from dsv2mk.pipeline.plan import make_plan

    source = _open(snapshot, revision)
    made = make_plan(source, tp, out, workers or _workers())
    return Report(data=made.to_json(), text=_plan_text(made))


@click.command()
@click.argument("snapshot", required=False)
@_TP
@_REVISION
@click.option("--out", type=_PATH, required=True, metavar="DIR", help="The artifact's folder.")
@_WORKERS
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to quantise.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another or a damaged artifact in DIR; if it seems up to date, verify it.",
)
@click.option(
    "--check-hashes", is_flag=True, help="First check input files against the hub's hashes."
)
@reporting
def build(
    snapshot: str | None,
    tp: int,
    revision: str | None,
    out: Path,
    workers: int | None,
    device: str,
    overwrite: bool,
    check_hashes: bool,
) -> Report:
    """Build the artifact DIR from SNAPSHOT for N ranks.

    SNAPSHOT is a folder or a repo id in the local hub cache; by default DSV2MK_SNAPSHOT. A build
    that is stopped goes on where it was when the same command runs again.
    """
    from dsv2mk.pipeline.build import build as make

    source = _open(snapshot, revision)
    if check_hashes:
        from dsv2mk.pipeline.hub import check_hashes as check

        check(source)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU", fix="Use --device cpu")
    started = time.perf_counter()
    result = make(
        source, tp, out, workers=workers or _workers(), device=device, overwrite=overwrite
    )
    seconds = time.perf_counter() - started
    size = sum(entry.size for entry in result.manifest.files.values())
    data: dict[str, Any] = {
        "path": str(out),
        "digest": result.manifest.digest,
        "up_to_date": result.up_to_date,
        "resumed_jobs": result.resumed_jobs,
        "bytes": size,
        "input_bytes": source.nbytes,
        "seconds": seconds,
    }
    if result.up_to_date:
        text = f"{out}: up to date, digest {result.manifest.digest}"
    else:
        text = (
            f"{out}: {size_text(size)} for {tp} ranks from {size_text(source.nbytes)} in "
            f"{seconds:.1f} s ({size_text(source.nbytes / seconds)}/s of input), "
            f"digest {result.manifest.digest}"
        )
    return Report(data=data, text=text)


def _workers() -> int:
    """The CPUs that this process may use, and 8 at most: then the disk is the limit.

    More layers at a time would only be more to redo after a kill, and more memory.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cpus or 1, 8)


def _open(snapshot: str | None, revision: str | None) -> "Snapshot":
    from dsv2mk.pipeline.hub import find_snapshot
    from dsv2mk.pipeline.snapshot import Snapshot

    name = snapshot or os.environ.get("DSV2MK_SNAPSHOT")
    if not name:
        raise UsageError("no snapshot", fix="Name one, or set DSV2MK_SNAPSHOT")
    return Snapshot.open(find_snapshot(name, revision))


def _plan_text(made: "Plan") -> str:
    rows = [["rank", "files", "bytes", "units", "bytes/token"]]
    rows += [
        [
            str(rank.rank),
            str(len(rank.files)),
            size_text(rank.file_bytes),
            str(rank.units),
            size_text(rank.token_bytes),
        ]
        for rank in made.ranks
    ]
    files = sum(len(rank.files) for rank in made.ranks)
    units = sum(rank.units for rank in made.ranks)
    token = max(rank.token_bytes for rank in made.ranks)
    rows.append(["group", str(files), size_text(made.group_bytes), str(units), size_text(token)])
    dtypes = ", ".join(made.input_dtypes)
    needed = f"{size_text(made.disk_bytes)} and a margin of {size_text(made.disk_margin)}"
    facts = [
        ["input", f"{size_text(made.input_bytes)} in {made.input_files} files, {dtypes}"],
        [
            "disk",
            f"{needed} needed, {size_text(made.disk_free)} free (replicated part stored once)",
        ],
        [
            "memory",
            f"up to {size_text(made.memory_bytes)}: {size_text(made.base_bytes)} and "
            f"{size_text(made.worker_bytes)} for each of {made.workers} workers",
        ],
        ["cache", f"{size_text(made.cache_bytes_per_position)} a position on each rank, bf16"],
    ]
    right = frozenset((0, 1, 2, 3, 4))
    return f"{table_text(rows, right)}\n\n{table_text(facts)}"
