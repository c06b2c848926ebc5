"""State dicts: a checkpoint in memory, with the same names and the same strictness."""

import enum
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same, structs


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    first: Any
    second: Any


@jtu.register_pytree_with_keys_class
class Named:
    """A node that says itself what its children are called."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def tree_flatten_with_keys(self):
        children = ((jtu.GetAttrKey("weight"), self.w), (jtu.DictKey("bias"), self.b))
        return children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def wide(dtype):
    return np.arange(-3, 3).astype(dtype)


MAKERS = {
    "jax": lambda: jnp.arange(6.0).reshape(2, 3),
    "bfloat16": lambda: jnp.array([0.1, jnp.nan, -0.0], jnp.bfloat16),
    "int4": lambda: jnp.array([1, -2], jnp.int4),
    "empty": lambda: jnp.zeros((0, 3)),
    "0-d": lambda: np.array(3.0),
    "weak": lambda: jnp.asarray(0.5),
    "key": lambda: jax.random.key(3),
    "keys": lambda: jax.random.split(jax.random.key(2, impl="rbg"), 3),
    "float64": lambda: wide(np.float64),
    "big endian": lambda: wide(">i8"),
    "strided": lambda: np.arange(12.0)[::-2],
    "times": lambda: wide("M8[ns]"),
    "scalar": lambda: np.float64(0.1),
    "bool": lambda: True,
    "int": lambda: -(10**30),
    "float": lambda: float("nan"),
    "complex": lambda: 1j,
    "enum": lambda: Colour.BLUE,
    "text": lambda: "text",
    "function": lambda: len,
    "none": lambda: None,
}
KEYS = st.text(max_size=4) | st.sampled_from(["0", "Wq", "wq", "a/b", "@root", ".."])
TREES = st.recursive(
    st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name]()),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(st.integers(-2, 12), children, max_size=3),
        st.builds(Pair, children, children),
        st.builds(Named, children, children),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_there_and_back(tree):
    state = eqx_ckpt.interop.to_state_dict(tree)
    assert_same(eqx_ckpt.interop.from_state_dict(tree, state), tree)
    renamed = eqx_ckpt.interop.from_state_dict(
        (tree,), state, transform=lambda old: {0: old}
    )
    assert_same(renamed, (tree,))
    # A state dict is a tree itself, of the same leaves under the same names.
    again = eqx_ckpt.interop.to_state_dict(state)
    assert_same(again, state)


def test_what_it_looks_like():
    tree = {"net": [Named(jnp.ones(2), 3), Pair(len, np.ones(1))], "c": Colour.RED}
    state = eqx_ckpt.interop.to_state_dict(tree)
    assert state["net"][0]["weight"] is tree["net"][0].w
    assert state["net"][1]["second"] is tree["net"][1].second
    assert "first" not in state["net"][1]
    assert type(state["c"]) is int
    assert eqx_ckpt.interop.to_state_dict(jnp.ones(2)).shape == (2,)


def test_it_is_what_tree_like_shows():
    model = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    tree = {"model": model, "opt": optax.adam(1e-3).init({"w": jnp.ones(3)}), "n": 1}
    eqx_ckpt.tree_serialise_leaves("memory://like", tree, overwrite=True)
    like = eqx_ckpt.tree_like("memory://like")
    assert_same(structs(eqx_ckpt.interop.to_state_dict(tree)), structs(like))
    state = eqx_ckpt.tree_deserialise_leaves("memory://like", like)
    assert_same(eqx_ckpt.interop.from_state_dict(structs(tree), state), tree)


def test_numpy_arrays_are_copied():
    tree = {"x": np.ones(3)}
    new = eqx_ckpt.interop.from_state_dict(tree, eqx_ckpt.interop.to_state_dict(tree))
    tree["x"][0] = 7
    assert new["x"][0] == 1


def test_the_state_is_left_as_it_is():
    state = {"a": {0: jnp.ones(2), "b": 1}}
    eqx_ckpt.interop.from_state_dict(
        {"a": {0: jnp.zeros(2)}}, state, unexpected="ignore"
    )
    assert list(state["a"]) == [0, "b"]


def test_as_strict_as_a_restore():
    state = {"w": jnp.ones(3, jnp.bfloat16), "old": np.ones(2), 5: 1}
    like = {"w": jnp.zeros(3), "new": jnp.full(1, 7.0)}
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.interop.from_state_dict(like, state)
    for part in ("casting='safe'", "'new'", "missing='keep'", "'old'", "'5'"):
        assert part in str(error.value)
    new = eqx_ckpt.interop.from_state_dict(
        like, state, casting="safe", missing="keep", unexpected="ignore"
    )
    assert new["w"].dtype == np.float32
    assert new["new"] is like["new"]


def test_onto_a_mesh_and_between_shardings():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    x = jnp.arange(32.0).reshape(8, 4)
    old = jax.device_put(x, NamedSharding(mesh, P("x", "y")))
    like = {
        "x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
        "y": np.zeros(x.shape, x.dtype),
        "k": jax.random.key(0),
    }
    state = {"x": old, "y": old, "k": jax.random.key(1)}
    new = eqx_ckpt.interop.from_state_dict(like, state)
    assert new["x"].sharding == like["x"].sharding
    assert (np.asarray(new["x"]) == x).all()
    assert type(new["y"]) is np.ndarray
    assert (new["y"] == x).all()


def test_arrays_on_devices_are_not_copied():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    device = jax.devices()[3]
    tree = {
        "a": jnp.ones(3),
        "b": jax.device_put(jnp.ones(8), sharding),
        "k": jax.device_put(jax.random.split(jax.random.key(0), 8), sharding),
        "weak": jax.device_put(jnp.asarray(1.0), device),
    }
    state = eqx_ckpt.interop.to_state_dict(tree)
    skeleton = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree.items()}
    for like in (tree, skeleton):
        new = eqx_ckpt.interop.from_state_dict(like, state)
        assert all(new[name] is x for name, x in tree.items())

    def transform(old):
        return {name + "2": x for name, x in old.items()}

    like = {name + "2": x for name, x in tree.items()}
    new = eqx_ckpt.interop.from_state_dict(like, state, transform=transform)
    assert all(new[name + "2"] is x for name, x in tree.items())
    moved = {name: jax.device_put(x, jax.devices()[1]) for name, x in tree.items()}
    new = eqx_ckpt.interop.from_state_dict(moved, state)
    assert_same(new, tree)
    assert all(x.devices() == {jax.devices()[1]} for x in new.values())


def test_a_transform():
    def transform(old):
        old["w"] = jnp.stack([old["w"][i] for i in range(2)]) * 2
        return old

    state = {"w": [jnp.ones(3), jnp.zeros(3)], "x": np.arange(3.0), "n": 5}
    like = {"w": jnp.zeros((2, 3)), "x": np.zeros(3), "n": 0}
    new = eqx_ckpt.interop.from_state_dict(like, state, transform=transform)
    assert_same(new, {"w": jnp.array([[2.0] * 3, [0.0] * 3]), "x": state["x"], "n": 5})


def test_what_is_no_data():
    with pytest.raises(eqx_ckpt.CheckpointError, match="'x' is a `jax.ShapeDtype"):
        eqx_ckpt.interop.to_state_dict({"x": jax.ShapeDtypeStruct((), np.float32)})
    with pytest.raises(eqx_ckpt.CheckpointError, match="`state` cannot be restored:\n"):
        eqx_ckpt.interop.from_state_dict(
            {}, {"x": jax.ShapeDtypeStruct((), np.float32)}
        )
    with pytest.warns(UserWarning, match="'rng'"):
        assert eqx_ckpt.interop.to_state_dict({"rng": np.random.default_rng(0), "n": 1})


def test_names_that_collide():
    @jtu.register_pytree_with_keys_class
    class Twice(Named):
        def tree_flatten_with_keys(self):
            a = jtu.DictKey("a")
            return ((a, self.w), (a, self.b)), None

    with pytest.raises(eqx_ckpt.LeafNameError, match="'a'"):
        eqx_ckpt.interop.to_state_dict(Twice(1, 2))
    with pytest.raises(eqx_ckpt.LeafNameError, match="'a'"):
        eqx_ckpt.interop.from_state_dict({}, Twice(1, 2))


def test_positions_are_integers():
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="Did you mean 'w/%30'"):
        eqx_ckpt.interop.from_state_dict({"w": [1]}, {"w": {"0": 1}})
