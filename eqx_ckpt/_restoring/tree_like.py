"""Create a `like` from a checkpoint, and compare a `like` with a checkpoint."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .._format.source import Source
from .._inspecting.inspect_checkpoint import read_manifest
from .._sources.checkpoint_source import opened
from .._storage.calls.garbage_collector import collector_paused
from .._tree.leaves.casting import Casting
from .._tree.leaves.filter_spec import default_deserialise_filter_spec
from .._tree.matching.leaf_match import TreeMatch
from .._tree.matching.name_tree import checked_prefix, nested, struct_of
from .._tree.plans.read_plan import (
    Mismatched,
    Missing,
    plan_reads,
    Request,
    Unexpected,
)
from .._tree.transform.transform_argument import Transform
from .._types import check_flag, IsLeaf, PathLike
from .forecast import forecast


def tree_like(source: PathLike | Source, *, prefix: str = "") -> PyTree:
    """Create a `like` from a checkpoint, if you do not have the code of its model.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `prefix`: only the leaves below this name.

    **Returns:**

    Nested dictionaries of `jax.ShapeDtypeStruct`s, with the keys of the saved tree.
    Python scalars are returned themselves, since they have no dtype. Leaves that a
    custom `filter_spec` wrote as bytes cannot be restored with this `like`: they need
    that `filter_spec`.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: there is no leaf below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"model": {"w": jnp.ones(3)}, "step": 5})
        like = eqx_ckpt.tree_like("ckpt", prefix="model")
        model = eqx_ckpt.tree_deserialise_leaves("ckpt", like, prefix="model")
        assert model["w"].shape == (3,)
        ```
    """
    manifest = read_manifest(source)
    prefix = checked_prefix(prefix, manifest)
    return nested(manifest, prefix, lambda _, record: struct_of(record))


def tree_match(
    source: PathLike | Source,
    like: PyTree,
    filter_spec: PyTree = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    prefix: str = "",
    sharding: PyTree = None,
    casting: Casting = "no",
    missing: Missing = "raise",
    mismatched: Mismatched = "raise",
    unexpected: Unexpected = "raise",
    transform: Transform | None = None,
    broadcast_replicas: bool = False,
) -> TreeMatch:
    """Say what [`eqx_ckpt.tree_deserialise_leaves`][] would do with the same arguments.

    **Arguments:**

    - All: as [`eqx_ckpt.tree_deserialise_leaves`][].

    **Returns:**

    A [`eqx_ckpt.inspect.TreeMatch`][]: what would happen to each leaf, how many bytes
    would be read, in how many parts, and how much host memory that would take. Print it
    for an overview.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: `filter_spec`, `where` or `prefix` do not fit.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        found = eqx_ckpt.tree_match("ckpt", {"w": jnp.ones(4), "b": jnp.ones(4)})
        assert not found.ok
        assert found.leaves["w"].status == "shape"
        assert found.leaves["b"].status == "missing"
        ```
    """
    request = Request(
        like,
        filter_spec,
        is_leaf,
        where,
        prefix,
        sharding,
        casting,
        missing,
        mismatched,
        unexpected,
        transform,
    )
    check_flag("broadcast_replicas", broadcast_replicas)
    with collector_paused(), jax.ensure_compile_time_eval():
        found = opened(source)
        plan = plan_reads(found.manifest, request)
        costs = forecast(found, plan, broadcast_replicas)
        return TreeMatch(plan.leaves, *costs[:4])
