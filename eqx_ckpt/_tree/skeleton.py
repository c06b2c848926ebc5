"""Skeletons of trees that are to be on a mesh."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import LeafMismatchError
from .._format.leaves import describe_like
from .._format.names import encode, key_paths, typed
from .._types import IsLeaf
from .sharding import place, Target


def shard_like(
    like: PyTree,
    rule: Callable[[str, jax.ShapeDtypeStruct], Target] | Mapping[str, PartitionSpec],
    mesh: Mesh | None = None,
    is_leaf: IsLeaf = None,
) -> PyTree:
    """A skeleton whose leaves say where they go. Nothing is allocated.

    **Arguments:**

    - `like`: a PyTree with `jax.ShapeDtypeStruct`s, as `equinox.filter_eval_shape`
        makes it, or with arrays.
    - `rule`: a function `(name, struct)` that returns a `jax.sharding.Sharding` for
        each leaf, or `None` to leave it as it is. Or a dictionary from regular
        expressions to `PartitionSpec`s: the first expression that is found in a leaf's
        name counts.
    - `mesh`: for the `PartitionSpec`s.
    - `is_leaf`: as [`eqx_ckpt.tree_serialise_leaves`][].

    **Returns:**

    `like`, with a `jax.ShapeDtypeStruct` with a sharding for each array: a `like` of
    [`eqx_ckpt.tree_deserialise_leaves`][]. All else stays.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: lists the leaves that no expression is found in,
        and those that their sharding does not divide.

    !!! example

        ```python
        import equinox as eqx
        import eqx_ckpt
        import jax
        from jax.sharding import PartitionSpec as P

        def make(key):
            return eqx.nn.MLP(8, 8, 16, 2, key=key)

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        skeleton = eqx.filter_eval_shape(make, jax.random.key(0))
        rules = {"weight$": P("model"), "bias$": P()}
        like = eqx_ckpt.shard_like(skeleton, rules, mesh)
        assert like.layers[0].weight.sharding.spec == P("model")
        ```
    """
    if not callable(rule) and mesh is None:
        raise LeafMismatchError("`rule` has `PartitionSpec`s: pass their `mesh` too.")
    problems: list[str] = []
    leaves: list[Any] = []
    for path, leaf in key_paths(like, is_leaf):
        leaves.append(leaf)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        name, record = encode(typed(path)), describe_like(leaf)
        assert record is not None
        if record.kind == "struct":
            record = record._replace(kind="jax")
        target = rule if callable(rule) else _by_name(rule, mesh, name)
        found = place(target, name, leaf, record)
        if target is None:
            problems.append(f"- {name!r}: no expression is found in it.")
        elif found.problem:
            problems.append(f"- {name!r}: {record}: {found.problem}.")
        leaves[-1] = jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=found.sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )
    if problems:
        raise LeafMismatchError(
            "These leaves cannot be sharded so:\n"
            + "\n".join(problems)
            + '\nChange the rule for them; `".*": PartitionSpec()` replicates the rest.'
        )
    return jtu.tree_structure(like, is_leaf).unflatten(leaves)


def _by_name(
    specs: Mapping[str, PartitionSpec], mesh: Mesh | None, name: str
) -> NamedSharding | None:
    for expression, spec in specs.items():
        if mesh is not None and re.search(expression, name):
            return NamedSharding(mesh, spec)
    return None
