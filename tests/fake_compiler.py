"""In place of the compiler's process, for tests of what is around it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv2mk.kernel.elf import Resources


def clean_environment(patch: pytest.MonkeyPatch) -> None:
    """Without the user's cache and what the user asks of the compiler."""
    for name in ("DSV2MK_CUBIN_CACHE", "CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LINEINFO"):
        patch.delenv(name, raising=False)


class FakeCompiler:
    """Makes a few bytes of whatever is asked, and keeps what was asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests: list[dict[str, Any]] = []
        self.uses = Resources(registers=96, local_memory=0, static_shared_memory=1024)
        self.fails = False
        self.meanwhile: Callable[[], object] = lambda: None  # called before a kernel is done
        patch.setattr("dsv2mk.kernel.compile.subprocess", SimpleNamespace(run=self._run))
        patch.setattr("dsv2mk.kernel.compile.resources", lambda cubin: self.uses)

    @property
    def asked(self) -> list[tuple[str, int]]:
        """(arch, ranks) of each request."""
        return [(request["arch"], request["ranks"]) for request in self.requests]

    def _run(self, line: list[str], *, input: str, env: dict[str, str], **_: object) -> Any:
        request = json.loads(input)
        assert env["CUTE_DSL_ARCH"] == request["arch"]
        self.requests.append(request)
        self.meanwhile()
        folder = Path(line[-1])
        if not self.fails:
            (folder / "out.cubin").write_bytes(b"\x7fELF " + input.encode())
            (folder / "out.ptx").write_text(f".target {request['arch']}\n{input}")
            (folder / "out.entry").write_text("kernel_0")
        return SimpleNamespace(returncode=int(self.fails), stdout="", stderr="no luck")
