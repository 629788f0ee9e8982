"""Calls that stand still before or after a chosen file-system call, while others go on."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

_CALLS = ("stat", "lstat", "open", "rename", "replace", "link", "unlink", "utime", "mkdir")
_CALLS += ("listdir", "scandir", "rmdir")
_actors: dict[int, "Actor"] = {}

#: Whether a call, by its arguments, is the one that is meant.
Which = Callable[..., bool]


def any_call(*_: str) -> bool:
    return True


def of(end: str) -> Which:
    """A call whose first argument ends so."""
    return lambda first, *_: first.endswith(end)


def onto(part: str) -> Which:
    """A call whose second argument has this part."""
    return lambda _, second, *__: part in second


def hook(patch: pytest.MonkeyPatch) -> None:
    """Let actors stand still from now on."""

    def hooked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            actor = _actors.get(threading.get_ident())
            if actor is None:
                return real(*args, **more)
            actor.at(name, "before", args)
            try:
                return real(*args, **more)
            finally:
                actor.at(name, "after", args)

        return call

    for name in _CALLS:
        patch.setattr(os, name, hooked(name, getattr(os, name)))


class Actor:
    """A function in a thread of its own, which runs only in `go` and `end`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._point: tuple[tuple[str, ...], str, Which] | None = None
        self._goes, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._error: BaseException | None = None
        self.ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self, names: str, when: str, which: Which = any_call) -> bool:
        """Go on to a call of one of these names; whether it came to one, or to its end."""
        self._point = (tuple(names.split()), when, which)
        return self._go()

    def end(self) -> Any:
        """Go on to the end; what the function returned or raised."""
        self._point = None
        if not self.ended:
            assert not self._go()
        if self._error is not None:
            raise self._error
        return self._result

    def at(self, name: str, when: str, args: tuple[Any, ...]) -> None:
        """The thread is at a call: it stands still if that is the chosen one."""
        if self._point is not None:
            names, wanted, which = self._point
            if name in names and when == wanted and which(*map(str, args)):
                self._point = None
                self._stands.release()
                self._goes.acquire()

    def _go(self) -> bool:
        assert not self.ended
        self._goes.release()
        assert self._stands.acquire(timeout=60)
        return not self.ended

    def _run(self) -> None:
        self._goes.acquire()
        _actors[threading.get_ident()] = self
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            del _actors[threading.get_ident()]
            self.ended = True
            self._stands.release()
