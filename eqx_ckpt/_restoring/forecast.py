"""What a restore costs in this process: bytes, requests, and host memory."""

import math
import os
from collections.abc import Iterable
from typing import NamedTuple

from .._format.chunk_grid import touched
from .._format.source import RegionRead, Source
from .._sources.average_source import Averaged
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import PartSource
from .._storage.interface.chunk_bytes import PIECE_BYTES
from .._tree.plans.read_plan import ReadPlan
from .._tree.transform.transform_parts import Part, Read
from .._types import as_integer, shown, wrong
from .read_items import (
    Arriving,
    arriving_of,
    Cost,
    cost_of,
    in_pieces,
    is_on_host,
    items_of,
    Limits,
    USUAL,
    windows,
)
from .transform_source import Transformed
from .viewed_source import Viewed


# What Python and JAX keep of an array besides its data.
_OBJECT_BYTES = 2**13


# While a thread waits for the disk, others begin.
_MOST_THREADS = 9


# A custom `filter_spec` may get a file of the leaf, which is made in a copy.
_COPIES = 3


class ChunkMemory(NamedTuple):
    """The host memory for chunks that are being read.

    `nbytes`: of the largest chunk. `each`: what a thread takes for one. `waiting`: how
    often a chunk is in memory besides, before and after a thread has taken it.
    """

    nbytes: int
    each: int
    waiting: int
    total: int

    @property
    def least(self) -> int:
        return self._of(0, _MOST_THREADS)

    @property
    def usual(self) -> int:
        return self._of(USUAL.in_flight, len(os.sched_getaffinity(0)) + 1)

    def in_flight(self, spare: int) -> int:
        """How much may be in flight for so much more memory than the least."""
        grows = self.waiting + self.each / max(1, self.nbytes)
        return int(min(spare / max(grows, 1), USUAL.in_flight))

    def _of(self, in_flight: int, threads: int) -> int:
        """The memory for so many bytes in flight, and one chunk."""
        nbytes = min(in_flight + self.nbytes, self.total)
        count = min(threads, math.ceil(nbytes / max(1, self.nbytes)))
        return self.waiting * nbytes + count * self.each


class Forecast(NamedTuple):
    """What a restore costs in this process; see `TreeMatch`."""

    nbytes: int
    requests: int
    host_bytes: int
    least_host_bytes: int
    # What of the least is the result; the most that a region takes on its way, and that
    # its chunk takes.
    staying: int
    passing: int
    chunk: ChunkMemory

    def limits(self, max_host_bytes: int | None) -> Limits:
        """How much to read at a time; raise if it cannot be so little."""
        if max_host_bytes is None or max_host_bytes >= self.host_bytes:
            return USUAL
        spare = max_host_bytes - self.least_host_bytes
        if spare < 0:
            raise ValueError(
                f"`max_host_bytes` is {max_host_bytes}, and this restore takes "
                f"{self.least_host_bytes} bytes of host memory at least, in this "
                f"process: {self.staying} of them are what it restores to host memory, "
                "such as NumPy arrays, and JAX arrays on a CPU. The others are for the "
                "largest chunk, or what else is read at once. Nothing was read. "
                "Restore less at a time, with `where`, or to other devices."
            )
        in_flight = self.chunk.in_flight(spare // 2)
        return Limits(self.passing + spare // 2, in_flight, is_bound=True)


def check_max_host_bytes(max_host_bytes: int | None) -> None:
    if max_host_bytes is None:
        return
    number = as_integer(max_host_bytes)
    if number is None or number < 1:
        raise wrong(max_host_bytes, int)(
            f"`max_host_bytes` is {shown(max_host_bytes)}. Pass a positive number of "
            "bytes, such as `2**30`, or `None`."
        )


def forecast(source: Source, plan: ReadPlan, broadcast_replicas: bool) -> Forecast:
    """What a restore would cost, of which the plan is known."""
    counts = _Counts(source)
    shown = source
    if plan.derived is not None:
        shown = Transformed(source, plan.derived)
        source = Viewed(source, plan.derived)
    memory = _Memory(broadcast_replicas)
    memory.read(plan.direct)
    counts.add(shown, memory.windows)
    for part in plan.parts:
        memory.compute(part)
        counts.add(source, memory.windows)
    for read in plan.custom:
        if plan.derived is None or not read.is_computed:
            memory.read_through(read)
            counts.add(shown, memory.windows)
    chunk = counts.chunk_memory(memory.nbytes)
    others = _OBJECT_BYTES * len(plan.reads) + counts.merging
    least = memory.staying + memory.inputs + memory.passing + chunk.least + others
    most = memory.peak + chunk.usual + others
    return Forecast(
        memory.nbytes,
        counts.requests,
        most,
        min(least, most),
        memory.staying,
        memory.passing,
        chunk,
    )


class _Counts:
    """The regions of a source that are read, in chunks.

    **Attributes:**

    - `requests`: for how many chunks.
    - `merging`: the memory in which an average is made.
    """

    def __init__(self, source: Source) -> None:
        self.merging = source.host_bytes if isinstance(source, Averaged) else 0
        self._part = source if isinstance(source, PartSource) else None
        stored = self._part.checkpoint if self._part else source
        is_checkpoint = isinstance(stored, Checkpoint)
        self._waiting = 2 if is_checkpoint and stored.chunks.are_values else 0
        self._decodes = not is_checkpoint
        self._largest = self.requests = 0

    def add(self, source: Source, windows: Iterable[list[RegionRead]]) -> None:
        for window in windows:
            asked = _asked(source, window)
            if self._part is not None:
                asked = [piece for read in asked for piece in self._part.asked(read)]
            chunks: dict[str, set[int]] = {}
            for name, record, region in asked:
                shape, chunk = record.data_shape, record.chunk_shape
                nbytes = record.nbytes
                at = [0]
                if shape != chunk:
                    at = touched(region, shape, chunk)
                    nbytes = math.prod(chunk) * record.itemsize
                chunks.setdefault(name, set()).update(at)
                self._largest = max(self._largest, nbytes)
                self._decodes |= record.compression is not None
            self.requests += sum(map(len, chunks.values()))

    def chunk_memory(self, total: int) -> ChunkMemory:
        part = self._largest if self._decodes else min(self._largest, PIECE_BYTES)
        return ChunkMemory(self._largest, 2 * part, self._waiting, total)


def _asked(source: Source, reads: list[RegionRead]) -> list[RegionRead]:
    """What is asked for below a `transform`."""
    if isinstance(source, Transformed):
        return [part for read in reads for part in source.asked(read)]
    return [*map(source.asked, reads)] if isinstance(source, Viewed) else reads


class _Memory:
    """Host memory while one thing after another is read and computed.

    **Attributes:**

    - `nbytes`: what is read.
    - `peak`: the most until now.
    - `staying`: of what has been restored.
    - `passing`: the least for regions on their way.
    - `inputs`: the most that a part of a `transform` is computed from.
    - `windows`: what was read last.
    """

    def __init__(self, broadcast_replicas: bool) -> None:
        self._broadcast_replicas = broadcast_replicas
        self.nbytes = self.peak = self.staying = self.passing = self.inputs = 0
        self.windows: list[list[RegionRead]] = []

    def read(self, reads: Iterable[Read]) -> None:
        """Leaves that are read as they are, or joined."""
        self.staying = self._read(reads)

    def compute(self, part: Part) -> None:
        """Leaves of a `transform`, and what they are computed from."""
        with_inputs = self._read(part.inputs)
        outputs = sum(_computed_bytes(read) for read in part.outputs)
        self.peak = max(self.peak, with_inputs + outputs)
        self.inputs = max(self.inputs, with_inputs - self.staying)
        self.staying += outputs

    def read_through(self, read: Read) -> None:
        """A leaf with a custom `filter_spec`, which may get it as a file."""
        nbytes = read.record.nbytes
        self._read([read])
        self.peak = max(self.peak, self.staying + _COPIES * nbytes)
        self.passing = max(self.passing, _COPIES * nbytes)
        self.staying += nbytes if is_on_host(read) else 0

    def _read(self, reads: Iterable[Read]) -> int:
        """What stays, with what was there before."""
        arriving = arriving_of([*reads], self._broadcast_replicas)
        staying, waited, weak = self.staying, 0, 0
        self.windows = []
        for window in windows(items_of(arriving, USUAL), USUAL):
            costs = [cost_of(item) for item in window]
            self.windows.append([item.asked for item in window])
            self.nbytes += sum([cost.nbytes for cost in costs])
            self._put(costs, staying + waited)
            for item, cost in zip(window, costs, strict=True):
                staying += cost.staying
                if cost.passing > self.passing:
                    least = max(cost_of(piece).passing for piece in in_pieces(item))
                    self.passing = max(self.passing, least)
                if item.of.read.becomes.weak_type:
                    weak = max(weak, cost.staying)
            waited = sum([cost.passing for cost in costs if not cost.staying])
        self.peak = max(self.peak, staying + weak)
        return staying + self._spread(arriving, staying)

    def _put(self, costs: Iterable[Cost], before: int) -> None:
        """Regions are read, cast one after another, and put on devices."""
        now = before + sum([cost.memory for cost in costs])
        self.peak = max(self.peak, now)
        for cost in costs:
            if cost.cast:
                self.peak = max(self.peak, now + cost.cast)
                now += cost.cast - cost.memory
        self.peak = max(self.peak, now + sum([cost.copied for cost in costs]))

    def _spread(self, arriving: Iterable[Arriving], staying: int) -> int:
        """One replica is sent to the others; how much more stays than was read."""
        zeros = results = blocks = 0
        for read, stack, _ in arriving:
            if stack is not None:
                shard = math.prod(stack.shard_shape) * stack.integers.itemsize
                zeros += shard
                if is_on_host(read):
                    results += shard * len(stack.target.addressable_devices)
                    blocks += shard * len(stack.pieces())
        self.peak = max(self.peak, staying + zeros + results)
        self.passing = max(self.passing, zeros)
        return results - blocks


def _computed_bytes(read: Read) -> int:
    """What a computed leaf takes in host memory, on all devices of this process."""
    if not is_on_host(read):
        return 0
    sharding, record = read.place.sharding, read.becomes
    if sharding is None or 0 in record.shape:
        return record.nbytes
    parts = math.prod(record.shape) // math.prod(sharding.shard_shape(record.shape))
    return record.nbytes // parts * len(sharding.addressable_devices)
