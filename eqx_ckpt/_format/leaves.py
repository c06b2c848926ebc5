"""The closed list of leaf kinds, and how each is stored."""

import functools as ft
import math
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

from .._errors import CheckpointError
from .chunks import (
    blocks,
    chunk_shape,
    Region,
    region_of,
    relative,
    Start,
    start_of,
    whole,
)
from .dtypes import DATA_TYPES, OF_JAX, SIZES
from .lazy import Array, DType, eqx, jax, jnp, jtu, np
from .screen import escape, in_bytes, table_html


if TYPE_CHECKING:
    from jax.sharding import PartitionSpec, Sharding
    from jax.typing import DTypeLike


ARRAY_KINDS = ("jax", "key", "numpy", "numpy_scalar", "bytes")
SCALAR_KINDS = ("bool", "int", "float", "complex")
# Of an integer in decimal digits, of which Python reads and writes at most 4300.
MAX_BITS = 13_000

_NAN = struct.pack(">d", math.nan)


class LeafRecord(NamedTuple):
    """The entry of one leaf in the manifest.

    **Attributes:**

    - `kind`: `"jax"`, `"key"`, `"numpy"`, `"numpy_scalar"`, `"bytes"` (written by a
        custom `filter_spec`), or `"bool"`, `"int"`, `"float"`, `"complex"`.
    - `dtype`, `shape`: of the leaf. The dtype of a typed PRNG key is `"key"`.
    - `impl`: the implementation of a typed PRNG key, else `None`.
    - `weak_type`: whether the `jax.Array` was weakly typed.
    - `data_type`, `data_shape`, `chunk_shape`: the dtype, shape and chunk shape of the
        Zarr array.
    - `compression`: the compression of its chunks: `"zstd"`, or `None`.
    - `sharding`: axis names, mesh shape, PartitionSpec and memory kind of the array
        when it was saved; `None` for an array on one device.
    - `path`: the key path, as pairs such as `("attr", "weight")` or `("index", 0)`.
    - `value`: the exact value of a Python scalar as text, else `None`.
    - `crc32c`: the checksum of each chunk, in C order, as 8 hexadecimal digits.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    impl: str | None = None
    weak_type: bool = False
    data_type: str = ""
    data_shape: tuple[int, ...] = ()
    chunk_shape: tuple[int, ...] = ()
    compression: str | None = None
    sharding: dict[str, Any] | None = None
    path: tuple[tuple[str, str | int], ...] = ()
    value: str | None = None
    crc32c: tuple[str, ...] = ()

    @classmethod
    def of_array(
        cls,
        shape: Sequence[int],
        dtype: "DTypeLike",
        *,
        path: Sequence[tuple[str, str | int]],
        kind: str = "jax",
    ) -> "LeafRecord":
        """The record of an array, for the manifest of a [`eqx_ckpt.Source`][].

        **Arguments:**

        - `shape`, `dtype`: those of the array.
        - `path`, `kind`: the attributes of the same name.

        **Raises:**

        - [`eqx_ckpt.CheckpointError`][]: the format, or JAX, does not have the dtype.
        """
        try:
            record = _array_record(kind, tuple(shape), np.dtype(dtype))
            if kind == "jax" and record.dtype not in OF_JAX:
                raise CannotSave(f"of `{dtype}` cannot be JAX's: pass `kind='numpy'`")
        except CannotSave as e:
            raise CheckpointError(f"An array {e}.") from None
        return record._replace(path=tuple(path))

    @property
    def is_array(self) -> bool:
        return self.kind in ARRAY_KINDS

    @property
    def nbytes(self) -> int:
        """The bytes of data that a restore reads, without checksums."""
        return math.prod(self.data_shape) * self.itemsize if self.is_array else 0

    @property
    def itemsize(self) -> int:
        """The bytes of one element of the Zarr array."""
        return SIZES[self.data_type]

    def __str__(self) -> str:
        if self.kind == "unknown":
            return f"a leaf that {self.value}"
        if self.value is not None:
            return f"Python {self.kind}"
        shape = ", ".join(map(str, self.shape))
        if self.kind == "key":
            return f"PRNG key[{shape}] of impl {self.impl!r}"
        if self.kind == "bytes":
            return f"{self.shape[0]} bytes of a custom `filter_spec`"
        names = {"numpy": "NumPy ", "numpy_scalar": "NumPy scalar "}
        return f"{names.get(self.kind, '')}{self.dtype}[{shape}]"

    def __repr__(self) -> str:
        return f"<LeafRecord: {self}>"

    def _repr_html_(self) -> str:
        about = {"sharding": self.sharding, "compression": self.compression}
        about |= {"value": self.value, "chunks of": self.chunk_shape or None}
        rows = [(name, str(value)) for name, value in about.items() if value]
        head = (
            f"<code>{escape(str(self))}</code> <small>{in_bytes(self.nbytes)}</small>"
        )
        return f"{head}{table_html(('', ''), rows) if rows else ''}"


class Written(bytes):
    """Stands for a leaf for which a custom `filter_spec` wrote these bytes."""


class Skipped:
    """Stands for a leaf for which a custom `filter_spec` wrote nothing."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


_TRACED = "is being traced by JAX; call this outside `jax.jit`"
_PARTED = "is on devices of other processes: save before `jax.distributed.shutdown()`"


class CannotSave(Exception):
    """One leaf cannot be saved. The plan collects these errors, and raises once."""


def describe(leaf: Any) -> LeafRecord | None:
    """The record of a leaf to save, or `None` if such leaves are not saved.

    As in Equinox, functions, strings and all other objects are not saved.
    """
    if isinstance(leaf, jax.Array):
        return _describe_jax(leaf)
    if isinstance(leaf, np.ndarray):
        if type(leaf) not in (np.ndarray, np.memmap):
            raise CannotSave(f"is a `{type(leaf).__name__}`; save `np.asarray` of it")
        return _array_record("numpy", leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic):
        return _array_record("numpy_scalar", (), leaf.dtype)
    if isinstance(leaf, Written):
        return _array_record("bytes", (len(leaf),), np.dtype(np.uint8))
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
        return _array_record(kind, shape, dtype)
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
        return _array_record("jax", leaf.shape, dtype, leaf)
    impl = str(jax.random.key_impl(leaf))
    with jax.ensure_compile_time_eval():
        data = jax.random.key_data(leaf)
    record = _array_record("key", data.shape, data.dtype, data)
    return record._replace(dtype="key", shape=leaf.shape, impl=impl)


def _array_record(
    kind: str,
    shape: tuple[int, ...],
    dtype: DType,
    leaf: "jax.Array | None" = None,
) -> LeafRecord:
    shard, sharding = shape, None
    if leaf is not None and len(leaf.sharding.device_set) > 1:
        if not (leaf.is_fully_addressable or jax.distributed.is_initialized()):
            raise CannotSave(_PARTED)
        shard = leaf.sharding.shard_shape(shape)
        sharding = _describe_sharding(leaf.sharding)
    tag, data_type = tag_and_data_type(dtype)
    return LeafRecord(
        kind,
        dtype=tag,
        shape=shape,
        weak_type=leaf is not None and leaf.weak_type,
        sharding=sharding,
        data_type=data_type,
        data_shape=shape,
        chunk_shape=chunk_shape(shape, shard, dtype.itemsize),
    )


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


@ft.cache
def tag_and_data_type(dtype: DType) -> tuple[str, str]:
    """The name of a dtype in the manifest, and the `data_type` of its Zarr array.

    The name is `">f4"` or `"<M8[ns]"` where one such as `"float32"` would be ambiguous.
    """
    tag = dtype.str if dtype.kind in "mM" or not dtype.isnative else dtype.name
    try:
        return tag, DATA_TYPES[tag]
    except ValueError:
        problem = f"has the dtype `{dtype}`, which cannot be stored exactly"
        raise CannotSave(problem) from None


def dtype_from_tag(tag: str) -> DType:
    """The dtype of a tag; `ValueError` if the format has no such tag."""
    DATA_TYPES[tag]  # noqa: B018
    return np.dtype(tag)


def start_transfer(leaf: Any) -> None:
    """Start to copy an array to the host, so that `shards` waits less."""
    if not isinstance(leaf, jax.Array) or _key_impl(leaf.dtype):
        return
    devices = leaf.sharding.device_set
    if next(iter(devices)).platform == "cpu":
        return
    if len(devices) == 1:
        leaf.copy_to_host_async()
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            shard.data.copy_to_host_async()


def shards(
    leaf: Any, record: LeafRecord, *, owned: Collection[Start] | None = None
) -> Iterator[tuple[Region, Array]]:
    """The data of a leaf as host arrays, each with its region of the Zarr array.

    The pieces are split along the chunk grid, so that each can be written separately.
    `owned` selects the pieces that start at these positions. Pieces of a NumPy array
    are views.
    """
    if record.kind == "key":
        with jax.ensure_compile_time_eval():
            leaf = jax.random.key_data(leaf)
    if isinstance(leaf, Written):
        leaf = np.frombuffer(leaf, np.uint8)
    shape, dtype = record.data_shape, np.dtype(record.data_type)
    parts = {"": (whole(shape), leaf)}
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        regions = [(region_of(s.index, shape), s.data) for s in leaf.addressable_shards]
        parts = {repr(region): (region, data) for region, data in reversed(regions)}
    for region, part in parts.values():
        pieces = blocks(region, record.chunk_shape, dtype.itemsize)
        if owned is not None:
            pieces = [piece for piece in pieces if start_of(piece) in owned]
            if not pieces:
                continue
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


def from_stored(array: Array, record: LeafRecord) -> Array:
    """The inverse of `shards` for one array: its original dtype."""
    if record.dtype == record.data_type:
        return array
    dtype = dtype_from_tag(record.data_type if record.kind == "key" else record.dtype)
    return array.view(dtype.newbyteorder("=")).astype(dtype, copy=False)


def scalar_to_text(value: bool | int | float | complex) -> str:
    """The exact value of a Python scalar as text."""
    if isinstance(value, complex):
        return f"{_float_to_text(value.real)} {_float_to_text(value.imag)}"
    if isinstance(value, float):
        return _float_to_text(value)
    if isinstance(value, bool):
        return str(value)
    return hex(value) if value.bit_length() > MAX_BITS else int.__repr__(value)


def _float_to_text(value: float) -> str:
    if math.isnan(value) and (bits := struct.pack(">d", value)) != _NAN:
        return "nan:" + bits.hex()
    return float.__repr__(value)
