"""Saving samples from inside a compiled program, whatever its loops are."""

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jaxtyping import Array, PyTree

from .._format.leaves import dtype_from_tag
from .._format.recorded import Leaf
from ._buffer import put
from ._leaves import checked_samples
from ._log import Log


# Before JAX 0.12, a callback with an argument of 100 KiB or more may wait for itself on
# several CPU devices, so that arrays are passed in pieces.
_PIECE_BYTES = 96 * 2**10 if jax.__version_info__ < (0, 12) else 2**40
_NUMBERS = itertools.count(1)
# A compiled program knows a number only: it serves all recordings, and keeps none.
_receivers: "weakref.WeakValueDictionary[int, Receiver]" = weakref.WeakValueDictionary()


class Receiver:
    """What takes the samples of one recorder, on the host.

    **Attributes:**

    - `number`: by which a compiled program calls it.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._turns = [0] * len(log.record.draws)
        self.number = next(_NUMBERS)
        _receivers[self.number] = self

    def receive(
        self, due: Any, chain: Any, turn: Any, count: Any, pieces: Sequence[Any]
    ) -> bool:
        """Take samples; whether any were lost. It never raises."""
        try:
            flat = [np.concatenate([np.asarray(p) for p in some], 1) for some in pieces]
            for i in map(int, np.flatnonzero(due)):
                self._take(int(chain[i]), int(turn[i]), int(count[i]), i, flat)
        except BaseException as e:
            self._log.fail(e)
        return self._log.has_failed

    def _take(
        self, chain: int, turn: int, count: int, i: int, flat: list[np.ndarray]
    ) -> None:
        if turn != self._turns[chain]:
            raise RuntimeError(
                f"An older recorder was used again, for chain {chain}. Carry on with "
                "the one that `save` returns"
            )
        self._turns[chain] += 1
        leaves = self._log.record.leaves
        self._log.receive(
            chain,
            [
                array[i][: count * math.prod(leaf.record.data_shape)].reshape(
                    count, *leaf.record.data_shape
                )
                for array, leaf in zip(flat, leaves, strict=True)
            ],
            count,
        )


def _receive(
    due: Any, number: Any, chain: Any, turn: Any, count: Any, pieces: Any
) -> np.ndarray:
    due, number, chain, turn, count = map(np.asarray, (due, number, chain, turn, count))
    receiver = _receivers.get(int(number[0]))
    failed = receiver is None or receiver.receive(due, chain, turn, count, pieces)
    return np.full(due.shape, failed)


def _call_host(
    due: Array, number: Array, chain: Array, turn: Array, count: Array, rows: Any
) -> Array:
    """Give the host the rows that are due; whether it has failed.

    All arguments have the same leading axes. Under `vmap` they get one more, so that
    the `cond` is never one of a batched predicate, which callbacks cannot be in.
    """
    lead = due.shape
    size = math.prod(lead)

    def call() -> Array:
        small = [x.reshape(size) for x in (due, number, chain, turn, count)]
        pieces = [_pieces(x.reshape(size, x.size // size)) for x in rows]
        result = jax.ShapeDtypeStruct((size,), np.bool_)
        return io_callback(_receive, result, *small, pieces).reshape(lead)

    return jax.lax.cond(jnp.any(due), call, lambda: jnp.zeros(lead, bool))


def _call_host_batched(
    axis_size: int, in_batched: Any, *args: Any
) -> tuple[Array, bool]:
    args = jax.tree.map(
        lambda x, batched: (
            x if batched else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
        ),
        args,
        tuple(in_batched),
    )
    return _hand_over(*args), True


_hand_over = custom_vmap(_call_host)
_hand_over.def_vmap(_call_host_batched)


def _pieces(rows: Array) -> list[Array]:
    width = max(1, _PIECE_BYTES // (rows.shape[0] * rows.dtype.itemsize))
    return [rows[:, i : i + width] for i in range(0, rows.shape[1], width)] or [rows]


class Recorder(eqx.Module):
    """Saves samples from inside a compiled program; made by `Recording.recorder`.

    It is an `equinox.Module` to carry through loops: under `jit`, `scan`, `while_loop`,
    `cond` and `vmap`. If the recording has chains, all of its arrays have a first axis
    for them: pass it through `vmap` with the states.

    **Attributes:**

    - `failed`: whether the host could not take samples: end the loop. The next call of
        the recording says why.
    """

    failed: Array
    _number: Array
    _chain: Array
    _turn: Array
    _count: Array
    _rows: list[Array]
    _leaves: tuple[Leaf, ...] = eqx.field(static=True)
    _block: int = eqx.field(static=True)

    def __init__(
        self, receiver: Receiver, leaves: Sequence[Leaf], chains: int | None, block: int
    ) -> None:
        lead = () if chains is None else (chains,)
        self.failed = jnp.zeros(lead, bool)
        self._number = jnp.full(lead, receiver.number, jnp.int32)
        self._chain = jnp.arange(chains or 1, dtype=jnp.int32).reshape(lead)
        self._turn = jnp.zeros(lead, jnp.uint32)
        self._count = jnp.zeros(lead, jnp.int32)
        self._rows = [
            jnp.zeros((*lead, block, *leaf.record.data_shape), _dtype(leaf))
            for leaf in leaves
        ]
        self._leaves = tuple(leaves)
        self._block = block

    def save(self, sample: PyTree, keep: Any = True) -> "Recorder":
        """The recorder after one sample more.

        **Arguments:**

        - `sample`: as the `like` of the recording.
        - `keep`: whether to record it; `bool[]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the sample is not as `like`.
        """
        lead = self._count.shape
        chains = lead[0] if lead else None
        if len(lead) > 1:
            raise ValueError("Pass the recorder through `vmap` as the states.")
        checked = checked_samples(sample, self._leaves, chains, one=True, traced=True)
        keep = jnp.broadcast_to(jnp.asarray(keep), lead)
        index = jnp.where(keep, self._count, self._block)
        rows = [
            put(buffer, _data(array), index)
            for buffer, array in zip(self._rows, checked.arrays, strict=True)
        ]
        count = self._count + keep
        after = eqx.tree_at(lambda r: (r._rows, r._count), self, (rows, count))
        return after._handed_over(count == self._block)

    def flush(self) -> "Recorder":
        """The recorder after all of its samples have gone to the host.

        Call it at the end: until then, up to a block of samples is on the device only.
        """
        return self._handed_over(self._count > 0)

    def _handed_over(self, due: Array) -> "Recorder":
        failed = _hand_over(
            due, self._number, self._chain, self._turn, self._count, self._rows
        )
        return eqx.tree_at(
            lambda r: (r.failed, r._turn, r._count),
            self,
            (self.failed | failed, self._turn + due, jnp.where(due, 0, self._count)),
        )


def _dtype(leaf: Leaf) -> np.dtype:
    is_key = leaf.record.kind == "key"
    return np.dtype(np.uint32) if is_key else dtype_from_tag(leaf.record.dtype)


def _data(array: Any) -> Array:
    """What is recorded of an array inside a program; keys are integers there."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return jax.lax.stop_gradient(jnp.asarray(array))
