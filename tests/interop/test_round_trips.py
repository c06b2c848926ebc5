"""Trees of any structure and any bits, through files of other formats.

Each format is written by its library and read by this package, written by this package
and read by its library, and damaged.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import eqx_ckpt
from eqx_ckpt import interop

from .mutations import check, mutated


CKPT = "memory://interop"
DTYPES = [
    np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    + "float16 float32 float64".split()
]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]
OF_NUMPY = [np.dtype(name) for name in (">f4", ">i8", "M8[ns]", "m8[D]")]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Format(NamedTuple):
    """A format: its dtypes, and both ways, by its own library and by this package."""

    suffix: str
    dtypes: list[np.dtype]
    save: Callable[[Path, Any], object]
    load: Callable[[Path, Any], dict[str, np.ndarray]]
    open: Callable[[Path, Any], eqx_ckpt.interop.Source]
    write: Callable[[Path, Any], object]


def named(tree: Any, separator: str) -> dict[str, np.ndarray]:
    """The leaves of a tree, each under its keys."""
    return {
        jtu.keystr(path, simple=True, separator=separator): leaf
        for path, leaf in jtu.tree_leaves_with_path(tree)
    }


def flax_load(path: Path, _: Any) -> dict[str, np.ndarray]:
    library = pytest.importorskip("flax.serialization")
    return named(library.msgpack_restore(path.read_bytes()), "/")


def flax_save(path: Path, tree: Any) -> None:
    library = pytest.importorskip("flax.serialization")
    path.write_bytes(library.to_bytes(tree))


def safetensors_load(path: Path, _: Any) -> dict[str, np.ndarray]:
    library = pytest.importorskip("safetensors.numpy")
    found = library.load_file(path)
    return {name.replace(".", "/"): array for name, array in found.items()}


def safetensors_save(path: Path, tree: Any) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(named(tree, "."), path)


def npz_load(path: Path, _: Any) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


FORMATS = {
    "safetensors": Format(
        "safetensors",
        DTYPES,
        safetensors_save,
        safetensors_load,
        lambda path, _: interop.open_safetensors(path),
        lambda path, _: interop.to_safetensors(CKPT, path, overwrite=True),
    ),
    "npz": Format(
        "npz",
        [*DTYPES, *COMPLEX, *OF_NUMPY],
        lambda path, tree: np.savez(path, **named(tree, "/")),
        npz_load,
        lambda path, _: interop.open_npz(path),
        lambda path, _: interop.to_npz(CKPT, path, overwrite=True),
    ),
    "eqx": Format(
        "eqx",
        [*DTYPES, *COMPLEX, *OF_NUMPY],
        eqx.tree_serialise_leaves,
        lambda path, like: named(eqx.tree_deserialise_leaves(path, like), "/"),
        interop.open_eqx,
        lambda path, like: interop.to_eqx(CKPT, path, like, overwrite=True),
    ),
    "flax": Format(
        "msgpack",
        [*DTYPES, *COMPLEX, BFLOAT16],
        flax_save,
        flax_load,
        lambda path, _: interop.open_flax(path),
        lambda path, _: interop.to_flax(CKPT, path, overwrite=True),
    ),
}


@st.composite
def arrays(draw: Any, dtypes: list[np.dtype]) -> np.ndarray:
    """Any bits, also NaNs with a payload; dates are not NaT."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    if dtype == np.bool_:
        data = data % 2
    return data.view(dtype).reshape(shape)


def trees(dtypes: list[np.dtype]) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries of arrays, dictionaries and lists."""
    keys = st.text("abZ_é-", min_size=1, max_size=3)

    def some(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, min_size=1, max_size=3)
        return lists | st.dictionaries(keys, inner, min_size=1, max_size=3)

    inner = st.recursive(arrays(dtypes), some, max_leaves=5)
    return st.dictionaries(keys, inner, min_size=1, max_size=3)


def assert_equal(found: dict[str, np.ndarray], tree: Any) -> None:
    expected = named(tree, "/")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        value = np.asarray(found[name])
        native = array.astype(array.dtype.newbyteorder("="))
        assert (value.dtype.newbyteorder("="), value.shape) == (
            native.dtype,
            array.shape,
        ), name
        value = value.astype(native.dtype)
        assert value.tobytes() == native.tobytes(), name


def content(source: eqx_ckpt.interop.Source) -> dict[str, np.ndarray]:
    return {
        "/".join(str(key) for _, key in record.path): value
        for _, record, value in eqx_ckpt.inspect.iter_leaves(source)
    }


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_library_writes_is_read(name, tmp_path_factory):
    form = FORMATS[name]
    path = tmp_path_factory.mktemp(name) / f"file.{form.suffix}"

    @settings(max_examples=30)
    @given(tree=trees(form.dtypes))
    def run(tree):
        form.save(path, tree)
        assert_equal(content(form.open(path, tree)), tree)

    run()


@pytest.mark.filterwarnings("ignore:.*does not keep")
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_a_library_reads(name, tmp_path_factory):
    form = FORMATS[name]
    path = tmp_path_factory.mktemp(name) / f"file.{form.suffix}"

    @settings(max_examples=20)
    @given(tree=trees(form.dtypes))
    def run(tree):
        eqx_ckpt.tree_serialise_leaves(CKPT, tree, overwrite=True)
        form.write(path, tree)
        assert_equal(form.load(path, tree), tree)
        assert_equal(content(form.open(path, tree)), tree)

    run()


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_a_typed_error_or_harmless(name, tmp_path_factory):
    form = FORMATS[name]
    path = tmp_path_factory.mktemp(name) / f"file.{form.suffix}"

    @settings(max_examples=60)
    @given(tree=trees(form.dtypes), seed=st.integers(0, 2**32))
    def run(tree, seed):
        form.save(path, tree)
        path.write_bytes(mutated(path.read_bytes(), random.Random(seed)))
        check(lambda: form.open(path, tree), path)

    run()
