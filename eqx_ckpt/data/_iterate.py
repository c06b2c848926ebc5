"""Batches outside `jit`, fetched ahead; `loader` is an `eqx_ckpt.data.Loader`."""

import functools as ft
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ._batching import Batching
from ._cursor import Cursor
from ._gather import narrowed


# Small batches of a quick source are gathered together.
_GROUP_BYTES = 2**20
_MOST = 64


def batches(
    loader: Any,
    cursor: Cursor,
    prefetch: int,
    sharding: Any,
    info: bool,
) -> Iterator[tuple[Any, ...]]:
    groups = _Groups(loader, cursor, sharding, info)
    ahead = -(-prefetch // groups.size)
    if not ahead:
        while True:
            yield from groups.fetch(groups.begin())
    pool = ThreadPoolExecutor(1, "eqx_ckpt data")
    waiting: deque[Future[list[tuple[Any, ...]]]] = deque()
    try:
        while True:
            while len(waiting) <= ahead:
                waiting.append(pool.submit(groups.fetch, groups.begin()))
            yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        # Not waited for: the collector may end this in the thread itself.
        pool.shutdown(wait=False)


class _Groups:
    """Some batches at a time."""

    def __init__(
        self,
        loader: Any,
        cursor: Cursor,
        sharding: Any,
        info: bool,
    ) -> None:
        self._loader = loader
        self._info = info
        self._place = sharding
        if isinstance(sharding, jax.Device):
            self._place = SingleDeviceSharding(sharding)
        # Not made by `Cursor`, which takes 15 times as long.
        self._leaves, self._treedef = jax.tree.flatten(cursor)
        self._epoch, self._position = cursor.epoch, cursor.position
        self.size = loader.cache
        host = loader.host
        if host.source.is_quick and sharding is None:
            structs = jax.tree.leaves(host.source.like)
            row = sum(s.dtype.itemsize * s.size for s in structs)
            fitting = _GROUP_BYTES // max(1, row * loader.batching.batch_size)
            self.size = max(loader.cache, min(_MOST, fitting))

    def begin(self) -> "_Order":
        """Start to compute the order of the next batches."""
        order = _order(
            self._loader.batching,
            self.size,
            self._leaves[0],
            self._epoch,
            self._position,
        )
        self._epoch, self._position = order.epochs[-1], order.positions[-1]
        return order

    def fetch(self, order: "_Order") -> list[tuple[Any, ...]]:
        self._loader.host.check_open()
        numbers = np.asarray(order.numbers)
        rows = self._placed(numbers) if self._place else self._in_memory(numbers)
        seed, _, _, *block = self._leaves
        cursors = [
            self._treedef.unflatten((seed, epoch, position, *block))
            for epoch, position in zip(order.epochs, order.positions, strict=True)
        ]
        if not self._info:
            return list(zip(cursors, rows, strict=True))
        infos = map(self._loader.info_of, np.asarray(order.masks))
        return list(zip(cursors, rows, infos, strict=True))

    def _in_memory(self, numbers: np.ndarray) -> list[PyTree[np.ndarray]]:
        leaves, treedef = jax.tree.flatten(self._loader.host.take(numbers))
        return [treedef.unflatten(leaf) for leaf in zip(*leaves, strict=True)]

    def _placed(self, numbers: np.ndarray) -> list[PyTree[jax.Array]]:
        return [self._global(batch) for batch in numbers]

    def _global(self, numbers: np.ndarray) -> PyTree[jax.Array]:
        """A batch on its devices; only the rows of this process's devices are read."""
        place, like = self._place, self._loader.host.like
        assert isinstance(place, Sharding)
        known: dict[tuple[int, int], PyTree[np.ndarray]] = {}

        def rows_of(index: tuple[slice, ...]) -> PyTree[np.ndarray]:
            start, stop, _ = index[0].indices(len(numbers))
            if (start, stop) not in known:
                known[start, stop] = self._loader.host.take(numbers[start:stop])
            return known[start, stop]

        leaves, treedef = jax.tree.flatten(like)

        def array(position: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                rows = jax.tree.leaves(rows_of(index))[position]
                return narrowed(rows[(slice(None), *index[1:])], struct.dtype)

            shape = (len(numbers), *struct.shape)
            return jax.make_array_from_callback(shape, place, part)

        return treedef.unflatten(array(i, struct) for i, struct in enumerate(leaves))


class _Order(NamedTuple):
    """Of some batches: the rows, and the cursor after each, as scalars."""

    numbers: Any  # uint32[k, batch_size]
    masks: Any  # bool[k, batch_size]
    epochs: list[Any]
    positions: list[Any]


@ft.partial(jax.jit, static_argnums=(0, 1))
def _order(batching: Batching, k: int, seed: Any, epoch: Any, position: Any) -> _Order:
    at = batching.positions(epoch, position, k)
    epochs, positions = list(at.next_epoch), list(at.next_position)
    return _Order(batching.numbers(seed, at), at.mask, epochs, positions)
