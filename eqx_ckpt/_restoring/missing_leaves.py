"""Compute the leaves that a checkpoint does not have."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree.leaves.skeleton import traced_arguments
from .._types import IsLeaf
from .placement import for_xla, sharded


def initialised(
    tree: PyTree, is_leaf: IsLeaf, init: Callable[..., PyTree], args: tuple[Any, ...]
) -> PyTree:
    """Replace each `jax.ShapeDtypeStruct` by the leaf that `init` computes there."""
    leaves, treedef = jtu.tree_flatten(tree, is_leaf)
    on: dict[frozenset[Any], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            on.setdefault(_devices(leaf.sharding), []).append(i)
    dynamic, static = traced_arguments(args)
    for positions in on.values():

        def make(dynamic: Any, positions: list[int] = positions) -> list[Any]:
            made = jtu.tree_leaves(init(*eqx.combine(dynamic, static)), is_leaf)
            return [made[i] for i in positions]

        structs = [leaves[i] for i in positions]
        # XLA computes only the leaves that `make` returns.
        for i, leaf in zip(positions, _computed(make, dynamic, structs), strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)


def _devices(sharding: Sharding | None) -> frozenset[Any]:
    return frozenset() if sharding is None else frozenset(sharding.device_set)


def _computed(
    make: Callable[..., list[Any]], dynamic: Any, structs: list[jax.ShapeDtypeStruct]
) -> list[Any]:
    shardings = [struct.sharding for struct in structs]
    if shardings[0] is None:
        return jax.jit(make)(dynamic)
    if not shardings[0].addressable_devices:
        # JAX computes only on meshes that include a device of this process.
        return [
            jax.make_array_from_single_device_arrays(
                struct.shape, struct.sharding, [], dtype=struct.dtype
            )
            for struct in structs
        ]
    out = [for_xla(struct.sharding, struct.shape) for struct in structs]
    return [*map(sharded, jax.jit(make, out_shardings=out)(dynamic), shardings)]
