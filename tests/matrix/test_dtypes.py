"""Every dtype into every other one, by every word of `casting`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from .check import assert_none, differences, Route, Tree
from .oracle import is_jaxs, narrow
from .places import to_memory
from .ways import DIRECT


OF_JAX = (
    "bool int4 int8 uint8 int16 uint16 int32 uint32 float8_e4m3fn bfloat16 float16 "
    "float32 complex64"
).split()
DTYPES = [*OF_JAX, *"int64 uint64 float64 complex128 >i4 >f8 M8[s] m8[s]".split()]
NUMBERS = {"bool": True, "int": 3, "float": 3.0, "complex": 3 + 0j}


def three(dtype: str) -> np.ndarray:
    """A number that each of the dtypes has."""
    if np.dtype(dtype).kind in "mM":
        return np.array(3, dtype)
    return np.array(3).astype(dtype)


def label(dtype: str) -> str:
    name = np.dtype(dtype).name.replace("[", "_").replace("]", "")
    return name + ("_swapped" if dtype[0] == ">" else "")


@pytest.fixture(scope="module")
def saved() -> Tree:
    arrays: dict[str, Any] = {}
    for dtype in DTYPES:
        arrays[f"numpy_{label(dtype)}"] = three(dtype)
        arrays[f"scalar_{label(dtype)}"] = three(dtype)[()]
    jaxs = {f"jax_{dtype}": jnp.asarray(three(dtype)) for dtype in OF_JAX}
    return arrays | jaxs | NUMBERS


@pytest.fixture(scope="module")
def numbers(saved: Tree) -> Route:
    return Route(to_memory({"part": saved}), saved, DIRECT)


def likes() -> Tree:
    """A number of each dtype, of JAX and of NumPy; and Python's."""
    found: Tree = {name: type(number)(0) for name, number in NUMBERS.items()}
    for dtype in DTYPES:
        zero = np.zeros((), dtype)
        found[f"numpy_{label(dtype)}"] = zero
        found[f"scalar_{label(dtype)}"] = zero[()]
        if narrow(zero.dtype) == zero.dtype and is_jaxs(zero.dtype):
            found[f"jax_{label(dtype)}"] = jnp.asarray(zero)
    return found


@pytest.mark.parametrize("casting", ["no", "safe", "same_kind", "unsafe"])
def test_every_dtype(numbers, casting):
    assert_none(
        {
            name: differences(numbers, dict.fromkeys(numbers.seen, like), casting)
            for name, like in likes().items()
        }
    )
