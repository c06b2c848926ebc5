"""Fetching rows from the host, inside `jit`."""

import functools as ft

import jax
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from ._sources import Source


# Before JAX 0.12, a callback with an argument of 100 KiB or more may deadlock on
# several CPU devices, so the numbers of rows are passed in pieces.
_PIECE = 2**14


class Host:
    """The source of a loader, and whether it is closed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        # As `jax.numpy.asarray` would: without x64, of 32 bits at most.
        self.like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(
                s.shape, jax.dtypes.canonicalize_dtype(s.dtype)
            ),
            source.like,
        )
        self._is_closed = False

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The loader is closed. Make a new one.")

    def close(self) -> None:
        self._is_closed = True
        self.source.close()

    def take(self, numbers: np.ndarray) -> PyTree[np.ndarray]:
        """Rows by their numbers, whose shape becomes the leading axes."""
        rows = self.source.take(numbers.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*numbers.shape, *x.shape[1:]), rows)

    def answer(self, shape: tuple[int, ...], *pieces: Array) -> PyTree[np.ndarray]:
        """Rows of shape `shape`; under `vmap`, the pieces have more leading axes."""
        numbers = np.concatenate([np.asarray(piece) for piece in pieces], axis=-1)
        rows = self.take(numbers.reshape(*numbers.shape[:-1], *shape))
        return jax.tree.map(lambda x, s: narrowed(x, s.dtype), rows, self.like)


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
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


def gather(host: Host, numbers: UInt32[Array, "k batch_size"]) -> PyTree[Array]:
    """Fetch rows by their numbers, through a callback that only gathers."""
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct((*numbers.shape, *s.shape), s.dtype), host.like
    )
    flat = numbers.reshape(-1)
    pieces = [flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE)]
    answer = ft.partial(host.answer, numbers.shape)
    return jax.pure_callback(answer, shapes, *pieces, vmap_method="broadcast_all")
