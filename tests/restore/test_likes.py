"""What becomes of every kind of leaf for every kind of `like`."""

import enum
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt


PATH = "memory://likes"
BF16 = jnp.bfloat16
F32 = jnp.float32


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 5


class Step(int):
    pass


def restored(leaf: Any, like: Any, **how: Any) -> Any:
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": leaf}, overwrite=True)
    assert eqx_ckpt.tree_match(PATH, {"x": like}, **how).ok
    return eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like}, **how)["x"]


def refused(leaf: Any, like: Any, **how: Any) -> str:
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": leaf}, overwrite=True)
    assert not eqx_ckpt.tree_match(PATH, {"x": like}, **how).ok
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like}, **how)
    return str(error.value)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**70, -(2**63) - 1])
def test_an_integer_never_wraps_because_it_is_too_large(value):
    for like in (np.int64(0), np.zeros((), np.int8), jnp.int32(0)):
        for casting in ("no", "safe", "same_kind", "unsafe"):
            refused(value, like, casting=casting)
    holds = value in (2**63, 2**64 - 1)
    if holds:
        assert restored(value, np.uint64(0), casting="unsafe") == value
    for dtype in (BF16, jnp.float8_e5m2, np.float64):
        found = restored(value, np.zeros((), dtype), casting="same_kind")
        assert found == np.float64(value).astype(dtype) or np.isnan(found)
    assert restored(value, 0.0, casting="safe") == float(value)
    assert restored(value, 0) == value
    assert restored(np.uint64(2**63), 0, casting="same_kind") == 2**63


def test_unsafe_casts_are_those_of_numpy():
    assert restored(np.int64(5), False, casting="unsafe") is True
    assert restored(5, False, casting="unsafe") is True
    date = np.datetime64("2020-01-01", "ns")
    assert restored(date, 0, casting="unsafe") == date.astype("int64")
    with pytest.warns(np.exceptions.ComplexWarning):
        assert restored(np.complex64(3 + 1j), 0, casting="unsafe") == 3
    with pytest.warns(np.exceptions.ComplexWarning):
        assert restored(3 + 1j, 0.0, casting="unsafe") == 3.0


def test_only_a_number_becomes_a_member_of_an_enum():
    assert restored(5, Colour.RED) is Colour.BLUE
    assert "`Colour` (which is made from a Python number only)" in refused(
        np.int64(5), Colour.RED, casting="unsafe"
    )
    assert "'x'" in refused(jnp.array(5), Step(0), casting="unsafe")


@pytest.mark.parametrize("wide", [np.float64, np.int64, np.uint64, np.complex128])
def test_a_skeleton_narrows_only_while_x64_is_off(wide):
    array = np.arange(3).astype(wide)
    narrow = jax.dtypes.canonicalize_dtype(wide)
    like = jax.ShapeDtypeStruct((3,), narrow)
    assert restored(array, like).dtype == wide
    cast = restored(array, like, casting="same_kind")
    assert type(cast) is np.ndarray
    assert cast.dtype == narrow
    assert eqx_ckpt.tree_match(PATH, {"x": like}, casting="same_kind").leaves[
        "x"
    ].status == ("cast")
    with jax.enable_x64(True):
        assert "different dtype" in refused(array, like)
        assert restored(array, like, casting="same_kind").dtype == narrow


@pytest.mark.parametrize("wide", [np.float64, np.int64, np.uint64, np.complex128])
def test_a_cast_in_a_transform_is_never_left_out(wide):
    array = np.arange(3).astype(wide)
    narrow = jax.dtypes.canonicalize_dtype(wide)

    def cast(old: Any) -> Any:
        return {"x": old["x"].astype(narrow)}

    for like in (jax.ShapeDtypeStruct((3,), narrow), np.zeros(3, narrow), array):
        error = refused(array, like, transform=cast)
        assert "which JAX would narrow: use `jax.enable_x64(True)`" in error
    like = jax.ShapeDtypeStruct((3,), narrow)
    with jax.enable_x64(True):
        assert restored(array, like, transform=cast).dtype == narrow
    unchanged = restored(array, np.zeros(3, wide), transform=lambda old: old)
    assert unchanged.dtype == wide


@pytest.mark.parametrize("dtype", [">f4", "M8[ns]"])
def test_a_transform_names_the_leaf_of_which_jax_cannot_compute(dtype):
    array = np.arange(3).astype(dtype)
    like = array[:2]
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": array}, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'x' is computed, and has"):
        eqx_ckpt.tree_match(
            PATH, {"x": like}, transform=lambda old: {"x": old["x"][::2]}
        )
    assert restored(array, array, transform=lambda old: old).dtype == array.dtype


def test_a_struct_with_a_sharding_is_a_jax_array():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    array = np.arange(8, dtype=np.float32)
    like = jax.ShapeDtypeStruct((8,), F32, sharding=sharding)
    for transform in (None, lambda old: old):
        found = restored(array, like, transform=transform)
        assert isinstance(found, jax.Array)
        assert found.sharding == sharding
        assert (np.asarray(found) == array).all()
    for leaf in (array.astype(np.float64), np.arange(8)):
        assert "different dtype" in refused(leaf, like)
    assert restored(array.astype(np.float64), like, casting="same_kind").dtype == F32
    assert "does not divide" in refused(
        array[:3], jax.ShapeDtypeStruct((3,), F32, sharding=sharding)
    )
    # No sharding: as it was saved, wherever JAX arrays go.
    like = jax.ShapeDtypeStruct((8,), F32)
    assert type(restored(array, like, sharding=sharding)) is np.ndarray


def test_what_equinox_reads_goes_where_it_is_to_go():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    tree = {"x": jnp.arange(8.0), "n": np.arange(8.0, dtype=np.float32)}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)

    def spec(f: Any, x: Any) -> Any:
        return eqx.default_deserialise_filter_spec(f, x)

    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    for place, expected in ((jax.devices()[3], device), (sharding, sharding)):
        found = eqx_ckpt.tree_deserialise_leaves(PATH, tree, spec, sharding=place)
        assert found["x"].sharding == expected
        assert type(found["n"]) is np.ndarray
    like = {"x": jax.device_put(tree["x"], sharding), "n": jnp.zeros(8)}
    found = eqx_ckpt.tree_deserialise_leaves(PATH, like, spec)
    assert found["x"].sharding == sharding
    assert isinstance(found["n"], jax.Array)
    kept = eqx_ckpt.tree_deserialise_leaves(
        PATH, tree, lambda f, x: x, sharding=sharding
    )
    assert kept["x"] is tree["x"]


@pytest.mark.parametrize("like", [np.zeros(3).view(np.memmap), np.longlong(0)])
def test_other_names_of_numpy_through_any_spec(like):
    leaf = np.arange(3.0) if like.ndim else np.int64(3)
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": leaf}, overwrite=True)
    for default in (
        eqx.default_deserialise_filter_spec,
        eqx_ckpt.default_deserialise_filter_spec,
    ):
        for spec in (default, ft.partial(default)):
            found = eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like}, spec)["x"]
            assert found.dtype == like.dtype
            assert (found == leaf).all()


def test_a_deleted_array_is_not_kept():
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": jnp.ones(2)}, overwrite=True)
    donated = jnp.ones(3)
    donated.delete()
    like = {"x": jnp.ones(2), "new": donated}
    assert (
        eqx_ckpt.tree_match(PATH, like, missing="keep").leaves["new"].status
        == "abstract"
    )
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="donated"):
        eqx_ckpt.tree_deserialise_leaves(PATH, like, missing="keep")


def test_a_partition_spec_is_no_sharding():
    error = refused(jnp.ones(8), jnp.zeros(8), sharding=lambda name, struct: P("x"))
    assert "return `NamedSharding(mesh, " in error
