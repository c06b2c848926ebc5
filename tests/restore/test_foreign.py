"""A path at which there is something else: what it is, and what to do."""

import json
import os
import re
import zipfile

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


TREE = {"model": {"w": jnp.ones(3)}}


def orbax(folder):
    """The files that tell a checkpoint of Orbax, as version 0.12 writes them."""
    (folder / "d").mkdir(parents=True)
    (folder / "manifest.ocdbt").write_bytes(b"\x0c\xdb")
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": {}}))
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {}}))


@pytest.fixture
def place(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", TREE)
    (tmp_path / "runs").mkdir()
    for name in ("runs/last.eqx", "text"):
        with open(tmp_path / name, "wb") as f:
            f.write(b'{"width": 8}\n')
            eqx.tree_serialise_leaves(f, TREE)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    )
    (tmp_path / "notes.txt").write_text("Not a checkpoint.")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "w.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()
    )
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    (tmp_path / "a.msgpack").write_bytes(b"\x80")
    (tmp_path / "levanter").mkdir()
    (tmp_path / "levanter" / "manifest.ocdbt").write_bytes(b"\x0c\xdb")
    orbax(tmp_path / "orbax")
    orbax(tmp_path / "orbax_run" / "100")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "run" / "000100", TREE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "model.eqx",
            "of Equinox: pass `eqx_ckpt.interop.open_eqx\\('.*model.eqx', like\\)`",
        ),
        ("model", "There is '.*model.eqx'. It is a file of Equinox"),
        ("text", "file of Equinox: pass `eqx_ckpt.interop.open_eqx"),
        ("runs", "holds 'last.eqx'. It is a file of Equinox"),
        ("runs/last.eqx", "file of Equinox: pass `eqx_ckpt.interop.open_eqx"),
        ("model.safetensors", "file of safetensors: pass `eqx_ckpt.interop.open_safet"),
        ("notes.txt", "It is a file, and a checkpoint is a directory"),
        ("hub", "holds 'w.safetensors'.*file of safetensors"),
        ("orbax", "is of Orbax: pass `eqx_ckpt.interop.open_orbax"),
        ("a.npz", "pass `eqx_ckpt.interop.open_npz"),
        ("a.msgpack", "pass `eqx_ckpt.interop.open_flax"),
        ("levanter", "pass `eqx_ckpt.interop.open_jax_arrays"),
        ("orbax_run", "is of Orbax"),
        ("orbax_run/100", "is of Orbax"),
        ("run", "holds the checkpoints '000100': pass one of them"),
        ("run/000100/model", "run/000100': pass that and `prefix='model'`"),
        ("run/000100/model/w", "run/000100': pass that and `prefix='model/w'`"),
        ("run/000100/model/w/c.0", "run/000100': pass that and `prefix='model/w'`"),
        ("run/000100/zarr.json", "run/000100': pass that."),
    ],
)
def test_what_it_is_and_what_to_do(place, name, what):
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=what) as error:
        eqx_ckpt.tree_deserialise_leaves(place / name, TREE)
    for function in re.findall(r"interop\.(\w+)\(", str(error.value)):
        assert callable(getattr(eqx_ckpt.interop, function))
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=what):
        eqx_ckpt.inspect.read_manifest(place / name)


@pytest.mark.parametrize("name", ["eqx", "msgpack", "npz", "safetensors"])
@pytest.mark.parametrize("data", [b"", b"\xc1", bytes(99), b"\0" * 8 + b"{" * 99])
def test_a_file_whose_content_does_not_say_what_it_is_is_damaged(tmp_path, name, data):
    path = tmp_path / f"a.{name}"
    path.write_bytes(data)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"a.{name}' is not a va"):
        eqx_ckpt.interop.open_source(path, like=TREE)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("empty", "It is empty"),
        ("missing", "That path does not exist"),
        ("missing/too", "That path does not exist"),
        ("pipe", "It is neither a file nor a directory"),
        ("others", "It holds 'a.txt', and no checkpoint"),
        ("model.pt", "It is a file.* Its format is not known"),
        ("array.npy", "It is an array of NumPy: pass `eqx_ckpt.interop.open_eqx\\("),
    ],
)
def test_what_is_no_checkpoint_of_anybody(place, name, what):
    (place / "empty").mkdir()
    os.mkfifo(place / "pipe")
    (place / "others").mkdir()
    (place / "others/a.txt").write_text("a")
    with zipfile.ZipFile(place / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"as torch saves")
    np.save(place / "array.npy", np.ones(3))
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=what):
        eqx_ckpt.inspect.read_manifest(place / name)


def test_an_archive_of_arrays_is_known_without_its_suffix(place):
    (place / "a.npz").rename(place / "arrays")
    assert list(eqx_ckpt.interop.open_source(place / "arrays").manifest.leaves) == ["x"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("orbax", "is of Orbax"),
        ("orbax_run", "is of Orbax"),
        ("run/000100", "It is one checkpoint, and no run"),
        ("run/000100/model", "inside of the checkpoint"),
    ],
)
def test_a_manager_of_something_else_warns(place, name, what):
    manager = eqx_ckpt.CheckpointManager(place / name)
    with pytest.warns(UserWarning, match=what):
        assert manager.latest() is None
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=what):
        manager.restore(TREE)


def test_a_manager_of_a_new_run_does_not_warn(place):
    (place / "new").mkdir()
    for name in ("new", "missing", "hub", "."):
        assert eqx_ckpt.CheckpointManager(place / name).latest() is None
