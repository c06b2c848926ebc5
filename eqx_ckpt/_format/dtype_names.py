"""The dtypes of the format by name, so that a look-up need not import NumPy."""

import re

from .._lazy import DType, np


# The dtypes that TensorStore's zarr3 driver stores natively.
STORED = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 "
    "float32 float64 complex64 complex128 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn".split()
)


# Other dtypes: the array has bytes, and the manifest the true dtype.
VIEWED = frozenset(
    "int1 uint1 uint2 uint4 float8_e4m3 float6_e2m3fn float6_e3m2fn".split()
)


# Only the newest versions of JAX have arrays of these, and none computes with them.
SIX_BITS = frozenset(["float6_e2m3fn", "float6_e3m2fn"])


OF_JAX = (STORED | VIEWED) - SIX_BITS


# JAX packs these, or unpacks them.
_PARTS = re.compile(r"u?int[124]\Z|float[46]_")


_SWAPPED = re.compile(r">([iuf][248]|c8|c16)\Z")


_TIME = re.compile(r"[<>][mM]8\[([1-9]\d{0,5})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\]\Z")


def has_parts_of_bytes(dtype: str) -> bool:
    """Whether an element has fewer than eight bits."""
    return _PARTS.match(dtype) is not None


class _DataTypes(dict[str, str]):
    """The `data_type` of the Zarr array, by the name of a dtype in the manifest."""

    def __missing__(self, tag: str) -> str:
        if _TIME.match(tag):
            return "int64"
        if _SWAPPED.match(tag):
            kinds = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
            return f"{kinds[tag[1]]}{8 * int(tag[2:])}"
        raise ValueError(f"{tag!r} is not a dtype of this format")


class _Sizes(dict[str, int]):
    """The bytes of one element, from a table so that a reader need not import NumPy."""

    def __missing__(self, data_type: str) -> int:
        return np.dtype(data_type).itemsize


DATA_TYPES = _DataTypes({t: t for t in STORED} | dict.fromkeys(VIEWED, "uint8"))


_BITS = {name: (re.findall(r"\d+", name) or [8])[0] for name in STORED}


SIZES = _Sizes({name: max(1, int(bits) // 8) for name, bits in _BITS.items()})


def is_numpys(dtype: DType) -> bool:
    """Whether a dtype is NumPy's own; it cannot write the names of `ml_dtypes`."""
    return dtype.isbuiltin != 2
