"""Samples that are spread over the processes of a job: who writes which chains."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ..._errors import LeafMismatchError
from ..._format.sample_record import Record
from ._sample_leaves import Block


def chains_here(arrays: Sequence[Any], chains: int | None) -> np.ndarray:
    """Which chains this process writes, as bools.

    The first process writes the arrays that are not global, as in a save.
    """
    return _owners(arrays, chains) == jax.process_index()


def of_these(
    here: np.ndarray, first: int, rows: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """The runs of some chains in rows that begin with the chain `first`."""
    mask = here[first : first + len(rows)]
    if mask.all():
        yield first, rows
        return
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield first + start, rows[start:stop]


def with_whole_bands(record: Record, block: Block, keep: Any) -> tuple[Block, Any]:
    """Samples of which no chunk has chains of two processes.

    If one has, all processes gather them, so that the first one writes them all.
    """
    owners = _owners(block.arrays, record.chains)
    # Where another process begins.
    edges = np.flatnonzero(np.diff(owners)) + 1
    if not any((edges % leaf.chains).any() for leaf in record.leaves):
        return block, keep
    arrays = [_gathered(array) for array in block.arrays]
    return block._replace(arrays=arrays), _gathered(keep)


def _owners(arrays: Sequence[Any], chains: int | None) -> np.ndarray:
    """The process that writes each chain; the same in all processes."""
    found = None
    for array in arrays:
        if not _is_spread(array):
            continue
        shard = array.sharding.shard_shape(array.shape)
        if chains is None or shard[1:] != array.shape[1:]:
            raise LeafMismatchError(
                f"An array of samples {array.shape} is sharded over several processes "
                f"into parts of {shard}. Shard only its first axis, that of `chains`."
            )
        owners = np.empty(chains, np.int64)
        places = array.sharding.devices_indices_map(array.shape)
        # Of several devices with the same chains, the first one has replica 0.
        for device, index in reversed([*places.items()]):
            owners[index[0]] = device.process_index
        if found is not None and (found != owners).any():
            raise LeafMismatchError(
                "The leaves of the samples are not sharded over the same chains: the "
                f"processes {owners.tolist()} have those of one, and {found.tolist()} "
                "those of another one. None of them was recorded."
            )
        found = owners
    return np.zeros(chains or 1, np.int64) if found is None else found


def _is_spread(array: Any) -> bool:
    """Whether an array is spread over several processes."""
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    return is_global and not array.is_fully_replicated


def _gathered(array: Any) -> Any:
    if not _is_spread(array):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _gathered(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return multihost_utils.process_allgather(array, tiled=True)
