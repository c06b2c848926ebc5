"""Whether a leaf is exactly what it should be."""

import struct
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .oracle import key_data, kind_of, NUMBERS, Value


def difference(found: Any, expected: Value) -> str:
    """How a leaf differs from what it should be; nothing if it is just that."""
    kind = kind_of(found)
    if expected.kind == "itself":
        return "" if found is expected.data else f"{found!r}, not what `like` has"
    if kind in NUMBERS or expected.kind not in ("jax", "key", "numpy", "scalar"):
        same = type(found) is expected.kind and _text(found) == _text(expected.data)
        return "" if same else f"{found!r}, not {expected.kind} {expected.data!r}"
    if kind != expected.kind or type(found) is np.memmap:
        return f"{type(found).__name__}, not {expected.kind}"
    if found.dtype != expected.dtype:
        return f"{found.dtype!r}, not {expected.dtype!r}"
    on_device = kind in ("jax", "key")
    data = key_data(found) if kind == "key" else found
    problem = _bits(data, expected.data)
    return problem or (_device(found, expected) if on_device else "")


def _text(number: Any) -> str:
    """A number, with the bits of a NaN."""
    if isinstance(number, float):
        return struct.pack("<d", number).hex()
    return repr(number)


def _bits(found: Any, data: np.ndarray) -> str:
    if found.shape != data.shape:
        return f"shape {found.shape}, not {data.shape}"
    # An array may be on the devices of several processes.
    shards = getattr(found, "addressable_shards", None)
    parts = [(..., found)] if shards is None else [(s.index, s.data) for s in shards]
    for index, part in parts:
        if _content(np.asarray(part)) != _content(data[index]):
            return f"{np.asarray(part)!r}, not {data[index]!r}"
    return ""


def _content(array: np.ndarray) -> Any:
    """The bytes; of long doubles, which have bytes without a meaning, the numbers."""
    is_long = array.dtype == np.longdouble
    return [*map(repr, array.ravel())] if is_long else array.tobytes()


def _device(found: Any, expected: Value) -> str:
    if expected.kind == "jax" and found.weak_type != expected.weak:
        return "weak" if found.weak_type else "not weak"
    where = expected.where
    if isinstance(where, Mesh):  # XLA has chosen how it is sharded there.
        same = found.committed and [*found.sharding.mesh.devices] == [*where.devices]
        return "" if same else f"on {found.sharding}, not on {where}"
    if isinstance(where, jax.Device):
        same = not found.committed and found.devices() == {where}
        return "" if same else f"on {found.sharding}, not on {where}"
    if where is not None:
        same = found.committed and found.sharding == where
        if expected.kind == "key":  # JAX writes `P(None)` where they have `P()`.
            same = found.committed and found.sharding.is_equivalent_to(
                where, found.ndim
            )
        return "" if same else f"on {found.sharding}, not {where}"
    default = jax.config.jax_default_device or jax.local_devices()[0]
    if found.committed or found.devices() != {default}:
        return f"on {found.sharding}, committed={found.committed}"
    return ""
