"""Compare cells with the oracle: a cell is a saved leaf and a `like` for it."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import eqx_ckpt

from .exact import difference
from .oracle import outcome, Value
from .ways import Call, Tree


# An error names each of so many leaves.
_MANY = 15
_FEW = 5


def differences(
    source: Any,
    seen: Tree,
    like: Tree,
    call: Call,
    casting: str = "no",
    sharding: Any = None,
) -> list[str]:
    """The cells that are not what they should be, and how they differ.

    `seen` has the leaves that the source holds.
    """
    like = {name: x for name, x in like.items() if name in seen}
    with warnings.catch_warnings():
        # As NumPy does, where a cast changes a value.
        for what in (".* encountered in cast", ".*discards the imaginary part"):
            warnings.filterwarnings("ignore", what)
        expected = {
            name: outcome(seen[name], x, casting, sharding) for name, x in like.items()
        }
        expected = {
            name: value if isinstance(value, str) else call.settles(value, seen[name])
            for name, value in expected.items()
        }
        how: dict[str, Any] = {"casting": casting}
        if sharding is not None:
            how["sharding"] = sharding
        problems = [*_matched(source, like, call, how, expected)]
        values = {n: x for n, x in like.items() if isinstance(expected[n], Value)}
        problems += _restored(source, values, call, how, expected)
        refused = [name for name in like if name not in values]
        for part in _batches(refused, _MANY if call.names_all else 1):
            some = {name: like[name] for name in part}
            problems += _refused(source, some, call, how)
    return problems


def _matched(
    source: Any, like: Tree, call: Call, how: dict[str, Any], expected: Mapping
) -> Iterator[str]:
    if call.match is None:
        return
    found = call.match(source, like, **how).leaves
    found = {name.split("/")[-1].removeprefix("new_"): m for name, m in found.items()}
    for name, value in expected.items():
        leaf = found[name]
        if isinstance(value, str) and leaf.status != value:
            yield f"{name}: `match` says {leaf.status!r}, not {value!r}"
        if isinstance(value, Value) and not leaf.is_harmless:
            yield f"{name}: `match` says {leaf.status!r}, of what can be restored"


def _restored(
    source: Any, like: Tree, call: Call, how: dict[str, Any], expected: Mapping
) -> Iterator[str]:
    if not like:
        return
    try:
        found = call.restore(source, like, **how)
    except Exception as e:
        if len(like) == 1:
            yield f"{[*like][0]}: raised {said(e)}"
            return
        # Which of them?
        names = [*like]
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            some = {name: like[name] for name in part}
            yield from _restored(source, some, call, how, expected)
        return
    for name in like:
        leaf = found[name if name in found else f"new_{name}"]
        if problem := difference(leaf, expected[name]):
            yield f"{name}: {problem}"


def _batches(names: list[str], size: int) -> list[list[str]]:
    """Batches of names; if an error names one only, the first ones."""
    batches = [names[i : i + size] for i in range(0, len(names), size)]
    return batches if size > 1 else batches[:_FEW]


def _refused(source: Any, like: Tree, call: Call, how: dict[str, Any]) -> Iterator[str]:
    try:
        call.restore(source, like, **how)
    except eqx_ckpt.LeafMismatchError as e:
        yield from (
            f"{name}: it is not named by the error: {said(e)}"
            for name in like
            if f"{name}'" not in str(e)
        )
    except Exception as e:
        yield f"one of {[*like]}: raised {said(e)}"
    else:
        yield f"one of {[*like]}: was restored"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:150]!r}"


def assert_none(problems: Mapping[str, list[str]]) -> None:
    """Fail with all cells that differ."""
    lines = [f"{line} [{where}]" for where, some in problems.items() for line in some]
    if lines:
        pytest.fail(f"{len(lines)} cells differ:\n" + "\n".join(lines[:6000]))
