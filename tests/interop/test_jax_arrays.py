"""Arrays that JAX's own serialization wrote, as Levanter uses it."""

import json
import os

import equinox as eqx
import jax.numpy as jnp
import pytest
from jax.experimental.array_serialization import serialization

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


TREE = {
    "a": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)},
    "layers": [jnp.zeros(()), jnp.ones(2, jnp.int32)],
}
ARRAYS = {
    "a/w": TREE["a"]["w"],
    "a/b": TREE["a"]["b"],
    "layers/0": TREE["layers"][0],
    "layers/1": TREE["layers"][1],
}


def plain(root, name):
    path = str(root / name)
    return serialization.get_tensorstore_spec(path, ocdbt=False)


def zarr3(root, name):
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(root / name)},
    }


def levanter(root, name):
    base = {"driver": "file", "path": str(root)}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": name},
    }


def save(root, spec):
    manager = serialization.GlobalAsyncCheckpointManager()
    specs = [spec(root, name) for name in ARRAYS]
    manager.serialize([*ARRAYS.values()], specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()


@pytest.mark.parametrize("spec", [plain, zarr3, levanter])
def test_what_jax_wrote(tmp_path, spec):
    save(tmp_path, spec)
    source = interop.open_jax_arrays(tmp_path)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)
    part = eqx_ckpt.tree_deserialise_leaves(source, TREE["a"], prefix="a")
    assert_same(part, TREE["a"])
    eqx_ckpt.inspect.verify(source)
    (tmp_path / "metadata.json").write_text(json.dumps({"step": 3}))
    assert interop.open_jax_arrays(tmp_path).manifest.metadata == {"step": 3}
    with pytest.raises(eqx_ckpt.CheckpointError, match="need no `like`"):
        interop.open_jax_arrays(tmp_path, TREE)


def test_named_arrays_to_a_file_without_names(tmp_path):
    save(tmp_path / "arrays", levanter)
    interop.convert(tmp_path / "arrays", tmp_path / "a.eqx", like=TREE)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "a.eqx", TREE), TREE)


@pytest.mark.parametrize("spec", [plain, zarr3])
def test_a_step_of_levanter_with_folders_is_recognised(tmp_path, spec):
    place = tmp_path / "step-3"
    save(place, spec)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        interop.open_source(place)
    metadata = {"step": 3, "timestamp": "2024-05-01T12:00:00"}
    (place / "metadata.json").write_text(json.dumps(metadata))
    source = interop.open_source(place)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)
    assert source.manifest.metadata == metadata
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=r"jax_arrays\('"):
        eqx_ckpt.tree_like(place)


def test_metadata_of_levanter_without_arrays(tmp_path):
    metadata = {"step": 3, "timestamp": "2024-05-01T12:00:00"}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="No committed"):
        interop.open_source(tmp_path)


@pytest.fixture
def numbered(tmp_path):
    pytest.importorskip("flatbuffers")
    from jax.experimental.array_serialization import pytree_serialization

    pytree_serialization.save({**TREE, "none": None}, tmp_path / "tree")
    return tmp_path / "tree"


def test_a_tree_whose_leaves_are_numbered(numbered):
    like = {**TREE, "none": None}
    source = interop.open_jax_arrays(numbered, like)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)
    with pytest.raises(eqx_ckpt.CheckpointError, match="pass the PyTree"):
        interop.open_jax_arrays(numbered)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="4 leaves, and .* has 5"):
        interop.open_jax_arrays(numbered, TREE)
    other = {**like, "layers": [jnp.zeros(()), jnp.ones(3, jnp.int32)]}
    with pytest.raises(
        eqx_ckpt.LeafMismatchError, match=r"`\['layers'\]\[1\]`: Array\(int32\[3\]\)"
    ):
        interop.open_jax_arrays(numbered, other)


def test_numbered_arrays_to_a_file_without_names(numbered, tmp_path):
    like = {**TREE, "none": None}
    interop.convert(numbered, tmp_path / "a.eqx", like=like)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "a.eqx", like), like)


def test_no_arrays(tmp_path):
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="no Zarr arrays"):
        interop.open_jax_arrays(tmp_path)


def write_metadata(folder, driver, shape, chunk):
    """The metadata of an array, and no chunk of it."""
    folder.mkdir(parents=True)
    if driver == "zarr":
        text = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": "<f4"}
        text |= {"compressor": None, "fill_value": 0, "order": "C", "filters": None}
        (folder / ".zarray").write_text(json.dumps(text))
        return
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    text = {"zarr_format": 3, "node_type": "array", "shape": shape, "fill_value": 0.0}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    text |= {"data_type": "float32", "chunk_grid": grid, "codecs": codecs}
    text |= {"chunk_key_encoding": {"name": "default"}}
    (folder / "zarr.json").write_text(json.dumps(text))


@pytest.mark.parametrize("chunk", [2**48, 2**20, 1])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_an_array_of_which_nothing_is_there(tmp_path, driver, chunk):
    """TensorStore would end the process, as the memory is short."""
    write_metadata(tmp_path / "w", driver, [2**48], [chunk])
    (tmp_path / "w" / ("0" if driver == "zarr" else "c.0")).write_bytes(bytes(4096))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w': its (chunk|shape)"):
        interop.open_jax_arrays(tmp_path)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_a_chunk_and_an_array_that_do_not_fit_together(tmp_path, driver):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = memory // 4 * 3 // 4
    write_metadata(tmp_path / "w", driver, [size], [size])
    source = interop.open_jax_arrays(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointError, match="'w' cannot be read at once"):
        list(eqx_ckpt.inspect.iter_leaves(source))
