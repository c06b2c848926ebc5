"""Where the values of an OCDBT database are, without reading them."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from ..._errors import CorruptCheckpointError
from ..calls.tensorstore_calls import open_kvstore, value_of
from ..interface.chunk_bytes import Problem
from ..interface.place import Storage
from .ocdbt_nodes import (
    Child,
    children_of,
    Location,
    Manifest,
    manifest_of,
    values_of,
)


T = TypeVar("T")


_MANIFEST = "manifest.ocdbt"


# Where nobody else can be kept from writing a manifest, each version has its own.
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")


_ALL = slice(None)


# Far more than TensorStore writes.
_MAX_NODE = 2**26


_MAX_KEYS = 2**22


# A value, its location, or the problem with it.
Entry: TypeAlias = bytes | Location | Problem


class DatabaseTree:
    """The tree of keys of a database.

    A node with values is read once: it holds thousands of keys, which may be asked for
    one by one.
    """

    def __init__(self, place: Storage) -> None:
        self._place = place
        self._known: dict[bytes, Entry] = {}

    def look_up(self, keys: Iterable[bytes]) -> Mapping[bytes, Entry]:
        """The entries of keys, and of others."""
        unknown = sorted(key for key in keys if key not in self._known)
        if unknown:
            self._known.update(self._below_root(unknown))
        return self._known

    def sizes(self) -> dict[bytes, int]:
        """The number of bytes of each value, by its key.

        Raises `CorruptCheckpointError` for a tree that is larger than its nodes.
        """
        found: dict[bytes, int] = {}
        seen: set[Location] = set()
        root = self._root()
        todo = [] if root is None else [(*root, b"")]
        while todo:
            location, height, prefix = todo.pop()
            if location in seen:
                raise CorruptCheckpointError(f"{location} is twice in the database")
            seen.add(location)
            if height:
                for child in self._children(location, height):
                    todo.append((child.location, height - 1, prefix + child.prefix))
                continue
            for key, value in self._values(location):
                found[prefix + key] = _nbytes(value)
            if len(found) > _MAX_KEYS:
                reason = f"the database has more than {_MAX_KEYS} keys"
                raise CorruptCheckpointError(reason)
        return found

    def _below_root(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Entry]]:
        try:
            root = self._root()
        except CorruptCheckpointError as e:
            return dict.fromkeys(keys, Problem(str(e))).items()
        return [] if root is None else self._below(*root, b"", keys)

    def _root(self) -> tuple[Location, int] | None:
        """The location of the newest root, if there is any key, and its height."""
        found = self._manifest(_MANIFEST)
        if not found.has_versions:
            names = filter(_NUMBERED.fullmatch, self._place.list_keys())
            if not (newest := max(names, default="")):
                raise CorruptCheckpointError("the database has no version")
            found = self._manifest(newest)
        return None if found.root is None else (found.root, found.height)

    def _manifest(self, file: str) -> Manifest:
        return _parsed(file, manifest_of, self._read(file))

    def _below(
        self, location: Location, height: int, prefix: bytes, keys: Sequence[bytes]
    ) -> Iterator[tuple[bytes, Entry]]:
        try:
            if height == 0:
                for key, value in self._values(location):
                    yield prefix + key, value
                return
            children = self._children(location, height)
        except CorruptCheckpointError as e:
            yield from dict.fromkeys(keys, Problem(str(e))).items()
            return
        starts = [bisect_left(keys, prefix + child.key) for child in children]
        ends = [*starts[1:], len(keys)]
        for child, start, end in zip(children, starts, ends, strict=True):
            if start < end:
                below = prefix + child.prefix
                yield from self._below(
                    child.location, height - 1, below, keys[start:end]
                )

    def _children(self, location: Location, height: int) -> list[Child]:
        data = self._node(location)
        return _parsed(location, children_of, data, location.folder, height)

    def _values(self, location: Location) -> list[tuple[bytes, bytes | Location]]:
        return _parsed(location, values_of, self._node(location), location.folder)

    def _node(self, location: Location) -> bytes:
        location.check()
        if location.nbytes > _MAX_NODE:
            raise CorruptCheckpointError(f"{location} of the database is too large")
        start, end = location.start, location.start + location.nbytes
        return self._read(location.file, slice(start, end))

    def _read(self, file: str, part: slice = _ALL) -> bytes:
        store = open_kvstore(self._place.spec)
        found = self._place.wait_for(store.read(file, byte_range=part), file)
        data = value_of(found, self._place.url(file))
        if data is None:
            raise CorruptCheckpointError(f"{file} is missing")
        return data


def _nbytes(value: bytes | Location) -> int:
    """The size of a value, which TensorStore may be asked for."""
    if isinstance(value, bytes):
        return len(value)
    value.check()
    return value.nbytes


def _parsed(where: object, parse: Callable[..., T], *args: Any) -> T:
    """What a function parses; its errors say where."""
    try:
        return parse(*args)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(
            f"{where} of the database is damaged: {e}"
        ) from None
