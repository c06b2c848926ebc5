"""Arrays stored contiguously in files; reads only the regions that are needed."""

import contextlib
import functools as ft
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from ..._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ..._format.chunk_grid import Region, shape_of
from ..._format.manifest import Manifest
from ..._format.source import RegionRead, Source
from ..._storage.calls.file_reads import FileReads
from ..._storage.calls.host_memory import copied, empty
from ..._storage.calls.opening import NotPlain, open_plain
from ..._storage.calls.store_path import local_path
from ..._storage.calls.worker_threads import Workers
from ..._types import PathLike, Report


# Bytes that one thread reads at a time.
_PIECE = 8 * 2**20


# Shorter runs are read in one, with the bytes between them, unless these are many.
_SHORT_RUN = 2**12


_LONG_ROW = 2**16


_MAX_IN_FLIGHT = 64 * 2**20


class File:
    """A local file that must not change after it was first opened."""

    def __init__(self, path: PathLike) -> None:
        self.path = local_path(path)
        with self._open() as reads:
            self._identity = _identity(reads)
        self.size = self._identity[0]

    @contextlib.contextmanager
    def opened(self) -> Generator[FileReads, None, None]:
        """Open it; raise if the file is, or becomes, a different one."""
        with self._open() as reads:
            self._check(reads)
            try:
                yield reads
            finally:
                self._check(reads)

    @contextlib.contextmanager
    def _open(self) -> Generator[FileReads, None, None]:
        try:
            reads = FileReads(*open_plain(self.path, follow=True), self.path)
        # A `ValueError` is of a path that no file can have: it has a NUL, perhaps.
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise CheckpointNotFoundError(f"There is no file {self.path!r}.") from None
        except NotPlain:
            raise CheckpointError(f"{self.path!r} is not a file.") from None
        try:
            yield reads
        finally:
            reads.close()

    def _check(self, reads: FileReads) -> None:
        if _identity(reads) != self._identity:
            raise CheckpointError(
                f"{self.path!r} was changed after it had been opened. Open it again, "
                "when nobody writes to it."
            )


def _identity(reads: FileReads) -> tuple[int, int, int, int]:
    status = os.fstat(reads.fd)
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def read_exactly(reads: FileReads, offset: int, target: memoryview) -> None:
    """Fill `target` from a file; `EOFError` if that ends before."""
    if target:
        try:
            reads.fill([target], offset, len(target))
        except CorruptCheckpointError:
            raise EOFError(f"the file ends at byte {reads.nbytes}") from None


def read_bytes(reads: FileReads, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    read_exactly(reads, offset, memoryview(data))
    return bytes(data)


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

    def read(self, read: ReadInto) -> None:
        if self.box is None:
            read(self.start, self.target.data)
            return
        scratch = np.empty(self.nbytes, np.uint8)
        read(self.start, scratch.data)
        found = scratch.view(self.target.dtype).reshape(self.box)
        self.target[...] = found[self.inside]


@dataclass(frozen=True)
class Extent:
    """An array in a file: its position, and the layout of its elements.

    **Attributes:**

    - `in_order`: whether its bytes can only be read in order.
    """

    file: File
    offset: int
    fortran_order: bool = False
    big_endian: bool = False
    in_order: ClassVar[bool] = False

    def opened(self, reads: FileReads) -> ReadInto:
        def read(start: int, target: memoryview) -> None:
            read_exactly(reads, self.offset + start, target)

        return read


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

        arrays: list[np.ndarray] = []
        with contextlib.ExitStack() as stack:
            extents = [self._extents[read.name] for read in reads]
            files = {extent.file for extent in extents if isinstance(extent, Extent)}
            opened = {file: stack.enter_context(file.opened()) for file in files}
            carry_out = ft.partial(_carry_out, damage)
            workers = stack.enter_context(Workers(carry_out, _MAX_IN_FLIGHT, on_done))
            for read, extent in zip(reads, extents, strict=True):
                if isinstance(extent, np.ndarray):
                    arrays.append(copied(extent[read.region]))
                    continue
                array, found = _prepared(read, extent)
                arrays.append(array)
                parts = [[*found]] if extent.in_order else ([run] for run in found)
                for part in parts:
                    task = _Task(read.name, extent, opened[extent.file], part)
                    workers.put(task, sum(run.nbytes for run in part))
            workers.finish()
        return [
            _as_stored(array, read.name, extent, damage)
            for array, read, extent in zip(arrays, reads, extents, strict=True)
        ]


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
    reads: FileReads
    runs: list[Run]


def _carry_out(damage: dict[str, str], task: _Task) -> None:
    try:
        read = task.extent.opened(task.reads)
        for run in task.runs:
            run.read(read)
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
    for begin in range(0, flat.size, _PIECE):
        part = flat[begin : begin + _PIECE]
        yield Run(start + begin, part.size, part)


def _loose_run(
    start: int,
    array: np.ndarray,
    row: int,
    shape: Sequence[int],
    region: Region,
    axis: int,
) -> Iterator[Run]:
    step = max(1, _PIECE // row)
    for begin in range(0, len(array), step):
        part = array[begin : begin + step]
        box = (len(part), *shape[axis + 1 :])
        inside = (slice(None), *region[axis + 1 :])
        yield Run(start + begin * row, len(part) * row, part, box, inside)
