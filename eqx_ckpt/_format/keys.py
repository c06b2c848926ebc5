"""Typed PRNG keys, and their data."""

import functools as ft
from typing import Any

from .lazy import jax, jnp


@ft.cache
def key_impl(dtype: Any) -> str | None:
    """The PRNG implementation of a dtype of typed keys; `None` for other dtypes."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    with jax.ensure_compile_time_eval():
        return str(jax.random.key_impl(jnp.empty((), dtype)))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and key_impl(leaf.dtype) is not None


def key_data(keys: "jax.Array") -> "jax.Array":
    """Their data now, even while JAX traces a function that uses them."""
    with jax.ensure_compile_time_eval():
        return jax.random.key_data(keys)
