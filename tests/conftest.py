"""Every test has a cache folder of its own and leaves the user's alone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DSV2MK_SNAPSHOT", raising=False)
    monkeypatch.setenv("DSV2MK_CACHE_SAFETY_GIB", "0.1")
