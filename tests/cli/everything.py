"""All that can be at a path, each with the same leaves `w` and `b`."""

import importlib.util
import json
import os
import pickle
import shutil
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import serialization

import eqx_ckpt


TREE = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
# By what there is to say of them, which the tests know.
KINDS = {
    "whole": "checkpoint database compressed link safetensors shards npz flax orbax "
    "levanter run/000002 two_words_ü foreign index orbax_run",
    "recording": "recording",
    "run": "run run_misnamed run_database run_link run_damaged run_lost "
    "run_no_manifest recording/states",
    # A leaf is, or all of it.
    "damaged": "damaged lost empty empty_database",
    "unreadable": "damaged_manifest cut_manifest cut_record cut.npz cut.safetensors "
    "cut_orbax",
    "nameless": "model.eqx added bare lines.eqx array.npy numbered",
    "nothing": "of_eqx of_npz two_files both zero_bytes text pickle archive.zip "
    "empty_folder other_files hidden/.c loop dangling fifo missing checkpoint/w "
    "checkpoint/zarr.json recording/samples items run_file/000009",
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()} | {
    "": "nothing"
}


def make(root):
    """Make one of each, named by what it is; returns their names."""
    save = eqx_ckpt.tree_serialise_leaves
    save(root / "checkpoint", TREE)
    save(root / "database", TREE, layout="ocdbt")
    save(root / "compressed", TREE, compression="zstd")
    save(root / "two_words_ü", TREE)
    (root / "link").symlink_to("checkpoint")
    for name in (
        "run",
        "run_misnamed",
        "run_damaged",
        "run_lost",
        "run_no_manifest",
        "run_database",
    ):
        layout = "ocdbt" if name == "run_database" else "zarr"
        with eqx_ckpt.CheckpointManager(root / name, layout=layout) as manager:
            for step in (1, 2):
                manager.save(step, TREE, metadata={"loss": 1 / step})
    (root / "run_link").symlink_to("run")
    for name in ("1", "9" * 19):
        shutil.copytree(root / "checkpoint", root / "run_misnamed" / name)
    _recording(root / "recording")
    for name, to in (("safetensors", None), ("npz", None), ("flax", None)):
        eqx_ckpt.interop.convert(root / "checkpoint", root / name, to=to or name)
    _folders(root)
    (root / "shards").mkdir()
    eqx_ckpt.interop.convert(
        root / "checkpoint", root / "shards/model.safetensors", strict=True
    )
    (root / "flax").rename(root / "flax.msgpack")
    eqx_ckpt.copy(
        eqx_ckpt.interop.open_safetensors(root / "safetensors"), root / "foreign"
    )
    _equinox(root)
    if importlib.util.find_spec("orbax") is not None:
        eqx_ckpt.interop.to_orbax(root / "checkpoint", root / "orbax")
        _items(root / "items")
        _orbax_run(root / "orbax_run")
    _levanter(root / "levanter")
    if importlib.util.find_spec("flatbuffers") is not None:
        from jax.experimental.array_serialization import pytree_serialization

        pytree_serialization.save(TREE, root / "numbered")
    np.save(root / "array.npy", np.arange(3.0))
    _damaged(root)
    _others(root)
    return [path.name for path in root.iterdir()]


def _equinox(root):
    for name in ("model", "added", "bare", "both"):
        eqx.tree_serialise_leaves(root / name, TREE)
    (root / "bare.eqx").rename(root / "bare")
    shutil.copy(root / "both.eqx", root / "both")
    with open(root / "lines.eqx", "wb") as f:
        f.write(b'{"width": 3}\n')
        eqx.tree_serialise_leaves(f, TREE)
    (root / "of_eqx").mkdir()
    for name in ("model.eqx", "lines.eqx"):
        shutil.copy(root / name, root / "of_eqx")


def _recording(path):
    like = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in TREE.items()
    }
    with eqx_ckpt.recording.Recording(path, like) as recording:
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
    for name in ("damaged", "lost", "empty", "damaged_manifest", "cut_manifest"):
        shutil.copytree(root / "checkpoint", root / name)
    for path in ("damaged", "run_damaged/000001"):
        (root / path / "w/c.0.0").write_bytes(b"\1" * 28)
    for path in ("lost", "run_lost/000001"):
        (root / path / "w/c.0.0").unlink()
    (root / "empty/w/c.0.0").write_bytes(b"")
    shutil.copytree(root / "database", root / "empty_database")
    (root / "empty_database/manifest.ocdbt").write_bytes(b"")
    for path in ("damaged_manifest", "run_no_manifest/000001"):
        manifest = root / path / "zarr.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float23"))
    shutil.copytree(root / "recording", root / "cut_record")
    shutil.copy(root / "npz", root / "cut.npz")
    shutil.copy(root / "safetensors", root / "cut.safetensors")
    cut = ["cut_manifest/zarr.json", "cut_record/recording.json"]
    cut += ["cut.npz", "cut.safetensors"]
    if (root / "orbax").exists():
        shutil.copytree(root / "orbax", root / "cut_orbax")
        cut.append("cut_orbax/_METADATA")
    for name in cut:
        os.truncate(root / name, (root / name).stat().st_size - 30)


def _folders(root):
    """Folders of files of other formats, of which one or none is meant."""
    for name in ("index", "of_npz", "two_files"):
        (root / name).mkdir()
    eqx_ckpt.interop.to_safetensors(
        root / "checkpoint", root / "index/model.safetensors", max_shard_bytes=1
    )
    for i in range(2):
        shutil.copy(root / "npz", root / f"of_npz/{i}.npz")
        shutil.copy(root / "safetensors", root / f"two_files/{i}.safetensors")


def _orbax_run(path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(TREE))


def _items(path):
    """Orbax's manager, with two trees in a step."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        saved = {name: ocp.args.StandardSave(TREE) for name in ("model", "optimiser")}
        manager.save(1, args=ocp.args.Composite(**saved))


def _others(root):
    """What is no checkpoint, and none of a format that is known."""
    (root / "zero_bytes").touch()
    (root / "text").write_text("not a checkpoint\n")
    (root / "pickle").write_bytes(pickle.dumps([1]))
    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        archive.writestr("archive/data.pkl", b"of torch")
    (root / "empty_folder").mkdir()
    (root / "other_files").mkdir()
    (root / "other_files/a.txt").write_text("a")
    # Of a save that was killed.
    shutil.copytree(root / "checkpoint", root / "hidden/.c")
    (root / "hidden/.c/zarr.json").unlink()
    (root / "run_file").mkdir()
    (root / "run_file/000009").write_text("a")
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "fifo")
