"""A run that is forked; run in a child of the zygote."""

import pathlib
from typing import Any

import numpy as np

import eqx_ckpt

from .programs import assert_same


def state(step: int) -> dict[str, Any]:
    tree = {"same": np.arange(1000), "w": np.arange(1000.0) + step, "step": step}
    return tree | {"empty": np.zeros((0, 3))}


def train(place: str) -> None:
    with eqx_ckpt.CheckpointManager(f"{place}/a") as manager:
        for step in (1, 2):
            manager.save(step, state(step))


def fork(place: str) -> None:
    with eqx_ckpt.CheckpointManager(f"{place}/a") as manager:
        manager.fork(f"{place}/b")


def look(place: str) -> list[list[int]]:
    """The steps of both runs, each intact, after new managers have cleaned up."""
    found: list[list[int]] = []
    for run in ("a", "b"):
        manager = eqx_ckpt.CheckpointManager(f"{place}/{run}")
        for step in manager.steps():
            assert_same(manager.restore(state(0), step), state(step))
        assert [*pathlib.Path(place, run).glob(".*")] == []
        found.append(manager.steps())
    return found
