"""Changes of files, and what a source may answer to them."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import eqx_ckpt


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Data with one to three random changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(found) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            found[at:at] = bytes(
                rng.choices(b'\0\xff{}[]",:09x', k=rng.randrange(1, 9))
            )
        elif kind == 4:
            number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            width = rng.choice((2, 4, 8))
            found[at : at + width] = (number % 256**width).to_bytes(width, "little")
        else:
            other = rng.randrange(len(found) or 1)
            found[at : at + 16] = found[other : other + 16]
    return bytes(found)


# One of each type, and texts that no file can have as its name, or that lead out.
VALUES = (
    None,
    True,
    0,
    -1,
    2**63,
    0.5,
    "w",
    "",
    "w\0",
    "..",
    "\ud800",
    "x" * 300,
    [],
    [1],
    {},
    {"w": 1},
)


def retyped(tree: Any) -> Iterator[Any]:
    """A tree of dictionaries and lists, with each value and key replaced in turn.

    A value is replaced by one of each other type, and a text by others; a key by texts.
    """
    for place in _places(tree, ()):
        for value in VALUES:
            if value != _at(tree, place):
                yield _with(tree, place, lambda parent, key, v=value: {key: v})
        if place and isinstance(place[-1], str):
            for name in ("w\0", "\ud800", "", "..", "x" * 300):
                yield _with(
                    tree, place, lambda parent, key, n=name: {n: parent.pop(key)}
                )


def retyped_json(data: bytes, most: int, rng: random.Random) -> list[bytes]:
    """At most `most` such changes of JSON."""
    found = [json.dumps(tree).encode() for tree in retyped(json.loads(data))]
    return found if len(found) <= most else rng.sample(found, most)


# Of JSON: a text, a number, a name, or a list or an object without others in it.
_TOKEN = re.compile(
    rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|\[[^][{}]*\]|\{[^][{}]*\}'
)


def replaced(data: bytes, rng: random.Random) -> bytes:
    """Data in which one value, or key, of JSON has become another."""
    places = [*_TOKEN.finditer(data)]
    if not places:
        return data
    place = rng.choice(places)
    of_others = rng.choice(places)[0]
    value = rng.choice([of_others, json.dumps(rng.choice(VALUES)).encode()])
    return data[: place.start()] + value + data[place.end() :]


def _places(tree: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield above
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from _places(tree[key], (*above, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _with(tree: Any, place: tuple[Any, ...], change: Callable[..., Any]) -> Any:
    """A copy of a tree in which a function of a node and a key changes the node."""
    root = {"root": copy.deepcopy(tree)}
    *above, last = ("root", *place)
    parent = _at(root, tuple(above))
    for key, value in change(parent, last).items():
        parent[key] = value
    return root["root"]


def check(open_source: Callable[[], eqx_ckpt.interop.Source], place: Path) -> bool:
    """Open and read everything; return whether that was possible."""

    def read() -> None:
        for name, record, value in eqx_ckpt.inspect.iter_leaves(open_source()):
            assert np.shape(value) == record.data_shape, name

    return is_possible(read, place)


def read_rows(source: eqx_ckpt.data.StoredDataSource) -> None:
    """Read the first batch of a source of rows."""
    loader = eqx_ckpt.data.Loader(source, 2, order="sequential")
    next(loader.iterate(loader.start(), prefetch=0))


def is_possible(read: Callable[[], object], place: Path) -> bool:
    """Whether a call succeeds; otherwise, it has to say what is wrong, and where."""
    problem = ""
    try:
        read()
    except eqx_ckpt.CheckpointError as e:
        problem = str(e)
    assert not problem or str(place) in problem, problem
    return not problem
