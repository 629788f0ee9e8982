"""The files of a build's shards: their headers and sizes, and writing into them in place."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsv2mk.artifacts.container import encode_header
from dsv2mk.manifests.layout import RankLayout


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardFile:
    """One file of a shard as it has to be: a part of a rank's layout with its header."""

    name: str
    layout: RankLayout
    part: str
    header: bytes
    size: int

    @property
    def data_start(self) -> int:
        """Where data starts in the file; offsets of a layout count from here."""
        return len(self.header)


def shard_file(layout: RankLayout, part: str) -> ShardFile:
    """The file of a part of a rank's shard."""
    header = encode_header(layout.part(part), layout.metadata(part))
    size = len(header) + sum(spec.nbytes for spec in layout.part(part))
    return ShardFile(
        name=layout.file_name(part), layout=layout, part=part, header=header, size=size
    )


class ShardWriter:
    """Files at their final size, filled in any order and by any thread."""

    def __init__(self, folder: Path, files: Iterable[ShardFile]) -> None:
        self._files = {(file.layout.rank, file.part): file for file in files}
        self._fds: dict[str, int] = {}
        try:
            for file in self._files.values():
                fd = os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o666)
                self._fds[file.name] = fd
                os.ftruncate(fd, file.size)
                _write_all(fd, file.header, 0)
        except BaseException:
            self.close()
            raise

    def write(self, rank: int, part: str, offset: int, data: memoryview) -> None:
        """Put bytes at an offset of a part's data."""
        file = self._files[rank, part]
        _write_all(self._fds[file.name], data, file.data_start + offset)

    def fileno(self, name: str) -> int:
        """Descriptor of a file, open for reading too."""
        return self._fds[name]

    def sync(self) -> None:
        """Wait until all that was written is on disk.

        An error is reported to one caller only: who gets it must let nobody rely on the files.
        """
        for fd in self._fds.values():
            os.fdatasync(fd)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset of an open file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
