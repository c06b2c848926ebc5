"""What the user says is frozen is compared on its device, and saved if it is not."""

import functools as ft
import logging
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import CheckpointManager, LeafMismatchError
from faults.workloads import small_chunks
from helpers import assert_same

from .looking import as_on, looked_at


WIDE = ("float64", "int64", "uint64", "complex128")
DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", *WIDE),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "float16", "bfloat16"),
    *("float32", "complex64", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn"),
]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def with_bit(bit):
    """An array of each dtype, of which one element has another bit."""
    tree = {}
    for name in DTYPES:
        host = np.ones((3, 5), numpy_dtype(name)).view(np.uint8)
        host[...] = np.arange(host.size).reshape(host.shape) & 1
        host[1, bit * 3] ^= bit
        with jax.enable_x64(True):
            tree[name] = jnp.asarray(host.view(numpy_dtype(name)))
    return tree


def others(bit):
    """Arrays of other kinds, and of other places."""
    one = jax.make_mesh((8,), ("x",))
    two = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    numbers[5, 2] += bit
    key = jax.random.key(bit)
    return {
        "key": key,
        "keys": jax.random.split(key, 3),
        "old": jax.random.split(jax.random.key(bit, impl="rbg"), (2, 2)),
        "number": jnp.float32(bit),
        "weak": jax.jit(lambda: 2.5 + bit)(),
        "minus": jnp.asarray([0.0, -0.0][:: 1 - 2 * bit]),
        "nan": jnp.asarray(
            np.array([0x7FC00000, 0x7FC00001 + bit], np.uint32).view("f4")
        ),
        "rows": jax.device_put(numbers, NamedSharding(one, P("x"))),
        "copies": jax.device_put(numbers, NamedSharding(one, P(None, None))),
        "explicit": jax.device_put(numbers, NamedSharding(two, P("y", "x"))),
    }


def run(path, **how):
    return CheckpointManager(path, incremental=True, frozen=True, **how)


@pytest.mark.parametrize("make", [with_bit, others])
def test_a_bit_of_any_array(tmp_path, make, caplog):
    """Equal arrays are not looked at; what differs by a bit is saved, and named."""
    empty = {"empty": jnp.zeros((0, 3))}
    trees = [make(bit) | empty for bit in (0, 0, 1, 1)]
    with as_on("accelerator"), run(tmp_path) as manager:
        for step, tree in enumerate(trees):
            seen = looked_at(manager, step, tree, "accelerator")
            assert seen == [{*tree}, set(), {*make(0)}, set()][step]
        for step, tree in enumerate(trees):
            with jax.enable_x64(True):
                assert_same(manager.restore(tree, step), tree)
    (record,) = caplog.records
    assert all(repr(name) in record.getMessage() for name in make(0))


def permuted(x):
    return x[::-1]


def swapped(x):
    return x.at[jnp.array([3, 70])].set(x[jnp.array([70, 3])])


def negated_twice(x):
    return x.at[jnp.array([0, 64])].multiply(-1)


def moved(x):
    return jnp.roll(x, 1)


CHANGES = [permuted, swapped, negated_twice, moved]


def test_changes_that_a_weak_sum_would_not_see(tmp_path):
    dtypes = "float32", "bfloat16", "int8", "complex64"
    olds = {dtype: jnp.arange(128).astype(dtype) + 1 for dtype in dtypes}
    pairs = [(dtype, change) for dtype in dtypes for change in CHANGES]
    old = {f"{d}-{change.__name__}": olds[d] for d, change in pairs}
    new = {f"{d}-{change.__name__}": change(olds[d]) for d, change in pairs}
    with as_on("accelerator"), run(tmp_path) as manager:
        manager.save(0, old).result()
        assert looked_at(manager, 1, new, "accelerator") == {*old}
        assert_same(manager.restore(new), new)


OPTIMISER = optax.adam(1e-2)


@eqx.filter_jit(donate="all")
def update(model, opt_state, trained):
    """A step of a training whose model is passed in and out, frozen parts too."""

    def loss_fn(part, rest):
        model = eqx.combine(part, rest)
        return jnp.sum(jax.vmap(model)(jnp.ones((4, 8))) ** 2)

    part, rest = eqx.partition(model, trained)
    grads = eqx.filter_grad(loss_fn)(part, rest)
    updates, opt_state = OPTIMISER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state


@pytest.mark.parametrize("place", ["host", "accelerator"])
def test_a_training_that_donates_its_whole_model(tmp_path, place, caplog):
    model = eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))
    trained = jax.tree.map(lambda _: False, model)
    trained = eqx.tree_at(lambda m: m.layers[-1], trained, replace=eqx.is_array)
    opt_state = OPTIMISER.init(eqx.filter(model, trained))
    frozen = {"model": eqx.tree_at(lambda m: m.layers[-1], trained, replace=False)}
    frozen["model"] = eqx.tree_at(
        lambda m: m.layers[:-1], frozen["model"], replace=(eqx.is_array, True)
    )
    frozen["opt_state"] = False
    saved = {}
    how = {"incremental": True, "frozen": frozen}
    with as_on(place), CheckpointManager(tmp_path, **how) as manager:
        for step in range(3):
            if step:
                model, opt_state = update(model, opt_state, trained)
            tree = {"model": model, "opt_state": opt_state}
            seen = looked_at(manager, step, tree, place)
            saved[step] = jax.tree.map(
                lambda x: x.copy() if eqx.is_array(x) else x, tree
            )
            if step and place == "accelerator":
                assert {name for name in seen if name.startswith("model/")} == {
                    "model/layers/2/weight",
                    "model/layers/2/bias",
                }
        for step, tree in saved.items():
            assert eqx_ckpt.inspect.verify(tmp_path / f"{step:06d}")
            assert_same(manager.restore(tree, step), tree)
    names = [f"model/layers/{i}/{part}" for i in (0, 1) for part in ("weight", "bias")]
    for name in names:
        for step in ("000001", "000002"):
            file = next((tmp_path / step / name).glob("c*"))
            assert file.samefile(tmp_path / "000000" / name / file.name)
    assert not caplog.records


@pytest.mark.parametrize("place", ["host", "accelerator"])
def test_what_has_changed_is_named_once(tmp_path, place, caplog):
    tree = {"a": jnp.ones(64), "b": np.ones(64), "c": jnp.zeros(3), "n": 1}
    with as_on(place), small_chunks(), run(tmp_path) as manager:
        manager.save(1, tree).result()
        tree = {"a": tree["a"] + 1, "b": tree["b"] + 1, "c": jnp.zeros(3), "n": 2}
        manager.save(2, tree).result()
        assert_same(manager.restore(tree), tree)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"in {tmp_path}/000002: 'a', 'b'.")


def test_a_new_process_compares_once(tmp_path):
    tree = {"w": jnp.arange(64.0), "v": jnp.arange(64.0) + 1}
    anew = ft.partial(jax.tree.map, operator.methodcaller("copy"))
    with as_on("accelerator"), small_chunks():
        with run(tmp_path) as manager:
            manager.save(1, tree)
        with run(tmp_path) as manager:
            assert looked_at(manager, 2, anew(tree), "accelerator") == {"w", "v"}
            assert not looked_at(manager, 3, anew(tree), "accelerator")
            # The fingerprint is right, and the file is not.
            file = tmp_path / "000003/w/c.1"
            file.write_bytes(file.read_bytes()[::-1])
            assert looked_at(manager, 4, anew(tree), "accelerator") == {"w"}
            assert eqx_ckpt.inspect.verify(tmp_path / "000004")
            assert_same(manager.restore(tree, 4), tree)
    for name, is_shared in {"w": False, "v": True}.items():
        one, other = (tmp_path / f"00000{i}/{name}/c.1" for i in (1, 4))
        assert one.samefile(other) == is_shared


def saved(path, tree, **how):
    """The names of the leaves that a save without a manager has copied."""

    class OneSave:
        def save(self, step, tree):
            return eqx_ckpt.tree_serialise_leaves_async(path, tree, **how)

    return looked_at(OneSave(), 0, tree, "accelerator")


def test_without_a_manager(tmp_path):
    base, tree = tmp_path / "base", {"w": jnp.arange(9.0), "v": jnp.zeros(3)}
    how = {"base": base, "frozen": {"w": True, "v": False}}
    eqx_ckpt.tree_serialise_leaves(base, tree)
    with as_on("accelerator"):
        for i, seen in enumerate([{"w", "v"}, {"v"}, {"v"}]):
            new = {"w": tree["w"] + 0, "v": tree["v"] + i}
            path = tmp_path / f"new{i}"
            assert saved(path, new, **how) == seen
            assert (path / "w/c.0").samefile(base / "w/c.0")
            assert_same(eqx_ckpt.tree_deserialise_leaves(path, new), new)
        # And that which was saved so is known as a base.
        chain = {**how, "base": tmp_path / "new2"}
        assert saved(tmp_path / "last", {**new, "w": new["w"] + 0}, **chain) == set()
        # Another checkpoint at the same place is not known.
        other = {"w": tree["w"] + 1, "v": tree["v"]}
        eqx_ckpt.tree_serialise_leaves(base, other, overwrite=True)
        assert saved(tmp_path / "more", new, **how) == {"w", "v"}
        assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "more", new), new)


@pytest.mark.parametrize("how", ["inside a mesh", "traced", "another default"])
def test_wherever_it_is_called(tmp_path, how):
    tree = {"w": jnp.arange(9.0)}

    def save(manager, step):
        new = {"w": jax.device_put(np.arange(9, dtype=np.float32))}
        return looked_at(manager, step, new, "accelerator")

    with as_on("accelerator"), run(tmp_path) as manager:
        save(manager, 0)
        if how == "inside a mesh":
            with jax.set_mesh(jax.make_mesh((8,), ("x",))):
                seen = save(manager, 1)
        elif how == "traced":
            seen = []
            new = {"w": tree["w"] + 0}

            def f(x):
                seen.extend(looked_at(manager, 1, new, "accelerator"))
                return x

            jax.jit(f)(1.0)
        else:
            with jax.default_device(jax.devices()[3]), jax.transfer_guard("disallow"):
                seen = save(manager, 1)
        assert not seen
        assert_same(manager.restore(tree), tree)


def save_a_step(spec, tree):
    CheckpointManager("run", incremental=True, frozen=spec).save(1, tree)


def test_a_spec_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"w": jnp.ones(3), "n": 1}
    eqx_ckpt.tree_serialise_leaves("base", tree)
    before = {*tmp_path.iterdir()}
    for spec, error, words in [
        ("frozen", TypeError, "`frozen` has 'frozen'"),
        ({"w": True, "n": 1}, TypeError, r"`frozen` has 1 at `\['n'\]`"),
        ({"w": True}, LeafMismatchError, "`frozen` does not fit `pytree`"),
        ([True, False], LeafMismatchError, "`frozen` does not fit `pytree`"),
        (lambda leaf: None, TypeError, "returned None for a leaf"),
    ]:
        for verb in (
            eqx_ckpt.tree_serialise_leaves,
            eqx_ckpt.tree_serialise_leaves_async,
        ):
            with pytest.raises(error, match=words):
                verb("new", tree, base="base", frozen=spec)
        with pytest.raises(error, match=words):
            save_a_step(spec, tree)
    for verb in (
        eqx_ckpt.tree_serialise_leaves,
        eqx_ckpt.tree_serialise_leaves_async,
    ):
        with pytest.raises(ValueError, match="pass `base`"):
            verb("new", tree, frozen=False)
    with pytest.raises(ValueError, match="is for `incremental=True`"):
        CheckpointManager("run", frozen=True)
    donated = {"w": jnp.ones(3), "n": 1}
    donated["w"].delete()
    with pytest.raises(eqx_ckpt.CheckpointError, match="'w' was deleted"):
        eqx_ckpt.tree_serialise_leaves("new", donated, base="base", frozen=True)
    assert {*tmp_path.iterdir()} == before
