"""Give the data of the leaves of a PyTree as arrays on the host."""

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..._format.chunk_grid import (
    blocks,
    Region,
    region_of,
    relative,
    Start,
    start_of,
    touched,
    whole,
)
from ..._format.leaf_record import LeafRecord
from ..._lazy import Array, jax, np
from .leaf_kinds import Written


logger = logging.getLogger("eqx_ckpt")


def is_on_host(leaf: jax.Array) -> bool:
    """Whether an array is in host memory, so that its data need no copy."""
    return next(iter(leaf.sharding.device_set)).platform == "cpu"


# The host memory that an accelerator writes to directly.
_PINNED = "pinned_host"


# Smaller arrays are copied sooner than pinned memory is found for them.
_LEAST_PINNED = 2**17


# Those for which JAX had no pinned memory left. To ask it again takes ten seconds.
_without_pinned: set[Any] = set()


def _begin_copy(part: Any) -> Any:
    """Begin to copy an array from an accelerator; return what is on the host already.

    `np.asarray` takes pageable memory, which on a GPU is 30 times slower than pinned
    memory that JAX has already, and it lives as long as the array.
    """
    if not isinstance(part, jax.Array) or is_on_host(part):
        return part
    (device,) = part.sharding.device_set
    if part.nbytes >= _LEAST_PINNED and _has_pinned(device):
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)
        try:
            with jax.ensure_compile_time_eval():
                return jax.device_put(part, pinned)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            _without_pinned.add(device)
            logger.warning(
                "Saves from %s take slower memory from now on: %s", device, e
            )
    part.copy_to_host_async()
    return part


def _has_pinned(device: Any) -> bool:
    return device not in _without_pinned and any(
        memory.kind == _PINNED for memory in device.addressable_memories()
    )


def shards(
    leaf: Any, record: LeafRecord, *, owned: Collection[Start] | None = None
) -> Iterator[tuple[Region, Array]]:
    """The data of a leaf as host arrays, each with its region of the Zarr array.

    The pieces are split along the chunk grid, so that each can be written separately.
    `owned` selects the pieces that start at these positions. Pieces of a NumPy array
    are views. What is on an accelerator is on its way when this returns.
    """
    found: list[tuple[Region, list[Region], Any]] = []
    for region, part in parts(leaf, record):
        if pieces := _owned_pieces(region, record, owned):
            found.append((region, pieces, _begin_copy(part)))
    return _on_host(found, record)


def device_shards(leaf: Any, record: LeafRecord) -> Iterator[tuple[Region, Array]]:
    """As `shards`, with each replica on a device of this process, one after another."""
    found = (
        (region, _owned_pieces(region, record, None), _begin_copy(part))
        for region, part in replicas(leaf, record)
    )
    return _on_host(found, record)


def _on_host(
    found: Iterable[tuple[Region, list[Region], Any]], record: LeafRecord
) -> Iterator[tuple[Region, Array]]:
    dtype = np.dtype(record.data_type)
    for region, pieces, part in found:
        host = np.asarray(part)
        if not host.dtype.isnative:
            host = host.astype(host.dtype.newbyteorder("="))
        if record.kind == "numpy" and record.dtype == "bool":
            # TensorStore would write a byte other than 0 and 1, but refuse to read it.
            host = np.asarray(host.view(np.uint8) != 0)
        host = host.view(dtype)
        for piece in pieces:
            # An array of rank zero has one piece.
            yield piece, host if piece is region else host[relative(piece, region)]


def chunk_positions(
    leaf: Any, record: LeafRecord, owned: Collection[Start]
) -> set[int]:
    """Which chunks of a leaf are in the pieces that start at these positions."""
    return {
        position
        for region, _ in parts(leaf, record)
        for piece in _owned_pieces(region, record, owned)
        for position in touched(piece, record.data_shape, record.chunk_shape)
    }


def _owned_pieces(
    region: Region, record: LeafRecord, owned: Collection[Start] | None
) -> list[Region]:
    pieces = blocks(region, record.chunk_shape, record.itemsize)
    return [piece for piece in pieces if owned is None or start_of(piece) in owned]


def parts(leaf: Any, record: LeafRecord) -> list[tuple[Region, Any]]:
    """The data of a leaf where they are, each with its region of the Zarr array.

    Of a sharded array, these are the distinct shards that this process has.
    """
    regions = replicas(leaf, record)
    return [*{repr(region): (region, data) for region, data in regions[::-1]}.values()]


def replicas(leaf: Any, record: LeafRecord) -> list[tuple[Region, Any]]:
    """As `parts`, on each device of this process, also where they are the same."""
    if record.kind == "key":
        with jax.ensure_compile_time_eval():
            leaf = jax.random.key_data(leaf)
    if isinstance(leaf, Written):
        leaf = np.frombuffer(leaf, np.uint8)
    shape = record.data_shape
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return [(whole(shape), leaf)]
    return [(region_of(s.index, shape), s.data) for s in leaf.addressable_shards]
