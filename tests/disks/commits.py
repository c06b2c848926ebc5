"""Schedules of the scenes of the model of a commit, and what the model says of them.

`python -m tests.disks.commits --seed SEED --count 1` repeats one.
"""

import errno
import functools as ft
import math
import os
import re
from collections.abc import Callable, Set
from typing import NamedTuple

import eqx_ckpt
from tests.disks.schedules import in_folder
from tests.disks.simulated_disk import aside, SimulatedDisk, temporary_folder
from tests.model.directory import DELETER, Directory, NAMES, OLD, State
from tests.model.traces import Follower, Sight, Trace
from tests.scheduler import local, now, try_all
from tests.schedules import delete, read, text_of, tree
from tests.stores.simulated_bucket import COMMIT, Simulation


STEP = 100
NAME = f"{STEP:06}"
HIDDEN = re.compile(rf"\.{NAME}\.[0-9a-f]{{32}}\.tmp")

# Of a checkpoint of this tree, with its manifest.
FILES = 5

SCENES = [*Directory.scenes]

SAID = {"saved": "saved", "refused": "refused", "done": "done"}


class Stored(NamedTuple):
    """Whose directory is at the path, whose are whole, and whose are there in part."""

    target: str
    whole: Set[str]
    partly: Set[str]


def see(state: State) -> Sight:
    """What is on the disk, and what A, B and the deleter have said."""
    said = (SAID.get(at, "") for at in state.at)
    return Sight(Stored(state.target, state.whole, state.whole), tuple(said))


def shows(model: Stored, code: Stored) -> bool:
    """Whether the model may have what the code has: files in part are there, or not."""
    return model.target == code.target and code.whole <= model.whole <= code.partly


@ft.cache
def follower(scene: str, deaths: int, cuts: int) -> Follower[Stored]:
    """For a scene in which at most this goes wrong; a reader changes nothing."""
    model = Directory(scene)
    start = model.start()._replace(
        deaths=deaths, cuts=cuts, sweeps=math.inf, reader=("", "", "", "off")
    )
    return Follower(model, start, see, shows)


class Scene:
    """One schedule of a scene.

    **Attributes:**

    - `simulation`: where it runs.
    - `trace`: what was there, one after another.
    """

    def __init__(self, seed: int, root: str) -> None:
        self.scene = SCENES[seed % len(SCENES)]
        self._what = f"seed {seed}, {self.scene}"
        self._start = Directory(self.scene).start()
        self.trace = Trace[Stored]()
        self._root = root
        self._path = in_folder(root)
        self._said = ["", "", ""]
        self._span = 0.0
        self._notes: list[str] = []
        # Whose directory has which inode.
        self._owners: dict[int, str] = {}
        simulation = self.simulation = Simulation(seed, 1)
        if self._start.target:
            simulation.play(
                lambda _: eqx_ckpt.tree_serialise_leaves(self._path(STEP), tree(0))
            )
            self._owners[os.stat(self._path(STEP)).st_ino] = OLD
        self._works = self._drawn_works()
        simulation.grow(len(self._works))
        self._disk = SimulatedDisk(simulation, root)
        self._disk.changed = self._changed
        self._fail()

    def _drawn_works(self) -> list[Callable[[], None]]:
        """Of A and of who else may be there, in the order of the model."""
        works = [ft.partial(self._write, 0)]
        if self.scene == "delete":
            works.append(self._delete)
        else:
            works.append(ft.partial(self._write, 1))
        return [*works, self._sweep, self._read]

    def _fail(self) -> None:
        disk, simulation, chance = self._disk, self.simulation, self.simulation.chance
        latencies = (0.0, 0.001, 0.001, chance.choice((0.001, 0.1, 10.0)))
        disk.latency = lambda: chance.choice(latencies)
        # About as long as a save takes.
        self._span = 40 * sum(latencies) / len(latencies)
        for process in simulation.processes:
            if chance.random() < 0.5:
                at = chance.choice((COMMIT, chance.randint(1, 80)))
                process.stops[at] = chance.uniform(0.0, 2.0) * self._span
        if chance.random() < 0.4:
            process = simulation.processes[chance.randrange(2)]
            process.dies_after_commit = chance.random() < 0.3
            process.dies_at = chance.randint(1, 80)
        if chance.random() < 0.4:
            disk.cut_after(chance.randint(1, 300))
        if self._start.bad_flushes:
            writer = simulation.processes[chance.randrange(2)]
            disk.fail_once(
                errno.EIO, lambda what: what == "fsync" and local.process is writer
            )

    def play(self) -> None:
        self._look()
        self._disk.play(lambda index: self._works[index]())
        cuts = int(self._disk.is_cut)
        if cuts:
            self._look_after_the_cut()
        is_dead = any(p.dies_at <= p.requests for p in self.simulation.processes)
        model = follower(self.scene, int(is_dead), cuts)
        self.trace.check(model, self._what, self._notes)

    def _write(self, index: int) -> None:
        self._pause(0.5)
        try:
            eqx_ckpt.tree_serialise_leaves(
                self._path(STEP), tree(index + 1), overwrite=self.scene != "create"
            )
            self._say(index, "saved")
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._notes.append(f"{'AB'[index]} at {now():.1f}: {text_of(e)}")
            self._say(index, "refused")

    def _delete(self) -> None:
        self._pause(2.0)
        if self._try(lambda: delete(self._path, STEP)):
            self._say(NAMES.index(DELETER), "done")

    def _sweep(self) -> None:
        for _ in range(4):
            self._pause(1.0)
            self._try(lambda: eqx_ckpt.inspect.garbage_collect(self._path(0)))

    def _read(self) -> None:
        for _ in range(4):
            self._pause(1.0)
            self._try(lambda: read(self._path(STEP)))

    def _pause(self, most: float) -> None:
        """Let time pass, in which so many saves may be made."""
        self.simulation.pause(self.simulation.chance.uniform(0.0, most) * self._span)

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except eqx_ckpt.CorruptCheckpointError as e:
            raise AssertionError(f"{self._what}: {e}") from e
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._notes.append(f"at {now():.1f}: {e!r}")
            return False
        return True

    def _say(self, index: int, what: str) -> None:
        self._said[index] = what
        with aside():
            self._look()

    def _changed(self, path: str) -> None:
        """A process has made a directory, perhaps."""
        if HIDDEN.fullmatch(os.path.basename(path)) and os.path.isdir(path):
            writer = "AB"[local.process.index % 2]
            self._owners.setdefault(os.stat(path).st_ino, writer)
        self._look()

    def _look(self) -> None:
        """Note what is there, if it is not what was there before."""
        target, counts = "", dict[str, int]()
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name == NAME or HIDDEN.fullmatch(entry.name):
                    owner = self._owners[entry.inode()]
                    target = owner if entry.name == NAME else target
                    counts[owner] = _count_files(entry.path)
        whole = {owner for owner, count in counts.items() if count == FILES}
        self._note(Stored(target, whole, {*counts}))

    def _look_after_the_cut(self) -> None:
        """Of what was not flushed, there may be more than the model keeps."""
        self._disk.restart()
        try:
            value = read(self._path(STEP))
        except eqx_ckpt.CorruptCheckpointError as e:
            raise AssertionError(f"{self._what}: {e}") from e
        target = "" if value is None else f"{OLD}AB"[value]
        self._note(Stored(target, {target} - {""}, {OLD, "A", "B"}))

    def _note(self, there: Stored) -> None:
        self.trace.note(Sight(there, tuple(self._said)))


def _count_files(folder: str) -> int:
    """How many files that are not empty are below a folder."""
    count = 0
    for path, _, names in os.walk(folder):
        count += sum(os.path.getsize(f"{path}/{name}") > 0 for name in names)
    return count


def play(seed: int) -> Scene:
    with temporary_folder() as root:
        scene = Scene(seed, root)
        scene.play()
        return scene


if __name__ == "__main__":
    try_all(play, __doc__)
