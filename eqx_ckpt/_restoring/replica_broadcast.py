"""Read data in one replica, and send it to the others over the interconnect."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from .._format.chunk_grid import Region, region_of
from .._format.leaf_record import LeafRecord
from .._storage.calls.host_memory import empty
from .._tree.transform.transform_trace import undisturbed
from .placement import Pieces


# The data and zeros are summed as integers, which preserves every bit.
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


_SENT = frozenset(
    "int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32".split()
)


class Stack(NamedTuple):
    """All replicas of a leaf, along a new first axis; only the first replica holds
    data.

    Each device holds one block of the stack, of the size of its shard of the leaf.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    target: NamedSharding
    dtype: np.dtype
    integers: np.dtype

    def pieces(self) -> Pieces:
        """The regions that this process reads, each with its devices."""
        found: Pieces = []
        for device, region in self._blocks():
            if region[0].start == 0:
                found.append((region[1:], [device]))
        return found

    def _blocks(self) -> list[tuple[Any, Region]]:
        blocks = self.sharding.addressable_devices_indices_map(self.shape)
        return [(d, region_of(index or (), self.shape)) for d, index in blocks.items()]

    def as_block(self, host: np.ndarray) -> np.ndarray:
        return host.view(self.integers)[None]

    def spread(self, first: list[jax.Array]) -> jax.Array:
        """Send the arrays of `pieces` to all devices; return the leaf."""
        if not self.target.addressable_devices:
            # JAX computes only on meshes that include a device of this process.
            return jax.make_array_from_single_device_arrays(
                self.shape[1:], self.target, [], dtype=self.dtype
            )
        arrays, rest = iter(first), empty(self.shard_shape, self.integers)
        rest[...] = 0
        kind = self.sharding.memory_kind
        whole = jax.make_array_from_single_device_arrays(
            self.shape,
            self.sharding,
            [
                next(arrays)
                if region[0].start == 0
                else jax.device_put(rest, SingleDeviceSharding(d, memory_kind=kind))
                for d, region in self._blocks()
            ],
        )
        with undisturbed():
            return _sum(self.target, self.dtype)(whole)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)


@ft.cache
def _sum(target: NamedSharding, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    def add(stack: jax.Array) -> jax.Array:
        bits = stack.sum(0, dtype=stack.dtype)
        return jax.lax.bitcast_convert_type(bits, dtype)

    return jax.jit(add, out_shardings=target)


def stack_of(target: Sharding | None, record: LeafRecord) -> Stack | None:
    """The stack of a leaf; `None` if it does not help, or cannot sum the dtype."""
    if (
        not isinstance(target, NamedSharding)
        or not isinstance(target.mesh, Mesh)
        or target.is_fully_addressable
        or record.data_type not in _SENT
        or record.dtype not in ("key", record.data_type)
        or 0 in record.data_shape
    ):
        return None
    entries = [e if isinstance(e, tuple) else (e,) for e in target.spec]
    used = {axis for entry in entries for axis in entry}
    sizes = target.mesh.shape
    free = tuple(axis for axis in sizes if axis not in used and sizes[axis] > 1)
    if not free:
        return None
    dtype = np.dtype(record.data_type)
    return Stack(
        shape=(math.prod(sizes[axis] for axis in free), *record.data_shape),
        sharding=NamedSharding(
            target.mesh,
            PartitionSpec(free, *target.spec),
            memory_kind=target.memory_kind,
        ),
        target=target,
        dtype=dtype,
        integers=np.dtype(_INTEGERS[dtype.itemsize]),
    )
