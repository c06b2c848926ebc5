"""Decide which process writes what; all write about the same number of bytes."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._format.chunk_grid import (
    blocks,
    distinct_regions,
    Region,
    shape_of,
    Start,
    start_of,
    whole,
)
from .._format.leaf_record import LeafRecord
from .._tree.plans.write_plan import Write


class Owned(NamedTuple):
    """Stands for a leaf of which it is known where the pieces of this process begin."""

    record: LeafRecord
    starts: Collection[Start] | None


def place_of(leaf: Any) -> set[int]:
    """The processes that hold a leaf: all of them, if it is the record of a source."""
    if isinstance(leaf, LeafRecord | Owned):
        return set(range(jax.process_count()))
    if not isinstance(leaf, jax.Array):
        return {jax.process_index()}
    return {device.process_index for device in leaf.sharding.device_set}


def assign(
    writes: Sequence[Write], size: int, index: int, places: Mapping[str, int]
) -> list[Write]:
    """The part that process `index` writes.

    Every process computes the same from shapes and shardings alone. Of the processes
    that hold a piece, the one with the fewest bytes so far gets it. A leaf on one
    process is written there if it is in `places`, that is, if all processes see it on
    that one; otherwise each process has its own, and process 0 writes its own.
    """
    loads = [0] * size
    local: list[Write] = []
    for write in writes:
        if isinstance(write.leaf, Owned):
            local.append(write._replace(owned=write.leaf.starts))
            continue
        if len(place_of(write.leaf)) == 1:
            writer = places.get(write.name, 0)
            loads[writer] += write.record.nbytes
            local.append(write._replace(owned=None if index == writer else ()))
            continue
        starts: set[Start] = set()
        record = write.record
        for region, processes in _holders(write.leaf, record):
            for piece in blocks(region, record.chunk_shape, record.itemsize):
                writer = min(processes, key=lambda process: (loads[process], process))
                loads[writer] += record.itemsize * math.prod(shape_of(piece))
                if writer == index:
                    starts.add(start_of(piece))
        local.append(write._replace(owned=starts))
    # Process 0 creates all arrays.
    return [w for w in local if index == 0 or w.owned or w.owned is None]


def _holders(
    leaf: jax.Array | LeafRecord, record: LeafRecord
) -> Iterable[tuple[Region, list[int]]]:
    """Every distinct region of an array, with the processes that hold it."""
    if isinstance(leaf, LeafRecord):
        return [(whole(record.data_shape), sorted(place_of(leaf)))]
    if record.kind == "key":
        leaf = jax.random.key_data(leaf)
    shape = record.data_shape
    indices = leaf.sharding.devices_indices_map(shape)
    return [
        (region, sorted({device.process_index for device in devices}))
        for region, devices in distinct_regions(indices, shape)
    ]
