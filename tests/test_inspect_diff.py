"""What is in an artifact, mapped or shown by `inspect`, and what differs from another: `diff`."""

import json
import math
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Call, edit_json, make_artifact, make_snapshot, small_config, spec
from safetensors import safe_open
from safetensors.torch import load_file

from dsv2mk.artifacts.container import read_header
from dsv2mk.artifacts.tensors import statistics
from dsv2mk.manifests.layout import PARTS

# ---- map_tensor ----


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        # Fewer units than ranks: some ranks have an FFN of nothing.
        (8, {"first_k_dense_replace": 2, "num_hidden_layers": 2, "intermediate_size": 129}),
    ],
)
def test_a_mapped_tensor_is_the_librarys_and_no_more(
    tmp_path: Path, ranks: int, changes: dict[str, int]
) -> None:
    artifact = make_artifact(
        make_snapshot(tmp_path / "s", small_config(**changes)), ranks, tmp_path / "a"
    )
    unaligned = count = 0
    for rank, layout in enumerate(artifact.layouts):
        for part in PARTS:
            for name, tensor in load_file(artifact.path / layout.file_name(part)).items():
                view = artifact.map_tensor(rank, name)
                assert view == tensor.flatten().view(torch.uint8).numpy().tobytes(), name
                assert view.readonly
                with pytest.raises(TypeError):
                    view[:1] = b"x"
                extra = len(view.obj) - len(view)  # of what is mapped
                assert 0 <= extra < mmap.PAGESIZE, name
                unaligned += extra > 0
                count += 1
        with pytest.raises(KeyError):
            artifact.map_tensor(rank, "bias")
    assert count == sum(len(layout.tensors) for layout in artifact.layouts)
    assert unaligned


# ---- inspect ----


def test_inspect_shows_what_the_library_finds(built: Path, dsv2mk: Call) -> None:
    code, out, err = dsv2mk("inspect", built, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert {tensor["rank"] for tensor in data["tensors"]} == {0, 1}
    seen = set()
    for tensor in data["tensors"]:
        with safe_open(built / tensor["file"], "pt") as file:
            found = file.get_slice(tensor["name"])
            assert (found.get_dtype(), found.get_shape()) == (tensor["dtype"], tensor["shape"])
            raw_bytes = (
                file.get_tensor(tensor["name"]).flatten().view(torch.uint8).numpy().tobytes()
            )
        content = (built / tensor["file"]).read_bytes()
        start = tensor["offset"]
        assert content[start : start + tensor["bytes"]] == raw_bytes
        seen.add((tensor["file"], tensor["name"]))
    stored = {
        (path.name, name)
        for path in built.glob("*.safetensors")
        for name in read_header(path).tensors
    }
    assert seen == stored
    code, out, _ = dsv2mk("inspect", built)
    assert code == 0
    assert all(name in out for _, name in stored)


def test_statistics_of_every_tensor_equal_numpy(built: Path, dsv2mk: Call) -> None:
    for part in ("replicated", "partitioned", "ffn"):
        for name, tensor in load_file(built / f"rank-01.{part}.safetensors").items():
            code, out, _ = dsv2mk("inspect", built, name, "--rank", 1, "--stats", "--json")
            assert code == 0
            (entry,) = json.loads(out)["tensors"]
            assert (entry["rank"], entry["name"]) == (1, name)
            values = tensor.float().numpy().astype(np.float64)
            expected = {
                "min": values.min(),
                "max": values.max(),
                "mean": values.mean(),
                "rms": np.sqrt(np.square(values).mean()),
            }
            stats = entry["stats"]
            for key, value in expected.items():
                assert stats[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)
            assert (stats["zeros"], stats["not_finite"]) == ((values == 0).sum(), 0)


def test_statistics_leave_out_what_is_not_finite() -> None:
    values = np.array([np.nan, 3, -0.0, np.inf, -5, -np.inf, 0], np.float32)
    assert statistics(memoryview(bytearray(values.tobytes())), spec("x", "F32", (7,))) == {
        "min": -5.0,
        "max": 3.0,
        "mean": -0.5,
        "rms": math.sqrt(34 / 4),
        "zeros": 2,
        "not_finite": 3,
    }
    nothing = statistics(memoryview(bytearray(b"\x7f\xff")), spec("x", "F8_E4M3", (2,)))
    assert nothing == {"min": 0, "max": 0, "mean": 0, "rms": 0, "zeros": 0, "not_finite": 2}


def test_inspect_shows_a_bundle_as_the_folder_it_came_from(
    built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    store = tmp_path / "store"
    assert dsv2mk("publish", "--copy", built, store, "--tag", "v1").code == 0
    for options in ([], ["--rank", 1], ["lm_head", "--stats"], ["lm_head", "--rank", 0, "--json"]):
        folder, bundle = (dsv2mk("inspect", where, *options) for where in (built, f"{store}::v1"))
        assert folder.code == 0
        assert bundle == folder
    assert dsv2mk("inspect", f"{store}::v2").code == 11


def test_inspect_needs_no_more_than_the_rank_that_it_shows(
    built: Path, tmp_path: Path, dsv2mk: Call
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    dsv2mk("publish", "--copy", built, store, "--tag", "v1")
    dsv2mk("pull", store, "v1", out, "--rank", 1)
    assert dsv2mk("inspect", out, "--rank", 1) == dsv2mk("inspect", built, "--rank", 1)
    for options in ([], ["--rank", 0]):
        done = dsv2mk("inspect", out, *options)
        assert (done.code, "rank-00.ffn.safetensors" in done.err) == (11, True)
    assert dsv2mk("inspect", out, "--rank", 2).code == 2


# ---- diff ----


def changes(dsv2mk: Call, a: Path, b: Path) -> list[tuple[str, str]]:
    code, out, _ = dsv2mk("diff", a, b, "--json")
    data = json.loads(out)
    assert code == (0 if data["same"] else 1)
    listed = [(change["sign"], change["what"]) for change in data["changes"]]
    assert data["same"] == (not listed)
    code, out, _ = dsv2mk("diff", a, b)
    assert code == (0 if data["same"] else 1)
    assert [tuple(line.split(maxsplit=1)) for line in out.splitlines() if line] == listed
    return listed


def test_diff_of_one_artifact_is_empty(built: Path, artifact: Path, dsv2mk: Call) -> None:
    assert changes(dsv2mk, built, artifact) == []


def test_diff_of_other_ranks(built: Path, snapshot: Path, tmp_path: Path, dsv2mk: Call) -> None:
    single = make_artifact(snapshot, 1, tmp_path / "single").path
    rank_1 = [f"rank-01.{part}.safetensors" for part in ("ffn", "partitioned", "replicated")]
    modified = [("M", f"rank-00.{part}.safetensors") for part in ("ffn", "partitioned")]
    assert changes(dsv2mk, built, single) == [
        *modified,
        *(("-", name) for name in rank_1),
        ("M", "topology.ranks: 2 -> 1"),
    ]
    assert changes(dsv2mk, single, built) == [
        *modified,
        *(("+", name) for name in rank_1),
        ("M", "topology.ranks: 1 -> 2"),
    ]


def test_diff_of_another_input(built: Path, tmp_path: Path, dsv2mk: Call) -> None:
    other = make_snapshot(tmp_path / "other", small_config(), seed=1)
    (other / "LICENSE").write_text("free")
    edit_json(other / "config.json", routed_scaling_factor=2.0)
    found = changes(dsv2mk, built, make_artifact(other, 2, tmp_path / "b").path)
    signs = {what: sign for sign, what in found}
    assert signs.pop("LICENSE") == "+"
    assert signs.pop("source.copied.LICENSE") == "+"
    assert signs.pop('geometry.routed_scaling_factor: "4.0" -> "2.0"') == "M"
    assert set(signs.values()) == {"M"}
    files = [what for what in signs if ":" not in what]
    shards = {path.name for path in built.glob("*.safetensors")}
    assert set(files) == {*shards, "config.json"}
    reverse = changes(dsv2mk, tmp_path / "b", built)
    assert ("-", "LICENSE") in reverse
    assert ("-", "source.copied.LICENSE") in reverse
