"""A store: a folder on a shared file system that carries bundles from builders to nodes.

    store.json              {"schema":1}
    objects/ab/<digest>     whole files, named by the digest in the manifest; never changed
    bundles/<sha256>.json   what belongs together, see manifests/bundle.py
    bundles/<sha256>.<id>.sig   a signature of a bundle's bytes
    tags/<name>             a bundle's sha256 and a newline
    leases/<random>.json    objects that a publish under way relies on
    trash/                  what may be deleted, while it is decided whether anybody needs it

Everything gets its final name in one step and when it is whole. No locks: shared file systems do
not all have them. This module reads only; a reader needs no right to write.
"""

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dsv2mk.artifacts.hashing import chunk_range, digest_of, hash_range
from dsv2mk.manifests.bundle import SHA256, Bundle
from dsv2mk.manifests.canonical import FILE_NAME, canonical_json
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest

STORE_NAME = "store.json"
STORE_SCHEMA = 1
STORE_VARIABLE = "DSV2MK_STORE"
STORE_FILE = canonical_json({"schema": STORE_SCHEMA})

#: An object's name.
DIGEST = re.compile(r"[0-9a-f]{32}")
#: Ending of a name in trash/ that only one process has.
DYING = "dying"
#: What may stand for a bundle's name: its first digits, all of them at most.
PREFIX = re.compile(r"[0-9a-f]{8,64}")
#: A bundle's file, as it is named in bundles/ and in trash/.
_BUNDLE = re.compile(rf"\.?([0-9a-f]{{64}})\.json(?:\.[0-9a-f]{{16}}\.{DYING})?")
#: How often something is looked for that others take to the trash and back.
_LOOKS = 10
#: Seconds before looks at a tag whose bundle is not there: somebody may just publish it again.
_WAITS = (0, 0.01, 0.03, 0.1, 0.3)
Found = TypeVar("Found")

#: Longer than any tag and any bundle.
_LIMIT = 1 << 30


@dataclass(frozen=True)
class Store:
    """A store that can be read."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Check that a folder is a store. Raises ArtifactError."""
        file = path / STORE_NAME
        try:
            found = read_regular(file)
        except FileNotFoundError:
            what = "is not a store: it has no store.json" if path.is_dir() else "does not exist"
            raise ArtifactError(
                f"{path} {what}", fix="Publish to it: dsv2mk publish DIR STORE --tag NAME"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{file}: {error.strerror}") from None
        if found != STORE_FILE:
            raise ArtifactError(f"{file}", expected=STORE_FILE.decode(), found=repr(found[:80]))
        return cls(path)

    # ---- objects ----

    def object_place(self, digest: str) -> Path:
        """Where an object belongs."""
        return self.path / "objects" / digest[:2] / digest

    def trash_place(self, name: str) -> Path:
        """Where an object, or a bundle's file, is while it is decided whether anybody needs it."""
        return self.path / "trash" / name

    def dying(self, name: str) -> Path:
        """A place in the trash that no other process has, for a file of this name."""
        return self.trash_place(f".{name}.{secrets.token_hex(8)}.{DYING}")

    def trashed(self, name: str) -> list[Path]:
        """Where an object, or a bundle's file, may be in the trash."""
        place = self.trash_place(name)
        return [place, *place.parent.glob(f".{name}.*.{DYING}")]

    def object_path(self, digest: str) -> Path:
        """Where an object is; where it belongs, if there is none."""
        place = self.object_place(digest)
        if not place.exists():
            for path in self.trashed(digest):
                if path.exists():
                    return path
        return place

    def open_object(self, digest: str) -> int:
        """A descriptor of an object. Raises OSError; it cannot be moved away meanwhile."""
        return _open_first(self.object_place(digest), lambda: self.trashed(digest))

    def damage(self, bundle: Bundle, name: str, entry: FileEntry, problem: str) -> ArtifactError:
        """The error for an object that cannot be used."""
        return ArtifactError(
            f"object {self.object_place(entry.digest)} {problem}; "
            f"it is {name} of bundle {bundle.digest}",
            fix="Publish the artifact again: dsv2mk publish DIR STORE --tag NAME",
        )

    # ---- bundles ----

    def bundle_place(self, digest: str) -> Path:
        """Where a bundle belongs."""
        return self.path / "bundles" / f"{digest}.json"

    def bundle_digests(self) -> list[str]:
        """Names of all bundles, damaged or not, also of those that are about to be deleted."""
        folders = ("bundles", "trash", "bundles")  # one may be put back while we look
        names = [name for folder in folders for name in _names(self.path / folder)]
        return sorted({match[1] for name in names if (match := _BUNDLE.fullmatch(name))})

    def has_bundle(self, digest: str) -> bool:
        """Whether a bundle is there, be it about to be deleted."""
        place = self.bundle_place(digest)
        return any(  # it may be on the move
            path.exists() for _ in range(_LOOKS) for path in [place, *self.trashed(place.name)]
        )

    def signature_places(self, digest: str) -> list[Path]:
        """Signatures of a bundle."""
        names = _names(self.path / "bundles")
        form = re.compile(rf"{digest}\.[0-9A-Za-z_-]+\.sig")
        return [self.path / "bundles" / name for name in sorted(names) if form.fullmatch(name)]

    def bundle_bytes(self, digest: str) -> bytes:
        """A bundle's bytes, which are those that its name says. Raises ArtifactError."""
        path = self.bundle_place(digest)
        fix = "Publish it again, or remove it: dsv2mk rm STORE DIGEST"
        try:
            with open(_open_first(path, lambda: self.trashed(path.name)), "rb") as file:
                encoded = file.read(_LIMIT)
        except OSError as error:
            raise ArtifactError(f"bundle {path}: {error.strerror}", fix=fix) from None
        found = hashlib.sha256(encoded).hexdigest()
        if found != digest:
            raise ArtifactError(f"bundle {path} is damaged: sha256 {found}", fix=fix)
        return encoded

    def bundle(self, digest: str) -> Bundle:
        """A bundle by its whole name. Raises ArtifactError if it is damaged or missing."""
        return Bundle.parse(self.bundle_bytes(digest), f"bundle {self.bundle_place(digest)}")

    def manifest(self, bundle: Bundle) -> Manifest:
        """The manifest of a bundle's artifact. Raises ArtifactError."""
        entry = bundle.files[MANIFEST_NAME]
        encoded = self.read(bundle, MANIFEST_NAME, entry)
        if hashlib.sha256(encoded).hexdigest() != bundle.artifact:
            raise self.damage(bundle, MANIFEST_NAME, entry, "is not the bundle's manifest")
        return parse_manifest(encoded)

    def files(self, bundle: Bundle) -> dict[str, FileEntry]:
        """Size and hashes of every file of a bundle. Raises ArtifactError."""
        files = bundle.table(self.manifest(bundle))
        check_digests(files, f"bundle {bundle.digest}")
        return files

    def if_there(self, digest: str, read: Callable[[Bundle], Found]) -> Found | None:
        """What `read` gives of a bundle, by its whole name; None if it is removed meanwhile.

        Raises ArtifactError if it, or what `read` needs of it, is damaged.
        """
        for attempt in range(_LOOKS):  # it may be on the move
            try:
                return read(self.bundle(digest))
            except ArtifactError:
                if not self.has_bundle(digest):
                    break
                if attempt == _LOOKS - 1:
                    raise
        return None

    def read(self, bundle: Bundle, name: str, entry: FileEntry) -> bytes:
        """A small file of a bundle, checked. Raises ArtifactError."""
        try:
            with open(self.open_object(entry.digest), "rb") as file:
                if problem := bad_chunk(file.fileno(), entry):
                    raise self.damage(bundle, name, entry, problem)
                return file.read(entry.size)
        except OSError as error:
            raise self.damage(bundle, name, entry, f"cannot be read: {error.strerror}") from None

    # ---- tags ----

    def tag_names(self) -> list[str]:
        """Names of all tags, damaged or not."""
        return sorted(name for name in _names(self.path / "tags") if FILE_NAME.fullmatch(name))

    def tag(self, name: str) -> str:
        """The bundle that a tag names. Raises ArtifactError for a damaged one, OSError."""
        path = self.path / "tags" / name
        text = read_regular(path, 1000, os.O_NOFOLLOW)  # nothing proves what a tag says
        digest = text[:-1].decode("ascii", "replace")
        if text[-1:] != b"\n" or not SHA256.fullmatch(digest):
            raise ArtifactError(
                f"tag {path} is damaged: {text[:80]!r}",
                fix=f"Name the bundle again: dsv2mk tag STORE DIGEST {name}",
            )
        return digest

    def settled_tag(self, name: str) -> tuple[str, bool]:
        """The bundle that a tag names, and whether it is there; it is waited for a little.

        Raises ArtifactError for a damaged tag, OSError.
        """
        digest = ""
        for wait in _WAITS:
            time.sleep(wait)
            digest = self.tag(name)
            if self.has_bundle(digest):
                return digest, True
        return digest, False

    def dangling(self, name: str) -> bool:
        """Whether a tag names a bundle that is not there."""
        with suppress(OSError, ArtifactError):  # it was removed meanwhile, or written anew
            return not self.settled_tag(name)[1]
        return False

    def tags(self) -> dict[str, str | ArtifactError]:
        """Every tag, with the bundle that it names or what is wrong with it."""
        found: dict[str, str | ArtifactError] = {}
        for name in self.tag_names():
            try:
                found[name] = self.tag(name)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                found[name] = ArtifactError(f"tag {self.path / 'tags' / name}: {error.strerror}")
            except ArtifactError as error:
                found[name] = error
        return found

    def resolve(self, name: str) -> str:
        """The whole name of the bundle that a tag or the first digits of its name stand for.

        Raises ArtifactError if there is none, saying what there is; UsageError for several.
        """
        if FILE_NAME.fullmatch(name):
            try:
                digest, is_there = self.settled_tag(name)
                if is_there:
                    return digest
                raise ArtifactError(
                    f"tag {name} of {self.path} names bundle {digest}, which is not there",
                    fix="Publish it again: dsv2mk publish DIR STORE --tag NAME",
                )
            except FileNotFoundError:
                pass  # it is no tag
            except OSError as error:
                raise ArtifactError(f"tag {self.path / 'tags' / name}: {error.strerror}") from None
        there = self.bundle_digests() if PREFIX.fullmatch(name) else []
        fitting = [digest for digest in there if digest.startswith(name)]
        if len(fitting) > 1:
            raise UsageError(f"{name} stands for several bundles: {', '.join(fitting)}")
        if not fitting:
            offered = ", ".join(self.tag_names()) or "no tags"
            raise ArtifactError(
                f"no bundle in {self.path}", expected=f"a digest or one of: {offered}", found=name
            )
        return fitting[0]


def resolve(text: str) -> tuple[Store, Bundle] | None:
    """The bundle that `STORE::NAME` names; None for text of another form, or a path that exists.

    `::NAME` is in the store that DSV2MK_STORE names. Raises ArtifactError.
    """
    folder, mark, name = text.rpartition("::")
    if not mark or os.path.lexists(text):
        return None
    folder = folder or os.environ.get(STORE_VARIABLE, "")
    if not folder:
        raise UsageError(
            f"{text} names no store", fix=f"Write STORE::NAME, or set {STORE_VARIABLE}"
        )
    store = Store.open(Path(folder))
    return store, store.bundle(store.resolve(name))


def is_store(path: Path) -> bool:
    """Whether a folder is meant to be a store."""
    return os.path.lexists(path / STORE_NAME)


def bad_chunk(
    fd: int,
    entry: FileEntry,
    done: Callable[[int], object] = lambda count: None,
    indices: Iterable[int] | None = None,
) -> str | None:
    """What is wrong with an open file, up to its first damaged chunk, or None.

    `done` is told the bytes of each chunk; with `indices` only those chunks are read.
    """
    size = os.fstat(fd).st_size
    if size != entry.size:
        return f"is damaged: expected {entry.size} bytes, found {size}"
    for index in range(len(entry.chunks)) if indices is None else indices:
        start, length = chunk_range(index, entry.size)
        try:
            found = hash_range(fd, start, length)
        except EOFError as error:
            return f"is damaged: {error}"
        done(length)
        if found != entry.chunks[index]:
            wanted = entry.chunks[index]
            return (
                f"is damaged: chunk {index} (from byte {start}): expected {wanted}, found {found}"
            )
    return None


def check_digests(files: Mapping[str, FileEntry], where: object) -> None:
    """Raises ArtifactError if a digest, which names an object, is not that of its chunks."""
    for name, entry in files.items():
        if digest_of(entry.chunks) != entry.digest:
            raise ArtifactError(
                f"{where} is damaged: the digest of {name} is not that of its chunk list"
            )


def unique(files: Mapping[str, FileEntry]) -> dict[str, tuple[str, FileEntry]]:
    """Each object of a table of files once: digest -> (first name, entry)."""
    found: dict[str, tuple[str, FileEntry]] = {}
    for name, entry in sorted(files.items()):
        found.setdefault(entry.digest, (name, entry))
    return found


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a file for reading, without waiting if it is a pipe. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file", str(path))
    return fd


def _open_first(place: Path, trash: Callable[[], list[Path]]) -> int:
    """Open a file where it belongs, or else in the trash."""
    for _ in range(_LOOKS):  # it may be on the move
        with suppress(FileNotFoundError):
            return open_regular(place)
        for path in trash():
            with suppress(FileNotFoundError):
                return open_regular(path)
    return open_regular(place)


def read_regular(path: Path, limit: int = _LIMIT, flags: int = 0) -> bytes:
    """The first bytes of a file, all if there are no more than `limit`. Raises OSError."""
    with open(open_regular(path, flags), "rb") as file:
        return file.read(limit)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []  # nothing was put there yet
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror}") from None
