"""The JSON beside a cubin: what is read back, and what is refused as damaged."""

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import Sidecar, cache_folder, parse_sidecar
from dsv2mk.manifests.topology import Topology

GEOMETRY = Geometry.from_config(tiny_config())
WHERE = "folder/kernel.json"
CUBIN = b"\x7fELF and more"


def canonical(data: object) -> bytes:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def good() -> dict[str, Any]:
    """A sidecar as the compiler's side writes it, each value made up."""
    key = {
        "arch": "sm_90a",
        "fingerprint": {"python": "3.11", "machine": "é"},
        "geometry": GEOMETRY.to_json(),
        "layout_version": 1,
        "scheme": {"name": "any"},
        "sources": {"kernel/plan.py": "00"},
        "topology": {"ranks": 4},
    }
    numbers = {
        "block": 640,
        "cluster": 1,
        "shared_memory": 200_000,
        "static_shared_memory": 1024,
        "registers": 96,
        "local_memory": 0,
        "min_ctas": 3,
        "max_ctas": 256,
        "minimum_driver": 12000,
        "cache_row": 88,
    }
    return {
        "schema": 1,
        "kernel_key": sha256(canonical(key)),
        "key": key,
        "entry": "kernel_0",
        "parameters": [["cache", "u64"], ["rank", "i32"]],
        "arch": "sm_90a",
        "cooperative": True,
        "plan": {"slots": 9},
        "workspace": {"exchange_bytes": 4096},
        "phases": ["qkv"],
        "cubin_sha256": sha256(CUBIN),
        "ptx_sha256": sha256(b""),
        **numbers,
    }


def assert_refused(encoded: bytes, *said: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        parse_sidecar(encoded, Path(WHERE))
    assert refused.value.exit_code == 11
    for words in (WHERE, "dsv2mk cubin", *said):
        assert words in str(refused.value)


def with_options(options: object, ranks: int = 4) -> bytes:
    """A good sidecar, whose key has options."""
    data = good()
    data["key"] |= {"options": options, "topology": {"ranks": ranks}}
    data["kernel_key"] = sha256(canonical(data["key"]))
    return canonical(data)


# ---- reading ----


def test_a_sidecar_reads_back() -> None:
    data = good()
    sidecar = parse_sidecar(canonical(data), WHERE)
    assert sidecar.data == data
    assert sidecar.encoded == canonical(data)
    assert sidecar.geometry == GEOMETRY
    assert sidecar.topology == Topology(ranks=4)
    assert sidecar.file_stem == f"dsv2mk.sm_90a.tp4.{data['kernel_key'][:16]}"
    assert sidecar.matches(CUBIN)
    assert not sidecar.matches(CUBIN + b"\0")
    for name, value in data.items():
        assert getattr(sidecar, name) == value


@pytest.mark.parametrize(
    ("options", "collective", "infix"),
    [
        ({}, "p2p", ""),
        ({"collective": "p2p"}, "p2p", ""),
        ({"collective": "multimem"}, "multimem", ".multimem"),
        ({"collective": "multimem", "later": 1}, "multimem", ".multimem"),
    ],
)
def test_a_collective_other_than_p2p_is_in_the_files_names(
    options: object, collective: str, infix: str
) -> None:
    assert parse_sidecar(canonical(good()), WHERE).collective == "p2p"  # of before there were two
    sidecar = parse_sidecar(with_options(options), WHERE)
    assert sidecar.collective == copy.copy(sidecar).collective == collective
    assert sidecar.file_stem == f"dsv2mk.sm_90a.tp4{infix}.{sidecar.kernel_key[:16]}"


def test_an_unknown_field_is_no_attribute_and_is_kept() -> None:
    sidecar = parse_sidecar(canonical({**good(), "note": "later"}), WHERE)
    assert sidecar.note == "later"
    with pytest.raises(AttributeError, match="registerz"):
        _ = sidecar.registerz


def test_white_space_does_not_change_the_canonical_bytes() -> None:
    spaced = b"\n" + json.dumps(good(), indent=2).encode() + b"\n"
    assert parse_sidecar(spaced, WHERE).encoded == canonical(good())


@pytest.mark.parametrize("remake", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_sidecar_can_be_copied(remake: Callable[[Sidecar], Sidecar]) -> None:
    sidecar = parse_sidecar(canonical(good()), WHERE)
    assert remake(sidecar).encoded == sidecar.encoded


# ---- damage ----


@pytest.mark.parametrize("name", good())
def test_a_field_that_is_missing_is_refused_by_name(name: str) -> None:
    data = good()
    del data[name]
    assert_refused(canonical(data), name)


@pytest.mark.parametrize("name", good())
@pytest.mark.parametrize("value", [None, True, 1, 1.0, "1", [], {}], ids=repr)
def test_a_field_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    if type(value) is type(good()[name]):
        value = None
    assert_refused(canonical({**good(), name: value}), name)


@pytest.mark.parametrize("schema", [0, 2, -1, 1 << 70])
def test_another_schema_is_refused(schema: int) -> None:
    assert_refused(canonical({**good(), "schema": schema}), "schema: expected 1", str(schema))


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        canonical(good())[:-1],
        canonical(good()) + b"}",
        b"[" * 100_000,
        b'{"schema":' + b"9" * 5000 + b"}",
    ],
    ids=lambda encoded: repr(encoded[:8]),
)
def test_what_is_no_json_object_is_refused(encoded: bytes) -> None:
    assert_refused(encoded)


def set_path(data: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        data = data[parent]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kernel_key", "0" * 64),
        ("kernel_key", ""),
        ("arch", "sm_100a"),
        ("key.arch", "sm_100a"),
        ("key.layout_version", 2),
        ("key.topology.ranks", 2),
        ("key.geometry.num_hidden_layers", 5),
        ("key.geometry.rope_theta", "10001.0"),
        ("key.fingerprint.python", "3.12"),
        ("key.sources", {}),
        ("key.new", 1),
        ("key.options", {"collective": "multimem"}),
    ],
)
def test_a_key_of_another_kernel_is_refused(path: str, value: object) -> None:
    data = good()
    set_path(data, path, value)
    assert_refused(canonical(data), "kernel key")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("key.arch", "sm_100a"),
        ("key.layout_version", 2),
        ("key.layout_version", None),
        ("key.topology", {}),
        ("key.topology", []),
        ("key.topology.ranks", "4"),
        ("key.topology.ranks", 4.0),
        ("key.topology.ranks", 3),
        ("key.topology.ranks", 0),
        ("key.geometry", None),
        ("key.geometry", {}),
        ("key.geometry.new", 1),
        ("key.geometry.rope_theta", "x"),
        ("key.geometry.rope_theta", 1.5),
        ("key.geometry.yarn", 3),
        ("key.geometry.hidden_size", "256"),
        ("key.geometry.hidden_size", 0),
        ("key.geometry.yarn.factor", "0.5"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused_though_its_hash_is_right(
    path: str, value: object
) -> None:
    data = good()
    set_path(data, path, value)
    data["kernel_key"] = sha256(canonical(data["key"]))
    assert_refused(canonical(data), "is damaged")


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (None, 4),
        ([], 4),
        ({"collective": None}, 4),
        ({"collective": ""}, 4),
        ({"collective": "nvls"}, 4),
        ({"collective": ["p2p"]}, 4),
        ({"collective": "multimem"}, 1),
    ],
)
def test_a_collective_that_there_is_not_is_refused(options: object, ranks: int) -> None:
    assert_refused(with_options(options, ranks), "is damaged")


def test_text_that_utf_8_has_no_bytes_for_is_refused() -> None:
    data = good()
    data["key"]["note"] = "\ud800"
    assert_refused(json.dumps(data).encode(), "is damaged")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
#: Of the fields that `kernel_key` does not cover.
NAMES = st.sampled_from([name for name in good() if name != "key"])


@settings(max_examples=300)
@given(NAMES, VALUES)
def test_any_value_of_a_field_is_read_or_refused(name: str, value: object) -> None:
    data = {**good(), name: value}
    if type(value) is type(good()[name]) and name not in ("schema", "kernel_key", "arch"):
        assert parse_sidecar(json.dumps(data).encode(), WHERE).data == data
    elif value != good()[name]:
        assert_refused(json.dumps(data).encode())


def test_a_float_is_refused_wherever_it_stands() -> None:
    try:
        sidecar = parse_sidecar(canonical({**good(), "plan": {"slots": 1.5}}), WHERE)
    except ArtifactError:
        return
    assert sidecar.encoded


# ---- where compiled kernels are kept ----


@pytest.mark.parametrize(
    ("given_", "home", "expected"),
    [
        ("/a", "/b", "/a"),
        ("", "/b", "/b/dsv2mk/cubin"),
        ("", "", "/h/.cache/dsv2mk/cubin"),
        (None, None, "/h/.cache/dsv2mk/cubin"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    given_: str | None, home: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    for name, value in (("DSV2MK_CUBIN_CACHE", given_), ("XDG_CACHE_HOME", home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
