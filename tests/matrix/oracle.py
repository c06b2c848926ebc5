"""What a restore gives: the rules of `docs/usage/restoring.md`, and nothing else."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .where import where_to


NUMBERS = (bool, int, float, complex)
COUNT_AS = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_FLOATS = {"float32", "float64", "complex64", "complex128"}
_SMALL = {"bfloat16", "float16", *_FLOATS}
_INTS = {"int8", "int16", "int32", "int64"}
_TINY_FLOATS = (
    "float4_e2m1fn float6_e2m3fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
# Only the newest JAX has arrays of these.
LACKED = () if jax.__version_info__ >= (0, 11) else ("float6_e2m3fn", "float6_e3m2fn")
# What keeps every value, where one of the two dtypes is JAX's own.
SAFE = {
    **dict.fromkeys(_TINY_FLOATS, {"float64", "complex128"}),
    **dict.fromkeys(
        ["int1", "int2", "uint2", "uint4"], {*_INTS, "float64", "complex128"}
    ),
    "bool": {"bfloat16", "int4", "float8_e4m3fn"},
    "int8": {"bfloat16"},
    "uint8": {"bfloat16"},
    "bfloat16": _FLOATS,
    "int4": {"float8_e4m3fn", *_INTS, *_SMALL},
    "float8_e4m3fn": _SMALL,
}


class Value(NamedTuple):
    """A leaf, exactly.

    `where` is its sharding. `None` is the default device, another device that one, but
    uncommitted; a mesh is any sharding on it.
    """

    kind: Any
    data: Any
    dtype: Any = None
    weak: bool = False
    where: Any = None
    # What `match` says of it.
    status: str = "same"


def outcome(saved: Any, like: Any, casting: str = "no", to: Any = None) -> Value | str:
    """The leaf that a restore gives, or the status by which `match` refuses it."""
    old = kind_of(saved)
    new = wanted(old, like)
    if is_unknown(like):
        return "kind"
    if new is None or (old == "key") != (new == "key"):
        return "kind"
    if old == new and old in NUMBERS:
        status = "same" if repr(old(saved)) == repr(old(like)) else "value"
        return number_like(like, saved, status)
    is_number = old in NUMBERS or new in NUMBERS
    if np.shape(saved) != np.shape(like):
        return "kind" if is_number else "shape"
    before, after = dtype_of(saved), dtype_of(like)
    if old == "key":
        data = on_host(key_data(saved))
        same = Value("key", data, before)
        return located(same, saved, like, to) if before == after else "dtype"
    if not is_allowed(before, after, casting):
        if not (kind_of(like) == "struct" and after == narrow(before)):
            return "kind" if is_number and casting == "no" else "dtype"
        after = before  # `eqx.filter_eval_shape` has narrowed it.
    if new == "jax" and (narrow(after) != after or not is_jaxs(after)):
        return "dtype"
    if new in NUMBERS and type(like) is not new and old not in NUMBERS:
        return "kind"  # An array is not the member of an enumeration.
    data = as_dtype(saved, after)
    if data is None:
        return "kind"
    status = "same" if before == after else "cast"
    if new in NUMBERS:
        # Python's integers hold all values.
        exact = new is int and before.kind in "biu" and old not in NUMBERS
        number = int(on_host(saved)) if exact else data.item()
        return number_like(like, number, status)
    is_weak = old == "jax" and saved.weak_type and before == after
    value = Value(new, data, after, new == "jax" and is_weak, status=status)
    return located(value, saved, like, to) if new == "jax" else value


def located(value: Value, saved: Any, like: Any, to: Any) -> Value | str:
    where = where_to(saved, like, to)
    return where if isinstance(where, str) else value._replace(where=where)


class Computed(jax.ShapeDtypeStruct):
    """Stands for an array that JAX will compute."""


def kind_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key"
        return "jax" if isinstance(leaf, jax.Array | Computed) else "struct"
    if isinstance(leaf, np.ndarray | np.generic):
        return "numpy" if isinstance(leaf, np.ndarray) else "scalar"
    return next((number for number in NUMBERS if isinstance(leaf, number)), None)


def key_data(keys: jax.Array) -> jax.Array:
    with jax.ensure_compile_time_eval():
        return jax.random.key_data(keys)


def on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.size:
            return np.empty(leaf.shape, leaf.dtype)
        with jax.enable_x64(True):
            return np.asarray(everywhere(leaf).addressable_data(0))
    return np.asarray(leaf)


def everywhere(leaf: jax.Array) -> jax.Array:
    """The whole array on each device of several processes."""
    target = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    # Some versions of JAX cannot compute in other memory, nor move what is sharded.
    parts = [
        jax.device_put(np.asarray(x.data), x.device) for x in leaf.addressable_shards
    ]
    sharding = leaf.sharding.with_memory_kind(None)
    leaf = jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
    return jax.jit(lambda x: x, out_shardings=target)(leaf)


def is_unknown(like: Any) -> bool:
    """Whether it is an array, or a scalar, that no checkpoint has."""
    if not isinstance(like, np.ndarray | np.generic):
        return False
    lacked = like.dtype.isbuiltin != 2 and like.dtype.kind in "OSUV"
    is_other = type(like) not in (np.ndarray, np.memmap) and isinstance(
        like, np.ndarray
    )
    # Only dtypes of NumPy itself have two byte orders.
    lacked |= not like.dtype.isnative and like.dtype.type.__module__ != "numpy"
    return lacked or is_other or isinstance(like, np.longdouble)


def wanted(old: Any, like: Any) -> Any:
    """What `like` asks for; a struct without a sharding asks for what was saved."""
    new = kind_of(like)
    if new != "struct":
        return new
    if old in (*NUMBERS, "key"):
        return None
    return "jax" if like.sharding is not None else old


def dtype_of(leaf: Any) -> Any:
    kind = kind_of(leaf)
    return np.dtype(COUNT_AS[kind]) if kind in NUMBERS else leaf.dtype


def narrow(dtype: np.dtype) -> np.dtype:
    """The dtype that JAX has in place of this one."""
    is_wide = dtype.name in ("int64", "uint64", "float64", "complex128")
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)) if is_wide else dtype


def is_jaxs(dtype: np.dtype) -> bool:
    return dtype.isnative and dtype.kind not in "mM" and dtype.name not in LACKED


def as_dtype(saved: Any, dtype: np.dtype) -> np.ndarray | None:
    """A leaf as an array of a dtype; `None` if it is an integer that does not fit."""
    if kind_of(saved) is not int or -(2**63) <= saved < 2**63:
        return on_host(saved).astype(dtype_of(saved)).astype(dtype)
    if dtype == np.uint64:
        return np.asarray(saved, dtype) if 0 <= saved < 2**64 else None
    if letter(dtype) in "iu" or abs(saved) > sys.float_info.max:
        return None
    return np.asarray(float(saved)).astype(dtype)


def number_like(like: Any, number: Any, status: str) -> Value | str:
    """A number as one of the type of `like`, such as a member of an `IntEnum`."""
    try:
        made = type(like)(number)
        same = repr(kind_of(like)(made)) == repr(kind_of(like)(number))
        return Value(type(like), made, status=status) if same else "kind"
    except ValueError:
        return "kind"


def is_allowed(old: np.dtype, new: np.dtype, casting: str) -> bool:
    """NumPy's rules, in which "no" keeps the byte order too."""
    if old == new or casting == "no":
        return old == new
    if old.isbuiltin != 2 and new.isbuiltin != 2:
        return np.can_cast(old, new, casting)
    if casting == "unsafe" or not np.can_cast(old, new, "unsafe"):
        return np.can_cast(old, new, "unsafe")
    if casting == "safe":
        return new.name in SAFE.get(old.name, ())
    order = "buifc"
    return order.index(letter(old)) <= order.index(letter(new))


def letter(dtype: np.dtype) -> str:
    """The kind of a dtype, also of `bfloat16` and `int4`."""
    return dtype.name.lstrip("b")[0] if dtype.isbuiltin == 2 else dtype.kind
