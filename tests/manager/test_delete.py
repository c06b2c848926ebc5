"""Deleting a step of a run on a disk."""

import os
from pathlib import Path

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager


TREE = {"w": np.ones(3), "step": 1}


def flip(file):
    data = bytearray(file.read_bytes())
    data[0] ^= 255
    file.write_bytes(data)


@pytest.fixture
def on_disk(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, TREE)
    return tmp_path / "run"


def test_a_step_that_is_damaged(on_disk):
    flip(on_disk / "000002/zarr.json")
    manager = CheckpointManager(on_disk)
    manager.delete(2)
    assert manager.steps() == [1]
    assert manager.restore(TREE)["step"] == 1


def test_what_is_no_checkpoint_stays(on_disk):
    (on_disk / "000009").mkdir()
    (on_disk / "000009/notes").write_text("mine")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="are 1, 2"):
        CheckpointManager(on_disk).delete(9)
    assert (on_disk / "000009/notes").read_text() == "mine"


@pytest.fixture
def linked(on_disk, tmp_path) -> tuple[Path, Path]:
    """A run of which a step is a link to a checkpoint elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    eqx_ckpt.tree_serialise_leaves(elsewhere, TREE | {"step": 0})
    (on_disk / "000000").symlink_to("../elsewhere")
    return on_disk, elsewhere


def test_of_a_link_only_the_link_is_deleted(linked):
    run, elsewhere = linked
    manager = CheckpointManager(run)
    assert manager.restore(TREE, 0)["step"] == 0
    manager.delete(0)
    assert set(os.listdir(run)) == {"000001", "000002"}
    eqx_ckpt.inspect.verify(elsewhere)


def test_of_a_link_only_the_link_is_removed(linked, caplog):
    run, elsewhere = linked
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
        manager.save(3, TREE)
    assert os.listdir(run) == ["000003"]
    eqx_ckpt.inspect.verify(elsewhere)
    assert "delete it by hand" not in caplog.text


def test_a_damaged_link_is_replaced_and_not_what_it_leads_to(linked):
    run, elsewhere = linked
    (run / "000007").symlink_to("../elsewhere")
    (elsewhere / "w" / "c.0").write_bytes(b"damaged")
    before = {f: f.read_bytes() for f in elsewhere.rglob("*") if f.is_file()}
    with CheckpointManager(run) as manager:
        with pytest.warns(match="7"):
            assert manager.restore(TREE, on_damage="fallback")["step"] == 1
        manager.save(7, TREE | {"step": 7})
    assert not (run / "000007").is_symlink()
    assert CheckpointManager(run).restore(TREE)["step"] == 7
    assert {f: f.read_bytes() for f in elsewhere.rglob("*") if f.is_file()} == before
    assert sorted(os.listdir(run)) == ["000000", "000001", "000002", "000007"]
