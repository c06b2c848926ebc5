"""Parsing a msgpack file without reading its large values."""

import struct
from typing import Any, NamedTuple

from ..._storage.interface.foreign_file import read_bytes, Reads


# Far deeper than any model.
MAX_DEPTH = 200


# A leaf of each would take a kB.
_MAX_OBJECTS = 500_000


_MAX_TEXT = 2**20


_WINDOW = 2**14


# The formats of numbers by their first byte.
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


# For objects with a length: the kind, and the number of bytes of the length.
_LENGTHS = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}


_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class Blob(NamedTuple):
    """Bytes left in the file; `code` is the extension type."""

    start: int
    nbytes: int
    code: int | None = None


class Walker:
    """Reads the objects between two positions of a file; `ValueError` if invalid.

    **Attributes:**

    - `position`: where the next object begins.
    """

    def __init__(self, reads: Reads, position: int, end: int) -> None:
        self._reads = reads
        self.position = position
        self._end = end
        self._window = b""
        self._window_start = position
        self._objects = 0

    def object(self, depth: int = 0) -> Any:
        """The next object: maps as dictionaries, and bytes as their positions."""
        self._objects += 1
        if depth > MAX_DEPTH or self._objects > _MAX_OBJECTS:
            raise ValueError("it is nested too deeply, or has too many objects")
        kind, value = self._head()
        if kind == "value":
            return value
        if kind == "str":
            if value > _MAX_TEXT:
                raise ValueError(f"it has a string of {value} bytes")
            return self._take(value).decode()
        if kind == "array":
            return [self.object(depth + 1) for _ in range(self._checked(value))]
        if kind == "map":
            return self._map(self._checked(value), depth)
        code = struct.unpack("b", self._take(1))[0] if kind == "ext" else None
        blob = Blob(self.position, self._checked(value), code)
        self.position += value
        return blob

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.object(depth + 1)
            if type(key) is not str and type(key) is not int:
                raise ValueError(f"a key is {str(key)[:100]!r}")
            if key in found:
                raise ValueError(f"the key {str(key)[:100]!r} is there twice")
            found[key] = self.object(depth + 1)
        return found

    def _head(self) -> tuple[str, Any]:
        """The kind of the next object, and its value or length."""
        (byte,) = self._take(1)
        if byte in _CONSTANTS:
            return "value", _CONSTANTS[byte]
        if byte in _NUMBERS:
            form = _NUMBERS[byte]
            return "value", struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if byte in _LENGTHS:
            kind, width = _LENGTHS[byte]
            return kind, int.from_bytes(self._take(width), "big")
        if byte in _FIXED_EXT:
            return "ext", _FIXED_EXT[byte]
        if byte < 0x80 or byte >= 0xE0:
            return "value", byte if byte < 0x80 else byte - 0x100
        if byte < 0xC0:
            kind = "map" if byte < 0x90 else "array" if byte < 0xA0 else "str"
            return kind, byte & (0x1F if kind == "str" else 0x0F)
        raise ValueError(f"no object begins with {byte:#x}")

    def _checked(self, count: int) -> int:
        """Check a length against the rest of the file: an object has a byte."""
        if count > self._end - self.position:
            raise ValueError("it ends too early")
        return count

    def _take(self, nbytes: int) -> bytes:
        self._checked(nbytes)
        start = self.position - self._window_start
        if start < 0 or start + nbytes > len(self._window):
            size = min(max(_WINDOW, nbytes), self._end - self.position)
            self._window = read_bytes(self._reads, self.position, size)
            self._window_start, start = self.position, 0
        self.position += nbytes
        return self._window[start : start + nbytes]
