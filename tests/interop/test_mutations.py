"""Thousands of broken files: an error that names the place, or the right shapes."""

import json
import random
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import serialization

import eqx_ckpt
from eqx_ckpt import interop


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


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Data with one to three random changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(found) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            found[at:at] = bytes(
                rng.choices(b'\0\xff{}[]",:09x', k=rng.randrange(1, 9))
            )
        elif kind == 4:
            number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            width = rng.choice((2, 4, 8))
            found[at : at + width] = (number % 256**width).to_bytes(width, "little")
        else:
            other = rng.randrange(len(found) or 1)
            found[at : at + 16] = found[other : other + 16]
    return bytes(found)


def check(open_source, place) -> bool:
    """Open and read everything; whether that was possible."""
    problem = ""
    try:
        source = open_source()
        for name, record, value in eqx_ckpt.leaves(source):
            assert np.shape(value) == record.data_shape, name
    except eqx_ckpt.CheckpointError as e:
        problem = str(e)
    assert not problem or str(place) in problem
    return not problem


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
