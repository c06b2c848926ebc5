"""Where a leaf goes: the rules of `docs/usage/sharding.md`, and nothing else."""

from typing import Any

import jax
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)


def where_to(saved: Any, like: Any, to: Any) -> Sharding | str | None:
    """The sharding of a leaf, or the status by which `match` refuses it.

    `to` is the argument `sharding`, and goes before `like`. `None` is the default
    device, uncommitted.
    """
    if isinstance(to, jax.Device):
        to = SingleDeviceSharding(to)
    if isinstance(to, Mesh):
        to = as_saved(getattr(saved, "sharding", None), to)
    is_free = isinstance(like, jax.Array) and not like.committed
    where = like.sharding if to is None and not is_free else to
    if where is None:
        return None
    if isinstance(where, NamedSharding) and not isinstance(where.mesh, Mesh):
        # A skeleton that was made under a mesh knows its axes, not its devices.
        mesh = current_mesh()
        if mesh is None or mesh.shape != where.mesh.shape:
            return "sharding"
        where = NamedSharding(mesh, where.spec)
    rank = len(where.spec) if isinstance(where, NamedSharding) else 0
    try:
        where.shard_shape(np.shape(saved) if rank <= np.ndim(saved) else None)
    except (ValueError, TypeError):
        return "sharding"
    return where


def current_mesh() -> Mesh | None:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # Inside of `jax.jit`, meshes have no devices.
        return None


def as_saved(sharding: Any, mesh: Mesh) -> NamedSharding:
    """The same PartitionSpec on a mesh that has its axes."""
    if not isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
