"""The `frozen` argument: which leaves the user says do not change."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._types import IsLeaf
from .key_paths import key_paths


def check_frozen(frozen: PyTree) -> None:
    """Raise if there is anything in `frozen` but bools and functions."""
    for path, mask in key_paths(frozen):
        if not isinstance(mask, bool) and not callable(mask):
            at = f" at `{jtu.keystr(path)}`" if path else ""
            raise TypeError(
                f"`frozen` has {mask!r}{at}. Pass `True`, `False` or a function "
                "`leaf -> bool`, or a PyTree of them, as for `equinox.partition`."
            )


def frozen_flags(frozen: PyTree, pytree: PyTree, is_leaf: IsLeaf) -> list[bool]:
    """Whether each leaf of `pytree` is frozen, in the order of leaves."""
    check_frozen(frozen)
    masks, structure = jtu.tree_flatten(frozen)
    try:
        nodes = structure.flatten_up_to(pytree)
    except ValueError as e:
        raise LeafMismatchError(
            f"`frozen` does not fit `pytree`: {e} Pass `True`, `False` or a function "
            "`leaf -> bool` for all leaves, or a PyTree of them whose structure is "
            "that of the upper part of `pytree`."
        ) from e
    return [
        mask if isinstance(mask, bool) else _said(mask, path, leaf)
        for mask, node in zip(masks, nodes, strict=True)
        for path, leaf in key_paths(node, is_leaf)
    ]


def _said(mask: Callable[[Any], Any], path: tuple[Any, ...], leaf: Any) -> bool:
    said = mask(leaf)
    if not isinstance(said, bool | np.bool_):
        at = f" at `{jtu.keystr(path)}`" if path else ""
        raise TypeError(
            f"The function {mask!r} of `frozen` returned {said!r} for a leaf{at}. It "
            "has to return a bool."
        )
    return bool(said)
