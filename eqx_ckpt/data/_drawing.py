"""Draw batches inside a compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from ._batching import Batching
from ._cursor import Block, Cursor, moved, NOT_FETCHED
from ._host_callback import DeviceRows, gather, Host


class BatchInfo(NamedTuple):
    """The mask and counts of a batch.

    **Attributes:**

    - `mask`: which rows count; `bool[batch_size]`. In the order `"epochs"`, those that
        pad the last batch of an epoch do not; in the others, all do. For a block:
        `bool[k, batch_size]`.
    - `count`: how many rows of the batch count; `int32[]`. For a block: `int32[k]`.
    - `batch_size`: how many rows the batch has.
    - `total`: how many rows the source has.

    !!! example

        ```python
        import eqx_ckpt
        import numpy as np

        source = eqx_ckpt.data.ArrayDataSource(x=np.arange(10.0))
        loader = eqx_ckpt.data.Loader(source, batch_size=4, order="epochs")
        cursor, batches, info = loader.block(loader.start(), 3, info=True)
        assert info.count.tolist() == [4, 4, 2]
        assert info.mask.sum() == info.total == 10
        ```
    """

    mask: Bool[Array | np.ndarray, "*k batch_size"]
    count: Any
    batch_size: int
    total: int


class Drawing(eqx.Module):
    """What a loader draws its batches with.

    **Attributes:**

    - `host`: where the rows are read.
    - `arrays`: all rows, if they are on a device.
    - `batching`: the order of the rows.
    - `cache`: how many batches to fetch at a time.
    """

    host: Host
    arrays: DeviceRows | None
    batching: Batching = eqx.field(static=True)
    cache: int = eqx.field(static=True)

    def check(self, other: PyTree) -> None:
        """Raise if it is closed, or if a program with `other` would keep the rows."""
        self.host.check_open()
        if self.arrays is not None:
            self.arrays.check_are_arguments(other)

    def close(self) -> None:
        self.host.close()
        if self.arrays is not None:
            self.arrays.release()

    def cached(self, block: Block) -> Block:
        """A block with room for as many batches as this loader fetches at a time."""
        if self.arrays is not None or self.cache == 1:
            return block
        size = self.batching.batch_size
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.cache, size, *s.shape), s.dtype), self.host.like
        )
        at, used = jnp.zeros(5, jnp.uint32), jnp.uint32(NOT_FETCHED)
        return Block(rows, at, used, block.settings, block.accept_any)

    def fetch(self, numbers: Array) -> PyTree[Array]:
        """Rows by their numbers; inside `jit`."""
        if self.arrays is None:
            return gather(self.host, numbers)
        return self.arrays.take(numbers)

    def info_of(self, mask: Any) -> BatchInfo:
        """The `BatchInfo` of batches with a mask."""
        count = mask.sum(-1, dtype=np.int32)
        return BatchInfo(
            mask, count, self.batching.batch_size, self.batching.rows.total
        )

    def has_room_in(self, block: Block) -> bool:
        """Whether a block is one that `start` makes."""
        own = eqx.filter_eval_shape(self.cached, block.bare())
        return jax.tree.map(_type_of, own) == jax.tree.map(_type_of, block)


@eqx.filter_jit
def draw_next(drawing: Drawing, cursor: Cursor) -> tuple[Cursor, PyTree[Array], Array]:
    at = drawing.batching.positions(cursor.epoch, cursor.position, 1)
    epoch, position = at.next_epoch[0], at.next_position[0]
    block = jax.lax.stop_gradient(cursor.block)
    if block.used is None or not drawing.has_room_in(block):
        rows = drawing.fetch(drawing.batching.numbers(cursor.seed, at))
        batch = jax.tree.map(lambda x: x[0], rows)
        return moved(cursor, epoch, position), batch, at.mask[0]

    def is_used_up(state: tuple[Any, Array, Any]) -> Array:
        return state[1] >= drawing.cache

    def refill(state: tuple[Any, Array, Any]) -> tuple[Any, Array, Any]:
        (seed, epoch, position), used, _ = state
        ahead = drawing.batching.positions(epoch, position, drawing.cache)
        rows = drawing.fetch(drawing.batching.numbers(seed, ahead))
        at = (seed, ahead.next_epoch[-1], ahead.next_position[-1])
        return at, 0 * used, rows

    # A loop of one iteration or none: `cond` would copy the rows that a scan carries.
    # The fetch depends on the loop's state, or XLA would move it before the loop.
    # Products, not constants: so `vmap` on a mesh shards them as the cursor.
    words = [word + 0 * cursor.seed for word in drawing.host.words]
    now = cursor.seed, cursor.epoch, cursor.position
    is_here = jnp.all(block.at == jnp.stack([*words, *now]))
    used = jnp.where(is_here, block.used, jnp.uint32(NOT_FETCHED))
    _, used, rows = jax.lax.while_loop(is_used_up, refill, (now, used, block.rows))
    batch = jax.tree.map(lambda x: x[used], rows)
    after = jnp.stack([*words, cursor.seed, epoch, position])
    block = eqx.tree_at(
        lambda b: (b.rows, b.at, b.used), block, (rows, after, used + 1)
    )
    return moved(cursor, epoch, position, block), batch, at.mask[0]


@eqx.filter_jit
def draw_block(drawing: Drawing, cursor: Cursor, k: int) -> tuple[Cursor, Any, Array]:
    at = drawing.batching.positions(cursor.epoch, cursor.position, k)
    rows = drawing.fetch(drawing.batching.numbers(cursor.seed, at))
    return moved(cursor, at.next_epoch[-1], at.next_position[-1]), rows, at.mask


@eqx.filter_jit
def map_rows(drawing: Drawing, fn: Callable, carry: Any) -> tuple[Any, Any]:
    count, size = drawing.batching.rows.total, drawing.batching.batch_size
    total = drawing.batching.per_epoch

    def some(start: Array, k: int, carry: Any) -> tuple[Any, Any]:
        """Run over `k` batches, fetched together, from the one numbered `start`."""

        def one(carry: Any, xs: tuple[Any, Array]) -> tuple[Any, Any]:
            return fn(carry, *xs)

        numbers = start * size + jnp.arange(k * size, dtype=jnp.uint32)
        numbers = numbers.reshape(k, size)
        rows = drawing.fetch(numbers % count)
        return jax.lax.scan(one, carry, (rows, numbers < count))

    def full(carry: Any, block: Array) -> tuple[Any, Any]:
        return some(block * drawing.cache, drawing.cache, carry)

    blocks, rest = divmod(total, drawing.cache)
    found: list[Any] = []
    if blocks:
        turns = jnp.arange(blocks, dtype=jnp.uint32)
        carry, results = jax.lax.scan(full, carry, turns)
        found.append(
            jax.tree.map(lambda x: x.reshape(total - rest, *x.shape[2:]), results)
        )
    if rest:
        carry, results = some(jnp.uint32(total - rest), rest, carry)
        found.append(results)
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *found)


def _type_of(array: Any) -> tuple[Any, Any]:
    return array.shape, array.dtype
