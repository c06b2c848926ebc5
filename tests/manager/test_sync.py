"""A mirror that is brought up to date by hand."""

import pathlib
import shutil
import uuid
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, sync
from helpers import assert_same
from support import sync as module


pytestmark = pytest.mark.oldest


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((40, 50), step), "step": step}


def save(run: pathlib.Path, *steps: int) -> None:
    with CheckpointManager(run) as manager:
        if manager.latest() is not None:
            manager.restore(state(0))
        for step in steps:
            manager.save(step, state(step), metadata={"n": step})


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    save(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_what_is_missing_is_uploaded(run: pathlib.Path, kind: str) -> None:
    there = str(run.parent / "there")
    if kind == "memory":
        there = f"memory://{uuid.uuid4().hex}/run"
    assert sync(run, there) == [1, 2, 3]
    assert sync(run, there) == []
    alone = CheckpointManager(there)
    for step in (1, 2, 3):
        assert_same(alone.restore(state(0), step), state(step))
        digests = [
            eqx_ckpt.inspect.digest(f"{where}/{step:06}") for where in (run, there)
        ]
        assert digests[0] == digests[1]
    alone.delete(2)
    CheckpointManager(run).delete(1)
    save(run, 4)
    assert sync(run, there) == [2, 4]
    assert alone.steps() == [1, 2, 3, 4]


def test_the_newest_goes_first(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed on the way is left, and a second call goes on."""
    there, real = run.parent / "there", module.upload

    def upload(run: Any, step: int, *others: Any) -> None:
        if step == 2:
            raise ConnectionError("By the test.")
        real(run, step, *others)

    with monkeypatch.context() as patch:
        patch.setattr(module, "upload", upload)
        with pytest.raises(ConnectionError):
            sync(run, there)
    assert CheckpointManager(there).steps() == [3]
    assert sync(run, there) == [1, 2]


def test_a_damaged_step_is_named_and_the_others_are_there(run: pathlib.Path) -> None:
    there = run.parent / "there"
    chunk = run / "000003/w/c.0.0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="000003.*cannot be"):
        sync(run, there)
    assert CheckpointManager(there).steps() == [1, 2]


def test_a_damaged_step_there_is_replaced(run: pathlib.Path) -> None:
    there = run.parent / "there"
    sync(run, there)
    (there / "000002/w/c.0.0").unlink()
    assert sync(run, there) == [2]
    assert eqx_ckpt.inspect.verify(there / "000002")


def test_a_step_of_another_run_is_never_replaced(run: pathlib.Path) -> None:
    there, other = run.parent / "there", run.parent / "other"
    save(other, 1, 4)
    with pytest.raises(eqx_ckpt.CheckpointError, match="are of different histories"):
        sync(run, other)
    assert CheckpointManager(other).steps() == [1, 4]
    sync(run, there)
    shutil.rmtree(there / "000001")
    shutil.copytree(other / "000001", there / "000001")
    with pytest.raises(eqx_ckpt.CheckpointError, match="is not step 1 in"):
        sync(run, there)
    history = eqx_ckpt.inspect.read_manifest(other / "000001").history
    assert eqx_ckpt.inspect.read_manifest(there / "000001").history == history


def test_what_is_no_step_is_named(run: pathlib.Path) -> None:
    (run / "000001").rename(run / "1")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'000001'"):
        sync(run, run.parent / "there")
    assert CheckpointManager(run.parent / "there").steps() == [2, 3]


def test_a_step_that_vanishes_is_not_missed(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the `keep` of a training removes it meanwhile."""
    real = module.upload

    def upload(*args: Any) -> None:
        shutil.rmtree(run / "000002", ignore_errors=True)
        real(*args)

    monkeypatch.setattr(module, "upload", upload)
    assert sync(run, run.parent / "there") == [1, 3]


def test_places(run: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="would have each step twice"):
        sync(run, run)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="There is no step"):
        sync(run.parent / "none", run)
