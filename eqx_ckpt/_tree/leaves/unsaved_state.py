"""Leaves that are not saved although they hold mutable state."""

import functools as ft
import logging
import numbers
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import jax
import numpy as np

from ..._errors import warn
from .leaf_kinds import Skipped


# What a program makes again as it was. `Skipped`: a `filter_spec` knew what it did.
STATIC = (
    bytes,
    Enum,
    jax.custom_jvp,
    jax.custom_vjp,
    jax.Device,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
    logging.Logger,
    np.dtype,
    np.ufunc,
    range,
    Skipped,
    slice,
    str,
    type,
    type(...),
    type(jax.jit(lambda: None)),
    types.FunctionType,
    types.ModuleType,
)


_DATA = (
    jax.Array,
    np.ndarray,
    np.random.BitGenerator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)


_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


# A layer in a list in a model that is no PyTree.
_DEPTH = 4


_SHOWN = 10


def warn_of_state(leaves: Mapping[str, Any]) -> None:
    """Warn of the leaves that have state, which is not saved."""
    found = [
        f"{name!r} (a `{type(leaf).__name__}`)"
        for name, leaf in leaves.items()
        if _has_state(leaf)
    ]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    warn(
        f"These leaves have state that is not saved: {', '.join(found[:_SHOWN])}"
        f"{more}. A restore keeps what `like` has for them. Put what has to be saved "
        "into arrays and numbers, such as `rng.bit_generator.state` of a NumPy "
        "generator; or write it with a `filter_spec`. A `filter_spec` that leaves them "
        "out ends this warning."
    )


def _has_state(leaf: Any) -> bool:
    return _holds_data(leaf, _DEPTH) or (not callable(leaf) and _is_mutable(leaf))


def _holds_data(thing: Any, depth: int) -> bool:
    """Whether it holds arrays or random generators, as attributes or arguments."""
    if isinstance(thing, _DATA):
        return True
    if depth == 0 or isinstance(thing, STATIC):
        return False
    return any(_holds_data(inner, depth - 1) for inner in _inside(thing))


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, ft.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, _METHODS):
        return (thing.__self__,)
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, list | tuple):
        return thing
    return getattr(thing, "__dict__", {}).values()


def _is_mutable(leaf: Any) -> bool:
    """Whether an object is mutable, by the conventions of Python.

    An object with a hash of its own is a value, such as a date or a frozen dataclass.
    One without, or hashed by identity, may be mutable, unless it is empty.
    """
    kind = type(leaf)
    if isinstance(leaf, Mapping):
        return len(leaf) > 0  # JAX does not look into it, as it does into a `dict`.
    if isinstance(leaf, Iterator | numbers.Number) or hasattr(kind, "__array__"):
        return True
    if kind.__hash__ is not object.__hash__:
        return kind.__hash__ is None
    return (
        object.__getstate__(leaf) is not None
        or kind.__reduce__ is not object.__reduce__
    )
