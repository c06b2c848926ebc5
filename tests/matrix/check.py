"""Compare cells with the oracle: a cell is a saved leaf and a `like` for it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

import eqx_ckpt

from .exact import difference
from .likes import NONE
from .oracle import outcome, Value


Tree = dict[str, Any]
# An error names each of so many leaves.
_MANY = 15


class Call(NamedTuple):
    """A restore and the match for it, both of `(source, like, **how)`.

    Attributes after `match` say what is special about this way in.
    """

    restore: Callable[..., Any]
    match: Callable[..., eqx_ckpt.inspect.TreeMatch] | None
    takes_sharding: bool = True
    # Whether one error names all leaves.
    names_all: bool = True
    # What `like` is for the restore; `NONE` if it cannot be there.
    sees: Callable[[Any], Any] = lambda like: like
    outcome: Callable[..., Value | str] = outcome
    # Where a leaf that goes to the default device is instead.
    settles: Callable[[Value, Any], Value] = lambda value, saved: value
    # What `match` says in place of a status.
    says: Callable[[str, Any], str] = lambda status, saved: status


class Route(NamedTuple):
    """A way in: a source, the leaves that it has, and how they are restored."""

    source: Any
    seen: Tree
    call: Call


def differences(
    route: Route, like: Tree, casting: str = "no", sharding: Any = None
) -> list[str]:
    """The cells that are not what they should be, and how they differ."""
    seen, call = route.seen, route.call
    like = {name: x for name, x in like.items() if name in seen}
    with warnings.catch_warnings():
        # As NumPy does, where a cast changes a value.
        for what in (".* encountered in cast", ".*discards the imaginary part"):
            warnings.filterwarnings("ignore", what)
        expected = {
            name: value if isinstance(value, str) else call.settles(value, seen[name])
            for name, x in like.items()
            if (there := call.sees(x)) is not NONE
            and (value := call.outcome(seen[name], there, casting, sharding))
            is not NONE
        }
        like = {name: like[name] for name in expected}
        how: dict[str, Any] = {"casting": casting}
        if sharding is not None:
            how["sharding"] = sharding
        problems = [*_matched(route, like, how, expected)]
        values = {n: x for n, x in like.items() if isinstance(expected[n], Value)}
        problems += _restored(route, values, how, expected)
        refused = [name for name in like if name not in values]
        size = _MANY if call.names_all else 1
        for start in range(0, len(refused), size):
            some = {name: like[name] for name in refused[start : start + size]}
            problems += _refused(route, some, how)
    return problems


def all_differences(
    route: Route, likes: Mapping[str, Tree], casting: str = "no", sharding: Any = None
) -> dict[str, list[str]]:
    """The same for each of several `like`."""
    return {n: differences(route, x, casting, sharding) for n, x in likes.items()}


def _matched(
    route: Route, like: Tree, how: dict[str, Any], expected: Mapping
) -> Iterator[str]:
    if route.call.match is None:
        return
    match = route.call.match(route.source, like, **how)
    found = {
        name.split("/")[-1].removeprefix("new_"): leaf
        for name, leaf in match.leaves.items()
    }
    stops: set[str] = set()
    for name, value in expected.items():
        status = value if isinstance(value, str) else value.status
        status = route.call.says(status, route.seen[name])
        if found[name].status != status:
            yield f"{name}: `match` says {found[name].status!r}, not {status!r}"
        if isinstance(value, str) and status == value:
            stops.add(name)
    problems = {name for name in like if not found[name].is_harmless}
    if problems != stops or match.ok != (not stops):
        yield f"one of {problems ^ stops}: `match` says ok={match.ok}"


def _restored(
    route: Route, like: Tree, how: dict[str, Any], expected: Mapping
) -> Iterator[str]:
    if not like:
        return
    try:
        found = route.call.restore(route.source, like, **how)
    except Exception as e:
        if len(like) == 1:
            yield f"{[*like][0]}: raised {said(e)}"
            return
        # Which of them?
        names = [*like]
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            some = {name: like[name] for name in part}
            yield from _restored(route, some, how, expected)
        return
    for name in like:
        leaf = found[name if name in found else f"new_{name}"]
        if problem := difference(leaf, expected[name]):
            yield f"{name}: {problem}"


def _refused(route: Route, like: Tree, how: dict[str, Any]) -> Iterator[str]:
    try:
        route.call.restore(route.source, like, **how)
    except Exception as e:
        # What a `filter_spec` raises is not an error of ours: a note names the leaf.
        notes = getattr(e, "__notes__", [])
        if not (notes or isinstance(e, eqx_ckpt.LeafMismatchError)):
            yield f"one of {[*like]}: raised {said(e)}"
        text = "\n".join([str(e), *notes])
        yield from (
            f"{name}: it is not named by the error: {said(e)}"
            for name in like
            if f"{name}'" not in text
        )
    else:
        yield f"one of {[*like]}: was restored"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:150]!r}"


def assert_none(problems: Mapping[str, list[str]]) -> None:
    """Fail with all cells that differ."""
    lines = [f"{line} [{where}]" for where, some in problems.items() for line in some]
    if lines:
        pytest.fail(f"{len(lines)} cells differ:\n" + "\n".join(lines[:6000]))
