"""Trees that are averaged, and what their average is: the rule of `average`."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .check import Tree
from .leaves import on
from .oracle import kind_of, letter, on_host


WIDE = ("float32", "float64", "complex64", "complex128")


def others(saved: Tree, count: int) -> list[Tree]:
    """The same leaves with their numbers in other places: as many trees as wanted."""
    return [
        {name: changed(x, ft.partial(np.roll, shift=k)) for name, x in saved.items()}
        for k in range(count)
    ]


def mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    def of(name: str) -> np.ndarray:
        return mean_of([on_host(tree[name]) for tree in trees], weights)

    return {
        name: changed(x, lambda _, name=name: of(name)) for name, x in trees[0].items()
    }


def changed(leaf: Any, make: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A leaf with other numbers, if such leaves are averaged."""
    kind = kind_of(leaf)
    if kind not in ("jax", "numpy", "scalar") or letter(leaf.dtype) not in "fc":
        return leaf
    if kind == "jax" and leaf.weak_type:
        return leaf
    data = make(on_host(leaf))
    if kind != "jax":
        return data if kind == "numpy" else data[()]
    with jax.enable_x64(True):
        return on(data, leaf.sharding if leaf.committed else None)


@np.errstate(all="ignore")
def mean_of(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    native = arrays[0].dtype.newbyteorder("=")
    wide = native if native.name in WIDE else np.float32
    average, total = pairs(arrays[0].astype(wide)), weights[0]
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total += weight
        new, share = pairs(array.astype(wide)), weight / total
        moved = average + (new - average) * share
        apart = average * (1 - share) + new * share
        average = np.where(np.isfinite(moved), moved, apart)
    average = average.view(wide).reshape(arrays[0].shape)
    return average.astype(arrays[0].dtype)


def pairs(array: np.ndarray) -> np.ndarray:
    """Complex numbers as the two numbers that they are."""
    array = np.atleast_1d(array)
    real = array.real.dtype if array.dtype.kind == "c" else array.dtype
    return array.view(real)
