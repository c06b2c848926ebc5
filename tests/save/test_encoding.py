"""What this package encodes is to the byte what TensorStore writes as Zarr."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt
from eqx_ckpt._format.dtype_names import DATA_TYPES, SIZES, STORED, VIEWED
from eqx_ckpt._format.leaf_record import dtype_from_tag, key_shape, tag_and_data_type
from faults.workloads import every_kind, small_chunks
from helpers import assert_same


def of_every_dtype():
    numbers = np.random.default_rng(0)
    for name in sorted(STORED):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        yield name, numbers.integers(0, 4, (5, 7)).astype(dtype)


def test_the_sizes_of_dtypes_are_those_of_numpy():
    for name in STORED:
        assert SIZES[name] == np.dtype(getattr(ml_dtypes, name, name)).itemsize
    known = {tag for tag in STORED | VIEWED if hasattr(ml_dtypes, tag)}
    for tag in known | {">f2", ">i4", ">u8", ">c16", "<M8[ns]"}:
        assert tag_and_data_type(dtype_from_tag(tag)) == (tag, DATA_TYPES[tag])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_shapes_of_keys_are_those_of_jax(impl):
    assert key_shape(impl) == jax.random.key_data(jax.random.key(0, impl=impl)).shape


def of_every_shape():
    numbers = np.random.default_rng(0)
    for shape in [(), (1,), (100,), (7, 9), (9, 1, 7), (1, 1, 50), (3, 0)]:
        array = numbers.standard_normal(shape).astype(np.float32)
        yield f"c{shape}", array
        yield f"f{shape}", np.asfortranarray(array)
        yield f"reversed{shape}", array[::-1] if shape else array


TREES = {
    "dtypes": lambda: dict(of_every_dtype()),
    "shapes": lambda: dict(of_every_shape()),
    "kinds": lambda: every_kind(1),
    "large": lambda: {"w": jnp.arange(2**18 + 3.0), "t": np.ones((900, 700)).T},
}


@pytest.mark.parametrize(
    ("tree", "limit"),
    [("dtypes", 2**6), ("shapes", 2**6), ("kinds", 2**5), ("large", 2**20)],
)
def test_the_bytes_are_those_of_tensorstore(tmp_path, tree, limit):
    tree = TREES[tree]()
    with small_chunks(limit):
        for layout in ("zarr", "ocdbt"):
            eqx_ckpt.tree_serialise_leaves(tmp_path / layout, tree, layout=layout)
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/ocdbt/"}
    database = ts.KvStore.open(spec).result()
    found = 0
    for name in eqx_ckpt.inspect.read_manifest(tmp_path / "zarr").leaves:
        for file in (tmp_path / "zarr" / name).glob("*"):
            theirs = file.read_bytes()
            ours = database.read(f"{name}/{file.name}").result().value
            if file.name == "zarr.json":
                theirs, ours = json.loads(theirs), json.loads(ours)
            assert ours == theirs, (name, file.name)
            found += 1
    assert found >= 2 * len(jax.tree.leaves(tree)) // 3
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "ocdbt", tree), tree)
