"""Batches of a source, in an order that is a function of the cursor alone."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._types import check_integer, check_word, shown
from ._batching import Batching
from ._cursor import Block, Cursor
from ._drawing import draw_block, draw_next, Drawing, map_rows
from ._host_callback import DeviceRows, Host
from ._order import Order
from ._prefetch import batches, checked_sharding
from ._row_reader import DataSource, reader_of
from ._row_sources import is_a


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

    _drawing: Drawing

    def __init__(
        self,
        source: DataSource,
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

        - `TypeError`: `source` is not a source, a number not an integer, or `order` not
            a string.
        - `ValueError`: another argument is out of its range.
        """
        if not is_a(DataSource, source):
            raise TypeError(
                f"`source` is a {type(source).__name__}. Wrap arrays in "
                "`eqx_ckpt.data.ArrayDataSource(x=array)`, and a data set in "
                "`eqx_ckpt.data.RandomAccessDataSource(dataset)`."
            )
        reader = reader_of(source)
        count = reader.rows.total
        batch_size = check_integer("batch_size", batch_size, 1)
        cache = check_integer("cache", cache, 1)
        check_word("order", order, get_args(Order))
        if batch_size > count:
            raise ValueError(
                f"`batch_size` is {batch_size}, and the source has {count} rows."
            )
        if max(count, batch_size * (cache + 1)) >= 2**31:
            raise ValueError("A loader numbers its rows with 31 bits.")
        arrays = reader.on_device
        self._drawing = Drawing(
            Host(reader),
            None if arrays is None else DeviceRows(arrays),
            Batching(reader.rows, batch_size, order),
            cache,
        )

    @property
    def settings(self) -> str:
        """What determines the order of the rows, as text; a cursor belongs to it."""
        return self._drawing.batching.settings

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self._drawing.batching.per_epoch

    def start(self, seed: int = 0, *, accept_any: bool = False) -> Cursor:
        """The cursor of the first batch.

        **Arguments:**

        - `seed`: selects the permutations, `0 <= seed < 2**32`.
        - `accept_any`: let a restore accept the position of a loader with different
            settings (number of rows, batch size, order), which is otherwise an error.

        **Returns:**

        A [`eqx_ckpt.data.Cursor`][], also for use as `like` in a restore.
        """
        seed = check_integer("seed", seed, 0)
        if seed >= 2**32:
            raise ValueError(
                f"`seed` is {shown(seed)}. Pass an integer from 0 to 2**32 - 1."
            )
        empty = Block(None, None, None, self.settings, accept_any)
        # Separate arrays, since a step may donate the cursor.
        return Cursor(
            jnp.uint32(seed),
            jnp.uint32(0),
            jnp.uint32(0),
            self._drawing.cached(empty),
        )

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

        - `ValueError`: the cursor belongs to a loader with different settings, or is
            several.
        - `RuntimeError`: the loader is closed.
        - `jax.errors.JaxRuntimeError` or `ValueError`: a row cannot be read, and the
            error names it; or the loader of a compiled function is closed. Which of
            them, JAX decides: it differs between the first call of a compiled function
            and later ones.
        """
        self._check(cursor)
        cursor, batch, mask = draw_next(self._drawing, cursor)
        return (cursor, batch, self._drawing.info_of(mask)) if info else (cursor, batch)

    def block(self, cursor: Cursor, k: int, *, info: bool = False) -> tuple[Any, ...]:
        """The next `k` batches in one fetch, to scan over. Faster than `next`.

        **Arguments:**

        - `k`: how many batches.
        - The others: as `next`.

        **Returns:**

        As `next`; all arrays have a first axis of length `k`.
        """
        self._check(cursor)
        k = check_integer("k", k, 1)
        batching = self._drawing.batching
        if batching.batch_size * (k + 1) + batching.rows.total >= 2**32:
            raise ValueError(f"`k` is {k}: more rows than a loader can number.")
        cursor, rows, mask = draw_block(self._drawing, cursor, k)
        return (cursor, rows, self._drawing.info_of(mask)) if info else (cursor, rows)

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

        - `TypeError`: `sharding` is not a `Sharding` or a device, or `prefetch` is not
            an integer.
        - `ValueError`: as `next`, or `prefetch` is negative, or `sharding`
            does not fit an array of a batch.
        - `RuntimeError`: the loader is closed; or, from the iterator, a row of a data
            set cannot be read.
        - [`eqx_ckpt.CorruptCheckpointError`][]: from the iterator, stored data are
            damaged.
        - [`eqx_ckpt.CheckpointError`][]: from the iterator with a thread, this process
            is a fork of the one that made it.
        """
        self._check(cursor)
        prefetch = check_integer("prefetch", prefetch, 0)
        placed = checked_sharding(
            sharding, self._drawing.batching.batch_size, self._drawing.host.like
        )
        return batches(self._drawing, cursor, prefetch, placed, info)

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
        self._drawing.check(jnp.zeros(()))
        return map_rows(self._drawing, fn, carry)

    def zeros(self) -> PyTree[Array]:
        """A batch of zeros, of the shapes and dtypes that `next` gives."""
        return jax.tree.map(
            lambda s: jnp.zeros((self._drawing.batching.batch_size, *s.shape), s.dtype),
            self._drawing.host.like,
        )

    def close(self) -> None:
        """Release the data and what the source holds, such as open files.

        After that, drawing is an error, also in compiled programs. May be called twice.
        A loader that nobody uses any more is released without it.
        """
        self._drawing.close()

    def _check(self, cursor: Cursor) -> None:
        self._drawing.check(cursor)
        if not is_a(Cursor, cursor):
            raise TypeError(
                f"`cursor` is a `{type(cursor).__name__}`. Create one by `start`."
            )
        if shape := jnp.shape(cursor.position):
            raise ValueError(
                f"`cursor` is several, of the shape {shape}. Pass one, or draw from "
                "all of them by `jax.vmap(loader.next)(cursor)`."
            )
        if cursor.block.settings != self.settings:
            raise ValueError(
                "`cursor` is that of a loader with different settings: "
                f"{cursor.block.settings}; those of this one are {self.settings}."
            )
