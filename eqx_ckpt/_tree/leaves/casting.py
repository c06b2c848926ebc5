"""Casting leaves of the checkpoint to the leaves of `like`."""

import functools as ft
import re
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._format.dtype_names import is_numpys, OF_JAX, SIX_BITS
from ..._format.leaf_record import LeafRecord, SCALAR_KINDS, tag_and_data_type


_WIDE = ("float64", "int64", "uint64", "complex128")


Casting: TypeAlias = Literal["no", "safe", "same_kind", "unsafe"]


WORDS: tuple[Casting, ...] = ("no", "safe", "same_kind", "unsafe")


_ARRAYS = ("jax", "numpy", "numpy_scalar")


# As in the names of dtypes; each can become itself, or one after it.
_KINDS = ("bool", "uint", "int", "float", "complex")


_DTYPES = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}


Problem: TypeAlias = Literal["kind", "shape", "dtype"]


def becomes(
    expected: LeafRecord, found: LeafRecord, casting: Casting
) -> LeafRecord | Problem:
    """What `found` becomes where `expected` is wanted, or how they differ."""
    kind = found.kind if expected.kind == "struct" else expected.kind
    if expected.sharding is not None and kind in _ARRAYS:
        kind = "jax"  # Only a JAX array can have the sharding of a struct.
    # First what most leaves are, as there may be 100,000.
    if (kind, expected.dtype, expected.shape) == found[:3] and kind in _ARRAYS:
        return "dtype" if kind == "jax" and not is_jaxs(found.dtype) else found
    if not {expected.kind, found.kind}.isdisjoint(("key", "bytes", "unknown")):
        return _exactly(expected, found)
    if found.kind in SCALAR_KINDS and kind == found.kind:
        return found if expected.kind == kind else "kind"
    is_number = expected.kind in SCALAR_KINDS
    if kind not in (*_ARRAYS, *SCALAR_KINDS):
        return "kind"
    if expected.shape != found.shape:
        return "kind" if is_number or found.kind in SCALAR_KINDS else "shape"
    old, new = dtype_of(found), dtype_of(expected)
    allowed = WORDS[: WORDS.index(casting) + 1]
    is_allowed = casting_word(old, new) in allowed
    if not is_allowed and expected.kind == "struct" and narrowed(old) == new:
        # `eqx.filter_eval_shape` narrows NumPy's dtypes, too: it stays as it was saved.
        is_allowed, new = kind != "jax", old
    if not is_allowed:
        number = is_number or found.kind in SCALAR_KINDS
        return "kind" if number and casting == "no" else "dtype"
    if kind == "jax" and not is_jaxs(new):
        return "dtype"
    if kind == found.kind and old == new:
        return found
    if is_number:
        return LeafRecord(kind, path=found.path)
    _, data_type = tag_and_data_type(np.dtype(new))
    return found._replace(
        kind=kind,
        dtype=new,
        data_type=data_type,
        weak_type=found.weak_type and kind == found.kind and old == new,
        value=None,
    )


def _exactly(expected: LeafRecord, found: LeafRecord) -> LeafRecord | Problem:
    if expected.kind != found.kind:
        return "kind"
    if expected.shape != found.shape:
        return "shape"
    return found if expected.impl == found.impl else "dtype"


def dtype_of(record: LeafRecord) -> str:
    """The dtype of a leaf; Python numbers count as 64 bits wide."""
    return _DTYPES.get(record.kind, record.dtype)


@ft.cache
def casting_word(old: str, new: str) -> Casting | None:
    """The strictest word that allows a cast, as NumPy defines it."""
    if old == new:
        return "no"
    a, b = np.dtype(old), np.dtype(new)
    # Of the dtypes of `ml_dtypes`, NumPy calls casts safe that are not.
    can_cast = np.can_cast if is_numpys(a) and is_numpys(b) else _can_cast
    return next((word for word in WORDS[1:] if can_cast(a, b, word)), None)


def _can_cast(old: np.dtype, new: np.dtype, word: Casting) -> bool:
    """`numpy.can_cast`, for dtypes of `ml_dtypes`."""
    if not np.can_cast(old, new, "unsafe"):
        return False
    if word == "unsafe":
        return True
    goes_up = _KINDS.index(_kind(old)) <= _KINDS.index(_kind(new))
    return goes_up and (word == "same_kind" or _is_exact(old, new))


def _kind(dtype: np.dtype) -> str:
    found = re.search("|".join(_KINDS), dtype.name)
    assert found is not None
    return found[0]


@np.errstate(all="ignore")
def _is_exact(old: np.dtype, new: np.dtype) -> bool:
    """Whether a cast keeps every value: all are tried, where they are few."""
    if old.itemsize > 2:
        return False
    if _kind(old) == "float":
        bits = np.arange(2**16, dtype=np.uint16)
        # Each smaller float is a bfloat16, too.
        values = bits.view(old if old.itemsize == 2 else jnp.bfloat16).astype(old)
    else:
        values = np.arange(-(2**15), 2**16).astype(old)
    before, after = (np.real(v.astype(complex)) for v in (values, values.astype(new)))
    same = (before == after) & (np.signbit(before) == np.signbit(after))
    return bool((same | (np.isnan(before) & np.isnan(after))).all())


def narrowed(dtype: str) -> str:
    """The dtype to which JAX would silently narrow an array."""
    is_wide = dtype in _WIDE
    return jax.dtypes.canonicalize_dtype(dtype).name if is_wide else dtype


def would_narrow(dtype: str) -> bool:
    return narrowed(dtype) != dtype


def is_jaxs(dtype: str) -> bool:
    """Whether a JAX array can have this dtype now."""
    if dtype in OF_JAX:
        return not would_narrow(dtype)
    return dtype in SIX_BITS and _has_arrays_of(dtype)


@ft.cache
def _has_arrays_of(dtype: str) -> bool:
    """Ask JAX itself, because it depends on its version and on the device."""
    try:
        with jax.ensure_compile_time_eval():
            jax.device_put(np.zeros((), dtype))
    except (TypeError, RuntimeError):
        return False
    return True


def cast_dtype(old: LeafRecord, new: LeafRecord) -> np.dtype | None:
    """The dtype to cast an array to on the host; `None` if it stays as it is."""
    if old.dtype == new.dtype or new.kind in ("key", "bytes"):
        return None
    is_integer = re.match("bool|uint|int", old.dtype)
    if new.kind == "int" and is_integer:
        return None  # Python's integers hold all values.
    return np.dtype(dtype_of(new))


def cast_number(value: Any, dtype: np.dtype) -> np.ndarray:
    """A Python number as an array of another dtype; it counts as one of 64 bits.

    `OverflowError` if it is an integer of more bits, and the dtype is for fewer.
    """
    old = _DTYPES[type(value).__name__]
    if old == "int64" and not -(2**63) <= value < 2**63:
        is_integer = not re.match("bool|bfloat|float|complex", dtype.name)
        old = "uint64" if is_integer else "float64"
        if is_integer and dtype != np.uint64:
            raise OverflowError("This integer has more than 64 bits.")
    return np.asarray(value, old).astype(dtype)


def number(value: Any, kind: str) -> Any:
    """A Python number as one of another kind."""
    if kind == "int" and isinstance(value, bool):
        return int(value)
    return cast_number(value, np.dtype(_DTYPES[kind])).item()
