"""OCDBT databases in a directory: TensorStore looks values up, plain calls read them.

TensorStore hands over a value as a copy in fresh memory. But it also tells in which
file a value is, and from there it can be read straight into its array.
"""

import functools as ft
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .._errors import CorruptCheckpointError
from .chunk_bytes import ChunkBytes, Problem, Value, Wanted
from .database import Database
from .database_tree import DatabaseTree, parsed
from .files import fill, open_existing
from .storage import Chunks, Storage


# Files that are open at a time, besides those that threads are reading.
_MOST_OPEN = 16


class DatabaseFiles(Database):
    """All chunks are in one database, which is in a directory."""

    def __init__(self, place: Storage) -> None:
        super().__init__(place)
        self._tree = DatabaseTree(place)

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        by_key = {one.chunk.key.encode(): one for one in wanted}
        entries = self._tree.look_up(by_key)
        path = self.place.spec["path"]
        opened = ft.lru_cache(_MOST_OPEN)(ft.partial(_DataFile.open, path))
        for key, one in by_key.items():
            entry = entries.get(key, Problem(f"{one.chunk.key} is missing"))
            is_in_file = isinstance(entry, str)
            yield one, _ValueInFile(entry, opened) if is_in_file else Value(entry)

    # What `fetch` gives is a place in a file, which is not read.
    missing = Chunks.missing


@dataclass(eq=False)
class _DataFile:
    """A file with many values, open as long as somebody holds it."""

    name: str
    fd: int
    nbytes: int

    @classmethod
    def open(cls, path: str, name: str) -> "_DataFile":
        return cls(name, *open_existing(path, name))

    def __del__(self) -> None:
        os.close(self.fd)


class _ValueInFile:
    """A value in a file; a context in which the file is open."""

    def __init__(self, location: str, opened: Callable[[str], _DataFile]) -> None:
        self._location = location
        self._opened = opened
        self.nbytes = 0

    def __enter__(self) -> None:
        name, self._start, nbytes = parsed(self._location)
        self._file = file = self._opened(name)
        end = self._start + nbytes
        if end > file.nbytes:
            raise CorruptCheckpointError(
                f"{name} has {file.nbytes} bytes, but a value that ends at {end}"
            )
        self.nbytes = nbytes

    def __exit__(self, *_: object) -> None:
        del self._file

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        fill(self._file.fd, self._file.name, buffers, self._start + offset)
