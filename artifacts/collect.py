"""Take out of a store what nobody names any more, and check what is in it.

A collection and a publish know nothing of each other, and there are no locks. A publish writes its
lease, then looks for objects; a collection moves an object into trash/, then reads bundles and
leases again, and deletes the object only if still nobody names it. Whichever comes second sees
the other: the publish finds the object gone, and takes it out of trash/ or copies it again, or
the collection finds the lease, and moves the object back. A collection that is cut short leaves
objects in trash/, where readers find them too; the next one decides about them.

Several collections share the names in trash/, so that one may meet there what another has moved
since. Hence before an object is deleted it gets a name that only this collection knows, and bundles
and leases are read once more: from then on no publish can begin to rely on it.
"""

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dsv2mk.artifacts.files import place, temporary
from dsv2mk.artifacts.hashing import sampled
from dsv2mk.artifacts.publish import LEASE_SECONDS, put_back, restore
from dsv2mk.artifacts.store import DIGEST, DYING, Store, read_regular
from dsv2mk.artifacts.transfer import Done, check_files
from dsv2mk.manifests.bundle import Bundle
from dsv2mk.manifests.canonical import parse_object
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.manifest import FileEntry

_TEMPORARY = re.compile(r"\..+\.(part|tmp)")
_LEASE = re.compile(r"[0-9a-f]{32}\.json")
_LEFT = re.compile(f"{_TEMPORARY.pattern}|{_LEASE.pattern}")


@dataclass(kw_only=True)
class Collected:
    """What a collection removed, or would remove."""

    objects: list[str] = field(default_factory=list)  # digests
    others: list[Path] = field(default_factory=list)  # parts, temporaries, leases
    nbytes: int = 0
    restored: list[str] = field(default_factory=list)  # that were in trash/ and are named


def collect(store: Store, grace: float, *, dry_run: bool = False) -> Collected:
    """Remove objects older than `grace` seconds that no bundle and no live lease names.

    Raises ArtifactError, before anything is removed, for a bundle, manifest or lease that is
    damaged: nobody can know what it names.
    """
    for digest in [] if dry_run else store.bundle_digests():
        for trashed in store.trashed(f"{digest}.json"):
            _decide(store, digest, trashed)  # its removal was cut short
    for trashed in [] if dry_run else store.trashed("*.sig"):
        _drop_signature(store, trashed, trashed.name[1:].rsplit(".", 2)[0])
    now = _now(store, dry_run)
    old = now - grace
    leased = _leased(store, now)
    named = _named(store, now)
    result = Collected()
    for path, info in _stale(store, min(old, now - LEASE_SECONDS), leased):
        result.others.append(path)
        result.nbytes += _freed(info)
        if not dry_run:
            path.unlink(missing_ok=True)
    if dry_run:
        for path, info in [*_objects(store), *_trash(store)]:
            if path.name not in named and info.st_mtime <= old:
                result.objects.append(path.name)
                result.nbytes += _freed(info)
        return result
    (store.path / "trash").mkdir(exist_ok=True)
    for path in (store.path / "trash").glob(f".*.{DYING}"):  # of a collection that was cut short
        digest = path.name.split(".")[1]
        with suppress(FileNotFoundError):  # another collection is done with it
            if DIGEST.fullmatch(digest) and path.stat().st_ctime <= now - LEASE_SECONDS:
                put_back(store, path, store.object_place(digest))
    for path, info in _objects(store):
        if path.name not in named and info.st_mtime <= old:
            with suppress(FileNotFoundError):
                os.rename(path, store.trash_place(path.name))
    trash = list(_trash(store))
    named = _named(store, _now(store, dry_run))
    for path, info in trash:
        if path.name in named or info.st_mtime > old:
            put_back(store, path, store.object_place(path.name))
            if restore(store, path.name):
                result.restored.append(path.name)
    left = [(path, info) for path, info in trash if path.name not in named and _same(path, info)]
    _delete([(path, info) for path, info in left if info.st_mtime <= old], store, result)
    return result


def _delete(doomed: list[tuple[Path, os.stat_result]], store: Store, result: Collected) -> None:
    """Delete objects of the trash, if still nobody names them once no other process sees them."""
    claimed = []
    for path, info in doomed:
        own = store.dying(path.name)
        with suppress(FileNotFoundError):
            os.rename(path, own)
            claimed.append((path.name, own, info))
    named = _named(store, _now(store, False)) if claimed else set()
    for digest, own, info in claimed:
        with suppress(FileNotFoundError):  # a publish has taken it back
            if digest in named:
                place(own, store.object_place(digest))
                result.restored.append(digest)
            else:
                own.unlink()
                result.objects.append(digest)
                result.nbytes += _freed(info)


def remove(store: Store, name: str) -> tuple[list[str], str | None]:
    """Remove a tag, with its bundle if that has no other; or a bundle with all its tags.

    The tags and the bundle that were removed. Objects stay until a collection. UserError.
    """
    found: object = None
    if name in store.tag_names():
        gone = [name]
        if isinstance(store.tags().get(name), str):
            found = _untag(store, name)
        else:  # it is damaged
            (store.path / "tags" / name).unlink(missing_ok=True)
    else:
        found = store.resolve(name)
        named = [tag for tag, digest in store.tags().items() if digest == found]
        gone = [tag for tag in named if _untag(store, tag, found)]
    if not isinstance(found, str) or found in store.tags().values():
        return gone, None
    (store.path / "trash").mkdir(exist_ok=True)
    removed = store.has_bundle(found) and _decide(store, found, store.bundle_place(found))
    return gone, found if removed else None


def _untag(store: Store, tag: str, only: str | None = None) -> str | None:
    """Remove a tag, or only if it names a certain bundle; what it named, None if it stays."""
    path = store.path / "tags" / tag
    own = temporary(path)
    with suppress(FileNotFoundError):
        os.rename(path, own)
        with suppress(ArtifactError):
            found = store.tag(own.name)
            if only in (None, found):
                own.unlink()
                return found
        place(own, path)  # it has moved on since
    return None


def _drop_signature(store: Store, path: Path, name: str) -> None:
    """Delete a signature, unless its bundle is there."""
    own = store.dying(name)
    with suppress(FileNotFoundError):
        os.rename(path, own)
        if store.bundle_place(name.split(".")[0]).exists():
            place(own, store.path / "bundles" / name)
        else:
            own.unlink()


def _decide(store: Store, digest: str, where: Path) -> bool:
    """Delete a bundle that lies in the trash or in its place; or put it back, if it is tagged.

    It is decided under a name that no other process has. Whoever sets a tag looks afterwards
    whether the bundle is where it belongs. So either the tag is seen here, or it is seen there that
    the bundle is not in its place.
    """
    path = store.bundle_place(digest)
    own = store.dying(path.name)
    with suppress(FileNotFoundError):
        os.rename(where, own)
        if digest in store.tags().values():
            place(own, path)
            return False
        own.unlink()
    if path.exists():
        return False
    for signature in store.signature_places(digest):
        _drop_signature(store, signature, signature.name)
    return True


def check_store(
    store: Store,
    only: Bundle | None = None,
    sample: float = 100.0,
    done: Done = lambda count: None,
) -> tuple[int, dict[str, str]]:
    """Hash the objects of all bundles, or of one; how many, and what is wrong, by path.

    With `sample` below 100 only that percentage of each object's chunks is read, at least one.
    """
    problems: dict[str, str] = {}
    users: dict[str, list[tuple[str, str]]] = {}
    entries: dict[str, FileEntry] = {}
    for bundle in [only.digest] if only is not None else store.bundle_digests():
        try:
            files = store.files(only) if only else store.if_there(bundle, store.files)
        except ArtifactError as error:
            problems[str(store.bundle_place(bundle))] = str(error)
            continue
        for name, entry in (files or {}).items():
            entries[entry.digest] = entry
            users.setdefault(entry.digest, []).append((name, bundle))
    if only is None:
        for tag, found in store.tags().items():
            if isinstance(found, ArtifactError):
                problems[str(store.path / "tags" / tag)] = str(found)
            elif store.dangling(tag):
                problems[str(store.path / "tags" / tag)] = f"names bundle {found}, which is missing"
    for digest in entries:
        if not store.object_place(digest).exists():
            with suppress(OSError):  # a store that is only read: it is used where it is
                restore(store, digest)

    def chosen(entry: FileEntry) -> list[int]:
        return sampled(len(entry.chunks), sample)

    openers = {d: (partial(store.open_object, d), entry) for d, entry in entries.items()}
    bad = check_files(openers, done, chosen)
    missing = {digest: openers[digest] for digest in bad if bad[digest] == "is missing"}
    again = check_files(missing, indices=chosen)  # others may have published them again
    for digest in sorted(bad):
        living = [use for use in users[digest] if only is not None or store.has_bundle(use[1])]
        problem = again.get(digest) if digest in missing else bad[digest]
        if living and problem is not None:
            where = ", ".join(f"{name} of bundle {bundle}" for name, bundle in living)
            problems[str(store.object_place(digest))] = f"{problem}; it is {where}"
    return len(entries), problems


# ---- what is there, and who names it ----


def _freed(info: os.stat_result) -> int:
    """Bytes of disk that removing this name of a file frees."""
    return min(info.st_size, info.st_blocks * 512) if info.st_nlink == 1 else 0


def _named(store: Store, now: float) -> set[str]:
    """Every object that a bundle or a live lease names. Raises ArtifactError."""
    named = _leased(store, now)  # first: a publish ends with its bundle there and no lease
    for digest in store.bundle_digests():
        named |= _named_by(store, digest)
    return named


def _leased(store: Store, now: float) -> set[str]:
    """Every object that a live lease names. Raises ArtifactError."""
    named: set[str] = set()
    for path, info in _files(store.path / "leases", _LEASE):
        if info.st_mtime <= now - LEASE_SECONDS:
            continue
        try:
            objects = parse_object(read_regular(path))["objects"]
            if not all(DIGEST.fullmatch(digest) for digest in objects):
                raise ValueError("an object's name")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"lease {path} is damaged: {error}", fix="Remove it if nobody publishes now"
            ) from None
        named |= set(objects)
    return named


def _named_by(store: Store, digest: str) -> set[str]:
    """Objects of a bundle; none if it is removed. One that is on the move is looked for again."""
    files = store.if_there(digest, store.files) or {}
    return {entry.digest for entry in files.values()}


def _objects(store: Store) -> Iterator[tuple[Path, os.stat_result]]:
    for folder in _folders(store.path / "objects"):
        yield from _files(folder, DIGEST)


def _trash(store: Store) -> Iterator[tuple[Path, os.stat_result]]:
    yield from _files(store.path / "trash", DIGEST)


def _stale(store: Store, old: float, leased: set[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Parts, temporaries and leases of publishers that have died.

    Those of a publisher that lives are touched, or its lease names their object.
    """
    folders = [store.path, *(store.path / name for name in ("bundles", "tags", "leases", "trash"))]
    for folder in [*folders, *_folders(store.path / "objects")]:
        form = _LEFT if folder.name == "leases" else _TEMPORARY
        for path, info in _files(folder, form):
            if info.st_mtime <= old and path.name.split(".")[1] not in leased:
                yield path, info


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _files(folder: Path, form: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if form.fullmatch(path.name):
            with suppress(FileNotFoundError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode):
                    yield path, info


def _same(path: Path, before: os.stat_result) -> bool:
    """Whether nobody has touched, renamed or replaced a file since."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return (info.st_ino, info.st_mtime_ns, info.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def _now(store: Store, dry_run: bool) -> float:
    """The time by the clock that stamps the store's files, which need not be ours."""
    try:
        with tempfile.NamedTemporaryFile(dir=store.path, prefix=".now.", suffix=".tmp") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        if not dry_run:
            raise
        return time.time()
