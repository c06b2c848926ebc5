"""The regions that a restore reads, and the host memory of each."""

import functools as ft
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, Sharding

from .._format.chunk_grid import batches, blocks, Region
from .._format.dtype_names import has_parts_of_bytes, SIZES
from .._format.source import RegionRead
from .._storage.calls.host_memory import taken
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._tree.leaves.casting import cast_dtype
from .._tree.transform.transform_parts import Read
from .placement import Assembly, pieces
from .replica_broadcast import Stack, stack_of


# For an accelerator, JAX takes as much pinned memory again, and keeps that.
_ACCELERATOR_WINDOW = 2**28


# What is kept of the smallest region is larger than its bytes.
_LEAST = 2**16


class Limits(NamedTuple):
    """How much of the host memory a restore takes at a time.

    `window`: for regions on their way. `in_flight`: for chunks that are being read.
    `is_bound`: whether regions arrive in pieces if they are larger.
    """

    window: int
    in_flight: int
    is_bound: bool


USUAL = Limits(window=2**30, in_flight=MAX_IN_FLIGHT, is_bound=False)


class Arriving(NamedTuple):
    """A leaf that is an array, and those on devices that it is to be assembled from."""

    read: Read
    stack: Stack | None
    arrays: list[Any]


def arriving_of(reads: Sequence[Read], broadcast_replicas: bool) -> list[Arriving]:
    return [
        Arriving(
            read,
            stack_of(read.place.sharding, read.becomes) if broadcast_replicas else None,
            [],
        )
        for read in reads
        if read.record.value is None
    ]


class Item(NamedTuple):
    """A region that is read at once, and its devices.

    `assembly`: what it is a piece of.
    """

    of: Arriving
    region: Region
    devices: list[Any]
    assembly: Assembly | None = None

    @property
    def asked(self) -> RegionRead:
        return RegionRead(self.of.read.name, self.of.read.record, self.region)


class Cost(NamedTuple):
    """The host memory that an item takes.

    `nbytes`: what is read. `memory`: what that is read into. `cast`: what it is cast
    to, if it is. `staying`: of the result, what is host memory. `copied`: what JAX
    copies it to in host memory, where it does not take it over: pinned memory, on the
    way to an accelerator. `passing`: what it takes on its way, and no longer.
    """

    nbytes: int
    memory: int
    cast: int
    staying: int
    copied: int
    passing: int


def cost_of(item: Item) -> Cost:
    # A few calls for each leaf, as there may be 100,000.
    read, record = item.of.read, item.of.read.record
    sizes = [span.stop - span.start for span in item.region]
    nbytes = math.prod(sizes) * SIZES[record.data_type]
    cast = 0
    if record.dtype.startswith(">"):
        cast = nbytes  # Its bytes are swapped.
    elif read.becomes.dtype != record.dtype and (dtype := cast_dtype(*read[5:7])):
        cast = math.prod(sizes) * dtype.itemsize
    memory, cast = taken(nbytes), taken(cast)
    result = cast or memory
    if not is_on_host(read):
        return Cost(nbytes, memory, cast, 0, result, memory + cast + result)
    if read.becomes.kind == "jax" and has_parts_of_bytes(read.becomes.dtype):
        copied = result * max(1, len(item.devices))
        return Cost(nbytes, memory, cast, copied, copied, memory + cast)
    return Cost(nbytes, memory, cast, result, 0, memory if cast else 0)


def items_of(arriving: Iterable[Arriving], limits: Limits) -> list[Item]:
    """What is read for each leaf, in order."""
    items: list[Item] = []
    for one in arriving:
        regions = (
            pieces(one.read.place.sharding, one.read.record.data_shape)
            if one.stack is None
            else one.stack.pieces()
        )
        for region, devices in regions:
            item = Item(one, region, devices)
            if limits.is_bound and cost_of(item).passing > limits.window:
                items += in_pieces(item)
            else:
                items.append(item)
    return items


def in_pieces(item: Item) -> Iterator[Item]:
    """The pieces of a region, each of which has some chunks of its own."""
    record = item.of.read.record
    parts = [*blocks(item.region, record.chunk_shape, record.itemsize)]
    # A stack is summed as a whole.
    is_whole = item.of.stack is not None or has_parts_of_bytes(
        item.of.read.becomes.dtype
    )
    if len(parts) == 1 or is_whole:
        yield item
        return
    assembly = Assembly(item.region, len(parts), is_on_host(item.of.read))
    for part in parts:
        yield item._replace(region=part, assembly=assembly)


def windows(items: Sequence[Item], limits: Limits) -> Iterator[list[Item]]:
    """The items that are read together."""
    limit = limits.window
    # What goes to NumPy alone should not start JAX's backends.
    if any(item.of.read.becomes.kind in ("jax", "key") for item in items):
        is_cpu = jax.default_backend() == "cpu"
        limit = limit if is_cpu else min(limit, _ACCELERATOR_WINDOW)

    def weight(item: Item) -> int:
        # What stays in host memory does not move through it.
        nbytes = cost_of(item).passing if limits.is_bound else item.asked.nbytes
        return max(nbytes, _LEAST)

    return batches(items, weight, limit)


def is_on_host(read: Read) -> bool:
    """Whether a leaf is restored to host memory."""
    if read.becomes.kind not in ("jax", "key"):
        return True
    sharding, target = read.place.sharding, read.place.target
    if sharding is not None:
        return _is_in_host_memory(sharding)
    if isinstance(target, Mesh):
        return target.devices.flat[0].platform == "cpu"
    config: Any = jax.config
    default = config.jax_default_device
    if not isinstance(default, str):
        default = (default or jax.local_devices()[0]).platform
    return default == "cpu"


@ft.lru_cache(maxsize=1024)
def _is_in_host_memory(sharding: Sharding) -> bool:
    if sharding.memory_kind in ("pinned_host", "unpinned_host"):
        return True
    return next(iter(sharding.device_set)).platform == "cpu"
