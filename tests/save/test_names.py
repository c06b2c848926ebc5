"""One key path, one name: distinct, readable, safe on every file system."""

import enum
import re

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import eqx_ckpt
from helpers import assert_same, files_below


NASTY = [
    *("", ".", "..", "a/b", "a\\b", "zarr.json", "ZARR.json", "c", "__x", "@root"),
    *("0", "-1", "00", "con", "CON", "Con.txt", "Aux", "a.__lock", "x.", "naïve"),
    *("a b", "%2E", "\0", "\n", "é" * 150, "x" * 300, "x" * 301, "\ud800", "~", "[0]"),
    *("'", "@" + "0" * 32),
]
keys = st.one_of(st.text(max_size=8), st.sampled_from(NASTY))
trees = st.recursive(
    st.integers(0, 127),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.integers(-20, 20), inner, max_size=3),
        st.lists(inner, max_size=3),
    ),
    max_leaves=12,
)


def names(path) -> list[str]:
    return list(eqx_ckpt.inspect.read_manifest(path).leaves)


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (5, "@root"),
        ({"": 5}, "@empty"),
        ({"a/b": 5}, "a%2Fb"),
        ({"..": 5}, "%2E%2E"),
        ({"0": 5}, "%30"),
        ({0: 5}, "0"),
        ([5], "0"),
        ({-1: 5}, "-1"),
        ({"zarr.json": 5}, "%7Aarr.json"),
        ({"Con": 5}, "%43on"),
        ({"AUX": {"W": 5}}, "%41UX/W"),
        ({"a.__lock": 5}, "a%2E__lock"),
        ({"__init__": 5}, "%5F_init__"),
        ({"naïve": {"x y": 5}}, "na%C3%AFve/x%20y"),
        ({"@root": 5}, "%40root"),
        ({"a\\b.": 5}, "a%5Cb%2E"),
    ],
)
def test_the_name_of(tree, name):
    eqx_ckpt.tree_serialise_leaves("memory://name", tree, overwrite=True)
    assert names("memory://name") == [name]


@given(trees)
@example({key: 1 for key in NASTY})
@example({"W": {"q": 1, "Q": 2}, "w": {"q": 3}, "x": 4})
@example({"AUX": {"W": 1, "w": 2}, "CON": {"W": 3}, "Con": {"w": 4}, "Zarr.json": 5})
@settings(max_examples=200)
def test_every_tree_of_any_keys_comes_back(tree):
    """Different key paths have different names."""
    eqx_ckpt.tree_serialise_leaves("memory://keys", tree, overwrite=True)
    assert len(names("memory://keys")) == len(jtu.tree_leaves(tree))
    like = jtu.tree_map(lambda _: 0, tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves("memory://keys", like), tree)
    eqx_ckpt.copy("memory://keys", "memory://copy", overwrite=True)
    assert names("memory://copy") == names("memory://keys")
    for name in names("memory://keys"):
        for component in name.split("/"):
            assert re.fullmatch(r"[A-Za-z0-9_.+=,%@-]{1,200}", component)
            assert component not in (".", "..", "zarr.json")
            assert not component.endswith((".", ".__lock"))


@given(st.lists(keys, unique=True, max_size=6))
@settings(max_examples=25)
def test_nothing_leaves_the_directory_of_the_checkpoint(tmp_path_factory, some_keys):
    folder = tmp_path_factory.mktemp("outer")
    tree = {key: np.int8(1) for key in some_keys}
    eqx_ckpt.tree_serialise_leaves(folder / "inner", tree)
    assert {file.split("/")[0] for file in files_below(folder)} == {"inner"}
    assert len(files_below(folder)) == 1 + 2 * len(tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(folder / "inner", tree), tree)


@jtu.register_pytree_with_keys_class
class Twins:
    """A node both of whose children have the key that it is given."""

    def __init__(self, a, b):
        self.children = (a, b)

    def tree_flatten_with_keys(self):
        return [(jtu.DictKey("twin"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize("tree", [Twins(1, 2), Twins(1, {"x": 2}), Twins({"x": 2}, 1)])
def test_leaves_of_one_name_and_leaves_inside_leaves(tree):
    with pytest.raises(eqx_ckpt.LeafNameError, match="'twin'.*'twin"):
        eqx_ckpt.tree_serialise_leaves("memory://twins", tree)


class Part(enum.StrEnum):
    HEAD = "head"


class Layer(enum.IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        (Part.HEAD, "head"),
        (np.str_("a/b"), "a/b"),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (Layer.FIRST, 1),
    ],
)
def test_keys_that_are_equal_to_text_or_an_integer(key, plain):
    """They have the same name, so that either restores what the other saved."""
    for saved, like in [(key, plain), (plain, key)]:
        eqx_ckpt.tree_serialise_leaves("memory://enum", {saved: 5}, overwrite=True)
        (record,) = eqx_ckpt.inspect.read_manifest("memory://enum").leaves.values()
        assert record.path == (("key", plain),)
        restored = eqx_ckpt.tree_deserialise_leaves("memory://enum", {like: 0})
        assert restored == {plain: 5}
        assert type(next(iter(restored))) is type(like)


def test_keys_of_several_types():
    tree = {"d": {1: jnp.ones(1), "a": jnp.ones(1)}}
    with pytest.raises(
        eqx_ckpt.CheckpointError, match="cannot flatten `pytree`.* keys"
    ):
        eqx_ckpt.tree_serialise_leaves("memory://keys", tree)


@pytest.mark.parametrize("key", [1.5, (1, 2), b"x", True, np.float64(1), np.bool_(1)])
def test_keys_that_are_neither_text_nor_integer(key):
    with pytest.raises(eqx_ckpt.LeafNameError, match="only strings and integers"):
        eqx_ckpt.tree_serialise_leaves("memory://float", {"a": {key: 1}})


class Net(eqx.Module):
    layers: list
    norms: dict

    def __init__(self, extra=False):
        batch_norm = eqx.nn.BatchNorm(2, "batch", mode="ema")
        first = [eqx.nn.BatchNorm(2, "batch", mode="ema")] if extra else []
        self.layers = [batch_norm, *first]
        self.norms = {"a": batch_norm}


def test_state_is_named_by_its_markers():
    _, state = eqx.nn.make_with_state(Net)()
    eqx_ckpt.tree_serialise_leaves("memory://state", {"state": state}, overwrite=True)
    assert sorted(names("memory://state")) == [
        "state/layers.0.ema_first_time_index",
        "state/layers.0.ema_state_index/0",
        "state/layers.0.ema_state_index/1",
        "state/norms%5B%27a%27%5D.ema_first_time_index",
        "state/norms%5B%27a%27%5D.ema_state_index/0",
        "state/norms%5B%27a%27%5D.ema_state_index/1",
    ]


def test_another_layer_does_not_rename_the_state_of_the_others():
    """The positions in the state shift by a layer; the state itself must not."""
    _, state = eqx.nn.make_with_state(Net)()
    state = jtu.tree_map(lambda x: x + 1 if x.dtype == jnp.float32 else x, state)
    _, larger = eqx.nn.make_with_state(Net)(extra=True)
    eqx_ckpt.tree_serialise_leaves("memory://state", state, overwrite=True)
    found = eqx_ckpt.tree_match("memory://state", larger)
    assert {leaf.status for leaf in found.leaves.values()} == {"same", "missing"}
    assert all("layers.1." in name for name in found.problems)


def test_renaming_a_class_does_not_rename_its_leaves():
    model, state = eqx.nn.make_with_state(Net)()
    eqx_ckpt.tree_serialise_leaves("memory://renamed", (model, state))
    renamed = type("Renamed", (Net,), {})
    like = eqx.nn.make_with_state(renamed)()
    restored = eqx_ckpt.tree_deserialise_leaves("memory://renamed", like)
    assert_same(restored[1], eqx.nn.make_with_state(renamed)()[1])


def test_a_state_that_was_used_up():
    model, state = eqx.nn.make_with_state(Net)()
    index = model.layers[0].ema_first_time_index
    state.set(index, jnp.array(False))
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="old state"):
        eqx_ckpt.tree_serialise_leaves("memory://old", state)
