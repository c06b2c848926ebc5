"""JSON of other programs: bounded, and without duplicate keys."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.chunk_grid import chunk_shape
from ..._format.dtype_names import OF_JAX
from ..._format.leaf_names import (
    encode,
    inside_others,
    joined,
    MAX_LEVELS,
    too_many_levels,
)
from ..._format.leaf_record import CannotSave, LeafRecord, tag_and_data_type
from ..._format.manifest import check_array, Manifest
from ..._types import TypedPath


# Each costs the parser up to 100 bytes.
_MAX_TOKENS = 16_000_000


def parse_object(data: bytes, where: object, format: str) -> dict[str, Any]:
    """A JSON object; raises `CorruptCheckpointError` for anything else."""
    if sum(map(data.count, (b"[", b"{", b",", b":"))) > _MAX_TOKENS:
        raise corrupt(where, format, "it has too many values")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as e:
        raise corrupt(where, format, f"no JSON ({str(e)[:200]})") from None
    if not isinstance(found, dict):
        raise corrupt(where, format, "its JSON is not an object")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name[:200]!r} is there twice")
        entries[name] = value
    return entries


# The dtypes to which JAX narrows 64 bits while x64 is off.
NARROWED = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
}


_SURROGATE = re.compile("[\ud800-\udfff]")


_POSITION = re.compile(r"(0|[1-9]\d{0,17})\Z", re.ASCII)


class Named(NamedTuple):
    """A leaf of another format: its name there, and its record."""

    text: str
    record: LeafRecord


class Unreadable(str):
    """Stands for a value of another format that this package cannot represent."""


def corrupt(where: object, format: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{str(where)!r} is not a valid {format}: {reason}. Nothing was read from it."
    )


def is_unicode(*texts: str) -> bool:
    """Whether texts can be encoded: Python's may have halves of surrogate pairs."""
    return not any(map(_SURROGATE.search, texts))


def position_or_key(text: str) -> tuple[str, str | int]:
    """One entry of a key path: digits are a position."""
    return ("index", int(text)) if _POSITION.match(text) else ("key", text)


def split(text: str, separators: str = ".") -> TypedPath:
    """The key path of a name such as `"layers.0.weight"`."""
    return read_as((("key", text),), separators)


def read_as(path: TypedPath, separators: str) -> TypedPath:
    """The key path that is read where a format joins keys, and splits them again."""
    return tuple(map(position_or_key, joined(path, separators)))


def clashes(named: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of texts whose names are equal, or of which one is in the other."""
    texts: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for text, name in named:
        if name in texts:
            found.append((texts[name], text))
        texts.setdefault(name, text)
    return found + [(texts[a], texts[b]) for a, b in inside_others(texts)]


def array_record(
    dtype: np.dtype, shape: tuple[int, ...], path: TypedPath
) -> LeafRecord:
    """The record of an array from a format that does not distinguish JAX and NumPy.

    It is a JAX array, unless JAX would narrow it without x64, or lacks its dtype.
    `CannotSave` for what this package cannot represent.
    """
    if len(path) > MAX_LEVELS:
        raise CannotSave(f"has too long a name: {too_many_levels(path)}")
    tag, data_type = tag_and_data_type(dtype)
    is_numpy = tag in NARROWED or tag not in OF_JAX
    record = LeafRecord(
        "numpy" if is_numpy else "jax",
        dtype=tag,
        shape=shape,
        data_type=data_type,
        data_shape=shape,
        chunk_shape=chunk_shape(shape, shape, dtype.itemsize),
        path=path,
    )
    check_array(record)
    return record


def manifest_of(
    leaves: list[Named],
    where: object,
    *,
    unsaved: Mapping[str, str] | None = None,
    metadata: Any = None,
    separators: str | None = None,
) -> Manifest:
    """The manifest of a source; `unsaved` says what its other values are.

    `separators` are as those of `Manifest`.

    **Raises:**

    - `LeafNameError`: two leaves have the same name, or one is inside the other.
    """
    records = {encode(record.path): record for _, record in leaves}
    if found := clashes((text, encode(record.path)) for text, record in leaves):
        raise LeafNameError(
            f"{str(where)!r} has leaves whose names are equal, or inside of another "
            "one, once they are split into keys:\n"
            + "\n".join(f"- {a!r} and {b!r}." for a, b in sorted(found)[:20])
            + "\nRename one of each, with the library that wrote them."
        )
    notes = {name: Unreadable(note) for name, note in (unsaved or {}).items()}
    return Manifest(records, notes, metadata, separators=separators)
