"""The tree that a function makes, before JAX has computed any of it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree


class Traced(jax.ShapeDtypeStruct):
    """Stands for a JAX array; any other struct may be what NumPy's becomes as well."""

    stands_for = "jax"


def skeleton(make: Callable[..., PyTree], *args: Any) -> PyTree:
    """What `make` returns, with a struct for each JAX array.

    Leaves of NumPy are there themselves: NumPy does not wait for JAX to compute, and
    JAX would narrow them, or not know their dtype.
    """
    dynamic, static = traced_arguments(args)

    def run(dynamic: Any) -> PyTree:
        return jtu.tree_map(_hidden, make(*eqx.combine(dynamic, static)))

    return jtu.tree_map(_shown, eqx.filter_eval_shape(run, dynamic))


def traced_arguments(args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The arguments that JAX traces, and the others, among which are those of NumPy."""
    return eqx.partition(
        args, lambda x: isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    )


class _Hidden:
    """Hides a leaf from JAX."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _hidden(leaf: Any) -> Any:
    is_known = isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)
    return _Hidden(leaf) if is_known else leaf


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, _Hidden):
        return leaf.leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    shape, dtype, weak_type = leaf.shape, leaf.dtype, leaf.weak_type
    return Traced(shape, dtype, sharding=leaf.sharding, weak_type=weak_type)
