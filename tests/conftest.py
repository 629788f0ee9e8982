"""Every test has a cache folder of its own and leaves the user's alone; shared fixtures."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("helpers", "faults", "reference_model", "reference_shards")

from faults import FEW, MANY, Machine, Server  # noqa: E402
from helpers import Call, Done, build_args, make_snapshot, small_config  # noqa: E402
from reference_shards import SMALL, Config, Tensors, read_checkpoint  # noqa: E402

from dsv2mk.artifacts.console import run  # noqa: E402
from dsv2mk.pipeline.cli import cli  # noqa: E402

settings.register_profile("unhurried", settings(deadline=None))  # a machine may stall
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, tmp_path)


def set_environment(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.delenv("DSV2MK_SNAPSHOT", raising=False)
    patch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.1")


@pytest.fixture
def dsv2mk(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process."""

    def call(*args: object) -> Done:
        capsys.readouterr()
        code = run(cli, [str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def alarm() -> Iterator[None]:
    """Fails a test that waits for ever."""

    def hangs(*_: object) -> None:
        raise AssertionError("waits for ever")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, 30, 5)  # again, if the error is taken for another
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """So that sums are taken in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- a checkpoint of small_config() and its artifact for 2 ranks ----


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `snapshot` and `artifact`; the tests change only copies."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, folder)
        make_snapshot(folder / "snapshot", small_config())
        assert run(cli, build_args(folder / "snapshot", folder / "artifact")) == 0
    return folder


@pytest.fixture
def built(shared: Path) -> Path:
    """The artifact itself, to be read only."""
    return shared / "artifact"


@pytest.fixture
def snapshot(shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shared / "snapshot", tmp_path / "snapshot")


@pytest.fixture
def artifact(shared: Path, tmp_path: Path) -> Path:
    """What a build of `snapshot` gives. No input is remembered, and no file is a link."""
    return shutil.copytree(shared / "artifact", tmp_path / "artifact")


# ---- checkpoints in memory; the tests change only copies ----


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """A checkpoint of SMALL in bf16."""
    return read_checkpoint(make_snapshot(tmp_path_factory.mktemp("small") / "s", SMALL))


@pytest.fixture(scope="session")
def small_fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Config]:
    """A checkpoint of SMALL in block-FP8, and its config."""
    path = make_snapshot(tmp_path_factory.mktemp("small") / "s", SMALL, dtype="fp8-block")
    return read_checkpoint(path), json.loads((path / "config.json").read_text())


# ---- for builds that are disturbed ----


def with_artifacts(folder: Path, config: dict[str, object]) -> Path:
    """A folder with `snapshot`, its `artifact` for 2 ranks, and an `old` one of `other` input."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, folder)
        make_snapshot(folder / "snapshot", config)
        make_snapshot(folder / "other", config, seed=1)
        for source, out in (("snapshot", "artifact"), ("other", "old")):
            assert run(cli, build_args(folder / source, folder / out)) == 0
    return folder


@pytest.fixture(scope="session")
def few_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests change only copies."""
    return with_artifacts(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="session")
def many_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_artifacts(tmp_path_factory.mktemp("many"), MANY)


@pytest.fixture
def few(few_shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(few_shared, tmp_path / "few")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log")
    yield server
    server.close()
