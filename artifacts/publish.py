"""Put an artifact into a store: objects first, then the bundle that names them, then its tag.

A lease says which objects a publish relies on, so that a collection leaves them alone before the
bundle is there. It is written before the store is looked at, which is all that is needed: see
collect.py. Nothing is taken for good because it is there: every object is hashed before a bundle
of ours names it.
"""

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from dsv2mk.artifacts.artifact import read_manifest
from dsv2mk.artifacts.console import message
from dsv2mk.artifacts.files import place, sync_folder, temporary, write_whole
from dsv2mk.artifacts.hashing import digest_of
from dsv2mk.artifacts.share import freeze, ours
from dsv2mk.artifacts.store import (
    PREFIX,
    STORE_FILE,
    STORE_NAME,
    Store,
    check_digests,
    open_regular,
    read_regular,
    unique,
)
from dsv2mk.artifacts.transfer import (
    Copied,
    Copy,
    Done,
    check_files,
    space_errors,
    transfer,
)
from dsv2mk.manifests.bundle import Bundle, make_bundle
from dsv2mk.manifests.canonical import FILE_NAME, canonical_json
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.manifest import CHUNK_BYTES, MANIFEST_NAME, FileEntry, Manifest
from dsv2mk.manifests.sidecar import CUBIN_FILE, CUBIN_FOLDER, parse_sidecar

#: Seconds that a lease counts after it was touched last, and after which its owner touches it.
LEASE_SECONDS = 3600
_RENEW_SECONDS = 60
#: How often others may take away what is being published before it is an error.
_ATTEMPTS = 5


@dataclass(kw_only=True, frozen=True)
class Published:
    """What `publish` did."""

    bundle: Bundle
    files: Mapping[str, FileEntry]
    copied: Copied
    reused: int  # bytes of objects that were there


def publish(
    folder: Path,
    store: Store,
    tag: str,
    *,
    archs: Sequence[str] | None = None,
    sign: Path | None = None,
    links: bool = True,
    done: Done = lambda count: None,
) -> Published:
    """Publish an artifact with its cubins, all or those for some architectures, under a tag.

    links: where the file system can, files that the manifest names become objects of the store by
    a second name, and read-only. Raises ArtifactError if a file is missing or not what the manifest
    says; SpaceError. In every case what the store offered before it still offers, and what is done
    is kept.
    """
    check_tag(tag)
    manifest = read_manifest(folder)
    sources = _beside(folder, manifest, archs)
    extra = {name: _entry_of(data) for name, (_, data) in sources.items()}
    paths = {name: path for name, (path, _) in sources.items()}
    paths |= {name: folder / name for name in manifest.files}
    bundle = make_bundle(manifest, extra)
    files = bundle.table(manifest)
    check_digests(files, folder / MANIFEST_NAME)
    if sign is not None:
        from dsv2mk.artifacts import signing

        signing.load_private(sign)  # refused before anything is copied
    with space_errors(store.path, lambda: 1 << 20), _lease(store, files):
        work = _Objects(store, files, paths, manifest.files if links else (), done)
        signatures: dict[str, bytes] = {}
        if sign is not None:
            hashes = None
            while hashes is None:
                work.settle()
                with suppress(FileNotFoundError):  # we slept, and a collection took one
                    hashes = _blake3(store, files)
            bundle = make_bundle(manifest, extra, hashes)
            key, signature = signing.sign(bundle.encoded, sign)
            signatures[f"{bundle.digest}.{key}.sig"] = signature
        _offer(store, bundle, signatures, tag, work.settle)
    return Published(bundle=bundle, files=files, copied=work.copied, reused=work.reused)


def create_store(path: Path) -> Store:
    """Open a store, or make one of a new or empty folder. Raises UsageError for another folder."""
    if not (path / STORE_NAME).exists():
        path.mkdir(parents=True, exist_ok=True)
        if found := [name for name in sorted(os.listdir(path)) if not name.startswith(".")]:
            if STORE_NAME not in found:
                raise UsageError(f"{path} is not a store and holds {found[0]}", fix="Name another")
        else:
            write_whole(path / STORE_NAME, STORE_FILE)
            sync_folder(path)
    return Store.open(path)


def check_tag(name: str) -> None:
    """Raises UsageError for what cannot name a bundle."""
    if not FILE_NAME.fullmatch(name) or len(name) > 200 or PREFIX.fullmatch(name):
        wanted = "letters, digits, '_', '.', '-', and not 8 or more digits of a hash"
        raise UsageError("a tag's name", expected=wanted, found=repr(name))


def set_tag(store: Store, name: str, digest: str) -> None:
    """Let a tag name a bundle from now on."""
    check_tag(name)
    folder = store.path / "tags"
    folder.mkdir(exist_ok=True)
    try:
        write_whole(folder / name, f"{digest}\n".encode(), replace=True)
    except IsADirectoryError:
        raise ArtifactError(f"tag {folder / name} is a folder", fix="Remove it") from None
    sync_folder(folder)


def retag(store: Store, digest: str, name: str) -> None:
    """Let a tag name a bundle that is there. Raises ArtifactError if it is damaged."""
    bundle = store.bundle(digest)
    files = store.files(bundle)
    signatures: dict[str, bytes] = {}
    for path in store.signature_places(digest):
        with suppress(OSError):  # it is being removed
            signatures[path.name] = read_regular(path)

    def settle() -> None:
        for object_digest, (file, entry) in unique(files).items():
            if not restore(store, object_digest):
                raise store.damage(bundle, file, entry, "is missing")

    with _lease(store, files):
        _offer(store, bundle, signatures, name, settle)


def _offer(
    store: Store,
    bundle: Bundle,
    signatures: Mapping[str, bytes],
    tag: str,
    settle: Callable[[], object],
) -> None:
    """Let a tag name a bundle that is there, with its signatures; `settle` sees to its objects."""
    places = [store.bundle_place(bundle.digest)]
    places += [store.path / "bundles" / name for name in signatures]
    for _ in range(_ATTEMPTS):
        settle()  # a bundle is not written before what it names is there
        put_bundle(store, bundle.encoded, signatures)
        settle()  # from now on no collection takes any of it
        set_tag(store, tag, bundle.digest)
        # Whoever has removed the bundle before the tag was there did not see the tag.
        if all(place.exists() for place in places):
            return
    raise UsageError(f"others keep removing bundle {bundle.digest} of {store.path}")


def put_bundle(store: Store, encoded: bytes, signatures: Mapping[str, bytes] | None = None) -> None:
    """Write a bundle and, before it, its signatures (by file name), unless they are there."""
    path = store.bundle_place(Bundle.parse(encoded).digest)
    path.parent.mkdir(exist_ok=True)
    wanted = {path.with_name(name): data for name, data in (signatures or {}).items()}
    for file, data in [*wanted.items(), (path, encoded)]:
        try:
            there = read_regular(file)
        except FileNotFoundError:
            write_whole(file, data)
        except OSError:
            write_whole(file, data, replace=True)
        else:
            if there != data:
                message(f"replaced: {file} was damaged")
                write_whole(file, data, replace=True)
    sync_folder(path.parent)


def restore(store: Store, digest: str) -> bool:
    """Put back an object that a collection has set aside; whether it is where it belongs."""
    path = store.object_place(digest)
    for _ in range(4):  # it may be on the move
        if path.exists():
            return True
        for trashed in store.trashed(digest):
            put_back(store, trashed, path)
    return path.exists()


def put_back(store: Store, trashed: Path, path: Path) -> None:
    """Put back what may lie in the trash; it is deleted if there is another in its place.

    On the way it has a name that nobody else has: a third may come to the name in the trash.
    """
    own = store.dying(path.name)
    with suppress(FileNotFoundError):
        os.rename(trashed, own)
        path.parent.mkdir(parents=True, exist_ok=True)
        place(own, path)


class _Objects:
    """The objects of a publish: those that are there are hashed, others are copied."""

    def __init__(
        self,
        store: Store,
        files: Mapping[str, FileEntry],
        paths: Mapping[str, Path],
        links: Collection[str],
        done: Done,
    ) -> None:
        self.copied = Copied()
        self.reused = 0
        self._store = store
        self._paths = paths
        self._links = links
        self._done = done
        self._wanted = unique(files)
        self._sources: dict[str, list[Path]] = {}
        for name, entry in files.items():
            self._sources.setdefault(entry.digest, []).append(paths[name])
        self._proved: set[str] = set()

    def settle(self) -> None:
        """Every object is in its place and was hashed. Raises ArtifactError, SpaceError."""
        for _ in range(_ATTEMPTS):
            gone = {d for d in self._proved if not restore(self._store, d)}
            self._proved -= gone
            todo = [digest for digest in self._wanted if digest not in self._proved]
            if not todo:
                return
            self._settle(todo)
        raise UsageError(f"others keep removing objects of {self._store.path}")

    def _settle(self, todo: list[str]) -> None:
        there = [digest for digest in todo if restore(self._store, digest)]
        openers: dict[str, tuple[Callable[[], int], FileEntry]] = {}
        damaged: dict[str, str] = {}
        for digest in there:
            path = self._store.object_place(digest)
            if source := self._link_of(path, digest):
                damaged[digest] = f"is another name of {source}"
                continue
            with suppress(OSError):  # not ours: the lease has to do
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(fd, "rb") as file:
                    os.utime(file.fileno())
                    freeze(file.fileno())
            openers[digest] = (partial(open_regular, path), self._wanted[digest][1])
        damaged |= check_files(openers, self._done)
        good = set(there) - set(damaged)
        self._proved |= good
        self.reused += sum(self._wanted[digest][1].size for digest in good)
        copies = [self._copy(d, replace=d in damaged) for d in todo if d not in good]
        for folder in {copy.part.parent for copy in copies}:
            folder.mkdir(parents=True, exist_ok=True)
        self.copied += transfer(copies, self._store.path, self._done)
        for digest, problem in damaged.items():
            if problem != "is missing":
                message(f"replaced: object {self._store.object_place(digest)} {problem}")
        if copies:
            for folder in {copy.part.parent for copy in copies}:
                sync_folder(folder)
            sync_folder(self._store.path / "objects")

    def _link_of(self, path: Path, digest: str) -> Path | None:
        """The source that an object is another name of, where links are not wanted."""
        for source in self._sources[digest] if not self._links else ():
            with suppress(OSError):
                if os.path.samestat(os.lstat(source), os.lstat(path)):
                    return source
        return None

    def _copy(self, digest: str, *, replace: bool) -> Copy:
        name, entry = self._wanted[digest]
        source, path = self._paths[name], self._store.object_place(digest)

        def refuse(problem: str) -> ArtifactError:
            return ArtifactError(
                f"{source}: {problem}",
                fix="Build the artifact again: dsv2mk build SNAPSHOT --tp N --out DIR --overwrite",
            )

        def finish(part: Path, fd: int) -> None:
            """Take the part away from others that write to it; give it its name, read-only.

            Another publisher may have done that already, and a third begun a new part.
            """
            claimed = temporary(path)
            try:
                os.rename(part, claimed)
            except FileNotFoundError:
                return  # `settle` looks whether the object is there
            try:
                if os.path.samestat(os.stat(claimed), os.fstat(fd)):
                    freeze(fd)
                    if place(claimed, path, replace=replace):
                        self._proved.add(digest)  # else `settle` hashes what has the name
            except FileNotFoundError:
                pass  # we slept, and a collection took it for one left
            finally:
                claimed.unlink(missing_ok=True)

        def may_link(info: os.stat_result) -> bool:
            """Whether the source is the folder's own, and not what a symbolic link leads to."""
            return name in self._links and ours(info) and os.path.samestat(info, os.lstat(source))

        part = path.with_name(f".{digest}.part")
        return Copy(
            entry=entry,
            source=partial(open_regular, source),
            part=part,
            shared=True,
            may_link=may_link,
            refuse=refuse,
            finish=finish,
        )


@contextmanager
def _lease(store: Store, files: Mapping[str, FileEntry]) -> Iterator[None]:
    """Hold a lease on objects, from before they are looked at until a bundle names them."""
    path = store.path / "leases" / f"{secrets.token_hex(16)}.json"
    encoded = canonical_json({"objects": sorted({entry.digest for entry in files.values()})})
    ended = threading.Event()

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, encoded)
        sync_folder(path.parent)

    def renew() -> None:
        while not ended.wait(_RENEW_SECONDS):
            try:
                os.utime(path)
            except FileNotFoundError:  # we were stopped for so long that it was removed
                with suppress(OSError):
                    write()
            except OSError:
                pass  # the next try may do

    write()
    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink()


def _beside(
    folder: Path, manifest: Manifest, archs: Sequence[str] | None
) -> dict[str, tuple[Path, bytes]]:
    """The manifest, and cubins with their sidecars: where they are and what they hold."""
    found = {MANIFEST_NAME: (folder / MANIFEST_NAME, manifest.encoded)}
    offered: set[str] = set()
    cubins = folder / CUBIN_FOLDER
    paths = sorted(cubins.glob("*.json")) if cubins.is_dir() else []
    for path in (path for path in paths if CUBIN_FILE.fullmatch(path.name)):
        fix = "Compile it again: dsv2mk cubin --artifact DIR --arch ARCH"
        try:
            sidecar, cubin = path.read_bytes(), path.with_suffix(".cubin").read_bytes()
        except OSError as error:
            raise ArtifactError(f"{error.filename}: {error.strerror}", fix=fix) from None
        side = parse_sidecar(sidecar, path)
        if not side.matches(cubin):
            raise ArtifactError(f"{path.with_suffix('.cubin')} is not that of {path}", fix=fix)
        if (side.geometry, side.topology) != (manifest.geometry, manifest.topology):
            message(f"left out: {path} is for another model or number of ranks")
            continue
        offered.add(side.arch)
        if archs is None or side.arch in archs:
            name = f"{CUBIN_FOLDER}/{side.file_stem}"
            found[f"{name}.cubin"] = (path.with_suffix(".cubin"), cubin)
            found[f"{name}.json"] = (path, sidecar)
    check_archs(archs, offered, str(folder))
    return found


def check_archs(archs: Iterable[str] | None, offered: Iterable[str], where: str) -> None:
    """Raises UsageError if there is no cubin for an architecture that was asked for."""
    there = sorted(offered)
    if absent := [arch for arch in archs or () if arch not in there]:
        raise UsageError(
            f"{where} has no cubin for {absent[0]}",
            found=", ".join(there) or "none",
            fix=f"Compile one: dsv2mk cubin --artifact DIR --arch {absent[0]}",
        )


def _entry_of(data: bytes) -> FileEntry:
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    chunks = tuple(xxhash.xxh3_128_hexdigest(piece) for piece in pieces)
    return FileEntry(size=len(data), digest=digest_of(chunks), chunks=chunks)


def _blake3(store: Store, files: Mapping[str, FileEntry]) -> dict[str, list[str]]:
    """BLAKE3 of every file, of the objects that have just been hashed."""
    from dsv2mk.artifacts import signing

    hashes = {
        digest: signing.blake3_chunks(
            store.open_object(digest), entry.size, store.object_place(digest)
        )
        for digest, (_, entry) in unique(files).items()
    }
    return {name: hashes[entry.digest] for name, entry in files.items()}
