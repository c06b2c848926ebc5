"""The closed list of leaf kinds, and how each is stored."""

import functools as ft
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

from .._errors import CheckpointError
from .._lazy import Array, DType, jax, np
from .._types import check_integer
from .chunk_grid import chunk_shape
from .display import escape, in_bytes, table_html
from .dtype_names import DATA_TYPES, OF_JAX, SIX_BITS, SIZES


if TYPE_CHECKING:
    from jax.typing import DTypeLike


ARRAY_KINDS = ("jax", "key", "numpy", "numpy_scalar", "bytes")


SCALAR_KINDS = ("bool", "int", "float", "complex")


# Of an integer in decimal digits, of which Python reads and writes at most 4300.
MAX_BITS = 13_000


# Of the checksums of a chunk, first of its CRC-32C.
CRC32C_DIGITS, CHECKSUM_DIGITS = 8, 40


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
    - `checksums`: of each chunk, in C order, in hexadecimal digits: 8 of the CRC-32C of
        what is stored, and 32 of the XXH3-128 of its content.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3), "step": 7})
        leaves = eqx_ckpt.inspect.read_manifest("ckpt").leaves
        assert (leaves["w"].dtype, leaves["w"].shape) == ("float32", (3,))
        assert (leaves["step"].kind, leaves["step"].value) == ("int", "7")
        ```
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
    checksums: tuple[str, ...] = ()

    @classmethod
    def of_array(
        cls,
        shape: Sequence[int],
        dtype: "DTypeLike",
        *,
        path: Sequence[tuple[str, str | int]],
        kind: str = "jax",
    ) -> "LeafRecord":
        """The record of an array, for the manifest of a [`eqx_ckpt.interop.Source`][].

        **Arguments:**

        - `shape`, `dtype`: those of the array.
        - `path`, `kind`: the attributes of the same name.

        **Raises:**

        - [`eqx_ckpt.CheckpointError`][]: the format, or JAX, does not have the dtype.
        """
        try:
            sizes = tuple([check_integer("shape", size, 0) for size in shape])
            record = array_record(kind, sizes, np.dtype(dtype))
            if kind == "jax" and record.dtype not in OF_JAX | SIX_BITS:
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
        if self.kind not in ARRAY_KINDS:
            return 0
        return math.prod(self.data_shape) * SIZES[self.data_type]

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


class CannotSave(Exception):
    """One leaf cannot be saved. The plan collects these errors, and raises once."""


def array_record(
    kind: str,
    shape: tuple[int, ...],
    dtype: DType,
    weak_type: bool = False,
    shard: tuple[int, ...] | None = None,
    sharding: dict[str, Any] | None = None,
) -> LeafRecord:
    tag, data_type = tag_and_data_type(dtype)
    return LeafRecord(
        kind,
        dtype=tag,
        shape=shape,
        weak_type=weak_type,
        sharding=sharding,
        data_type=data_type,
        data_shape=shape,
        chunk_shape=chunk_shape(shape, shard or shape, dtype.itemsize),
    )


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


_NUMBERS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}


def plain_dtype(record: LeafRecord) -> DType:
    """The dtype of a leaf as a plain array, in the byte order of this machine."""
    if record.kind in SCALAR_KINDS:
        return np.dtype(_NUMBERS[record.kind])
    if record.kind == "key":
        return np.dtype(record.data_type)
    return dtype_from_tag(record.dtype).newbyteorder("=")


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


# JAX's own implementations; JAX need not be imported to look them up.
_KEY_SHAPES = {"threefry2x32": (2,), "rbg": (4,), "unsafe_rbg": (4,)}


@ft.cache
def key_shape(impl: str) -> tuple[int, ...] | None:
    """The shape of the data of one key; `None` if this version of JAX lacks `impl`."""
    if impl in _KEY_SHAPES:
        return _KEY_SHAPES[impl]
    try:
        return jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=impl))
        ).shape
    except ValueError:
        return None


def scalar_from_text(kind: str, text: str) -> bool | int | float | complex:
    """The inverse of `scalar_to_text`; `ValueError` for any other text."""
    value = _scalar(kind, text)
    if scalar_to_text(value) != text:
        raise ValueError(f"{text[:80]!r} is not the text of a Python {kind}")
    return value


def _scalar(kind: str, text: str) -> bool | int | float | complex:
    if kind == "bool":
        return text == "True"
    if kind == "int":
        return int(text, 16 if "x" in text else 10)
    if kind == "float":
        return _float_from_text(text)
    real, imag = text.split(" ")
    return complex(_float_from_text(real), _float_from_text(imag))


def _float_from_text(text: str) -> float:
    if not text.startswith("nan:"):
        return float(text)
    bits = bytes.fromhex(text[4:])
    if len(bits) != 8 or not math.isnan(struct.unpack(">d", bits)[0]):
        raise ValueError(f"{text!r} is not a nan")
    return struct.unpack(">d", bits)[0]
