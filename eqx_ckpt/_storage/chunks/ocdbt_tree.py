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
    children_of,
    Location,
    Manifest,
    manifest_of,
    MAX_NODE,
    Node,
    values_of,
)


T = TypeVar("T")


_MANIFEST = "manifest.ocdbt"


# Where nobody else can be kept from writing a manifest, each version has its own.
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")


_ALL = slice(None)


# Of all keys, and of their bytes.
_MAX_KEYS = 2**22
_MAX_KEY_BYTES = 2**29


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
        self._key_bytes = 0

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
        todo = [] if root is None else [root]
        while todo:
            node = todo.pop()
            if node.location in seen:
                raise CorruptCheckpointError(
                    f"{node.location} is twice in the database"
                )
            seen.add(node.location)
            if node.height:
                todo += self._children(node)
                continue
            for key, value in self._values(node):
                found[key] = _nbytes(value)
            if len(found) > _MAX_KEYS:
                reason = f"the database has more than {_MAX_KEYS} keys"
                raise CorruptCheckpointError(reason)
        return found

    def _below_root(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Entry]]:
        try:
            root = self._root()
        except CorruptCheckpointError as e:
            return dict.fromkeys(keys, Problem(str(e))).items()
        return [] if root is None else self._below(root, keys)

    def _root(self) -> Node | None:
        """The root of the newest version, if there is any key."""
        found = self._manifest(_MANIFEST)
        if not found.has_versions:
            numbered = filter(_NUMBERED.fullmatch, self._place.list_keys())
            if newest := max(numbered, default=""):
                found = self._manifest(newest)
        if not found.has_versions:
            raise CorruptCheckpointError("the database has no version")
        return found.root

    def _manifest(self, file: str) -> Manifest:
        return _parsed(file, manifest_of, self._read(file))

    def _below(
        self, node: Node, keys: Sequence[bytes]
    ) -> Iterator[tuple[bytes, Entry]]:
        try:
            if node.height == 0:
                yield from self._values(node)
                return
            children = self._children(node)
        except CorruptCheckpointError as e:
            yield from dict.fromkeys(keys, Problem(str(e))).items()
            return
        starts = [bisect_left(keys, child.least) for child in children]
        ends = [*starts[1:], len(keys)]
        for child, start, end in zip(children, starts, ends, strict=True):
            if start < end:
                yield from self._below(child, keys[start:end])

    def _children(self, node: Node) -> list[Node]:
        return _parsed(node.location, children_of, node, self._data(node))

    def _values(self, node: Node) -> list[tuple[bytes, bytes | Location]]:
        found = _parsed(node.location, values_of, node, self._data(node))
        self._key_bytes += sum(len(key) for key, _ in found)
        if self._key_bytes > _MAX_KEY_BYTES:
            raise CorruptCheckpointError("the keys of the database are too long")
        return found

    def _data(self, node: Node) -> bytes:
        node.location.check()
        if node.location.nbytes > MAX_NODE:
            raise CorruptCheckpointError(
                f"{node.location} of the database is too large"
            )
        start = node.location.start
        return self._read(
            node.location.file, slice(start, start + node.location.nbytes)
        )

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
