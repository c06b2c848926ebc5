"""A file of another program: on a disk, in a store, or behind a URL."""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, TypeVar


# Bytes that are read at a time.
PIECE = 8 * 2**20


_T = TypeVar("_T")


class Reads(abc.ABC):
    """Reads of an open file, from several threads."""

    @abc.abstractmethod
    def fill(self, buffers: Sequence[memoryview], offset: int, total: int) -> None:
        """Read into all of the buffers, from an offset in the file.

        `total` bytes are read around there. `EOFError` if the file ends before.
        """

    @abc.abstractmethod
    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Get ready what is between these offsets, if single reads of it are slow."""

    @abc.abstractmethod
    def ready(self, offset: int) -> int:
        """How many bytes are best read at once from there."""

    @abc.abstractmethod
    def fetch(
        self, items: Iterable[tuple[int, int, _T]]
    ) -> Iterator[tuple["Reads", _T]]:
        """For each item, reads that have what is between its two offsets.

        The items are in the order of the file. Each byte is transferred once, unless an
        item has more than `PIECE` bytes, which its own reads transfer.
        """


class ForeignFile(abc.ABC):
    """A file of another program, which must not change after it was first opened.

    **Attributes:**

    - `path`: where it is, for people.
    """

    path: str

    @property
    @abc.abstractmethod
    def size(self) -> int | None:
        """Its bytes; `None` if that cannot be asked for."""

    @abc.abstractmethod
    def opened(self) -> contextlib.AbstractContextManager[Reads]:
        """Open it; raise if the file is, or becomes, a different one."""

    @abc.abstractmethod
    def tail(self, most: int) -> bytes:
        """Its last bytes; all of it if it has fewer."""

    @abc.abstractmethod
    def whole(self, most: int) -> bytes:
        """All of it; `ValueError` if it has more bytes than that."""

    @abc.abstractmethod
    def end_problem(self, end: int) -> str:
        """Why it is not a file of `end` bytes, or `""`."""

    @abc.abstractmethod
    def beside(self, name: str) -> Self:
        """The file of another name in the same folder."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Text that is the same wherever this version is read; `""` if unknown."""


def read_bytes(reads: Reads, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    read_exactly(reads, offset, memoryview(data))
    return bytes(data)


def read_exactly(reads: Reads, offset: int, target: memoryview) -> None:
    """Fill `target` from a file; `EOFError` if that ends before."""
    if target:
        reads.fill([target], offset, len(target))
