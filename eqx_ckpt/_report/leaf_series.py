"""Each leaf in each version, read once: statistics, histograms, and changes."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from .._format.chunk_grid import batches, blocks, Region, whole
from .._format.leaf_record import from_stored, LeafRecord, SCALAR_KINDS
from .._format.source import RegionRead
from .._inspecting.array_statistics import Moments
from .._inspecting.leaf_stats import LeafStats, moments_of, stats_of
from .._lazy import Array
from .._storage.calls.threads import Pool
from .histogram import Histogram, histogram
from .leaf_change import Change, change, change_of_scalar
from .versions import Column


# Host memory for what is read of one version at a time; three of them are there.
_WINDOW = 16 * 2**20


# What one thread looks at, at a time.
_TASK = 4 * 2**20


_DATES = ("M8", "m8")


@dataclass
class Seen:
    """One leaf in one version.

    **Attributes:**

    - `stats`: `None` if it has a problem, or is no number.
    - `histogram`: of its first and its last version only.
    - `change`: from the version before, if that has a leaf of the same type.
    - `problem`: `"damaged"`, `"unreadable"`, or nothing.
    """

    record: LeafRecord
    stats: LeafStats | None = None
    histogram: Histogram | None = None
    change: Change | None = None
    problem: str = ""


class _Piece(NamedTuple):
    """A region of a leaf, and the columns in which the leaf has the same type."""

    name: str
    region: Region | None
    columns: tuple[int, ...]
    nbytes: int


class _Look(NamedTuple):
    """A piece in one column, and in the one before."""

    name: str
    column: int
    record: LeafRecord
    array: Array
    before: Array | None
    counted: bool


@dataclass
class _Total:
    """What is known so far of a leaf in a column."""

    moments: Moments = field(default_factory=Moments)
    histogram: Histogram | None = None
    change: Change | None = None

    def add(self, other: "_Total") -> None:
        self.moments = self.moments.plus(other.moments)
        if self.histogram and other.histogram:
            self.histogram = self.histogram.plus(other.histogram)
        else:
            self.histogram = self.histogram or other.histogram
        if self.change and other.change:
            self.change = self.change.plus(other.change)
        else:
            self.change = self.change or other.change


def in_all(columns: Sequence[Column]) -> Iterator[tuple[str, list[Seen | None]]]:
    """Each leaf, and what it is in each column; `None` where it is missing.

    All bytes are read once. What is in memory does not depend on how large or how many
    the leaves are: a window of some columns, and the totals of the leaves in it.
    """
    totals: dict[str, list[_Total]] = {}
    with Pool(len(os.sched_getaffinity(0))) as pool:
        for window in batches(_pieces(columns), lambda piece: piece.nbytes, _WINDOW):
            for piece in window:
                totals.setdefault(piece.name, [_Total() for _ in columns])
            for look, total in _of_window(pool, columns, window):
                totals[look.name][look.column].add(total)
            # Of the last one, there may be more in the next window.
            for name in [*totals][:-1]:
                yield name, _seen(name, columns, totals.pop(name))
    for name, found in totals.items():
        yield name, _seen(name, columns, found)


def _pieces(columns: Sequence[Column]) -> Iterator[_Piece]:
    """The pieces of all leaves, those of one leaf after one another."""
    newest_first = [column.manifest.leaves for column in reversed(columns)]
    for name in dict.fromkeys(name for leaves in newest_first for name in leaves):
        groups: dict[object, list[int]] = {}
        for i, column in enumerate(columns):
            if (record := column.manifest.leaves.get(name)) is not None:
                key = (record.is_array, record.data_type, record.data_shape)
                groups.setdefault(key, []).append(i)
        for group in groups.values():
            record = columns[group[-1]].manifest.leaves[name]
            if not record.is_array:
                yield _Piece(name, None, (), 0)
                continue
            region = whole(record.data_shape)
            for part in blocks(region, record.chunk_shape, record.itemsize):
                size = RegionRead(name, record, part).nbytes
                yield _Piece(name, part, tuple(group), size)


def _of_window(
    pool: Pool, columns: Sequence[Column], window: Sequence[_Piece]
) -> Iterator[tuple[_Look, _Total]]:
    """What is found in each piece, computed while the next column is read."""
    computing: list[Future[list[tuple[_Look, _Total]]]] = []
    before: dict[int, Array] = {}
    for i, column in enumerate(columns):
        chosen = {j: piece for j, piece in enumerate(window) if i in piece.columns}
        arrays = column.read(
            [
                RegionRead(piece.name, column.manifest.leaves[piece.name], piece.region)
                for piece in chosen.values()
                if piece.region is not None
            ]
        )
        now = {
            j: array
            for j, array in zip(chosen, arrays, strict=True)
            if array is not None
        }
        looks = [
            _Look(
                (piece := window[j]).name,
                i,
                column.manifest.leaves[piece.name],
                array,
                before.get(j),
                i in (piece.columns[0], piece.columns[-1]),
            )
            for j, array in now.items()
        ]
        done, computing = computing, []
        for future in done:
            yield from future.result()
        for task in batches(looks, lambda look: look.array.nbytes, _TASK):
            computing.append(pool.submit(_totals, task))
        before = now
    for future in computing:
        yield from future.result()


def _totals(looks: Sequence[_Look]) -> list[tuple[_Look, _Total]]:
    return [(look._replace(array=None, before=None), _total(look)) for look in looks]


def _total(look: _Look) -> _Total:
    record, array = look.record, look.array
    total = _Total(moments_of(record, array))
    is_number = record.kind not in ("key", "bytes") and record.dtype[1:3] not in _DATES
    if look.counted and is_number:
        total.histogram = histogram(from_stored(array, record), total.moments)
    if look.before is not None:
        total.change = change(look.before, array, record)
    return total


def _seen(
    name: str, columns: Sequence[Column], totals: Sequence[_Total]
) -> list[Seen | None]:
    found: list[Seen | None] = []
    before: LeafRecord | None = None
    for column, total in zip(columns, totals, strict=True):
        record = column.manifest.leaves.get(name)
        if record is None:
            found.append(None)
        elif (problem := column.problem(name)) or not (
            record.is_array or record.kind in SCALAR_KINDS
        ):
            found.append(Seen(record, problem=problem))
        else:
            moved = total.change
            if before is not None and not record.is_array:
                moved = change_of_scalar(before, record)
            stats = stats_of(record, total.moments)
            found.append(Seen(record, stats, total.histogram, moved))
        before = record
    return found
