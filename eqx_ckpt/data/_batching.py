"""Where the rows of the next batches are: integer arithmetic on a cursor."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ._order import Order, Rows, rows, VERSION


class Positions(NamedTuple):
    """Of `k` batches: the positions of their rows, and the cursor after each."""

    epoch: Any  # uint32[k, batch_size]
    position: Any  # uint32[k, batch_size]
    mask: Any  # bool[k, batch_size]
    next_epoch: Any  # uint32[k]
    next_position: Any  # uint32[k]


class Batching(NamedTuple):
    """What determines the rows of a batch, apart from the cursor."""

    rows: Rows
    batch_size: int
    order: Order

    @property
    def settings(self) -> str:
        rows = self.rows
        chunks = (
            "" if rows.chunk is None else f" chunk={rows.chunk} window={rows.window}"
        )
        return (
            f"rows={rows.total} batch_size={self.batch_size} order={self.order}"
            f"{chunks} version={VERSION}"
        )

    @property
    def per_epoch(self) -> int:
        return -(-self.rows.total // self.batch_size)

    def positions(self, epoch: Any, position: Any, k: int) -> Positions:
        """The positions of the next `k` batches; inside `jit`."""
        count, size = self.rows.total, self.batch_size
        inside = jnp.arange(size, dtype=jnp.uint32)[None]
        turns = jnp.arange(k + 1, dtype=jnp.uint32)
        if self.order != "epochs":
            starts = position + turns * jnp.uint32(size)
            at = starts[:-1, None] + inside
            mask = jnp.ones(at.shape, bool)
            turned, after = starts[1:] // count, starts[1:] % count
            return Positions(
                epoch + at // count, at % count, mask, epoch + turned, after
            )
        epochs, starts = self._starts(epoch, position, turns)
        at = starts[:-1, None] + inside
        epochs_of_rows = jnp.broadcast_to(epochs[:-1, None], at.shape)
        return Positions(epochs_of_rows, at % count, at < count, epochs[1:], starts[1:])

    def _starts(self, epoch: Any, position: Any, turns: Any) -> tuple[Any, Any]:
        """The epochs and positions at which batches start, in the order `"epochs"`.

        The position of a loader with another batch size is not a multiple of this one.
        """
        size = jnp.uint32(self.batch_size)
        rest = self.rows.total - jnp.minimum(position, self.rows.total)
        left = (rest + size - 1) // size
        later = turns - left  # Of use where it is not negative.
        is_now = turns < left
        epochs = jnp.where(is_now, epoch, epoch + 1 + later // self.per_epoch)
        later_start = later % self.per_epoch * size
        return epochs, jnp.where(is_now, position + turns * size, later_start)

    def numbers(self, seed: Any, at: Positions) -> UInt32[Array, "k batch_size"]:
        """The numbers of the rows at positions; inside `jit`."""
        order = "shuffle" if self.order == "epochs" else self.order
        return rows(order, self.rows, seed, at.epoch, at.position)
