"""Copy a bundle, or what one rank needs of it, from a store into a folder.

The files come into a private folder beside the destination, `.<name>.pull`, where an interrupted
pull is taken up again; they get their final names when all of them are whole and on disk.
"""

import os
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.files import lock_folder, place, sync_folder
from dsv2mk.artifacts.publish import check_archs
from dsv2mk.artifacts.share import MayLink, frozen, never
from dsv2mk.artifacts.store import Store, check_digests, open_regular, read_regular, unique
from dsv2mk.artifacts.transfer import (
    Copied,
    Copy,
    Done,
    check_files,
    space_errors,
    transfer,
)
from dsv2mk.manifests.bundle import Bundle, cubin_arch
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.layout import PARTS
from dsv2mk.manifests.manifest import MANIFEST_NAME, FileEntry, Manifest


@dataclass(kw_only=True, frozen=True)
class Pulled:
    """What `pull` did."""

    bundle: Bundle
    files: Mapping[str, FileEntry]  # that were asked for
    added: Sequence[str]  # that were not there
    copied: Copied


def trusted_bundle(store: Store, digest: str, trust: Sequence[Path]) -> Bundle:
    """A bundle; with keys to trust, its signature is checked before anything else of it."""
    encoded = store.bundle_bytes(digest)
    if trust:
        from dsv2mk.artifacts import signing

        signatures: list[bytes] = []
        for path in store.signature_places(digest):
            with suppress(OSError):
                signatures.append(read_regular(path, 1 << 16))
        signing.check(encoded, signatures, trust)
    bundle = Bundle.parse(encoded, f"bundle {store.bundle_place(digest)}")
    if trust and bundle.blake3 is None:
        raise ArtifactError(
            f"bundle {store.bundle_place(digest)} is signed but has no blake3 hashes",
            fix="Publish it again with --sign",
        )
    return bundle


def select_files(
    bundle: Bundle, manifest: Manifest, rank: int | None, archs: Sequence[str] | None
) -> dict[str, FileEntry]:
    """The files that one rank needs, with the cubins for some architectures. UsageError."""
    ranks = manifest.topology.ranks
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError("--rank", expected=f"0 to {ranks - 1}", found=rank)
    check_archs(archs, bundle.archs, f"bundle {bundle.digest}")
    others = {
        layout.file_name(part)
        for layout in manifest.layouts
        for part in PARTS
        if rank is not None and layout.rank != rank
    }
    return {
        name: entry
        for name, entry in bundle.table(manifest).items()
        if name not in others and (archs is None or cubin_arch(name) in (None, *archs))
    }


def pull(
    store: Store,
    digest: str,
    dest: Path,
    *,
    rank: int | None = None,
    archs: Sequence[str] | None = None,
    trust: Sequence[Path] = (),
    links: bool = True,
    done: Done = lambda count: None,
) -> Pulled:
    """Make a folder an artifact, or add what is missing to one that is this artifact already.

    links: where the file system can, read-only objects of this user that the manifest names get
    second names in `dest`. Never with keys to trust: who can write to the store might change them
    later; then files of `dest` that have other names are refused. Raises ArtifactError for an
    object that is missing or damaged, or a file of `dest` that is; UsageError if `dest` is
    something else or in use; SpaceError. In every case `dest` is as it was.
    """
    bundle = trusted_bundle(store, digest, trust)
    manifest = store.manifest(bundle)
    files = select_files(bundle, manifest, rank, archs)
    check_digests(files, f"bundle {bundle.digest}")
    dest = Path(os.path.realpath(dest))
    digests = {entry.digest for entry in files.values()}
    # What another rank shares with ours is linked.
    useful = {n: e for n, e in bundle.table(manifest).items() if n in files or e.digest in digests}
    there: dict[str, FileEntry] = {}

    def look() -> tuple[set[str], list[str]]:
        """Check what is there and was not checked; what lies elsewhere, and what is missing."""
        new = {n: useful[n] for n in _there(dest, bundle, useful) if n not in there}
        _check_there(dest, new, done)
        there.update(new)
        outside = _outside(dest, there)
        if trust:
            if outside:
                raise UsageError(
                    f"{dest / min(outside)} is a link to a file elsewhere",
                    expected="files of its own, with --trust",
                    fix="Name another folder",
                )
            _check_blake3(bundle, dest, new)
        return outside, [name for name in files if name not in there]

    outside, added = look()
    if not added:
        if _outer(dest).exists():  # of a pull that died when all was in place
            with suppress(UsageError, OSError), _private(dest):
                pass
        return Pulled(bundle=bundle, files=files, added=(), copied=Copied())
    dest.parent.mkdir(parents=True, exist_ok=True)
    with space_errors(dest.parent, lambda: 1 << 20), _private(dest) as folder:
        outside, added = look()  # another pull may have ended since
        wanted = {name: files[name] for name in added}
        linkable = set(manifest.files) if links and not trust else set()
        own = {
            entry.digest: dest / name
            for name, entry in there.items()
            if name not in outside or (linkable and not (dest / name).is_symlink())
        }
        copied = _fetch(store, bundle, folder, wanted, own, linkable, done)
        if trust:
            _check_blake3(bundle, folder, wanted)
        if added:
            _put_in_place(folder, dest, added)
    return Pulled(bundle=bundle, files=files, added=added, copied=copied)


# ---- before ----


def _there(dest: Path, bundle: Bundle, files: Mapping[str, FileEntry]) -> list[str]:
    """Which of the files a folder has. Raises UsageError if it is not this artifact."""
    if os.path.ismount(dest):
        raise UsageError(f"{dest} is a mount point", fix="Name a folder in it")
    if not os.path.lexists(dest) or (dest.is_dir() and not any(dest.iterdir())):
        return []
    if not (dest / MANIFEST_NAME).exists():
        raise UsageError(f"{dest} exists and is not an artifact", fix="Name another folder")
    found = read_manifest(dest).digest
    if found != bundle.artifact:
        raise UsageError(
            f"{dest} is another artifact",
            expected=bundle.artifact,
            found=found,
            fix="Name another folder",
        )
    return [name for name in files if os.path.lexists(dest / name)]


def _outside(dest: Path, names: Iterable[str]) -> set[str]:
    """Which of these files have other names than these, or are symbolic links.

    A pull that was interrupted may have given them names in its private folder; one that goes on
    gives and takes names meanwhile.
    """
    for _ in range(4):
        infos = {name: (dest / name).lstat() for name in names}
        counts: Counter[tuple[int, int]] = Counter()
        for top in (_outer(dest), dest):  # names move from the first to the second
            for folder, _folders, files in os.walk(top):
                for file in files:
                    with suppress(FileNotFoundError):
                        info = os.lstat(os.path.join(folder, file))
                        counts[info.st_dev, info.st_ino] += 1
        found = {
            name
            for name, info in infos.items()
            if info.st_nlink > counts[info.st_dev, info.st_ino] or stat.S_ISLNK(info.st_mode)
        }
        if not found:
            break
    return found


def _check_there(dest: Path, files: Mapping[str, FileEntry], done: Done) -> None:
    openers = {name: (partial(open_regular, dest / name), entry) for name, entry in files.items()}
    for name, problem in sorted(check_files(openers, done).items()):
        raise ArtifactError(
            f"{dest / name} {problem}", fix=f"Remove {dest / name} and run the same command again"
        )


def _check_blake3(bundle: Bundle, folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Check files against the signed hashes, chunk by chunk. Raises ArtifactError."""
    from dsv2mk.artifacts import signing

    assert bundle.blake3 is not None
    hashes: dict[tuple[int, int], list[str]] = {}
    for name, entry in sorted(files.items()):
        info = (folder / name).stat()
        same = info.st_dev, info.st_ino
        if same not in hashes:
            hashes[same] = signing.blake3_chunks(
                open_regular(folder / name), entry.size, folder / name
            )
        pairs = zip(bundle.blake3[name], hashes[same], strict=True)
        for index, (wanted, found) in enumerate(pairs):
            if wanted != found:
                raise ArtifactError(
                    f"{folder / name}: chunk {index} is not what was signed (BLAKE3)",
                    expected=wanted,
                    found=found,
                )


# ---- the private folder ----


def _outer(dest: Path) -> Path:
    return dest.parent / f".{dest.name}.pull"


@contextmanager
def _private(dest: Path) -> Iterator[Path]:
    """The folder where files come in, held by one pull; it is removed when it was emptied."""
    outer = _outer(dest)
    try:
        lock = lock_folder(outer)
    except UsageError:
        raise UsageError(f"another pull is writing {outer}", fix="Wait for it") from None
    folder = outer / "artifact"
    try:
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not any(path.is_file() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                (outer / "lock").unlink()
                outer.rmdir()
        os.close(lock)


def _fetch(
    store: Store,
    bundle: Bundle,
    folder: Path,
    wanted: Mapping[str, FileEntry],
    own: Mapping[str, Path],
    linkable: Collection[str],
    done: Done,
) -> Copied:
    """Bring files into the private folder; equal ones, of several ranks, are one file."""
    first = {digest: name for digest, (name, _) in unique(wanted).items()}
    linked: dict[str, Path] = {}  # names that another file gets too
    for name, entry in wanted.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if entry.digest in own:
            linked[name] = own[entry.digest]
        elif first[entry.digest] != name:
            linked[name] = folder / first[entry.digest]
    single = [name for name in wanted if name not in linked]
    for path in [path for path in folder.rglob("*") if not path.is_dir()]:
        if str(path.relative_to(folder)) not in single:
            path.unlink()  # of another pull, or a link that is made again

    def of(name: str) -> Copy:
        may_link = frozen if name in linkable else never
        return _copy(store, bundle, folder, name, wanted[name], may_link)

    copied = transfer([of(name) for name in single], folder, done)
    copies = []
    for name, existing in linked.items():
        try:
            (folder / name).unlink(missing_ok=True)
            os.link(existing, folder / name)
        except OSError:  # no hard links here
            copies.append(of(name))
    copied += transfer(copies, folder, done)
    for path in {(folder / name).parent for name in wanted} | {folder}:
        sync_folder(path)
    return copied


def _copy(
    store: Store, bundle: Bundle, folder: Path, name: str, entry: FileEntry, may_link: MayLink
) -> Copy:
    return Copy(
        entry=entry,
        source=lambda: store.open_object(entry.digest),
        part=folder / name,
        shared=False,
        may_link=may_link,
        refuse=lambda problem: store.damage(bundle, name, entry, problem),
        finish=lambda part, fd: None,
    )


def _put_in_place(folder: Path, dest: Path, added: Sequence[str]) -> None:
    """Give the files their final names: the whole folder, or one by one if there is one already."""
    if MANIFEST_NAME in added:
        os.rename(folder, dest)
    else:
        for name in sorted(added):  # a cubin before its sidecar
            (dest / name).parent.mkdir(exist_ok=True)
            place(folder / name, dest / name)
        for path in {(dest / name).parent for name in added}:
            sync_folder(path)
        sync_folder(dest)
    sync_folder(dest.parent)
