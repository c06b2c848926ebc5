"""Restoring into code that has changed: casts, kinds, missing, unexpected leaves."""

import itertools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import casting_word, STORED, VIEWED


PATH = "memory://changing"


def restored(tree: Any, like: Any, **how: Any) -> Any:
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": tree}, overwrite=True)
    assert eqx_ckpt.tree_match(PATH, {"x": like}, **how).ok
    return eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like}, **how)["x"]


def refused(tree: Any, like: Any, **how: Any) -> str:
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": tree}, overwrite=True)
    assert not eqx_ckpt.tree_match(PATH, {"x": like}, **how).ok
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like}, **how)
    return str(error.value)


KINDS = ["bool", "uint", "int", "float", "complex"]
WORDS = ["no", "safe", "same_kind", "unsafe"]
B, F, I = jnp.bfloat16, np.float32, np.int32  # noqa: E741


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (B, F, "safe"),
        (F, B, "same_kind"),
        (np.float16, B, "same_kind"),
        (B, np.float16, "same_kind"),
        (F, I, "unsafe"),
        (I, F, "same_kind"),
        (np.int8, F, "safe"),
        (np.bool_, I, "safe"),
        (np.complex64, F, "unsafe"),
        (np.complex64, B, "unsafe"),
        (jnp.float8_e4m3fn, B, "safe"),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, "same_kind"),
        (F, jnp.int4, "unsafe"),
        (np.int8, jnp.float8_e4m3fn, "same_kind"),
        (np.int8, B, "safe"),
    ],
)
def test_casting(old, new, word):
    values = jnp.array([0, 1, 1], old)
    for array in (values, np.asarray(values)):
        for like in (jnp.zeros(3, new), jax.ShapeDtypeStruct((3,), new)):
            for weaker in WORDS[: WORDS.index(word)]:
                error = refused(array, like, casting=weaker)
                assert f"`casting={word!r}` allows it" in error
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
                found = restored(array, like, casting=word)
            assert found.dtype == new
            assert (np.asarray(found) == np.asarray(values.real.astype(new))).all()
            is_jax = isinstance(like, jax.Array) or isinstance(array, jax.Array)
            assert isinstance(found, jax.Array) is is_jax


# Some are newer than the oldest `ml_dtypes` that works.
NAMES = [x for x in sorted(STORED | VIEWED) if hasattr(np, x) or hasattr(ml_dtypes, x)]


def test_a_word_means_what_it_means_to_numpy():
    names = [name for name in NAMES if hasattr(np, name)]
    assert len(names) == 14
    for old, new in itertools.product(names, names):
        allowed = casting_word(old, new)
        for i, word in enumerate(WORDS):
            is_allowed = allowed is not None and WORDS.index(allowed) <= i
            assert is_allowed == np.can_cast(old, new, word), (old, new, word)


def test_a_safe_cast_keeps_all_values():
    """Also of and to dtypes about which NumPy is wrong, as it knows only their size."""
    count = 0
    for old, new in itertools.product(NAMES, NAMES):
        if casting_word(old, new) == "safe" and np.dtype(old).itemsize == 1:
            count += 1
            bits = (
                8 if old == "bool" or "int" not in old else int(re.sub(r"\D", "", old))
            )
            values = np.arange(-(2 ** (bits - 1)), 2**bits).astype(old)
            cast = values.astype(new).astype(complex)
            same = np.array_equal(cast, values.astype(complex), equal_nan=True)
            assert same, (old, new)
    assert count > 150


def test_no_kind_becomes_a_smaller_one_unless_unsafe():
    smaller = [("float", "int"), ("complex", "float"), ("int", "uint"), ("int", "bool")]
    for old, new in itertools.product(NAMES, NAMES):
        kinds = [next(k for k in KINDS if k in name) for name in (old, new)]
        if tuple(kinds) in smaller:
            assert casting_word(old, new) in ("unsafe", None), (old, new)


def test_what_numpy_cannot_cast_at_all():
    old = jnp.ones(2, jnp.float8_e4m3fn)
    error = refused(old, jnp.ones(2, jnp.float8_e8m0fnu), casting="unsafe")
    assert "' allows it" not in error


def test_casts_are_listed():
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(3, B)}, overwrite=True)
    found = eqx_ckpt.tree_match(PATH, {"x": jnp.ones(3)}, casting="safe")
    assert found.leaves["x"].status == "cast"
    assert "'x': cast: float32[3] in `like`, bfloat16[3]" in str(found)


def test_casting_onto_a_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P("x", "y"))
    old = jax.device_put(jnp.arange(32, dtype=B).reshape(8, 4), sharding)
    like = jax.ShapeDtypeStruct((8, 4), F, sharding=NamedSharding(mesh, P("y")))
    new = restored(old, like, casting="safe")
    assert new.sharding == like.sharding
    assert new.dtype == F
    assert (np.asarray(new) == np.arange(32).reshape(8, 4)).all()


def test_a_host_copy_goes_back_to_devices():
    tree = {"w": jnp.arange(6.0, dtype=B).reshape(2, 3), "n": jnp.arange(3)}
    found = restored(jax.device_get(tree), tree)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found))
    assert (found["w"] == tree["w"]).all()
    back = restored(tree, jax.device_get(tree))
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(back))


def test_what_jax_cannot_hold_is_an_error():
    error = refused(np.ones(3), jnp.ones(3))
    assert "float64[3] in the checkpoint" in error
    with jax.enable_x64(True):
        like = jnp.ones(3)
    assert like.dtype == np.float64
    assert "x64" in refused(np.ones(3), like)
    assert restored(np.ones(3), jnp.ones(3), casting="same_kind").dtype == F


def test_python_numbers():
    assert type(restored(F(0.5), 0.0, casting="safe")) is float
    assert type(restored(jnp.array(7), 0, casting="safe")) is int
    assert restored(7, 0.0, casting="safe") == 7.0
    assert restored(7, jnp.array(0), casting="same_kind") == jnp.array(7)
    assert restored(True, 0, casting="safe") == 1
    assert "'x'" in refused(F(0.5), 0.0)
    assert "'x': different kind" in refused(np.zeros(3), 0.0, casting="unsafe")
    assert "'x': different kind" in refused(0.0, np.zeros(3), casting="unsafe")
    assert "'x': different shape" in refused(np.zeros(2), np.zeros(3))
    assert "'x'" in refused(1.5, 1)
    assert "'x'" in refused(1.5, 1, casting="same_kind")
    assert restored(1.5, 1, casting="unsafe") == 1
    error = refused(2**70, np.int64(0), casting="same_kind")
    assert "'x': different kind: NumPy scalar int64[] (too small) in `like`" in error
    mesh = jax.make_mesh((8,), ("x",))
    like = jax.ShapeDtypeStruct((), F, sharding=NamedSharding(mesh, P()))
    assert "jax.eval_shape" in refused(3, like, casting="unsafe")
    like = jax.device_put(jnp.zeros(()), like.sharding)
    assert restored(3, like, casting="same_kind").sharding == like.sharding


def test_keys_are_not_cast():
    key = jax.random.key(0)
    assert "PRNG key" in refused(key, jax.random.key_data(key), casting="unsafe")
    other = jax.random.key(0, impl="rbg")
    assert "'rbg'" in refused(key, other, casting="unsafe")


def test_a_changed_number_is_told():
    eqx_ckpt.tree_serialise_leaves(PATH, {"p": 0.1, "q": 0.1}, overwrite=True)
    found = eqx_ckpt.tree_match(PATH, {"p": 0.5, "q": 0.1})
    assert found.ok
    assert found.leaves["p"].status == "value"
    assert found.leaves["q"].status == "same"
    assert "- 'p': different value: 0.5 in `like`, 0.1 in the checkpoint." in str(found)


def test_missing_leaves_are_kept():
    eqx_ckpt.tree_serialise_leaves(PATH, {"base": jnp.ones(3)}, overwrite=True)
    like = {"base": jnp.zeros(3), "adapter": {"a": jnp.full(2, 7.0), "p": 0.5}}
    found = eqx_ckpt.tree_match(PATH, like, missing="keep")
    assert found.leaves["adapter/a"].status == "kept"
    assert "'adapter/a': float32[2] kept from `like`" in str(found)
    tree = eqx_ckpt.tree_deserialise_leaves(PATH, like, missing="keep")
    assert tree["adapter"]["a"] is like["adapter"]["a"]
    assert (tree["base"] == 1).all()
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(
            PATH, like, missing=lambda name: "keep" if name[-1] == "a" else "raise"
        )
    assert "'adapter/p'" in str(error.value)
    assert "'adapter/a'" not in str(error.value)
    assert "missing='keep'" in str(error.value)


def test_a_skeleton_has_nothing_to_keep():
    eqx_ckpt.tree_serialise_leaves(PATH, {"base": jnp.ones(3)}, overwrite=True)
    like = {"base": jnp.zeros(3), "a": jax.ShapeDtypeStruct((2,), F)}
    assert (
        eqx_ckpt.tree_match(PATH, like, missing="keep").leaves["a"].status == "abstract"
    )
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="no value to keep"):
        eqx_ckpt.tree_deserialise_leaves(PATH, like, missing="keep")


def test_leaves_that_differ_are_kept(tmp_path):
    tree = {"body": jnp.ones(3), "head": jnp.ones((3, 4)), "scale": np.ones(2)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    (tmp_path / "c/head/c.0.0").unlink()  # It is not read.
    like = {"body": jnp.zeros(3), "head": jnp.zeros((3, 5)), "scale": 1.0}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="mismatched='keep'"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like)
    found = eqx_ckpt.tree_match(tmp_path / "c", like, mismatched="keep")
    assert found.ok
    assert found.nbytes == 12
    kept = "- 'head': float32[3, 5] kept from `like`, float32[3, 4] in the checkpoint."
    assert kept in str(found).splitlines()
    new = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like, mismatched="keep")
    assert (new["body"] == 1).all()
    assert new["head"] is like["head"]
    assert new["scale"] == 1.0
    skeleton = like | {"head": jax.ShapeDtypeStruct((3, 5), F)}
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", skeleton, mismatched="keep")
    text = "float32[3, 5] without a value in `like`, float32[3, 4] in the checkpoint."
    assert text in str(error.value)
    assert "restore_or_init" in str(error.value)


def test_what_a_transform_makes_of_another_shape_is_not_computed(tmp_path):
    tree = {"body": jnp.ones(3), "head": jnp.ones((3, 4))}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    (tmp_path / "c/head/c.0.0").unlink()
    like = {"body": jnp.zeros(3), "new": jnp.zeros((5, 3))}
    how = {
        "transform": lambda old: {"body": old["body"], "new": old["head"].T * 2},
        "mismatched": "keep",
    }
    found = eqx_ckpt.tree_match(tmp_path / "c", like, **how)
    assert "kept from `like`, float32[4, 3] that `transform` makes of 'head'" in str(
        found
    )
    new = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like, **how)
    assert new["new"] is like["new"]
    assert (new["body"] == 1).all()


def test_what_jax_cannot_compute_is_not_kept():
    eqx_ckpt.tree_serialise_leaves(PATH, {"w": np.ones(3)}, overwrite=True)
    how = {"transform": lambda old: {"w": old["w"] + 1}, "casting": "same_kind"}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="JAX would narrow"):
        eqx_ckpt.tree_deserialise_leaves(
            PATH, {"w": jnp.zeros(3)}, mismatched="keep", **how
        )


def test_unexpected_leaves_are_ignored(tmp_path):
    tree = {"body": jnp.ones(3), "head": jnp.ones(3), "foot": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    (tmp_path / "c/head/c.0").unlink()  # It is not read.
    like = {"body": jnp.zeros(3)}
    found = eqx_ckpt.tree_match(tmp_path / "c", like, unexpected="ignore")
    assert found.leaves["head"].status == "ignored"
    assert found.nbytes == 12
    new = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")
    assert (new["body"] == 1).all()
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(
            tmp_path / "c",
            like,
            unexpected=lambda name: "ignore" if name == "head" else "raise",
        )
    assert "'foot'" in str(error.value)
    assert "'head'" not in str(error.value)


def test_wrong_words():
    eqx_ckpt.tree_serialise_leaves(PATH, {"a": 1, "b": 2}, overwrite=True)
    for how in (
        {"unexpected": lambda name: "keep"},
        {"missing": lambda name: "ignore"},
        {"mismatched": lambda name: "ignore"},
    ):
        with pytest.raises(ValueError, match="one of"):
            eqx_ckpt.tree_match(PATH, {"a": jnp.ones(1), "c": 1}, **how)


def test_a_manager_passes_it_on(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.ones(3, B), "old": 1}).result()
        like = {"w": jnp.zeros(3), "new": 2}
        tree = manager.restore(
            like, casting="safe", missing="keep", unexpected="ignore"
        )
    assert tree["w"].dtype == F
    assert tree["new"] == 2
