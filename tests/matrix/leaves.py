"""The leaves that are saved, one of every kind."""

import enum
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


NARROW = (
    "bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 float16 bfloat16 "
    "float32 complex64 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
WIDE = "int64 uint64 float64 complex128".split()
OF_NUMPY = {
    "date": "M8[ns]",
    "swapped_time": ">m8[D]",
    "swapped_i2": ">i2",
    "swapped_u4": ">u4",
    "swapped_f4": ">f4",
    "swapped_f8": ">f8",
    "swapped_c8": ">c8",
    "float6": "float6_e2m3fn",
}
if hasattr(ml_dtypes, "int1"):
    OF_NUMPY["int1"] = "int1"
SHAPE = (8, 2)
# Of Python's integers: some are of more than 64 bits, and some beyond every float.
BITS = {
    "byte": 8,
    "half": 31,
    "word": 32,
    "mantissa": 53,
    "long": 63,
    "wide": 64,
    "big": 100,
    "huge": 1100,
}


class Phase(enum.IntEnum):
    WARM_UP = 1
    DECAY = 2


class Metres(float):
    pass


class AtMostThree(int):
    """It makes another number of a larger one."""

    def __new__(cls, number: int) -> "AtMostThree":
        return super().__new__(cls, min(number, 3))


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def rows(kind: AxisType = AxisType.Auto) -> NamedSharding:
    return NamedSharding(mesh(kind), P("x"))


def numbers(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Many bits of a dtype, with NaNs, infinities and both zeros if it has any."""
    count = int(np.prod(shape))
    if np.dtype(dtype).itemsize == 1 and dtype not in ("int8", "uint8"):
        # Of most of these dtypes, not every byte is a number.
        return np.arange(count).astype(np.int8).__mod__(2).astype(dtype).reshape(shape)
    data = np.random.default_rng(0).bytes(count * np.dtype(dtype).itemsize)
    array = np.frombuffer(data, dtype).copy()
    if np.dtype(dtype).kind in "fcV":
        array[: min(4, count)] = np.array([np.nan, np.inf, -0.0, 1.5])[:count]
    return array.reshape(shape)


def mapped(array: np.ndarray) -> np.memmap:
    """An array in a file, such as one of `np.load(..., mmap_mode="r")`."""
    pages = mmap.mmap(-1, array.nbytes)
    pages[:] = array.tobytes()
    return np.frombuffer(pages, array.dtype).reshape(array.shape).view(np.memmap)


def weak(value: Any, sharding: Any) -> jax.Array:
    """A weakly typed array of equal numbers, as `jnp.full` makes it."""
    return jax.jit(lambda: jnp.full(SHAPE, value), out_shardings=sharding)()


def wide(make: Callable[[], Any]) -> Callable[[], Any]:
    """A leaf of 64 bits of JAX, as a program makes it that has switched x64 on."""

    def made() -> Any:
        with jax.enable_x64(True):
            return make()

    return made


def on(x: Any, where: Any) -> jax.Array:
    """An array on a device, or on a mesh, also of several processes."""
    if not isinstance(where, NamedSharding):
        return jax.device_put(x, where)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    array = jax.make_array_from_callback(data.shape, where, lambda i: data[i])
    return (
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(x))
        if is_key
        else array
    )


def one(dtype: str) -> Any:
    return np.ones((), dtype)[()]


Makers = Mapping[str, Callable[[], Any]]
JAX: dict[str, Callable[[], Any]] = {
    **{f"jax_{d}": lambda d=d: jnp.asarray(numbers(d)) for d in NARROW},
    "jax_0-d": lambda: jnp.float32(2.5),
    "jax_0-d_integer": lambda: jnp.int32(2),
    "jax_0-d_bool": lambda: jnp.array(True),
    "jax_empty": lambda: jnp.zeros((0, 3)),
    "jax_committed": lambda: on(jnp.arange(3.0), jax.local_devices()[3]),
    "jax_sharded": lambda: on(numbers("float32"), rows()),
    "jax_explicit": lambda: on(numbers("bfloat16"), rows(AxisType.Explicit)),
    "jax_pinned": lambda: on(
        numbers("float32"),
        NamedSharding(mesh(), P("x"), memory_kind="unpinned_host"),
    ),
    "weak": lambda: jnp.full(SHAPE, 2.5),
    "weak_0-d": lambda: jnp.asarray(0.5),
    "weak_nan": lambda: jnp.asarray(float("nan")),
    "weak_integer": lambda: jnp.asarray(3),
    "weak_complex": lambda: jnp.asarray(1j),
    "weak_sharded": lambda: weak(2.5, rows()),
    "weak_explicit": lambda: weak(7, rows(AxisType.Explicit)),
    "weak_committed": lambda: on(jnp.asarray(0.5), jax.local_devices()[3]),
}
if jax.__version_info__ >= (0, 10):
    # Before, its programs cannot shard an array without elements.
    JAX.update({"weak_empty": lambda: jnp.full((0, 3), 1.0)})
# Only the newest JAX has arrays of these.
OF_SIX_BITS: Makers = (
    {"jax_float6": lambda: on(numbers("float6_e2m3fn"), None)}
    if jax.__version_info__ >= (0, 12)
    else {}
)
OF_64_BITS: Makers = {
    **{f"jax_{d}": wide(lambda d=d: jnp.asarray(numbers(d))) for d in WIDE},
    "jax_0-d_float64": wide(lambda: jnp.float64(0.1)),
    "jax_0-d_int64": wide(lambda: jnp.int64(2**62 + 1)),
    "jax_sharded_int64": wide(lambda: on(numbers("int64"), rows())),
    "weak_float64": wide(lambda: jnp.full(SHAPE, 0.1)),
    "weak_0-d_int64": wide(lambda: jnp.asarray(2**40)),
    "weak_sharded_complex128": wide(lambda: weak(0.1j, rows())),
}
KEYS: Makers = {
    "key": lambda: jax.random.key(3),
    "keys": lambda: jax.random.split(jax.random.key(1), 8),
    "key_rbg": lambda: jax.random.key(2, impl="rbg"),
    "keys_sharded": lambda: on(jax.random.split(jax.random.key(4), 8), rows()),
    "keys_explicit": lambda: on(
        jax.random.split(jax.random.key(4), 8), rows(AxisType.Explicit)
    ),
    "keys_empty": lambda: jax.random.split(jax.random.key(4), 8)[:0],
}
NUMPY: Makers = {
    **{f"numpy_{d}": lambda d=d: numbers(d) for d in [*NARROW, *WIDE]},
    **{f"numpy_{n}": lambda d=d: numbers(d) for n, d in OF_NUMPY.items()},
    **{f"scalar_{d}": lambda d=d: one(d) for d in [*NARROW, *WIDE, "float6_e2m3fn"]},
    "numpy_0-d": lambda: np.array(2.5),
    "numpy_0-d_bool": lambda: np.array(True),
    "numpy_0-d_bfloat16": lambda: np.array(2.5, jnp.bfloat16),
    "numpy_0-d_swapped": lambda: np.array(2.5, ">f8"),
    "numpy_0-d_mapped": lambda: mapped(np.array(3, "int16")),
    "numpy_swapped_fortran": lambda: np.asfortranarray(numbers(">f4")),
    "numpy_swapped_mapped": lambda: mapped(numbers(">u4")),
    "numpy_swapped_empty": lambda: np.zeros((0, 2), ">i2"),
    "numpy_of_rank_5": lambda: numbers("int16", (2, 1, 2, 2, 1)),
    "numpy_0-d_integer": lambda: np.array(-(2**63)),
    "numpy_empty": lambda: np.zeros((2, 0)),
    "numpy_fortran": lambda: np.asfortranarray(numbers("float64")),
    "numpy_strided": lambda: numbers("int32", (8, 6))[:, ::-3],
    "numpy_mapped": lambda: mapped(numbers("float32")),
    "numpy_longlong": lambda: numbers("int64").astype(np.longlong),
    "scalar_float64": lambda: np.float64(0.1),
    "scalar_float32": lambda: np.float32("nan"),
    "scalar_bfloat16": lambda: np.array(2.5, jnp.bfloat16)[()],
    "scalar_bool": lambda: np.bool_(True),
    "scalar_int64": lambda: np.int64(2**63 - 1),
    "scalar_uint64": lambda: np.uint64(2**64 - 1),
    "scalar_int8": lambda: np.int8(1),
    "scalar_longlong": lambda: np.longlong(7),
    "scalar_complex128": lambda: np.complex128(1 + 2j),
    "scalar_date": lambda: np.datetime64("2020-02-29", "s"),
    "scalar_time": lambda: np.timedelta64("NaT", "ns"),
}
PYTHON: Makers = {
    "bool": lambda: True,
    "bool_false": lambda: False,
    "int": lambda: 2,
    "int_5": lambda: 5,
    **{f"int_{name}": lambda bits=bits: 2**bits - 1 for name, bits in BITS.items()},
    **{
        f"int_minus_{name}": lambda bits=bits: -(2**bits) for name, bits in BITS.items()
    },
    "float": lambda: 0.1,
    "float_largest": lambda: sys.float_info.max,
    "float_smallest": lambda: 5e-324,
    "float_nan_of_bits": lambda: struct.unpack("<d", b"\1\2\3\4\5\6\xf8\xff")[0],
    "float_2": lambda: 2.0,
    "float_minus_zero": lambda: -0.0,
    "float_nan": lambda: float("nan"),
    "float_inf": lambda: float("inf"),
    "complex_nan": lambda: complex(float("nan"), float("-inf")),
    "complex": lambda: complex(-0.0, 2.0),
    "complex_1": lambda: complex(1.0, 0.0),
    "phase": lambda: Phase.DECAY,
    "metres": lambda: Metres(2.5),
}
LEAVES: Makers = {**JAX, **OF_SIX_BITS, **OF_64_BITS, **KEYS, **NUMPY, **PYTHON}
# One of many dtypes is enough where the way is what matters.
_SOME = (
    "bool int4 bfloat16 float8_e5m2 float32 float64 complex64 date swapped_f4".split()
)
_MANY = OF_SIX_BITS.keys() | {
    f"{kind}_{dtype}"
    for kind in ("jax", "numpy", "scalar")
    for dtype in (*NARROW, *WIDE)
}
SOME = [n for n in LEAVES if n not in _MANY or n.split("_", 1)[1] in _SOME]


def tree(names: Iterable[str] = LEAVES) -> dict[str, Any]:
    """Leaves under their names."""
    return {name: LEAVES[name]() for name in names}
