"""A `transform` between a checkpoint and `like`."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same, structs


PATH = "memory://transform"


def saved(tree: Any) -> str:
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    return PATH


def restored(tree: Any, like: Any, transform: Any, **how: Any) -> Any:
    match = eqx_ckpt.tree_match(saved(tree), like, transform=transform, **how)
    assert match.ok, match
    return eqx_ckpt.tree_deserialise_leaves(PATH, like, transform=transform, **how)


def refused(tree: Any, like: Any, transform: Any, **how: Any) -> str:
    """The text of the error, which comes before anything is read."""
    source = Counting(eqx_ckpt.tree_like(saved(tree)), tree)
    with pytest.raises(eqx_ckpt.CheckpointError) as error:
        eqx_ckpt.tree_deserialise_leaves(source, like, transform=transform, **how)
    assert source.nbytes == {}
    return str(error.value)


class Counting(eqx_ckpt.interop.Source):
    """A tree in memory, as a source that counts the bytes that are read."""

    def __init__(self, _: Any, tree: Any) -> None:
        eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
        self._manifest = eqx_ckpt.inspect.read_manifest(PATH)
        self._arrays = {n: array for n, _, array in eqx_ckpt.inspect.iter_leaves(PATH)}
        self.nbytes: dict[str, int] = {}
        self.regions: Counter[str] = Counter()

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        return self._manifest

    def read(self, reads: Sequence[Any], damage: Any, report: Any = None) -> Any:
        for read in reads:
            self.regions[read.name] += 1
            self.nbytes[read.name] = self.nbytes.get(read.name, 0) + read.nbytes
        return [np.array(self._arrays[read.name][read.region]) for read in reads]

    def __str__(self) -> str:
        return "a tree"


def test_the_example():
    old = {
        "enc": {"w": jnp.ones((2, 3))},
        "blocks": [
            {"a": jnp.full(3, i), "b": jnp.ones((2, i))[:, :0]} for i in range(12)
        ],
        "embed": {"weight": jnp.arange(8, dtype=jnp.bfloat16).reshape(4, 2)},
        "attn": {"qkv": jnp.arange(6.0), "o": jnp.ones(2)},
        "step": 3,
    }

    def transform(old):
        old["encoder"] = old.pop("enc")  # renamed
        blocks = [old["blocks"][i] for i in range(12)]
        old["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
        old["embed"]["weight"] = jnp.pad(old["embed"]["weight"], ((0, 8), (0, 0)))
        q, k, v = jnp.split(old["attn"].pop("qkv"), 3)
        return old | {"q": q, "k": k, "v": v}

    new = {
        "encoder": old["enc"],
        "blocks": {
            "a": jnp.stack([jnp.full(3, i) for i in range(12)]),
            "b": jnp.zeros((12, 2, 0)),
        },
        "embed": {"weight": jnp.pad(old["embed"]["weight"], ((0, 8), (0, 0)))},
        "attn": {"o": old["attn"]["o"]},
        "q": jnp.array([0.0, 1]),
        "k": jnp.array([2.0, 3]),
        "v": jnp.array([4.0, 5]),
        "step": 3,
    }
    assert_same(restored(old, structs(new) | {"step": 0}, transform), new)
    found = eqx_ckpt.tree_match(PATH, structs(new), transform=transform)
    assert found.leaves["encoder/w"].status == "renamed"
    assert found.leaves["encoder/w"].origin == ("enc/w",)
    assert found.leaves["blocks/a"].status == "computed"
    assert len(found.leaves["blocks/a"].origin) == 12
    assert found.leaves["attn/o"].status == "same"
    assert "that `transform` makes of 'blocks/0/a', 'blocks/1/a'" in str(found)


def test_only_what_is_wanted_is_read():
    old = {"a": jnp.ones(4), "b": jnp.ones(8), "c": jnp.ones(16), "d": jnp.ones(32)}
    source = Counting(None, old)

    def transform(old):
        return {"sum": old["a"].sum() + old["b"], "x": old["c"], "y": old["d"] * 2}

    like = {"sum": jnp.zeros(8), "x": jnp.zeros(16), "y": jnp.zeros(32)}
    found = eqx_ckpt.tree_deserialise_leaves(
        source, like, transform=transform, where=lambda tree: tree["sum"]
    )
    assert (found["sum"] == 5).all()
    assert source.nbytes == {"a": 16, "b": 32}
    match = eqx_ckpt.tree_match(
        source, like, transform=transform, where=lambda tree: tree["sum"]
    )
    assert match.nbytes == 48


class Damaged(Counting):
    """A source whose leaves are all damaged."""

    def read(self, reads: Sequence[Any], damage: Any, report: Any = None) -> Any:
        damage |= {read.name: "lost" for read in reads}
        return super().read(reads, damage, report)


def test_all_damage_of_what_is_joined_is_named():
    """Also what a source reads in several batches."""
    rows = 9 * 2**20
    source = Damaged(None, {"a": np.zeros(rows, "f4"), "b": np.zeros(rows, "f4")})
    with pytest.raises(eqx_ckpt.CorruptCheckpointError) as caught:
        eqx_ckpt.tree_deserialise_leaves(
            source,
            {"ab": np.zeros(2 * rows, np.float32)},
            transform=lambda old: {"ab": jnp.concatenate([old["a"], old["b"]])},
        )
    assert "'a': lost" in str(caught.value)
    assert "'b': lost" in str(caught.value)


def test_what_is_not_returned_is_not_read():
    source = Counting(None, {"a": jnp.ones(4), "b": jnp.ones(8)})
    like = {"a": jnp.zeros(4)}
    eqx_ckpt.tree_deserialise_leaves(
        source, like, transform=lambda old: {"a": old["a"]}
    )
    assert source.nbytes == {"a": 16}


def test_what_passes_through_is_exact():
    old = {
        "wide": np.array([1 / 3, 1e-300]),
        "time": np.array(["2024-01-01"], "datetime64[D]"),
        "swapped": np.arange(3, dtype=">f4"),
        "key": jax.random.key(3),
        "weak": jnp.full((), 2.0),
        "scalar": np.float64(1 / 3),
        "int": 2**80,
        "nan": float("nan"),
    }
    new = restored(old, {"new": old}, lambda old: {"new": old})
    assert_same(new, {"new": old})


def test_keys_are_computed_with():
    key = jax.random.key(7)
    found = restored(
        {"key": key},
        {"a": key, "b": jax.random.split(key, 3)},
        lambda old: {
            "a": jax.random.fold_in(old["key"], 1),
            "b": jax.random.split(old["key"], 3),
        },
    )
    assert_same(found, {"a": jax.random.fold_in(key, 1), "b": jax.random.split(key, 3)})


def test_numpy_leaves_become_what_like_has():
    old = {"n": np.arange(3, dtype=np.float32), "p": 0.5}
    like = {"n": np.zeros(3, np.float32), "j": jnp.zeros(3), "f": 0.0, "p": 0.0}

    def transform(old):
        n = old["n"] * 2
        return {"n": n, "j": n + 1, "f": n.sum(), "p": old["p"] / 2}

    found = restored(old, like, transform, casting="safe")
    assert_same(
        found,
        {
            "n": np.array([0, 2, 4], np.float32),
            "j": jnp.array([1.0, 3, 5]),
            "f": 6.0,
            "p": 0.25,
        },
    )
    found["n"][0] = 1  # It can be written to, as any other that is restored.


def test_arrays_that_the_transform_brings():
    wide = np.array([1 / 3])
    old = {"a": jnp.ones(3)}

    def transform(old):
        return old | {"wide": wide, "new": jnp.zeros(2), "key": jax.random.key(1)}

    new = old | {"wide": wide, "new": jnp.zeros(2), "key": jax.random.key(1)}
    assert_same(restored(old, new, transform), new)
    text = str(eqx_ckpt.tree_match(PATH, new, transform=transform))
    assert "'wide': NumPy float64[1] that `transform` makes." in text


def test_casting_what_is_computed():
    old = {"a": jnp.arange(3, dtype=jnp.bfloat16)}
    like = {"b": jnp.zeros(3), "c": np.zeros(3)}

    def transform(old):
        return {"b": old["a"] * 2, "c": old["a"] + 1}

    error = refused(old, like, transform)
    assert "bfloat16[3] that `transform` makes of 'a'. `casting='safe'`" in error
    found = restored(old, like, transform, casting="safe")
    assert_same(found, {"b": jnp.array([0.0, 2, 4]), "c": np.array([1.0, 2, 3])})


def test_nothing_is_narrowed():
    old = {"a": np.array([1 / 3]), "b": jnp.ones(1)}
    like = {"sum": jnp.zeros(1)}
    error = refused(old, like, lambda old: {"sum": old["a"] + old["b"]})
    assert "NumPy float64[1] of 'a', which JAX would narrow: use" in error
    rows, like = {"rows": [np.ones(2)] * 2}, {"rows": np.zeros((2, 2), np.float32)}
    stack = lambda old: {"rows": jnp.stack([old["rows"][i] for i in (0, 1)])}  # noqa: E731
    error = refused(rows, like, stack)
    assert "in `like`, NumPy float64[2] of 'rows/0', which JAX would narrow: " in error
    with jax.enable_x64(True):
        like = {"sum": np.zeros(1)}
        found = restored(old, like, lambda old: {"sum": old["a"] + old["b"]})
    assert found["sum"].dtype == np.float64
    assert found["sum"] == 1 / 3 + 1


def test_what_is_made_of_nothing():
    old = {"a": jnp.ones(3)}
    like = {"n": jnp.arange(3), "sum": jnp.ones(3), "eye": jnp.eye(2)}
    found = restored(
        old,
        like,
        lambda old: {
            "n": jnp.arange(3),
            "sum": old["a"] + jnp.arange(3),
            "eye": jnp.eye(2),
        },
    )
    assert_same(found, like | {"sum": jnp.array([1.0, 2, 3])})


def test_prefix_is_of_the_checkpoint():
    old = {"model": {"enc": jnp.ones(2), "head": jnp.ones(3)}, "step": 1}
    found = restored(
        old, {"backbone": jnp.zeros(2)}, lambda old: {"backbone": old["enc"]},
        prefix="model",
    )  # fmt: skip
    assert_same(found, {"backbone": jnp.ones(2)})


def test_a_prefix_that_is_one_leaf():
    old = {"w": jnp.ones(2), "f": jax.nn.relu}
    found = restored(old, jnp.zeros(2), lambda w: w, prefix="w")
    assert_same(found, jnp.ones(2))
    for function, status in ((jax.nn.relu, "same"), (jax.nn.gelu, "changed")):
        how = {"transform": lambda f: f, "prefix": "f"}
        (match,) = eqx_ckpt.tree_match(PATH, function, **how).leaves.values()
        assert match.status == status
        assert "relu" in match.found
    error = refused(old, jnp.zeros(2), lambda w: {"x": 1.0}, prefix="w")
    assert "The checkpoint has 'w', which `transform` does not use" in error


def test_missing_and_unexpected():
    old = {"a": jnp.ones(2), "b": jnp.ones(3)}
    like = {"x": jnp.zeros(2), "new": jnp.zeros(1)}

    def transform(old):
        return {"x": old["a"], "rest": old["b"]}

    error = refused(old, like, transform)
    assert "What `transform` returns does not match `like`" in error
    assert "'rest': not in `like`, float32[3] in the checkpoint, as 'b'" in error
    assert "'new': jax float32[1] in `like`" in error or "'new': float32[1]" in error
    found = restored(old, like, transform, missing="keep", unexpected="ignore")
    assert_same(found, {"x": jnp.ones(2), "new": jnp.zeros(1)})


def test_missing_is_said_in_words_of_both_trees():
    old = {"enc": {"w": jnp.ones(3)}, "head": jnp.ones(2)}
    like = {"encoder": {"w": jnp.zeros(3)}}
    absent = "'encoder/w': float32[3] in `like`, not in what `transform` returns."
    error = refused(old, like, lambda old: {"encoder": {"weight": old["enc"]["w"]}})
    assert f"- {absent} Did you mean 'encoder/weight'?\n" in error
    assert "- 'encoder/weight': not in `like`, float32[3]" in error
    assert "in the checkpoint, as 'enc/w'.\n" in error
    error = refused(old, like, lambda old: {"head": old["head"]}, unexpected="ignore")
    assert f"- {absent} The checkpoint has 'enc/w', which `transform` does not" in error
    error = refused(
        {"model": old}, like, lambda old: {"b": old["head"]}, prefix="model"
    )
    assert "The checkpoint has 'model/enc/w', which" in error
    error = refused({"a": jnp.ones(3)}, like, lambda old: old)
    assert f"- {absent}\n" in error
    two = {"new": [jnp.zeros(3), jnp.zeros(3)]}
    error = refused(
        {"a": jnp.ones(3), "b": jnp.ones(3)}, two, lambda o: {"old": [*o.values()]}
    )
    assert "'new/0' in `like`, 'old/0' in what `transform` returns, and so on." in error
    found = eqx_ckpt.tree_match(
        PATH, two, transform=lambda o: {} | o, missing="keep", unexpected="ignore"
    )
    assert "kept from `like`, not in what `transform` returns." in str(found)


def test_equinox_modules():
    key = jax.random.key(0)
    old = eqx.nn.MLP(2, 2, 8, 1, key=key)

    class New(eqx.Module):
        first: eqx.nn.Linear
        scale: jax.Array

    new = New(eqx.nn.Linear(2, 8, key=key), jnp.zeros(()))

    def transform(old):
        return {"first": old["layers"][0], "scale": old["layers"][1]["bias"].sum()}

    found = restored(old, structs(new), transform)
    assert_same(found.first, old.layers[0])

    # It may return the new model itself; functions in it are no data.
    def as_model(old):
        model = eqx.nn.MLP(2, 2, 8, 1, key=key)
        return eqx.tree_at(lambda m: m.layers[0].bias, model, old["layers"][0]["bias"])

    assert_same(restored(old, old, as_model), old)


def test_filter_spec():
    old = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    names = []

    def spec(f, leaf):
        names.append(f.name)
        if f.name == "by_hand":
            return jnp.asarray(np.load(f))
        return eqx_ckpt.default_deserialise_filter_spec(f, leaf)

    like = {"renamed": jnp.zeros(3), "by_hand": jnp.zeros(3), "sum": jnp.zeros(2)}

    def transform(old):
        x = old["a"] * 2
        return {"renamed": old["a"], "by_hand": x, "sum": old["b"] + old["a"].sum()}

    saved(old)
    found = eqx_ckpt.tree_deserialise_leaves(PATH, like, spec, transform=transform)
    assert names == ["by_hand", "renamed", "sum"]
    assert_same(found["renamed"], jnp.arange(3.0))
    assert_same(found["by_hand"], jnp.array([0.0, 2, 4]))
    assert_same(found["sum"], jnp.full(2, 4.0) + jnp.zeros(2))


TREE = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}, "n": 1}
LIKE = {"a": jnp.zeros(2)}


def with_effect(old):
    jax.debug.print("{}", old["a"])
    return {"a": old["a"]}


def with_callback(old):
    return {"a": jax.experimental.io_callback(lambda x: x, old["a"], old["a"])}


def with_control_flow(old):
    return {"a": old["a"] if old["a"][0] > 0 else -old["a"]}


@jax.tree_util.register_pytree_with_keys_class
class Twice:
    """A node whose children have the same name."""

    def __init__(self, x: Any, y: Any) -> None:
        self.children = x, y

    def tree_flatten_with_keys(self):
        key = jax.tree_util.DictKey("a")
        return tuple((key, child) for child in self.children), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda old: {"z": old["a"]}, ["'z'", "not in `like`", "as 'a'"]),
        (lambda old: Twice(old["a"], old["a"]), ["`transform`", "distinct", "'a'"]),
        (lambda old: {}, ["returned no leaf", "`return`"]),
        (lambda old: None, ["returned no leaf", "`return`"]),
        (lambda old: {"a": {1, 2}}, ["'a'", "is a `set`", "neither arrays"]),
        (lambda old: {"a": jax.ShapeDtypeStruct((2,), "f4")}, ["'a'", "has no data"]),
        (lambda old: {"a": np.array([None])}, ["'a'", "`object`"]),
        (with_effect, ["has effects", "debug", "pure function"]),
        (with_callback, ["has effects", "`io_callback`"]),
        (with_control_flow, ["uses the value of an array", "`jax.lax.cond`"]),
        (lambda old: {"a": np.sin(old["a"])}, ["uses the value", "`jax.numpy`"]),
        (lambda old: old["x"], ["raised `KeyError`: 'x'", "'a', 'b/c', 'n'"]),
        (lambda old: {"a": old["a"] + old["b"]["c"]}, ["raised `TypeError`", "shapes"]),
        (lambda old: {"a": old["b"]["c"]}, ["shape", "float32[3]", "'b/c'"]),
        (lambda old: {1: old["a"], "a": old["a"]}, ["`transform` raised", "sort"]),
    ],
)
def test_what_a_transform_does_wrong(transform, words):
    error = refused(TREE, LIKE, transform)
    for word in words:
        assert word in error, error


def test_it_has_to_be_a_function(unchecked):
    unchecked.tree_serialise_leaves(PATH, TREE, overwrite=True)
    with pytest.raises(TypeError) as error:
        unchecked.tree_match(PATH, LIKE, transform="enc")
    assert "`transform` is 'enc'. Pass a function" in str(error.value)


def test_the_cause_is_chained():
    saved(TREE)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_match(PATH, LIKE, transform=lambda old: old["x"])
    assert isinstance(error.value.__cause__, KeyError)


def test_a_prefix_that_leaves_nothing():
    error = refused(TREE, LIKE, lambda old: old, prefix="q")
    assert "`prefix` is 'q'" in error


MESH = jax.make_mesh((4, 2), ("x", "y"))


def on(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*spec))


def stacked(old):
    blocks = [old["blocks"][i] for i in range(4)]
    return {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks), "w": old["v"]}


def sharded_blocks() -> Any:
    w = jnp.arange(8 * 4.0).reshape(8, 4)
    return {
        "blocks": [{"w": jax.device_put(w + i, on("x", "y"))} for i in range(4)],
        "v": jax.device_put(w, on(("x", "y"))),
    }


STACK = np.stack([np.arange(32.0).reshape(8, 4) + i for i in range(4)])


@pytest.mark.parametrize("context", [False, True])
def test_onto_a_mesh(context):
    like = {
        "blocks": {
            "w": jax.ShapeDtypeStruct((4, 8, 4), jnp.float32, sharding=on(None, "x"))
        },
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=on("y")),
    }
    with jax.set_mesh(MESH) if context else contextlib.nullcontext():
        found = restored(sharded_blocks(), like, stacked)
    assert found["blocks"]["w"].sharding == on(None, "x")
    assert found["w"].sharding == on("y")
    assert (np.asarray(found["blocks"]["w"]) == STACK).all()


def test_onto_a_mesh_as_xla_likes():
    like = {"blocks": {"w": jnp.zeros((4, 8, 4))}, "w": jnp.zeros((8, 4))}
    found = restored(sharded_blocks(), like, stacked, sharding=MESH)
    assert found["w"].sharding == on(("x", "y"))
    assert found["blocks"]["w"].sharding.mesh == MESH
    assert found["blocks"]["w"].sharding.shard_shape((4, 8, 4)) == (4, 2, 2)
    assert (np.asarray(found["blocks"]["w"]) == STACK).all()
    new = {"new": jnp.zeros(3)}
    found = restored({}, new, lambda old: {"new": jnp.ones(3)}, sharding=MESH)
    assert found["new"].sharding == on()


def test_what_has_no_elements_is_sharded_too():
    """Some versions of XLA do not shard it."""
    place, shape = on(None, "x"), (0, 8)
    like = {"none": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)}
    doubled = restored(
        {"none": jnp.zeros(shape)}, like, lambda old: {"none": old["none"] * 2}
    )
    made = eqx_ckpt.restore_or_init(
        PATH, lambda: {"none": jnp.ones(shape), "new": jnp.ones(shape)}, sharding=place
    )
    for array in (doubled["none"], made["none"], made["new"]):
        assert array.sharding == place
        assert {shard.data.shape for shard in array.addressable_shards} == {(0, 2)}
        assert np.asarray(array).shape == shape


def test_onto_other_devices():
    like = {"blocks": {"w": jnp.zeros((4, 8, 4))}, "w": jnp.zeros((8, 4))}
    device = jax.devices()[3]
    found = restored(sharded_blocks(), like, stacked, sharding=device)
    assert found["blocks"]["w"].devices() == {device}
    # Each leaf elsewhere: what they share is read for each.
    stages = {"a": jax.devices()[1], "b": on("x")}

    def split(old):
        return {"a": old["v"] * 2, "b": old["v"] + 1}

    like = {"a": jnp.zeros((8, 4)), "b": jnp.zeros((8, 4))}
    found = restored(sharded_blocks(), like, split, sharding=stages)
    assert found["a"].devices() == {jax.devices()[1]}
    assert found["b"].sharding == on("x")
    assert (
        eqx_ckpt.tree_match(PATH, like, transform=split, sharding=stages).nbytes == 256
    )


def test_no_device_holds_a_large_leaf_alone():
    """What is large is split, and each device reads its part only."""
    whole = np.arange(2**19, dtype=np.float32).reshape(1024, 512)
    source = Counting(None, {"a": whole})
    like = {
        "b": jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=on(("x", "y")))
    }
    found = eqx_ckpt.tree_deserialise_leaves(
        source, like, transform=lambda old: {"b": old["a"] * 2}
    )
    assert (np.asarray(found["b"]) == whole * 2).all()
    assert source.regions["a"] == 8
    assert source.nbytes["a"] == whole.nbytes


def test_arrays_of_another_mesh_in_a_transform():
    other = jax.device_put(jnp.ones(8), jax.devices()[5])
    old = {"a": jnp.ones(8)}
    error = refused(old, {"b": jnp.zeros(8)}, lambda old: {"b": old["a"] + other})
    assert "`transform` uses an array, float32[8]" in error
    assert "`jax.device_put`" in error
    like = {"b": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=on("x"))}
    assert "other devices" in refused(old, like, lambda old: {"b": old["a"] + other})
    same = jax.device_put(jnp.ones(8), on("y"))
    jitted = jax.jit(lambda x: x + same)
    found = restored(old, like, lambda old: {"b": jitted(old["a"])})
    assert found["b"].sharding == on("x")
    assert (np.asarray(found["b"]) == 2).all()
    free = jnp.ones(8)
    assert (restored(old, like, lambda old: {"b": old["a"] + free})["b"] == 2).all()


def test_inside_of_jit_only_what_is_needed_is_read():
    source = Counting(None, {"a": jnp.ones(4), "b": jnp.ones(8)})
    found = eqx_ckpt.tree_deserialise_leaves(
        source,
        {"x": jnp.zeros(4)},
        transform=jax.jit(lambda old: {"x": old["a"], "y": old["b"] + 1}),
        unexpected="ignore",
    )
    assert_same(found, {"x": jnp.ones(4)})
    assert source.nbytes == {"a": 16}
