"""Parse the manifest and the nodes of an OCDBT database.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format

TensorStore's own `dump` keeps what it has returned for ever, as of version 0.1.86.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from fastcrc import crc32

from ..._errors import CorruptCheckpointError
from ..calls.zstd_codec import decompressed_at_most


_MANIFEST_MAGIC, _NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
_HEAD, _CHECKSUM = 12, 4  # bytes: the magic number and the length; a CRC-32C
_UUID, _ZSTD_LEVEL = 16, 4  # bytes
_VERSION = 0
_UNCOMPRESSED, _ZSTD = 0, 1
_SINGLE = 0  # The kind of a manifest that has all versions.
_INLINE, _IN_FILE = 0, 1  # The kinds of values.
# The offset and the number of bytes of a root that there is not.
_NONE = 2**64 - 1
# Of a number, rounded up to those of whole bytes.
_MAX_BITS = 70
# Of the entries of a node, as TensorStore has it.
_MAX_COUNT = 2**20
# Of a node, and of all its keys: far more than TensorStore writes.
_MAX_BYTES = 2**26


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


class Child(NamedTuple):
    """A node below another one: its least key, and what all its keys begin with."""

    key: bytes
    prefix: bytes
    location: Location


class Manifest(NamedTuple):
    """The root of the newest version, if there is any key, and its height.

    Without `has_versions`, the versions have files of their own.
    """

    has_versions: bool
    root: Location | None = None
    height: int = 0


def manifest_of(data: bytes) -> Manifest:
    fields = _Fields(_content(data, _MANIFEST_MAGIC))
    fields.take(_UUID)
    if fields.number() != _SINGLE:
        return Manifest(has_versions=False)
    fields.numbers(2)  # The most bytes of an inline value, and of a node.
    fields.take(1)
    if fields.number() == _ZSTD:
        fields.take(_ZSTD_LEVEL)
    files = _files(fields, "")
    count = fields.count()
    fields.numbers(count)  # The generations.
    heights = fields.take(count)
    ids, starts, nbytes = (fields.numbers(count) for _ in range(3))
    if not count:
        raise CorruptCheckpointError("it has no version")
    if starts[-1] == nbytes[-1] == _NONE:
        return Manifest(has_versions=True)
    root = _location(files, ids[-1], starts[-1], nbytes[-1])
    return Manifest(True, root, heights[-1])


def children_of(data: bytes, folder: str, height: int) -> list[Child]:
    """The nodes below one of some height, in the order of their keys.

    `folder` is that of the location of the node.
    """
    fields, files, count = _node(data, folder, height)
    keys, shared = _keys(fields, count, have_prefixes=True)
    ids, starts, nbytes = (fields.numbers(count) for _ in range(3))
    fields.numbers(3 * count)  # Statistics.
    fields.end()
    places = map(_location, itertools.repeat(files), ids, starts, nbytes)
    return [
        Child(key, key[:size], place)
        for key, size, place in zip(keys, shared, places, strict=False)
    ]


def values_of(data: bytes, folder: str) -> list[tuple[bytes, bytes | Location]]:
    """The values of a node, or where they are, in the order of their keys."""
    fields, files, count = _node(data, folder, 0)
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
        for key, kind, size in zip(keys, kinds, nbytes, strict=True)
    ]
    fields.end()
    return found


def _node(
    data: bytes, folder: str, height: int
) -> tuple["_Fields", list[tuple[str, str]], int]:
    """What follows the head of a node, the files that it names, and its entries."""
    fields = _Fields(_content(data, _NODE_MAGIC))
    if fields.take(1)[0] != height:
        raise CorruptCheckpointError("it has another height")
    return fields, _files(fields, folder), fields.count()


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
    return decompressed_at_most(rest, _MAX_BYTES) if compression == _ZSTD else rest


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
    if any(one >= other for one, other in itertools.pairwise(keys)):
        raise CorruptCheckpointError("its keys are not in order")
    return keys, prefixes


def _joined(
    fields: "_Fields", shared: Sequence[int], own: Sequence[int]
) -> list[bytes]:
    """Strings that begin as the one before."""
    if sum(shared) + sum(own) > _MAX_BYTES:
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
    return [
        (folder + path[:base], path[base:])
        for path, base in zip(paths, bases, strict=True)
    ]


def _location(
    files: Sequence[tuple[str, str]], number: int, start: int, nbytes: int
) -> Location:
    if number >= len(files):
        raise CorruptCheckpointError("it refers to a file that it does not name")
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
