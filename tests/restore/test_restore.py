"""Restoring a part: `where` and `prefix`; where leaves go; what is read for it."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same, files_below, structs


class Model(eqx.Module):
    encoder: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.encoder = eqx.nn.MLP(3, 4, 8, 2, key=a)
        self.head = eqx.nn.Linear(4, 2, key=b)


def make(key):
    model = Model(key)
    opt_state = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
    return {"model": model, "opt_state": opt_state, "step": 7, "key": key}


@pytest.fixture
def saved(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "saved", make(jax.random.key(1)))
    return tmp_path / "saved"


@pytest.fixture
def expected():
    return make(jax.random.key(1))


@pytest.fixture
def skeleton():
    return eqx.filter_eval_shape(make, jax.random.key(0))


@contextmanager
def opened(path: Path) -> Iterator[set[str]]:
    """The files below a path that any thread opens, by inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK)
    folders = {}
    for folder in [path, *(p for p in path.rglob("*") if p.is_dir())]:
        watch = libc.inotify_add_watch(fd, os.fsencode(folder), 0x20)  # IN_OPEN
        assert watch >= 0
        folders[watch] = folder
    names: set[str] = set()
    yield names
    with open(fd, "rb", buffering=0) as events:
        while data := events.read(2**16):
            while data:
                watch, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                if not mask & 0x40000000:  # IN_ISDIR
                    names.add(str((folders[watch] / name).relative_to(path)))
                data = data[16 + length :]


def test_the_whole(saved, skeleton, expected):
    assert_same(eqx_ckpt.tree_deserialise_leaves(saved, skeleton), expected)
    with opened(saved) as names:
        eqx_ckpt.tree_deserialise_leaves(saved, skeleton)
    chunks = {name for name in files_below(saved) if not name.endswith("/zarr.json")}
    assert names == chunks


@pytest.mark.parametrize(
    ("where", "below"),
    [
        (lambda t: t["model"], ["model/"]),
        (lambda t: t["model"].encoder.layers[1], ["model/encoder/layers/1/"]),
        (lambda t: (t["model"].head, t["key"]), ["model/head/", "key/"]),
        (lambda t: [t["step"]], []),
        (lambda t: t["model"].head.bias, ["model/head/bias/"]),
    ],
)
def test_where(saved, skeleton, expected, where, below):
    with opened(saved) as names:
        restored = eqx_ckpt.tree_deserialise_leaves(saved, skeleton, where=where)
    chunks = {name for name in files_below(saved) if not name.endswith("/zarr.json")}
    needed = {name for name in chunks if name.startswith(tuple(below))}
    assert names == needed | {"zarr.json"}
    assert_same(restored, eqx.tree_at(where, skeleton, where(expected)))


def test_where_needs_only_what_it_picks(saved, expected):
    like = {"model": Model(jax.random.key(0)), "elsewhere": jnp.ones(3)}
    restored = eqx_ckpt.tree_deserialise_leaves(saved, like, where=lambda t: t["model"])
    assert_same(restored["model"], expected["model"])
    assert restored["elsewhere"] is like["elsewhere"]


def test_where_takes_layers_that_are_found_by_type(saved, skeleton, expected):
    def weights(tree):
        def is_linear(x):
            return isinstance(x, eqx.nn.Linear)

        layers = jtu.tree_leaves(tree["model"], is_leaf=is_linear)
        return [layer.weight for layer in layers if is_linear(layer)]

    restored = eqx_ckpt.tree_deserialise_leaves(saved, skeleton, where=weights)
    assert_same(weights(restored), weights(expected))
    assert isinstance(restored["model"].head.bias, jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    "where",
    [
        lambda t: t["nothing"],
        lambda t: Model(jax.random.key(0)),
        lambda t: jnp.ones(3),
        lambda t: t["model"].head.weight * 2,
        lambda t: "text",
    ],
)
def test_a_where_that_picks_no_part_of_like(saved, skeleton, where):
    with (
        opened(saved) as names,
        pytest.raises(eqx_ckpt.LeafMismatchError, match="`where`"),
    ):
        eqx_ckpt.tree_deserialise_leaves(saved, skeleton, where=where)
    assert names == {"zarr.json"}


@pytest.mark.parametrize(
    "where",
    [
        lambda linear: None,
        lambda linear: linear.bias,
        lambda linear: (linear.weight, linear.bias),
        lambda linear: (),
        lambda linear: [],
    ],
)
def test_a_where_that_picks_nothing(where, getkey):
    """`equinox.tree_at` takes it for the only `None` of the tree."""
    linear = eqx.nn.Linear(2, 2, use_bias=False, key=getkey())
    eqx_ckpt.tree_serialise_leaves("memory://where", linear, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`where` picks"):
        eqx_ckpt.tree_deserialise_leaves("memory://where", linear, where=where)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`where` picks"):
        eqx_ckpt.tree_match("memory://where", linear, where=where)


def sequential(key):
    a, b = jax.random.split(key)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(2, 3, key=a),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Identity(),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(3, 2, key=b),
        ]
    )


def test_layer_by_layer():
    """Layers without parameters are parts as good as any other."""
    saved, like = sequential(jax.random.key(0)), sequential(jax.random.key(1))
    eqx_ckpt.tree_serialise_leaves("memory://layers", saved, overwrite=True)
    for i, layer in enumerate(like.layers):
        restored = eqx_ckpt.tree_deserialise_leaves(
            "memory://layers", layer, prefix=f"layers/{i}"
        )
        assert_same(restored, saved.layers[i])
        restored = eqx_ckpt.tree_deserialise_leaves(
            "memory://layers", like, where=lambda model, i=i: model.layers[i]
        )
        assert_same(restored.layers[i], saved.layers[i])
    for prefix in ("layer/2", "layers/1"):
        with pytest.raises(eqx_ckpt.LeafMismatchError):
            eqx_ckpt.tree_deserialise_leaves(
                "memory://layers", like.layers[0], prefix=prefix
            )
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="Did you mean 'layers/"):
        eqx_ckpt.tree_deserialise_leaves(
            "memory://layers", like.layers[2], prefix="layer/2"
        )


@pytest.mark.parametrize("prefix", [None, 0, Path("model"), b"model"])
def test_a_prefix_that_is_no_string(saved, skeleton, prefix, unchecked):
    with pytest.raises(TypeError, match="which is not a string"):
        unchecked.interop.optax_transform(skeleton, prefix)
    match = "`prefix` is .*, which is not a string"
    with pytest.raises(TypeError, match=match):
        unchecked.tree_deserialise_leaves(saved, skeleton["model"], prefix=prefix)
    with pytest.raises(TypeError, match=match):
        unchecked.tree_like(saved, prefix=prefix)


@pytest.mark.parametrize("prefix", ["model/encoder", "/model/encoder/"])
def test_prefix(saved, skeleton, expected, prefix):
    like = skeleton["model"].encoder
    with opened(saved) as names:
        restored = eqx_ckpt.tree_deserialise_leaves(saved, like, prefix=prefix)
    assert_same(restored, expected["model"].encoder)
    assert all(n.startswith("model/encoder/") for n in names - {"zarr.json"})
    assert len(names) == 1 + 6


def test_prefix_of_one_leaf(saved, expected):
    like = jax.ShapeDtypeStruct((4, 8), "float32")
    name = "model/encoder/layers/2/weight"
    restored = eqx_ckpt.tree_deserialise_leaves(saved, like, prefix=name)
    assert_same(restored, expected["model"].encoder.layers[2].weight)
    assert eqx_ckpt.tree_deserialise_leaves(saved, 0, prefix="step") == 7


def test_prefix_and_where(saved, skeleton, expected):
    like = skeleton["model"]
    restored = eqx_ckpt.tree_deserialise_leaves(
        saved, like, prefix="model", where=lambda model: model.head
    )
    assert_same(restored.head, expected["model"].head)
    assert_same(restored.encoder, like.encoder)


def test_a_prefix_that_is_not_there(saved, skeleton):
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'model/encoder'"):
        eqx_ckpt.tree_deserialise_leaves(saved, skeleton, prefix="model/encode")
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="no leaf of that name"):
        eqx_ckpt.tree_like(saved, prefix="mode")
    for prefix in ("model//encoder", "model/./encoder", " model", "Model"):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="no leaf of that name"):
            eqx_ckpt.tree_like(saved, prefix=prefix)


def test_tree_like(saved, expected):
    restored = eqx_ckpt.tree_deserialise_leaves(saved, eqx_ckpt.tree_like(saved))
    assert restored["step"] == 7
    weight = restored["model"]["encoder"]["layers"][0]["weight"]
    assert_same(weight, expected["model"].encoder.layers[0].weight)
    head = eqx_ckpt.tree_like(saved, prefix="model/head")
    assert set(head) == {"weight", "bias"}
    assert_same(
        eqx_ckpt.tree_deserialise_leaves(saved, head, prefix="model/head")["bias"],
        expected["model"].head.bias,
    )


@pytest.mark.parametrize(
    "tree", [{"x" * 300: 1, "a/b": [2, {"": 3}], "0": {0: 4, -1: 5}}, 5, [1, [2]]]
)
def test_tree_like_has_the_keys_of_the_tree(tree):
    eqx_ckpt.tree_serialise_leaves("memory://like", tree, overwrite=True)
    like = eqx_ckpt.tree_like("memory://like")
    restored = eqx_ckpt.tree_deserialise_leaves("memory://like", like)
    assert jtu.tree_leaves(restored) == jtu.tree_leaves(tree)


def test_a_prefix_is_a_whole_key():
    tree = {"head": {"w": 1}, "header": {"w": 2}}
    eqx_ckpt.tree_serialise_leaves("memory://heads", tree, overwrite=True)
    assert eqx_ckpt.tree_like("memory://heads", prefix="head") == {"w": 1}
    like = {"w": 0}
    assert eqx_ckpt.tree_match("memory://heads", like, prefix="head").ok
    restored = eqx_ckpt.tree_deserialise_leaves("memory://heads", like, prefix="head")
    assert restored == {"w": 1}


def test_tree_like_of_keys_that_jax_cannot_sort():
    @jtu.register_pytree_with_keys_class
    class Mixed:
        def tree_flatten_with_keys(self):
            return [(jtu.SequenceKey(0), 1), (jtu.GetAttrKey("a"), 2)], None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    eqx_ckpt.tree_serialise_leaves("memory://mixed", Mixed(), overwrite=True)
    like = eqx_ckpt.tree_like("memory://mixed")
    restored = eqx_ckpt.tree_deserialise_leaves("memory://mixed", like)
    assert dict(restored) == {0: 1, "a": 2}


def mesh(*shape):
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P(("x", "y")), P("y", "x")]


@pytest.mark.parametrize("save", SPECS)
@pytest.mark.parametrize("load", SPECS)
def test_arrays_on_a_mesh(save, load, tmp_path):
    array = np.arange(64 * 16, dtype=np.int32).reshape(64, 16)
    source = NamedSharding(mesh(4, 2), save)
    tree = {"w": jax.device_put(array, source), "key": jax.random.key(0)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    target = NamedSharding(mesh(2, 4), load)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=target)
    restored = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", {**tree, "w": struct}
    )["w"]
    assert restored.sharding == target
    np.testing.assert_array_equal(restored, array)
    eqx_ckpt.inspect.verify(tmp_path / "new")
    record = eqx_ckpt.inspect.read_manifest(tmp_path / "new").leaves["w"]
    assert record.chunk_shape == source.shard_shape(array.shape)
    assert record.sharding is not None
    assert record.sharding["mesh_shape"] == [4, 2]


def test_keys_on_a_mesh():
    sharding = NamedSharding(mesh(8), P("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), sharding)
    eqx_ckpt.tree_serialise_leaves("memory://keys", keys, overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves("memory://keys", keys)
    assert restored.sharding == keys.sharding
    assert_same(restored, keys)


def test_replicas_do_not_share_what_a_donating_step_writes_to(tmp_path):
    replicated = NamedSharding(mesh(8), P())
    tree = jax.device_put({"w": jnp.arange(2.0**16)}, replicated)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree)
    step = jax.jit(lambda t: {"w": t["w"] * 2 + 1}, donate_argnums=0)
    for _ in range(3):
        restored, tree = step(restored), step(tree)
    for ours, theirs in zip(
        restored["w"].addressable_shards, tree["w"].addressable_shards, strict=True
    ):
        np.testing.assert_array_equal(ours.data, theirs.data)


def test_a_sharding_that_does_not_divide(saved, skeleton):
    like = jax.ShapeDtypeStruct(
        (2, 4), "float32", sharding=NamedSharding(mesh(8), P("x"))
    )
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'model/head/weight'"):
        eqx_ckpt.tree_deserialise_leaves(saved, like, prefix="model/head/weight")


@pytest.mark.parametrize("rows", [3_000_017, 2**22, 5])
def test_large_arrays(rows, tmp_path):
    """Of several chunks, of which the last may reach beyond the edge."""
    tree = {"w": jnp.arange(rows * 3, dtype=jnp.int32).reshape(rows, 3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    like = structs(tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like), tree)
    eqx_ckpt.inspect.verify(tmp_path / "new")
    sharded = NamedSharding(mesh(5), P("x")) if rows == 5 else None
    like = {"w": jax.ShapeDtypeStruct((rows, 3), jnp.int32, sharding=sharded)}
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like), tree)


def test_restored_arrays_can_be_donated(saved, skeleton, expected):
    """They are in memory that NumPy allocated, which JAX must not free or share."""
    restored = eqx_ckpt.tree_deserialise_leaves(saved, skeleton)
    arrays = eqx.filter(restored["model"], eqx.is_array)
    step = jax.jit(lambda t: jtu.tree_map(lambda x: x + 1, t), donate_argnums=0)
    for _ in range(3):
        arrays = step(arrays)
    plus_three = jtu.tree_map(
        lambda x: x + 1 + 1 + 1, eqx.filter(expected["model"], eqx.is_array)
    )
    assert_same(arrays, plus_three)
