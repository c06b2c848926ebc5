"""Random schedules of processes that share a disk, and what must hold.

`make simulate MINUTES=10` tries as many as it can. A failure names its seed, and
`python -m tests.disks.schedules --seed SEED --count 1` repeats it.
"""

import errno
import os

from tests.disks.simulated_disk import SimulatedDisk, temporary_folder
from tests.linearizable import Call
from tests.scheduler import try_all
from tests.schedules import LONG, Path, Saves, Schedule, Whole
from tests.stores.references import Incremental
from tests.stores.simulated_bucket import COMMIT, Simulation


# About how many operations a process makes.
MANY = 200


class DiskSchedule(Schedule):
    """Processes that use one directory: they stop or die, the disk or the power fails.

    After a power cut, what had been acknowledged is there, and all that is listed can
    be read; in the end, nothing is left over.

    **Attributes:**

    - `disk`: where they save.
    """

    def __init__(self, seed: int, root: str, saves: Saves) -> None:
        simulation = Simulation(seed, 1)
        super().__init__(seed, simulation, saves)
        self.disk = SimulatedDisk(simulation, root)
        self._root = root

    def play(self) -> None:
        disk, simulation = self.disk, self.simulation
        self.begin()
        self._draw()
        disk.play(self.process)
        if disk.is_cut:
            self._forget()
            disk.restart()
            simulation.grow(self._saves.processes)
            disk.play(self.process)
        disk.settle()
        simulation.grow(1)
        disk.play(self.last)
        self.check_order()
        blamed = [error for error in self.errors if "only you can write" in error]
        assert not blamed, self.said("nobody else has written there")
        left = [name for name in os.listdir(self._root) if name.startswith(".")]
        assert not left, self.said(f"{left} is left over")

    def _draw(self) -> None:
        """Draw what goes wrong."""
        disk, chance = self.disk, self.simulation.chance
        slow = chance.choice((0.001, 0.1, 10.0))
        disk.latency = lambda: chance.choice((0.0, 0.001, 0.001, slow))
        processes = self.simulation.processes
        for process in chance.sample(processes, chance.choice((0, 1, 2))):
            for at in chance.sample(range(1, MANY), chance.randint(1, 5)):
                process.stops[at] = chance.choice((0.1, 10.0, LONG))
            if chance.random() < 0.5:
                process.stops[COMMIT] = LONG
        for process in chance.sample(processes, chance.choice((0, 0, 1))):
            process.dies_at = chance.randint(1, MANY)
        every = MANY * len(processes)
        if chance.random() < 0.3:
            disk.cut_after(chance.randint(1, every))
        kind = chance.random()
        if kind < 0.4:
            at = disk.operations + chance.randint(1, every)
            # After a flush that fails, a save is taken back.
            only = chance.choice(("", "fsync"))
            disk.fail_once(
                chance.choice((errno.EIO, errno.ENOSPC)),
                lambda what: disk.operations >= at and only in ("", what),
            )
        elif kind < 0.5:
            first, last = sorted(chance.sample(range(every), 2))
            disk.is_full = lambda: first < disk.operations < last

    def _forget(self) -> None:
        """What was seen before a power cut, and not acknowledged, may be gone."""
        for calls in self.calls.values():
            calls[:] = [call for call in calls if _has_effect(call)]


def _has_effect(call: Call) -> bool:
    return call.kind != "read" and call.outcome in ("done", "unknown")


def in_folder(root: str) -> Path:
    return lambda step=0: f"{root}/{step:06}" if step else root


def play(seed: int) -> DiskSchedule:
    with temporary_folder() as root:
        saves = Whole if seed % 2 else Incremental
        schedule = DiskSchedule(seed, root, saves(seed, in_folder(root)))
        schedule.play()
        return schedule


if __name__ == "__main__":
    try_all(play, __doc__)
