"""The ways of a tree of leaves to a checkpoint, or another source, and back."""

import functools as ft
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ckpt
from eqx_ckpt import interop

from .leaves import NARROW, WIDE
from .likes import NONE
from .oracle import dtype_of, kind_of, narrow, NUMBERS, Value


Tree = dict[str, Any]
_NUMBERS = itertools.count()


# To where, and from there.


def to_memory(tree: Tree, at: Any = None, **how: Any) -> Any:
    path = f"memory://matrix/{next(_NUMBERS)}"
    eqx_ckpt.tree_serialise_leaves(path, tree, **how)
    return path


def to_directory(tree: Tree, at: Path, **how: Any) -> Any:
    eqx_ckpt.tree_serialise_leaves(at / "new", tree, **how)
    return at / "new"


def in_background(tree: Tree, at: Path) -> Any:
    eqx_ckpt.tree_serialise_leaves_async(at / "new", tree).result()
    return at / "new"


def by_manager(tree: Tree, at: Path) -> Any:
    with eqx_ckpt.CheckpointManager(at) as manager:
        manager.save(3, tree)
    return manager


def copied(tree: Tree, at: Path) -> Any:
    eqx_ckpt.copy(to_memory(tree), at / "copy", layout="ocdbt")
    return at / "copy"


def state_of_a_recording(tree: Tree, at: Path) -> Any:
    with eqx_ckpt.Recording(at / "run", {"x": np.float32(0)}) as recording:
        recording.extend({"x": np.ones(3, np.float32)})
        recording.commit(tree)
    return recording.state_path


def through_a_spec(tree: Tree, at: Path) -> Any:
    spec = lambda f, x: eqx_ckpt.default_serialise_filter_spec(f, x)  # noqa: E731
    return to_memory(tree, filter_spec=spec)


PLACES: Mapping[str, Callable[[Tree, Path], Any]] = {
    "memory": to_memory,
    "directory": to_directory,
    "compressed": ft.partial(to_directory, compression="zstd"),
    "database": ft.partial(to_directory, layout="ocdbt"),
    "database in memory": ft.partial(to_memory, layout="ocdbt"),
    "background": in_background,
    "copy": copied,
    "recording": state_of_a_recording,
    "filter_spec": through_a_spec,
}


# What other formats keep of a leaf; `NONE` if they do not hold it.


def plain(leaf: Any) -> Any:
    """An array that is JAX's, if JAX has its dtype."""
    if kind_of(leaf) == "key":
        leaf = jax.random.key_data(leaf)
    dtype = dtype_of(leaf).newbyteorder("=")
    array = np.asarray(leaf).astype(dtype)
    is_jaxs = narrow(dtype) == dtype and dtype.kind not in "mM"
    return jnp.asarray(array) if is_jaxs and dtype.name not in WIDE else array


def of_its_kind(leaf: Any) -> Any:
    """What loses its weak type and its sharding, and is no subclass."""
    kind = kind_of(leaf)
    if kind in NUMBERS:
        return kind(leaf)
    return plain(leaf) if kind == "jax" else leaf


def of_orbax(leaf: Any) -> Any:
    if kind_of(leaf) in ("numpy", "scalar"):
        return np.asarray(leaf, dtype_of(leaf).newbyteorder("="))
    return leaf if kind_of(leaf) == "key" else of_its_kind(leaf)


def of_flax(leaf: Any) -> Any:
    if kind_of(leaf) == "scalar":
        return leaf
    return kind_of(leaf)(leaf) if kind_of(leaf) in NUMBERS else plain(leaf)


COMMON = set(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64".split()
)
OF_NUMPY = COMMON | {"complex128", "datetime64[ns]", "timedelta64[D]"}


class Format(NamedTuple):
    """`write(checkpoint, path)`, `open(path)`, its dtypes, and what it keeps."""

    write: Callable[..., Any]
    open: Callable[..., Any]
    dtypes: set[str]
    keeps: Callable[[Any], Any]
    takes_like: bool = False

    def seen(self, leaf: Any) -> Any:
        if kind_of(leaf) is int and not -(2**63) <= leaf < 2**63:
            return NONE
        if 0 in np.shape(leaf) and self.write is interop.to_orbax:
            return NONE
        if kind_of(leaf) == "key":
            return NONE if self.takes_like else self.keeps(leaf)
        name = dtype_of(leaf).newbyteorder("=").name
        return self.keeps(leaf) if name in self.dtypes else NONE

    def put(self, tree: Tree, at: Path) -> Any:
        place = to_memory(tree)
        like = (tree,) if self.takes_like else ()
        return self.open(self.write(place, at / "file", *like), *like)


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(
        interop.to_safetensors,
        interop.safetensors,
        COMMON | {"bfloat16", "float8_e4m3fn", "float8_e5m2"},
        plain,
    ),
    "npz": Format(interop.to_npz, interop.npz, OF_NUMPY, plain),
    "flax": Format(interop.to_flax, interop.flax, {*NARROW, *WIDE}, of_flax),
    "eqx": Format(interop.to_eqx, interop.eqx, OF_NUMPY, of_its_kind, takes_like=True),
    "orbax": Format(
        interop.to_orbax,
        interop.orbax,
        {"bool", "bfloat16", "float32", "int32", "int64", "uint8", "float64"},
        of_orbax,
    ),
}


# How it is restored. Each saved tree is `{"part": leaves}`, and `like` the leaves.


class Call(NamedTuple):
    """A restore and the match for it, both of `(source, like, **how)`."""

    restore: Callable[..., Any]
    match: Callable[..., eqx_ckpt.Match] | None
    # Whether one error names all leaves.
    names_all: bool = True
    # Where a leaf that goes to the default device is instead.
    settles: Callable[[Value, Any], Value] = lambda value, saved: value


def call(how: Callable[[Tree], dict[str, Any]]) -> Call:
    """A restore with arguments that depend on `like`, and its match."""

    def restore(source: Any, like: Tree, **more: Any) -> Any:
        found = eqx_ckpt.tree_deserialise_leaves(source, **{**how(like), **more})
        return found.get("part", found)

    def match(source: Any, like: Tree, **more: Any) -> eqx_ckpt.Match:
        return eqx_ckpt.match(source, **{**how(like), **more})

    return Call(restore, match)


def by_a_manager(manager: Any, like: Tree, **how: Any) -> Any:
    return manager.restore({"part": like}, unexpected="ignore", **how)["part"]


def from_state_dict(state: Any, like: Tree, **how: Any) -> Any:
    like = {"part": like}
    return eqx_ckpt.from_state_dict(like, state, unexpected="ignore", **how)["part"]


def in_place(value: Value, saved: Any) -> Value:
    """An array that is in memory already stays where it is."""
    is_there = isinstance(saved, jax.Array) and value.kind in ("jax", "key")
    if not is_there or value.where is not None or value.dtype != saved.dtype:
        return value
    return value._replace(where=saved.sharding if saved.committed else None)


def by_spec(f: Any, x: Any) -> Any:
    return eqx_ckpt.default_deserialise_filter_spec(f, x)


DIRECT = call(lambda like: {"like": {"part": like}, "unexpected": "ignore"})
FROM_MANAGER = Call(by_a_manager, None)
FROM_STATE_DICT = Call(from_state_dict, None, settles=in_place)
# These do not change what a leaf becomes.
CALLS: Mapping[str, Call] = {
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
            "transform": lambda old: {"part": renamed(old["part"])},
            "unexpected": "ignore",
        }
    ),
    "missing": call(
        lambda like: {
            "like": {"part": like, "other": np.ones(2)},
            "missing": "keep",
            "unexpected": "ignore",
        }
    ),
    "functions": call(
        lambda like: {
            "like": {"part": like, "other": np.ones(2)},
            "missing": lambda name: "keep" if name == "other" else "raise",
            "unexpected": lambda name: "ignore",
            "sharding": lambda name, struct: None,
        }
    ),
    "filter_spec": call(
        lambda like: {
            "like": {"part": like},
            "filter_spec": by_spec,
            "unexpected": "ignore",
        }
    )._replace(match=None, names_all=False),
}


def renamed(leaves: Tree) -> Tree:
    return {f"new_{name}": leaf for name, leaf in leaves.items()}
