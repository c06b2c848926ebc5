"""What a loader needs of a source: rows that can be read in any order."""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from .._types import KeyPath
from ._order import Rows


class DataSource:
    """Rows that a loader draws; it reads them through a `RowReader`."""

    _reader: "RowReader"


def reader_of(source: DataSource) -> "RowReader":
    return source._reader  # pyright: ignore[reportPrivateUsage]


class RowReader(abc.ABC):
    """Reads rows of the same structure, in any order.

    **Attributes:**

    - `rows`: their number, and how they are stored.
    - `like`: one row, as a PyTree of `jax.ShapeDtypeStruct`s.
    - `is_quick`: whether reading a row takes about as long as copying it.
    """

    rows: Rows
    like: PyTree[jax.ShapeDtypeStruct]
    is_quick = False

    @property
    def on_device(self) -> PyTree[Array] | None:
        """Arrays with all rows, if they have to be on a device."""
        return None

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> PyTree[np.ndarray]:
        """Rows by their numbers: arrays of which the first axis is that of `indices`.

        **Arguments:**

        - `indices`: integers of one axis, in any order.
        """

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Write rows to arrays, one for each leaf; raise if an integer does not fit.

        **Arguments:**

        - `indices`: as `take`. They and the arrays are valid only during the call.
        - `out`: of the leaves' shapes and, but for their width, dtypes.
        """
        rows = jax.tree.leaves(self.take_all(indices.copy()))
        for array, found in zip(out, rows, strict=True):
            array[...] = narrowed(found, array.dtype)

    def take_all(self, indices: np.ndarray) -> PyTree[np.ndarray]:
        """`take`, which must give as many rows as are asked for, as in `like`."""
        rows = self.take(indices)

        def check(path: KeyPath, like: jax.ShapeDtypeStruct, found: Any) -> None:
            expected = (len(indices), *like.shape)
            if found.shape != expected or found.dtype != like.dtype:
                raise RuntimeError(
                    f"{name_of(path)} of {len(indices)} rows is {found.dtype}"
                    f"{list(found.shape)}, and not {like.dtype}{list(expected)}: the "
                    "source gave others than it was asked for."
                )

        jtu.tree_map_with_path(check, self.like, rows)
        return rows

    def close(self) -> None:  # noqa: B027 (most readers hold nothing)
        """Release what the reader holds."""


def as_in_jax(dtype: np.dtype) -> np.dtype:
    """The dtype that `jax.numpy.asarray` gives: without x64, of 32 bits at most."""
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def narrowed(array: Any, dtype: np.dtype) -> Any:
    """Convert an array to a dtype of JAX; raise if integers would change."""
    if array.dtype == dtype:
        return array
    found = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(found, array):
        raise OverflowError(
            f"A row has integers of {array.dtype} that do not fit into {dtype}, JAX's "
            "integers without x64. Convert the data, or set `jax_enable_x64`."
        )
    return found


def name_of(path: KeyPath) -> str:
    return repr(jtu.keystr(path, simple=True, separator="/")) if path else "The row"
