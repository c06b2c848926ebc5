"""Static slices of the inputs of a `transform`, which are read without the rest."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..._format.leaf_record import LeafRecord


class View(NamedTuple):
    """A part of an input: a start and a stop along each axis, and the axes that it has.

    An axis that it does not have was indexed.
    """

    input: int
    spans: tuple[tuple[int, int], ...]
    axes: tuple[int, ...]

    @classmethod
    def whole(cls, number: int, shape: Iterable[int]) -> "View":
        spans = tuple([(0, size) for size in shape])
        return cls(number, spans, tuple(range(len(spans))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in map(self._span, self.axes)])

    def _span(self, axis: int) -> tuple[int, int]:
        return self.spans[axis]

    def cut(self, axis: int, start: int, stop: int) -> "View":
        """A part of it along one of its own axes."""
        axis = self.axes[axis]
        first = self.spans[axis][0]
        span = (first + start, first + stop)
        spans = (*self.spans[:axis], span, *self.spans[axis + 1 :])
        return self._replace(spans=spans)

    def without(self, axes: Iterable[int]) -> "View":
        """It without some of its own axes, which have one element each."""
        left = [axis for i, axis in enumerate(self.axes) if i not in {*axes}]
        return self._replace(axes=tuple(left))

    def name(self, name: str, record: LeafRecord) -> str:
        """How a view of a leaf is written: no leaf has a bracket in its name."""
        parts = [
            str(start)
            if axis not in self.axes
            else ":"
            if (start, stop) == (0, record.shape[axis])
            else f"{start}:{stop}"
            for axis, (start, stop) in enumerate(self.spans)
        ]
        while parts[-1:] == [":"]:
            parts.pop()
        return f"{name}[{', '.join(parts)}]"

    def record(self, record: LeafRecord) -> LeafRecord:
        """The record of a view of a leaf, as if that were a leaf."""
        more = len(record.shape)
        shape = self.shape
        axes = (*self.axes, *range(more, len(record.data_shape)))
        data_shape = (*shape, *record.data_shape[more:])
        chunks = [record.chunk_shape[axis] for axis in axes]
        sharding = record.sharding
        if sharding is not None:
            spec = dict(enumerate(sharding["spec"]))
            sharding = {**sharding, "spec": [spec.get(axis) for axis in self.axes]}
        return record._replace(
            # A part of what a `filter_spec` wrote is no file.
            kind="numpy" if record.kind == "bytes" else record.kind,
            shape=shape,
            data_shape=data_shape,
            chunk_shape=tuple(chunks),
            sharding=sharding,
            checksums=(),
        )


def views_of(
    equation: Any, view: View, constant: Callable[[int], int | None]
) -> list[View]:
    """What an equation makes of a view, if that are views too; otherwise nothing.

    `constant`: the value of an argument of the equation, if it has one.
    """
    how, params = equation.primitive.name, equation.params
    shape = view.shape
    found: list[View] = []
    if how == "slice" and {*(params["strides"] or ())} <= {1}:
        spans = zip(params["start_indices"], params["limit_indices"], strict=True)
        found = [_cut(view, spans)]
    elif how == "dynamic_slice":
        starts = [constant(i) for i in range(1, len(shape) + 1)]
        known = [start for start in starts if start is not None]
        if len(known) == len(shape):
            found = [_cut(view, _clamped(known, params["slice_sizes"], shape))]
    elif how == "squeeze":
        found = [view.without(params["dimensions"])]
    elif how == "split":
        stops = itertools.accumulate(map(int, params["sizes"]), initial=0)
        found = [view.cut(params["axis"], *span) for span in itertools.pairwise(stops)]
    elif how == "unstack":
        axis = params["axis"]
        found = [view.cut(axis, i, i + 1).without([axis]) for i in range(shape[axis])]
    return found


def _cut(view: View, spans: Iterable[tuple[int, int]]) -> View:
    for axis, (start, stop) in enumerate(spans):
        view = view.cut(axis, start, stop)
    return view


def _clamped(
    starts: Iterable[int], sizes: Iterable[int], shape: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """The spans that `dynamic_slice` returns, all of which are inside of an array."""
    for start, size, most in zip(starts, sizes, shape, strict=True):
        first = min(max(start, 0), most - size)
        yield first, first + size
