"""Find NaNs and infinities in the data of a save."""

import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from .._errors import CheckpointError
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._storage.interface.chunk_bytes import Piece


_MOST_LINES = 20


_EXPONENT = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


class FiniteCheck:
    """Counts the NaNs and infinities of each leaf while its data are written.

    `leaves` are those of the whole step, by name.
    """

    def __init__(self, leaves: Mapping[str, LeafRecord]) -> None:
        self._leaves = leaves
        self._found: dict[str, list[int]] = {}

    def watch(
        self, pieces: Iterable[Piece], leaf_of: Callable[[str], str]
    ) -> Iterator[Piece]:
        """The same pieces, each checked when it is about to be written.

        `leaf_of` returns the leaf that an array is of.
        """
        for piece in pieces:
            if piece.record.kind not in ("key", "bytes"):
                array = from_stored(piece.array, piece.record)
                if not _is_finite(array):
                    self._count(leaf_of(piece.name), array)
            yield piece

    def _count(self, name: str, array: np.ndarray) -> None:
        if (kind := array.dtype.kind) not in "mM":
            array = array.astype(np.complex128 if kind == "c" else np.float64)
        nan = int(np.count_nonzero(np.isnan(array)))
        found = self._found.setdefault(name, [0, 0])
        found[0] += nan
        found[1] += int(np.count_nonzero(~np.isfinite(array))) - nan

    def raise_for_found(self, path: str) -> None:
        """Raise `CheckpointError` that names every leaf that is not finite."""
        lines = [*self._lines()]
        if not lines:
            return
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"- and {len(lines) - _MOST_LINES} more."]
        raise CheckpointError(
            f"{path!r} was not saved, because these leaves are not finite:\n"
            + "\n".join(lines)
            + "\nNo older step was removed: restore one. To save such a tree all the "
            "same, create the manager with `check_finite=False`."
        )

    def _lines(self) -> Iterator[str]:
        for name, record in self._leaves.items():
            if record.value is not None:
                if not _is_finite_number(scalar_from_text(record.kind, record.value)):
                    yield f"- {name!r}: {record} = {record.value}."
            elif name in self._found:
                nan, inf = self._found[name]
                yield f"- {name!r}: {record}: {nan} NaN, {inf} infinite."


def _is_finite_number(value: Any) -> bool:
    parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
    return all(isinstance(part, int) or math.isfinite(part) for part in parts)


def _is_finite(array: np.ndarray) -> bool:
    """Whether an array is free of infinities, of NaNs, and of NaTs among dates."""
    dtype = array.dtype.newbyteorder("=")
    if (mask := _EXPONENT.get(dtype)) is not None and array.dtype.isnative:
        return not ((array.view(np.uint16) & mask) == mask).any()
    if dtype.kind in "fcmM":
        return bool(np.isfinite(array).all())
    codes = _not_finite(dtype)
    return not codes.any() or not codes[array.view(np.uint8)].any()


@ft.cache
def _not_finite(dtype: np.dtype) -> np.ndarray:
    """For an 8-bit float, which of its 256 codes are not finite; no code for others."""
    if dtype.itemsize != 1 or "float" not in dtype.name:
        return np.zeros(256, bool)
    return ~np.isfinite(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32))
