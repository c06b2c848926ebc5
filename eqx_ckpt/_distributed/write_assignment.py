"""Decide which process writes what; all write about the same number of bytes."""

import functools as ft
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

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


class Held(NamedTuple):
    """Stands for a leaf, by its distinct regions, each with the processes that have it.

    `None`: each process has the leaf for itself.
    """

    regions: Sequence[tuple[Region, Sequence[int]]] | None


# Where a piece begins, its bytes, and the processes that hold it.
_Piece: TypeAlias = tuple[Start, int, np.ndarray]


_PiecesOf: TypeAlias = dict[tuple[Any, ...], list[_Piece]]


def only_process(leaf: Any) -> int | None:
    """The process that alone holds a leaf; `None` if several do.

    All hold the record of a source.
    """
    if isinstance(leaf, LeafRecord):
        return None if jax.process_count() > 1 else 0
    if isinstance(leaf, Held) and leaf.regions is not None:
        processes = {process for _, holders in leaf.regions for process in holders}
        return processes.pop() if len(processes) == 1 else None
    if not isinstance(leaf, jax.Array):
        return jax.process_index()
    return _only_process(leaf.sharding)


@ft.lru_cache(256)
def _only_process(sharding: Sharding) -> int | None:
    processes = {device.process_index for device in sharding.device_set}
    return processes.pop() if len(processes) == 1 else None


def assign(
    writes: Sequence[Write], size: int, index: int, places: Mapping[str, int]
) -> list[Write]:
    """The part that process `index` writes.

    Every process computes the same from shapes and shardings alone. Of the processes
    that hold a piece, the one with the fewest bytes so far gets it. A leaf on one
    process is written there if it is in `places`, that is, if all processes see it on
    that one; otherwise each process has its own, and process 0 writes its own.
    """
    loads = np.zeros(size, np.int64)
    held: _PiecesOf = {}
    local: list[Write] = []
    for write in writes:
        if only_process(write.leaf) is not None:
            writer = places.get(write.name, 0)
            loads[writer] += write.record.nbytes
            local.append(write._replace(owned=None if index == writer else ()))
            continue
        starts: set[Start] = set()
        for start, nbytes, processes in _pieces(write.leaf, write.record, held):
            writer = _lightest(loads, processes)
            loads[writer] += nbytes
            if writer == index:
                starts.add(start)
        local.append(write._replace(owned=starts))
    # Process 0 creates all arrays.
    return [w for w in local if index == 0 or w.owned or w.owned is None]


def _lightest(loads: np.ndarray, processes: np.ndarray) -> int:
    """The process with the fewest bytes; the first of several."""
    if len(processes) == len(loads):
        return int(np.argmin(loads))
    return int(processes[np.argmin(loads[processes])])


def _pieces(
    leaf: jax.Array | LeafRecord | Held, record: LeafRecord, held: _PiecesOf
) -> list[_Piece]:
    """Every piece of an array; those of arrays that are alike are found once."""
    sharding: Sharding | Held | None = None
    if isinstance(leaf, Held):
        sharding = leaf
    elif isinstance(leaf, jax.Array):
        sharding = sharding_of(leaf, record)
    which = id(leaf.regions) if isinstance(leaf, Held) else sharding
    alike = which, record.data_shape, record.chunk_shape, record.itemsize
    if alike not in held:
        held[alike] = [
            (start_of(piece), record.itemsize * math.prod(shape_of(piece)), processes)
            for region, processes in _holders(sharding, record.data_shape)
            for piece in blocks(region, record.chunk_shape, record.itemsize)
        ]
    return held[alike]


def sharding_of(leaf: jax.Array, record: LeafRecord) -> Sharding:
    """The sharding of the Zarr array of a leaf."""
    if record.kind == "key":
        with jax.ensure_compile_time_eval():
            return jax.random.key_data(leaf).sharding
    return leaf.sharding


def _holders(
    sharding: Sharding | Held | None, shape: tuple[int, ...]
) -> Iterable[tuple[Region, np.ndarray]]:
    """Every distinct region, with the processes that hold it; `None` are all."""
    if sharding is None:
        return [(whole(shape), np.arange(jax.process_count()))]
    if isinstance(sharding, Held):
        return [(region, np.array(of)) for region, of in sharding.regions or ()]
    indices = sharding.devices_indices_map(shape)
    return [
        (region, np.unique([device.process_index for device in devices]))
        for region, devices in distinct_regions(indices, shape)
    ]
