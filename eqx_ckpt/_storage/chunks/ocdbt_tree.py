"""Where the values of an OCDBT database are, without reading them."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..._errors import CorruptCheckpointError
from ..calls.tensorstore_calls import open_kvstore, own_context
from ..interface.chunk_bytes import Problem
from ..interface.place import Storage


# Where a value is, such as `value:p0/:d/6f...e1:0:812`, or a node: its kind, the folder
# and the file in it, its offset, and its number of bytes.
_TEXT = re.compile(
    r"\w+:((?:(?:p|ocdbt\.process_)\d+/)?):(d/[0-9a-f]{32}):(\d+):(\d+)", re.ASCII
)


# Far more than TensorStore writes; it would allocate what a node is said to have.
_MAX_NODE = 2**26


_MAX_KEYS = 2**22


# A value, its location, or the problem with it.
Entry: TypeAlias = bytes | str | Problem


class DatabaseTree:
    """The tree of keys of a database, in the format of its TensorStore driver.

    A node with values is read once: it holds thousands of keys, which may be asked for
    one by one.

    https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
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
        seen: set[str] = set()
        root, height = self._root()
        todo = [] if root is None else [(root, height, b"")]
        while todo:
            location, height, prefix = todo.pop()
            if location in seen:
                raise CorruptCheckpointError(f"{location} is twice in the database")
            seen.add(location)
            for entry in self._node(location, height):
                if height:
                    below = prefix + entry["subtree_common_prefix"]
                    todo.append((entry["location"], height - 1, below))
                    continue
                found[prefix + entry["key"]] = _nbytes(entry)
            if len(found) > _MAX_KEYS:
                reason = f"the database has more than {_MAX_KEYS} keys"
                raise CorruptCheckpointError(reason)
        return found

    def _below_root(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Entry]]:
        try:
            root, height = self._root()
        except CorruptCheckpointError as e:
            return dict.fromkeys(keys, Problem(str(e))).items()
        return [] if root is None else self._below(root, height, b"", keys)

    def _root(self) -> tuple[str | None, int]:
        """The location of the newest root, if there is any key, and its height."""
        version = self._dump("manifest.ocdbt")["versions"][-1]
        return version["root"].get("location"), version["root_height"]

    def _below(
        self, location: str, height: int, prefix: bytes, keys: Sequence[bytes]
    ) -> Iterator[tuple[bytes, Entry]]:
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
        place = parsed(location)
        if place.nbytes > _MAX_NODE:
            raise CorruptCheckpointError(f"{location} of the database is too large")
        node = self._dump(place.file, location)
        if node["height"] != height:
            raise CorruptCheckpointError(f"{location} of the database is damaged")
        return node["entries"]

    def _dump(self, file: str, location: str | None = None) -> dict[str, Any]:
        """A node in a file, or the manifest, which lists the versions."""
        import tensorstore as ts

        base, context = open_kvstore(self._place.spec), own_context()
        dumping = ts.ocdbt.dump(base, location, context=context)
        return self._place.wait_for(dumping, file)


def _nbytes(entry: Mapping[str, Any]) -> int:
    """The size of the value of an entry."""
    inline = entry.get("inline_value")
    return parsed(entry["indirect_value"]).nbytes if inline is None else len(inline)


class Location(NamedTuple):
    file: str
    start: int
    nbytes: int


def parsed(text: str) -> Location:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CorruptCheckpointError(f"{text!r} is not a place in this database")
    return Location(match[1] + match[2], int(match[3]), int(match[4]))
