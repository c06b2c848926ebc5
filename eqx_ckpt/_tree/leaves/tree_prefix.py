"""PyTree prefixes: arguments that have one entry for several leaves of a tree."""

from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._types import IsLeaf
from .transient import is_transient, stop_at_transients


def fit_prefix(
    prefix: PyTree, tree: PyTree, is_leaf: IsLeaf, is_entry: IsLeaf = None
) -> tuple[list[Any], list[Any]]:
    """The entries of a prefix of a tree, and the node of the tree for each.

    A `Transient` is one leaf of the tree. What the prefix has for the leaves in it, as
    `jax.tree_util.tree_map` makes it, is one entry: the `Transient` of the prefix.
    Raises `ValueError` if the prefix does not fit, also if it goes below a leaf.
    """
    entries, structure = jtu.tree_flatten(prefix, stop_at_transients(is_entry))
    nodes = structure.flatten_up_to(tree)
    if is_leaf is not None and not jtu.treedef_is_leaf(structure):
        whole = jtu.tree_structure(tree, stop_at_transients(is_leaf))
        # Numbers in place of the leaves: below them, JAX finds nothing that fits.
        structure.flatten_up_to(whole.unflatten(range(whole.num_leaves)))
    for entry, node in zip(entries, nodes, strict=True):
        if is_transient(entry) and not is_transient(node):
            raise ValueError(f"It has {entry!r} for {type(node).__name__}.")
    return entries, nodes
