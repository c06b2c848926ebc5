"""What Equinox's default spec makes of the `.npy` file of a leaf, and nothing else."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .likes import NONE
from .oracle import (
    dtype_of,
    key_data,
    kind_of,
    located,
    narrow,
    NUMBERS,
    on_host,
    Value,
)


def outcome(saved: Any, like: Any, casting: str = "no", to: Any = None) -> Any:
    """As `oracle.outcome`: a leaf that is like that in `like`, whatever `casting`."""
    kind = kind_of(like)
    if kind in ("jax", "struct") and dtype_of(like) == "int1":
        return NONE  # It is `jnp.asarray` that crashes.
    if kind is None:
        return Value("itself", like)
    if kind in ("jax", "struct") and narrow(dtype_of(like)) != dtype_of(like):
        return "dtype"
    data = np.asarray(saved) if kind_of(saved) in NUMBERS else stored(saved)
    if kind in ("jax", "struct"):
        return loaded(data, saved, like, to)
    if data.dtype.hasobject or kind == "key":
        return "kind"
    if kind == "numpy":
        is_plain = type(like) in (np.ndarray, np.memmap)
        same = is_plain and (data.shape, data.dtype) == (like.shape, like.dtype)
        return Value("numpy", data, data.dtype) if same else "kind"
    with contextlib.suppress(Exception):
        made = type(like)(data.item())
        if kind in NUMBERS:
            return Value(type(like), made)
        if made.dtype == like.dtype:
            return Value("scalar", np.asarray(made), made.dtype)
    return "kind"


def loaded(data: np.ndarray, saved: Any, like: Any, to: Any) -> Value | str:
    """What `jnp.load` gives: an array of NumPy, if JAX lacks its dtype."""
    if narrow(data.dtype) != data.dtype or data.dtype != like.dtype:
        return "dtype"
    if data.shape != like.shape:
        return "shape"
    try:
        with jax.ensure_compile_time_eval():
            array = jnp.asarray(data)
    except (TypeError, AssertionError):
        is_free = kind_of(like) == "struct" and like.sharding is None
        return Value("numpy", data, data.dtype) if is_free else "kind"
    except Exception:  # Such as a NaN under `jax.debug_nans`.
        return "kind"
    value = located(Value("jax", data, data.dtype), saved, like, to)
    if isinstance(value, str) or value.where is not None:
        return value
    # What a spec makes stays where JAX makes it.
    return value._replace(where=array.sharding if array.committed else None)


def stored(leaf: Any) -> np.ndarray:
    is_key = kind_of(leaf) == "key"
    return on_host(key_data(leaf) if is_key else leaf)
