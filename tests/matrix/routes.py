"""Every way in: from each place and format, with each argument and transform."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import eqx_ckpt

from .check import Route, Tree
from .formats import SOURCES
from .likes import NONE
from .operations import OPERATIONS, results, through
from .places import by_manager, PLACES, to_memory
from .ways import CALLS, DIRECT, FROM_MANAGER, FROM_STATE_DICT, OR_INIT


Maker = Callable[[Tree, Path], Route]


def with_arguments(name: str, tree: Tree, at: Path) -> Route:
    return Route(to_memory({"part": tree}), tree, CALLS[name])


def from_place(name: str, tree: Tree, at: Path) -> Route:
    return Route(PLACES[name]({"part": tree}, at), tree, DIRECT)


def from_manager(tree: Tree, at: Path) -> Route:
    return Route(by_manager({"part": tree}, at), tree, FROM_MANAGER)


def from_state_dict(tree: Tree, at: Path) -> Route:
    return Route(eqx_ckpt.interop.to_state_dict({"part": tree}), tree, FROM_STATE_DICT)


def from_format(name: str, tree: Tree, at: Path) -> Route:
    form = SOURCES[name]
    seen = {leaf: form.seen(value) for leaf, value in tree.items()}
    seen = {leaf: value for leaf, value in seen.items() if value is not NONE}
    source = form.put({"part": {leaf: tree[leaf] for leaf in seen}}, at)
    return Route(source, seen, DIRECT)


def or_init(tree: Tree, at: Path) -> Route:
    return Route(to_memory({"part": tree}), tree, OR_INIT)


def with_transform(name: str, tree: Tree, at: Path) -> Route:
    # XLA compiles for long, so each of them has some of the leaves.
    some = [n for i, n in enumerate(tree) if i % 3 == len(name) % 3]
    made, _ = results(name, {n: tree[n] for n in some})
    return Route(to_memory({"part": tree}), made, through(name))


def each(how: Callable[..., Route], names: Iterable[str]) -> dict[str, Maker]:
    return {name: ft.partial(how, name) for name in names}


ROUTES: Mapping[str, Maker] = {
    **each(with_arguments, CALLS),
    **each(from_place, PLACES),
    **each(from_format, SOURCES),
    # What JAX makes of a weak type is the context's affair.
    **each(with_transform, [n for n in OPERATIONS if n != "weakened"]),
    "manager": from_manager,
    "state dict": from_state_dict,
    "restore_or_init": or_init,
}
