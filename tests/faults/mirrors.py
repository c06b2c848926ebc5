"""A run with a mirror; run in a child of the zygote."""

import os
import pathlib
import shutil
import warnings
from typing import Any

import jax
import numpy as np

import eqx_ckpt

from . import failing_jobs
from .programs import assert_same, TIMEOUT


def state(step: int) -> dict[str, Any]:
    return {"same": np.arange(100), "w": np.full(100, step), "step": step}


def _manager(place: str) -> eqx_ckpt.CheckpointManager:
    mirror = eqx_ckpt.Mirror(f"{place}/there", keep=eqx_ckpt.keep_last(1))
    run = f"{place}/here/run"
    return eqx_ckpt.CheckpointManager(run, incremental=True, mirror=mirror)


def train(place: str, steps: int) -> None:
    with _manager(place) as manager:
        if manager.latest() is not None:
            manager.restore(state(0))
        manager.save(steps, state(steps)).result()


def again(place: str) -> list[int]:
    """A new manager uploads what is due; what is there then, each step intact."""
    with _manager(place):
        pass
    there = eqx_ckpt.CheckpointManager(f"{place}/there")
    for step in there.steps():
        found = there.restore(state(0), step)
        assert found["step"] == step
        assert (found["w"] == step).all()
    hidden = pathlib.Path(place, "there").glob(".*")
    assert [*hidden] == []
    return there.steps()


def upload(run: str, there: str, pid: str) -> None:
    """Upload what is due, in a process that says which one it is."""
    pathlib.Path(pid).write_text(str(os.getpid()))
    with eqx_ckpt.CheckpointManager(run, mirror=eqx_ckpt.Mirror(there)):
        pass


def train_together(run: str, there: str) -> list[dict[str, Any]]:
    """Each process of a job: what it sees after each part of a training."""
    state, is_first = failing_jobs.state, jax.process_index() == 0
    keep = eqx_ckpt.keep_last(1)
    seen: list[dict[str, Any]] = []

    def manager() -> eqx_ckpt.CheckpointManager:
        mirror = eqx_ckpt.Mirror(there, keep=eqx_ckpt.keep_last(2))
        return eqx_ckpt.CheckpointManager(run, keep=keep, mirror=mirror)

    def look(of: eqx_ckpt.CheckpointManager) -> None:
        now: dict[str, Any] = {"latest": of.latest(), "steps": of.steps()}
        now |= {"mirrored": of.mirrored(), "uploads": [*of.uploads()]}
        seen.append(now | {"best": of.best("loss")})

    with manager() as first:
        assert first.latest() is None
        for step in (1, 2, 3):
            first.save(step, state(step), metadata={"loss": step}).result()
            if is_first:
                assert first.uploads()[step].result(TIMEOUT) is None
        look(first)
        assert_same(first.restore(state(0)), state(3))
        assert_same(first.restore(state(0), 2), state(2))  # Only the mirror has it.
        if is_first:
            # Process 0 has none of these rows.
            chunk = pathlib.Path(run, "000003", "w", "c.3.0")
            chunk.write_bytes(bytes(chunk.stat().st_size))
        first.latest()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = first.restore(state(0), on_damage="fallback")
        assert_same(found, state(3))
        seen[-1]["warned"] = [str(warning.message) for warning in warned]
    if is_first:
        shutil.rmtree(run)
    with manager() as second:
        assert_same(second.restore(state(0)), state(3))
        second.save(4, state(4), metadata={"loss": 0})
    # The end has waited: nothing here waits for process 0, but for this.
    assert second.latest() == 4
    look(second)
    # Nothing was measured, so a save is due; the first process decides.
    idle = eqx_ckpt.save_when_idle()
    assert idle(5, 4) == is_first
    with eqx_ckpt.CheckpointManager(run, when=idle) as third:
        assert third.should_save(5)
    return seen
