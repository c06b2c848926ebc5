"""Trees of any structure, each leaf into some `like`, by ways that are drawn."""

from typing import Any, NamedTuple

import jax.tree_util as jtu
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt

from .exact import difference
from .leaves import LEAVES, OF_64_BITS, SOME
from .likes import LIKES, NONE
from .oracle import outcome, Value
from .ways import FROM_STATE_DICT


class Pair(NamedTuple):
    first: Any
    second: Any


class Cell(NamedTuple):
    """A leaf that is saved, and a `like` for it. It is no PyTree: see `is_cell`."""

    saved: str
    like: str


KEYS = st.text(max_size=3) | st.sampled_from(["0", "Wq", "wq", "a/b", "@root", ".."])
# Without x64, those are not restored as they were.
NAMES = [name for name in SOME if name not in OF_64_BITS]
CELLS = st.builds(Cell, st.sampled_from(NAMES), st.sampled_from([*LIKES]))
TREES = st.recursive(
    CELLS,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(st.integers(-2, 12), children, max_size=3),
        st.builds(Pair, children, children),
    ),
    max_leaves=10,
)
PATH, COPY = "memory://matrix/random", "memory://matrix/random-copy"
LAYOUTS = st.sampled_from(["zarr", "ocdbt"])
CASTINGS = st.sampled_from(["no", "safe", "same_kind"])
WAYS = st.sampled_from(["direct", "copy", "prefix", "state dict", "dictionaries"])


def is_cell(x: Any) -> bool:
    return isinstance(x, Cell)


def restored(saved: Any, like: Any, layout: str, casting: str, way: str) -> Any:
    if way == "state dict":
        state = eqx_ckpt.interop.to_state_dict(saved)
        return eqx_ckpt.interop.from_state_dict(like, state, casting=casting)
    how: dict[str, Any] = {"casting": casting}
    if way == "prefix" and jtu.tree_leaves(saved):
        saved, how["prefix"] = {"in": {"a": saved}}, "in/a"
    eqx_ckpt.tree_serialise_leaves(PATH, saved, layout=layout, overwrite=True)
    path = PATH
    if way == "copy":
        other = "zarr" if layout == "ocdbt" else "ocdbt"
        eqx_ckpt.copy(PATH, COPY, layout=other, overwrite=True)
        path = COPY
    if way == "dictionaries":
        tree = eqx_ckpt.tree_deserialise_leaves(PATH, eqx_ckpt.tree_like(PATH))
        eqx_ckpt.tree_serialise_leaves(COPY, tree, overwrite=True)
        path = COPY
    assert eqx_ckpt.tree_match(path, like, **how).ok
    return eqx_ckpt.tree_deserialise_leaves(path, like, **how)


@pytest.mark.filterwarnings("ignore:.* encountered in cast")
@settings(max_examples=60)
@given(TREES, LAYOUTS, CASTINGS, WAYS)
def test_random_trees(tree, layout, casting, way):
    cells, treedef = jtu.tree_flatten(tree, is_cell)
    leaves = [LEAVES[cell.saved]() for cell in cells]
    likes: list[Any] = []
    for cell, leaf in zip(cells, leaves, strict=True):
        like = LIKES[cell.like](leaf)
        # What cannot be had so is had as it was.
        can_be = like is not NONE and isinstance(outcome(leaf, like, casting), Value)
        likes.append(like if can_be else leaf)
    saved, like = treedef.unflatten(leaves), treedef.unflatten(likes)
    found = treedef.flatten_up_to(restored(saved, like, layout, casting, way))
    for cell, leaf, like, new in zip(cells, leaves, likes, found, strict=True):
        expected = outcome(leaf, like, casting)
        assert isinstance(expected, Value)
        if way == "state dict":
            expected = FROM_STATE_DICT.settles(expected, leaf)
        assert not (problem := difference(new, expected)), (cell, problem)
