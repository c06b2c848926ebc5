"""The `sharding` argument of a restore, resolved for each leaf."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._format.leaf_record import LeafRecord
from ..._types import IsLeaf
from ..leaves.leaf_kinds import split, unreduced_axes
from ..leaves.transient import is_transient, stop_at_transients
from ..leaves.tree_prefix import fit_prefix


# A `Sharding`, a `jax.Device`, a `Mesh`, or `None`: as `like` says.
Target: TypeAlias = Any


# Smaller leaves are replicated where others are computed from them.
_LARGE = 2**20


class Place(NamedTuple):
    """Where a leaf goes.

    `target`: its entry in the `sharding` argument.
    `sharding`: its sharding; `None` leaves it to JAX.
    `dropped`: the axes of its saved sharding over which it is replicated.
    `problem`: why it cannot go there.
    """

    target: Target
    sharding: Sharding | None = None
    dropped: tuple[str, ...] = ()
    problem: str = ""

    @property
    def left_to_xla(self) -> "Place":
        """The same for a leaf that is computed: on a mesh, `None` means "as saved"."""
        return self._replace(sharding=None) if isinstance(self.target, Mesh) else self


ANYWHERE = Place(None)


def targets_of(
    sharding: PyTree, like: PyTree, is_leaf: IsLeaf, count: int
) -> Sequence[Any]:
    """For every leaf of `like`, its entry in `sharding`, a PyTree prefix."""
    targets = jtu.tree_leaves(sharding, stop_at_transients(_is_target))
    for target in targets:
        if not (_is_target(target) or is_transient(target) or callable(target)):
            raise TypeError(
                f"`sharding` has {target!r} in it. Pass a `jax.sharding.Sharding` such "
                "as `NamedSharding(mesh, spec)`, a device, a mesh, a function "
                "`(name, struct) -> Sharding | None`, or a PyTree prefix of them."
            )
    if targets and targets[0] is sharding:
        return [sharding] * count
    try:
        targets, nodes = fit_prefix(sharding, like, is_leaf, _is_target)
    except ValueError as e:
        raise LeafMismatchError(
            f"`sharding` is not a prefix of `like`: {str(e)[:300]} Pass one "
            "sharding for all leaves, a function that is not itself a PyTree, or a "
            "PyTree whose structure is that of the upper part of `like`."
        ) from e
    return [
        target
        for target, node in zip(targets, nodes, strict=True)
        for _ in jtu.tree_leaves(node, is_leaf)
    ]


def _is_target(x: Any) -> bool:
    return x is None or isinstance(x, Sharding | jax.Device | Mesh)


def place(target: Any, name: str, like: Any, record: LeafRecord) -> Place:
    """Where a leaf of the checkpoint goes; NumPy leaves stay on the host."""
    if record.kind not in ("jax", "key") or not hasattr(like, "sharding"):
        return ANYWHERE if target is None else Place(target)
    if not _is_target(target):
        target = _asked(target, name, jax.ShapeDtypeStruct(like.shape, like.dtype))
        if not _is_target(target):
            way = ""
            if isinstance(target, PartitionSpec):
                way = f": return `NamedSharding(mesh, {target})`"
            return Place(None, problem=f"{target!r} was returned for it{way}")
    if target is None:
        is_free = isinstance(like, jax.Array) and not like.committed
        sharding = None if is_free else like.sharding
        return ANYWHERE if sharding is None else _on(None, sharding, record)
    if isinstance(target, Mesh):
        sharding, dropped = _as_saved(target, record)
        return Place(target, sharding, dropped)
    is_device = isinstance(target, jax.Device)
    return _on(target, SingleDeviceSharding(target) if is_device else target, record)


def _on(target: Target, sharding: Sharding, record: LeafRecord) -> Place:
    """A leaf with a sharding, if that divides its shape."""
    try:
        sharding = _on_devices(sharding)
        _check_fits(sharding, record.shape)
    except (ValueError, NotImplementedError) as e:
        reason = "does not divide its shape" if "divi" in str(e) else str(e)
        return Place(target, problem=f"{_words(sharding)} {reason}")
    return Place(target, sharding)


def _asked(
    rule: Callable[[str, jax.ShapeDtypeStruct], Any],
    name: str,
    struct: jax.ShapeDtypeStruct,
) -> Any:
    try:
        return rule(name, struct)
    except Exception as e:
        raise LeafMismatchError(
            f"The function for the shardings raised `{type(e).__name__}` for leaf "
            f"{name!r}, {struct.dtype}{list(struct.shape)}: {e}. It is called with "
            "the leaf's name, and a `jax.ShapeDtypeStruct` of it."
        ) from e


def _check_fits(sharding: Sharding, shape: tuple[int, ...]) -> None:
    if unreduced := unreduced_axes(sharding):
        raise ValueError(
            f"is unreduced over {unreduced}: a leaf is whole, not part of a sum"
        )
    if isinstance(sharding, NamedSharding) and len(split(sharding.spec)) > len(shape):
        raise ValueError("is for more dimensions than it has")
    sharding.shard_shape(shape)


def _on_devices(sharding: Sharding) -> Sharding:
    """The same sharding on the current mesh, if its own is abstract."""
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.shape != sharding.mesh.shape:
        raise ValueError(
            "has no devices: restore inside of `jax.set_mesh(mesh)` with a mesh of "
            "these axes, or pass `sharding`"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _words(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = ", ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items())
    return f"{sharding.spec} on the mesh ({axes})"


def computed_on(devices: Sequence[Any] | None, places: Sequence[Place]) -> Mesh | None:
    """A mesh of the devices that a computation of leaves for these places runs on.

    `None` means one device, which JAX or the only place determines. XLA chooses how
    what is in between is sharded, so all axes are `Auto`.
    """
    if devices is None or len(devices) < 2:
        return None
    for found in places:
        mesh = getattr(found.sharding, "mesh", found.target)
        if isinstance(mesh, Mesh):
            return Mesh(mesh.devices, mesh.axis_names, axis_types=_auto(mesh.devices))
    grid = np.array(devices)
    return Mesh(grid, ("devices",), axis_types=_auto(grid))


def automatic(sharding: Sharding) -> Sharding:
    """The same in the default memory, on a mesh of `Auto` axes, to compute on."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        assert isinstance(mesh, Mesh)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=_auto(mesh.devices))
        return NamedSharding(mesh, sharding.spec)
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)


def _auto(devices: np.ndarray) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * devices.ndim


def spread(mesh: Mesh, record: LeafRecord) -> NamedSharding:
    """The sharding of an input of a computation: as saved, or an even split."""
    sharding, _ = _as_saved(mesh, record._replace(sharding=_in_default(record)))
    is_split = any(entry for entry in sharding.spec)
    if is_split or record.kind == "key" or record.nbytes < _LARGE:
        return sharding
    spec: list[tuple[str, ...] | None] = [None] * len(record.shape)
    for axis in sorted(mesh.axis_names, key=lambda name: -mesh.shape[name]):
        for i, size in enumerate(record.shape):
            axes = (*(spec[i] or ()), axis)
            if size and size % math.prod(mesh.shape[a] for a in axes) == 0:
                spec[i] = axes
                break
    return NamedSharding(mesh, PartitionSpec(*spec))


def _in_default(record: LeafRecord) -> dict[str, Any] | None:
    """The saved sharding of a leaf, in the default memory."""
    return record.sharding and record.sharding | {"memory_kind": None}


def _as_saved(mesh: Mesh, record: LeafRecord) -> tuple[NamedSharding, tuple[str, ...]]:
    """The saved PartitionSpec on another mesh, and the axes that are dropped.

    Those are the axes that the mesh lacks, or whose size does not divide the leaf.
    """
    saved = record.sharding or {"spec": []}
    dropped: list[str] = []
    spec: list[tuple[str, ...] | None] = []
    for entry, size in zip(saved["spec"], record.shape, strict=False):
        axes: list[str] = []
        for axis in entry if isinstance(entry, list) else [entry]:
            parts = math.prod(mesh.shape[a] for a in axes) * mesh.shape.get(axis, 0)
            if parts and size % parts == 0:
                axes.append(axis)
            elif axis is not None:
                dropped.append(axis)
        spec.append(tuple(axes) or None)
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    found = saved.get("memory_kind")
    kind = found if found in kinds else None
    sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)
    return sharding, tuple(dropped)
