"""What JAX's primitives make of arrangements, if that is one too."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .arrangement import Arrangement, Cast, joined, permuted, reshaped


_Constant = Callable[[int], int | None]


def arranged(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    """What an equation makes of arrays by choosing and moving elements, or a cast.

    Nothing if it does anything else. `constant`: the value of an argument of the
    equation, if it has one.
    """
    make = _ARRANGED.get(equation.primitive.name)
    return [] if make is None else make(equation, arrays, constant)


def _slice(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    params = equation.params
    starts, stops = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or (1,) * len(starts)
    return [_cut(arrays[0], map(range, starts, stops, steps))]


def _dynamic_slice(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    array, spans = arrays[0], list[range]()
    sizes = equation.params["slice_sizes"]
    for i, (size, most) in enumerate(zip(sizes, array.shape, strict=True)):
        start = constant(i + 1)
        if start is None:
            return []
        # It is moved inside of the array.
        first = min(max(start, 0), most - size)
        spans.append(range(first, first + size))
    return [_cut(array, spans)]


def _squeeze(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    return [reshaped(arrays[0], _shape(equation))]


def _split(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    stops = itertools.accumulate(map(int, equation.params["sizes"]), initial=0)
    axis = equation.params["axis"]
    return [arrays[0].cut(axis, range(*span)) for span in itertools.pairwise(stops)]


def _unstack(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    (array,), axis, shape = arrays, equation.params["axis"], _shape(equation)
    count = array.shape[axis]
    return [reshaped(array.cut(axis, range(i, i + 1)), shape) for i in range(count)]


def _reshape(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    params = equation.params
    is_plain = params["dimensions"] is None and params.get("sharding") is None
    return [reshaped(arrays[0], _shape(equation))] if is_plain else []


def _broadcast_in_dim(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    """New axes of one element each."""
    shape, is_sharded = _shape(equation), equation.params.get("sharding") is not None
    is_plain = math.prod(shape) == math.prod(arrays[0].shape) and not is_sharded
    return [reshaped(arrays[0], shape)] if is_plain else []


def _concatenate(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    return [joined(equation.params["dimension"], arrays)]


def _stack(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    axis, shape = equation.params["axis"], _shape(equation)
    row = (*shape[:axis], 1, *shape[axis + 1 :])
    return [joined(axis, [reshaped(array, row) for array in arrays])]


def _transpose(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    return [permuted(arrays[0], equation.params["permutation"])]


def _convert_element_type(
    equation: Any, arrays: Sequence[Arrangement], constant: _Constant
) -> list[Arrangement]:
    params = equation.params
    if params.get("sharding") is not None:
        return []
    return [Cast(arrays[0], equation.primitive, tuple(params.items()))]


_ARRANGED = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "squeeze": _squeeze,
    "split": _split,
    "unstack": _unstack,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "stack": _stack,
    "transpose": _transpose,
    "convert_element_type": _convert_element_type,
}


def _cut(array: Arrangement, spans: Iterable[range]) -> Arrangement:
    """The smallest parts first: what is then thinned out is smaller."""
    order = sorted(enumerate(spans), key=lambda item: (item[1].step, len(item[1]) > 1))
    for axis, span in order:
        array = array.cut(axis, span)
    return array


def _shape(equation: Any) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape
