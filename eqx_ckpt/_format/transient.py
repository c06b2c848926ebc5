"""Parts of a tree that are not saved, and are made anew by a restore."""

import abc
from typing import Any

import equinox as eqx

from .._types import IsLeaf


class Transient(eqx.Module):
    """A node whose leaves are not saved, such as a cache.

    A save writes down `note()`, and a restore puts `fresh()` of the node in `like` in
    its place, if that node `accepts` what was written down.
    """

    @abc.abstractmethod
    def note(self) -> str: ...

    @abc.abstractmethod
    def accepts(self, note: str) -> bool: ...

    @abc.abstractmethod
    def fresh(self) -> "Transient": ...


def stop_at_transients(is_leaf: IsLeaf) -> IsLeaf:
    """`is_leaf`, which takes such a node as one leaf, too."""

    def stop(node: Any) -> bool:
        if isinstance(node, Transient):
            return True
        return is_leaf is not None and is_leaf(node)

    return stop
