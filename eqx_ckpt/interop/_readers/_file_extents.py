"""Arrays stored contiguously in files; reads only the regions that are needed."""

import contextlib
import functools as ft
import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import Region, shape_of
from ..._format.manifest import Manifest
from ..._format.source import RegionRead, Source
from ..._storage.calls.host_memory import copied, empty
from ..._storage.calls.worker_threads import Workers
from ..._storage.interface.foreign_file import ForeignFile, PIECE, read_exactly, Reads
from ..._types import Report


# Shorter runs are read in one, with the bytes between them, unless these are many.
_SHORT_RUN = 2**12


_LONG_ROW = 2**16


_MAX_IN_FLIGHT = 64 * 2**20


# Fills memory with an array's bytes, from a position.
ReadInto: TypeAlias = Callable[[int, memoryview], None]


class Run(NamedTuple):
    """One read: bytes of an array, and where they go.

    `box` is the shape of the data read, and `inside` the part of it that is needed;
    both are `None` if all of it is.
    """

    start: int
    nbytes: int
    target: np.ndarray
    box: tuple[int, ...] | None = None
    inside: Region | None = None

    def read(self, read: ReadInto) -> np.ndarray:
        """Read it, and return all the bytes that were read."""
        if self.box is None:
            read(self.start, self.target.data)
            return self.target.reshape(-1).view(np.uint8)
        found = np.empty(self.nbytes, np.uint8)
        read(self.start, found.data)
        self.take(found)
        return found

    def take(self, found: np.ndarray) -> None:
        """Fill the target with the bytes that were read."""
        shape = self.target.shape if self.box is None else self.box
        array = found.view(self.target.dtype).reshape(shape)
        self.target[...] = array if self.inside is None else array[self.inside]


@dataclass(frozen=True)
class Extent:
    """An array in a file: its position, and the layout of its elements.

    **Attributes:**

    - `in_order`: whether its bytes can only be read in order.
    """

    file: ForeignFile
    offset: int
    fortran_order: bool = False
    big_endian: bool = False
    in_order: ClassVar[bool] = False

    def opened(self, reads: Reads) -> ReadInto:
        def read(start: int, target: memoryview) -> None:
            read_exactly(reads, self.offset + start, target)

        return read

    def span(self, runs: Sequence[Run]) -> tuple[int, int]:
        """Where the bytes of runs are in the file, which are in its order."""
        last = runs[-1]
        return self.offset + runs[0].start, self.offset + last.start + last.nbytes


class FileSource(Source):
    """Arrays at known places in files; a few may be in memory."""

    def __init__(
        self,
        where: object,
        manifest: Manifest,
        extents: Mapping[str, Extent | np.ndarray],
    ) -> None:
        self._where = str(where)
        self._manifest = manifest
        self._extents = extents

    def __str__(self) -> str:
        return repr(self._where)

    @property
    def version(self) -> str:
        files = {e.file for e in self._extents.values() if isinstance(e, Extent)}
        told = "".join(sorted(file.version for file in files))
        return hashlib.sha256(told.encode()).hexdigest() if told else ""

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        def on_done(task: _Task, _: None) -> None:
            if report is not None:
                report(task.name, sum(run.target.nbytes for run in task.runs))

        arrays: dict[int, np.ndarray] = {}
        by_file: dict[ForeignFile, list[int]] = {}
        for i, (name, _, region) in enumerate(reads):
            extent = self._extents[name]
            if isinstance(extent, Extent):
                by_file.setdefault(extent.file, []).append(i)
            else:
                arrays[i] = copied(extent[region])
        with contextlib.ExitStack() as stack:
            opened = {file: stack.enter_context(file.opened()) for file in by_file}
            carry_out = ft.partial(_carry_out, damage)
            workers = stack.enter_context(Workers(carry_out, _MAX_IN_FLIGHT, on_done))
            for file, positions in by_file.items():
                asked = {i: reads[i] for i in positions}
                for found, task in opened[file].fetch(self._tasks(asked, arrays)):
                    nbytes = sum(run.nbytes for run in task.runs)
                    workers.put(task._replace(reads=found), nbytes)
            workers.finish()
        return [
            _as_stored(arrays[i], read.name, self._extents[read.name], damage)
            for i, read in enumerate(reads)
        ]

    def _tasks(
        self, reads: Mapping[int, RegionRead], arrays: dict[int, np.ndarray]
    ) -> Iterator[tuple[int, int, "_Task"]]:
        """What to read of one file, in its order, and where that is."""
        by_extent: dict[Extent, list[int]] = {}
        for i, read in reads.items():
            extent = self._extents[read.name]
            assert isinstance(extent, Extent)
            by_extent.setdefault(extent, []).append(i)
        for extent in sorted(by_extent, key=lambda extent: extent.offset):
            found: list[Iterator[Run]] = []
            for i in by_extent[extent]:
                arrays[i], planned = _prepared(reads[i], extent)
                found.append(planned)
            name = reads[by_extent[extent][0]].name
            merged = heapq.merge(*found, key=lambda run: run.start)
            for part in [[*merged]] if extent.in_order else ([run] for run in merged):
                if part:
                    yield *extent.span(part), _Task(name, extent, part)


def _prepared(read: RegionRead, extent: Extent) -> tuple[np.ndarray, Iterator[Run]]:
    """Allocate memory for a region, and plan how to fill it."""
    region, shape = read.region, read.record.data_shape
    if extent.fortran_order:
        region, shape = region[::-1], shape[::-1]
    array = empty(shape_of(region), read.record.data_type)
    return array, runs(region, shape, array)


def runs(region: Region, shape: Sequence[int], array: np.ndarray) -> Iterator[Run]:
    """Plan reading a region of an array in C order into `array`, run by run."""
    if array.size == 0:
        return
    if not shape:
        region, shape, array = (slice(0, 1),), (1,), array.reshape(1)
    lengths = array.shape
    axes = range(len(shape))
    row = [math.prod(shape[axis + 1 :]) * array.itemsize for axis in axes]
    axis = len(shape) - 1
    while axis > 0 and lengths[axis] == shape[axis]:
        axis -= 1
    innermost = axis
    while (
        axis > 0
        and lengths[axis] * row[axis] < _SHORT_RUN
        and row[axis - 1] <= _LONG_ROW
    ):
        axis -= 1
    outer = [range(span.start, span.stop) for span in region[:axis]]
    first = region[axis].start * row[axis]
    for index in itertools.product(*outer):
        start = sum(i * row[a] for a, i in enumerate(index)) + first
        inner = array[
            tuple(i - span.start for i, span in zip(index, region, strict=False))
        ]
        if axis == innermost:
            yield from _whole_run(start, inner)
        else:
            yield from _loose_run(start, inner, row[axis], shape, region, axis)


class _Task(NamedTuple):
    name: str
    extent: Extent
    runs: list[Run]
    reads: Reads | None = None


def _carry_out(damage: dict[str, str], task: _Task) -> None:
    assert task.reads is not None
    try:
        read = task.extent.opened(task.reads)
        # Parts of the same rows, which are read once.
        for _, same in itertools.groupby(task.runs, lambda run: run[:2]):
            first, *others = same
            found = first.read(read)
            for run in others:
                run.take(found)
    except (EOFError, CorruptCheckpointError) as e:
        damage.setdefault(task.name, str(e))


def _as_stored(
    array: np.ndarray,
    name: str,
    extent: Extent | np.ndarray,
    damage: dict[str, str],
) -> np.ndarray:
    """An array of a file, as this package represents it in memory."""
    if isinstance(extent, np.ndarray):
        return array
    if extent.big_endian:
        array = array.byteswap(inplace=True)
    if extent.fortran_order:
        array = np.ascontiguousarray(array.T)
    if array.dtype == bool and (array.view(np.uint8) > 1).any():
        damage.setdefault(name, "it has a byte that is neither true nor false")
    return array


def _whole_run(start: int, array: np.ndarray) -> Iterator[Run]:
    flat = array.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, PIECE):
        part = flat[begin : begin + PIECE]
        yield Run(start + begin, part.size, part)


def _loose_run(
    start: int,
    array: np.ndarray,
    row: int,
    shape: Sequence[int],
    region: Region,
    axis: int,
) -> Iterator[Run]:
    step = max(1, PIECE // row)
    for begin in range(0, len(array), step):
        part = array[begin : begin + step]
        box = (len(part), *shape[axis + 1 :])
        inside = (slice(None), *region[axis + 1 :])
        yield Run(start + begin * row, len(part) * row, part, box, inside)
