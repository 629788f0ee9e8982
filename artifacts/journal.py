"""The journal of a build: what is already on disk, so that a killed build goes on from there.

One JSON object a line. The first line is the identity of the build; a journal of another identity
does not count. A record is appended only after the bytes that it speaks of are on disk, and is on
disk itself before the append returns. A line that a crash cut short ends the journal.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any


class Journal:
    """An open journal: `records` are those found, `append` adds one. Safe for threads."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.found_identity: dict[str, Any] | None = None
        self.records: list[dict[str, Any]] = []
        lines, length = _whole_lines(path)
        if lines:
            self.found_identity, *self.records = lines
        self.resumed = self.found_identity == identity
        self._lock = threading.Lock()
        if self.resumed:
            self._fd = os.open(path, os.O_WRONLY)
            os.ftruncate(self._fd, length)
            os.lseek(self._fd, length, os.SEEK_SET)
        else:
            self.records = []
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self.append(identity)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record and wait until it is on disk."""
        line = json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; the journal itself stays."""
        os.close(self._fd)


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All records up to the first damaged line, and the length in bytes of those lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    records: list[dict[str, Any]] = []
    length = 0
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            break
        records.append(record)
        length += len(line)
    return records, length
