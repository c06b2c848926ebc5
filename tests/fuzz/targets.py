"""What is fuzzed: a file of each format, and what reads it.

Each target writes what a fuzzer found in place of one file, and reads everything. Only
a `CheckpointError` that names the place may come of it.
"""

import contextlib
import functools as ft
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import eqx_ckpt
from eqx_ckpt import interop
from tests.faults.manifests import sealed
from tests.interop.mutations import check, is_possible, mutated


ARRAYS = {
    "a.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "mask": np.array([True, False]),
    "n": np.array(3, np.int64),
}
TREE = {"a": [{"w": ARRAYS["a.0.w"]}], "n": 3, "z": 1 + 2j}


class Target(NamedTuple):
    """A file that is fuzzed, the folder that errors name, and what reads it.

    `seal` gives data the digest without which no reader would look at it.
    """

    file: Path
    place: Path
    read: Callable[[], Any]
    seal: Callable[[bytes], bytes] = bytes

    def seeds(self) -> list[bytes]:
        """What is there, and some changes of it."""
        rng, data = random.Random(0), self.file.read_bytes()
        return [data, *(mutated(data, rng) for _ in range(20))]

    def check(self, data: bytes) -> None:
        self.file.write_bytes(self.seal(data))
        self.read()


def targets(folder: Path) -> dict[str, Target]:
    """The targets, whose files are in `folder`, by name."""
    return {
        **_own(folder),
        **_foreign_files(folder),
        **_foreign_directories(folder),
        "url": _url(folder / "url"),
    }


def _own(folder: Path) -> dict[str, Target]:
    path, database, run, chain = (
        folder / name for name in ("checkpoint", "database", "run", "chain")
    )
    eqx_ckpt.tree_serialise_leaves(path, TREE, metadata={"loss": 0.5})
    eqx_ckpt.tree_serialise_leaves(database, TREE, layout="ocdbt")
    keep = eqx_ckpt.keep_last(1)
    options = {"lr": 0.5, "optim": {"name": "adam", "betas": [0.9, 0.99]}}
    with eqx_ckpt.CheckpointManager(run, keep=keep, config=options) as manager:
        for step in range(4):
            manager.save(step, TREE, metadata={"loss": 0.5 / (step + 1)})
    (config,) = run.glob("config.*.json")
    recording = eqx_ckpt.recording.Recording(chain, {"x": jnp.zeros(2)})
    with recording:
        recording.extend({"x": np.ones((5, 2), np.float32)})
        recording.commit({"state": jnp.ones(3)})
    log, step = min(run.glob("metrics.*.json")), run / "000003"
    found = {
        "manifest": Target(
            path / "zarr.json", path, _reads(lambda: path, path), sealed
        ),
        "history": Target(step / "zarr.json", step, _reads(lambda: step, step), sealed),
        "metrics": Target(log, run, _tries(lambda: eqx_ckpt.inspect.metrics(run), run)),
        "config": Target(
            config, run, _tries(lambda: eqx_ckpt.inspect.read_config(run), run)
        ),
    }
    read = _tries(lambda: eqx_ckpt.recording.Samples(chain).read(), chain)
    for file in (chain / "recording.json", chain / "samples/x/zarr.json"):
        found[f"recording_{file.stem}"] = Target(file, chain, read)
    for file in (database / "manifest.ocdbt", *(database / "d").iterdir()):
        name = "node" if file.parent.name == "d" else "manifest"
        read = _reads(lambda: database, database)
        found[f"database_{name}"] = Target(file, database, read)
    return found


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
        name: Target(place, place, _reads(readers[name], place))
        for name, place in places.items()
    }
    index = folder / "sharded" / "model.safetensors.index.json"
    index.parent.mkdir()
    shutil.copy(places["safetensors"], index.parent / "w.safetensors")
    index.write_text(
        '{"metadata": {"total_size": 24}, "weight_map": {"n": "w.safetensors"}}'
    )
    read = _reads(lambda: interop.open_safetensors(index), index.parent)
    return found | {"safetensors_index": Target(index, index.parent, read)}


def _foreign_directories(folder: Path) -> dict[str, Target]:
    from orbax import checkpoint

    found: dict[str, Target] = {}
    for kind, ocdbt in {"orbax": False, "orbax_database": True}.items():
        root = folder / kind
        checkpoint.PyTreeCheckpointer(use_ocdbt=ocdbt).save(root, ARRAYS)
        read = _reads(ft.partial(interop.open_orbax, root), root)
        names = ("_METADATA", ".zarray") if not ocdbt else ("manifest.ocdbt",)
        files = [next(iter(sorted(root.rglob(name)))) for name in names]
        if ocdbt:
            files.append(max((root / "d").iterdir()))
        for file in files:
            name = "node" if file.parent.name == "d" else file.stem.strip("._").lower()
            found[f"{kind}_{name}"] = Target(file, root, read)
    return found


def _reads(open_source: Callable[[], Any], place: Path) -> Callable[[], Any]:
    return lambda: check(open_source, place)


def _tries(call: Callable[[], Any], place: Path) -> Callable[[], Any]:
    return lambda: is_possible(call, place)


def _url(file: Path) -> Target:
    file.write_text("s3://user:word@bucket:80/run?x=1#y")

    def read() -> None:
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        for url, options in (text, {}), ("s3://bucket/run", {"endpoint": text}):
            with contextlib.suppress(eqx_ckpt.CheckpointError, ValueError):
                eqx_ckpt.StorePath(url, **options)

    return Target(file, file.parent, read)
