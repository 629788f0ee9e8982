"""The journal of a build: what is already on disk, so that a killed build goes on from there.

One JSON object a line. The first is the identity of the build. Then, in any order,

    {"job": NAME, "digests": {TENSOR: HEX}}         a job's bytes are on disk; what it has read
    {"file": NAME, "chunk": INDEX, "xxh3": HEX}     a chunk of a file has been hashed

A record is appended only after the bytes that it speaks of are on disk, and is on disk itself
before the append returns. A line that is none of these, since a crash cut it short, say, ends the
journal.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any


class Journal:
    """An open journal: `records` are those found, `append` adds one. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._lock = threading.Lock()
        self.records: list[dict[str, Any]] = []
        length = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict) or (self.records and not _is_record(record)):
                break
            self.records.append(record)
            length += len(line)
        self._cut(length)

    def restart(self, identity: dict[str, Any]) -> None:
        """Forget all records and begin with a new identity."""
        self._cut(0)
        self.records = []
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

    def _cut(self, length: int) -> None:
        os.ftruncate(self._fd, length)
        os.lseek(self._fd, length, os.SEEK_SET)


def _is_record(record: dict[str, Any]) -> bool:
    kinds = {name: type(value) for name, value in record.items()}
    return kinds in ({"job": str, "digests": dict}, {"file": str, "chunk": int, "xxh3": str})
