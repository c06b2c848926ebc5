"""Collect samples in device memory."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from .._format.sample_record import Leaf
from .._types import check_integer
from ._writing._sample_leaves import (
    check_on_device,
    checked_keep,
    checked_samples,
    leaves_of,
)


def put(buffer: Array, sample: Any, index: Any) -> Array:
    """Write one sample per chain into its row; drop it if there is no such row."""
    # Without reshaping the buffer: XLA would copy all of it for each sample.
    lead = jnp.indices(index.shape, sparse=True) if index.ndim else ()
    return buffer.at[(*lead, index)].set(sample, mode="drop")


def gathered(tree: Any) -> Any:
    """Arrays that no `Explicit` axis shards, as those that collect them."""

    def whole(array: Array) -> Array:
        sharding: Any = jax.typeof(array).sharding
        if not any(sharding.spec):
            return array
        return jax.sharding.reshard(array, NamedSharding(sharding.mesh, P()))

    return jax.tree.map(whole, tree)


def _as_typed(*trees: Any) -> Any:
    """The same arrays, on `Explicit` axes each as a function of all of them.

    Inside `vmap`, they are then all sharded alike: it broadcasts an array that is not
    mapped to one that is not sharded, which a scatter cannot combine with others.
    """
    arrays = jax.tree.leaves(trees)
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return trees
    never = functools.reduce(
        lambda never, array: never & jnp.any(array == array), arrays, jnp.bool(False)
    )
    return jax.tree.map(lambda array: jnp.where(never, array, array), trees)


class SampleBuffer(eqx.Module):
    """A buffer of samples in device memory, with a fixed capacity; it writes no files.

    It is an `equinox.Module`: carry it through loops, under any transformation.

    **Attributes:**

    - `samples`: arrays `(capacity, ...)`. The first `count` rows are samples, the
        others zeros.
    - `count`: the number of samples in the buffer; `int32[]`.
    - `overflow`: the number of samples dropped because the buffer was full; `int32[]`.

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

        like = {"x": jnp.float32(0)}
        buffer = run(eqx_ckpt.recording.SampleBuffer(like, capacity=10))
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
        - `capacity`: the largest number of samples that the buffer holds.
        """
        capacity = check_integer("capacity", capacity, 1)
        self._leaves = tuple(leaves_of(like, None, None, None))
        check_on_device(self._leaves)
        self.samples = jax.tree.map(
            lambda x: jnp.zeros((capacity, *x.shape), x.dtype), like
        )
        # Two arrays: JAX refuses to donate one array twice.
        self.count, self.overflow = jnp.int32(0), jnp.int32(0)

    def save(self, sample: PyTree, keep: Any = True) -> "SampleBuffer":
        """Return the buffer with one more sample.

        **Arguments:**

        - `sample`: a PyTree like `like`.
        - `keep`: whether to add the sample; `bool[]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the sample does not match `like`.
        - `ValueError`: `keep` has a different shape or dtype.
        """
        check_on_device(self._leaves)
        checked = checked_samples(sample, self._leaves, None, one=True, traced=True)
        capacity = jax.tree.leaves(self.samples)[0].shape[0]
        arrays = gathered([jnp.asarray(x) for x in checked.arrays])
        keep = gathered(checked_keep(keep, (), ()))
        buffers, structure = jax.tree.flatten(self.samples)
        buffers, count, overflow, keep, arrays = _as_typed(
            buffers, self.count, self.overflow, keep, arrays
        )
        index = jnp.where(keep, count, capacity)
        is_full = count == capacity
        samples = structure.unflatten(
            put(buffer, x, index) for buffer, x in zip(buffers, arrays, strict=True)
        )
        return eqx.tree_at(
            lambda b: (b.samples, b.count, b.overflow),
            self,
            (
                samples,
                count + (keep & ~is_full).astype(jnp.int32),
                overflow + (keep & is_full).astype(jnp.int32),
            ),
        )
