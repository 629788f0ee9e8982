"""`cubin`: compile the kernel for an artifact or a preset, on a machine without a GPU."""

import time
from pathlib import Path
from typing import Any

import click

from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.console import Report, reporting, size_text, table_text
from dsv2mk.kernel.key import ARCHS
from dsv2mk.manifests.errors import UsageError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import COLLECTIVES, CUBIN_FOLDER
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.configs import named_config

_PATH = click.Path(path_type=Path)


def _archs(_: object, __: object, text: str) -> list[str]:
    archs = list(dict.fromkeys(text.split(",")))
    if bad := [arch for arch in archs if arch not in ARCHS]:
        raise click.BadParameter(f"{bad[0]!r} is not one of {', '.join(ARCHS)}")
    return archs


@click.command()
@click.option("--artifact", type=_PATH, metavar="DIR", help="Compile for this artifact.")
@click.option("--geometry", metavar="PRESET|FILE", help="Or for a preset, or a config.json.")
@click.option("--layers", type=click.IntRange(1), help="Use this many layers of it instead.")
@click.option("--tp", type=click.IntRange(1), help="Number of ranks; an artifact names its own.")
@click.option(
    "--arch",
    "archs",
    callback=_archs,
    default="sm_100a",
    show_default=True,
    metavar="ARCH[,ARCH]",
    help="sm_90a (H100, H200), sm_100a (B200), sm_103a (B300).",
)
@click.option(
    "--collective",
    type=click.Choice(COLLECTIVES),
    default=COLLECTIVES[0],
    show_default=True,
    help="How ranks exchange: stores to each peer, or through NVLink multicast.",
)
@click.option(
    "--out",
    type=_PATH,
    metavar="DIR",
    help="Where cubins go: DIR/cubin of the artifact, or build/cubin.",
)
@click.option("--allow-local-memory", is_flag=True, help="Accept a kernel that spills registers.")
@reporting
def cubin(
    artifact: Path | None,
    geometry: str | None,
    layers: int | None,
    tp: int | None,
    archs: list[str],
    collective: str,
    out: Path | None,
    allow_local_memory: bool,
) -> Report:
    """Compile the decode kernel to cubins that need no compiler where they run."""
    from dsv2mk.kernel.cache import get_compiled, write_compiled

    shape, topology = _subject(artifact, geometry, layers, tp)
    if collective == "multimem" and topology.ranks == 1:
        raise UsageError("--collective multimem", expected="several ranks", found=1)
    folder = out or (artifact / CUBIN_FOLDER if artifact else Path("build") / "cubin")
    rows = [["arch", "registers", "spills", "shared memory", "cubin", "seconds", "file"]]
    made: list[dict[str, Any]] = []
    for arch in archs:
        started = time.perf_counter()
        compiled, cached = get_compiled(
            shape, topology, arch, collective=collective, allow_local_memory=allow_local_memory
        )
        seconds = time.perf_counter() - started
        folder.mkdir(parents=True, exist_ok=True)
        side = compiled.sidecar
        path = write_compiled(folder, side.file_stem, compiled)[0]
        entry = {
            "arch": arch,
            "cached": cached,
            "collective": collective,
            "cubin": str(path),
            "cubin_bytes": len(compiled.cubin),
            "kernel_key": side.kernel_key,
            "registers": side.registers,
            "local_memory": side.local_memory,
            "shared_memory": side.shared_memory + side.static_shared_memory,
            "threads": side.block,
            "seconds": seconds,
        }
        made.append(entry)
        rows.append(
            [
                arch,
                str(side.registers),
                str(side.local_memory),
                size_text(entry["shared_memory"]),
                size_text(len(compiled.cubin)),
                "cached" if cached else f"{seconds:.1f}",
                str(path),
            ]
        )
    return Report(data={"cubins": made}, text=table_text(rows, frozenset({1, 2, 3, 4, 5})))


def _subject(
    artifact: Path | None, geometry: str | None, layers: int | None, tp: int | None
) -> tuple[Geometry, Topology]:
    """What to compile for."""
    if (artifact is None) == (geometry is None):
        raise UsageError("give either --artifact or --geometry")
    if artifact is not None:
        if layers is not None:
            raise UsageError("--layers goes with --geometry: an artifact has its own")
        manifest = read_manifest(artifact)
        ranks = manifest.topology.ranks
        if tp not in (None, ranks):
            raise UsageError("--tp", expected=f"{ranks}, as the artifact was built", found=tp)
        return manifest.geometry, manifest.topology
    assert geometry is not None
    shape, topology = Geometry.from_config(named_config(geometry, layers)), Topology(ranks=tp or 1)
    topology.check(shape)
    return shape, topology
