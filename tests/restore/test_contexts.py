"""The same restore in whatever context of JAX it is called: meshes, traces, checks."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same


PATH = "memory://contexts"
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh(*types: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=types)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no context": contextlib.nullcontext,
    "explicit mesh": lambda: jax.set_mesh(mesh(EXPLICIT, EXPLICIT)),
    "mixed mesh": lambda: jax.set_mesh(mesh(AUTO, EXPLICIT)),
    "auto mesh": lambda: jax.set_mesh(mesh(AUTO, AUTO)),
    "default device": lambda: jax.default_device(jax.devices()[2]),
    "leaks": jax.checking_leaks,
    "nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
}


def places() -> list[Any]:
    explicit = mesh(EXPLICIT, EXPLICIT)
    return [
        None,
        NamedSharding(explicit, P("a")),
        jax.devices()[3],
        NamedSharding(explicit, P("a"), memory_kind="pinned_host"),
        NamedSharding(explicit, P()),
        NamedSharding(mesh(AUTO, AUTO), P(None, "b")),
        NamedSharding(mesh(AUTO, EXPLICIT), P(("a", "b"))),
    ]


def weak(dtype: Any) -> jax.Array:
    """Weakly typed, and not a number where there is such a value."""
    value = 3 if dtype is int else dtype("nan")
    with jax.debug_nans(False):
        return jnp.full((8, 8), value) * 1


def one(x: jax.Array) -> jax.Array:
    """What is the same to the bit, but computed."""
    return jnp.where(True, x, x)


@pytest.mark.parametrize(
    ("context", "dtype"),
    [(c, float) for c in CONTEXTS] + [("x64", int), ("x64", complex)],
)
@pytest.mark.parametrize("is_computed", [False, True], ids=["read", "computed"])
def test_weakly_typed_arrays_go_anywhere(context, dtype, is_computed):
    transform = (lambda old: {"x": weak(dtype)}) if is_computed else None
    with CONTEXTS[context]():
        saved = weak(dtype)
        assert saved.weak_type
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": saved}, overwrite=True)
    like = jax.ShapeDtypeStruct(saved.shape, saved.dtype)
    for place in places()[: 3 if is_computed else None]:
        with CONTEXTS[context]():
            found = eqx_ckpt.tree_deserialise_leaves(
                PATH, {"x": like}, sharding=place, transform=transform
            )["x"]
            expected = jax.device_put(np.zeros((8, 8)), place)
        assert found.weak_type
        assert found.dtype == saved.dtype
        assert found.sharding == expected.sharding
        assert found.committed == expected.committed
        assert np.asarray(found).tobytes() == np.asarray(saved).tobytes()


@pytest.mark.parametrize("numpy", [np.zeros(3, np.float32), np.zeros(3)])
def test_weakly_typed_arrays_become_numpy_arrays(numpy):
    tree = {"x": jnp.full(3, 2.5), "y": jnp.asarray(2.5)}
    like = {"x": numpy, "y": numpy[0]}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)

    def computed(old: Any) -> Any:
        return {"x": jnp.full(3, 2.5), "y": old["y"] * 1.0}

    def spec(f: Any, x: Any) -> Any:
        return eqx_ckpt.default_deserialise_filter_spec(f, x)

    expected = {"x": np.full_like(numpy, 2.5), "y": numpy.dtype.type(2.5)}
    for transform in (None, lambda old: old, computed):
        how: Any = {"transform": transform, "casting": "same_kind"}
        through = eqx_ckpt.tree_deserialise_leaves(PATH, like, **how)
        assert_same(through, expected)
        assert_same(eqx_ckpt.interop.from_state_dict(like, tree, **how), expected)
        if numpy.dtype == np.float32:
            through = eqx_ckpt.tree_deserialise_leaves(PATH, like, spec, **how)
            assert_same(through, expected)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_transform_computes_for_the_place_not_for_the_context(context):
    tree = {"x": jnp.arange(64.0).reshape(8, 8)}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    like = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    for place in places()[:3]:
        with CONTEXTS[context]():
            found = eqx_ckpt.tree_deserialise_leaves(
                PATH, like, sharding=place, transform=lambda old: {"x": one(old["x"])}
            )["x"]
            expected = jax.device_put(np.zeros((8, 8)), place)
        assert found.sharding == expected.sharding
        assert found.committed == expected.committed
        assert (np.asarray(found) == np.asarray(tree["x"])).all()


def sharded(x: jax.Array) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(EXPLICIT, EXPLICIT), P("a")))


LEAVES: dict[str, Callable[[], Any]] = {
    "array": lambda: jnp.arange(8.0),
    "committed": lambda: jax.device_put(jnp.arange(8.0), jax.devices()[3]),
    "sharded": lambda: sharded(jnp.arange(8.0)),
    "weak": lambda: jnp.full(8, 2.5),
    "weak and sharded": lambda: sharded(jnp.full(8, 2.5)),
    "key": lambda: jax.random.key(0),
    "committed key": lambda: jax.device_put(jax.random.key(0), jax.devices()[3]),
    "sharded keys": lambda: sharded(jax.random.split(jax.random.key(0), 8)),
    "NumPy": lambda: np.arange(8),
    "number": lambda: 5,
}
TRACES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jit": lambda f: jax.jit(f)(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), None), 1.0, jnp.ones(2)),
}


@pytest.mark.parametrize("trace", TRACES)
def test_concrete_trees_in_a_trace(trace):
    tree = {name: make() for name, make in LEAVES.items()}
    found: list[Any] = []

    def run(x: Any) -> Any:
        eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
        found.append(eqx_ckpt.tree_deserialise_leaves(PATH, tree))
        found.append(
            eqx_ckpt.tree_deserialise_leaves(PATH, tree, transform=lambda old: old)
        )
        found.append(
            eqx_ckpt.interop.from_state_dict(tree, eqx_ckpt.interop.to_state_dict(tree))
        )
        return x

    TRACES[trace](run)
    for each in found:
        assert_same(each, tree)
        for name in LEAVES.keys() - {"NumPy", "number"}:
            assert each[name].sharding == tree[name].sharding
            assert each[name].committed == tree[name].committed


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "unchanged": lambda old: {"x": old["x"]},
    "computed": lambda old: {"x": old["x"] * 2 + old["y"].sum()},
    "jitted": lambda old: {"x": jax.jit(jnp.sin)(old["x"])},
    "stacked": lambda old: {"x": jnp.stack([old["x"], old["y"]])},
    "scanned": lambda old: {
        "x": jax.lax.scan(lambda c, x: (c + x, c), 0.0, old["x"])[1]
    },
    "conditional": lambda old: {
        "x": jax.lax.cond(old["y"].sum() > 0, lambda: old["x"], lambda: -old["x"])
    },
    "from elsewhere": lambda old: {"x": jnp.arange(4.0)},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_leaks_no_tracers(transform):
    tree = {"x": jnp.arange(4.0), "y": jnp.ones(4), "key": jax.random.key(0)}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    run = TRANSFORMS[transform]
    expected = run(tree)
    with jax.checking_leaks():
        assert eqx_ckpt.tree_match(PATH, expected, transform=run).ok
        found = eqx_ckpt.tree_deserialise_leaves(PATH, expected, transform=run)
        again = eqx_ckpt.interop.from_state_dict(expected, tree, transform=run)
    np.testing.assert_array_equal(found["x"], expected["x"])
    np.testing.assert_array_equal(again["x"], expected["x"])
