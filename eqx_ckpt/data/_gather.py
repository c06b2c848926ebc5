"""Fetching rows from the host, inside `jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jaxtyping import Array, PyTree, UInt32

from ._sources import as_in_jax, narrowed, Source


class Host:
    """The source of a loader, and whether it is closed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, as_in_jax(s.dtype)), source.like
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

    def answer(self, numbers: Any) -> PyTree[np.ndarray]:
        """Rows of JAX's dtypes, by their numbers."""
        rows = self.take(np.asarray(numbers))
        return jax.tree.map(lambda x, s: narrowed(x, s.dtype), rows, self.like)

    def fill(self, context: Any, out: PyTree[Any], numbers: Any) -> None:
        """Write rows to the memory of a compiled program, which is that of the host."""
        indices = np.asarray(numbers).reshape(-1)
        leaves = zip(jax.tree.leaves(out), jax.tree.leaves(self.like), strict=True)
        arrays = [
            np.asarray(leaf).reshape(indices.size, *s.shape) for leaf, s in leaves
        ]
        self.source.fill(indices, arrays)


def gather(host: Host, numbers: UInt32[Array, "k batch_size"]) -> PyTree[Array]:
    """Fetch rows by their numbers, through a callback that only gathers."""

    def batches(dtypes: PyTree[np.dtype]) -> PyTree[jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda s, dtype: jax.ShapeDtypeStruct((*numbers.shape, *s.shape), dtype),
            host.like,
            dtypes,
        )

    dtypes = jax.tree.map(lambda s: s.dtype, host.like)

    def on_cpu(numbers: Array) -> PyTree[Array]:
        shapes = batches(jax.tree.map(_of_whole_bytes, dtypes))
        rows = buffer_callback(host.fill, shapes, vmap_method="broadcast_all")(numbers)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), rows, dtypes)

    def elsewhere(numbers: Array) -> PyTree[Array]:
        return jax.pure_callback(
            host.answer, batches(dtypes), numbers, vmap_method="broadcast_all"
        )

    return jax.lax.platform_dependent(numbers, cpu=on_cpu, default=elsewhere)


def _of_whole_bytes(dtype: Any) -> np.dtype:
    """The dtype, or one that holds its values: a program packs those below 8 bits."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.dtype(np.float32)
    return dtype
