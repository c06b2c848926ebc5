"""Describe the leaves of a PyTree."""

import contextlib
import functools as ft
import hashlib
from typing import Any, TYPE_CHECKING

from ..._format.leaf_record import (
    array_record,
    CannotSave,
    LeafRecord,
    scalar_to_text,
    tag_and_data_type,
)
from ..._format.manifest import is_sharding
from ..._lazy import eqx, jax, jnp, jtu, np


if TYPE_CHECKING:
    from jax.sharding import PartitionSpec, Sharding


class Written(bytes):
    """Stands for a leaf for which a custom `filter_spec` wrote these bytes."""


class Skipped:
    """Stands for a leaf for which a custom `filter_spec` wrote nothing."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


_TRACED = "is being traced by JAX; call this outside `jax.jit`"


_PARTED = "is on devices of other processes: save before `jax.distributed.shutdown()`"


def describe(leaf: Any) -> LeafRecord | None:
    """The record of a leaf to save, or `None` if such leaves are not saved.

    As in Equinox, functions, strings and all other objects are not saved.
    """
    if isinstance(leaf, jax.Array):
        return _describe_jax(leaf)
    if isinstance(leaf, np.ndarray):
        if type(leaf) not in (np.ndarray, np.memmap):
            raise CannotSave(f"is a `{type(leaf).__name__}`; save `np.asarray` of it")
        return array_record("numpy", leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic):
        return array_record("numpy_scalar", (), leaf.dtype)
    if isinstance(leaf, Written):
        return array_record("bytes", (len(leaf),), np.dtype(np.uint8))
    for kind in (bool, int, float, complex):
        if isinstance(leaf, kind):
            return LeafRecord(kind.__name__, value=scalar_to_text(leaf))
    # Equinox skips these objects silently, although they hold data.
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise CannotSave("is a `jax.ShapeDtypeStruct`, which has no data")
    if isinstance(leaf, jax.Ref):
        raise CannotSave("is a `jax.Ref`; save its value, `ref[...]`")
    if hasattr(leaf, "__jax_array__"):
        raise CannotSave("has `__jax_array__`; save `jax.numpy.asarray` of it")
    if any(eqx.is_array_like(x) for x in jtu.tree_leaves(leaf)):
        raise CannotSave(
            f"is a `{type(leaf).__name__}` that holds arrays, which `is_leaf` made a "
            "leaf; save it with a `filter_spec` of your own"
        )
    return None


def describe_like(leaf: Any) -> LeafRecord | None:
    """The record of a leaf of `like`, which may be a `jax.ShapeDtypeStruct` or deleted.

    It says whether a struct has a sharding. What cannot be saved is "unknown".
    """
    kind = _kind_of(type(leaf))
    try:
        if kind is None:
            return describe(leaf)
        is_placed = kind == "struct" and leaf.sharding is not None
        return _like(kind, leaf.shape, leaf.dtype, is_placed)
    except CannotSave as e:
        return LeafRecord("unknown", value=str(e))


# Cached, because many leaves are of one type and have equal records.
@ft.lru_cache(maxsize=4096)
def _kind_of(cls: type) -> str | None:
    """The kind of an array or struct by its type; `None` for all that is neither."""
    if issubclass(cls, jax.ShapeDtypeStruct):
        return getattr(cls, "stands_for", "struct")
    if issubclass(cls, jax.core.Tracer):
        return None
    if issubclass(cls, jax.Array):
        return "jax"
    if issubclass(cls, np.generic):
        return "numpy_scalar"
    return "numpy" if cls is np.ndarray else None


@ft.lru_cache(maxsize=4096)
def _like(kind: str, shape: Any, dtype: Any, on: bool = False) -> LeafRecord:
    if kind in ("numpy", "numpy_scalar"):
        return array_record(kind, shape, dtype)
    if impl := _key_impl(dtype):
        return LeafRecord("key", "key", shape, impl=impl)
    tag, _ = tag_and_data_type(dtype)
    return LeafRecord(kind, tag, shape, sharding={} if on else None)


@ft.cache
def _key_impl(dtype: Any) -> str | None:
    """The PRNG implementation of a dtype of typed keys; `None` for other dtypes."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    impl = jax.random.key_impl(jnp.empty((), dtype))
    # JAX finds the others by their names; of one without, another may have the tag.
    return impl if isinstance(impl, str) else repr(impl)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and _key_impl(leaf.dtype) is not None


def _describe_jax(leaf: "jax.Array") -> LeafRecord:
    if isinstance(leaf, jax.core.Tracer):
        raise CannotSave(_TRACED)
    if leaf.is_deleted():
        raise CannotSave("was deleted: it was donated to a jitted function")
    dtype: Any = leaf.dtype
    if isinstance(dtype, np.dtype):
        return _describe_array("jax", leaf)
    impl = jax.random.key_impl(leaf)
    if not isinstance(impl, str):
        raise CannotSave(
            f"has keys of `{impl!r}`, which JAX does not find by its name; save "
            "`jax.random.key_data` of it"
        )
    with jax.ensure_compile_time_eval():
        data = jax.random.key_data(leaf)
    record = _describe_array("key", data)
    return record._replace(dtype="key", shape=leaf.shape, impl=impl)


def _describe_array(kind: str, leaf: "jax.Array") -> LeafRecord:
    if len(leaf.sharding.device_set) == 1:
        return array_record(kind, leaf.shape, np.dtype(leaf.dtype), leaf.weak_type)
    if not (leaf.is_fully_addressable or jax.distributed.is_initialized()):
        raise CannotSave(_PARTED)
    shard = leaf.sharding.shard_shape(leaf.shape)
    sharding = _describe_sharding(leaf.sharding)
    dtype = np.dtype(leaf.dtype)
    return array_record(kind, leaf.shape, dtype, leaf.weak_type, shard, sharding)


def split(spec: "PartitionSpec") -> tuple[Any, ...]:
    """The mesh axes of each dimension, without unreduced and reduced axes."""
    return tuple(spec.update(unreduced=frozenset(), reduced=frozenset()))


def unreduced_axes(sharding: "Sharding") -> str:
    """The mesh axes over which an array is unreduced, for messages."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ""
    return ", ".join(sorted(map(repr, sharding.spec.unreduced)))


def _describe_sharding(sharding: "Sharding") -> dict[str, Any] | None:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if unreduced := unreduced_axes(sharding):
        raise CannotSave(
            f"is unreduced over the axes {unreduced}: what each device has is a part "
            "of a sum; save `jax.sharding.reshard` of it to a PartitionSpec without"
        )
    found = {
        "axis_names": list(sharding.mesh.axis_names),
        "mesh_shape": list(sharding.mesh.axis_sizes),
        "spec": [list(p) if isinstance(p, tuple) else p for p in split(sharding.spec)],
        "memory_kind": sharding.memory_kind,
    }
    if not is_sharding(found):
        raise CannotSave(
            f"is on a mesh with the axes {found['axis_names']}; save it from one whose "
            "axes have strings or integers as names"
        )
    return found


def _shortened(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:60]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _of_argument(value: Any) -> str:
    """The fingerprint of an argument of a `functools.partial`, or its number."""
    if type(value) is tuple:
        return f"({', '.join(map(_of_argument, value))})"
    record = describe_like(value)
    if record is None:
        return fingerprint(value)
    return str(record) if record.value is None else record.value


def fingerprint(leaf: Any) -> str:
    """A text that identifies a leaf that is not saved, to detect when it changes."""
    if isinstance(leaf, Skipped):
        return f"skipped: {describe_like(leaf.leaf) or fingerprint(leaf.leaf)}"
    if isinstance(leaf, str | bytes):
        return _shortened(repr(leaf))
    if isinstance(leaf, ft.partial):
        arguments = map(_of_argument, leaf.args)
        named = (f"{k}={_of_argument(leaf.keywords[k])}" for k in sorted(leaf.keywords))
        given = _shortened(", ".join((*arguments, *named)))
        return f"functools.partial({fingerprint(leaf.func)}{given and f', {given}'})"
    # Builtin methods have no `__module__`, and objects may have anything there.
    for named in (leaf, type(leaf)):
        with contextlib.suppress(Exception):
            module, name = getattr(named, "__module__", None), named.__qualname__
            if type(name) is str:
                return f"{module if type(module) is str else 'builtins'}.{name}"
    return "object"
