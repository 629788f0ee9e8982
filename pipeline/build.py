"""Build an artifact: decide whether there is work, do it, put the result in place.

The work happens in a private folder beside the output (see work.py), and its result is renamed to
the output when it is complete and on disk.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files as resource_files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.console import message, progress
from dsv2mk.artifacts.files import (
    lock_folder,
    recover_folder,
    replace_folder,
    sync_folder,
    write_file,
)
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.layout import group_layout
from dsv2mk.manifests.manifest import (
    MANIFEST_NAME,
    Manifest,
    change_text,
    changes,
    deciding_sections,
)
from dsv2mk.manifests.sidecar import CUBIN_FILE, CUBIN_FOLDER
from dsv2mk.manifests.topology import Topology
from dsv2mk.pipeline.reader import BadInput
from dsv2mk.pipeline.remember import recall_source, remember_source
from dsv2mk.pipeline.snapshot import COMPANIONS, Snapshot
from dsv2mk.pipeline.work import (
    JOURNAL,
    PLACING,
    Work,
    bytes_missing,
    inode,
    no_space,
    safety_margin,
)

#: The modules whose source decides the bytes of a shard.
CODE = (
    "artifacts/container.py",
    "artifacts/shards.py",
    "manifests/canonical.py",
    "manifests/checkpoint.py",
    "manifests/geometry.py",
    "manifests/layout.py",
    "manifests/scheme.py",
    "manifests/topology.py",
    "pipeline/jobs.py",
    "pipeline/pack.py",
    "pipeline/quantise.py",
    "pipeline/reader.py",
    "pipeline/snapshot.py",
)

_OLD = "old"
#: Names that an artifact's folder may hold; a folder with others is never replaced.
_ARTIFACT_FILE = re.compile(
    "|".join(
        (
            r"rank-\d+\.\w+\.safetensors|LICENSE.*",
            *map(re.escape, (MANIFEST_NAME, *COMPANIONS)),
        )
    )
)


@dataclass(kw_only=True)
class BuildResult:
    """What `build` did."""

    manifest: Manifest
    up_to_date: bool
    resumed_jobs: int = 0  # found done in the journal


def code_hashes() -> dict[str, str]:
    """sha256 of each module in CODE."""
    out: dict[str, str] = {}
    for name in CODE:
        package, _, module = name.partition("/")
        source = resource_files(f"dsv2mk.{package}") / module
        out[name] = hashlib.sha256(source.read_bytes()).hexdigest()
    return out


def build(
    snapshot: Snapshot,
    ranks: int,
    out: Path,
    *,
    workers: int,
    device: str = "cpu",
    overwrite: bool = False,
) -> BuildResult:
    """Build the artifact `out` from a snapshot, or find that it is up to date.

    Raises InputError for input that cannot be built or read, UsageError if `out` is something else
    or in use, ArtifactError if it is damaged, SpaceError if the disk is or would be full. In every
    case what `out` held stays whole; what was done is kept for the next try, unless the input has
    to change before one can succeed.
    """
    layouts = group_layout(snapshot.geometry, Topology(ranks=ranks))
    out = _check_place(out, snapshot)
    safety_margin()  # refuses a bad setting before anything is begun
    sections = deciding_sections(
        snapshot.geometry, Topology(ranks=ranks), snapshot.companions(), code_hashes()
    )
    if not os.access(out.parent, os.W_OK):
        existing = _existing(out, sections, snapshot, overwrite)
        if existing is not None:
            return BuildResult(manifest=existing, up_to_date=True)
    with _locked(out.parent / f".{out.name}.partial") as folder:
        recover_folder(out, folder / _OLD)
        existing = _existing(out, sections, snapshot, overwrite)
        if existing is not None:
            (folder / JOURNAL).unlink(missing_ok=True)
            return BuildResult(manifest=existing, up_to_date=True)
        if find_spec("numba") is None:
            raise UsageError("a build needs the package numba", fix="pip install 'dsv2mk[build]'")
        try:
            with closing(Work(folder, snapshot, layouts, sections)) as work:
                work.run(workers, device)
                manifest = work.finish()
        except KeyboardInterrupt:
            message(f"what is done is kept in {folder}; the same command goes on from there")
            raise
        except BadInput:
            (folder / JOURNAL).unlink()  # no other try with this input can use what is done
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(folder, bytes_missing(folder, layouts), kept=True) from None
            raise
        Artifact.open(folder / "artifact")  # nobody has taken a file away meanwhile
        _put_in_place(folder, out)
        remember_source(snapshot, manifest.data["source"])
        (folder / JOURNAL).unlink()
    return BuildResult(manifest=manifest, up_to_date=False, resumed_jobs=work.resumed_jobs)


def _check_place(out: Path, snapshot: Snapshot) -> Path:
    out = Path(os.path.realpath(out))
    source = Path(os.path.realpath(snapshot.path))
    if out == source or source in out.parents or out in source.parents:
        raise UsageError(f"--out {out} and the snapshot {source} lie in one another")
    if os.path.ismount(out):
        raise UsageError(f"--out {out} is a mount point", fix="Name a folder in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _existing(
    out: Path, sections: Mapping[str, Any], snapshot: Snapshot, overwrite: bool
) -> Manifest | None:
    """The manifest of `out` if that is what this build would give; None if there is work to do."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if foreign := _foreign(out):
        raise UsageError(
            f"{out} exists and is not an artifact: {foreign}", fix="Name another folder with --out"
        )
    again = "Add --overwrite to build it again; the old one stays until the new one is complete"
    try:
        artifact = Artifact.open(out)
    except ArtifactError as error:
        if overwrite:
            return None
        raise ArtifactError(
            error.what, expected=error.expected, found=error.found, fix=again
        ) from None
    manifest = artifact.manifest
    old_source, copied = manifest.data["source"], snapshot.companions()
    new = {**sections, "source": {**old_source, **copied}}
    differing = changes({section: manifest.data[section] for section in sections}, new)
    if not differing:
        source = {**copied, **recall_source(snapshot, _hash_input)}
        differing = changes({"source": old_source}, {"source": source})
    if not differing and not (overwrite and _damaged(artifact)):
        return manifest
    lines = [change_text(change) for change in differing]
    if overwrite:
        for line in lines:
            message(f"changed: {line}")
        return None
    shown = "; ".join(lines[:5]) + ("; ..." if len(lines) > 5 else "")
    raise UsageError(f"{out} was built from something else: {shown}", fix=again)


def _foreign(out: Path) -> str | None:
    """Why a folder must not be replaced: it holds what no build has put there."""
    if not out.is_dir():
        return "it is no folder"
    names = sorted(path.name for path in out.iterdir())
    if MANIFEST_NAME not in names:
        return f"it has no {MANIFEST_NAME}"
    unknown = [name for name in names if _ARTIFACT_FILE.fullmatch(name) is None]
    if CUBIN_FOLDER in unknown and (out / CUBIN_FOLDER).is_dir():
        unknown.remove(CUBIN_FOLDER)
        cubins = sorted(path.name for path in (out / CUBIN_FOLDER).iterdir())
        unknown += [
            f"{CUBIN_FOLDER}/{name}" for name in cubins if CUBIN_FILE.fullmatch(name) is None
        ]
    return f"it holds {unknown[0]}" if unknown else None


def _damaged(artifact: Artifact) -> bool:
    """Whether an artifact's bytes are not those of its manifest; reads all of them."""
    with progress(artifact.bytes_to_verify(), "verify") as bar:
        return bool(artifact.verify(done=bar.update))


def _hash_input(snapshot: Snapshot) -> dict[str, str]:
    with progress(snapshot.nbytes, "hash input") as bar:
        return snapshot.hash_tensors(bar.update)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Hold the build's private folder. Raises UsageError if another build holds it."""
    fd = lock_folder(folder)
    try:
        yield folder
    finally:
        if not (folder / JOURNAL).exists():
            _remove(folder)  # nothing was begun, or all is done
        os.close(fd)


def _remove(folder: Path) -> None:
    """Remove a build's folder, its lock last: until then no other build can begin in it."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "lock"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rmdir()


def _put_in_place(folder: Path, out: Path) -> None:
    """Rename a complete artifact to its final name; an old one there is exchanged, then removed."""
    write_file(folder / f"{PLACING}.new", inode(folder / "artifact").encode())
    os.replace(folder / f"{PLACING}.new", folder / PLACING)
    sync_folder(folder)
    replace_folder(folder / "artifact", out, folder / _OLD)
