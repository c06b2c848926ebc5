"""The position of a loader in its data, as a small PyTree."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from .._tree.leaves.transient import Transient


# `used` of a block without batches: more than any block has, so that the next call
# fetches.
NOT_FETCHED = 2**32 - 1


class Block(eqx.Module, Transient):
    """The batches already fetched; a cursor gives the same batches without them.

    **Attributes:**

    - `rows`: the batches, one after another; `None` if none are kept.
    - `at`: which batch in `rows` is next, if there are any: two words for the loader
        that fetched it, seed, epoch and position.
    - `used`: how many batches of `rows` the cursor has passed, if there are any.
    - `settings`: the settings of the loader, as text.
    - `accept_any`: whether the position of another loader may be restored.
    """

    rows: PyTree[Array | None]
    at: UInt32[Array, "5"] | None
    used: UInt32[Array, ""] | None
    settings: str = eqx.field(static=True)
    accept_any: bool = eqx.field(static=True)

    def note(self) -> str:
        return self.settings

    def accepts(self, note: str) -> bool:
        return self.accept_any or note == self.settings

    def fresh(self) -> "Block":
        """The same block without batches; `like` may be abstract."""
        if self.rows is None:
            return self
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self)
        return eqx.tree_at(lambda b: b.used, zeros, zeros.used + np.uint32(NOT_FETCHED))

    def bare(self) -> "Block":
        """The block of a cursor that holds no memory for batches."""
        return Block(None, None, None, self.settings, self.accept_any)


class Cursor(eqx.Module):
    """Where a [`eqx_ckpt.data.Loader`][] is in its data: three integers.

    Save it with the model, in the same tree. From an equal cursor, a loader with the
    same settings gives equal batches, in any process, on any number of devices.

    **Attributes:**

    - `seed`: which permutations to take; `uint32[]`.
    - `epoch`: the number of complete passes over the rows; `uint32[]`.
    - `position`: of the next row in its epoch; `uint32[]`.
    - `block`: the batches already fetched. They are not saved.

    !!! example

        ```python
        import eqx_ckpt
        import numpy as np

        source = eqx_ckpt.data.ArrayDataSource(x=np.arange(10.0))
        loader = eqx_ckpt.data.Loader(source, batch_size=4)
        cursor, batch = loader.next(loader.start(seed=0))
        assert (cursor.seed, cursor.epoch, cursor.position) == (0, 0, 4)
        ```
    """

    seed: UInt32[Array, ""]
    epoch: UInt32[Array, ""]
    position: UInt32[Array, ""]
    block: Block


def moved(
    cursor: Cursor, epoch: Any, position: Any, block: Block | None = None
) -> Cursor:
    """The cursor at another position."""
    return Cursor(
        cursor.seed, epoch, position, cursor.block if block is None else block
    )
