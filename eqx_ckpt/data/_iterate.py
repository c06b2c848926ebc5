"""Batches outside `jit`, fetched ahead; `loader` is an `eqx_ckpt.data.Loader`."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

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
    try:
        waiting: deque[Future[list[tuple[Any, ...]]]] = deque()
        while True:
            while len(waiting) <= ahead:
                waiting.append(pool.submit(groups.fetch, groups.begin()))
            yield from waiting.popleft().result()
    finally:
        # Not waited for: the collector may end this in the thread itself.
        pool.shutdown(wait=False, cancel_futures=True)


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
        self._leaves, self._treedef = jax.tree.flatten(cursor)
        self._epoch, self._position = cursor.epoch, cursor.position
        self.size = loader.cache
        if loader.source.is_quick and sharding is None:
            row = sum(
                s.dtype.itemsize * s.size for s in jax.tree.leaves(loader.source.like)
            )
            fitting = _GROUP_BYTES // max(1, row * loader.batch_size)
            self.size = max(loader.cache, min(_MOST, fitting))

    def begin(self) -> Any:
        """Start to compute the order of the next batches."""
        order = _order(
            self._loader, self._leaves[0], self._epoch, self._position, self.size
        )
        self._epoch, self._position = order[0][-1], order[1][-1]
        return order

    def fetch(self, order: Any) -> list[tuple[Any, ...]]:
        epochs, positions, masks, numbers = (np.asarray(part) for part in order)
        self._loader.host.check_open()
        rows = self._placed(numbers) if self._place else self._in_memory(numbers)
        cursors = self._cursors(epochs, positions)
        if not self._info:
            return list(zip(cursors, rows, strict=True))
        infos = map(self._loader.info_of, masks)
        return list(zip(cursors, rows, infos, strict=True))

    def _cursors(self, epochs: np.ndarray, positions: np.ndarray) -> list[Cursor]:
        seed, _, _, *rest = self._leaves
        found = jax.device_put([*epochs, *positions])
        return [
            self._treedef.unflatten([seed, epoch, position, *rest])
            for epoch, position in zip(
                found[: len(epochs)], found[len(epochs) :], strict=True
            )
        ]

    def _in_memory(self, numbers: np.ndarray) -> list[PyTree[np.ndarray]]:
        rows = self._loader.source.take(numbers.reshape(-1))
        leaves, treedef = jax.tree.flatten(rows)
        cut = [leaf.reshape(*numbers.shape, *leaf.shape[1:]) for leaf in leaves]
        return [treedef.unflatten(leaf) for leaf in zip(*cut, strict=True)]

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
                known[start, stop] = self._loader.source.take(numbers[start:stop])
            return known[start, stop]

        leaves, treedef = jax.tree.flatten(like)

        def array(position: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                rows = jax.tree.leaves(rows_of(index))[position]
                return narrowed(rows[(slice(None), *index[1:])], struct.dtype)

            shape = (len(numbers), *struct.shape)
            return jax.make_array_from_callback(shape, place, part)

        return treedef.unflatten(array(i, struct) for i, struct in enumerate(leaves))


@eqx.filter_jit
def _order(loader: Any, seed: Any, epoch: Any, position: Any, k: int) -> Any:
    at = loader.positions(epoch, position, k)
    return at.next_epoch, at.next_position, at.mask, loader.numbers(seed, at)
