"""Ways to restore: each saved tree is `{"part": leaves}`, and `like` the leaves."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

import eqx_ckpt

from . import by_equinox
from .check import Call, Tree
from .likes import traced
from .oracle import kind_of, NUMBERS, outcome, Value


def call(how: Callable[[Tree], dict[str, Any]]) -> Call:
    """A restore with arguments that depend on `like`, and its match."""

    def restore(source: Any, like: Tree, **more: Any) -> Any:
        found = eqx_ckpt.tree_deserialise_leaves(source, **{**how(like), **more})
        return found.get("part", found)

    def match(source: Any, like: Tree, **more: Any) -> eqx_ckpt.inspect.TreeMatch:
        return eqx_ckpt.tree_match(source, **{**how(like), **more})

    return Call(restore, match)


def in_little_memory(source: Any, like: Tree, **how: Any) -> Any:
    how |= {"like": {"part": like}, "unexpected": "ignore"}
    least = eqx_ckpt.tree_match(source, **how).least_host_bytes
    return eqx_ckpt.tree_deserialise_leaves(source, max_host_bytes=least, **how)["part"]


def by_a_manager(manager: Any, like: Tree, **how: Any) -> Any:
    return manager.restore({"part": like}, unexpected="ignore", **how)["part"]


def from_state_dict(state: Any, like: Tree, **how: Any) -> Any:
    like = {"part": like}
    return eqx_ckpt.interop.from_state_dict(like, state, unexpected="ignore", **how)[
        "part"
    ]


def in_place(value: Value, saved: Any) -> Value:
    """An array that is in memory already stays where it is."""
    is_there = isinstance(saved, jax.Array) and value.kind in ("jax", "key")
    if not is_there or value.where is not None or value.dtype != saved.dtype:
        return value
    return value._replace(where=saved.sharding if saved.committed else saved.device)


def or_init(source: Any, like: Tree, **how: Any) -> Any:
    how |= {"missing": "raise", "unexpected": "ignore"}
    # It says so of numbers that differ.
    warnings.filterwarnings("ignore", "Python numbers came from the checkpoint")
    return eqx_ckpt.restore_or_init(source, lambda: {"part": like}, **how)["part"]


def by_spec(f: Any, x: Any) -> Any:
    return eqx_ckpt.default_deserialise_filter_spec(f, x)


def by_equinoxs(f: Any, x: Any) -> Any:
    return eqx.default_deserialise_filter_spec(f, x)


def through(spec: Callable[[Any, Any], Any]) -> Call:
    """A `filter_spec`: what it does is not known before it is done."""
    how = {"filter_spec": spec, "unexpected": "ignore"}
    way = call(lambda like: {"like": {"part": like}, **how})
    return way._replace(names_all=False, says=lambda status, saved: "custom")


def kept(saved: Any, like: Any, casting: str = "no", to: Any = None) -> Value | str:
    """What differs is as it is in `like`, if that has a value."""
    found = outcome(saved, like, casting, to)
    if found not in ("kind", "shape", "dtype"):
        return found
    is_gone = isinstance(like, jax.Array) and like.is_deleted()
    if is_gone or isinstance(like, jax.ShapeDtypeStruct):
        return "abstract"
    return Value("itself", like, status="kept")


def without_numbers(
    saved: Any, like: Any, casting: str = "no", to: Any = None
) -> Value | str:
    """A Python number of `like` stays, whatever the checkpoint has."""
    found = outcome(saved, like, casting, to)
    if kind_of(like) not in NUMBERS:
        return found
    is_same = isinstance(found, Value) and found.status == "same"
    is_same = is_same and kind_of(saved) in NUMBERS
    return Value("itself", like, status="same" if is_same else "kept")


def says_renamed(status: str, saved: Any) -> str:
    """Numbers are not read, so nothing is said of where they were."""
    is_read = status == "same" and kind_of(saved) not in NUMBERS
    return "renamed" if is_read else status


DIRECT = call(lambda like: {"like": {"part": like}, "unexpected": "ignore"})
FROM_MANAGER = Call(by_a_manager, None)
FROM_STATE_DICT = Call(from_state_dict, None, takes_sharding=False, settles=in_place)
OR_INIT = Call(or_init, None, sees=traced)
# These do not change what a leaf becomes.
CALLS: Mapping[str, Call] = {
    "in little memory": Call(in_little_memory, None),
    "where": call(
        lambda like: {
            "like": {"part": like, "other": np.ones(2)},
            "where": lambda tree: tree["part"],
        }
    ),
    "prefix": call(
        lambda like: {"like": like, "prefix": "part", "unexpected": "ignore"}
    ),
    "renamed": call(
        lambda like: {
            "like": {"part": {f"new_{name}": x for name, x in like.items()}},
            "transform": eqx_ckpt.rename({"part/(.+)": r"part/new_\1"}),
            "unexpected": "ignore",
        }
    )._replace(says=says_renamed),
    "missing": call(
        lambda like: {
            "like": {"part": like, "other": np.ones(2)},
            "missing": "keep",
            "unexpected": "ignore",
        }
    ),
    "mismatched": call(
        lambda like: {
            "like": {"part": like},
            "mismatched": "keep",
            "unexpected": "ignore",
        }
    )._replace(outcome=kept),
    "arrays alone": call(
        lambda like: {
            "like": {"part": like},
            "filter_spec": eqx_ckpt.array_deserialise_filter_spec,
            "unexpected": "ignore",
        }
    )._replace(outcome=without_numbers),
    "functions": call(
        lambda like: {
            "like": {"part": like, "other": np.ones(2)},
            "missing": lambda name: "keep" if name == "other" else "raise",
            "mismatched": lambda name: "raise",
            "unexpected": lambda name: "ignore",
            "sharding": lambda name, struct: None,
        }
    ),
    "filter_spec": through(by_spec),
    "filter_spec of Equinox": through(by_equinoxs)._replace(outcome=by_equinox.outcome),
}
