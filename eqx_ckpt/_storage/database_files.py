"""OCDBT databases in a directory: TensorStore looks values up, plain calls read them.

TensorStore hands over a value as a copy in fresh memory. But it also tells in which
file a value is, and from there it can be read straight into its array.
"""

import functools as ft
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .._errors import CorruptCheckpointError
from .chunk_bytes import ChunkBytes, Problem, Value, Wanted
from .database import Database
from .files import fill, open_existing
from .kvstore import open_kvstore, own_context
from .storage import Chunks, Storage


# Where a value is, such as `value:p0/:d/6f...e1:0:812`, or a node: its kind, the folder
# and the file in it, its offset, and its number of bytes.
_LOCATION = re.compile(r"\w+:((?:p\d+/)?):(d/[0-9a-f]{32}):(\d+):(\d+)", re.ASCII)
# Files that are open at a time, besides those that threads are reading.
_MOST_OPEN = 16
# A value, its location, or the problem with it.
_Entry: TypeAlias = bytes | str | Problem


class DatabaseFiles(Database):
    """All chunks are in one database, which is in a directory."""

    def __init__(self, place: Storage) -> None:
        super().__init__(place)
        self._tree = _Tree(place)

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


class _Tree:
    """The tree of keys of a database, in the format of its TensorStore driver.

    A node with values is read once: it holds thousands of keys, which may be asked for
    one by one.

    https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
    """

    def __init__(self, place: Storage) -> None:
        self._place = place
        self._known: dict[bytes, _Entry] = {}

    def look_up(self, keys: Iterable[bytes]) -> Mapping[bytes, _Entry]:
        """The entries of keys, and of others."""
        unknown = sorted(key for key in keys if key not in self._known)
        if unknown:
            self._known.update(self._below_root(unknown))
        return self._known

    def _below_root(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, _Entry]]:
        try:
            version = self._dump("manifest.ocdbt")["versions"][-1]
        except CorruptCheckpointError as e:
            return dict.fromkeys(keys, Problem(str(e))).items()
        root, height = version["root"].get("location"), version["root_height"]
        return [] if root is None else self._below(root, height, b"", keys)

    def _below(
        self, location: str, height: int, prefix: bytes, keys: Sequence[bytes]
    ) -> Iterator[tuple[bytes, _Entry]]:
        try:
            node = self._node(location, height)
        except CorruptCheckpointError as e:
            yield from dict.fromkeys(keys, Problem(str(e))).items()
            return
        if height == 0:
            for entry in node:
                kind = "inline" if "inline_value" in entry else "indirect"
                yield prefix + entry["key"], entry[f"{kind}_value"]
            return
        starts = [bisect_left(keys, prefix + child["key"]) for child in node]
        ends = [*starts[1:], len(keys)]
        for child, start, end in zip(node, starts, ends, strict=True):
            if start < end:
                below = prefix + child["subtree_common_prefix"]
                yield from self._below(
                    child["location"], height - 1, below, keys[start:end]
                )

    def _node(self, location: str, height: int) -> list[dict[str, Any]]:
        """The entries of a node."""
        # TensorStore would follow any path.
        node = self._dump(_parsed(location).file, location)
        if node["height"] != height:
            raise CorruptCheckpointError(f"{location} of the database is damaged")
        return node["entries"]

    def _dump(self, file: str, location: str | None = None) -> dict[str, Any]:
        """A node in a file, or the manifest, which lists the versions."""
        import tensorstore as ts

        base, context = open_kvstore(self._place.spec), own_context()
        dumping = ts.ocdbt.dump(base, location, context=context)
        return self._place.wait_for(dumping, file)


class _Location(NamedTuple):
    file: str
    start: int
    nbytes: int


def _parsed(text: str) -> _Location:
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise CorruptCheckpointError(f"{text!r} is not a place in this database")
    return _Location(match[1] + match[2], int(match[3]), int(match[4]))


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
        name, self._start, nbytes = _parsed(self._location)
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
