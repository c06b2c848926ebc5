"""OCDBT databases that TensorStore would not write.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .databases import checked


FILE = "d/" + "a" * 32
MANIFEST = "manifest.ocdbt"
# Of an array of four numbers, in one chunk.
ZARRAY = json.dumps(
    {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [4],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
    }
).encode()


class Place(NamedTuple):
    """Where a value or a node is said to be, in the file of the database."""

    start: int
    nbytes: int


def leaf(values: Mapping[str, bytes | Place], file: str = FILE) -> bytes:
    """A node with values, which are in it or in the file that it names."""
    items = [values[key] for key in sorted(values)]
    places = [item for item in items if isinstance(item, Place)]
    body = b"\0" + _files(file) + _keys(sorted(values))
    body += _numbers(i.nbytes if isinstance(i, Place) else len(i) for i in items)
    body += bytes(isinstance(item, Place) for item in items)
    body += _numbers([0] * len(places)) + _numbers(p.start for p in places)
    return node(body + b"".join(i for i in items if isinstance(i, bytes)))


def above(height: int, children: Sequence[Place], prefix: str = "") -> bytes:
    """A node whose children add a part of five digits to the names below them."""
    count = len(children)
    keys = [f"{prefix}{i:05d}" for i in range(count)]
    prefixes = [len(prefix) + 5] * count
    body = bytes([height]) + _files(FILE) + _keys(keys, prefixes=prefixes)
    for numbers in ([0] * count, *zip(*children, strict=True), *[[1] * count] * 3):
        body += _numbers(numbers)
    return node(body)


def write(
    path: pathlib.Path,
    nodes: Iterable[bytes],
    root: Place | None = None,
    file: str = FILE,
    values: bytes = b"",
    height: int | None = None,
) -> None:
    """A database whose root is at `root`, or the last of its nodes.

    The heights are those of a chain: each node is above the one before, unless the
    `height` of the root is given. The `values` are before all nodes.
    """
    (path / "d").mkdir(parents=True, exist_ok=True)
    nodes = [*nodes]
    data = values + b"".join(nodes)
    (path / FILE).write_bytes(data)
    root = root or Place(len(data) - len(nodes[-1]), len(nodes[-1]))
    # The UUID, the configuration, one version and its time.
    body = bytes(18) + _number(2**23) + b"\4\0" + _files(file) + b"\1\1"
    body += bytes([len(nodes) - 1 if height is None else height])
    body += _numbers((0, *root, 1, 1, 1)) + bytes(9)
    (path / MANIFEST).write_bytes(manifest(body))


def node(body: bytes) -> bytes:
    return _record(b"\x0c\xdb\x20\xde", body)


def manifest(body: bytes) -> bytes:
    return _record(b"\x0c\xdb\x3a\x2a", body)


def body_of(record: bytes) -> bytes:
    """What a node, or a manifest, says."""
    return record[14:-4]


def _record(magic: bytes, body: bytes) -> bytes:
    """A magic number, the length, a version, no compression, and a checksum."""
    body = b"\0\0" + body
    return checked(magic + (len(body) + 16).to_bytes(8, "little") + body)


def _files(name: str) -> bytes:
    """A table of one file."""
    return b"\1" + _number(len(name)) + b"\0" + name.encode()


def _keys(keys: list[str], prefixes: Iterable[int] = ()) -> bytes:
    """Keys that share nothing; `prefixes` are how much of them is that of a subtree."""
    head = _number(len(keys)) + bytes(len(keys) - 1)
    return head + _numbers(map(len, keys)) + _numbers(prefixes) + "".join(keys).encode()


def _numbers(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_number, numbers))


def _number(value: int) -> bytes:
    """Seven bits in each byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
