"""A run that was moved, renamed or copied by hand."""

import contextlib
import os
import shutil
import uuid

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointError, CheckpointManager, inspect
from support import locate


def state(step):
    return {"w": np.full(3, step), "step": step}


def saved(run, steps):
    with CheckpointManager(run) as manager:
        for step in steps:
            manager.save(step, state(step))
    return manager


LISTING = {
    "latest": lambda manager, run: manager.latest(),
    "steps": lambda manager, run: manager.steps(),
    "best": lambda manager, run: manager.best("loss"),
    "restore": lambda manager, run: manager.restore(state(0)),
    "read_config": lambda manager, run: manager.read_config(),
    "fork": lambda manager, run: manager.fork(f"{run}-fork"),
    "config": lambda manager, run: inspect.read_config(run),
    "leaf_history": lambda manager, run: inspect.leaf_history(run),
    "metrics": lambda manager, run: inspect.metrics(run),
    "own_bytes": lambda manager, run: inspect.own_bytes(run),
    "best_step": lambda manager, run: inspect.best_step(run, "loss"),
}


@pytest.mark.parametrize("name", ["3", "03", "0000003"])
@pytest.mark.parametrize("call", LISTING)
@pytest.mark.parametrize("steps", [[3], [2, 3]], ids=str)
def test_the_newest_step_has_another_name(tmp_path, name, call, steps):
    run = tmp_path / "run"
    saved(run, steps)
    (run / "000003").rename(run / name)
    with pytest.raises(
        CheckpointError, match=f"{name}' is a .* step 3 is named '000003'"
    ):
        LISTING[call](CheckpointManager(run), run)
    (run / name).rename(run / "000003")
    assert CheckpointManager(run).latest() == 3


def test_the_newest_step_of_a_store_has_another_name():
    run = f"memory://{uuid.uuid4().hex}/run"
    saved(run, [2])
    locate(run).write("3/zarr.json", locate(run).read("000002/zarr.json"))
    for call in LISTING.values():
        with pytest.raises(CheckpointError, match="step 3 is named '000003'"):
            call(CheckpointManager(run), run)


def test_an_older_step_has_another_name(tmp_path, caplog):
    run = tmp_path / "run"
    saved(run, [1, 2])
    (run / "000001").rename(run / "1")
    manager = CheckpointManager(run, keep=eqx_ckpt.keep_last(1))
    assert manager.latest() == 2
    assert "step 1 is named '000001'" in caplog.text
    manager.save(3, state(3)).result()
    assert sorted(os.listdir(run)) == ["000003", "1"]


@pytest.mark.parametrize("place", ["directory", "store"])
@pytest.mark.parametrize("name", [str(2**63), "9" * 19, "9" * 40])
def test_a_number_that_no_step_has(tmp_path, caplog, name, place):
    """It is named, and nothing fails because of it."""
    run = f"memory://{uuid.uuid4().hex}/run" if place == "store" else tmp_path / "run"
    saved(run, [1, 2])
    manifest = locate(run).read("000002/zarr.json")
    if place == "store":
        locate(run).write(f"{name}/zarr.json", manifest)
    else:
        (run / name).mkdir()
        (run / name / "zarr.json").write_bytes(manifest)
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
        assert manager.latest() == 2
        assert f"{name}' is a checkpoint, but no step has its number" in caplog.text
        assert manager.steps() == [1, 2]
        manager.save(3, state(3)).result()
        assert manager.steps() == [3]
        assert manager.restore(state(0))["step"] == 3
    assert locate(run).read(f"{name}/zarr.json") is not None


@pytest.mark.parametrize("place", ["directory", "store"])
def test_what_is_no_checkpoint_may_have_a_number(tmp_path, caplog, place):
    run = f"memory://{uuid.uuid4().hex}/run" if place == "store" else tmp_path / "run"
    saved(run, [1])
    if isinstance(run, str):
        locate(run).write("2026/notes.txt", b"mine")
    else:
        (run / "2026").mkdir()
        (run / "2026/notes.txt").write_text("mine")
    for call in LISTING.values():
        with contextlib.suppress(eqx_ckpt.CheckpointNotFoundError):
            call(CheckpointManager(run), run)
    assert CheckpointManager(run).steps() == [1]
    assert not caplog.text


def test_a_step_that_was_copied_in_part_is_named(tmp_path, caplog):
    run = tmp_path / "run"
    saved(run, [1, 2])
    (run / "000002/zarr.json").unlink()
    assert CheckpointManager(run).latest() == 1
    assert "000002' is not a checkpoint: it has no `zarr.json`" in caplog.text


def test_a_run_that_was_moved_under_its_manager(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for steps in ([], [1]):
        saved(old, steps)
        manager = CheckpointManager(old)
        manager.save(5, state(5)).result()
        old.rename(new)
        for call in (
            CheckpointManager.latest,
            CheckpointManager.steps,
            lambda m: m.save(6, state(6)).result(),
        ):
            with pytest.raises(CheckpointError, match="was moved"):
                call(manager)
        assert not old.exists()
        # Another directory in its place is no better.
        saved(old, [7])
        with pytest.raises(CheckpointError, match="was moved"):
            manager.save(6, state(6))
        assert CheckpointManager(new).steps() == [*steps, 5]
        shutil.rmtree(old)
        new.rename(old)
        manager.save(6, state(6)).result()
        manager.close()
        assert CheckpointManager(old).latest() == 6
        shutil.rmtree(old)


def test_a_run_that_was_deleted_under_its_manager_is_begun_again(tmp_path):
    run = tmp_path / "run"
    saved(run, [1])
    with CheckpointManager(run) as manager:
        assert manager.latest() == 1
        shutil.rmtree(run)
        manager.save(2, state(2)).result()
        assert manager.steps() == [2]
        run.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="was moved"):
            manager.save(3, state(3))
