"""Read leaves, and put them on devices."""

import functools as ft
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format.chunk_grid import batches
from .._format.leaf_record import from_stored, SCALAR_KINDS
from .._format.source import read_regions, RegionRead, Source
from .._storage.calls.host_memory import empty
from .._tree.leaves.casting import cast_dtype
from .._tree.plans.match_leaf import number_like, of_type
from .._tree.transform.transform_parts import Read
from .placement import assemble, finished, on_devices, Part, pieces, put
from .replica_broadcast import Stack, stack_of


# Host memory for regions that are copied to devices. For an accelerator, JAX takes
# as much pinned memory again, and keeps that.
_WINDOW, _ACCELERATOR_WINDOW = 2**30, 2**28


# For the smallest region: what is kept about it is larger than its bytes.
_LEAST = 2**16


# Called with the phase; optionally with the name of a leaf and its newly read bytes.
Announce = Callable[..., None]


class Arrived(NamedTuple):
    """What was read: values by position, and arrays to be assembled into leaves."""

    values: dict[int, Any]
    arrays: list[tuple[Read, Stack | None, list[Any]]]


def read_leaves(
    source: Source,
    reads: Sequence[Read],
    report: Announce | None,
    broadcast_replicas: bool = False,
) -> Arrived:
    """Read each leaf, and put its data on devices; do not wait for other processes."""
    report_read = report and ft.partial(report, "read")
    values = {
        r.position: _on_devices(number_like(r.like, r.record, r.becomes), r)
        for r in reads
        if r.record.value is not None
    }
    arrays = [
        (r, stack_of(r.place.sharding, r.becomes) if broadcast_replicas else None, [])
        for r in reads
        if r.record.value is None
    ]
    todo = [
        (read, stack, found, RegionRead(read.name, read.record, region), devices)
        for read, stack, found in arrays
        for region, devices in (
            pieces(read.place.sharding, read.record.data_shape)
            if stack is None
            else stack.pieces()
        )
    ]
    for window in batches(
        todo, lambda item: max(item[3].nbytes, _LEAST), _window(reads)
    ):
        buffers = deque(read_regions(source, [item[3] for item in window], report_read))
        if report:
            report("place")
        parts = [
            Part(
                host if stack is None else stack.as_block(host),
                read.becomes,
                read.place.sharding,
                devices,
            )
            for read, stack, *_, devices in window
            for host in [cast(from_stored(buffers.popleft(), read.record), read)]
        ]
        for (_, _, found, *_), placed in zip(window, put(parts), strict=True):
            found += placed
    return Arrived(values, arrays)


def _window(reads: Sequence[Read]) -> int:
    # What goes to NumPy alone should not start JAX's backends.
    if not any(read.becomes.kind in ("jax", "key") for read in reads):
        return _WINDOW
    return _WINDOW if jax.default_backend() == "cpu" else _ACCELERATOR_WINDOW


def cast(array: np.ndarray, read: Read) -> np.ndarray:
    """Cast a part of a leaf to its new dtype, in memory that JAX can take over."""
    dtype = cast_dtype(read.record, read.becomes)
    if dtype is None or dtype == array.dtype:
        return array
    new = empty(array.shape, dtype)
    np.copyto(new, array, casting="unsafe")
    return new


def assembled(arrived: Arrived) -> dict[int, Any]:
    """Assemble the value of each leaf, by position."""
    values = arrived.values
    while arrived.arrays:
        read, stack, found = arrived.arrays.pop()
        value = (
            assemble(read.becomes, read.place.sharding, found)
            if stack is None
            else finished(stack.spread(found), read.becomes)
        )
        if read.becomes.kind in SCALAR_KINDS:
            value = of_type(read.like, value.item(), read.becomes.kind)
        values[read.position] = value
    return values


def _on_devices(value: Any, read: Read) -> Any:
    """Return a Python number, or put the array that it becomes on devices."""
    if not read.becomes.is_array:
        return value
    return on_devices(value, read.becomes, read.place.sharding)
