"""A file of another program, on a disk."""

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from ..._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ..._types import PathLike
from ..calls.file_reads import FileReads
from ..calls.opening import NotPlain, open_plain
from ..calls.store_path import local_path
from ..interface.foreign_file import ForeignFile, read_bytes, Reads


# Bytes of compressed data that are read at once.
_AT_ONCE = 2**16


_T = TypeVar("_T")


class LocalFile(ForeignFile):
    """A file on a disk; its size, times and inode tell whether it is still the same."""

    def __init__(self, path: PathLike) -> None:
        self.path = local_path(path)
        with self._open() as reads:
            self._identity = _identity(reads)

    @property
    def size(self) -> int:
        return self._identity[0]

    @contextlib.contextmanager
    def opened(self) -> Generator["LocalReads", None, None]:
        with self._open() as reads:
            self._check(reads)
            try:
                yield reads
            finally:
                self._check(reads)

    def tail(self, most: int) -> bytes:
        nbytes = min(most, self.size)
        with self.opened() as reads:
            return read_bytes(reads, self.size - nbytes, nbytes)

    def whole(self, most: int) -> bytes:
        if self.size > most:
            raise ValueError(f"it has {self.size} bytes")
        return self.tail(self.size)

    def end_problem(self, end: int) -> str:
        return "" if end == self.size else f"it has {self.size} bytes"

    def beside(self, name: str) -> "LocalFile":
        return LocalFile(os.path.join(os.path.dirname(self.path), name))

    @property
    def version(self) -> str:
        return ""

    @contextlib.contextmanager
    def _open(self) -> Generator["LocalReads", None, None]:
        try:
            reads = LocalReads(*open_plain(self.path, follow=True), self.path)
        # A `ValueError` is of a path that no file can have: it has a NUL, perhaps.
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise CheckpointNotFoundError(f"There is no file {self.path!r}.") from None
        except NotPlain:
            raise CheckpointError(f"{self.path!r} is not a file.") from None
        try:
            yield reads
        finally:
            reads.close()

    def _check(self, reads: "LocalReads") -> None:
        if _identity(reads) != self._identity:
            raise CheckpointError(
                f"{self.path!r} was changed after it had been opened. Open it again, "
                "when nobody writes to it."
            )


class LocalReads(FileReads, Reads):
    """Reads of an open file on a disk, which need no preparation."""

    def fill(self, buffers: Sequence[memoryview], offset: int, total: int) -> None:
        try:
            super().fill(buffers, offset, total)
        except CorruptCheckpointError:
            raise EOFError(f"the file ends at byte {self.nbytes}") from None

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        pass

    def ready(self, offset: int) -> int:
        return _AT_ONCE

    def fetch(self, items: Iterable[tuple[int, int, _T]]) -> Iterator[tuple[Reads, _T]]:
        for _, _, item in items:
            yield self, item


def _identity(reads: FileReads) -> tuple[int, int, int, int]:
    status = os.fstat(reads.fd)
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
