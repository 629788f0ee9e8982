"""Which cubin to load: from a folder that was named, the artifact's, or the compiler's cache."""

from pathlib import Path

from dsv2mk.manifests.errors import ArtifactError, NodeError, UsageError, UserError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import (
    COLLECTIVES,
    CUBIN_FILE,
    CUBIN_FOLDER,
    Sidecar,
    cache_folder,
    parse_sidecar,
)


def find_cubin(
    arch: str,
    geometry: Geometry | None,
    ranks: int | None,
    given: Path | None,
    own: Path | None,
    *,
    collective: str = COLLECTIVES[0],
) -> tuple[Sidecar, bytes]:
    """A cubin for this architecture and collective and, where given, this model and these ranks.

    given: a folder or a .cubin file that the user named; else `own`, the artifact's folder, and
    the compiler's cache are looked through, newest first. Raises NodeError if none fits, saying
    what there is; ArtifactError for a damaged one; UsageError if several models or numbers of
    ranks are on offer and none is given.
    """
    if given is not None:
        found = _named(given)
        where = str(given)
    else:
        found = _in_folder(own) if own is not None and own.is_dir() else []
        found += _in_cache()
        where = "the artifact and the cache"
    option = "" if collective == COLLECTIVES[0] else f" --collective {collective}"
    line = f"dsv2mk cubin --artifact DIR --arch {arch}{option}"
    fix = f"Compile one: {line}, or name it: --cubin DIR"
    if not found:
        raise NodeError(f"no cubin in {where}", fix=fix)
    if geometry is not None:
        found = [one for one in found if one[0].geometry == geometry]
        if not found:
            raise NodeError(f"no cubin in {where} is for this model", fix=fix)
    fitting = [one for one in found if one[0].arch == arch]
    if not fitting:
        offered = ", ".join(sorted({side.arch for side, _ in found}))
        raise NodeError("no cubin for this GPU", expected=arch, found=offered, fix=fix)
    if ranks is not None:
        offered = ", ".join(sorted({str(side.topology.ranks) for side, _ in fitting}))
        fitting = [one for one in fitting if one[0].topology.ranks == ranks]
        if not fitting:
            raise NodeError(
                "no cubin for this number of ranks", expected=ranks, found=offered, fix=fix
            )
    offered = ", ".join(sorted({side.collective for side, _ in fitting}))
    fitting = [one for one in fitting if one[0].collective == collective]
    if not fitting:
        raise NodeError(
            "no cubin with this collective", expected=collective, found=offered, fix=fix
        )
    sidecar, path = fitting[0]
    if any(side.geometry != sidecar.geometry for side, _ in fitting):
        raise UsageError(f"{where} holds cubins of several models", fix="Name one .cubin file")
    if any(side.topology != sidecar.topology for side, _ in fitting):
        raise UsageError(
            f"{where} holds cubins of several numbers of ranks", fix="Name one .cubin file"
        )
    try:
        cubin = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}", fix=fix) from None
    if not sidecar.matches(cubin):
        raise ArtifactError(f"{path} is not the cubin that its sidecar describes", fix=fix)
    return sidecar, cubin


def _named(path: Path) -> list[tuple[Sidecar, Path]]:
    if path.is_dir():
        inner = path / CUBIN_FOLDER  # of an artifact
        return _in_folder(inner if inner.is_dir() else path)
    sidecar = path.with_suffix(".json")
    if path.suffix != ".cubin" or not sidecar.is_file():
        raise UsageError(
            "--cubin", expected="a folder, or a .cubin file beside its .json", found=path
        )
    return [(_sidecar(sidecar), path)]


def _in_folder(folder: Path) -> list[tuple[Sidecar, Path]]:
    """What `dsv2mk cubin` has written into a folder; other files are not looked at."""
    paths = [path for path in folder.glob("*.json") if CUBIN_FILE.fullmatch(path.name)]
    return [(_sidecar(path), path.with_suffix(".cubin")) for path in sorted(paths, key=_newest)]


def _sidecar(path: Path) -> Sidecar:
    try:
        return parse_sidecar(path.read_bytes(), path)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None


def _in_cache() -> list[tuple[Sidecar, Path]]:
    """Whole entries of the cache; what another version has left there is passed over."""
    found = []
    for path in sorted(cache_folder().glob("*/kernel.json"), key=_newest):
        cubin = path.with_suffix(".cubin")
        try:
            sidecar = parse_sidecar(path.read_bytes(), path)
            if sidecar.matches(cubin.read_bytes()):
                found.append((sidecar, cubin))
        except (OSError, UserError):
            continue
    return found


def _newest(path: Path) -> tuple[float, str]:
    try:
        return -path.stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)
