"""Random schedules of the processes of a job that save and ask, and what must hold.

`make simulate MINUTES=10` tries as many as it can. A failure names its seed, and
`python -m tests.multiprocess.schedules --seed SEED --count 1` repeats it.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import eqx_ckpt
from tests.scheduler import now, try_all
from tests.support import JointAttempt

from .simulation import pause, Simulation


TIMEOUT = 20.0  # seconds, of the simulation
LONG = 2000.0

# So often all try to save at last, until they have: they may be out of step before.
LAST = 6

TREE = {"a": np.arange(3), "b": 1.5}

SAVED, FAILED, UNKNOWN = "saved", "failed", "not known"


class Schedule:
    """One run of a job: some rounds of calls, and one that must succeed.

    In a round, each process pauses, and then saves to the place of that round, or asks
    for the newest step of a run, or, seldom, calls something else than the others.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        self._seed = seed
        self._directory = directory
        self.size = random.Random(seed).choice((2, 3, 4))
        simulation = self._simulation = Simulation(self.size, seed)
        chance = simulation.chance
        slowest = chance.choice((0.001, 0.01, 3.0))
        simulation.latency = lambda: chance.choice((1e-4, 1e-3, slowest))
        self._rounds = chance.randint(1, 4)
        if chance.random() < 0.5:
            client = chance.choice(simulation.clients)
            client.dies_at = chance.randint(1, 60)
        self._calls = [self._drawn() for _ in range(self._rounds)]
        self.told: list[dict[int, str]] = [{} for _ in range(self._rounds + LAST)]
        self.errors: list[str] = []
        self.longest = 0.0

    def _drawn(self) -> list[tuple[str, float]]:
        """What each process calls in a round, and how long it pauses before."""
        chance = self._simulation.chance
        common = chance.choice(("save", "save", "latest"))
        most = chance.choice((0.0, 0.1, TIMEOUT, 3 * TIMEOUT))
        calls = [common] * self.size
        if chance.random() < 0.2:
            calls[chance.randrange(self.size)] = chance.choice(("save", "latest", ""))
        return [(call, chance.uniform(0, most)) for call in calls]

    def play(self) -> None:
        with contextlib.ExitStack() as stack:
            for name in ("write", "_publish"):
                slow = self._slow(getattr(JointAttempt, name))
                stack.enter_context(mock.patch.object(JointAttempt, name, slow))
            self._simulation.play(self._process)
        self._check()

    def _slow(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same, by a disk that takes longer than others wait, now and then."""

        def slow(*args: Any) -> Any:
            pause(self._simulation.chance.choice((0.0, 0.1, 2 * TIMEOUT)))
            found = work(*args)
            pause(self._simulation.chance.choice((0.0, 0.1, TIMEOUT)))
            return found

        return slow

    def _process(self, index: int) -> None:
        manager = eqx_ckpt.CheckpointManager(self._directory / "run", timeout=TIMEOUT)
        for number, calls in enumerate(self._calls):
            call, seconds = calls[index]
            pause(seconds)
            begin = now()
            if call == "save":
                self.told[number][index] = self._save(number, TIMEOUT)
            elif call:
                with contextlib.suppress(eqx_ckpt.CheckpointError):
                    manager.latest()
            self.longest = max(self.longest, now() - begin)
        for number in range(self._rounds, len(self.told)):
            timeout = TIMEOUT if self._is_short_of_one() else LONG
            self.told[number][index] = told = self._save(number, timeout)
            if told == SAVED:
                return

    def _save(self, number: int, timeout: float) -> str:
        try:
            eqx_ckpt.tree_serialise_leaves(self.place(number), TREE, timeout=timeout)
        except eqx_ckpt.CheckpointError as e:
            self.errors.append(f"round {number}, process {jax.process_index()}: {e}")
            return UNKNOWN if "is not known" in str(e) else FAILED
        return SAVED

    def _is_short_of_one(self) -> bool:
        """Whether a process has died: what the others wait for will not come."""
        return any(client.is_dead for client in self._simulation.clients)

    def place(self, number: int) -> Path:
        return self._directory / f"save{number}"

    def _check(self) -> None:
        for number, told in enumerate(self.told):
            where = "\n".join(
                [f"seed {self._seed}, round {number}: {told}", *self.errors]
            )
            is_there = (self.place(number) / "zarr.json").exists()
            words = {*told.values()}
            assert not (SAVED in words and not is_there), f"{where}; nothing is there"
            assert not (FAILED in words and is_there), f"{where}; it is there"
        assert self.longest < 30 * TIMEOUT, f"seed {self._seed}: {self.longest} s"
        if not self._is_short_of_one():
            last = [
                told for told in self.told[self._rounds :] if SAVED in told.values()
            ]
            assert [len(told) for told in last] == [self.size], (
                f"seed {self._seed}, at last: {self.told}\n" + "\n".join(self.errors)
            )


def play(seed: int) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        Schedule(seed, Path(directory)).play()


if __name__ == "__main__":
    try_all(play, __doc__)
