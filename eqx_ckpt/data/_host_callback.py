"""Fetching rows from the host or from arrays on devices, inside `jit`."""

import functools as ft
import secrets
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, UInt32

from ._row_reader import as_in_jax, narrowed, RowReader


class Host:
    """What reads the rows of a loader; a PyTree without leaves.

    JAX keeps compiled programs for ever. They know a host by its number alone, so that
    the data are freed with the loader.
    """

    def __init__(self, reader: RowReader | None, number: int | None = None) -> None:
        self._reader = reader
        self.like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, as_in_jax(s.dtype)),
            None if reader is None else reader.like,
        )
        # Random, as a cursor with batches of this host may go to another process.
        self.number = secrets.randbits(64) if number is None else number
        if reader is not None:
            _open[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Host, (self._reader,)

    @property
    def reader(self) -> RowReader:
        """What reads the rows; `RuntimeError` if the loader is closed."""
        self.check_open()
        assert self._reader is not None
        return self._reader

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    def check_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("The loader is closed. Create a new one.")

    def close(self) -> None:
        _open.pop(self.number, None)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def take(self, numbers: np.ndarray) -> PyTree[np.ndarray]:
        """Rows by their numbers, whose shape becomes the leading axes."""
        rows = self.reader.take_all(numbers.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*numbers.shape, *x.shape[1:]), rows)

    def answer(self, numbers: Any) -> PyTree[np.ndarray]:
        """Rows of JAX's dtypes, by their numbers."""
        rows = self.take(np.asarray(numbers))
        return jax.tree.map(lambda x, s: narrowed(x, s.dtype), rows, self.like)

    def fill(self, out: PyTree[Any], numbers: Any) -> None:
        """Write rows to the memory of a compiled program, which is that of the host."""
        reader, indices = self.reader, np.asarray(numbers).reshape(-1)
        leaves = zip(jax.tree.leaves(out), jax.tree.leaves(self.like), strict=True)
        arrays = [
            np.asarray(leaf).reshape(indices.size, *s.shape) for leaf, s in leaves
        ]
        reader.fill(indices, arrays)

    @property
    def words(self) -> tuple[np.uint32, np.uint32]:
        """The number, in arrays of JAX."""
        return np.uint32(self.number >> 32), np.uint32(self.number % 2**32)


_open: weakref.WeakValueDictionary[int, Host] = weakref.WeakValueDictionary()


def _host(number: int) -> Host:
    """The host of this number, which is closed if nobody has it any more."""
    return _open.get(number) or Host(None, number)


# A compiled function whose argument was closed is traced again, and finds that.
jtu.register_pytree_node(
    Host,
    lambda host: ((), (host.number, host.is_open)),
    lambda aux, _: _host(aux[0]) if aux[1] else Host(None, aux[0]),
)


class DeviceRows:
    """The arrays of a loader on a device, which it can release; a PyTree of them."""

    def __init__(self, arrays: PyTree) -> None:
        self.arrays = arrays

    def release(self) -> None:
        self.arrays = None

    def check_are_arguments(self, other: PyTree) -> None:
        """Raise if a program whose argument is `other` would keep a copy of them."""
        # Under `vmap` alone, there is no program, so that a new array is not traced.
        if (
            _is_traced(other)
            and not _is_traced(self.arrays)
            and _is_traced(jnp.zeros(()))
        ):
            raise ValueError(
                "A compiled function closes over a loader with `on_device=True`, so "
                "that the program would keep a copy of all rows. Pass the loader to it "
                "as an argument, with `equinox.filter_jit`."
            )

    def take(self, numbers: Array) -> PyTree[Array]:
        """Rows by their numbers; inside `jit`."""
        return jax.tree.map(ft.partial(_taken, numbers), self.arrays)


jtu.register_pytree_node(
    DeviceRows, lambda rows: ((rows.arrays,), None), lambda _, found: DeviceRows(*found)
)


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _fill(number: int, context: Any, out: PyTree[Any], numbers: Any) -> None:
    _host(number).fill(out, numbers)


def _answer(number: int, numbers: Any) -> PyTree[np.ndarray]:
    return _host(number).answer(numbers)


def gather(host: Host, numbers: UInt32[Array, "k batch_size"]) -> PyTree[Array]:
    """Fetch rows by their numbers, through a callback that only gathers."""
    like, number = host.like, host.number

    def batches(dtypes: PyTree[np.dtype]) -> PyTree[jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda s, dtype: jax.ShapeDtypeStruct((*numbers.shape, *s.shape), dtype),
            like,
            dtypes,
        )

    dtypes = jax.tree.map(lambda s: s.dtype, like)

    def on_cpu(numbers: Array) -> PyTree[Array]:
        shapes = batches(jax.tree.map(_of_whole_bytes, dtypes))
        rows = buffer_callback(
            ft.partial(_fill, number), shapes, vmap_method="broadcast_all"
        )(numbers)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), rows, dtypes)

    def elsewhere(numbers: Array) -> PyTree[Array]:
        return jax.pure_callback(
            ft.partial(_answer, number),
            batches(dtypes),
            numbers,
            vmap_method="broadcast_all",
        )

    rows = jax.lax.platform_dependent(numbers, cpu=on_cpu, default=elsewhere)
    mesh = jax.typeof(numbers).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return rows
    # What a callback returns is on no mesh, so that `vmap` cannot shard it by itself.
    return jax.sharding.reshard(rows, NamedSharding(mesh, PartitionSpec()))


def _of_whole_bytes(dtype: Any) -> np.dtype:
    """The dtype, or one that holds its values: a program packs those below 8 bits."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.dtype(np.float32)
    return dtype


def _taken(numbers: Array, array: Array) -> Array:
    """Rows of an array."""
    is_sharded = any(jax.typeof(array).sharding.spec)
    take = _taken_on_mesh if is_sharded else _taken_at
    return take(numbers, array)


def _taken_at(numbers: Array, array: Array, sharding: Any = None) -> Array:
    return array.at[numbers].get(mode="promise_in_bounds", out_sharding=sharding)


def _taken_sharded(numbers: Array, array: Array) -> Array:
    """Rows of an array on `Explicit` axes, sharded as their numbers and as the array.

    An axis that shards the numbers cannot shard the rows too. With a rule of its own,
    `vmap` adds its axis to the numbers, so that all of their axes are known here.
    """
    mesh, spec = jax.typeof(array).sharding.mesh, jax.typeof(array).sharding.spec
    first = jax.typeof(numbers).sharding.spec
    used = {name for axis in first for name in _names(axis)}
    rest = [None if used & {*_names(axis)} else axis for axis in spec[1:]]
    kept = NamedSharding(mesh, PartitionSpec(spec[0], *rest))
    array = jax.sharding.reshard(array, kept)
    return _taken_at(numbers, array, NamedSharding(mesh, PartitionSpec(*first, *rest)))


def _taken_of_all(size: int, is_batched: Any, *args: Array) -> tuple[Array, bool]:
    if is_batched[1]:
        raise ValueError("A loader was passed through `vmap`. Pass only its cursors.")
    return _taken_on_mesh(*args), True


_taken_on_mesh = custom_vmap(_taken_sharded)
_taken_on_mesh.def_vmap(_taken_of_all)


def _names(axis: Any) -> tuple[str, ...]:
    """The axes of a mesh that shard one dimension."""
    return axis if isinstance(axis, tuple) else () if axis is None else (axis,)
