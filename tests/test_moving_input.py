"""An input that changes while it is built is refused, and never taken for the old one."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import json_build
from helpers import SINGLE, Call, edit_json, flip_byte, names, read_bytes

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.errors import InputError
from dsv2mk.pipeline.build import build
from dsv2mk.pipeline.snapshot import Snapshot


def cut_input(snapshot: Path) -> None:
    os.truncate(snapshot / SINGLE, (snapshot / SINGLE).stat().st_size // 3)


def replace_input(snapshot: Path) -> None:
    """Another file of the same name and size, as rsync or a download puts it in place."""
    shutil.copy(snapshot.parent / "other" / SINGLE, snapshot / "new")
    os.replace(snapshot / "new", snapshot / SINGLE)


MOVES = {
    "byte": lambda snapshot: flip_byte(snapshot / SINGLE),
    "cut": cut_input,
    "replaced": replace_input,
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("when", [1, 8, -1], ids=["first", "early", "last"])
@pytest.mark.parametrize("kind", MOVES)
def test_input_changed_while_it_is_read(
    few: Path,
    dsv2mk: Call,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    when: int,
    workers: int,
) -> None:
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out, workers=workers)
    (few / "work").mkdir()
    size = (few / "snapshot" / SINGLE).stat().st_size
    calls, preadv = 0, os.preadv
    last = [0]

    def moving(fd: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        if os.fstat(fd).st_size == size:  # the input
            calls += 1
            if calls == (when if when > 0 else last[0]):
                MOVES[kind](few / "snapshot")
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", moving)
        assert when > 0 or dsv2mk(*json_build(few / "snapshot", few / "count")).code == 0
        last[0], calls = calls, 0
        refused = dsv2mk(*args)
    failed = refused.json["error"]
    assert refused.code == failed["exit_code"] == 10
    assert str(few / "snapshot") in failed["message"]
    assert "while it was read" in failed["message"]
    assert names(out.parent) == set()
    if kind != "cut":  # left alone, the new input builds
        again = dsv2mk(*args)
        assert (again.code, again.json["resumed_jobs"]) == (0, 0)
        assert Artifact.open(out).verify() == {}


def swap_tensors(snapshot: Path) -> None:
    """The same tensors in another order in a file of the same size."""
    data = (snapshot / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    a, b = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    header[a], header[b] = header[b], header[a]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (length - len(text))
    (snapshot / SINGLE).write_bytes(data[:8] + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [swap_tensors, lambda snapshot: edit_json(snapshot / "config.json", routed_scaling_factor=2)],
    ids=["header", "config"],
)
def test_input_changed_after_it_was_opened(few: Path, change: Callable[[Path], object]) -> None:
    """With --check-hashes there are minutes between the two: old headers, new bytes."""
    opened = Snapshot.open(few / "snapshot")
    change(few / "snapshot")
    out = few / "work" / "artifact"
    with pytest.raises(InputError, match="changed"):
        build(opened, 2, out, workers=1)
    assert not out.exists()


def test_input_changed_after_it_was_read_is_not_taken_for_the_old_one(
    few: Path, dsv2mk: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of an input goes with the stamps from before it was read."""
    out = few / "work" / "artifact"
    args = json_build(few / "snapshot", out)
    rename = os.rename

    def late(*paths: Any) -> None:
        flip_byte(few / "snapshot" / SINGLE)
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", late)
        assert dsv2mk(*args).code == 0
    assert read_bytes(out) == read_bytes(few / "artifact")
    again = dsv2mk(*args)
    assert again.code == 2
    assert "source.files" in again.out
