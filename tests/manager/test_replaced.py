"""A checkpoint that is replaced, and what must not be: a memory of it, and files."""

import uuid

import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager


TREE = {"w": 1.0}


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_metadata_are_those_of_the_step_that_is_there(tmp_path, place):
    memory = f"memory://{uuid.uuid4().hex}/run"
    run = str(tmp_path / "run") if place == "disk" else memory
    manager = CheckpointManager(run)
    for step, loss in [(1, 0.1), (2, 0.2)]:
        manager.save(step, TREE, metadata={"loss": loss}).result()
    assert manager.best("loss") == 1
    path = f"{run}/000001"
    for loss, best in [(0.3, 2), (0.1, 1), (0.4, 2)]:
        metadata = {"loss": loss}
        eqx_ckpt.tree_serialise_leaves(path, TREE, metadata=metadata, overwrite=True)
        assert manager.best("loss") == best
    manager.delete(1)
    manager.save(1, TREE, metadata={"loss": 0.1}).result()
    assert manager.best("loss") == 1


def test_a_file_that_comes_while_a_checkpoint_is_replaced(tmp_path):
    path = tmp_path / "new"
    eqx_ckpt.tree_serialise_leaves(path, TREE)

    def put(phase, *_):
        if phase == "commit":
            (path / "notes").write_text("mine")

    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="It holds 'notes'"):
        eqx_ckpt.tree_serialise_leaves(path, {"w": 2.0}, overwrite=True, progress=put)
    assert (path / "notes").read_text() == "mine"
    assert eqx_ckpt.tree_deserialise_leaves(path, TREE) == TREE
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]
