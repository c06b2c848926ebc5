"""The `frozen` argument: which leaves the user says do not change."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._types import IsLeaf, shown
from .key_paths import key_paths
from .leaf_kinds import describe_like
from .transient import is_transient, stop_at_transients
from .tree_prefix import fit_prefix


def check_frozen(frozen: PyTree) -> None:
    """Raise if there is anything in `frozen` but bools and functions."""
    for path, mask in key_paths(frozen):
        if not isinstance(mask, bool) and not callable(mask) and not is_transient(mask):
            at = f" at `{jtu.keystr(path)}`" if path else ""
            raise TypeError(
                f"`frozen` has {mask!r}{at}. Pass `True`, `False` or a function "
                "`leaf -> bool`, or a PyTree of them, as for `equinox.partition`."
            )


def frozen_flags(frozen: PyTree, pytree: PyTree, is_leaf: IsLeaf) -> list[bool]:
    """Whether each leaf of `pytree` is frozen, in the order of leaves."""
    check_frozen(frozen)
    try:
        masks, nodes = fit_prefix(frozen, pytree, is_leaf)
    except ValueError as e:
        raise LeafMismatchError(
            f"`frozen` does not fit `pytree`: {e} Pass `True`, `False` or a function "
            "`leaf -> bool` for all leaves, or a PyTree of them whose structure is "
            "that of the upper part of `pytree`."
        ) from e
    # As `key_paths`, without the paths, which take longer.
    stop = stop_at_transients(is_leaf)
    return [
        mask if isinstance(mask, bool) else not is_transient(leaf) and _said(mask, leaf)
        for mask, node in zip(masks, nodes, strict=True)
        for leaf in jtu.tree_leaves(node, stop)
    ]


def _said(mask: Callable[[Any], Any], leaf: Any) -> bool:
    said = mask(leaf)
    if not isinstance(said, bool | np.bool_):
        what = describe_like(leaf) or type(leaf).__name__
        raise TypeError(
            f"The function {mask!r} of `frozen` returned {shown(said)} for a leaf that "
            f"is {what}. It has to return a bool."
        )
    return bool(said)
