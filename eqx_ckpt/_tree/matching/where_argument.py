"""The leaves that the `where` argument of a restore picks."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._types import check_function, IsLeaf


def chosen_by(
    where: Callable[[PyTree], Any], like: PyTree, is_leaf: IsLeaf
) -> set[int]:
    """The positions of the leaves that `where` picks."""
    return set(jtu.tree_leaves(picked_by(where, like, is_leaf)))


def picked_by(where: Callable[[PyTree], Any], like: PyTree, is_leaf: IsLeaf) -> PyTree:
    """The nodes that `where` picks, with positions in the place of leaves."""
    check_function("where", where)
    treedef = jtu.tree_structure(like, is_leaf)
    nodes: list[Any] = []

    def keep(node: Any) -> Any:
        nodes.append(node)
        return node

    try:
        picked = where(treedef.unflatten(range(treedef.num_leaves)))
        if picked is not None:
            eqx.tree_at(where, like, replace_fn=keep, is_leaf=is_leaf)
    except Exception as e:
        raise LeafMismatchError(
            f"`where` does not pick a part of `like`: {e} Pass a function such as "
            "`where=lambda tree: tree.model`, which returns a node of `like`, or a "
            "tuple of nodes."
        ) from e
    if not nodes or any(node is None for node in nodes):
        what = "`None`" if nodes or picked is None else "nothing"
        raise LeafMismatchError(
            f"`where` picks {what}, so there is nothing to "
            "restore. It has to return a node of the tree that it is called with, or a "
            "tuple of nodes: does it lack a `return`, or has `like` no such part?"
        )
    if not all(type(index) is int for index in jtu.tree_leaves(picked)):
        raise LeafMismatchError(
            "`where` returns something that is not a part of `like`. It has to return "
            "a node of the tree that it is called with, or a tuple of nodes."
        )
    return picked
