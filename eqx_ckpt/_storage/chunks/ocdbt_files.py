"""OCDBT databases in a directory, whose values plain calls read.

TensorStore hands over a value as a copy in fresh memory. The nodes of the database tell
in which file a value is, and from there it can be read straight into its array.
"""

import contextlib
import functools as ft
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..._errors import CorruptCheckpointError
from ..calls.file_reads import FileReads
from ..calls.opening import path_through
from ..calls.safe_files import open_existing
from ..calls.tensorstore_calls import KvSpec
from ..interface.chunk_bytes import (
    ChunkBytes,
    Problem,
    Value,
    Wanted,
)
from ..interface.place import Chunks, Storage
from .ocdbt_database import Database
from .ocdbt_nodes import Location
from .ocdbt_tree import DatabaseTree


# Files that are open at a time, besides those that threads are reading.
_MOST_OPEN = 16


class DatabaseFiles(Database):
    """All chunks are in one database, which is in a directory."""

    are_values = False

    def __init__(self, place: Storage) -> None:
        super().__init__(place)
        self._tree = DatabaseTree(place)
        # A path for TensorStore through a directory that is open.
        self._within = ""

    def write_within(self, folder: int) -> None:
        path = path_through(folder)
        self._within = path and f"{path}/"

    @property
    def new_spec(self) -> KvSpec:
        spec = super().new_spec
        if self._within:
            spec["base"] = {**self.place.spec, "path": self._within}
        return spec

    def part(self, name: str) -> "DatabaseFiles":
        part = DatabaseFiles(self.place / name)
        if self._within:
            part._within = self._within + name
        return part

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        by_key = {one.chunk.key.encode(): one for one in wanted}
        entries = self._tree.look_up(by_key)
        path = self.place.spec["path"]
        opened = ft.lru_cache(_MOST_OPEN)(ft.partial(_DataFile.open, path))
        for key, one in by_key.items():
            entry = entries.get(key, Problem(f"{one.chunk.key} is missing"))
            is_in_file = isinstance(entry, Location)
            yield one, _ValueInFile(entry, opened) if is_in_file else Value(entry)

    # What `fetch` gives is a place in a file, which is not read.
    missing = Chunks.missing


@dataclass(eq=False)
class _DataFile:
    """A file with many values, open as long as somebody holds it."""

    reads: FileReads

    @classmethod
    def open(cls, path: str, name: str) -> "_DataFile":
        return cls(open_existing(path, name))

    def __del__(self) -> None:
        self.reads.close()


class _ValueInFile:
    """A value in a file; a context in which the file is open."""

    def __init__(self, location: Location, opened: Callable[[str], _DataFile]) -> None:
        self._location = location
        self._opened = opened
        self.nbytes = 0

    def __enter__(self) -> None:
        place = self._location
        place.check()
        self._file = self._opened(place.file)
        end, size = place.start + place.nbytes, self._file.reads.nbytes
        if end > size:
            raise CorruptCheckpointError(
                f"{place.file} has {size} bytes, but a value that ends at {end}"
            )
        self.nbytes = place.nbytes

    def __exit__(self, *_: object) -> None:
        del self._file

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._file.reads.fill(buffers, self._location.start + offset, self.nbytes)


_FOLDER = re.compile(r"d|p\d+|ocdbt\.process_\d+")


_OF_DATABASE = re.compile(rf"{_FOLDER.pattern}|manifest\..*|[0-9a-f]{{32}}")


# One that lists the last few versions has some kB.
_MAX_MANIFEST = 2**20


def database_problem(path: str) -> str:
    """The first entry of a database that is no plain file nor directory, or ''.

    TensorStore would follow a link out of the checkpoint, wait for ever for a pipe, and
    die of a manifest that does not fit in memory.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry, name in _entries(path):
            if entry.is_symlink():
                return f"{name} is a symbolic link"
            kind = "directory" if _FOLDER.fullmatch(entry.name) else "file"
            if not (entry.is_dir() if kind == "directory" else entry.is_file()):
                return f"{name} is not a {kind}"
            size = entry.stat().st_size
            if entry.name.startswith("manifest.") and size > _MAX_MANIFEST:
                return f"{name} has {size} bytes"
    return ""


def folder_problem(path: str, folder: str, most: int, *, links: bool) -> str:
    """The first entry below a folder that TensorStore must not open, or ''.

    It must not have links, as a database, but for files where `links` may be; and no
    file has more than `most` bytes, which TensorStore would allocate.
    """
    parts = itertools.accumulate(filter(None, folder.split("/")), "{}/{}".format)
    if link := next((part for part in parts if os.path.islink(path + part)), None):
        return f"{link} is a symbolic link"
    todo = [path + folder]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                name = os.path.relpath(entry.path, path)
                if entry.is_symlink() and not (links and entry.is_file()):
                    return f"{name} is a symbolic link"
                if entry.is_dir():
                    todo.append(entry.path)
                elif not entry.is_file():
                    return f"{name} is not a file"
                elif (size := entry.stat().st_size) > most:
                    return f"{name} has {size} bytes, and {most} would be too many"
    return ""


def _entries(path: str, prefix: str = "") -> Iterator[tuple[os.DirEntry[str], str]]:
    """Every entry of a database with its name; a directory before its content."""
    with os.scandir(path) as entries:
        for entry in entries:
            if _OF_DATABASE.fullmatch(entry.name):
                yield entry, prefix + entry.name
                if entry.is_dir():
                    yield from _entries(entry.path, f"{prefix}{entry.name}/")
