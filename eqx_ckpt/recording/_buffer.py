"""Samples that stay on the device."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._format.recorded import Leaf
from ._leaves import checked_samples, leaves_of


def put(buffer: Array, sample: Any, index: Any) -> Array:
    """Put one sample for each leading axis into a row, if there is that row."""
    lead = index.shape
    count = math.prod(lead)
    flat = buffer.reshape(count, *buffer.shape[len(lead) :])
    values = sample.reshape(count, *sample.shape[len(lead) :])
    rows = (jnp.arange(count), index.reshape(count))
    return flat.at[rows].set(values, mode="drop").reshape(buffer.shape)


class SampleBuffer(eqx.Module):
    """A fixed number of samples on the device; nothing is written.

    It is an `equinox.Module`: carry it through loops, under any transformation.

    **Attributes:**

    - `samples`: arrays `(capacity, ...)`, of which the first `count` rows are samples,
        and the others are zeros.
    - `count`: how many samples it has; `int32[]`.
    - `overflow`: how many more there were, which it does not have; `int32[]`.

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp

        @jax.jit
        def run(buffer):
            def step(i, buffer):
                return buffer.save({"x": i * 1.0}, keep=i % 2 == 0)

            return jax.lax.fori_loop(0, 5, step, buffer)

        buffer = run(eqx_ckpt.SampleBuffer({"x": jnp.float32(0)}, capacity=10))
        assert buffer.samples["x"][: buffer.count].tolist() == [0, 2, 4]
        ```
    """

    samples: PyTree[Array]
    count: Array
    overflow: Array
    _leaves: tuple[Leaf, ...] = eqx.field(static=True)

    def __init__(self, like: PyTree, capacity: int) -> None:
        """**Arguments:**

        - `like`: one sample: a PyTree of arrays, or of `jax.ShapeDtypeStruct`s.
        - `capacity`: how many samples there is room for.
        """
        if capacity < 1:
            raise ValueError(f"`capacity` is {capacity}. Pass a positive integer.")
        self._leaves = tuple(leaves_of(like, None, None, None))
        self.samples = jax.tree.map(
            lambda x: jnp.zeros((capacity, *x.shape), x.dtype), like
        )
        self.count = self.overflow = jnp.int32(0)

    def save(self, sample: PyTree, keep: Any = True) -> "SampleBuffer":
        """The buffer with one sample more.

        **Arguments:**

        - `sample`: as `like`.
        - `keep`: whether to take it; `bool[]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the sample is not as `like`.
        """
        checked_samples(sample, self._leaves, None, one=True, traced=True)
        capacity = jax.tree.leaves(self.samples)[0].shape[0]
        keep = jnp.asarray(keep)
        index = jnp.where(keep, self.count, capacity)
        is_full = self.count == capacity
        samples = jax.tree.map(
            lambda buffer, x: put(buffer, jnp.asarray(x), index), self.samples, sample
        )
        return eqx.tree_at(
            lambda b: (b.samples, b.count, b.overflow),
            self,
            (
                samples,
                self.count + (keep & ~is_full),
                self.overflow + (keep & is_full),
            ),
        )
