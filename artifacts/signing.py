"""Signatures of bundles: ed25519 against whoever can write to a store, and BLAKE3 of its files.

The signed message is `MESSAGE` and the bundle's bytes. A signature file is canonical JSON:
{"schema":1,"key":hex of the raw public key,"signature":hex}. Keys are PEM; ssh's form is read too.

The packages cryptography and blake3 (extra `sign`) are imported only where they are used.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsv2mk.artifacts.console import Report, reporting
from dsv2mk.manifests.canonical import canonical_json, parse_object
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.manifest import CHUNK_BYTES

if TYPE_CHECKING:
    from blake3 import blake3
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SCHEMA = 1
MESSAGE = b"dsv2mk bundle v1\n"
_KEY_FILE_BYTES = 1 << 16  # no file with one key is longer
_PIECE = 1 << 20


@contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"signatures need the package {package} ({error})", fix="pip install 'dsv2mk[sign]'"
        ) from None


# ---- keys ----


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair: `name`, that only its owner can read, and `name`.pub.

    Raises UsageError if one of the files exists.
    """
    with _needs("cryptography"):
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    if name in ("", ".", "..") or "/" in name:
        raise UsageError("a key's file needs a plain name", found=repr(name))
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    private_path, public_path = folder / name, folder / f"{name}.pub"
    made: list[Path] = []
    try:
        for path, mode, data in ((private_path, 0o600, secret), (public_path, 0o666, public)):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(path)
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UsageError(
                f"{error.filename} exists, and a key is never overwritten", fix="Name another file"
            ) from None
        raise
    return private_path, public_path


def load_private(path: Path) -> "Ed25519PrivateKey":
    """Read a private key, PEM or ssh's own form, without a passphrase.

    Raises UsageError, which names the file, for anything else.
    """
    with _needs("cryptography"):
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def load(data: bytes) -> object:
        if data.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
            return form.load_ssh_private_key(data, None)
        return form.load_pem_private_key(data, None)

    wanted = "one ed25519 private key without a passphrase"
    key = _load(path, wanted, load)
    if not isinstance(key, Ed25519PrivateKey):
        raise _refused(path, wanted, type(key).__name__)
    return key


def load_public(path: Path) -> "Ed25519PublicKey":
    """Read a public key, PEM or a line of ssh's form (`ssh-ed25519 AAAA...`).

    Raises UsageError, which names the file, for anything else.
    """
    with _needs("cryptography"):
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    def load(data: bytes) -> object:
        if data.startswith(b"ssh-ed25519 "):
            if len(data.splitlines()) > 1:
                raise ValueError("more than one line")
            return form.load_ssh_public_key(data)
        return form.load_pem_public_key(data)

    wanted = "one ed25519 public key"
    key = _load(path, wanted, load)
    if not isinstance(key, Ed25519PublicKey):
        raise _refused(path, wanted, type(key).__name__)
    return key


def _load(path: Path, wanted: str, load: Callable[[bytes], object]) -> object:
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm

    try:
        with open(path, "rb") as file:
            data = file.read(_KEY_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"{path} is no key file: {error.strerror}") from None
    if data.count(b"-----BEGIN ") > 1:
        raise _refused(path, wanted, "more than one")
    try:
        return load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        # It says TypeError for a passphrase, and InternalError for a key of another length.
        found = "another form"
        for label in ("ENCRYPTED PRIVATE KEY", "PRIVATE KEY", "PUBLIC KEY", "CERTIFICATE"):
            if f"{label}-----".encode() in data:
                found = f"{label} in PEM"
                break
        raise _refused(path, wanted, found) from None


def _refused(path: Path, wanted: str, found: str) -> UsageError:
    return UsageError(f"the key file {path}", expected=wanted, found=found)


def key_id(public: "Ed25519PublicKey") -> str:
    """A key's short name: the first 16 hex digits of the sha256 of the raw public key."""
    return _id_of(public.public_bytes_raw())


def _id_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


# ---- signatures ----


def sign(bundle: bytes, key: Path) -> tuple[str, bytes]:
    """Sign a bundle: the key's id and the bytes of the signature's file."""
    private = load_private(key)
    raw = private.public_key().public_bytes_raw()
    return _id_of(raw), _encode(raw, private.sign(MESSAGE + bundle))


def _encode(raw_key: bytes, signature: bytes) -> bytes:
    return canonical_json({"schema": SCHEMA, "key": raw_key.hex(), "signature": signature.hex()})


def _decode(encoded: bytes) -> tuple[bytes, bytes]:
    """(raw key, signature). Raises ValueError for any other bytes than `_encode` gives."""
    data = parse_object(encoded)
    try:
        raw, signature = bytes.fromhex(data["key"]), bytes.fromhex(data["signature"])
    except (KeyError, TypeError):
        raise ValueError("not a signature") from None
    if (len(raw), len(signature)) != (32, 64) or _encode(raw, signature) != encoded:
        raise ValueError("not a signature of this schema")
    return raw, signature


def check(bundle: bytes, signatures: Iterable[bytes], trusted: Sequence[Path]) -> str:
    """Check a bundle: the id of the first trusted key with a valid signature among `signatures`.

    Raises ArtifactError, which says whose signatures there are, if there is none.
    """
    with _needs("cryptography"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    # Whole keys are compared: two keys with one id can be made.
    known = {load_public(path).public_bytes_raw() for path in trusted}
    found: list[str] = []
    for encoded in signatures:
        try:
            raw, signature = _decode(encoded)
        except ValueError:
            found.append("a damaged signature file")
            continue
        try:
            Ed25519PublicKey.from_public_bytes(raw).verify(signature, MESSAGE + bundle)
        except (InvalidSignature, ValueError):
            found.append(f"{_id_of(raw)} (invalid: it signs other bytes)")
            continue
        if raw in known:
            return _id_of(raw)
        found.append(f"{_id_of(raw)} (not trusted)")
    raise ArtifactError(
        "the bundle has no valid signature of a trusted key",
        expected=" or ".join(sorted(map(_id_of, known))) or "a key to trust",
        found=", ".join(found) or "no signature",
    )


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@reporting
def keygen(out: Path) -> Report:
    """Make a key pair: OUT, to sign bundles with, and OUT.pub, for those who check them."""
    private, public = make_keys(out.parent, out.name)
    data = {"key": key_id(load_public(public)), "private": str(private), "public": str(public)}
    text = f"key {data['key']}\nprivate {private}: keep it secret\npublic {public}"
    return Report(data=data, text=text)


# ---- BLAKE3 ----


def hasher() -> "blake3":
    """A BLAKE3 state: `update(data)`, `hexdigest()`."""
    with _needs("blake3"):
        from blake3 import blake3
    return blake3()


def blake3_chunks(fd: int, size: int, where: object) -> list[str]:
    """BLAKE3, hex, of each 64 MiB chunk of an open file of `size` bytes, which is closed.

    Raises ArtifactError, which names it `where`, if it has another size.
    """
    out: list[str] = []
    view = memoryview(bytearray(_PIECE))
    with open(fd, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        for start in range(0, size if found == size else 0, CHUNK_BYTES):
            state = hasher()
            left = min(CHUNK_BYTES, size - start)
            while left and (count := file.readinto(view[:left])):
                state.update(view[:count])
                left -= count
            if left:  # it has become shorter
                found = file.tell()
                break
            out.append(state.hexdigest())
    if found != size:
        raise ArtifactError(f"{where} is damaged", expected=f"{size} bytes", found=found)
    return out
