"""What the children of the zygote do: save, and look at what is there."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ckpt
from tests.support import chunk_grid as chunks

from . import shim


DAMAGED = 999  # instead of the seed of a checkpoint that cannot be restored


# Trees whose seeds differ by a multiple of this share a chunk, from this seed on.
ALIKE = 100


def tree(seed: int) -> dict[str, Any]:
    """A tree of NumPy leaves (no JAX backend is needed), one of them in two chunks."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((8, 4), np.float32)
    if seed > ALIKE and seed != DAMAGED:
        weight[:4] = tree(seed % ALIKE)["layer"]["weight"][:4]
    return {
        "layer": {"weight": weight, "bias": random.integers(0, 100, 3, np.int16)},
        "step": seed,
    }


def every_kind(seed: int) -> dict[str, Any]:
    """A tree with every kind of leaf; in chunks of 32 bytes, `chunks` has four."""
    numbers = np.random.default_rng(seed)
    floats = numbers.standard_normal((4, 3), np.float32)
    return {
        "bf16": jnp.asarray(floats, jnp.bfloat16),
        "bool": jnp.asarray(floats > 0),
        "chunks": numbers.standard_normal((8, 4), np.float32),
        "f32": jnp.asarray(floats),
        "int4": jnp.asarray(numbers.integers(-8, 8, 9), jnp.int4),
        "key": jax.random.split(jax.random.key(seed), 2),
        "layer": {"twin": jnp.asarray(floats + 1), "zero": jnp.float32(seed)},
        "rate": seed / 3,
        "step": seed,
        "swapped": floats.astype(">f4"),
        "time": numbers.integers(0, 2**40, 3).astype("M8[ns]"),
        "uint4": jnp.asarray(numbers.integers(0, 16, 9), jnp.uint4),
        "wave": complex(seed, 0.5),
        "zeros": np.zeros((2, 3), np.int16),
    }


@contextlib.contextmanager
def small_chunks(size: int = 64) -> Iterator[None]:
    """Save in chunks of `size` bytes."""
    usual = chunks.TARGET_BYTES
    chunks.TARGET_BYTES = size
    try:
        yield
    finally:
        chunks.TARGET_BYTES = usual


def save(
    path: str,
    seed: int,
    overwrite: bool = False,
    layout: eqx_ckpt.typing.Layout = "zarr",
) -> None:
    with small_chunks():
        eqx_ckpt.tree_serialise_leaves(
            path, tree(seed), overwrite=overwrite, layout=layout
        )
    shim.note("saved")


def load(path: str | os.PathLike[str]) -> int | None:
    """The seed of the tree at `path`, every byte of it checked; None: none is there."""
    try:
        restored = eqx_ckpt.tree_deserialise_leaves(path, tree(0))
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    expected = tree(restored["step"])
    for name in ("weight", "bias"):
        left, right = restored["layer"][name], expected["layer"][name]
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes(), f"other values in {path}: {name}"
    eqx_ckpt.inspect.verify(path)
    return restored["step"]


def lose_chunks(path: str) -> None:
    """Delete the chunks of a leaf, or all data files of a database."""
    for pattern in ("layer/weight/c.*", "d/*"):
        for file in pathlib.Path(path).glob(pattern):
            file.unlink()


def save_megabytes(
    path: str, size: int, layout: eqx_ckpt.typing.Layout = "zarr"
) -> None:
    tree = np.ones(size * 2**20, np.uint8)
    eqx_ckpt.tree_serialise_leaves(path, tree, layout=layout)


def load_megabytes(path: str, size: int) -> None:
    eqx_ckpt.tree_deserialise_leaves(path, np.zeros(size * 2**20, np.uint8))


def load_all(directory: str) -> dict[str, int | None]:
    """The seed of everything that looks like a checkpoint: no hidden name."""
    return {
        entry.name: _load_or_damaged(entry)
        for entry in sorted(pathlib.Path(directory).iterdir())
        if not entry.name.startswith(".")
    }


def _load_or_damaged(path: pathlib.Path) -> int | None:
    try:
        return load(path)
    except eqx_ckpt.CorruptCheckpointError:
        return DAMAGED


def save_new(
    directory: str, seed: int, overwrite: bool, layout: eqx_ckpt.typing.Layout = "zarr"
) -> None:
    save(os.path.join(directory, "new"), seed, overwrite, layout)


def load_each(directory: str) -> list[int | None]:
    """The seed of everything, whatever its name."""
    return [load(os.path.join(directory, name)) for name in os.listdir(directory)]


def load_all_and_save(
    directory: str,
    name: str,
    seed: int,
    overwrite: bool,
    layout: eqx_ckpt.typing.Layout = "zarr",
) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """What is there; and what is there after a save at `name`."""
    before = load_all(directory)
    save(os.path.join(directory, name), seed, overwrite or name in before, layout)
    return before, load_all(directory)
