"""What is fuzzed: a file of each format, and what reads it.

Each target writes what a fuzzer found in place of a file, or of its content, and reads
everything. Only a `CheckpointError` that names the place may come of it.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

import eqx_ckpt
from eqx_ckpt import interop
from tests.faults.manifests import sealed
from tests.interop.mutations import check, is_possible, mutated, read_rows

from . import sealing


ARRAYS = {
    "a.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "mask": np.array([True, False]),
    "n": np.array(3, np.int64),
}
TREE = {"a": [{"w": ARRAYS["a.0.w"]}], "n": 3, "z": 1 + 2j}


class Target(NamedTuple):
    """What is fuzzed: what is there, how other bytes are put there, and a reader."""

    data: bytes
    write: Callable[[bytes], Any]
    read: Callable[[], Any]

    def seeds(self) -> list[bytes]:
        """What is there, and some changes of it."""
        rng = random.Random(0)
        return [self.data, *(mutated(self.data, rng) for _ in range(20))]

    def check(self, data: bytes) -> None:
        self.write(data)
        self.read()


def targets(folder: Path) -> dict[str, Target]:
    """The targets, whose files are in `folder`, by name."""
    return {
        **_checkpoints(folder),
        **_run(folder / "run"),
        **_recording(folder / "recording"),
        **_foreign_files(folder),
        **_orbax(folder),
        **_jax(folder / "jax"),
        "rows": _rows(folder / "rows"),
        "url": _url(),
    }


def _file(file: Path, read: Callable[[], Any]) -> Target:
    return Target(file.read_bytes(), file.write_bytes, read)


def _sealed(file: Path, read: Callable[[], Any]) -> Target:
    """A file with its own digest: no reader would look at one with a wrong digest."""

    def write(data: bytes) -> None:
        file.write_bytes(sealed(data))

    return Target(file.read_bytes(), write, read)


def _manifest(path: Path) -> Target:
    return _sealed(path / "zarr.json", _reads(lambda: path, path))


def _database(kind: str, root: Path, read: Callable[[], Any]) -> dict[str, Target]:
    parts = sealing.database(root)
    return {f"{kind}_{name}": Target(*part, read) for name, part in parts.items()}


def _checkpoints(folder: Path) -> dict[str, Target]:
    path, database, packed = (folder / n for n in ("checkpoint", "database", "packed"))
    eqx_ckpt.tree_serialise_leaves(path, TREE, metadata={"loss": 0.5})
    eqx_ckpt.tree_serialise_leaves(database, TREE, layout="ocdbt")
    numbers = {"x": np.arange(16, dtype=np.float32)}
    eqx_ckpt.tree_serialise_leaves(packed, numbers, compression="zstd")
    return {
        "manifest": _manifest(path),
        "chunk": Target(
            *sealing.chunk(packed, "x", "c.0"), _reads(lambda: packed, packed)
        ),
        **_database("database", database, _reads(lambda: database, database)),
    }


def _run(run: Path) -> dict[str, Target]:
    keep = eqx_ckpt.keep_last(1)
    options = {"lr": 0.5, "optim": {"name": "adam", "betas": [0.9, 0.99]}}
    with eqx_ckpt.CheckpointManager(run, keep=keep, config=options) as manager:
        for step in range(4):
            manager.save(step, TREE, metadata={"loss": 0.5 / (step + 1)})
    inspect = eqx_ckpt.inspect
    log, step = min(run.glob("metrics.*.json")), run / "000003"
    return {
        "history": _manifest(step),
        "metrics": _file(log, _tries(lambda: inspect.metrics(run), run)),
        "config": Target(
            *sealing.config(run, step), _tries(lambda: inspect.read_config(run), run)
        ),
    }


def _recording(path: Path) -> dict[str, Target]:
    recording = eqx_ckpt.recording.Recording(path, {"x": jnp.zeros(2)})
    with recording:
        recording.extend({"x": np.ones((5, 2), np.float32)})
        recording.commit({"state": jnp.ones(3)})
    read = _tries(lambda: eqx_ckpt.recording.Samples(path).read(), path)
    return {
        "recording_recording": _sealed(path / "recording.json", read),
        "recording_zarr": _file(path / "samples/x/zarr.json", read),
    }


def _foreign_files(folder: Path) -> dict[str, Target]:
    places = {
        name: folder / f"file.{name}" for name in ("safetensors", "npz", "eqx", "flax")
    }
    arrays = folder / "arrays"
    eqx_ckpt.tree_serialise_leaves(arrays, ARRAYS)
    interop.to_safetensors(arrays, places["safetensors"])
    np.savez(places["npz"], **ARRAYS)
    interop.to_flax(arrays, places["flax"])
    with places["eqx"].open("wb") as f:
        f.write(b'{"width": 8}\n')
        eqx.tree_serialise_leaves(f, TREE)
    readers: dict[str, Callable[[], Any]] = {
        "safetensors": lambda: interop.open_safetensors(places["safetensors"]),
        "npz": lambda: interop.open_npz(places["npz"]),
        "eqx": lambda: interop.open_eqx(places["eqx"], TREE),
        "flax": lambda: interop.open_flax(places["flax"]),
    }
    found = {
        name: _file(place, _reads(readers[name], place))
        for name, place in places.items()
    }
    index = folder / "sharded" / "model.safetensors.index.json"
    index.parent.mkdir()
    shutil.copy(places["safetensors"], index.parent / "w.safetensors")
    weights = dict.fromkeys(ARRAYS, "w.safetensors")
    index.write_text(
        json.dumps({"metadata": {"total_size": 34}, "weight_map": weights})
    )
    read = _reads(lambda: interop.open_safetensors(index), index.parent)
    header = sealing.header(places["safetensors"])
    return found | {
        "safetensors_header": Target(*header, found["safetensors"].read),
        "safetensors_index": _file(index, read),
    }


def _orbax(folder: Path) -> dict[str, Target]:
    from orbax import checkpoint

    def saved(kind: str, **options: bool) -> tuple[Path, Callable[[], Any]]:
        root = folder / kind
        checkpoint.PyTreeCheckpointer(**options).save(root, ARRAYS)
        return root, _reads(lambda: interop.open_orbax(root), root)

    root, read = saved("orbax", use_ocdbt=False)
    newer, read_newer = saved("orbax_zarr3", use_ocdbt=False, use_zarr3=True)
    return {
        "orbax_metadata": _file(root / "_METADATA", read),
        "orbax_zarray": _file(root / "a.0.w" / ".zarray", read),
        "orbax_zarr3": _file(newer / "a.0.w" / "zarr.json", read_newer),
        **_database("orbax_database", *saved("orbax_database", use_ocdbt=True)),
    }


def _jax(root: Path) -> dict[str, Target]:
    """What numbers the leaves of a tree."""
    from jax.experimental.array_serialization import pytree_serialization

    tree = {"w": jnp.ones(3), "none": None}
    pytree_serialization.save(tree, root)
    read = _reads(lambda: interop.open_jax_arrays(root, tree), root)
    return {"jax_tree": _file(root / "pytreedef.json", read)}


def _rows(path: Path) -> Target:
    """The metadata of a Zarr array, whose rows are read."""
    layout = ts.ChunkLayout(write_chunk_shape=(4, 2), read_chunk_shape=(2, 2))
    array = ts.open(
        {"driver": "zarr3", "kvstore": f"file://{path}/"},
        create=True,
        dtype=ts.float32,
        shape=[6, 2],
        chunk_layout=layout,
    ).result()
    array.write(np.ones((6, 2), np.float32)).result()

    def read() -> None:
        # Values that are no numbers, and arrays without rows, are not damaged.
        with contextlib.suppress(ValueError, TypeError):
            read_rows(eqx_ckpt.data.StoredDataSource(x=path))

    return _file(path / "zarr.json", _tries(read, path))


def _reads(open_source: Callable[[], Any], place: Path) -> Callable[[], Any]:
    return lambda: check(open_source, place)


def _tries(call: Callable[[], Any], place: Path) -> Callable[[], Any]:
    return lambda: is_possible(call, place)


def _url() -> Target:
    seed = b"s3://user:word@bucket:80/run?x=1#y"
    said = [seed]

    def write(data: bytes) -> None:
        said[0] = data

    def read() -> None:
        text = said[0].decode("utf-8", "surrogateescape")
        for url, options in (text, {}), ("s3://bucket/run", {"endpoint": text}):
            with contextlib.suppress(eqx_ckpt.CheckpointError, ValueError):
                eqx_ckpt.StorePath(url, **options)

    return Target(seed, write, read)
