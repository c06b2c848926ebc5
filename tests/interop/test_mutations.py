"""Thousands of broken files: an error that names the place, or the right shapes."""

import json
import random
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import serialization

from eqx_ckpt import interop

from .mutations import check, mutated


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
    "safetensors": (safetensors_file, interop.safetensors),
    "npz": (lambda path: np.savez(path, **ARRAYS), interop.npz),
    "compressed": (lambda path: np.savez_compressed(path, **ARRAYS), interop.npz),
    "eqx": (eqx_file, lambda path: interop.eqx(path, TREE)),
    "flax": (flax_file, interop.flax),
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
    check_files(jax_directory, tmp_path / "broken", interop.jax_arrays)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("ocdbt", [False, True])
def test_directories_of_orbax(tmp_path, ocdbt):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=ocdbt)
    checkpointer.save(tmp_path / "orbax", TREE)
    check_files(tmp_path / "orbax", tmp_path / "broken", interop.orbax)


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
