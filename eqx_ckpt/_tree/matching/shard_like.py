"""Skeletons of trees that will be placed on a mesh."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._format.leaf_names import encode
from ..._types import IsLeaf, shown
from ..leaves.key_paths import key_paths, typed
from ..leaves.leaf_kinds import describe_like
from ..leaves.transient import stop_at_transients
from .sharding_argument import place, Target


def shard_like(
    like: PyTree,
    rule: Callable[[str, jax.ShapeDtypeStruct], Target] | Mapping[str, PartitionSpec],
    mesh: Mesh | None = None,
    is_leaf: IsLeaf = None,
) -> PyTree:
    """Give the leaves of a skeleton shardings. Nothing is allocated.

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

    `like`, in which each array is a `jax.ShapeDtypeStruct` with a sharding, for
    [`eqx_ckpt.tree_deserialise_leaves`][]. All other leaves are unchanged.

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
    rules = [] if callable(rule) else _compiled(rule, mesh)
    problems: list[str] = []
    leaves: list[Any] = []
    is_leaf = stop_at_transients(is_leaf)
    for path, leaf in key_paths(like, is_leaf):
        leaves.append(leaf)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        name, record = encode(typed(path)), describe_like(leaf)
        assert record is not None
        if record.kind == "struct":
            record = record._replace(kind="jax")
        target, problem = (rule, "") if callable(rule) else _by_name(rules, mesh, name)
        found = place(target, name, leaf, record)
        if problem:
            problems.append(f"- {name!r}: {record}: {problem}.")
        elif target is None:
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


def _compiled(rule: Any, mesh: Any) -> list[tuple[re.Pattern[str], PartitionSpec]]:
    if not isinstance(rule, Mapping):
        raise LeafMismatchError(
            f"`rule` is {shown(rule)}. Pass a function `(name, struct)`, or a "
            "dictionary from regular expressions to `PartitionSpec`s."
        )
    if not isinstance(mesh, Mesh):
        raise LeafMismatchError(
            f"`rule` has `PartitionSpec`s, and `mesh` is {mesh!r}: pass their mesh too."
        )
    compiled: list[tuple[re.Pattern[str], PartitionSpec]] = []
    for expression, spec in rule.items():
        if not isinstance(spec, PartitionSpec):
            raise LeafMismatchError(
                f"`rule` has {spec!r} for {expression!r}. Pass a `PartitionSpec`, or a "
                "function `(name, struct)` that returns shardings."
            )
        try:
            compiled.append((re.compile(expression), spec))
        except (re.error, TypeError) as e:
            raise LeafMismatchError(
                f"The key {expression!r} of `rule` is not a regular expression: {e}. "
                'All names are found by `".*"`, those that end in it by `"weight$"`.'
            ) from e
    return compiled


def _by_name(
    rules: Sequence[tuple[re.Pattern[str], PartitionSpec]],
    mesh: Mesh | None,
    name: str,
) -> tuple[NamedSharding | None, str]:
    """The sharding of the first expression found in a name, or why it does not fit."""
    for pattern, spec in rules:
        if mesh is not None and pattern.search(name):
            try:
                return NamedSharding(mesh, spec), ""
            except Exception as e:  # One of JAX's errors is not a `ValueError`.
                reason = str(e).rstrip(".")
                return None, f"{spec}, by the rule {pattern.pattern!r}: {reason}"
    return None, ""
