"""Schedules of processes whose steps share chunks in one bucket.

`python -m tests.stores.references --seed SEED --count 1` repeats one.
"""

import functools as ft
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from tests import schedules
from tests.scheduler import local, try_all
from tests.schedules import Doing, Path
from tests.stores.schedules import BucketSchedule, path
from tests.stores.simulated_bucket import COMMIT, Simulation
from tests.support import FAIL_AFTER, ORPHANED_AFTER


def tree(value: int) -> dict[str, Any]:
    """All share `b`, and some `c`."""
    return {**schedules.tree(value), "c": np.full(3, value // 3)}


class Incremental:
    """What is equal in an earlier step is referred to.

    Each process has a manager, which knows the step that it saved last; it also saves
    with any step as a base. The first one sweeps all the time. Half of the schedules
    are the scenes of the model: writers refer to a step that is deleted meanwhile.
    """

    steps = (100, 200, 300, 400)
    first = (100, 200)
    tree = staticmethod(tree)

    def __init__(self, seed: int, path: Path) -> None:
        self.path = path
        self.processes = 3 + seed % 2
        self._is_model = seed % 4 < 2
        self._chance = random.Random(seed)
        self._managers: dict[object, CheckpointManager] = {}

    def fail(self, simulation: Simulation) -> None:
        chance = simulation.chance
        # Of a writer that is alone, from when on it says what it refers to.
        first, most = (16, 40) if self._is_model else (1, 60)
        stops = simulation.processes[1].stops
        # Once for longer than a manager waits, or often, and never for so long.
        kind = chance.random()
        if kind < 0.4:
            at = chance.choice((COMMIT, chance.randint(1, most)))
            stops[at] = chance.uniform(0.5, 1.5) * ORPHANED_AFTER
        elif kind < 0.8:
            for at in chance.sample(range(first, most), chance.randint(5, 15)):
                stops[at] = chance.uniform(0.3, 0.7) * FAIL_AFTER
        for process in chance.sample(simulation.processes, chance.choice((0, 0, 1))):
            process.dies_at = chance.randint(1, 60)

    def calls(self, index: int, chance: random.Random) -> Iterator[Doing]:
        if not index:
            for _ in range(8):
                yield Doing(chance.uniform(0, 200.0), "sweep")
        elif not self._is_model:
            for _ in range(4):
                pause = chance.choice((0.0, 0.0, 5.0, chance.uniform(0, 600.0)))
                kind = chance.choice(("save", "overwrite", "delete", "read"))
                yield Doing(pause, kind, chance.choice(self.steps))
        elif index == 2:
            for step in chance.sample((100, 200), 2):
                yield Doing(
                    chance.choice((0.0, 0.5, 2.0, 100.0, 300.0)), "delete", step
                )
        else:
            step = 300 if index == 1 else 400
            yield Doing(chance.choice((0.0, 0.1, 100.0)), "save", step)
            yield Doing(0.0, "read", step)

    def _manager(self) -> CheckpointManager:
        process = local.process
        if process not in self._managers:
            self._managers[process] = CheckpointManager(self.path(0), incremental=True)
        return self._managers[process]

    def save(self, step: int, value: int, *, overwrite: bool) -> None:
        if not overwrite and self._chance.random() < 0.7:
            self._manager().save(step, tree(value)).result()
            return
        save = ft.partial(
            eqx_ckpt.tree_serialise_leaves,
            self.path(step),
            tree(value),
            overwrite=overwrite,
        )
        try:
            save(base=self.path(self._chance.choice(self.steps)))
        except eqx_ckpt.CheckpointNotFoundError:
            save()

    def delete(self, step: int) -> None:
        self._manager().delete(step)

    def end(self) -> None:
        if local.process in self._managers:
            self._managers[local.process].close()


def play(seed: int) -> BucketSchedule:
    schedule = BucketSchedule(seed, Incremental(seed, path))
    schedule.play()
    return schedule


if __name__ == "__main__":
    try_all(play, __doc__)
