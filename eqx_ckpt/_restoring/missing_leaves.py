"""Compute the leaves that a checkpoint does not have."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree.leaves.skeleton import Traced, traced_arguments
from .._types import IsLeaf
from .placement import for_xla, sharded


def initialised(
    tree: PyTree, is_leaf: IsLeaf, init: Callable[..., PyTree], args: tuple[Any, ...]
) -> PyTree:
    """Replace each `jax.ShapeDtypeStruct` by the leaf that `init` computes there.

    What `is_leaf` stops at may have some within it, which have no sharding.
    """
    nodes, treedef = jtu.tree_flatten(tree, is_leaf)
    within = [jtu.tree_flatten(node) for node in nodes]
    on: dict[frozenset[Any], dict[tuple[int, int], jax.ShapeDtypeStruct]] = {}
    for i, (leaves, _) in enumerate(within):
        for j, leaf in enumerate(leaves):
            if (struct := _to_compute(leaf, leaf is nodes[i])) is not None:
                on.setdefault(_devices(struct.sharding), {})[i, j] = struct
    dynamic, static = traced_arguments(args)
    for structs in on.values():

        def make(dynamic: Any, positions: Sequence[Any] = [*structs]) -> list[Any]:
            made = jtu.tree_leaves(init(*eqx.combine(dynamic, static)), is_leaf)
            return [jtu.tree_leaves(made[i])[j] for i, j in positions]

        # XLA computes only the leaves that `make` returns.
        computed = _computed(make, dynamic, [*structs.values()])
        for (i, j), leaf in zip(structs, computed, strict=True):
            within[i][0][j] = leaf
    return treedef.unflatten(
        inner.unflatten(leaves) if leaves else nodes[i]
        for i, (leaves, inner) in enumerate(within)
    )


def _to_compute(leaf: Any, is_node: bool) -> jax.ShapeDtypeStruct | None:
    if is_node:
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None
    # Only those of `init`: others may be a value of a custom `filter_spec`.
    if isinstance(leaf, Traced):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return None


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
