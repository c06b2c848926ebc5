"""All that can be at a path, each with the same leaves `w` and `b`."""

import importlib.util
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import serialization

import eqx_ckpt


TREE = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
# What is wrong with a path, of those that are none of these.
WHOLE = (
    "checkpoint database recording safetensors shards npz flax orbax levanter"
).split()


def make(root):
    """Make one of each, named by what it is; returns their names."""
    save = eqx_ckpt.tree_serialise_leaves
    save(root / "checkpoint", TREE)
    save(root / "database", TREE, layout="ocdbt")
    for name in ("run", "run with a damaged step", "run with a damaged manifest"):
        with eqx_ckpt.CheckpointManager(root / name) as manager:
            for step in (1, 2):
                manager.save(step, TREE, metadata={"loss": 1 / step})
    _recording(root / "recording")
    for name, to in (("safetensors", None), ("npz", None), ("flax", None)):
        eqx_ckpt.interop.convert(root / "checkpoint", root / name, to=to or name)
    (root / "shards").mkdir()
    eqx_ckpt.interop.convert(
        root / "checkpoint", root / "shards/model.safetensors", strict=True
    )
    (root / "flax").rename(root / "flax.msgpack")
    eqx.tree_serialise_leaves(root / "eqx", TREE)
    if importlib.util.find_spec("orbax") is not None:
        eqx_ckpt.interop.to_orbax(root / "checkpoint", root / "orbax")
    _levanter(root / "levanter")
    _damaged(root)
    (root / "zero bytes").touch()
    (root / "text").write_text("not a checkpoint\n")
    (root / "empty folder").mkdir()
    (root / "other files").mkdir()
    (root / "other files/a.txt").write_text("a")
    (root / "loop").symlink_to(root / "loop")
    return [path.name for path in root.iterdir()]


def _recording(path):
    like = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in TREE.items()
    }
    with eqx_ckpt.Recording(path, like) as recording:
        rows = {"w": np.asarray(TREE["w"]), "b": np.ones(2, np.float32)}
        recording.extend(rows)
        recording.commit({"step": 3})


def _levanter(path):
    manager = serialization.GlobalAsyncCheckpointManager()
    specs = [
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
        for name in TREE
    ]
    manager.serialize([*TREE.values()], specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    metadata = {"step": 3, "timestamp": "2024-05-01T12:00:00"}
    (path / "metadata.json").write_text(json.dumps(metadata))


def _damaged(root):
    shutil.copytree(root / "checkpoint", root / "damaged chunk")
    for path in ("damaged chunk", "run with a damaged step/000001"):
        (root / path / "w/c.0.0").write_bytes(b"\1" * 28)
    shutil.copytree(root / "checkpoint", root / "damaged manifest")
    for path in ("damaged manifest", "run with a damaged manifest/000001"):
        manifest = root / path / "zarr.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float23"))
