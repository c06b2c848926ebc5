"""Batches outside `jit`, fetched ahead."""

import functools as ft
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from .._errors import CheckpointError
from .._storage.calls.threads import Pool
from ._batching import Batching
from ._cursor import Cursor
from ._drawing import Drawing
from ._row_reader import as_in_jax, name_of, narrowed


# Small batches of a quick source are gathered in one group.
_GROUP_BYTES = 2**22


_MOST = 128


def checked_sharding(
    sharding: Any, batch_size: int, like: PyTree[jax.ShapeDtypeStruct]
) -> Sharding | None:
    """The sharding of all arrays of a batch, whose rows are `like`."""
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if sharding is None:
        return None
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"`sharding` is a {type(sharding).__name__}. Pass a `Sharding`, such as "
            "`jax.sharding.NamedSharding(mesh, jax.P('data'))`, or a device."
        )
    for path, struct in jtu.tree_leaves_with_path(like):
        shape = (batch_size, *struct.shape)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        try:
            if len(spec) > len(shape):
                raise ValueError("has more dimensions")
            sharding.shard_shape(shape)
        except ValueError as e:
            raise ValueError(
                f"`sharding` is {sharding}, which does not fit {name_of(path)} of a "
                f"batch, {struct.dtype}{list(shape)}: {e}. Pass one that fits all "
                "arrays, such as one for the first axis only."
            ) from None
    return sharding


def batches(
    drawing: Drawing,
    cursor: Cursor,
    prefetch: int,
    sharding: Sharding | None,
    info: bool,
) -> Iterator[tuple[Any, ...]]:
    groups = _Groups(drawing, cursor, sharding, info)
    return _drawn(groups, -(-prefetch // groups.size))


def _drawn(groups: "_Groups", ahead: int) -> Iterator[tuple[Any, ...]]:
    """The batches of one group after another, of which some are fetched ahead."""
    if not ahead:
        while True:
            order = groups.begin()
            yield from groups.with_cursors(order, groups.fetch(order))
    pool, process = Pool(1, "eqx_ckpt data"), os.getpid()
    waiting: deque[tuple[_Order, Future[list[PyTree]]]] = deque()
    try:
        while True:
            if os.getpid() != process:
                raise CheckpointError(
                    "A thread fetches these batches in the process that made the "
                    "iterator, of which this one is a fork. Iterate there, or start "
                    "this process by `spawn`."
                )
            while len(waiting) <= ahead:
                order = groups.begin()
                waiting.append((order, pool.submit(groups.fetch, order)))
            order, future = waiting.popleft()
            yield from groups.with_cursors(order, future.result())
    finally:
        for _, future in waiting:
            future.cancel()
        # No wait: the garbage collector may run this in the thread itself.
        pool.shutdown(wait=False)


class _Groups:
    """Batches, fetched in groups."""

    def __init__(
        self,
        drawing: Drawing,
        cursor: Cursor,
        sharding: Sharding | None,
        info: bool,
    ) -> None:
        self._drawing = drawing
        self._info = info
        self._place = sharding
        # Unflattened, which takes a fifteenth of the time of `Cursor(...)`.
        leaves, self._treedef = jax.tree.flatten(cursor, lambda x: x is cursor.block)
        *integers, block = leaves
        # Cursors that shared the memory of batches could not be donated.
        self._block = block.bare()
        # A step may donate the cursor.
        self._seed, *self._begun = map(jnp.copy, integers)
        # Another thread, and the next call, may have another x64.
        self._like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, as_in_jax(s.dtype)),
            drawing.host.like,
        )
        self.size = drawing.cache
        host = drawing.host
        if host.reader.is_quick and sharding is None:
            structs = jax.tree.leaves(host.reader.like)
            row = sum(s.dtype.itemsize * s.size for s in structs)
            fitting = _GROUP_BYTES // max(1, row * drawing.batching.batch_size)
            self.size = max(drawing.cache, min(_MOST, fitting))

    def begin(self) -> "_Order":
        """Start computing the order of the next group."""
        order = _order(self._drawing.batching, self.size, self._seed, *self._begun)
        self._begun = order.last
        return order

    def fetch(self, order: "_Order") -> list[PyTree]:
        numbers = np.asarray(order.numbers)
        if self._place is None:
            return self._in_memory(numbers)
        return [self._global(batch, self._place) for batch in numbers]

    def with_cursors(self, order: "_Order", rows: list[PyTree]) -> Iterator[tuple]:
        """The batches of a group, each with the cursor after it."""
        apart = _apart(self._seed, order.epochs, order.positions)
        cursors = (
            self._treedef.unflatten((*integers, self._block))
            for integers in zip(*apart, strict=True)
        )
        parts: list[Iterable[Any]] = [cursors, rows]
        if self._info:
            parts.append(map(self._drawing.info_of, np.asarray(order.masks)))
        for batch in zip(*parts, strict=True):
            self._drawing.host.check_open()
            yield batch

    def _in_memory(self, numbers: np.ndarray) -> list[PyTree[np.ndarray]]:
        leaves, treedef = jax.tree.flatten(self._drawing.host.take(numbers))
        return [treedef.unflatten(leaf) for leaf in zip(*leaves, strict=True)]

    def _global(self, numbers: np.ndarray, place: Sharding) -> PyTree[jax.Array]:
        """A batch on its devices; only the rows of this process's devices are read."""
        leaves, treedef = jax.tree.flatten(self._like)
        shapes = [(len(numbers), *struct.shape) for struct in leaves]
        spans = {
            _span(index, len(numbers))
            for shape in shapes
            for index in place.addressable_devices_indices_map(shape).values()
        }
        rows = {
            span: jax.tree.leaves(self._drawing.host.take(numbers[slice(*span)]))
            for span in spans
        }

        def array(position: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                some = rows[_span(index, len(numbers))][position]
                return narrowed(some[(slice(None), *index[1:])], struct.dtype)

            return jax.make_array_from_callback(shapes[position], place, part)

        # Without it, JAX would wrap wide integers. It is not for the data set.
        with jax.enable_x64(True):
            return treedef.unflatten(
                array(i, struct) for i, struct in enumerate(leaves)
            )


def _span(index: Any, size: int) -> tuple[int, int]:
    """Which rows are on a device."""
    start, stop, _ = index[0].indices(size)
    return start, stop


class _Order(NamedTuple):
    """Of some batches: the rows, and the cursor after each."""

    numbers: Any  # uint32[k, batch_size]
    masks: Any  # bool[k, batch_size]
    epochs: Any  # uint32[k]
    positions: Any  # uint32[k]
    last: tuple[Any, Any]  # of `epochs` and of `positions`


@ft.partial(jax.jit, static_argnums=(0, 1))
def _order(batching: Batching, k: int, seed: Any, epoch: Any, position: Any) -> _Order:
    at = batching.positions(epoch, position, k)
    last = at.next_epoch[-1], at.next_position[-1]
    numbers = batching.numbers(seed, at)
    return _Order(numbers, at.mask, at.next_epoch, at.next_position, last)


@jax.jit
def _apart(seed: Any, epochs: Any, positions: Any) -> list[list[Any]]:
    """For each cursor, arrays of its own, which a step may donate.

    It takes a thirtieth of the time of indexing.
    """
    return [list(jnp.full_like(epochs, seed)), list(epochs), list(positions)]
