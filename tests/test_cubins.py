"""Which cubin the runner takes: the named one, the artifact's, the cache's; and what it refuses."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import CUBIN, make_sidecar, put_cubin
from helpers import tiny_config

from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.errors import ArtifactError, NodeError, UsageError, UserError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import Sidecar, parse_sidecar
from dsv2mk.runner.cubins import find_cubin

GEOMETRY = Geometry.from_config(tiny_config())
OTHER = Geometry.from_config(tiny_config(num_hidden_layers=2))
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "compiled"
    monkeypatch.setenv("DSV2MK_CUBIN_CACHE", str(folder))
    return folder


def put_entry(cache: Path, note: str, **options: Any) -> Path:
    """An entry of the cache, in a folder that its key names."""
    sidecar = make_sidecar(options.pop("geometry", GEOMETRY), note=note)
    return put_cubin(cache / sidecar.kernel_key, sidecar, stem="kernel", **options)


def found_note(
    given: Path | None = None, own: Path | None = None, geometry: Geometry | None = GEOMETRY
) -> str:
    """The note of the kernel that is taken; its bytes are checked."""
    sidecar, cubin = find_cubin(ARCH, geometry, 1, given, own)
    assert sidecar.matches(cubin)
    note: str = sidecar.data["key"]["fingerprint"]["note"]
    return note


def refusal(
    kind: type[UserError],
    given: Path | None = None,
    own: Path | None = None,
    *,
    arch: str = ARCH,
    geometry: Geometry | None = GEOMETRY,
    ranks: int | None = 1,
) -> UserError:
    with pytest.raises(kind) as refused:
        find_cubin(arch, geometry, ranks, given, own)
    assert type(refused.value) is kind
    return refused.value


# ---- where it is looked for ----


def test_a_named_folder_a_named_file_the_artifact_s_own_and_the_cache(
    tmp_path: Path, cache: Path
) -> None:
    own, named = tmp_path / "artifact" / "cubin", tmp_path / "named"
    put_entry(cache, "cache")
    assert found_note() == found_note(own=own) == "cache"  # the artifact has no such folder
    own.mkdir(parents=True)
    assert found_note(own=own) == "cache"

    put_cubin(own, make_sidecar(GEOMETRY, note="own"), age=1000)
    assert found_note(own=own) == "own"  # before the cache, though older

    put_cubin(named, make_sidecar(GEOMETRY, note="named"), age=2000)
    older = put_cubin(named, make_sidecar(GEOMETRY, note="older"), age=3000)
    assert found_note(named, own) == "named"
    assert found_note(older, own) == "older"


def test_bytes_and_sidecar_are_those_of_the_files(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5
    sidecar = make_sidecar(GEOMETRY, cubin=data)
    put_cubin(tmp_path / "named", sidecar, cubin=data)
    found, cubin = find_cubin(ARCH, GEOMETRY, 1, tmp_path / "named", None)
    assert (found.data, cubin) == (sidecar.data, data)


@pytest.mark.parametrize("place", ["named", "own", "cache"])
@pytest.mark.parametrize("newest", ["a", "b", "c"])
def test_the_newest_comes_first(place: str, newest: str, tmp_path: Path, cache: Path) -> None:
    for age, note in enumerate("abc", start=1):
        age = 0 if note == newest else age
        if place == "cache":
            put_entry(cache, note, age=age)
        else:
            put_cubin(
                tmp_path / place, make_sidecar(GEOMETRY, note=note), stem=f"dsv2mk.{note}", age=age
            )
    given = tmp_path / "named" if place == "named" else None
    assert found_note(given, tmp_path / "own") == newest


def test_what_fits_is_taken_though_others_are_newer(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "own"
    put_cubin(folder, make_sidecar(GEOMETRY, note="fits"), age=9)
    put_cubin(folder, make_sidecar(OTHER), age=1)
    put_cubin(folder, make_sidecar(GEOMETRY, ranks=2), age=1)
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_100a"), age=1)
    assert found_note(own=folder) == found_note(folder) == "fits"

    put_entry(cache, "cached", geometry=OTHER)
    assert found_note(own=tmp_path / "absent", geometry=OTHER) == "cached"
    put_entry(cache, "of this model", age=9)
    only_other = tmp_path / "only other"
    put_cubin(only_other, make_sidecar(OTHER, note="of another"))
    assert found_note(own=only_other) == "of this model"


def test_a_cubin_says_what_model_it_is_for(tmp_path: Path) -> None:
    """For measurements with random weights, which need no artifact."""
    folder = tmp_path / "named"
    path = put_cubin(folder, make_sidecar(OTHER))
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_100a"))
    for given in (folder, path):
        sidecar, _ = find_cubin(ARCH, None, None, given, None)
        assert sidecar.geometry == OTHER
    put_cubin(folder, make_sidecar(GEOMETRY))
    error = refusal(UsageError, folder, geometry=None, ranks=None)
    assert "several models" in str(error)
    assert ".cubin" in str(error)
    assert find_cubin(ARCH, None, None, path, None)[0].geometry == OTHER


def test_of_kernels_that_differ_in_the_compiler_alone_the_newest_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    for age, note in enumerate("bac"):
        put_cubin(folder, make_sidecar(GEOMETRY, note=note), age=age)
    put_cubin(folder, make_sidecar(OTHER, arch="sm_100a", ranks=2))  # for another device
    sidecar, _ = find_cubin(ARCH, None, None, folder, None)
    assert sidecar.data["key"]["fingerprint"]["note"] == "b"


def test_of_several_numbers_of_ranks_none_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    for ranks in (1, 2):
        put_cubin(folder, make_sidecar(GEOMETRY, ranks=ranks))
    error = refusal(UsageError, folder, geometry=None, ranks=None)
    assert "several numbers of ranks" in str(error)
    assert ".cubin" in str(error)
    for ranks in (1, 2):
        sidecar, _ = find_cubin(ARCH, None, ranks, folder, None)
        assert sidecar.topology.ranks == ranks


# ---- what does not fit ----


def test_without_a_cubin_it_says_how_to_compile_one(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    for given, where in ((folder, str(folder)), (None, "the artifact and the cache")):
        for own in (None, folder, tmp_path / "absent"):
            error = refusal(NodeError, given, own)
            assert error.exit_code == 12
            assert f"no cubin in {where}" in str(error)
            assert "dsv2mk cubin --artifact DIR --arch sm_90a" in str(error)
            assert "--cubin" in str(error)


def test_a_cubin_of_another_model_is_refused(tmp_path: Path) -> None:
    path = put_cubin(tmp_path / "named", make_sidecar(OTHER))
    for given, own in ((path, None), (path.parent, None), (None, path.parent)):
        error = refusal(NodeError, given, own)
        assert "for this model" in str(error)
        assert "--arch sm_90a" in str(error)


def test_a_cubin_of_another_arch_is_refused_with_what_is_offered(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_103a"))
    error = refusal(NodeError, folder)
    assert (error.expected, error.found) == (ARCH, "sm_103a")
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_100a"))
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_103a", note="again"))
    put_cubin(folder, make_sidecar(OTHER))  # the right arch, and no use
    error = refusal(NodeError, folder)
    assert (error.expected, error.found) == (ARCH, "sm_100a, sm_103a")
    assert "--arch sm_90a" in str(error)


def test_a_cubin_of_another_number_of_ranks_is_refused_with_what_is_offered(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "own"
    for ranks in (8, 2, 4):
        put_cubin(folder, make_sidecar(GEOMETRY, ranks=ranks))
    put_cubin(folder, make_sidecar(GEOMETRY, arch="sm_100a"))  # of 1 rank, for another device
    error = refusal(NodeError, own=folder)
    assert (error.expected, error.found) == ("1", "2, 4, 8")
    sidecar, _ = find_cubin(ARCH, GEOMETRY, 4, None, folder)
    assert sidecar.topology.ranks == 4


def multimem(geometry: Geometry = GEOMETRY, *, note: str = "", **options: Any) -> Sidecar:
    """`make_sidecar` of a kernel with the other collective."""
    data = json.loads(make_sidecar(geometry, ranks=2, note=note, **options).encoded)
    data["key"]["options"] = {"collective": "multimem"}
    data["kernel_key"] = hashlib.sha256(canonical_json(data["key"])).hexdigest()
    return parse_sidecar(canonical_json(data), "a sidecar of the tests")


@pytest.mark.parametrize("place", ["named", "own", "cache"])
def test_a_cubin_of_the_collective_that_is_asked_for_is_taken(
    place: str, tmp_path: Path, cache: Path
) -> None:
    both = (multimem(), 1), (make_sidecar(GEOMETRY, ranks=2), 9)
    for sidecar, age in both:
        folder = cache / sidecar.kernel_key if place == "cache" else tmp_path / place
        stem = "kernel" if place == "cache" else None
        put_cubin(folder, sidecar, stem=stem, age=age)
    given = tmp_path / "named" if place == "named" else None
    for ranks in (2, None):
        geometry = GEOMETRY if ranks else None
        places = (ARCH, geometry, ranks, given, tmp_path / "own")
        assert find_cubin(*places)[0].collective == "p2p"
        for collective in ("p2p", "multimem"):
            sidecar, _ = find_cubin(*places, collective=collective)
            assert sidecar.collective == collective


def test_a_cubin_of_another_collective_is_refused_with_what_is_offered(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    put_cubin(folder, make_sidecar(GEOMETRY, ranks=2))
    put_cubin(folder, multimem(OTHER))
    put_cubin(folder, multimem(arch="sm_100a"))
    with pytest.raises(NodeError) as refused:
        find_cubin(ARCH, GEOMETRY, 2, folder, None, collective="multimem")
    assert (refused.value.expected, refused.value.found) == ("multimem", "p2p")
    assert "dsv2mk cubin --artifact DIR --arch sm_90a --collective multimem" in str(refused.value)
    put_cubin(folder, make_sidecar(GEOMETRY, ranks=4))
    put_cubin(folder, multimem(note="later"))
    assert find_cubin(ARCH, GEOMETRY, 2, folder, None)[0].collective == "p2p"
    path = put_cubin(tmp_path / "other", multimem())
    error = refusal(NodeError, path, ranks=2)
    assert (error.expected, error.found) == ("p2p", "multimem")
    assert "--collective" not in str(error.fix)  # the default


# ---- damage ----


def other_bytes(path: Path) -> None:
    path.write_bytes(CUBIN + b"\0")


def no_bytes(path: Path) -> None:
    path.write_bytes(b"")


def no_cubin(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def no_json(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def edited_json(path: Path) -> None:
    sidecar = path.with_suffix(".json")
    edited = sidecar.read_text().replace('"note":"', '"note":"x')
    assert edited != sidecar.read_text()
    sidecar.write_text(edited)


def of_later(path: Path) -> None:
    sidecar = path.with_suffix(".json")
    sidecar.write_text(sidecar.read_text().replace('"schema":1', '"schema":2'))


CUBIN_DAMAGE = [other_bytes, no_bytes, no_cubin, folder_instead]
SIDECAR_DAMAGE = [no_json, edited_json, of_later]


PLACES = [
    (place, damage)
    for place in ("file", "named", "own")
    for damage in (*CUBIN_DAMAGE, *SIDECAR_DAMAGE)
    if (place, damage) != ("file", folder_instead)  # a folder that was named
]


@pytest.mark.parametrize(("place", "damage"), PLACES)
def test_a_damaged_cubin_that_was_named_is_refused(
    place: str, damage: Callable[[Path], None], tmp_path: Path, cache: Path
) -> None:
    """Though the cache holds a good one: it is not what was asked for."""
    put_entry(cache, "good")
    path = put_cubin(tmp_path / place, make_sidecar(GEOMETRY))
    damage(path)
    given = {"file": path, "named": path.parent, "own": None}[place]
    error = refusal(ArtifactError, given, path.parent)
    assert error.exit_code == 11
    assert str(path.parent / path.stem) in str(error)
    assert "dsv2mk cubin" in str(error)


@pytest.mark.parametrize("damage", [*CUBIN_DAMAGE, *SIDECAR_DAMAGE])
def test_a_damaged_entry_of_the_cache_is_passed_over(
    damage: Callable[[Path], None], tmp_path: Path, cache: Path
) -> None:
    put_entry(cache, "older", age=9)
    damage(put_entry(cache, "newer"))
    assert found_note() == "older"


@pytest.mark.parametrize("damage", [*CUBIN_DAMAGE, *SIDECAR_DAMAGE])
def test_a_cache_of_damaged_entries_is_an_empty_one(
    damage: Callable[[Path], None], cache: Path
) -> None:
    damage(put_entry(cache, "a"))
    (cache / "b").mkdir()
    (cache / "c").write_text("no folder")
    (cache / "d" / "kernel.json").mkdir(parents=True)
    assert "no cubin" in str(refusal(NodeError))


def test_an_entry_that_makes_no_sense_is_passed_over(cache: Path) -> None:
    """Its hash is right: it says 3 ranks for 8 heads, as another version might allow."""
    put_entry(cache, "good", age=9)
    path = put_entry(cache, "new").with_suffix(".json")
    data = json.loads(path.read_text())
    data["key"]["topology"]["ranks"] = 3
    key = json.dumps(data["key"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**data, "kernel_key": hashlib.sha256(key.encode()).hexdigest()}))
    assert found_note() == "good"


# ---- names that are no place ----


def test_a_cubin_without_its_sidecar_is_refused(tmp_path: Path) -> None:
    path = put_cubin(tmp_path / "named", make_sidecar(GEOMETRY))
    path.with_suffix(".json").unlink()
    error = refusal(UsageError, path)
    assert error.exit_code == 2
    assert (error.what, error.found) == ("--cubin", str(path))
    assert ".json" in str(error)
    assert "no cubin in" in str(refusal(NodeError, path.parent))


def test_what_is_neither_a_folder_nor_a_cubin_is_refused(tmp_path: Path) -> None:
    path = put_cubin(tmp_path / "named", make_sidecar(GEOMETRY))
    absent = tmp_path / "absent"
    for given in (absent, absent / "x.cubin", path.with_suffix(".json"), path.with_suffix("")):
        error = refusal(UsageError, given)
        assert error.found == str(given)


def test_other_files_in_a_folder_of_cubins_are_not_looked_at(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "artifact" / "cubin"
    put_cubin(folder, make_sidecar(GEOMETRY, note="good"))
    (folder / "notes.json").write_text("{}")
    (folder / "z.json").symlink_to("nowhere")
    (folder / "x.json").mkdir()
    assert found_note(folder) == "good"
    assert found_note(tmp_path / "artifact") == "good"  # an artifact's folder may be named too


def test_a_sidecar_that_cannot_be_read_is_named(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "cubins"
    folder.mkdir()
    (folder / "dsv2mk.sm_90a.tp1.0.json").symlink_to("nowhere")
    with pytest.raises(ArtifactError, match=r"dsv2mk\.sm_90a\.tp1\.0\.json"):
        find_cubin(ARCH, GEOMETRY, 1, folder, None)
