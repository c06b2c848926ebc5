"""Parts of a tree that are not saved, and are made anew by a restore."""

import abc
import functools as ft

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


# Called on every node of a tree: a builtin is several times faster than a function.
is_transient = ft.partial(type.__instancecheck__, Transient)


def stop_at_transients(is_leaf: IsLeaf) -> IsLeaf:
    """`is_leaf`, which takes such a node as one leaf, too."""
    if is_leaf is None:
        return is_transient
    return lambda node: is_transient(node) or is_leaf(node)
