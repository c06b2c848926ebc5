"""Choose the regions to read for a sharding, and put them on devices."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from .._format.chunk_grid import (
    distinct_regions,
    Region,
    relative,
    shape_of,
    start_of,
    whole,
)
from .._format.leaf_record import dtype_from_tag, LeafRecord
from .._storage.calls.host_memory import empty
from .._tree.leaves.leaf_kinds import describe
from .._tree.matching.sharding_argument import automatic
from .._tree.transform.transform_trace import undisturbed, without_nan_checks


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


def on_devices(host: np.ndarray, record: LeafRecord, sharding: Sharding | None) -> Any:
    """A leaf whose data each process has as a whole."""
    parts = [
        Part(host[(*region, ...)], record, sharding, devices)
        for region, devices in pieces(sharding, host.shape)
    ]
    return assemble(record, sharding, [x for placed in put(parts) for x in placed])


def moved(leaf: jax.Array, sharding: Sharding | None) -> jax.Array:
    """The same leaf with a different sharding, also on devices of other processes."""
    if sharding is None or leaf.sharding == sharding:
        return leaf
    record = describe(leaf)
    if record is None or not leaf.is_fully_addressable:
        with without_nan_checks():
            return sharded(jax.device_put(leaf, sharding), sharding)
    data = jax.random.key_data(leaf) if record.kind == "key" else leaf
    return on_devices(np.asarray(data), record, sharding)


def for_xla(sharding: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    """The sharding to ask XLA for: some versions do not shard what has no elements."""
    return None if 0 in shape else sharding


def sharded(leaf: jax.Array, sharding: Sharding | None) -> jax.Array:
    """A leaf that XLA has computed or moved; made anew if it did not shard it."""
    if sharding is None or 0 not in leaf.shape or isinstance(leaf, Tracer):
        return leaf
    record = describe(leaf)
    if record is None:
        return leaf
    return on_devices(np.empty(record.data_shape, dtype_of(record)), record, sharding)


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
    """The same array with a weak type, which no function of JAX gives to an array.

    But a compiled one does not look at the weak types of what it is called with.
    """
    home = array.sharding
    if not home.addressable_devices:
        # JAX computes only on meshes that include a device of this process.
        return array
    device = next(iter(home.addressable_devices))
    with (
        undisturbed(),
        jax.default_device(device),
        jax.enable_x64(True),  # Its dtype may be wider than those of now.
        jax.disable_jit(False),
    ):
        if not array.committed:
            return _to_weak(array.shape, array.dtype, device)(array)
        # Some versions of JAX cannot compute in memory other than the default one.
        there = automatic(home)
        weak = _to_weak(array.shape, array.dtype, there)(jax.device_put(array, there))
        return jax.device_put(weak, home)


# Not more, as each is a program that is kept.
@ft.lru_cache(maxsize=256)
def _to_weak(
    shape: tuple[int, ...], dtype: np.dtype, on: Any
) -> Callable[[jax.Array], jax.Array]:
    """To call with arrays on that sharding, or uncommitted ones on the default device,
    which is `on`.
    """
    sharding = on if isinstance(on, Sharding) else None
    weak = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    out = for_xla(sharding, shape)
    return jax.jit(lambda x: x, out_shardings=out).lower(weak).compile()


class Assembly:
    """Puts pieces together: in host memory, or on each device of the region.

    On a device, a piece overwrites its part of an array, which is donated for that; so
    there is never more than the region and one piece.
    """

    def __init__(self, region: Region, count: int, on_host: bool) -> None:
        self._region = region
        self._left = count
        self._on_host = on_host
        self._host: np.ndarray | None = None
        self._arrays: list[jax.Array] = []

    def add(self, part: Part, region: Region) -> list[Any]:
        """Take a piece; return the arrays of the region once it is the last one."""
        within = relative(region, self._region)
        self._left -= 1
        if self._on_host:
            if self._host is None:
                self._host = empty(shape_of(self._region), part.host.dtype)
            self._host[within] = part.host
            whole = part._replace(host=self._host)
            return [] if self._left else put([whole])[0]
        (pieces,) = put([part])
        # 64 bits stay as they are.
        with undisturbed(), jax.enable_x64(True), jax.disable_jit(False):
            if not self._arrays:
                shape = shape_of(self._region)
                self._arrays = [_zeros_beside(piece, shape) for piece in pieces]
            start = [np.int64(i) for i in start_of(within)]
            self._arrays = [
                _overwritten(array, piece, start)
                for array, piece in zip(self._arrays, pieces, strict=True)
            ]
            # Then the memory of the piece is free.
            jax.block_until_ready(self._arrays)
        return [] if self._left else self._arrays


def _zeros_beside(piece: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Zeros on the device of a piece, committed to it if that is."""
    (device,) = piece.devices()
    sharding = SingleDeviceSharding(device, memory_kind=piece.sharding.memory_kind)
    zeros = ft.partial(jnp.zeros, tuple(shape), piece.dtype)
    if piece.committed:
        return jax.jit(zeros, out_shardings=sharding)()
    with jax.default_device(device):
        return jax.jit(zeros)()


@ft.partial(jax.jit, donate_argnums=0)
def _overwritten(
    array: jax.Array, piece: jax.Array, start: Sequence[np.int64]
) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, piece, start)
