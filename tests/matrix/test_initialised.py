"""What `restore_or_init` makes of leaves, as a restore into `init()` does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt
from helpers import assert_same

from .leaves import LEAVES, OF_64_BITS, SOME


PATH = "memory://matrix/initialised"
# Devices are only those that JAX computes on.
NAMES = [
    name
    for name in SOME
    if not any(word in name for word in ("sharded", "explicit", "committed", "pinned"))
]
FATES = st.sampled_from(["restored", "missing", "of another shape"])
WAYS = st.sampled_from(["direct", "where", "transform", "prefix"])


@pytest.mark.filterwarnings("ignore:Python numbers came from the checkpoint")
@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), FATES, min_size=1, max_size=12),
    WAYS,
    st.booleans(),
)
def test_leaves_are_what_init_makes_them(fates, way, x64):
    with jax.enable_x64(x64):
        fates = {n: f for n, f in fates.items() if x64 or n not in OF_64_BITS}
        tree = {name: LEAVES[name]() for name in fates} | {"w": jnp.ones(2)}
        saved = {"w": jnp.zeros(2)}
        for name, fate in fates.items():
            if fate != "missing":
                is_same = fate == "restored"
                saved[name] = _other(tree[name]) if is_same else np.zeros((5, 7))
        source, how = _way(way, saved, fates)
        expected = eqx_ckpt.tree_deserialise_leaves(
            source, tree, missing="keep", mismatched="keep", **how
        )
        found = eqx_ckpt.restore_or_init(source, lambda: tree, mismatched="keep", **how)
        assert_same(found, expected)


def _other(leaf: Any) -> Any:
    """A leaf of the same kind with other values."""
    is_array = isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0
    return leaf[::-1] if is_array else leaf


def _way(way: str, saved: dict[str, Any], fates: dict[str, str]) -> Any:
    how: dict[str, Any] = {}
    if way == "where":
        picked = [name for name, fate in fates.items() if fate == "restored"] + ["w"]
        how["where"] = lambda tree: [tree[name] for name in picked]
    elif way == "transform":
        how["transform"] = lambda tree: dict(tree)
    elif way == "prefix":
        saved, how["prefix"] = {"in": saved}, "in"
    eqx_ckpt.tree_serialise_leaves(PATH, saved, overwrite=True)
    return PATH, how


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_an_array_becomes_one_of_init(kind):
    """Whichever kind was saved; and its dtype is not one that JAX narrows to."""
    eqx_ckpt.tree_serialise_leaves(PATH, {"w": np.ones(3, np.float32)}, overwrite=True)
    init = lambda: {"w": kind(np.zeros(3, np.float32))}  # noqa: E731
    found = eqx_ckpt.restore_or_init(PATH, init)
    assert_same(found, {"w": kind(np.ones(3, np.float32))})
    for saved in (np.ones(3), np.ones(3, np.int64)):
        eqx_ckpt.tree_serialise_leaves(PATH, {"w": saved}, overwrite=True)
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="dtype"):
            eqx_ckpt.restore_or_init(PATH, init)


def test_arguments_of_numpy_stay_numpys():
    eqx_ckpt.tree_serialise_leaves(PATH, {"w": jnp.ones(3)}, overwrite=True)
    day = np.array(["2020-02-29"], "datetime64[D]")

    def init(key, size, mean, day):
        return {"w": jax.random.normal(key, (size,)), "mean": mean, "day": day}

    args = (jax.random.key(0), np.int64(3), np.float64(1e-300), day)
    found = eqx_ckpt.restore_or_init(PATH, init, *args)
    assert_same(found, init(*args) | {"w": jnp.ones(3)})
    found = eqx_ckpt.restore_or_init(PATH, init, *args, where=lambda tree: tree["day"])
    assert found["w"].shape == (3,)
    assert_same(found | {"w": None}, init(*args) | {"w": None})
