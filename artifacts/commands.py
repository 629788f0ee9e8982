"""`verify`, `inspect` and `diff`: commands that need an artifact and nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv2mk.artifacts.console import Report, message, progress, reporting, size_text, table_text
from dsv2mk.manifests.errors import EXIT_CHECK_FAILED, EXIT_DONE, UsageError
from dsv2mk.manifests.manifest import SCHEMA_VERSION

if TYPE_CHECKING:
    from dsv2mk.artifacts.store import Store
    from dsv2mk.manifests.bundle import Bundle
    from dsv2mk.manifests.manifest import Manifest

_FOLDER = click.Path(path_type=Path)


def _number(_: object, __: object, value: float) -> float:
    if value != value:
        raise click.BadParameter("nan is no percentage")
    return value


@click.command()
@click.argument("folder", type=_FOLDER, metavar="DIR|STORE|STORE::NAME")
@click.option(
    "--sample",
    type=click.FloatRange(0, 100),
    callback=_number,
    default=100.0,
    metavar="PERCENT",
    help="Hash only this share of each file's 64 MiB chunks, chosen at random.",
)
@click.option("--rank", type=click.IntRange(0), help="Of a folder, only what this rank needs.")
@reporting
def verify(folder: Path, sample: float, rank: int | None) -> Report:
    """Check an artifact against the hashes in its manifest, or what a store holds."""
    from dsv2mk.artifacts.artifact import Artifact, read_manifest
    from dsv2mk.artifacts.store import Store, is_store, resolve

    store, bundle = resolve(str(folder)) or (None, None)
    if store is None and is_store(folder):
        store = Store.open(folder)
    if store is not None:
        if rank is not None:
            raise UsageError("--rank", expected="an artifact's folder", found=str(folder))
        return _verify_store(str(folder), store, bundle, sample)
    manifest = read_manifest(folder)
    _check_rank(rank, manifest)
    artifact = Artifact(path=folder, manifest=manifest, rank=rank)
    with progress(artifact.bytes_to_verify(sample), "verify") as bar:
        problems = artifact.verify(sample, bar.update)
    files = len(artifact.own_files)
    data = {
        "ok": not problems,
        "digest": artifact.manifest.digest,
        "files": files,
        "problems": problems,
    }
    if problems:
        lines = [f"{name}: {problem}" for name, problem in problems.items()]
        lines.append(
            f"damaged: {len(problems)} of {files} files of {folder}. "
            "Build it again: dsv2mk build SNAPSHOT --tp N --out DIR --overwrite"
        )
        return Report(data=data, text="\n".join(lines), exit_code=EXIT_CHECK_FAILED)
    share = "" if sample >= 100 else f", a sample of {sample:g} %"
    text = f"ok: {files} files of {folder}{share}, digest {artifact.manifest.digest}"
    return Report(data=data, text=text)


def _verify_store(where: str, store: "Store", bundle: "Bundle | None", sample: float) -> Report:
    from dsv2mk.artifacts.collect import check_store

    with progress(0, "verify") as bar:
        count, problems = check_store(store, bundle, sample, bar.update)
    data = {"ok": not problems, "objects": count, "problems": problems}
    if problems:
        lines = [f"{path}: {problem}" for path, problem in problems.items()]
        lines.append(
            f"damaged: {len(problems)} files of {where}. "
            "Publish the artifact again: dsv2mk publish DIR STORE --tag NAME"
        )
        return Report(data=data, text="\n".join(lines), exit_code=EXIT_CHECK_FAILED)
    share = "" if sample >= 100 else f", a sample of {sample:g} %"
    return Report(data=data, text=f"ok: {count} objects of {where}{share}")


def _check_rank(rank: int | None, manifest: "Manifest") -> None:
    ranks = manifest.topology.ranks
    if rank is not None and rank >= ranks:
        raise UsageError("--rank", expected=f"0 to {ranks - 1}", found=rank)


@click.command()
@click.argument("where", type=click.Path(path_type=str), metavar="DIR|STORE::NAME")
@click.argument("tensor", required=False)
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("--stats", is_flag=True, help="Read the tensor and print statistics of its values.")
@reporting
def inspect(where: str, tensor: str | None, rank: int | None, stats: bool) -> Report:
    """Show what an artifact holds, from headers alone, or one TENSOR of it."""
    from dsv2mk.artifacts.artifact import Artifact

    if stats and tensor is None:
        raise UsageError("--stats needs a TENSOR")
    artifact = Artifact.open(where, rank)
    manifest = artifact.manifest
    _check_rank(rank, manifest)
    ranks = range(manifest.topology.ranks)
    chosen = list(ranks) if rank is None else [rank]
    rows = [["rank", "tensor", "dtype", "shape", "bytes", "owner", "file", "offset"]]
    tensors: list[dict[str, Any]] = []
    for r in chosen:
        for name, spec in artifact.layouts[r].tensors.items():
            if tensor is not None and name != tensor:
                continue
            file, offset = artifact.locate(r, spec)
            entry: dict[str, Any] = {
                "rank": r,
                "name": name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "bytes": spec.nbytes,
                "owner": spec.owner,
                "file": file,
                "offset": offset,
            }
            if tensor is not None:
                entry["origin"] = list(spec.origin)
            if stats:
                from dsv2mk.artifacts.tensors import statistics

                entry["stats"] = statistics(artifact.map_tensor(r, name), spec)
            tensors.append(entry)
            shape = "x".join(map(str, spec.shape))
            size = size_text(spec.nbytes)
            rows.append([str(r), name, spec.dtype, shape, size, spec.owner, file, str(offset)])
    if not tensors:
        names = ", ".join(artifact.layouts[chosen[0]].tensors)
        raise UsageError("no such tensor", expected=f"one of {names}", found=tensor)
    data = {
        "digest": manifest.digest,
        "schema": SCHEMA_VERSION,
        "geometry": manifest.geometry.to_json(),
        "ranks": manifest.topology.ranks,
        "scheme": manifest.data["scheme"]["name"],
        "tensors": tensors,
    }
    lines = [] if tensor else [f"artifact {manifest.digest}"]
    if not tensor:
        g = manifest.geometry
        lines.append(
            f"{g.num_hidden_layers} layers, hidden {g.hidden_size}, {g.num_attention_heads} heads, "
            f"{g.n_routed_experts} experts; {len(ranks)} ranks, {data['scheme']}"
        )
    lines.append(table_text(rows, frozenset((0, 4, 7))))
    for entry in tensors:
        if tensor and entry is tensors[0] and entry["origin"]:
            lines.append("from " + ", ".join(entry["origin"]))
        if stats:
            shown = "  ".join(f"{key} {value}" for key, value in entry["stats"].items())
            lines.append(f"rank {entry['rank']}: {shown}")
    return Report(data=data, text="\n".join(lines))


@click.command()
@click.argument("a", type=_FOLDER, metavar="A")
@click.argument("b", type=_FOLDER, metavar="B")
@reporting
def diff(a: Path, b: Path) -> Report:
    """Compare two artifacts by their manifests: + only in B, - only in A, M modified.

    A and B are folders, or STORE::NAME.
    """
    from dsv2mk.artifacts.artifact import diff as compare
    from dsv2mk.artifacts.artifact import read_manifest
    from dsv2mk.artifacts.store import resolve

    manifests = []
    for where in (a, b):
        named = resolve(str(where))
        manifests.append(read_manifest(where) if named is None else named[0].manifest(named[1]))
    changes = compare(*manifests)
    data = {"same": not changes, "changes": [{"sign": s, "what": what} for s, what in changes]}
    if not changes:
        message("no difference")
    text = "\n".join(f"{sign}    {what}" for sign, what in changes)
    return Report(data=data, text=text, exit_code=EXIT_CHECK_FAILED if changes else EXIT_DONE)
