"""Choose the regions to read for a sharding, and put them on devices."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from .._format.chunks import distinct_regions, Region, whole
from .._format.leaves import dtype_from_tag, LeafRecord


# The distinct regions to read, each with its devices.
Pieces: TypeAlias = list[tuple[Region, list[Any]]]


def pieces(sharding: Sharding | None, shape: tuple[int, ...]) -> Pieces:
    if sharding is None:
        return [(whole(shape), [])]
    return distinct_regions(sharding.addressable_devices_indices_map(shape), shape)


class Part(NamedTuple):
    """A region of a leaf in host memory, and its target devices."""

    host: np.ndarray
    record: LeafRecord
    sharding: Sharding | None
    devices: list[Any]


def put(parts: Sequence[Part]) -> list[list[Any]]:
    """Put each part on its devices, and return one array for each device.

    JAX is called twice, not once per part.
    """
    free = [part.host for part in parts if _is_free(part)]
    fixed = [
        (part.host, SingleDeviceSharding(d, memory_kind=part.sharding.memory_kind))
        for part in parts
        if part.sharding is not None
        for d in part.devices
    ]
    on_default = iter(jax.device_put(free))
    hosts, targets = [host for host, _ in fixed], [target for _, target in fixed]
    on_devices = iter(jax.device_put(hosts, targets))
    return [
        [next(on_default)]
        if _is_free(part)
        else [next(on_devices) for _ in part.devices] or [part.host]
        for part in parts
    ]


def _is_free(part: Part) -> bool:
    """Whether the part goes to the default device, uncommitted."""
    return part.sharding is None and part.record.kind in ("jax", "key")


def assemble(record: LeafRecord, sharding: Sharding | None, arrays: list[Any]) -> Any:
    """Assemble a leaf from the arrays of its parts."""
    if sharding is None:
        return finished(arrays[0], record)
    # A process may have no part of a global array.
    leaf = jax.make_array_from_single_device_arrays(
        record.data_shape, sharding, arrays, dtype=None if arrays else dtype_of(record)
    )
    return finished(leaf, record)


def dtype_of(record: LeafRecord) -> np.dtype:
    is_key = record.kind == "key"
    return np.dtype(record.data_type) if is_key else dtype_from_tag(record.dtype)


def finished(leaf: Any, record: LeafRecord) -> Any:
    if record.kind == "key":
        return jax.random.wrap_key_data(leaf, impl=record.impl)
    if record.kind == "numpy_scalar":
        return leaf[()]
    return _as_weak(leaf) if record.weak_type else leaf


def _as_weak(array: jax.Array) -> jax.Array:
    """The same array with a weak type, which JAX derives only from Python scalars."""
    kind = array.dtype.kind
    if kind not in _ZEROS:
        return array
    is_placed = not isinstance(array, Tracer) and array.committed
    home = array.sharding if is_placed else None
    wide = array.dtype.itemsize > (8 if kind == "c" else 4)
    # A saved NaN is not an error of a computation, so `jax_debug_nans` must not raise.
    with jax.enable_x64(wide), jax.debug_nans(False), jax.debug_infs(False):
        if home is None:
            return _weak_copy(kind, None)(array)
        # Some versions of JAX cannot compute in memory other than the default one.
        device = next(iter(home.device_set))
        default = home.with_memory_kind(device.default_memory().kind)
        weak = _weak_copy(kind, default)(jax.device_put(array, default))
        return jax.device_put(weak, home)


_ZEROS = {"i": 0, "f": 0.0, "c": 0j}


@ft.cache
def _weak_copy(
    kind: str, sharding: Sharding | None
) -> Callable[[jax.Array], jax.Array]:
    def copy(array: jax.Array) -> jax.Array:
        return jnp.full(array.shape, _ZEROS[kind]).at[...].set(array)

    return jax.jit(copy, out_shardings=sharding)
