"""Nodes of a tree that a save skips and a restore creates anew."""

import abc
import functools as ft
from collections.abc import Iterable, Mapping

from ..._types import check_function, IsLeaf


class Transient(abc.ABC):
    """A node whose leaves are not saved, such as a cache; an `equinox.Module` too.

    A save stores `note()` in the manifest. A restore replaces the node in `like` by its
    `fresh()`. If it restores leaves beside the node, the node has to `accept` the note
    that was stored with them.
    """

    @abc.abstractmethod
    def note(self) -> str: ...

    @abc.abstractmethod
    def accepts(self, note: str) -> bool: ...

    @abc.abstractmethod
    def fresh(self) -> "Transient": ...

    @abc.abstractmethod
    def bare(self) -> "Transient":
        """The same node without leaves."""


# Called for each node of a tree: a builtin is several times faster than a function.
is_transient = ft.partial(type.__instancecheck__, Transient)


def stop_at_transients(is_leaf: IsLeaf) -> IsLeaf:
    """Extend `is_leaf` so that a `Transient` is one leaf."""
    if is_leaf is None:
        return is_transient
    check_function("is_leaf", is_leaf)
    return lambda node: is_transient(node) or is_leaf(node)


# What a note begins with in a manifest, where functions and strings are described too.
_MARK = "settings: "


def marked(node: Transient) -> str:
    """The note of a node, as a manifest has it."""
    return _MARK + node.note()


def note_in(text: str | None) -> str | None:
    """The note that a text of a manifest is, if it is one."""
    if text is None or not text.startswith(_MARK):
        return None
    return text.removeprefix(_MARK)


def moved_notes(
    unsaved: Mapping[str, str], moves: Iterable[tuple[str, Iterable[str]]]
) -> dict[str, str]:
    """The texts of a manifest once leaves have moved: notes go where leaves beside go.

    `moves`: the new name of each leaf, and the names of those that it comes from. A
    leaf that gets another name within its node says nothing. Where different notes
    come together, all are there, which no node accepts.
    """
    notes = {name: n for name, x in unsaved.items() if (n := note_in(x)) is not None}
    if not notes:
        return dict(unsaved)
    found: dict[str, set[str]] = {}
    beside: dict[str, dict[str, str]] = {}
    for name, note in notes.items():
        node, _, last = name.rpartition("/")
        beside.setdefault(node, {})[last] = note
    for new, olds in moves:
        to, slash, last = new.rpartition("/")
        for old in olds:
            node, _, before = old.rpartition("/")
            for key, note in beside.get(node, {}).items() if before == last else ():
                found.setdefault(to + slash + key, set()).add(note)
    others = {name: text for name, text in unsaved.items() if name not in notes}
    return others | {n: _MARK + " and ".join(sorted(x)) for n, x in found.items()}
