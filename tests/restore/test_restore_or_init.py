"""Restoring what a checkpoint has, and initialising only the rest."""

import io
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same


PATH = "memory://init"


def init(key):
    keys = jax.random.split(key)
    return {
        "base": eqx.nn.MLP(2, 8, 8, 2, key=keys[0]),
        "head": eqx.nn.Linear(8, 16, key=keys[1]),
        "drop": eqx.nn.Dropout(0.5),
        "key": keys[1],
    }


@pytest.fixture
def base():
    base = init(jax.random.key(0))["base"]
    eqx_ckpt.tree_serialise_leaves(PATH, {"base": base}, overwrite=True)
    return base


def test_what_is_missing_is_initialised(base):
    key = jax.random.key(1)
    model = eqx_ckpt.restore_or_init(PATH, init, key)
    assert_same(model["base"], base)
    expected = init(key)
    assert jnp.allclose(model["head"].weight, expected["head"].weight)
    assert_same(model["key"], expected["key"])
    assert_same(model["drop"], expected["drop"])


def test_what_is_restored_is_not_computed(base):
    """A callback in the initialisation of the base would run."""
    calls = []

    def noisy(key):
        def record(x):
            calls.append("base")
            return x

        tree = init(key)
        weight = tree["base"].layers[0].weight
        struct = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        weight = jax.pure_callback(record, struct, weight)
        return eqx.tree_at(lambda t: t["base"].layers[0].weight, tree, weight)

    model = eqx_ckpt.restore_or_init(PATH, noisy, jax.random.key(1))
    jax.block_until_ready(model["head"].weight)
    assert_same(model["base"], base)
    assert calls == []


def test_onto_a_mesh(base):
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def sharding(name, struct):
        return NamedSharding(mesh, P("x") if name.endswith("weight") else P())

    model = eqx_ckpt.restore_or_init(
        PATH, init, jax.random.key(1), sharding=sharding, where=lambda t: t["base"]
    )
    assert model["head"].weight.sharding == NamedSharding(mesh, P("x"))
    assert model["base"].layers[1].weight.sharding == NamedSharding(mesh, P("x"))
    alone = eqx_ckpt.restore_or_init(PATH, init, jax.random.key(1))
    assert jnp.array_equal(
        jax.device_get(model["head"].weight), jax.device_get(alone["head"].weight)
    )
    found = eqx_ckpt.restore_or_init(PATH, init, jax.random.key(1), sharding=mesh)
    assert found["head"].weight.sharding == NamedSharding(mesh, P())


def test_a_sharding_that_a_new_leaf_cannot_have(base):
    mesh = jax.make_mesh((8,), ("x",))
    where = {"head": NamedSharding(mesh, P(None, "x")), "base": None, "drop": None}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'head/bias'"):
        eqx_ckpt.restore_or_init(
            PATH, init, jax.random.key(1), sharding={**where, "key": None}
        )


def test_what_may_be_missing(base):
    def missing(name):
        return "keep" if name.startswith("head") else "raise"

    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'key'") as error:
        eqx_ckpt.restore_or_init(PATH, init, jax.random.key(1), missing=missing)
    assert "'head" not in str(error.value)


@pytest.mark.parametrize("spec", [eqx_ckpt.default_deserialise_filter_spec, "mine"])
def test_only_what_is_picked_has_to_be_there(base, spec):
    """What `where` does not pick is neither missing nor given to a `filter_spec`."""
    seen = []

    def mine(f, leaf):
        seen.append(f.name)
        return eqx_ckpt.default_deserialise_filter_spec(f, leaf)

    spec = mine if spec == "mine" else spec
    key = jax.random.key(1)
    model = eqx_ckpt.restore_or_init(
        PATH, init, key, where=lambda t: t["base"], missing="raise", filter_spec=spec
    )
    assert_same(model["base"], base)
    assert jnp.allclose(model["head"].weight, init(key)["head"].weight)
    assert all(name.startswith("base/") for name in seen)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'head/bias'"):
        eqx_ckpt.restore_or_init(
            PATH, init, key, where=lambda t: (t["base"], t["head"]), missing="raise"
        )


def _a_layer(node):
    return isinstance(node, eqx.nn.Linear)


@pytest.mark.parametrize("is_leaf", [_a_layer, lambda node: isinstance(node, dict)])
@pytest.mark.parametrize("sharding", [False, True])
def test_a_container_that_is_a_leaf_is_initialised(is_leaf, sharding):
    """What is within it has no name, so it is that of `init`, and never a struct."""
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": 1}, overwrite=True)
    mesh = jax.make_mesh((8,), ("x",)) if sharding else None
    key = jax.random.key(1)
    model = eqx_ckpt.restore_or_init(
        PATH, init, key, is_leaf=is_leaf, sharding=mesh, unexpected="ignore"
    )
    assert eqx.tree_equal(model, init(key), typematch=True, rtol=1e-6)


def test_a_container_that_a_custom_spec_restores():
    tree = init(jax.random.key(0))

    def write(f, leaf):
        if _a_layer(leaf):
            eqx.tree_serialise_leaves(f, leaf)
        else:
            eqx_ckpt.default_serialise_filter_spec(f, leaf)

    def read(f, leaf):
        if _a_layer(leaf):
            like = eqx.filter_eval_shape(lambda: tree["head"])
            return eqx.tree_deserialise_leaves(io.BytesIO(f.read()), like)
        return eqx_ckpt.default_deserialise_filter_spec(f, leaf)

    saved = {name: tree[name] for name in ("head", "drop", "key")}
    eqx_ckpt.tree_serialise_leaves(
        PATH, saved, filter_spec=write, is_leaf=_a_layer, overwrite=True
    )
    key = jax.random.key(1)
    model = eqx_ckpt.restore_or_init(
        PATH, init, key, filter_spec=read, is_leaf=_a_layer
    )
    assert_same(model["head"], tree["head"])
    assert_same(model["key"], tree["key"])
    assert eqx.tree_equal(model["base"], init(key)["base"], typematch=True, rtol=1e-6)


def test_with_a_transform(base):
    model = eqx_ckpt.restore_or_init(
        PATH, init, jax.random.key(1), transform=lambda old: {"base": old["base"]}
    )
    assert_same(model["base"], base)
    found = eqx_ckpt.restore_or_init(
        PATH, lambda key: init(key)["base"], jax.random.key(1), prefix="base"
    )
    assert_same(found, base)


def test_numbers_that_differ_are_told(tmp_path):
    def init(rate):
        drop = eqx.nn.Dropout(rate)
        return {"w": jnp.ones(3), "drop": eqx.nn.inference_mode(drop, rate > 0.2)}

    eqx_ckpt.tree_serialise_leaves(PATH, init(0.1), overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eqx_ckpt.restore_or_init(PATH, init, 0.1)
    with pytest.warns(UserWarning, match="Python numbers") as told:
        found = eqx_ckpt.restore_or_init(PATH, init, 0.3)
    assert (found["drop"].p, found["drop"].inference) == (0.1, False)
    [text] = [str(one.message) for one in told]
    assert text.splitlines()[1:3] == [
        "- 'drop/p': different value: 0.3 in `like`, 0.1 in the checkpoint.",
        "- 'drop/inference': different value: True in `like`, False in the checkpoint.",
    ]
    spec = eqx_ckpt.array_deserialise_filter_spec
    found = eqx_ckpt.restore_or_init(PATH, init, 0.3, filter_spec=spec)
    assert (found["drop"].p, found["drop"].inference) == (0.3, True)
    assert (found["w"] == 1).all()
    match = eqx_ckpt.tree_match(PATH, init(0.3), spec)
    assert "- 'drop/p': 0.3 kept from `like`, 0.1 in the checkpoint." in str(match)
    eqx.tree_serialise_leaves(tmp_path / "c.eqx", {"n": 1, "w": jnp.ones(2), "z": 2.0})
    like = {"n": 3, "w": jnp.zeros(2), "z": 4.0}
    found = eqx.tree_deserialise_leaves(tmp_path / "c.eqx", like, spec)
    assert_same(found, like | {"w": jnp.ones(2)})


def test_nothing_is_missing(base):
    found = eqx_ckpt.restore_or_init(PATH, lambda: {"base": base})
    assert_same(found, {"base": base})


def test_without_a_checkpoint():
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.restore_or_init("memory://none", init, jax.random.key(0))


def test_another_shape_is_an_error(base):
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="mismatched='keep'"):
        eqx_ckpt.restore_or_init(
            PATH, lambda key: {"base": eqx.nn.MLP(2, 9, 8, 2, key=key)},
            jax.random.key(1),
        )  # fmt: skip


@pytest.mark.parametrize("spread", [False, True])
def test_a_head_of_another_shape_is_initialised(spread):
    """With its moments; what else differs stays an error where a function says so."""

    def training(key, classes, width=8):
        model = eqx.nn.MLP(2, classes, width, 2, key=key)
        opt_state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
        return {"model": model, "opt_state": opt_state}

    old = training(jax.random.key(0), 3)
    old["opt_state"] = jax.tree.map(lambda x: x + 1, old["opt_state"])
    eqx_ckpt.tree_serialise_leaves(PATH, old, overwrite=True)
    sharding = jax.make_mesh((8,), ("x",)) if spread else None
    key = jax.random.key(1)
    new = eqx_ckpt.restore_or_init(
        PATH, training, key, 5, mismatched="keep", sharding=sharding
    )

    def where(tree):
        adam = tree["opt_state"][0]
        heads = [part.layers[2] for part in (tree["model"], adam.mu, adam.nu)]
        return [x for head in heads for x in (head.weight, head.bias)]

    fresh = jax.device_get(where(training(key, 5)))
    for found, expected in zip(where(new), fresh, strict=True):
        assert found.shape == expected.shape
        assert jnp.allclose(jax.device_get(found), expected)
        assert not spread or found.sharding == NamedSharding(sharding, P())
    rest = [jax.tree.leaves(eqx.tree_at(where, t, [0] * 6)) for t in (old, new)]
    assert_same(*map(jax.device_get, rest))

    def head(name):
        return "keep" if "/layers/2/" in f"/{name}" else "raise"

    new = eqx_ckpt.restore_or_init(PATH, training, key, 5, mismatched=head)
    assert new["model"].layers[2].bias.shape == (5,)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.restore_or_init(PATH, training, key, 5, 9, mismatched=head)
    assert "'model/layers/0/weight'" in str(error.value)
    assert "layers/2" not in str(error.value)
