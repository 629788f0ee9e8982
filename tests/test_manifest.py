"""Canonical JSON and manifests: their bytes, and what is refused."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers import GONE, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import PARTS, group_layout
from dsv2mk.manifests.manifest import (
    CHUNK_BYTES,
    FileEntry,
    Manifest,
    change_text,
    changes,
    deciding_sections,
    make_manifest,
    parse_manifest,
)
from dsv2mk.manifests.topology import Topology

# ---- canonical JSON ----


def test_canonical_json_literally() -> None:
    data = {"b": [1, True, None, -2], "a": {"é": '\n"\\\u20ac', "": []}, "A": 10**20}
    assert canonical_json(data) == (
        b'{"A":100000000000000000000,"a":{"":[],"\xc3\xa9":"\\n\\"\\\\\xe2\x82\xac"},'
        b'"b":[1,true,null,-2]}'
    )


@pytest.mark.parametrize("bad", [1.0, [0.5], {"a": {"b": (float("nan"),)}}, {1: 2}, {None: 1}])
def test_canonical_json_refuses_floats_and_other_keys(bad: object) -> None:
    with pytest.raises(ValueError, match=r"float|not text"):
        canonical_json(bad)


# ---- manifests ----

GEOMETRY = Geometry.from_config(small_config())
HASHES = ("0123456789abcdef" * 2, "fedcba9876543210" * 2)


def example(ranks: int = 2) -> Manifest:
    topology = Topology(ranks=ranks)
    source = {"copied": {}, "files": {"model.safetensors": {"digest": HASHES[0], "size": 5}}}
    files = {
        layout.file_name(part): FileEntry(size=CHUNK_BYTES + 1, digest=HASHES[0], chunks=HASHES)
        for layout in group_layout(GEOMETRY, topology)
        for part in PARTS
    }
    files["config.json"] = FileEntry(size=0, digest=HASHES[1], chunks=())
    sections = deciding_sections(GEOMETRY, topology, source, {"pipeline/pack.py": "0" * 64})
    return make_manifest(sections, files, {"python": "3.11", "é": "ü"})


VALID = example().encoded
SHARD = "rank-00.ffn.safetensors"


@pytest.mark.parametrize("ranks", [1, 2, 24])
def test_a_manifest_survives_its_bytes(ranks: int) -> None:
    manifest = example(ranks)
    again = parse_manifest(manifest.encoded)
    assert again == manifest
    assert again.encoded == manifest.encoded
    assert (again.geometry, again.topology.ranks) == (GEOMETRY, ranks)
    assert len(again.layouts) == ranks
    entry = again.files["rank-00.replicated.safetensors"]
    assert entry == FileEntry(size=CHUNK_BYTES + 1, digest=HASHES[0], chunks=HASHES)


def test_changes() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "gone": None, "same": {"z": 0}, "long": "x" * 90}
    new = {"a": 2, "b": {"c": [1, 3], "d": None}, "new": {"y": 1}, "same": {"z": 0}, "long": "y"}
    found = changes(old, new)
    assert found == [
        ("M", "a: 1 -> 2"),
        ("M", "b.c: [1, 2] -> [1, 3]"),
        ("M", 'b.d: "x" -> null'),
        ("-", "gone"),
        ("M", "long"),
        ("+", "new"),
    ]
    assert [change_text(change) for change in found[2:]] == [
        'b.d: "x" -> null',
        "gone removed",
        "long differs",
        "new added",
    ]
    assert changes(old, copy.deepcopy(old)) == []
    assert changes({"é": 1}, {"é": "ü"}, "s") == [("M", 's.é: 1 -> "ü"')]


# ---- refusals ----


def damaged(encoded: bytes) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(encoded)
    assert caught.value.exit_code == 11
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


RAW: dict[str, bytes] = {
    "empty": b"",
    "cut short": VALID[:-1],
    "not UTF-8": VALID.replace("ü".encode(), b"\xfc"),
    "UTF-16": VALID.decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + VALID,
    "array": b"[]",
    "null": b"null",
    "new line": VALID + b"\n",
    "white space": VALID.replace(b'"schema":1', b'"schema": 1'),
    "escaped text": VALID.replace("ü".encode(), b"\\u00fc"),
    "lone surrogate": VALID.replace("ü".encode(), b"\\ud800"),
    "a key twice": VALID.replace(b'"schema":1', b'"schema":1,"schema":1'),
    "keys not sorted": json.dumps(json.loads(VALID)).encode(),
    "a float": VALID.replace(b'"size":5', b'"size":5.0'),
    "NaN": VALID.replace(b'"size":5', b'"size":NaN'),
    "a number of 5000 digits": VALID.replace(b'"size":5', b'"size":' + b"9" * 5000),
    "100000 brackets": b"[" * 100_000,
    "100000 objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_manifest_are_refused(case: str) -> None:
    assert RAW[case] != VALID
    damaged(RAW[case])


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at a path of keys (the last item is the value, GONE removes the key)."""
    *keys, last, value = path

    def change(data: Any) -> None:
        for key in keys:
            data = data[key]
        if value is GONE:
            del data[last]
        else:
            data[last] = value

    return change


ENTRY = {"size": 1, "digest": HASHES[0], "chunks": [HASHES[0]]}
FIRST = example().layouts[0].part("ffn")[0].name
MUTATIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "schema 2": put("schema", 2),
    "schema true": put("schema", True),
    "no schema": put("schema", GONE),
    "layout version 2": put("layout_version", 2),
    "layout version as text": put("layout_version", "1"),
    "another section": put("signature", {}),
    "scheme renamed": put("scheme", "name", "e4m3-block64"),
    "block of 64": put("scheme", "block", [64, 64]),
    "chunk size": put("chunk_bytes", CHUNK_BYTES // 2),
    "no shard": put("files", SHARD, GONE),
    "files a list": put("files", []),
    "file name ..": put("files", "..", ENTRY),
    "file name up": put("files", "../x", ENTRY),
    "file name in a folder": put("files", "a/b", ENTRY),
    "file name absolute": put("files", "/etc/passwd", ENTRY),
    "file name backslash": put("files", "a\\b", ENTRY),
    "file name empty": put("files", "", ENTRY),
    "file name hidden": put("files", ".a", ENTRY),
    "file name an option": put("files", "-rf", ENTRY),
    "file name with a line": put("files", "a\n", ENTRY),
    "file name NUL": put("files", "a\0b", ENTRY),
    "file name of itself": put("files", "manifest.json", ENTRY),
    "a chunk too few": put("files", SHARD, "chunks", [HASHES[0]]),
    "a chunk too many": put("files", SHARD, "chunks", [*HASHES, HASHES[0]]),
    "no chunks": put("files", SHARD, "chunks", []),
    "chunks null": put("files", SHARD, "chunks", None),
    "chunks a text": put("files", "a", {**ENTRY, "chunks": "f"}),
    "chunks an object": put("files", "a", {**ENTRY, "chunks": {HASHES[0]: 1}}),
    "hash in capitals": put("files", SHARD, "digest", HASHES[0].upper()),
    "hash too short": put("files", SHARD, "digest", HASHES[0][1:]),
    "hash a number": put("files", SHARD, "chunks", [HASHES[0], 7]),
    "hash with a line": put("files", SHARD, "digest", HASHES[0] + "\n"),
    "size negative": put("files", SHARD, "size", -1),
    "size bool": put("files", SHARD, {**ENTRY, "size": True}),
    "size text": put("files", SHARD, "size", "5"),
    "size huge": put("files", SHARD, "size", 1 << 70),
    "entry without size": put("files", SHARD, "size", GONE),
    "entry with more": put("files", SHARD, "mode", 0o644),
    "entry a list": put("files", SHARD, []),
    "tensor removed": put("tensors", "embed", GONE),
    "tensor added": put("tensors", "bias", {}),
    "tensor moved": put("tensors", "q_b", "ranks", "1", "offset", 4096),
    "tensor at false": put("tensors", FIRST, "ranks", "0", "offset", False),
    "tensor reshaped": put("tensors", "embed", "ranks", "0", "shape", [192, 301]),
    "tensor of another type": put("tensors", "embed", "dtype", "F16"),
    "tensors a list": put("tensors", []),
    "ranks 0": put("topology", "ranks", 0),
    "ranks negative": put("topology", "ranks", -2),
    "ranks bool": put("topology", "ranks", True),
    "ranks text": put("topology", "ranks", "2"),
    "ranks null": put("topology", "ranks", None),
    "ranks 5": put("topology", "ranks", 5),
    "other ranks": put("topology", "ranks", 4),
    "topology with more": put("topology", "hosts", 1),
    "topology empty": put("topology", {}),
    "topology a list": put("topology", ["ranks"]),
    "no geometry": put("geometry", None),
    "field missing": put("geometry", "vocab_size", GONE),
    "field added": put("geometry", "head_dim", 8),
    "heads 0": put("geometry", "num_attention_heads", 0),
    "width as text": put("geometry", "hidden_size", "192"),
    "width bool": put("geometry", "n_group", True),
    "tied a number": put("geometry", "tie_word_embeddings", 0),
    "tied": put("geometry", "tie_word_embeddings", True),
    "real respelled": put("geometry", "rms_norm_eps", "1e-6"),
    "real an integer": put("geometry", "rms_norm_eps", 1),
    "real NaN": put("geometry", "rms_norm_eps", "nan"),
    "real infinite": put("geometry", "routed_scaling_factor", "inf"),
    "real not a number": put("geometry", "rope_theta", "many"),
    # Values that config.json may not have either: decoding would divide by zero.
    "theta 1": put("geometry", "rope_theta", "1.0"),
    "theta negative": put("geometry", "rope_theta", "-10000.0"),
    "eps negative": put("geometry", "rms_norm_eps", "-1e-06"),
    "yarn a list": put("geometry", "yarn", []),
    "yarn with more": put("geometry", "yarn", "truncate", 1),
    "yarn factor": put("geometry", "yarn", "factor", "0.5"),
    "yarn original": put("geometry", "yarn", "original_max_position_embeddings", 0),
    "yarn beta": put("geometry", "yarn", "beta_slow", "0.0"),
    "code a list": put("code", []),
    "code a number": put("code", "pipeline/pack.py", 1),
    "tools null": put("tools", None),
    "source a list": put("source", []),
    "source empty": put("source", {}),
    "source with more": put("source", "path", "/data"),
    "source copied null": put("source", "copied", None),
    "source copied a number": put("source", "copied", "config.json", 1),
    "source copied and not there": put("source", "copied", "LICENSE", "0" * 64),
    "source files a list": put("source", "files", ["model.safetensors"]),
    "source file null": put("source", "files", "model.safetensors", None),
    "source size bool": put("source", "files", "model.safetensors", "size", True),
    "source no size": put("source", "files", "model.safetensors", "size", GONE),
    "source digest no hex": put("source", "files", "model.safetensors", "digest", "g" * 32),
    "source digest a number": put("source", "files", "model.safetensors", "digest", 7),
    **{f"no {name}": put(name, GONE) for name in sorted(json.loads(VALID))},
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_a_hostile_manifest_is_refused(case: str) -> None:
    data = json.loads(VALID)
    MUTATIONS[case](data)
    encoded = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert encoded != VALID
    damaged(encoded)


def test_nesting_near_the_limit_of_recursion_is_no_traceback() -> None:
    """Reading JSON, checking it and writing it again do not give up at the same depth."""
    refused_at = []
    for depth in range(700, 1001):
        deep = b"[" * depth + b"]" * depth
        try:
            parse_manifest(VALID.replace(b'"copied":{}', b'"copied":' + deep))
        except ArtifactError:
            refused_at.append(depth)
    assert refused_at == list(range(refused_at[0], 1001))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=1))))
def test_a_manifest_with_changed_bytes_is_refused_or_is_another(edits: list[Any]) -> None:
    encoded = bytearray(VALID)
    for at, byte in edits:
        encoded[at : at + 1] = byte
    try:
        manifest = parse_manifest(bytes(encoded))
    except ArtifactError:
        return
    assert manifest.encoded == encoded
