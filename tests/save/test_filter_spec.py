"""Equinox's `filter_spec` protocol, both ways."""

import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from helpers import assert_same, bits, structs


PATH = "memory://specs"


def tree():
    return {
        "a": [jnp.arange(6.0).reshape(2, 3), np.arange(3), "text"],
        "b": {"n": 5, "x": 0.5, "f": jax.nn.relu, "h": jnp.ones(2, jnp.bfloat16)},
    }


def like():
    return {
        "a": [jnp.zeros((2, 3)), np.zeros(3, int), "other"],
        "b": {"n": 0, "x": 0.0, "f": jax.nn.relu, "h": jnp.zeros(2, jnp.bfloat16)},
    }


def skip_jax(f, x):
    """The example of `eqx.default_serialise_filter_spec`'s docstring."""
    return None if isinstance(x, jax.Array) else eqx.default_serialise_filter_spec(f, x)


def keep_jax(f, x):
    if isinstance(x, jax.Array):
        return x
    return eqx.default_deserialise_filter_spec(f, x)


def only_default(f, x):
    eqx.default_serialise_filter_spec(f, x)


def only_default_back(f, x):
    return eqx.default_deserialise_filter_spec(f, x)


def with_strings(f, x):
    """Custom bytes for leaves that Equinox does not save."""
    if isinstance(x, str):
        f.write(x.encode().ljust(16))
    else:
        eqx.default_serialise_filter_spec(f, x)


def with_strings_back(f, x):
    if isinstance(x, str):
        return f.read(16).decode().strip()
    return eqx.default_deserialise_filter_spec(f, x)


def half(f, x):
    if eqx.is_inexact_array(x) and x.dtype == jnp.float32:
        x = x.astype(jnp.float16)
    eqx.default_serialise_filter_spec(f, x)


def half_back(f, x):
    out = eqx.default_deserialise_filter_spec(f, x)
    return out.astype(x.dtype) if isinstance(x, jax.Array) else out


def framed(f, x):
    """Bytes before and after the default ones."""
    f.write(b"<")
    eqx.default_serialise_filter_spec(f, x)
    f.write(b">")


def framed_back(f, x):
    assert f.read(1) == b"<"
    out = eqx.default_deserialise_filter_spec(f, x)
    assert f.read(1) == b">"
    return out


def trailed(f, x):
    eqx.default_serialise_filter_spec(f, x)
    np.save(f, np.int64(7))


def trailed_back(f, x):
    out = eqx.default_deserialise_filter_spec(f, x)
    assert np.load(f) == 7
    return out


def pickled(f, x):
    if not callable(x):
        pickle.dump(jax.device_get(x), f)


def pickled_back(f, x):
    if callable(x):
        return x
    out = pickle.load(f)
    return jnp.asarray(out) if isinstance(x, jax.Array) else out


SPECS = {
    "default": (
        eqx.default_serialise_filter_spec,
        eqx.default_deserialise_filter_spec,
    ),
    "ours": (
        eqx_ckpt.default_serialise_filter_spec,
        eqx_ckpt.default_deserialise_filter_spec,
    ),
    "skip": (skip_jax, keep_jax),
    "wrap": (only_default, only_default_back),
    "strings": (with_strings, with_strings_back),
    "half": (half, half_back),
    "framed": (framed, framed_back),
    "trailed": (trailed, trailed_back),
    "pickled": (pickled, pickled_back),
    "prefix": (
        {"a": with_strings, "b": skip_jax},
        {"a": with_strings_back, "b": keep_jax},
    ),
    "deep": (
        {"a": [half, only_default, with_strings], "b": framed},
        {"a": [half_back, only_default_back, with_strings_back], "b": framed_back},
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_does_what_it_does_in_equinox(name, tmp_path):
    save, load = SPECS[name]
    eqx.tree_serialise_leaves(tmp_path / "file.eqx", tree(), save)
    expected = eqx.tree_deserialise_leaves(tmp_path / "file.eqx", like(), load)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree(), save)
    assert_same(
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like(), load), expected
    )
    eqx_ckpt.inspect.verify(tmp_path / "new")


@pytest.mark.parametrize("name", ["wrap", "strings", "skip", "ours"])
def test_what_a_spec_leaves_to_the_default_becomes_an_array(name):
    save, _ = SPECS[name]
    leaf = {"x": jnp.ones(3), "n": np.ones(3), "s": 5, "b": True}
    eqx_ckpt.tree_serialise_leaves(PATH, leaf, save, overwrite=True)
    kinds = {n: r.kind for n, r in eqx_ckpt.inspect.read_manifest(PATH).leaves.items()}
    expected = {"x": "jax", "n": "numpy", "s": "int", "b": "bool"}
    if name == "skip":
        del expected["x"]
    assert kinds == expected


def test_nothing_is_gathered_for_a_spec_that_wraps_our_default(monkeypatch):
    """Looking at an array on the host as a whole is what several hosts cannot do."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.arange(64.0), sharding)
    looked_at = []
    as_array = type(array).__array__
    monkeypatch.setattr(
        type(array),
        "__array__",
        lambda self, *args, **kwargs: (
            looked_at.append(self.shape) or as_array(self, *args, **kwargs)
        ),
    )
    spec = lambda f, x: eqx_ckpt.default_serialise_filter_spec(f, x)  # noqa: E731
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": array}, spec, overwrite=True)
    assert set(looked_at) <= {(8,)}


def test_a_spec_acts_by_name():
    seen = {}

    def spec(f, x):
        seen[f.name] = jtu.keystr(f.path)
        if not f.name.startswith("b/"):
            eqx_ckpt.default_serialise_filter_spec(f, x)

    eqx_ckpt.tree_serialise_leaves(PATH, tree(), spec, overwrite=True)
    assert seen["a/0"] == "['a'][0]"
    assert list(eqx_ckpt.inspect.read_manifest(PATH).leaves) == ["a/0", "a/1"]

    def back(f, x):
        if f.name.startswith("b/"):
            return x
        return eqx_ckpt.default_deserialise_filter_spec(f, x)

    restored = eqx_ckpt.tree_deserialise_leaves(PATH, like(), back)
    assert_same(restored["a"][:2], tree()["a"][:2])
    assert_same(restored["b"], like()["b"])


def test_our_default_saves_what_it_is_called_with():
    def spec(f, x):
        eqx_ckpt.default_serialise_filter_spec(f, x.astype(jnp.bfloat16))

    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3)}, spec, overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, eqx_ckpt.tree_like(PATH))
    assert_same(restored, {"x": jnp.ones(3, jnp.bfloat16)})


def test_our_default_spec_restores_what_it_is_called_with():
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3)}, overwrite=True)

    def back(f, x):
        saved = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return eqx_ckpt.default_deserialise_filter_spec(f, saved).astype(x.dtype)

    skeleton = {"x": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, skeleton, back)
    assert_same(restored, {"x": jnp.ones(3, jnp.bfloat16)})


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3", "float8_e5m2", "bool"]
)
def test_equinox_default_reads_dtypes_that_its_own_files_cannot_hold(dtype):
    leaf = {"x": jnp.arange(4).astype(dtype), "n": np.arange(4).astype(dtype)}
    eqx_ckpt.tree_serialise_leaves(PATH, leaf, overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, structs(leaf), only_default_back)
    assert bits(restored["x"]) == bits(leaf["x"])


def test_our_specs_in_equinox():
    f = io.BytesIO()
    eqx.tree_serialise_leaves(f, tree(), eqx_ckpt.default_serialise_filter_spec)
    f.seek(0)
    spec = eqx_ckpt.default_deserialise_filter_spec
    restored = eqx.tree_deserialise_leaves(f, like(), spec)
    assert_same(restored, {**tree(), "a": [*tree()["a"][:2], "other"]})


def test_a_narrowed_leaf_is_not_narrowed_through_equinox_default():
    leaf = {"w": np.array([1 + 1e-12])}
    eqx_ckpt.tree_serialise_leaves(PATH, leaf, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'w'.*narrow"):
        eqx_ckpt.tree_deserialise_leaves(PATH, structs(leaf), only_default_back)
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, leaf, only_default_back), leaf)
    eqx_ckpt.tree_serialise_leaves(PATH, {"w": 2**40}, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'w'.*narrow"):
        eqx_ckpt.tree_deserialise_leaves(PATH, {"w": jnp.int32(0)}, only_default_back)


def test_bytes_need_the_spec_that_reads_them():
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3)}, framed, overwrite=True)
    for skeleton in ({"x": jnp.ones(3)}, eqx_ckpt.tree_like(PATH)):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="(?s)'x'.*bytes.*spec"):
            eqx_ckpt.tree_deserialise_leaves(PATH, skeleton)


def test_a_leaf_that_the_spec_skipped_is_missing():
    eqx_ckpt.tree_serialise_leaves(PATH, tree(), skip_jax, overwrite=True)
    found = eqx_ckpt.tree_match(PATH, like())
    assert sorted(found.problems) == ["a/0", "b/h"]
    assert "skipped" in str(found.leaves["a/0"].found)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="(?s)'a/0'.*'b/h'"):
        eqx_ckpt.tree_deserialise_leaves(PATH, like(), only_default_back)


@pytest.mark.parametrize(
    "spec",
    [
        {"a": only_default},
        {"a": [only_default] * 2, "b": only_default},
        [only_default, only_default],
    ],
)
def test_a_spec_that_is_no_prefix(spec, tmp_path):
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec` does not fit"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree(), spec)
    assert list(tmp_path.iterdir()) == []
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree())
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec` does not fit"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like(), spec)


def test_a_spec_that_is_no_function(tmp_path):
    with pytest.raises(TypeError, match=r"`filter_spec` has 5 at `\['b'\]`"):
        eqx_ckpt.tree_serialise_leaves(tmp_path, tree(), {"a": only_default, "b": 5})


def test_an_error_of_the_spec_names_the_leaf():
    def broken(f, x):
        raise KeyError("mine")

    leaf = {"x": jnp.ones(3)}
    with pytest.raises(KeyError, match="mine") as error:
        eqx_ckpt.tree_serialise_leaves(PATH, leaf, broken, overwrite=True)
    assert "'x'" in error.value.__notes__[0]
    eqx_ckpt.tree_serialise_leaves(PATH, leaf, overwrite=True)
    with pytest.raises(KeyError, match="mine") as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, leaf, broken)
    assert "'x'" in error.value.__notes__[0]


@pytest.mark.parametrize("wrong", [jnp.ones(4), jnp.ones(3, int), np.ones(3), None])
def test_a_spec_that_returns_another_leaf(wrong):
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3)}, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec` returned.*'x'"):
        eqx_ckpt.tree_deserialise_leaves(PATH, {"x": jnp.ones(3)}, lambda f, x: wrong)


def test_a_spec_that_saves_twice():
    def twice(f, x):
        eqx_ckpt.default_serialise_filter_spec(f, x)
        f.write(b"more")

    with pytest.raises(ValueError, match="'x' more than once"):
        eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3)}, twice, overwrite=True)


def test_a_spec_may_skip_what_cannot_be_saved():
    leaves = {"x": jnp.ones(3), "o": np.array([None]), "r": jax.new_ref(jnp.ones(2))}

    def spec(f, x):
        if f.name == "x":
            eqx_ckpt.default_serialise_filter_spec(f, x)

    eqx_ckpt.tree_serialise_leaves(PATH, leaves, spec, overwrite=True)
    assert list(eqx_ckpt.inspect.read_manifest(PATH).leaves) == ["x"]


def test_is_leaf_and_a_spec_for_whole_layers(getkey):
    """As in Equinox, a node can be a leaf that a spec saves in its own way."""

    def is_linear(x):
        return isinstance(x, eqx.nn.Linear)

    def save(f, x):
        if is_linear(x):
            np.save(f, x.weight)
        else:
            eqx.default_serialise_filter_spec(f, x)

    def load(f, x):
        if is_linear(x):
            return eqx.tree_at(lambda layer: layer.weight, x, jnp.asarray(np.load(f)))
        return eqx.default_deserialise_filter_spec(f, x)

    model = [eqx.nn.Linear(2, 3, use_bias=False, key=getkey()), jnp.ones(2)]
    other = [eqx.nn.Linear(2, 3, use_bias=False, key=getkey()), jnp.zeros(2)]
    eqx_ckpt.tree_serialise_leaves(PATH, model, save, is_linear, overwrite=True)
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, other, load, is_linear), model)


def test_match_does_not_know_what_a_spec_does():
    def spec(f, x):
        if f.name == "text":
            return f.read().decode()
        if f.name in ("kept", "new"):
            return x
        return eqx_ckpt.default_deserialise_filter_spec(f, x)

    def write(f, x):
        if f.name == "text":
            f.write(x.encode())
        else:
            eqx_ckpt.default_serialise_filter_spec(f, x)

    saved = {"text": "old", "kept": np.ones(3), "w": np.ones(3), "act": len, "abs": abs}
    eqx_ckpt.tree_serialise_leaves("memory://custom", saved, write)
    everywhere = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
    kept = jax.device_put(jnp.zeros(4), everywhere)
    like = {**saved, "text": "", "kept": kept, "new": 1.0, "act": max}
    found = eqx_ckpt.tree_match("memory://custom", like, spec)
    expected = dict.fromkeys(["text", "kept", "w", "new"], "custom")
    expected |= {"act": "changed", "abs": "same"}
    assert {name: leaf.status for name, leaf in found.leaves.items()} == expected
    assert found.ok
    assert "'w': left to its `filter_spec`: NumPy float64[3] in `like`" in str(found)
    restored = eqx_ckpt.tree_deserialise_leaves("memory://custom", like, spec)
    # It is not read, so its sharding need not fit what is saved.
    assert restored["kept"] is kept
    assert restored["text"] == "old"


def test_a_spec_returns_a_leaf_like_that_in_like_where_nothing_is_saved():
    eqx_ckpt.tree_serialise_leaves("memory://custom", {}, overwrite=True)
    like = {"x": jnp.zeros(3)}
    for restore in (eqx_ckpt.tree_deserialise_leaves, eqx_ckpt.tree_match):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec` ret.*'x'"):
            restore("memory://custom", like, lambda f, x: jnp.zeros(7))
