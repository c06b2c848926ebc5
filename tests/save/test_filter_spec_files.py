"""What a `filter_spec` reads from `f`: the leaf as an `.npy` file, of every dtype."""

import io
import pathlib

import equinox as eqx
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import eqx_ckpt
from faults.workloads import small_chunks
from helpers import assert_same


PATH = "memory://spec_files"
# `np.save` writes these as voids, of which a reader has to know more.
OF_JAX = [
    np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and "info" not in name and "complex" not in name
]
OF_NUMPY = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def of_numpy(draw):
    """Arrays of any bits, so that there are NaNs of all kinds."""
    shape, dtype = draw(SHAPES), draw(OF_NUMPY)
    raw = draw(hnp.arrays(np.uint8, (*shape, dtype.itemsize)))
    return (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


@st.composite
def of_jax(draw):
    few = hnp.arrays(np.int8, draw(SHAPES), elements=st.integers(0, 1))
    return draw(few).astype(draw(st.sampled_from(OF_JAX)))


def default(f, x):
    eqx.default_serialise_filter_spec(f, x)


def default_back(f, x):
    return eqx.default_deserialise_filter_spec(f, x)


@settings(max_examples=100)
@given(of_numpy() | of_jax(), st.sampled_from("CFT"))
def test_an_array_of_any_dtype_both_ways(array, order):
    tree = {"x": array.T if order == "T" else np.asarray(array, order=order)}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    by_us = eqx_ckpt.inspect.read_manifest(PATH).leaves
    for spec in (default, lambda f, x: np.save(f, x)):
        eqx_ckpt.tree_serialise_leaves(PATH, tree, spec, overwrite=True)
        assert eqx_ckpt.inspect.read_manifest(PATH).leaves == by_us
    for spec in (default_back, lambda f, x: np.load(f)):
        assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, tree, spec), tree)


@settings(max_examples=40)
@given(of_numpy())
def test_the_file_is_what_numpy_writes(array):
    expected, found = io.BytesIO(), []
    np.save(expected, array)
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": array}, overwrite=True)
    spec = lambda f, x: found.append(f.read())  # noqa: E731
    eqx_ckpt.tree_deserialise_leaves(PATH, {"x": None}, spec, lambda x: x is None)
    assert found == [expected.getvalue()]


@settings(max_examples=40)
@given(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
)
def test_a_number_both_ways(value):
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": value}, default, overwrite=True)
    (record,) = eqx_ckpt.inspect.read_manifest(PATH).leaves.values()
    assert record.kind == type(value).__name__
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, {"x": value})
    assert_same(restored, {"x": value})
    if not isinstance(value, int) or -(2**63) <= value < 2**64:
        restored = eqx_ckpt.tree_deserialise_leaves(PATH, {"x": value}, default_back)
        assert_same(restored, {"x": value})


@pytest.mark.parametrize("damage", ["flip", "unlink"])
@pytest.mark.parametrize("name", ["array", "swapped", "bytes"])
@pytest.mark.parametrize("file", ["c.0", "c.1"])
def test_a_spec_never_sees_damage(tmp_path: pathlib.Path, name, file, damage):
    """Whether it reads `f` or calls a default, and whatever it then makes of it."""
    tree = {
        "array": jnp.arange(8.0),
        "bytes": bytes(range(32)),
        "swapped": np.arange(8, dtype=">f4"),
    }

    def save(f, x):
        f.write(x) if isinstance(x, bytes) else default(f, x)

    path = tmp_path / "new"
    with small_chunks(16):
        eqx_ckpt.tree_serialise_leaves(path, tree, save)
    chunk = path / name / file
    data = bytearray(chunk.read_bytes())
    if damage == "unlink":
        chunk.unlink()
    else:
        data[3] ^= 1
        chunk.write_bytes(data)
    seen = []
    readers = [lambda f, x: seen.append(f.read())]
    if name != "bytes":
        readers += [lambda f, x: seen.append(np.load(f))]
        readers += [lambda f, x: seen.append(default_back(f, x))]
    for read in readers:
        spec = dict.fromkeys(tree, lambda f, x: x) | {name: read}
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=repr(name)):
            eqx_ckpt.tree_deserialise_leaves(path, tree, spec)
    assert not seen
