"""Arrays that are made of parts of others: what is read for a part of them.

A part of an arrangement is an arrangement of parts, so what it does not need is not
read.
"""

import abc
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._format.chunk_grid import touched


# A part of an array that is read in more pieces would take long to compile.
_MOST_PIECES = 1024


class Arrangement(abc.ABC):
    """An array, of which a part is known by what it is made of."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def chunks(self) -> set[tuple[int, int]]:
        """The chunks that are read for it: inputs, and positions in their grids."""

    def cut(self, axis: int, span: range) -> "Arrangement":
        """A part of it: some of its indices along one axis."""
        if len(span) == self.shape[axis]:
            return self
        if len(span) < 2:
            span = range(span.start, span.start + len(span))
        return self._cut(axis, span)

    @abc.abstractmethod
    def _cut(self, axis: int, span: range) -> "Arrangement": ...

    def without(self, axes: Collection[int]) -> "Arrangement":
        """It without some of its axes, which have one element each."""
        return Reshaped(self, _left(self.shape, axes))


@dataclass(frozen=True)
class View(Arrangement):
    """A part of an input: a start and a stop along each axis, and the axes that it has.

    An axis that it does not have was indexed. `grid`: the shapes of the stored array
    and of its chunks.
    """

    input: int
    spans: tuple[tuple[int, int], ...]
    axes: tuple[int, ...]
    grid: tuple[tuple[int, ...], tuple[int, ...]] = field(compare=False)

    @classmethod
    def whole(
        cls,
        number: int,
        shape: Iterable[int],
        grid: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> "View":
        spans = tuple([(0, size) for size in shape])
        return cls(number, spans, tuple(range(len(spans))), grid)

    @property
    def shape(self) -> tuple[int, ...]:
        spans = self.spans
        return tuple([spans[axis][1] - spans[axis][0] for axis in self.axes])

    def _cut(self, axis: int, span: range) -> Arrangement:
        if span.step > 1:
            return _thinned(self, axis, span)
        own = self.axes[axis]
        first = self.spans[own][0]
        new = (first + span.start, first + span.stop)
        spans = (*self.spans[:own], new, *self.spans[own + 1 :])
        return View(self.input, spans, self.axes, self.grid)

    def without(self, axes: Collection[int]) -> Arrangement:
        return View(self.input, self.spans, _left(self.axes, axes), self.grid)

    def chunks(self) -> set[tuple[int, int]]:
        shape, chunk = self.grid
        # The data of a key have axes of their own, which come last.
        more = [(0, size) for size in shape[len(self.spans) :]]
        region = tuple(itertools.starmap(slice, (*self.spans, *more)))
        return {(self.input, i) for i in touched(region, shape, chunk)}


@dataclass(frozen=True)
class Made(Arrangement):
    """An array that is a constant, or is computed: the variable of that number."""

    number: int
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def _cut(self, axis: int, span: range) -> Arrangement:
        return Sliced(self, axis, span)

    def chunks(self) -> set[tuple[int, int]]:
        return set()


class Rearranged(Arrangement):
    """Other arrays, its `parts`, in another order or shape, or some of their elements.

    Called with these as arrays, it computes itself.
    """

    @property
    @abc.abstractmethod
    def parts(self) -> Sequence[Arrangement]: ...

    @abc.abstractmethod
    def __call__(self, *arrays: Any) -> Any: ...

    def chunks(self) -> set[tuple[int, int]]:
        return {chunk for part in self.parts for chunk in part.chunks()}


@dataclass(frozen=True)
class Joined(Rearranged):
    """Arrays one after another along an axis."""

    axis: int
    arrays: tuple[Arrangement, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        size = sum([part.shape[self.axis] for part in self.parts])
        return _with(self.parts[0].shape, self.axis, size)

    @property
    def parts(self) -> Sequence[Arrangement]:
        return self.arrays

    def _cut(self, axis: int, span: range) -> Arrangement:
        if axis != self.axis:
            return joined(self.axis, [part.cut(axis, span) for part in self.parts])
        if not span:
            return self.parts[0].cut(axis, range(0))
        return joined(axis, [*self._cut_along(span)])

    def _cut_along(self, span: range) -> Iterator[Arrangement]:
        first, step = 0, span.step
        for part in self.parts:
            size = part.shape[self.axis]
            behind = max(0, -((span.start - first) // step))
            start = span.start + behind * step - first
            stop = min(size, span.stop - first)
            if start < stop:
                yield part.cut(self.axis, range(start, stop, step))
            first += size

    def without(self, axes: Collection[int]) -> Arrangement:
        return joined(
            _after(self.axis, axes), [part.without(axes) for part in self.parts]
        )

    def __call__(self, *arrays: Any) -> Any:
        return jax.lax.concatenate(arrays, self.axis)

    def __str__(self) -> str:
        return f"concatenate along {self.axis}"


@dataclass(frozen=True)
class OfOne(Rearranged):
    """One array in another order or shape, or some of its elements."""

    of: Arrangement

    @property
    def parts(self) -> Sequence[Arrangement]:
        return (self.of,)


@dataclass(frozen=True)
class Permuted(OfOne):
    """An array with its axes in another order."""

    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.of.shape
        return tuple([shape[axis] for axis in self.order])

    def _cut(self, axis: int, span: range) -> Arrangement:
        return permuted(self.of.cut(self.order[axis], span), self.order)

    def without(self, axes: Collection[int]) -> Arrangement:
        dropped = [self.order[axis] for axis in axes]
        left = [axis for axis in self.order if axis not in dropped]
        order = tuple([_after(axis, dropped) for axis in left])
        return permuted(self.of.without(dropped), order)

    def __call__(self, *arrays: Any) -> Any:
        return jax.lax.transpose(arrays[0], self.order)

    def __str__(self) -> str:
        return f"transpose to {self.order}"


@dataclass(frozen=True)
class Cast(OfOne):
    """An array of another dtype; `params` are those of JAX's primitive."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def _cut(self, axis: int, span: range) -> Arrangement:
        return Cast(self.of.cut(axis, span), self.primitive, self.params)

    def without(self, axes: Collection[int]) -> Arrangement:
        return Cast(self.of.without(axes), self.primitive, self.params)

    def __call__(self, *arrays: Any) -> Any:
        return self.primitive.bind(arrays[0], **dict(self.params))

    def __str__(self) -> str:
        return f"cast by {self.params}"


@dataclass(frozen=True)
class Sliced(OfOne):
    """Some of the indices of an array that is read whole."""

    axis: int
    span: range

    @property
    def shape(self) -> tuple[int, ...]:
        return _with(self.of.shape, self.axis, len(self.span))

    def _cut(self, axis: int, span: range) -> Arrangement:
        if axis == self.axis:
            return self.of.cut(axis, self.span[span.start : span.stop : span.step])
        inner = self.of.cut(axis, span)
        if isinstance(inner, Sliced):
            return Sliced(inner, self.axis, self.span)
        return inner.cut(self.axis, self.span)

    def __call__(self, *arrays: Any) -> Any:
        start, stop, step = self.span.start, self.span.stop, self.span.step
        return jax.lax.slice_in_dim(arrays[0], start, stop, step, self.axis)

    def __str__(self) -> str:
        return f"{self.span} along {self.axis}"


@dataclass(frozen=True)
class Reshaped(OfOne):
    """An array of another shape, in C order."""

    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def _cut(self, axis: int, span: range) -> Arrangement:
        shape = _with(self.shape, axis, len(span))
        if 0 in shape:
            return reshaped(_nothing(self.of), shape)
        inner, outer = self._group(axis)
        wide = [i for i in inner if self.of.shape[i] > 1]
        before = [i for i in outer if i < axis and self.shape[i] > 1]
        rest = math.prod(self.shape[axis + 1 : outer.stop])
        if len(wide) == 1 and not before and rest == 1:
            return reshaped(self.of.cut(wide[0], span), shape)
        if span.step > 1:
            return _thinned(self, axis, span)
        if not before:
            run = range(span.start * rest, span.stop * rest)
            return reshaped(_run(self.of, inner, run), shape)
        whole, along = Sliced(self, axis, span), before[0]
        if math.prod([self.shape[i] for i in before]) > _MOST_PIECES:
            return whole
        return _in_pieces(
            whole,
            along,
            self.shape[along],
            lambda i: self.cut(along, range(i, i + 1)).cut(axis, span),
        )

    def _group(self, axis: int) -> tuple[range, range]:
        """The fewest axes that become others with an axis: those before and after."""
        before, after = self.of.shape, self.shape
        i = j = 0
        while True:
            first, own = i, j
            i, j = i + 1, j + 1
            while (n := math.prod(before[first:i])) != (m := math.prod(after[own:j])):
                i, j = (i + 1, j) if n < m else (i, j + 1)
            if axis < j:
                return range(first, i), range(own, j)

    def without(self, axes: Collection[int]) -> Arrangement:
        return reshaped(self.of, _left(self.shape, axes))

    def __call__(self, *arrays: Any) -> Any:
        return jax.lax.reshape(arrays[0], self.shape)

    def __str__(self) -> str:
        return f"reshape to {self.shape}"


def joined(axis: int, parts: Sequence[Arrangement]) -> Arrangement:
    """Arrays one after another along an axis."""
    parts = [part for part in parts if part.shape[axis]] or [parts[0]]
    return parts[0] if len(parts) == 1 else Joined(axis, tuple(parts))


def permuted(array: Arrangement, order: Sequence[int]) -> Arrangement:
    """An array with its axes in another order."""
    if isinstance(array, Permuted):
        array, order = array.of, [array.order[axis] for axis in order]
    return array if [*order] == [*range(len(order))] else Permuted(array, tuple(order))


def reshaped(array: Arrangement, shape: Sequence[int]) -> Arrangement:
    """An array of another shape, in C order."""
    if isinstance(array, Reshaped):
        array = array.of
    if array.shape == tuple(shape):
        return array
    extra = _extra_axes(array.shape, shape)
    return array.without(extra) if extra else Reshaped(array, tuple(shape))


def rows(array: Arrangement) -> list[View]:
    """The inputs that an array is, one after another along its first axis.

    Each is some rows of it, or one row; none if it is anything else.
    """
    if isinstance(array, View):
        return [array]
    if isinstance(array, Reshaped) and isinstance(array.of, View):
        return [array.of] if array.shape == (1, *array.of.shape) else []
    if not isinstance(array, Joined) or array.axis != 0:
        return []
    found = [rows(part) for part in array.parts]
    return [view for part in found for view in part] if all(found) else []


def _run(array: Arrangement, inner: range, run: range) -> Arrangement:
    """A run of the elements along adjacent axes, which become one."""
    first, last, rest = run.start, run.stop - 1, 1
    shape = array.shape
    for axis in inner:
        rest = math.prod(shape[axis + 1 : inner.stop])
        start, stop = first // rest, last // rest + 1
        array = array.cut(axis, range(start, stop))
        first, last = first - start * rest, last - start * rest
        if stop - start > 1:
            break
    size = math.prod(array.shape[inner.start : inner.stop])
    flat = reshaped(array, (*shape[: inner.start], size, *shape[inner.stop :]))
    if size == len(run):
        return flat
    # The end of a row, whole rows, and the beginning of another one.
    ends = [first, -(-first // rest) * rest, (last + 1) // rest * rest, last + 1]
    runs = [range(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]
    return _in_pieces(
        Sliced(flat, inner.start, range(first, last + 1)),
        inner.start,
        len(runs),
        lambda i: _run(array, inner, runs[i]),
    )


def _thinned(array: Arrangement, axis: int, span: range) -> Arrangement:
    """Every so many indices along an axis."""
    bounded = array.cut(axis, range(span.start, span[-1] + 1))
    step, size = span.step, bounded.shape[axis]
    return _in_pieces(
        Sliced(bounded, axis, range(0, size, step)),
        axis,
        len(span),
        lambda i: bounded.cut(axis, range(i * step, i * step + 1)),
    )


def _in_pieces(
    whole: Arrangement, axis: int, count: int, piece: Callable[[int], Arrangement]
) -> Arrangement:
    """The same array, made of pieces if fewer chunks are read for them."""
    if count > _MOST_PIECES or (most := len(whole.chunks())) < 2:
        return whole
    pieces = joined(axis, [*map(piece, range(count))])
    return pieces if len(pieces.chunks()) < most else whole


def _nothing(array: Arrangement) -> Arrangement:
    """A part of an array that has no elements."""
    if not array.shape:
        return Sliced(Reshaped(array, (1,)), 0, range(0))
    return array if 0 in array.shape else array.cut(0, range(0))


def _extra_axes(shape: Sequence[int], left: Sequence[int]) -> list[int]:
    """The axes of one element without which a shape is another one, if it is."""
    extra: list[int] = []
    for axis, size in enumerate(shape):
        i = axis - len(extra)
        if i < len(left) and left[i] == size:
            continue
        if size != 1:
            return []
        extra.append(axis)
    return extra if len(shape) - len(extra) == len(left) else []


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _left(items: Sequence[int], axes: Collection[int]) -> tuple[int, ...]:
    return tuple([item for i, item in enumerate(items) if i not in axes])


def _after(axis: int, dropped: Collection[int]) -> int:
    """The position of an axis when others are gone."""
    return axis - sum([other < axis for other in dropped])
