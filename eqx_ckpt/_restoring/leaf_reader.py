"""Read leaves, and put them on devices."""

import functools as ft
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format.leaf_record import from_stored, SCALAR_KINDS
from .._format.source import read_regions, Source
from .._storage.calls.host_memory import empty
from .._storage.calls.worker_threads import in_flight_at_most
from .._tree.leaves.casting import cast_dtype
from .._tree.plans.match_leaf import number_like, of_type
from .._tree.transform.transform_parts import Read
from .placement import assemble, finished, on_devices, Part, put
from .read_items import arriving_of, Item, items_of, Limits, USUAL, windows
from .replica_broadcast import Stack


# Called with the phase; optionally with the name of a leaf and its newly read bytes.
Announce = Callable[..., None]


class Arrived(NamedTuple):
    """What was read: values by position, and arrays to be assembled into leaves."""

    values: dict[int, Any]
    arrays: list[tuple[Read, Stack | None, list[Any]]]


class How(NamedTuple):
    """How leaves are read."""

    report: Announce | None = None
    broadcast_replicas: bool = False
    limits: Limits = USUAL


def read_leaves(source: Source, reads: Sequence[Read], how: How) -> Arrived:
    """Read each leaf, and put its data on devices; do not wait for other processes."""
    report_read = how.report and ft.partial(how.report, "read")
    values = {
        r.position: _on_devices(number_like(r.like, r.record, r.becomes), r)
        for r in reads
        if r.record.value is not None
    }
    arriving = arriving_of(reads, how.broadcast_replicas)
    waited: list[Any] = []
    with in_flight_at_most(how.limits.in_flight):
        for window in windows(items_of(arriving, how.limits), how.limits):
            asked = [item.asked for item in window]
            buffers = deque(read_regions(source, asked, report_read))
            if how.report:
                how.report("place")
            placed = _placed(window, buffers)
            # A device may take its time to take the data out of host memory.
            jax.block_until_ready(placed if how.limits.is_bound else waited)
            waited = placed
    arrays = [(one.read, one.stack, one.arrays) for one in arriving]
    return Arrived(values, arrays)


def _placed(window: Sequence[Item], buffers: deque[np.ndarray]) -> list[Any]:
    """Put what was read on devices; return the arrays, of which some are NumPy's."""
    parts = [
        Part(
            host if item.of.stack is None else item.of.stack.as_block(host),
            read.becomes,
            read.place.sharding,
            item.devices,
        )
        for item in window
        for read in [item.of.read]
        for host in [cast(from_stored(buffers.popleft(), read.record), read)]
    ]
    whole = [p for p, item in zip(parts, window, strict=True) if item.assembly is None]
    on_devices = iter(put(whole))
    placed: list[Any] = []
    for item, part in zip(window, parts, strict=True):
        if item.assembly is None:
            found = next(on_devices)
        else:
            found = item.assembly.add(part, item.region)
        item.of.arrays.extend(found)
        placed += found
    return placed


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
