"""Describe the leaves of a PyTree, and extract their data."""

import contextlib
import functools as ft
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TYPE_CHECKING

from ..._format.chunk_grid import (
    blocks,
    Region,
    region_of,
    relative,
    Start,
    start_of,
    touched,
    whole,
)
from ..._format.leaf_record import (
    array_record,
    CannotSave,
    LeafRecord,
    scalar_to_text,
    tag_and_data_type,
)
from ..._lazy import Array, eqx, jax, jnp, jtu, np


if TYPE_CHECKING:
    from jax.sharding import PartitionSpec, Sharding


logger = logging.getLogger("eqx_ckpt")


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
    try:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return _like("struct", leaf.shape, leaf.dtype, leaf.sharding is not None)
        if type(leaf) is np.ndarray:
            return _like("numpy", leaf.shape, leaf.dtype)
        if isinstance(leaf, jax.core.Tracer):
            raise CannotSave(_TRACED)
        if isinstance(leaf, jax.Array):
            return _like("jax", leaf.shape, leaf.dtype)
        if isinstance(leaf, np.generic):
            return _like("numpy_scalar", (), leaf.dtype)
        return describe(leaf)
    except CannotSave as e:
        return LeafRecord("unknown", value=str(e))


# Cached, because many leaves have equal records.
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
    return str(jax.random.key_impl(jnp.empty((), dtype)))


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
    impl = str(jax.random.key_impl(leaf))
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
    return {
        "axis_names": list(sharding.mesh.axis_names),
        "mesh_shape": list(sharding.mesh.axis_sizes),
        "spec": [list(p) if isinstance(p, tuple) else p for p in split(sharding.spec)],
        "memory_kind": sharding.memory_kind,
    }


def is_on_host(leaf: jax.Array) -> bool:
    """Whether an array is in host memory, so that its data need no copy."""
    return next(iter(leaf.sharding.device_set)).platform == "cpu"


# The host memory that an accelerator writes to directly.
_PINNED = "pinned_host"


# Smaller arrays are copied sooner than pinned memory is found for them.
_LEAST_PINNED = 2**17


# Those for which JAX had no pinned memory left. To ask it again takes ten seconds.
_without_pinned: "set[jax.Device]" = set()


def _begin_copy(part: Any) -> Any:
    """Begin to copy an array from an accelerator; return what is on the host already.

    `np.asarray` takes pageable memory, which on a GPU is 30 times slower than pinned
    memory that JAX has already, and it lives as long as the array.
    """
    if not isinstance(part, jax.Array) or is_on_host(part):
        return part
    (device,) = part.sharding.device_set
    if part.nbytes >= _LEAST_PINNED and _has_pinned(device):
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)
        try:
            with jax.ensure_compile_time_eval():
                return jax.device_put(part, pinned)
        except jax.errors.JaxRuntimeError as e:
            _without_pinned.add(device)
            logger.warning(
                "Saves from %s take slower memory from now on: %s", device, e
            )
    part.copy_to_host_async()
    return part


def _has_pinned(device: "jax.Device") -> bool:
    return device not in _without_pinned and any(
        memory.kind == _PINNED for memory in device.addressable_memories()
    )


def shards(
    leaf: Any, record: LeafRecord, *, owned: Collection[Start] | None = None
) -> Iterator[tuple[Region, Array]]:
    """The data of a leaf as host arrays, each with its region of the Zarr array.

    The pieces are split along the chunk grid, so that each can be written separately.
    `owned` selects the pieces that start at these positions. Pieces of a NumPy array
    are views. What is on an accelerator is on its way when this returns.
    """
    found: list[tuple[Region, list[Region], Any]] = []
    for region, part in parts(leaf, record):
        if pieces := _owned_pieces(region, record, owned):
            found.append((region, pieces, _begin_copy(part)))
    return _on_host(found, record)


def _on_host(
    found: Iterable[tuple[Region, list[Region], Any]], record: LeafRecord
) -> Iterator[tuple[Region, Array]]:
    dtype = np.dtype(record.data_type)
    for region, pieces, part in found:
        host = np.asarray(part)
        if not host.dtype.isnative:
            host = host.astype(host.dtype.newbyteorder("="))
        if record.kind == "numpy" and record.dtype == "bool":
            # TensorStore would write a byte other than 0 and 1, but refuse to read it.
            host = np.asarray(host.view(np.uint8) != 0)
        host = host.view(dtype)
        for piece in pieces:
            # An array of rank zero has one piece.
            yield piece, host if piece is region else host[relative(piece, region)]


def chunk_positions(
    leaf: Any, record: LeafRecord, owned: Collection[Start]
) -> set[int]:
    """Which chunks of a leaf are in the pieces that start at these positions."""
    return {
        position
        for region, _ in parts(leaf, record)
        for piece in _owned_pieces(region, record, owned)
        for position in touched(piece, record.data_shape, record.chunk_shape)
    }


def _owned_pieces(
    region: Region, record: LeafRecord, owned: Collection[Start] | None
) -> list[Region]:
    pieces = blocks(region, record.chunk_shape, record.itemsize)
    return [piece for piece in pieces if owned is None or start_of(piece) in owned]


def parts(leaf: Any, record: LeafRecord) -> list[tuple[Region, Any]]:
    """The data of a leaf where they are, each with its region of the Zarr array.

    Of a sharded array, these are the distinct shards that this process has.
    """
    if record.kind == "key":
        with jax.ensure_compile_time_eval():
            leaf = jax.random.key_data(leaf)
    if isinstance(leaf, Written):
        leaf = np.frombuffer(leaf, np.uint8)
    shape = record.data_shape
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return [(whole(shape), leaf)]
    regions = [(region_of(s.index, shape), s.data) for s in leaf.addressable_shards]
    return [*{repr(region): (region, data) for region, data in regions[::-1]}.values()]


def fingerprint(leaf: Any) -> str:
    """A text that identifies a leaf that is not saved, to detect when it changes."""
    if isinstance(leaf, Skipped):
        return f"skipped: {describe_like(leaf.leaf) or fingerprint(leaf.leaf)}"
    if isinstance(leaf, str | bytes):
        text = repr(leaf)
        if len(text) > 80:
            return f"{text[:60]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        return text
    if isinstance(leaf, ft.partial):
        return f"functools.partial({fingerprint(leaf.func)})"
    # Builtin methods have no `__module__`, and objects may have anything there.
    for named in (leaf, type(leaf)):
        with contextlib.suppress(Exception):
            module, name = getattr(named, "__module__", None), named.__qualname__
            if type(name) is str:
                return f"{module if type(module) is str else 'builtins'}.{name}"
    return "object"
