"""A checkpoint on another mesh: the `sharding` argument of a restore."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import eqx_ckpt
from helpers import assert_same
from support import Checkpoint, leaf_reader, placement, read_items, restore


def mesh(axis_type=AxisType.Auto, **axes):
    types = (axis_type,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def on(mesh, *spec, **kwargs):
    return NamedSharding(mesh, P(*spec), **kwargs)


@pytest.fixture
def tree():
    square = mesh(x=4, y=2)
    weight = np.arange(16 * 12, dtype=np.float32).reshape(16, 12)
    keys = jax.random.split(jax.random.key(0), 8)
    return {
        "w": jax.device_put(weight, on(square, "x", "y")),
        "b": jax.device_put(weight[:8, 0], on(square, ("x", "y"))),
        "keys": jax.device_put(keys, on(square, "y")),
        "scale": jnp.asarray(2.0),
        "numpy": np.arange(3.0),
        "step": 7,
    }


@pytest.fixture
def path(tree, tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    return tmp_path / "new"


ARRAYS = ("w", "b", "keys", "scale")


def check(restored, tree, **shardings):
    """The same values as `tree`, and the shardings."""
    for name, sharding in shardings.items():
        leaf = restored[name]
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
        assert leaf.sharding.memory_kind == sharding.memory_kind
        assert leaf.committed
    assert_same(restored, tree)


def test_one_sharding_for_all(path, tree):
    sharding = on(mesh(a=8))
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=sharding)
    check(restored, tree, **dict.fromkeys(ARRAYS, sharding))


def test_one_device_for_all(path, tree):
    device = jax.devices()[5]
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=device)
    check(restored, tree, **dict.fromkeys(ARRAYS, SingleDeviceSharding(device)))


def test_the_same_axes_on_another_mesh(path, tree):
    other = mesh(x=2, y=4)
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=other)
    check(
        restored,
        tree,
        w=on(other, "x", "y"),
        b=on(other, ("x", "y")),
        keys=on(other, "y"),
        scale=on(other),
    )
    assert str(eqx_ckpt.tree_match(path, tree, sharding=other)).startswith("6 same")


def test_axes_that_have_numbers(tmp_path):
    square = Mesh(np.array(jax.devices()).reshape(4, 2), (5, 7))
    for spec, axes in ((P(7), [7]), (P(None, 5), [5]), (P((5, 7)), [5, 7])):
        tree = {"w": jax.device_put(jnp.ones((8, 4)), NamedSharding(square, spec))}
        eqx_ckpt.tree_serialise_leaves(tmp_path, tree, overwrite=True)
        again = eqx_ckpt.tree_deserialise_leaves(tmp_path, tree, sharding=square)
        assert again["w"].sharding == tree["w"].sharding
        match = eqx_ckpt.tree_match(tmp_path, tree, sharding=mesh(a=8))
        assert [*match.leaves["w"].replicated] == axes


def test_axes_that_the_mesh_lacks_are_replicated_and_named(path, tree):
    other = mesh(x=8)
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=other)
    check(restored, tree, w=on(other, "x"), b=on(other, "x"), keys=on(other))
    found = eqx_ckpt.tree_match(path, tree, sharding=other)
    assert found.ok
    replicated = {name: leaf.replicated for name, leaf in found.leaves.items()}
    assert {n for n, axes in replicated.items() if axes == ("y",)} == {"w", "b", "keys"}
    assert "'w': float32[16, 12]: replicated, not sharded, over 'y'." in str(found)


def test_axes_that_do_not_divide_are_replicated(path, tree):
    other = mesh(y=8)
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=other)
    check(restored, tree, w=on(other), b=on(other, "y"), keys=on(other, "y"))
    found = eqx_ckpt.tree_match(path, tree, sharding=other)
    assert found.leaves["w"].replicated == ("x", "y")
    assert found.leaves["b"].replicated == ("x",)


def test_a_function_of_name_and_struct(path, tree):
    other = mesh(a=8)
    asked = {}

    def rule(name, struct):
        asked[name] = struct
        if name == "w":
            return on(other, "a")
        return jax.devices()[1] if name == "b" else None

    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=rule)
    check(
        restored,
        tree,
        w=on(other, "a"),
        b=SingleDeviceSharding(jax.devices()[1]),
        keys=tree["keys"].sharding,
    )
    assert not restored["scale"].committed
    assert asked.keys() == set(ARRAYS)
    assert asked["w"] == jax.ShapeDtypeStruct((16, 12), jnp.float32)
    assert asked["keys"].dtype == tree["keys"].dtype


def test_a_prefix(tmp_path, getkey):
    tree = {"model": eqx.nn.MLP(8, 8, 8, 2, key=getkey()), "rest": [jnp.ones(8), 1]}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    rows, device = on(mesh(a=8), "a"), jax.devices()[3]
    restored = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", tree, sharding={"model": rows, "rest": [device, None]}
    )
    assert_same(restored, tree)
    shardings = {
        x.sharding for x in jax.tree.leaves(eqx.filter(restored, eqx.is_array))
    }
    assert shardings == {rows, SingleDeviceSharding(device)}
    # A tree of shardings whose nodes can be called, as modules can, is a tree.
    every = jax.tree.map(lambda _: rows, tree["model"])
    restored = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", tree["model"], prefix="model", sharding=every
    )
    assert restored.layers[0].weight.sharding == rows


def test_a_part(path, tree):
    other = on(mesh(a=8), "a")
    restored = eqx_ckpt.tree_deserialise_leaves(
        path, tree, where=lambda t: t["w"], sharding=other
    )
    assert restored["w"].sharding == other
    assert restored["b"].sharding == tree["b"].sharding
    like = jax.ShapeDtypeStruct((8,), jnp.float32)
    restored = eqx_ckpt.tree_deserialise_leaves(path, like, prefix="b", sharding=other)
    assert restored.sharding == other


def test_through_a_filter_spec(path, tree):
    other = on(mesh(a=8))

    def spec(f, x):
        return eqx_ckpt.default_deserialise_filter_spec(f, x)

    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, spec, sharding=other)
    check(restored, tree, **dict.fromkeys(ARRAYS, other))


def test_memory_on_the_host(path, tree):
    pinned = on(mesh(a=8), memory_kind="pinned_host")
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=pinned)
    check(restored, tree, **dict.fromkeys(ARRAYS, pinned))
    eqx_ckpt.tree_serialise_leaves(path, restored, overwrite=True)
    record = eqx_ckpt.inspect.read_manifest(path).leaves["w"]
    assert record.sharding is not None
    assert record.sharding["memory_kind"] == "pinned_host"
    again = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=mesh(b=8))
    assert again["w"].sharding == on(mesh(b=8), memory_kind="pinned_host")


def test_an_explicit_mesh(path, tree):
    explicit = mesh(AxisType.Explicit, x=2, y=4)
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=explicit)
    assert restored["w"].sharding == on(explicit, "x", "y")
    np.testing.assert_array_equal(restored["w"], tree["w"])


def test_saved_from_an_explicit_mesh(tree, tmp_path):
    explicit = mesh(AxisType.Explicit, x=4, y=2)
    array = jax.device_put(np.asarray(tree["w"]), on(explicit, "y", "x"))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", array)
    record = eqx_ckpt.inspect.read_manifest(tmp_path / "new").leaves["@root"]
    assert record.chunk_shape == (8, 3)
    assert record.sharding is not None
    assert record.sharding["spec"] == ["y", "x"]
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", array)
    assert restored.sharding == array.sharding
    np.testing.assert_array_equal(restored, array)


def test_an_abstract_mesh_needs_a_current_one(path, tree):
    explicit = mesh(AxisType.Explicit, x=2, y=4)
    array = jax.device_put(np.zeros((16, 12), np.float32), on(explicit, "x"))
    like = {"w": eqx.filter_eval_shape(lambda x: x, array)}
    like |= {name: tree[name] for name in tree if name != "w"}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="has no devices: restore in"):
        eqx_ckpt.tree_deserialise_leaves(path, like)
    with jax.set_mesh(explicit):
        restored = eqx_ckpt.tree_deserialise_leaves(path, like)
    assert restored["w"].sharding == on(explicit, "x", None)


def test_a_sharding_that_does_not_divide(path, tree, monkeypatch):
    bad = on(mesh(a=8), None, "a")
    monkeypatch.setattr(Checkpoint, "read", None)  # Nothing is read.
    with pytest.raises(eqx_ckpt.LeafMismatchError) as raised:
        eqx_ckpt.tree_deserialise_leaves(
            path, tree, sharding={n: bad if n in "wb" else None for n in tree}
        )
    lines = str(raised.value).splitlines()
    assert lines[1] == (
        f"- 'b': float32[8]: {bad.spec} on the mesh (a=8) is for more dimensions than "
        "it has."
    )
    assert lines[2] == (
        f"- 'w': float32[16, 12]: {bad.spec} on the mesh (a=8) does not divide its "
        "shape."
    )
    found = eqx_ckpt.tree_match(path, tree["w"], prefix="w", sharding=bad)
    assert found.leaves["w"].status == "sharding"


@pytest.mark.parametrize("bad", [P("x"), "cpu", {"w": 1}])
def test_what_is_no_sharding(path, tree, bad):
    with pytest.raises(TypeError, match="`sharding` has"):
        eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=bad)


def test_what_is_no_prefix(path, tree):
    bad = {"w": None, "c": None}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="is not a prefix of `like`"):
        eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=bad)


def test_a_function_that_returns_no_sharding(path, tree):
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="was returned for it"):
        eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=lambda n, s: P("x"))
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="called with the leaf's name"):
        eqx_ckpt.tree_deserialise_leaves(path, tree, sharding=lambda: None)


def test_on_one_device_with_nothing_but_the_path(path, tree):
    restored = eqx_ckpt.tree_deserialise_leaves(path, eqx_ckpt.tree_like(path))
    for name in ARRAYS:
        assert restored[name].sharding.device_set == {jax.devices()[0]}
        assert not restored[name].committed
    assert_same(restored, tree)


def test_the_manager(path, tree, tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree)
        restored = manager.restore(tree, sharding=mesh(x=2, y=4))
    assert restored["w"].sharding == on(mesh(x=2, y=4), "x", "y")
    assert_same(restored, tree)


@pytest.mark.parametrize(("least", "regions"), [(0, 10), (50, 2)])
def test_more_than_fits_at_once(path, tree, monkeypatch, least, regions):
    """A leaf that is larger than the host memory for it arrives shard by shard."""
    limits = read_items.USUAL._replace(window=100)
    monkeypatch.setattr(restore, "USUAL", limits)
    monkeypatch.setattr(read_items, "_LEAST", least)
    most, counts = [], []

    def put(parts):
        most.append(sum(part.host.nbytes for part in parts))
        counts.append(len(parts))
        return placement.put(parts)

    monkeypatch.setattr(leaf_reader, "put", put)
    sharding = on(mesh(a=8), "a")
    restored = eqx_ckpt.tree_deserialise_leaves(
        path, tree, sharding=lambda name, struct: sharding if name == "w" else None
    )
    assert_same(restored, tree)
    assert restored["w"].sharding == sharding
    assert max(most) <= 100
    assert 1 < max(counts) <= regions


def make(key):
    model = eqx.nn.MLP(8, 8, 16, 1, key=key)
    return {"model": model, "keys": jax.random.split(key, 8), "step": 0}


def test_a_skeleton_with_shardings(tmp_path, getkey):
    tree, square = make(getkey()), mesh(x=4, y=2)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    skeleton = eqx.filter_eval_shape(make, jax.random.key(0))
    rules = {"weight$": P("x", "y"), "^keys": P("y"), ".*": P()}
    like = eqx_ckpt.shard_like(skeleton, rules, square)
    assert jax.tree.structure(like) == jax.tree.structure(skeleton)
    assert like["model"].layers[0].weight.sharding == on(square, "x", "y")
    assert like["keys"].sharding == on(square, "y")
    assert like["model"].activation is skeleton["model"].activation
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like)
    assert_same(restored, tree)
    assert restored["model"].layers[0].weight.sharding == on(square, "x", "y")
    assert restored["model"].layers[0].bias.sharding.is_equivalent_to(on(square), 1)


def test_a_skeleton_by_a_function():
    sharding = on(mesh(a=8), "a")
    skeleton = eqx.filter_eval_shape(make, jax.random.key(0))
    like = eqx_ckpt.shard_like(
        skeleton, lambda name, struct: sharding if struct.ndim == 2 else None
    )
    assert like["model"].layers[0].weight.sharding == sharding
    assert like["model"].layers[0].bias.sharding is None
    weak = eqx_ckpt.shard_like({"w": jnp.asarray(1.0)}, lambda name, struct: None)
    assert weak["w"].weak_type


def test_leaves_that_no_rule_is_for():
    skeleton = eqx.filter_eval_shape(make, jax.random.key(0))
    with pytest.raises(eqx_ckpt.LeafMismatchError) as raised:
        eqx_ckpt.shard_like(skeleton, {"weight": P(None, "a")}, mesh(a=8))
    assert "'model/layers/0/bias': no expression is found in it" in str(raised.value)
    assert "'model/layers/0/weight'" not in str(raised.value)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="does not divide"):
        eqx_ckpt.shard_like({"w": jnp.ones(3)}, {"w": P("a")}, mesh(a=8))
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="pass their mesh"):
        eqx_ckpt.shard_like(skeleton, {"weight": P("a")})


@pytest.mark.parametrize("rows", [5, 6, 7, 12, 64])
def test_no_chunk_crosses_the_edge_of_a_shard(rows):
    """Otherwise two processes would write one chunk, and one of them would lose."""
    array = jnp.zeros((2 * rows, 2**20 // rows))
    tree = {"w": jax.device_put(array, on(mesh(x=2), "x"))}
    eqx_ckpt.tree_serialise_leaves("memory://edges", tree, overwrite=True)
    chunk = eqx_ckpt.inspect.read_manifest("memory://edges").leaves["w"].chunk_shape
    assert rows % chunk[0] == 0


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"head/w": P("b")}, "'head/w'.*by the rule 'head/w': .*b.* not found in mesh"),
        ({"head/w": P("a", "a")}, "'head/w'.*by the rule 'head/w': .*duplicate"),
        ({"head/w": P("a", None, None)}, "'head/w'.*more dimensions than it has"),
        ({"*": P("a")}, r"The key '\*' of `rule` is not a regular expression"),
        ({3: P("a")}, "The key 3 of `rule` is not a regular expression"),
        ({"head/w": "a"}, "`rule` has 'a' for 'head/w'"),
        ([P("a")], "`rule` is .*a dictionary"),
        (lambda name, struct: {}[name], "raised `KeyError` for leaf 'head/w'"),
        (lambda name, struct: on(mesh(a=8), "b"), "for leaf 'head/w'.*b.*not found"),
    ],
)
def test_a_rule_that_cannot_be_used(rule, problem, unchecked):
    like = {"head": {"w": jnp.ones((8, 8))}}
    with pytest.raises(unchecked.LeafMismatchError, match=problem):
        unchecked.shard_like(like, rule, mesh(a=8))
    if callable(rule):
        unchecked.tree_serialise_leaves("memory://rule", like, overwrite=True)
        with pytest.raises(unchecked.LeafMismatchError, match=problem):
            unchecked.tree_deserialise_leaves("memory://rule", like, sharding=rule)


def test_a_part_of_a_sum_is_no_leaf():
    explicit = mesh(AxisType.Explicit, x=2, y=4)
    whole = jnp.ones((4, 4))
    eqx_ckpt.tree_serialise_leaves("memory://sum", {"w": whole}, overwrite=True)
    unreduced = NamedSharding(explicit, P("x", None, unreduced={"y"}))
    struct = jax.ShapeDtypeStruct((4, 4), "float32", sharding=unreduced)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'w'.*unreduced over 'y'"):
        eqx_ckpt.tree_deserialise_leaves("memory://sum", {"w": struct})
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'w'.*unreduced over 'y'"):
        eqx_ckpt.shard_like({"w": whole}, {"w": unreduced.spec}, explicit)

    @jax.jit
    def multiply(a, b):
        return jnp.einsum("ij,jk->ik", a, b, out_sharding=unreduced.spec)

    with jax.set_mesh(explicit):
        a = jax.device_put(whole, NamedSharding(explicit, P("x", "y")))
        b = jax.device_put(whole, NamedSharding(explicit, P("y", None)))
        with pytest.raises(eqx_ckpt.CheckpointError, match="'w' is unreduced over"):
            eqx_ckpt.tree_serialise_leaves("memory://sum", {"w": multiply(a, b)})


def test_an_array_whose_gradient_is_a_sum():
    explicit = mesh(AxisType.Explicit, x=2, y=4)
    sharding = NamedSharding(explicit, P("x", reduced={"y"}))
    tree = {"w": jax.device_put(jnp.arange(8.0), sharding)}
    eqx_ckpt.tree_serialise_leaves("memory://reduced", tree, overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves("memory://reduced", tree)
    assert restored["w"].sharding == sharding
    assert_same(restored, tree)
