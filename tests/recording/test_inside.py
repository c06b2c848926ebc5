"""Nothing but a recording's own states is saved in it."""

import pathlib
import uuid

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.recording import Recording


TREE = {"w": np.ones(3)}


@pytest.mark.parametrize("name", ["states/000007", "states/x", "samples/y", "z"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_nothing_else_is_saved_in_a_recording(
    tmp_path: pathlib.Path, kind: str, name: str
) -> None:
    root = str(tmp_path) if kind == "disk" else f"memory://{uuid.uuid4().hex}"
    path, other = f"{root}/recording", f"{root}/run/000005"
    with Recording(path, TREE) as recording:
        recording.extend({"w": np.ones((4, 3))})
        recording.commit(TREE)
    eqx_ckpt.tree_serialise_leaves(other, TREE)
    refused = pytest.raises(eqx_ckpt.CheckpointExistsError, match="inside of the rec")
    for overwrite in (False, True):
        with refused:
            eqx_ckpt.tree_serialise_leaves(f"{path}/{name}", TREE, overwrite=overwrite)
    with refused:
        eqx_ckpt.copy(other, f"{path}/{name}")
    with pytest.raises(eqx_ckpt.CheckpointError, match="inside of the recording"):
        eqx_ckpt.sync(f"{root}/run", f"{path}/states")
    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(f"{path}/states", keep=keep) as manager, refused:
        manager.save(9, TREE).result()
    with Recording(path, TREE) as recording:
        np.testing.assert_array_equal(recording.resume(TREE)["w"], TREE["w"])
        recording.commit(TREE)
