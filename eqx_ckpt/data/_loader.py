"""Batches of a source, in an order that is a function of the cursor alone."""

from collections.abc import Callable, Iterator
from typing import Any, get_args, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from ._batching import Batching
from ._cursor import Block, Cursor, NOT_FETCHED
from ._host_callback import DeviceRows, gather, Host
from ._order import Order
from ._prefetch import batches, checked_sharding
from ._row_sources import check_count, is_a, is_integer, Source


class BatchInfo(NamedTuple):
    """The mask and counts of a batch.

    **Attributes:**

    - `mask`: which rows count; `bool[batch_size]`. In the order `"epochs"`, those that
        pad the last batch of an epoch do not; in the others, all do. For a block:
        `bool[k, batch_size]`.
    - `count`: how many rows of the batch count; `int32[]`. For a block: `int32[k]`.
    - `batch_size`: how many rows the batch has.
    - `total`: how many rows the source has.
    """

    mask: Bool[Array | np.ndarray, "*k batch_size"]
    count: Any
    batch_size: int
    total: int


class Loader(eqx.Module):
    """Draws batches from a source; its only state is an [`eqx_ckpt.data.Cursor`][].

    A loader does not change. It may be closed over by a jitted function, or be one of
    its arguments; with `on_device`, only the latter. The order of the rows is integer
    arithmetic on the cursor, done inside `jit` (the page on data names the methods):
    equal cursors give equal batches.

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp
        import numpy as np

        data = np.arange(40, dtype=np.float32).reshape(10, 4)
        source = eqx_ckpt.data.ArrayDataSource(x=data)
        loader = eqx_ckpt.data.Loader(source, batch_size=5)

        @jax.jit
        def total(cursor):
            def step(cursor, _):
                cursor, batch = loader.next(cursor)
                return cursor, jnp.sum(batch["x"])

            return jax.lax.scan(step, cursor, length=4)

        cursor, sums = total(loader.start(seed=0))
        assert int(cursor.epoch) == 2 and sum(sums) == 2 * data.sum()
        ```
    """

    host: Host
    arrays: DeviceRows | None
    batching: Batching = eqx.field(static=True)
    cache: int = eqx.field(static=True)

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        order: Order = "shuffle",
        cache: int = 1,
    ) -> None:
        """**Arguments:**

        - `source`: [`eqx_ckpt.data.ArrayDataSource`][],
            [`eqx_ckpt.data.StoredDataSource`][] or
            [`eqx_ckpt.data.RandomAccessDataSource`][].
        - `batch_size`: how many rows a batch has.
        - `order`: `"sequential"`: as stored; `"shuffle"`: a new permutation in every
            epoch. In both, a batch may hold the end of one epoch and the start of the
            next. `"epochs"`: permutations too, but the last batch of an epoch is padded
            with rows from its start, which a mask excludes. `"independent"`: drawn with
            replacement.
        - `cache`: how many batches to fetch at a time; they stay on the device.

        **Raises:**

        - `TypeError`: `source` is not a source.
        - `ValueError`: another argument is out of its range.
        """
        if not is_a(Source, source):
            raise TypeError(
                f"`source` is a {type(source).__name__}. Wrap arrays in "
                "`eqx_ckpt.data.ArrayDataSource(x=array)`, and a data set in "
                "`eqx_ckpt.data.RandomAccessDataSource(dataset)`."
            )
        count = source.rows.total
        check_count("batch_size", batch_size)
        check_count("cache", cache)
        if order not in get_args(Order):
            known = ", ".join(map(repr, get_args(Order)))
            raise ValueError(f"`order` is {order!r}. Pass one of {known}.")
        if batch_size > count:
            raise ValueError(
                f"`batch_size` is {batch_size}, and the source has {count} rows."
            )
        if max(count, batch_size * (cache + 1)) >= 2**31:
            raise ValueError("A loader numbers its rows with 31 bits.")
        self.host = Host(source)
        arrays = source.on_device
        self.arrays = None if arrays is None else DeviceRows(arrays)
        self.batching = Batching(source.rows, int(batch_size), order)
        self.cache = int(cache)

    @property
    def make_up(self) -> str:
        """What determines the order of the rows. A cursor belongs to one make-up."""
        return self.batching.make_up

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.batching.per_epoch

    def start(self, seed: int = 0, *, accept_any: bool = False) -> Cursor:
        """The cursor of the first batch.

        **Arguments:**

        - `seed`: selects the permutations, `0 <= seed < 2**32`.
        - `accept_any`: let a restore accept the position of a loader with another
            make-up (number of rows, batch size, order), which is otherwise an error.

        **Returns:**

        A [`eqx_ckpt.data.Cursor`][], also for use as `like` in a restore.
        """
        if not is_integer(seed) or not 0 <= int(seed) < 2**32:
            raise ValueError(
                f"`seed` is {seed!r}. Pass an integer from 0 to 2**32 - 1."
            )
        empty = Block(None, None, None, self.make_up, accept_any)
        # Separate arrays, since a step may donate the cursor.
        return Cursor(
            jnp.uint32(int(seed)), jnp.uint32(0), jnp.uint32(0), self._cached(empty)
        )

    def _cached(self, block: Block) -> Block:
        """A block with room for as many batches as this loader fetches at a time."""
        if self.arrays is not None or self.cache == 1:
            return block
        size = self.batching.batch_size
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.cache, size, *s.shape), s.dtype), self.host.like
        )
        at, used = jnp.zeros(5, jnp.uint32), jnp.uint32(NOT_FETCHED)
        return Block(rows, at, used, block.make_up, block.accept_any)

    def next(self, cursor: Cursor, *, info: bool = False) -> tuple[Any, ...]:
        """The next batch. Inside `jit`, `scan`, `vmap` and `grad`, or outside.

        Every `cache` calls, a callback fetches rows from the host; it only gathers.
        Every call fetches under `vmap` with different cursors, and for a cursor without
        room for `cache` batches: of `iterate`, or of a loader with another `cache`.

        **Arguments:**

        - `cursor`: from `start`, from this function, or restored.
        - `info`: return an [`eqx_ckpt.data.BatchInfo`][] too.

        **Returns:**

        `(cursor, batch)`, or `(cursor, batch, info)`: the cursor of the batch after
        this one, and a PyTree of arrays with `batch_size` rows.

        **Raises:**

        - `ValueError`: the cursor belongs to a loader of another make-up.
        - `RuntimeError`: the loader is closed.
        - `jax.errors.JaxRuntimeError` or `ValueError`: a row cannot be read, and the
            error names it; or the loader of a compiled function is closed. Which of
            them, JAX decides: it differs between the first call of a compiled function
            and later ones.
        """
        self._check(cursor)
        cursor, batch, mask = _next(self, cursor)
        return (cursor, batch, self.info_of(mask)) if info else (cursor, batch)

    def block(self, cursor: Cursor, k: int, *, info: bool = False) -> tuple[Any, ...]:
        """The next `k` batches in one fetch, to scan over. Faster than `next`.

        **Arguments:**

        - `k`: how many batches.
        - The others: as `next`.

        **Returns:**

        As `next`; all arrays have a first axis of length `k`.
        """
        self._check(cursor)
        check_count("k", k)
        if self.batching.batch_size * (k + 1) + self.batching.rows.total >= 2**32:
            raise ValueError(f"`k` is {k}: more rows than a loader can number.")
        cursor, rows, mask = _block(self, cursor, k)
        return (cursor, rows, self.info_of(mask)) if info else (cursor, rows)

    def iterate(
        self,
        cursor: Cursor,
        *,
        prefetch: int = 2,
        sharding: Any = None,
        info: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """An endless iterator of batches, outside `jit`, fetched ahead by a thread.

        **Arguments:**

        - `cursor`: of the first batch.
        - `prefetch`: how many batches to fetch ahead; 0: none, and no thread.
        - `sharding`: where to put the batches. `None`: they stay in host memory, as
            NumPy arrays. A device: there. In a job of several processes, or on a mesh,
            a `Sharding` such as `jax.sharding.NamedSharding(mesh, jax.P("data"))`
            gives global arrays, of which each process reads the rows of its own
            devices. The cursor does not depend on it.
        - `info`: as `next`.

        **Returns:**

        An iterator of `(cursor, batch)`, or `(cursor, batch, info)`. The cursor is the
        one after this batch, whatever was fetched ahead: save it with the step, which
        may donate it. It has no room for batches, so `next` fetches one at a time from
        it; save and restore it, to go on with `cache`.

        **Raises:**

        - `TypeError`: `sharding` is not a `Sharding` or a device.
        - `ValueError`: as `next`, or `prefetch` is not an integer >= 0, or `sharding`
            does not fit an array of a batch.
        - `RuntimeError`: the loader is closed; or, from the iterator, a row of a data
            set cannot be read.
        - [`eqx_ckpt.CorruptCheckpointError`][]: from the iterator, stored data are
            damaged.
        """
        self._check(cursor)
        if not is_integer(prefetch) or prefetch < 0:
            raise ValueError(f"`prefetch` is {prefetch!r}. Pass an integer >= 0.")
        placed = checked_sharding(sharding, self.batching.batch_size, self.host.like)
        return batches(self, cursor, prefetch, placed, info)

    def map(
        self, fn: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any
    ) -> tuple[Any, Any]:
        """Run over all rows once, in batches, inside `jit` or outside.

        **Arguments:**

        - `fn`: `fn(carry, batch, mask) -> carry, result`, as in `jax.lax.scan`. `mask`
            is `bool[batch_size]`: in the last batch, some rows may not count.
        - `carry`: the first one.

        **Returns:**

        The last carry, and the results, stacked along a new first axis.
        """
        self._check_rows(jnp.zeros(()))
        return _map(self, fn, carry)

    def zeros(self) -> PyTree[Array]:
        """A batch of zeros, of the shapes and dtypes that `next` gives."""
        return jax.tree.map(
            lambda s: jnp.zeros((self.batching.batch_size, *s.shape), s.dtype),
            self.host.like,
        )

    def close(self) -> None:
        """Release the data and what the source holds, such as open files.

        After that, drawing is an error, also in compiled programs. May be called twice.
        A loader that nobody uses any more is released without it.
        """
        self.host.close()
        if self.arrays is not None:
            self.arrays.release()

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

    def _check_rows(self, other: PyTree) -> None:
        self.host.check_open()
        if self.arrays is not None:
            self.arrays.check_are_arguments(other)

    def _check(self, cursor: Cursor) -> None:
        self._check_rows(cursor)
        if not is_a(Cursor, cursor):
            raise TypeError(
                f"It is a {type(cursor).__name__}, not a Cursor. Make one by `start`."
            )
        if cursor.block.make_up != self.make_up:
            raise ValueError(
                f"It is the cursor of another loader: {cursor.block.make_up}; this one "
                f"is {self.make_up}."
            )

    def has_room_in(self, block: Block) -> bool:
        """Whether a block is one that `start` makes."""
        own = eqx.filter_eval_shape(self._cached, block.without_batches())
        return jax.tree.map(_type_of, own) == jax.tree.map(_type_of, block)


@eqx.filter_jit
def _next(loader: Loader, cursor: Cursor) -> tuple[Cursor, PyTree[Array], Array]:
    at = loader.batching.positions(cursor.epoch, cursor.position, 1)
    epoch, position = at.next_epoch[0], at.next_position[0]
    block = jax.lax.stop_gradient(cursor.block)
    if block.used is None or not loader.has_room_in(block):
        rows = loader.fetch(loader.batching.numbers(cursor.seed, at))
        batch = jax.tree.map(lambda x: x[0], rows)
        return cursor.moved(epoch, position), batch, at.mask[0]

    def is_used_up(state: tuple[Any, Array, Any]) -> Array:
        return state[1] >= loader.cache

    def refill(state: tuple[Any, Array, Any]) -> tuple[Any, Array, Any]:
        (seed, epoch, position), used, _ = state
        ahead = loader.batching.positions(epoch, position, loader.cache)
        rows = loader.fetch(loader.batching.numbers(seed, ahead))
        at = (seed, ahead.next_epoch[-1], ahead.next_position[-1])
        return at, 0 * used, rows

    # A loop of one iteration or none: `cond` would copy the rows that a scan carries.
    # The fetch depends on the loop's state, or XLA would move it before the loop.
    # Products, not constants: so `vmap` on a mesh shards them as the cursor.
    words = [word + 0 * cursor.seed for word in loader.host.words]
    now = cursor.seed, cursor.epoch, cursor.position
    is_here = jnp.all(block.at == jnp.stack([*words, *now]))
    used = jnp.where(is_here, block.used, jnp.uint32(NOT_FETCHED))
    _, used, rows = jax.lax.while_loop(is_used_up, refill, (now, used, block.rows))
    batch = jax.tree.map(lambda x: x[used], rows)
    after = jnp.stack([*words, cursor.seed, epoch, position])
    block = eqx.tree_at(
        lambda b: (b.rows, b.at, b.used), block, (rows, after, used + 1)
    )
    return cursor.moved(epoch, position, block), batch, at.mask[0]


@eqx.filter_jit
def _block(loader: Loader, cursor: Cursor, k: int) -> tuple[Cursor, Any, Array]:
    at = loader.batching.positions(cursor.epoch, cursor.position, k)
    rows = loader.fetch(loader.batching.numbers(cursor.seed, at))
    return cursor.moved(at.next_epoch[-1], at.next_position[-1]), rows, at.mask


@eqx.filter_jit
def _map(loader: Loader, fn: Callable, carry: Any) -> tuple[Any, Any]:
    count, size = loader.batching.rows.total, loader.batching.batch_size
    total = loader.batches_per_epoch

    def some(start: Array, k: int, carry: Any) -> tuple[Any, Any]:
        """Run over `k` batches, fetched together, from the one numbered `start`."""

        def one(carry: Any, xs: tuple[Any, Array]) -> tuple[Any, Any]:
            return fn(carry, *xs)

        numbers = start * size + jnp.arange(k * size, dtype=jnp.uint32)
        numbers = numbers.reshape(k, size)
        rows = loader.fetch(numbers % count)
        return jax.lax.scan(one, carry, (rows, numbers < count))

    def full(carry: Any, block: Array) -> tuple[Any, Any]:
        return some(block * loader.cache, loader.cache, carry)

    blocks, rest = divmod(total, loader.cache)
    found: list[Any] = []
    if blocks:
        turns = jnp.arange(blocks, dtype=jnp.uint32)
        carry, results = jax.lax.scan(full, carry, turns)
        found.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results))
    if rest:
        carry, results = some(jnp.uint32(total - rest), rest, carry)
        found.append(results)
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *found)


def _type_of(array: Any) -> tuple[Any, Any]:
    return array.shape, array.dtype
