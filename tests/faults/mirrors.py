"""A run with a mirror; run in a child of the zygote."""

import pathlib
from typing import Any

import numpy as np

import eqx_ckpt


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(100, step), "step": step}


def _manager(place: str) -> eqx_ckpt.CheckpointManager:
    mirror = eqx_ckpt.Mirror(f"{place}/there", keep=eqx_ckpt.keep_last(1))
    return eqx_ckpt.CheckpointManager(f"{place}/here/run", mirror=mirror)


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
