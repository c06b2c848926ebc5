"""Name the leaves of a PyTree by their key paths."""

import functools as ft
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

from ..._errors import LeafNameError
from ..._format.leaf_names import (
    encode_component,
    inside_others,
    KEY_KINDS,
    MAX_LEVELS,
    ROOT,
    too_many_levels,
)
from ..._lazy import eqx, jtu, np
from ..._types import IsLeaf, KeyPath, TypedPath
from .transient import is_transient


if TYPE_CHECKING:
    from jaxtyping import PyTree


def _is_whole(node: Any) -> bool:
    return isinstance(node, eqx.nn.State) or is_transient(node)


def key_paths(tree: "PyTree", is_leaf: IsLeaf = None) -> list[tuple[KeyPath, Any]]:
    """Every leaf with its key path, in the order of `jax.tree_util.tree_leaves`.

    Like `jax.tree_util.tree_flatten_with_path`, except that the keys of an
    `eqx.nn.State` are its markers, since positions change when a layer is inserted. A
    `Transient` is one leaf.
    """
    # Called for each node: a builtin is several times faster than a function.
    is_state = ft.partial(type.__instancecheck__, eqx.nn.State)
    if is_leaf not in (None, is_transient) or any(
        map(is_state, jtu.tree_leaves(tree, is_state))
    ):
        return list(_key_paths(tree, is_leaf))
    return jtu.tree_flatten_with_path(tree, is_transient)[0]


def _key_paths(tree: "PyTree", is_leaf: IsLeaf) -> Iterator[tuple[KeyPath, Any]]:
    stop = _is_whole if is_leaf is None else lambda x: is_leaf(x) or _is_whole(x)
    for path, node in jtu.tree_flatten_with_path(tree, stop)[0]:
        if not isinstance(node, eqx.nn.State) or (
            is_leaf is not None and is_leaf(node)
        ):
            yield path, node
            continue
        children: Iterable[Any]
        markers: Any
        children, markers = node.tree_flatten()
        for i, (child, marker) in enumerate(zip(children, markers, strict=True)):
            key = jtu.DictKey(_undecorated(marker) if isinstance(marker, str) else i)
            for rest, leaf in key_paths(child, is_leaf):
                yield (*path, key, *rest), leaf


def typed(path: KeyPath, start: int = 0) -> TypedPath:
    """A key path as data: `(("attr", "layers"), ("index", 0), ("key", "a/b"))`."""
    return tuple([_typed(key, path) for key in path[start:]])


def _typed(key: Any, path: KeyPath) -> tuple[str, str | int]:
    kind, field = KEY_KINDS.get(type(key).__name__, ("key", None))
    token = getattr(key, field) if field else key
    if type(token) is not str and type(token) is not int:
        token = _plain(token, path)
    return kind, token


class Namer:
    """Names the leaves of one tree; fast if many leaves are in one folder."""

    def __init__(self) -> None:
        # The folders that the last leaf is in: their keys, names, and keys as data.
        self._folders: list[tuple[KeyPath, str, TypedPath]] = [((), "", ())]

    def __call__(self, path: KeyPath) -> tuple[str, TypedPath]:
        """The name of a leaf, and its key path as data."""
        if not path:
            return ROOT, ()
        keys, folder, above = self._folders[-1]
        if keys != path[:-1]:
            folder, above = self._enter(path)
        last = _typed(path[-1], path)
        return folder + encode_component(last[1], False), (*above, last)

    def _enter(self, path: KeyPath) -> tuple[str, TypedPath]:
        """Go to the folder of another leaf, from the innermost one that has both."""
        folders, keys = self._folders, path[:-1]
        while folders[-1][0] != keys[: len(folders) - 1]:
            folders.pop()
        above, folder, data = folders[-1]
        for key in keys[len(above) :]:
            token = _typed(key, path)
            folder = f"{folder}{encode_component(token[1], False)}/"
            above, data = (*above, key), (*data, token)
            folders.append((above, folder, data))
        return folder, data


def _plain(token: Any, path: KeyPath) -> str | int:
    """The string or integer equal to a key such as a `StrEnum` or an `np.int64`."""
    if isinstance(token, str):
        return str.__str__(token)
    if isinstance(token, int | np.integer) and not isinstance(token, bool):
        return int(token)
    raise LeafNameError(
        f"The key {token!r} of type `{type(token).__name__}` in the path "
        f"`{jtu.keystr(path)}` cannot be part of a leaf's name: only strings and "
        "integers can. Use such keys in the PyTree."
    )


def check_distinct(named: Sequence[tuple[KeyPath, str]]) -> None:
    """Raise `LeafNameError` if two names are equal, or one is inside the other.

    Also if a leaf is at a level that no reader takes.
    """
    leaves: dict[str, tuple[KeyPath, str]] = {}
    clashes: list[str] = []
    for path, name in named:
        first = leaves.setdefault(name, (path, name))
        if first[0] is not path:
            clashes.append(_clash(first, (path, name)))
        if len(path) > MAX_LEVELS:
            problem = too_many_levels(path)
            raise LeafNameError(f"Leaf {name[:200]!r}: {problem}. Nest it less.")
    for folder, inside in inside_others(leaves):
        clashes.append(_clash(leaves[folder], leaves[inside]))
    if clashes:
        raise LeafNameError(
            "Leaves of the PyTree do not have distinct names:\n"
            + "\n".join(f"- {clash}" for clash in sorted(clashes))
            + "\nA leaf has a directory of its own, in which no other leaf can be: "
            "rename one of each."
        )


def _clash(a: tuple[KeyPath, str], b: tuple[KeyPath, str]) -> str:
    return (
        f"`{jtu.keystr(a[0])}`, stored as {a[1]!r}, and "
        f"`{jtu.keystr(b[0])}`, stored as {b[1]!r}."
    )


def _undecorated(marker: str) -> str:
    """`Net.layers[1].norm.state_index` -> `layers.1.norm.state_index`.

    The class is dropped so that renaming it does not rename the leaves.
    """
    without_class = re.sub(r"^\w+(?=[.\[])", "", marker)
    return re.sub(r"\[(\d+)\]", r".\1", without_class).removeprefix(".")
