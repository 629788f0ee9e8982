"""Keys, signatures of bundles and BLAKE3, against published vectors and forms made by hand."""

import base64
import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa, x25519
from stores import blake3_of

from dsv2mk.artifacts import signing
from dsv2mk.artifacts.console import run
from dsv2mk.artifacts.signing import (
    blake3_chunks,
    check,
    hasher,
    key_id,
    keygen,
    load_private,
    load_public,
    make_keys,
    sign,
)
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.manifest import CHUNK_BYTES

#: RFC 8032, 7.1: secret, public, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701c"
        "f9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3"
        "feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c664"
        "31e0303dca179c138ac17ad9bef1177331a704",
    ),
]
#: Of BLAKE3's own test_vectors.json: the input is 0, 1, ..., 250, 0, 1, ...
BLAKE3 = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
}
BUNDLE = b'{"schema":1}'
ORDER = 2**252 + 27742317777372353535851937790883648493  # of ed25519's group


def pem(label: str, der: bytes) -> bytes:
    text = base64.b64encode(der).decode()
    return f"-----BEGIN {label}-----\n{text}\n-----END {label}-----\n".encode()


def private_pem(seed: bytes) -> bytes:
    """RFC 8410: version 0, OID 1.3.101.112, the seed as an octet string in one."""
    return pem("PRIVATE KEY", bytes.fromhex("302e020100300506032b657004220420") + seed)


def public_pem(raw: bytes) -> bytes:
    return pem("PUBLIC KEY", bytes.fromhex("302a300506032b6570032100") + raw)


def ssh_line(raw: bytes, name: bytes = b"ssh-ed25519") -> bytes:
    fields = b"".join(len(field).to_bytes(4, "big") + field for field in (name, raw))
    return name + b" " + base64.b64encode(fields) + b" someone@somewhere\n"


Keys = Callable[[str], tuple[Path, Path]]


def pattern(count: int) -> bytes:
    return bytes(i % 251 for i in range(count))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return lambda name: make_keys(tmp_path, name)


# ---- keys ----


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_the_vectors_of_rfc_8032(
    secret: str, public: str, message: str, signature: str, tmp_path: Path
) -> None:
    seed, raw = bytes.fromhex(secret), bytes.fromhex(public)
    (tmp_path / "key").write_bytes(private_pem(seed))
    private = load_private(tmp_path / "key")
    assert private.sign(bytes.fromhex(message)).hex() == signature
    for data in (public_pem(raw), ssh_line(raw), ssh_line(raw).strip()):
        (tmp_path / "public").write_bytes(data)
        loaded = load_public(tmp_path / "public")
        assert loaded.public_bytes_raw() == raw == private.public_key().public_bytes_raw()
        assert key_id(loaded) == hashlib.sha256(raw).digest()[:8].hex()


def test_a_key_of_sshs_own_form(tmp_path: Path) -> None:
    seed, raw = (bytes.fromhex(text) for text in VECTORS[0][:2])
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    encodings = (form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    (tmp_path / "key").write_bytes(key.private_bytes(*encodings))
    assert load_private(tmp_path / "key").private_bytes_raw() == seed
    (tmp_path / "key.pub").write_bytes(ssh_line(raw))
    name, signature = sign(BUNDLE, tmp_path / "key")
    assert check(BUNDLE, [signature], [tmp_path / "key.pub"]) == name


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mask", "mode"), [(0, 0o666), (0o022, 0o644), (0o077, 0o600)])
def test_only_its_owner_can_read_a_private_key(mask: int, mode: int, tmp_path: Path) -> None:
    os.umask(mask)
    private, public = make_keys(tmp_path, "key")
    assert (private, public) == (tmp_path / "key", tmp_path / "key.pub")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == mode


def test_new_keys_have_the_forms_that_others_read(tmp_path: Path) -> None:
    seen = set()
    for name in ("a", "b.pem"):
        private, public = make_keys(tmp_path, name)
        key = load_private(private)
        assert private.read_bytes() == private_pem(key.private_bytes_raw())
        assert public.read_bytes() == public_pem(key.public_key().public_bytes_raw())
        seen.add(key.private_bytes_raw())
    assert len(seen) == 2
    assert sorted(os.listdir(tmp_path)) == ["a", "a.pub", "b.pem", "b.pem.pub"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("absent")])
@pytest.mark.parametrize("there", ["key", "key.pub"])
def test_a_key_is_never_overwritten(
    there: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / there)
    before = os.lstat(tmp_path / there)
    with pytest.raises(UsageError, match=f"{tmp_path / there} exists"):
        make_keys(tmp_path, "key")
    assert os.listdir(tmp_path) == [there]
    after = os.lstat(tmp_path / there)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_a_name_that_leads_elsewhere_makes_no_keys(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    with pytest.raises(UsageError, match="plain name"):
        make_keys(folder, name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "a"]


@pytest.mark.parametrize("syncs", [1, 2])
def test_a_full_disk_leaves_no_half_pair(
    syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, OSError(errno.ENOSPC, "full")][-syncs:])

    def full(fd: int) -> None:
        if answer := next(answers):
            raise answer

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        make_keys(tmp_path, "key")
    assert list(answers) == []
    assert list(tmp_path.iterdir()) == []


def wrong_files() -> dict[str, bytes]:
    """Files that hold neither one ed25519 private key nor one public key."""
    seed, raw = (bytes.fromhex(text) for text in VECTORS[0][:2])
    pkcs8, spki = form.PrivateFormat.PKCS8, form.PublicFormat.SubjectPublicKeyInfo
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    secret = form.BestAvailableEncryption(b"secret")
    out = {
        "encrypted": key.private_bytes(form.Encoding.PEM, pkcs8, secret),
        "der": bytes.fromhex("302a300506032b6570032100") + raw,
        "raw": raw,
        "hex": raw.hex().encode(),
        "empty": b"",
        "text": "schlüssel\n".encode(),
        "certificate": pem("CERTIFICATE", b"0"),
        "short": public_pem(raw[:-1]),
        "short private": private_pem(seed[:-1]),
        "cut": public_pem(raw)[:-30],
        "ssh cut": ssh_line(raw)[:50],
        "ssh short": ssh_line(raw[:-1]),
        "ssh token": ssh_line(raw, b"sk-ssh-ed25519@openssh.com"),
        "ssh options": b"no-pty " + ssh_line(raw),
        "ssh two": ssh_line(raw) * 2,
        "pem two": public_pem(raw) + public_pem(raw[::-1]),
        "private two": private_pem(seed) * 2,
        "both": private_pem(seed) + public_pem(raw),
    }
    others = {
        "RSA": rsa.generate_private_key(65537, 2048),
        "EC": ec.generate_private_key(ec.SECP256R1()),
        "X25519": x25519.X25519PrivateKey.generate(),
        "Ed448": ed448.Ed448PrivateKey.generate(),
    }
    ssh = (form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    for name, other in others.items():
        out[f"{name} private"] = other.private_bytes(form.Encoding.PEM, pkcs8, form.NoEncryption())
        out[f"{name} public"] = other.public_key().public_bytes(form.Encoding.PEM, spki)
        if name in ("RSA", "EC"):
            out[f"{name} ssh"] = other.public_key().public_bytes(*ssh)
    return out


WRONG = wrong_files()


@pytest.mark.parametrize("load", [load_private, load_public])
@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_no_keys(name: str, load: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "the-key"
    path.write_bytes(WRONG[name])
    with pytest.raises(UsageError, match=f"{path}: expected one ed25519 .* found") as caught:
        load(path)
    if "two" in name and not name.startswith("ssh"):
        assert caught.value.found == "more than one"
    if name == "encrypted":
        assert caught.value.found == "ENCRYPTED PRIVATE KEY in PEM"


def test_the_other_half_of_a_pair_is_refused(
    keys: Keys,
) -> None:
    private, public = keys("key")
    with pytest.raises(UsageError, match=r"key\.pub: .*private key .*found PUBLIC KEY"):
        sign(BUNDLE, public)
    with pytest.raises(UsageError, match=r"key: .*public key, found PRIVATE KEY"):
        check(BUNDLE, [], [private])


@pytest.mark.parametrize("load", [load_private, load_public])
def test_what_cannot_be_read_is_named(load: Callable[[Path], object], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent" / "key"):
        with pytest.raises(UsageError, match=f"{path} is no key file"):
            load(path)


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(UsageError, match=r"shard: .*public key"):
        load_public(path)


def test_a_damaged_key_is_another_or_none(tmp_path: Path) -> None:
    """No byte of a key's file makes the package raise what is not a UsageError."""
    seed, raw = (bytes.fromhex(text) for text in VECTORS[0][:2])
    path = tmp_path / "key"
    refused = 0
    for load, good in (
        (load_private, private_pem(seed)),
        (load_public, public_pem(raw)),
        (load_public, ssh_line(raw)),
    ):
        for at in range(len(good)):
            for mask in (1, 0x20, 0x80):
                data = bytearray(good)
                data[at] ^= mask
                path.write_bytes(data)
                try:
                    load(path)
                except UsageError:
                    refused += 1
    assert refused > 300


# ---- signatures ----


def test_a_signature_file_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    """The signature is what the Python code in RFC 8032 gives for the prefix and the bundle."""
    secret, public = VECTORS[0][:2]
    (tmp_path / "key").write_bytes(private_pem(bytes.fromhex(secret)))
    expected = (
        f'{{"key":"{public}","schema":1,"signature":"'
        "d7239210ba5decd15fd396dcc2161a9129ed70b8f09bb1eed69d8c5059093c9c"
        '8cd485d10dd426712a9aeacca33daade392964aeebbf36c6b0783a9051dbf80b"}'
    )
    assert sign(BUNDLE, tmp_path / "key") == ("21fe31dfa154a261", expected.encode())


def resigned(private: Path, message: bytes) -> bytes:
    """A signature file whose signature is of another message."""
    data = json.loads(sign(b"", private)[1])
    data["signature"] = load_private(private).sign(message).hex()
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def test_a_signature_made_for_another_use_does_not_count(
    keys: Keys,
) -> None:
    private, public = keys("key")
    assert check(BUNDLE, [resigned(private, b"dsv2mk bundle v1\n" + BUNDLE)], [public])
    for message in (BUNDLE, b"dsv2mk bundle v2\n" + BUNDLE, b"dsv2mk bundle v1" + BUNDLE):
        with pytest.raises(ArtifactError, match="invalid"):
            check(BUNDLE, [resigned(private, message)], [public])


def changed(data: bytes) -> Iterator[bytes]:
    """Each bit flipped, each byte left out, and more bytes."""
    for at in range(len(data)):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        if data[at : at + 1] != data[at + 1 : at + 2]:
            yield data[:at] + data[at + 1 :]
        yield data[:at]
    yield from (data + more for more in (b"\n", b"\0", b" ", data))
    yield b"\n" + data


def test_no_byte_of_a_bundle_can_be_changed(keys: Keys) -> None:
    private, public = keys("key")
    bundle = b'{"artifact":"00ff","files":{"a":{"chunks":["01"],"size":7}},"schema":1}'
    name, signature = sign(bundle, private)
    others = list(changed(bundle))
    assert len(others) > 10 * len(bundle)
    for other in others:
        with pytest.raises(ArtifactError, match=rf"found {name} \(invalid"):
            check(other, [signature], [public])
    assert check(bundle, [signature], [public]) == name


def test_no_byte_of_a_signature_can_be_changed(keys: Keys) -> None:
    """Not even one that leaves its meaning: hex digits in capitals, white space."""
    private, public = keys("key")
    name, signature = sign(BUNDLE, private)
    others = [*changed(signature), signature.upper(), b"", b"{}", b"[]", b"\xff"]
    data = json.loads(signature)
    values = {
        "schema": [True, 1.0, 2, "1"],
        "more": [1],
        "key": [None, [], data["key"].upper(), data["key"][:-2]],
        "signature": [data["signature"] + "00", "", 7],
    }
    for field, bad in values.items():
        for value in bad:
            other = json.dumps(data | {field: value}, sort_keys=True, separators=(",", ":"))
            others.append(other.encode())
    others.append(json.dumps(data).encode())
    others.append(signature.replace(b"{", b'{"key":"00",'))  # the last of two would count
    for other in others:
        assert other != signature
        with pytest.raises(ArtifactError, match="no valid signature of a trusted key"):
            check(BUNDLE, [other], [public])
    assert check(BUNDLE, [signature], [public]) == name


def test_the_other_number_that_solves_the_equation_is_refused(
    keys: Keys,
) -> None:
    """S + the group's order: whoever takes it lets anybody make a second signature."""
    private, public = keys("key")
    _, signature = sign(BUNDLE, private)
    data = json.loads(signature)
    raw = bytes.fromhex(data["signature"])
    number = int.from_bytes(raw[32:], "little") + ORDER
    other = (raw[:32] + number.to_bytes(32, "little")).hex()
    with pytest.raises(ArtifactError, match="invalid"):
        check(BUNDLE, [signature.replace(data["signature"].encode(), other.encode())], [public])


def test_another_key_does_not_count(keys: Keys) -> None:
    (mine, my_public), (other, other_public) = keys("mine"), keys("other")
    name, signature = sign(BUNDLE, other)
    trusted = key_id(load_public(my_public))
    with pytest.raises(ArtifactError) as caught:
        check(BUNDLE, [signature], [my_public])
    error = caught.value
    assert (error.exit_code, error.expected, error.found) == (11, trusted, f"{name} (not trusted)")
    # With the trusted key's name on it, it is no signature of that key.
    forged = signature.replace(
        load_public(other_public).public_bytes_raw().hex().encode(),
        load_private(mine).public_key().public_bytes_raw().hex().encode(),
    )
    assert forged != signature
    with pytest.raises(ArtifactError, match=rf"found {trusted} \(invalid"):
        check(BUNDLE, [forged], [my_public])


def test_an_id_alone_makes_no_key_trusted(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, trusted), (other, _) = keys("trusted"), keys("other")
    monkeypatch.setattr(signing, "_id_of", lambda raw: "0" * 16)
    _, signature = sign(BUNDLE, other)
    with pytest.raises(ArtifactError, match="not trusted"):
        check(BUNDLE, [signature], [trusted])


def test_one_trusted_key_of_several_is_enough(keys: Keys) -> None:
    pairs = [keys(f"key{i}") for i in range(4)]
    signed = [sign(BUNDLE, private) for private, _ in pairs]
    publics = [public for _, public in pairs]
    for i, (name, signature) in enumerate(signed):
        assert check(BUNDLE, [signature], publics) == name
        # Among others' signatures, of damaged ones and of other bundles.
        files = [b"junk", sign(b"", pairs[i][0])[1], *(s for _, s in signed)]
        assert check(BUNDLE, iter(files), [publics[i]]) == name
        assert check(BUNDLE, files[::-1], [publics[i], publics[i]]) == name
    assert check(BUNDLE, [signed[2][1], signed[1][1]], publics) == signed[2][0]


def test_all_signatures_are_named_where_none_counts(
    keys: Keys,
) -> None:
    (a, _), (b, b_public), (_, c_public) = keys("a"), keys("b"), keys("c")
    (a_name, a_signature), (b_name, b_signature) = sign(BUNDLE, a), sign(b"other", b)
    with pytest.raises(ArtifactError) as caught:
        check(BUNDLE, [a_signature, b"junk", b_signature], [b_public, c_public])
    assert caught.value.expected == " or ".join(sorted([b_name, key_id(load_public(c_public))]))
    assert caught.value.found == (
        f"{a_name} (not trusted), a damaged signature file, "
        f"{b_name} (invalid: it signs other bytes)"
    )


def test_nothing_signed_nobody_trusted_and_a_file_that_is_no_key(
    keys: Keys, tmp_path: Path
) -> None:
    private, public = keys("key")
    name, signature = sign(BUNDLE, private)
    with pytest.raises(ArtifactError, match=f"expected {name}, found no signature"):
        check(BUNDLE, [], [public])
    with pytest.raises(ArtifactError, match=rf"a key to trust, found {name} \(not trusted\)"):
        check(BUNDLE, [signature], [])
    with pytest.raises(UsageError, match="absent"):
        check(BUNDLE, [signature], [public, tmp_path / "absent"])


# ---- the command ----


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "release"
    assert run(keygen, [str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    name, signature = sign(BUNDLE, Path(data["private"]))
    assert data == {"key": name, "private": str(out), "public": f"{out}.pub"}
    assert check(BUNDLE, [signature], [Path(data["public"])]) == name
    before = out.read_bytes()
    assert run(keygen, [str(out)]) == 2
    assert f"{out} exists" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run(keygen, [str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert f"key {key_id(load_public(tmp_path / 'other.pub'))}\n" in shown
    assert "keep it secret" in shown
    assert "PRIVATE" not in shown
    assert run(keygen, [str(tmp_path / "absent" / "key")]) == 2
    assert "absent" in capsys.readouterr().err


# ---- BLAKE3 ----


def chunks_of(path: Path, size: int) -> list[str]:
    return blake3_chunks(os.open(path, os.O_RDONLY), size, path)


@pytest.mark.parametrize("count", BLAKE3)
def test_the_vectors_of_blake3(count: int) -> None:
    data = pattern(count)
    assert blake3_of(data) == blake3_of(memoryview(data)) == blake3_of(bytearray(data))
    assert blake3_of(data) == BLAKE3[count]
    state = hasher()
    for byte in data:
        state.update(bytes([byte]))
    assert state.hexdigest() == BLAKE3[count]


@pytest.mark.parametrize("piece", [7, 1024, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 2048, 3000])
def test_chunks_of_a_file(
    count: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(signing, "_PIECE", piece)
    data = pattern(count)
    (tmp_path / "file").write_bytes(data)
    expected = [blake3_of(data[start : start + 1024]) for start in range(0, count, 1024)]
    assert len(expected) == -(-count // 1024)
    assert chunks_of(tmp_path / "file", count) == expected


def test_a_chunk_has_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, (64 << 20) + 1)
    assert CHUNK_BYTES == 64 << 20
    assert chunks_of(path, (64 << 20) + 1) == [blake3_of(bytes(64 << 20)), BLAKE3[1]]


@pytest.mark.parametrize("size", [0, 99, 101, 1 << 50])
def test_a_file_of_another_size_is_damaged(size: int, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(pattern(100))
    with pytest.raises(ArtifactError, match=f"shard is damaged: expected {size} bytes, found 100"):
        chunks_of(path, size)


def test_a_file_that_shrinks_meanwhile_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "CHUNK_BYTES", 64)
    path = tmp_path / "shard"
    path.write_bytes(pattern(200))
    before = hasher

    def shrinking() -> object:
        os.truncate(path, 100)
        return before()

    monkeypatch.setattr(signing, "hasher", shrinking)
    with pytest.raises(ArtifactError, match="expected 200 bytes, found 100"):
        chunks_of(path, 200)


# ---- the packages ----


@pytest.mark.parametrize("package", ["cryptography", "blake3"])
def test_without_a_package(
    package: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys("key")
    _, signature = sign(BUNDLE, private)
    calls: dict[str, list[Callable[[], object]]] = {
        "cryptography": [
            lambda: make_keys(tmp_path, "new"),
            lambda: load_private(private),
            lambda: load_public(public),
            lambda: sign(BUNDLE, private),
            lambda: check(BUNDLE, [signature], [public]),
        ],
        "blake3": [hasher, lambda: blake3_of(b""), lambda: chunks_of(private, 119)],
    }
    assert private.stat().st_size == 119
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    for needed, uses in calls.items():
        for use in uses:
            if needed == package:
                with pytest.raises(UsageError, match=rf"{package} .*pip install 'dsv2mk\[sign\]'"):
                    use()
            else:
                use()


def test_the_module_imports_neither_package_nor_torch() -> None:
    code = "import sys, dsv2mk.artifacts.signing; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "dsv2mk" in loaded
    assert not {"blake3", "cryptography", "numpy", "torch"} & loaded
