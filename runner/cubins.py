"""Which cubin to load: from a folder that was named, the artifact's, or the compiler's cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsv2mk.artifacts.artifact import Artifact
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


@dataclass(frozen=True)
class _Offer:
    """A cubin that has not been read yet, by its sidecar."""

    sidecar: Sidecar
    label: str  # for messages
    read: Callable[[], bytes]

    @property
    def text(self) -> str:
        """What it is for."""
        side = self.sidecar
        return f"{side.arch} tp{side.topology.ranks} {side.collective}"


def find_cubin(
    arch: str,
    geometry: Geometry | None,
    ranks: int | None,
    given: Path | None,
    own: Path | Artifact | None,
    *,
    collective: str = COLLECTIVES[0],
) -> tuple[Sidecar, bytes]:
    """A cubin for this architecture and collective and, where given, this model and these ranks.

    given: a folder or a .cubin file that the user named; else `own`, the artifact or its folder of
    cubins, and the compiler's cache are looked through, newest first; a bundle's by name, and of
    all that do not fit only the sidecars are read. Raises NodeError if none fits, saying what there
    is; ArtifactError for a damaged one; UsageError if several models or numbers of ranks are on
    offer and none is given.
    """
    offers: list[str] = []  # of a bundle
    if given is not None:
        found = _named(given)
        where = str(given)
    else:
        found, where = [], "the artifact and the cache"
        if isinstance(own, Path):
            found = _in_folder(own)
        elif own is not None and own.bundle is None:
            found = _in_folder(own.path / CUBIN_FOLDER)
        elif own is not None:
            found = _in_bundle(own)
            where = f"{own.where} and the cache"
            texts = ", ".join(sorted({one.text for one in found})) or "no cubins"
            offers = [f"{own.where} has {texts}"]
        found += _in_cache()
    option = "" if collective == COLLECTIVES[0] else f" --collective {collective}"
    line = f"dsv2mk cubin --artifact DIR --arch {arch}{option}"
    fix = f"Compile one: {line}, or name it: --cubin DIR"

    def misfit(what: str, expected: object = None, found: set[str] | None = None) -> NodeError:
        there = "; ".join([*([", ".join(sorted(found))] if found else []), *offers])
        return NodeError(what, expected=expected, found=there or None, fix=fix)

    if not found:
        raise misfit(f"no cubin in {where}")
    if geometry is not None:
        found = [one for one in found if one.sidecar.geometry == geometry]
        if not found:
            raise misfit(f"no cubin in {where} is for this model")
    fitting = [one for one in found if one.sidecar.arch == arch]
    if not fitting:
        raise misfit("no cubin for this GPU", arch, {one.sidecar.arch for one in found})
    if ranks is not None:
        there = {str(one.sidecar.topology.ranks) for one in fitting}
        fitting = [one for one in fitting if one.sidecar.topology.ranks == ranks]
        if not fitting:
            raise misfit("no cubin for this number of ranks", ranks, there)
    there = {one.sidecar.collective for one in fitting}
    fitting = [one for one in fitting if one.sidecar.collective == collective]
    if not fitting:
        raise misfit("no cubin with this collective", collective, there)
    sidecar = fitting[0].sidecar
    if any(one.sidecar.geometry != sidecar.geometry for one in fitting):
        raise UsageError(f"{where} holds cubins of several models", fix="Name one .cubin file")
    if any(one.sidecar.topology != sidecar.topology for one in fitting):
        raise UsageError(
            f"{where} holds cubins of several numbers of ranks", fix="Name one .cubin file"
        )
    try:
        cubin = fitting[0].read()
    except OSError as error:
        raise ArtifactError(f"{fitting[0].label}: {error.strerror}", fix=fix) from None
    if not sidecar.matches(cubin):
        raise ArtifactError(
            f"{fitting[0].label} is not the cubin that its sidecar describes", fix=fix
        )
    return sidecar, cubin


def _named(path: Path) -> list[_Offer]:
    if path.is_dir():
        inner = path / CUBIN_FOLDER  # of an artifact
        return _in_folder(inner if inner.is_dir() else path)
    sidecar = path.with_suffix(".json")
    if path.suffix != ".cubin" or not sidecar.is_file():
        raise UsageError(
            "--cubin", expected="a folder, or a .cubin file beside its .json", found=path
        )
    return [_offer(sidecar)]


def _in_folder(folder: Path) -> list[_Offer]:
    """What `dsv2mk cubin` has written into a folder; other files are not looked at."""
    paths = [path for path in folder.glob("*.json") if CUBIN_FILE.fullmatch(path.name)]
    return [_offer(path) for path in sorted(paths, key=_newest)]


def _offer(path: Path) -> _Offer:
    """The cubin beside a sidecar."""
    try:
        sidecar = parse_sidecar(path.read_bytes(), path)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    cubin = path.with_suffix(".cubin")
    return _Offer(sidecar, str(cubin), cubin.read_bytes)


def _in_bundle(artifact: Artifact) -> list[_Offer]:
    """What a bundle has beside the artifact; only sidecars are read here."""
    offers = []
    for name in sorted(artifact.entries):
        stem, _, kind = name.rpartition(".")
        if name.startswith(f"{CUBIN_FOLDER}/") and kind == "json":
            sidecar = parse_sidecar(artifact.read(name), artifact.label(name))
            cubin = f"{stem}.cubin"
            offers.append(_Offer(sidecar, artifact.label(cubin), partial(artifact.read, cubin)))
    return offers


def _in_cache() -> list[_Offer]:
    """Whole entries of the cache; what another version has left there is passed over."""
    found = []
    for path in sorted(cache_folder().glob("*/kernel.json"), key=_newest):
        try:
            offer = _offer(path)
            if offer.sidecar.matches(offer.read()):
                found.append(offer)
        except (OSError, UserError):
            continue
    return found


def _newest(path: Path) -> tuple[float, str]:
    try:
        return -path.stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)
