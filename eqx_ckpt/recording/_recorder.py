"""Record samples from inside a compiled program, through any loop or transformation."""

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
from ._keep import check_keep
from ._leaves import checked_samples
from ._log import Log


# Before JAX 0.12, a callback with an argument of 100 KiB or more can deadlock on
# several CPU devices, so arrays are passed in pieces.
_PIECE_BYTES = 96 * 2**10 if jax.__version_info__ < (0, 12) else 2**40
_NUMBERS = itertools.count(1)
# A compiled program holds only a number: so it works with any recording, and keeps no
# recording alive.
_receivers: "weakref.WeakValueDictionary[int, Receiver]" = weakref.WeakValueDictionary()


class Receiver:
    """The host's end of one recorder.

    **Attributes:**

    - `number`: by which compiled programs refer to it.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._turns = [0] * len(log.record.draws)
        self.number = next(_NUMBERS)
        _receivers[self.number] = self

    def receive(
        self, due: Any, chain: Any, turn: Any, count: Any, pieces: Sequence[Any]
    ) -> bool:
        """Queue samples; return whether any were lost. Never raises."""
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
                f"An older recorder was used again, for chain {chain}. Continue "
                "with the one that `save` returns"
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
    """Send the rows that are due to the host; return whether the host has failed.

    All arguments have the same leading axes; `vmap` adds one to each. So the predicate
    of the `cond` is never batched: JAX allows no callback in a batched `cond`.
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
    """Records samples from inside a compiled program; made by `Recording.recorder`.

    It is an `equinox.Module`: carry it through `jit`, `scan`, `while_loop`, `cond` and
    `vmap`. If the recording has chains, the first axis of each of its arrays is the
    chain: pass the recorder through `vmap` together with the states.

    **Attributes:**

    - `failed`: whether the host could not record samples. End the loop then; the next
        call of the recording raises the reason.
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
        """Return the recorder with one more sample.

        **Arguments:**

        - `sample`: a PyTree like the `like` of the recording.
        - `keep`: whether to record it; `bool[]`, or `bool[chain]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the sample does not match `like`.
        - `ValueError`: `keep` has another shape or dtype.
        """
        lead = self._count.shape
        chains = lead[0] if lead else None
        if len(lead) > 1:
            raise ValueError(
                "Pass the recorder through `vmap` together with the states."
            )
        checked = checked_samples(sample, self._leaves, chains, one=True, traced=True)
        keep = jnp.asarray(keep)
        check_keep(keep, (), lead)
        keep = jnp.broadcast_to(keep, lead)
        index = jnp.where(keep, self._count, self._block)
        rows = [
            put(buffer, _data(array), index)
            for buffer, array in zip(self._rows, checked.arrays, strict=True)
        ]
        count = self._count + keep
        after = eqx.tree_at(lambda r: (r._rows, r._count), self, (rows, count))
        return after._handed_over(count == self._block)

    def flush(self) -> "Recorder":
        """Return the recorder after sending all of its samples to the host.

        Call it at the end of the program: until then, up to one block of samples is
        only on the device.
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
    """The data of an array inside a program; those of PRNG keys are integers."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return jax.lax.stop_gradient(jnp.asarray(array))
