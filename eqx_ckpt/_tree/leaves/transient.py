"""Nodes of a tree that a save skips and a restore creates anew."""

import abc
import functools as ft

from ..._types import check_function, IsLeaf


class Transient(abc.ABC):
    """A node whose leaves are not saved, such as a cache; an `equinox.Module` too.

    A save stores `note()` in the manifest. A restore replaces the node in `like` by its
    `fresh()`, if it `accepts` the stored note.
    """

    @abc.abstractmethod
    def note(self) -> str: ...

    @abc.abstractmethod
    def accepts(self, note: str) -> bool: ...

    @abc.abstractmethod
    def fresh(self) -> "Transient": ...


# Called for each node of a tree: a builtin is several times faster than a function.
is_transient = ft.partial(type.__instancecheck__, Transient)


def stop_at_transients(is_leaf: IsLeaf) -> IsLeaf:
    """Extend `is_leaf` so that a `Transient` is one leaf."""
    if is_leaf is None:
        return is_transient
    check_function("is_leaf", is_leaf)
    return lambda node: is_transient(node) or is_leaf(node)
