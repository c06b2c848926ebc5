"""Thousands of broken files: an error that names the place, or the right shapes."""

import contextlib
import json
import random
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import serialization

from eqx_ckpt import interop

from .mutations import check, mutated, retyped, retyped_json


pytestmark = pytest.mark.once


ARRAYS = {
    "a.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.0.b": np.ones(3, np.float16),
    "mask": np.array([True, False]),
    "n": np.array(3, np.int64),
}
TREE = {
    "a": [{"w": ARRAYS["a.0.w"], "b": ARRAYS["a.0.b"]}],
    "mask": ARRAYS["mask"],
    "n": 3,
    "x": 2.5,
}


JSON_OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "process_0", ".zarray")
MOST = 40


def eqx_file(path):
    with open(path, "wb") as f:
        f.write(b'{"width": 8}\n')
        eqx.tree_serialise_leaves(f, TREE)


def flax_file(path):
    serialization = pytest.importorskip("flax.serialization")
    path.write_bytes(serialization.to_bytes({**TREE, "c": 1j, "s": "hi"}))


def safetensors_file(path):
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(ARRAYS, path, {"format": "np"})


FILES = {
    "safetensors": (safetensors_file, interop.open_safetensors),
    "npz": (lambda path: np.savez(path, **ARRAYS), interop.open_npz),
    "compressed": (lambda path: np.savez_compressed(path, **ARRAYS), interop.open_npz),
    "eqx": (eqx_file, lambda path: interop.open_eqx(path, TREE)),
    "flax": (flax_file, interop.open_flax),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    write, open_file = FILES[name]
    suffix = ".npz" if name == "compressed" else f".{name}"
    path = tmp_path / f"broken{suffix}"
    write(path)
    data = path.read_bytes()
    assert check(lambda: open_file(path), path)
    rng = random.Random(name)
    refused = 0
    for _ in range(600):
        path.write_bytes(mutated(data, rng))
        refused += not check(lambda: open_file(path), path)
    assert refused > 200


@pytest.fixture
def jax_directory(tmp_path):
    root = tmp_path / "arrays"
    specs = [
        serialization.get_tensorstore_spec(str(root / name), ocdbt=False)
        for name in ("a/w", "b")
    ]
    manager = serialization.GlobalAsyncCheckpointManager()
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.ones(3)]
    manager.serialize(arrays, specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    (root / "metadata.json").write_text(json.dumps({"step": 3}))
    return root


def test_directories_of_jax(tmp_path, jax_directory):
    check_files(jax_directory, tmp_path / "broken", interop.open_jax_arrays)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("ocdbt", [False, True])
def test_directories_of_orbax(tmp_path, ocdbt):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=ocdbt)
    checkpointer.save(tmp_path / "orbax", TREE)
    check_files(tmp_path / "orbax", tmp_path / "broken", interop.open_orbax)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ["files", "zarr3", "database"])
def test_json_of_orbax_of_other_types(tmp_path, how):
    ocp = pytest.importorskip("orbax.checkpoint")
    options = {"use_ocdbt": how == "database", "use_zarr3": how == "zarr3"}
    tree = {"a": {"w": jnp.ones((2, 3))}, "l": [3], "key": jax.random.key(1)}
    ocp.PyTreeCheckpointer(**options).save(tmp_path / "orbax", tree)
    check_json(tmp_path / "orbax", tmp_path / "broken", interop.open_orbax)


def test_json_of_jax_of_other_types(tmp_path, jax_directory):
    check_json(jax_directory, tmp_path / "broken", interop.open_jax_arrays)


def test_json_of_numbered_arrays_of_other_types(tmp_path):
    pytest.importorskip("flatbuffers")
    from jax.experimental.array_serialization import pytree_serialization

    tree = {"w": jnp.ones(3), "none": None}
    pytree_serialization.save(tree, tmp_path / "tree")

    def open_directory(place):
        return interop.open_jax_arrays(place, tree)

    check_json(tmp_path / "tree", tmp_path / "broken", open_directory)


def check_json(good, broken, open_directory):
    """Each value of each file of JSON in turn."""
    shutil.copytree(good, broken)
    assert check(lambda: open_directory(broken), broken)
    rng = random.Random(0)
    count = 0
    for file in sorted(path for path in good.rglob("*") if path.is_file()):
        data = file.read_bytes()
        if file.suffix != ".json" and file.name not in JSON_OF_ORBAX:
            continue
        place = broken / file.relative_to(good)
        for changed in retyped_json(data, MOST, rng):
            place.write_bytes(changed)
            check(lambda: open_directory(broken), broken)
            count += 1
        place.write_bytes(data)
    assert count >= MOST


def test_the_header_of_safetensors_of_other_types(tmp_path):
    path = tmp_path / "broken.safetensors"
    safetensors_file(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for header in retyped_json(data[8:end], 200, random.Random(0)):
        length = len(header).to_bytes(8, "little")
        path.write_bytes(length + header + data[end:])
        check(lambda: interop.open_safetensors(path), path)


def test_the_index_of_safetensors_of_other_types(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_file(path)
    index = tmp_path / "broken.safetensors.index.json"
    weight_map = dict.fromkeys(ARRAYS, path.name)
    tree = {"metadata": {"total_size": 3}, "weight_map": weight_map}
    for changed in retyped_json(json.dumps(tree).encode(), 200, random.Random(0)):
        index.write_bytes(changed)
        check(lambda: interop.open_safetensors(index), tmp_path)


def test_msgpack_of_other_types(tmp_path, monkeypatch):
    library = pytest.importorskip("flax.serialization")
    msgpack = pytest.importorskip("msgpack")
    path = tmp_path / "broken.msgpack"
    # Arrays of more bytes are in several pieces.
    monkeypatch.setattr(library, "MAX_CHUNK_SIZE", 32)
    data = library.to_bytes({"a": np.ones(3), "big": np.ones(9), "c": 1j, "n": [3]})

    def packed(node):
        """A tree in which an extension is a dictionary, as msgpack."""
        if isinstance(node, dict) and node.keys() == {"code", "content"}:
            code = node["code"] if node["code"] in range(128) else 1
            return msgpack.ExtType(code, msgpack.packb(node["content"]))
        if isinstance(node, dict):
            return {key: packed(value) for key, value in node.items()}
        return [*map(packed, node)] if isinstance(node, list) else node

    def unpacked(code, data):
        return {"code": code, "content": msgpack.unpackb(data)}

    tree = msgpack.unpackb(data, ext_hook=unpacked)
    path.write_bytes(msgpack.packb(packed(tree)))
    assert check(lambda: interop.open_flax(path), path)
    for changed in random.Random(0).sample([*retyped(tree)], 300):
        # It has no halves of surrogate pairs.
        with contextlib.suppress(UnicodeEncodeError):
            path.write_bytes(msgpack.packb(packed(changed)))
        check(lambda: interop.open_flax(path), path)


def check_files(good, broken, open_directory):
    """Each file in turn, a few hundred times in all."""
    shutil.copytree(good, broken)
    assert check(lambda: open_directory(broken), broken)
    rng = random.Random(0)
    files = [path for path in sorted(good.rglob("*")) if path.is_file()]
    refused = 0
    for _ in range(max(1, 200 // len(files))):
        for file in files:
            data = file.read_bytes()
            place = broken / file.relative_to(good)
            place.write_bytes(mutated(data, rng) if data else b"x")
            refused += not check(lambda: open_directory(broken), broken)
            place.write_bytes(data)
    assert refused > 30
