"""Parse the manifest and the nodes of an OCDBT database.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format

TensorStore's own `dump` keeps what it has returned for ever, as of version 0.1.86.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from fastcrc import crc32

from ..._errors import CorruptCheckpointError
from ..calls.zstd_codec import decompressed_at_most


# Keys or generations.
Ordered = TypeVar("Ordered", bytes, int)


_MANIFEST_MAGIC, _NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
_HEAD, _CHECKSUM = 12, 4  # bytes: the magic number and the length; a CRC-32C
_UUID, _ZSTD_LEVEL, _TIME = 16, 4, 8  # bytes
_VERSION = 0
_UNCOMPRESSED, _ZSTD = 0, 1
# The kinds of manifests: with all versions, and without any.
_SINGLE, _NUMBERED = 0, 1
_INLINE, _IN_FILE = 0, 1  # The kinds of values.
# The offset and the number of bytes of a root that there is not.
_NONE = 2**64 - 1
_MAX_END = 2**63 - 1  # Of a place in a file.
# Of a number, rounded up to those of whole bytes.
_MAX_BITS = 70
# Of the entries of a node, as TensorStore has it.
_MAX_COUNT = 2**20
# Of the bytes of a node. Orbax writes nodes of 10**8.
MAX_NODE = 2**27
# Of the bytes of all keys of a node.
_MAX_KEY_BYTES = 2**28


# The folder of a part of the database, in which the nodes below this one are, too.
_FOLDER = re.compile(r"(?:(?:p|ocdbt\.process_)\d+/)?", re.ASCII)
_FILE = re.compile(r"d/[0-9a-f]{32}")


class Location(NamedTuple):
    """Where a value or a node is."""

    folder: str
    name: str
    start: int
    nbytes: int

    @property
    def file(self) -> str:
        return self.folder + self.name

    def __str__(self) -> str:
        return f"{self.file}:{self.start}:{self.nbytes}"

    def check(self) -> None:
        """Raise unless it is in a file of this database: a path may lead anywhere."""
        if not (_FOLDER.fullmatch(self.folder) and _FILE.fullmatch(self.name)):
            raise CorruptCheckpointError(
                f"{str(self)!r} is not a place in this database"
            )


class Node(NamedTuple):
    """A node, and the keys below it.

    They begin with `prefix`. None is less than `least`, and all are less than `bound`.
    """

    location: Location
    height: int
    prefix: bytes = b""
    least: bytes = b""
    bound: bytes | None = None


class Manifest(NamedTuple):
    """The root of the newest version, if there is any key.

    Without `has_versions`, the versions have files of their own.
    """

    has_versions: bool
    root: Node | None = None


def manifest_of(data: bytes) -> Manifest:
    fields = _Fields(_content(data, _MANIFEST_MAGIC))
    fields.take(_UUID)
    kind = fields.number()
    if kind == _NUMBERED:
        return Manifest(has_versions=False)
    if kind != _SINGLE:
        raise CorruptCheckpointError("it is of an unknown kind")
    fields.numbers(2)  # The most bytes of an inline value, and of a node.
    fields.take(1)
    if fields.number() == _ZSTD:
        fields.take(_ZSTD_LEVEL)
    files = _files(fields, "")
    count = fields.count()
    generations = fields.numbers(count)
    heights = fields.take(count)
    ids, starts, nbytes, keys = (fields.numbers(count) for _ in range(4))
    fields.numbers(2 * count)  # Statistics.
    fields.take(_TIME * count)
    older = fields.count()  # Nodes with older versions.
    fields.numbers(5 * older)
    fields.take((_TIME + 1) * older)
    fields.end()
    if not count:
        raise CorruptCheckpointError("it has no version")
    _check_order(generations, "versions")
    if starts[-1] == nbytes[-1] == _NONE:
        if keys[-1]:
            raise CorruptCheckpointError("it has keys, and no root")
        return Manifest(has_versions=True)
    root = _location(files, ids[-1], starts[-1], nbytes[-1])
    return Manifest(True, Node(root, heights[-1]))


def children_of(node: Node, data: bytes) -> list[Node]:
    """The nodes below one, in the order of their keys."""
    fields, files, count = _entries(node, data)
    own, shared = _keys(fields, count, have_prefixes=True)
    ids, starts, nbytes = (fields.numbers(count) for _ in range(3))
    fields.numbers(3 * count)  # Statistics.
    fields.end()
    keys = _below(node, own)
    places = map(_location, itertools.repeat(files), ids, starts, nbytes)
    sizes = (len(node.prefix) + size for size in shared)
    return [
        Node(place, node.height - 1, key[:size], key, bound)
        for key, bound, size, place in zip(
            keys, [*keys[1:], node.bound], sizes, places, strict=True
        )
    ]


def values_of(node: Node, data: bytes) -> list[tuple[bytes, bytes | Location]]:
    """The values of a node, or where they are, in the order of their keys."""
    fields, files, count = _entries(node, data)
    keys, _ = _keys(fields, count, have_prefixes=False)
    nbytes, kinds = fields.numbers(count), fields.take(count)
    if not {*kinds} <= {_INLINE, _IN_FILE}:
        raise CorruptCheckpointError("it has values of an unknown kind")
    in_file = kinds.count(_IN_FILE)
    ids, starts = fields.numbers(in_file), fields.numbers(in_file)
    places = zip(ids, starts, strict=True)
    found = [
        (
            key,
            fields.take(size)
            if kind == _INLINE
            else _location(files, *next(places), size),
        )
        for key, kind, size in zip(_below(node, keys), kinds, nbytes, strict=True)
    ]
    fields.end()
    return found


def _entries(node: Node, data: bytes) -> tuple["_Fields", list[tuple[str, str]], int]:
    """What follows the head of a node, the files that it names, and its entries."""
    fields = _Fields(_content(data, _NODE_MAGIC))
    if fields.take(1)[0] != node.height:
        raise CorruptCheckpointError("it has another height")
    return fields, _files(fields, node.location.folder), fields.count()


def _below(node: Node, keys: Sequence[bytes]) -> list[bytes]:
    """Keys of the database, from those of a node, which are in order."""
    if len(node.prefix) * len(keys) + sum(map(len, keys)) > _MAX_KEY_BYTES:
        raise CorruptCheckpointError("its keys are too long")
    found = [node.prefix + key for key in keys]
    if found[0] < node.least or (node.bound is not None and found[-1] >= node.bound):
        raise CorruptCheckpointError("it has keys that belong to another node")
    return found


def _content(data: bytes, magic: bytes) -> bytes:
    """What is in a manifest or in a node, whose checksum is right."""
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if crc32.iscsi(body).to_bytes(_CHECKSUM, "little") != checksum:
        raise CorruptCheckpointError("its checksum differs")
    fields = _Fields(body)
    head = magic + len(data).to_bytes(_HEAD - len(magic), "little")
    is_known = fields.take(_HEAD) == head and fields.number() == _VERSION
    compression = fields.number() if is_known else None
    if compression not in (_UNCOMPRESSED, _ZSTD):
        raise CorruptCheckpointError("it is of an unknown kind")
    rest = fields.rest()
    return decompressed_at_most(rest, MAX_NODE) if compression == _ZSTD else rest


def _keys(
    fields: "_Fields", count: int, *, have_prefixes: bool
) -> tuple[list[bytes], list[int]]:
    """Keys, and how many bytes of each are those of all keys below it."""
    if not count:
        raise CorruptCheckpointError("it is empty")
    shared = [0, *fields.numbers(count - 1)]
    own = fields.numbers(count)
    prefixes = fields.numbers(count) if have_prefixes else []
    keys = _joined(fields, shared, own)
    if any(size > len(key) for key, size in zip(keys, prefixes, strict=False)):
        raise CorruptCheckpointError("a key is shorter than its prefix")
    _check_order(keys, "keys")
    return keys, prefixes


def _check_order(values: Sequence[Ordered], what: str) -> None:
    if any(one >= other for one, other in itertools.pairwise(values)):
        raise CorruptCheckpointError(f"its {what} are not in order")


def _joined(
    fields: "_Fields", shared: Sequence[int], own: Sequence[int]
) -> list[bytes]:
    """Strings that begin as the one before."""
    if sum(shared) + sum(own) > _MAX_KEY_BYTES:
        raise CorruptCheckpointError("its keys are too long")
    found: list[bytes] = []
    before = b""
    for size, more in zip(shared, own, strict=True):
        if size > len(before):
            raise CorruptCheckpointError("a key is shorter than what it shares")
        before = before[:size] + fields.take(more)
        found.append(before)
    return found


def _files(fields: "_Fields", folder: str) -> list[tuple[str, str]]:
    """The files that a node refers to: the folder, and the name in it."""
    count = fields.count()
    shared = [0, *fields.numbers(count - 1)] if count else []
    own, bases = fields.numbers(count), fields.numbers(count)
    paths = [path.decode("latin-1") for path in _joined(fields, shared, own)]
    if any(base > len(path) for path, base in zip(paths, bases, strict=True)):
        raise CorruptCheckpointError("a path is shorter than its folder")
    return [
        (folder + path[:base], path[base:])
        for path, base in zip(paths, bases, strict=True)
    ]


def _location(
    files: Sequence[tuple[str, str]], number: int, start: int, nbytes: int
) -> Location:
    if number >= len(files):
        raise CorruptCheckpointError("it refers to a file that it does not name")
    if start + nbytes > _MAX_END:
        raise CorruptCheckpointError("it refers to a place that no file has")
    folder, name = files[number]
    return Location(folder, name, start, nbytes)


class _Fields:
    """Fields of bytes, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise CorruptCheckpointError("it is too short")
        found = self._data[self._at : end]
        self._at = end
        return found

    def number(self) -> int:
        """A number with seven bits in each byte, the lowest first."""
        found = 0
        for shift in range(0, _MAX_BITS, 7):
            byte = self.take(1)[0]
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise CorruptCheckpointError("it has a number that is too large")

    def count(self) -> int:
        """A number of entries, versions or files."""
        count = self.number()
        if count > _MAX_COUNT:
            raise CorruptCheckpointError("it has too many entries")
        return count

    def numbers(self, count: int) -> list[int]:
        part = self._data[self._at : self._at + count]
        if len(part) == count and part.isascii():  # Each has one byte.
            self._at += count
            return [*part]
        return [self.number() for _ in range(count)]

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptCheckpointError("it is too long")
