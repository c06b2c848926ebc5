"""Schedules of machines that train, and upload their steps to one bucket.

`python -m tests.stores.mirrors --seed SEED --count 1` repeats one.
"""

import itertools
import pathlib
import shutil

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_last, Mirror
from tests.disks.simulated_disk import aside, SimulatedDisk, temporary_folder
from tests.scheduler import Died, local, now, try_all
from tests.schedules import text_of
from tests.stores.references import tree
from tests.stores.schedules import needs, path
from tests.stores.simulated_bucket import COMMIT, Process, Simulation
from tests.support import from_bytes, LocalProblem, Manifest, OtherHistory


# Longer than a manager waits for an upload that is silent, and than requests are late.
LONG = 700.0

# About how many requests and operations of a machine there are.
MANY = 500


class Training:
    """Machines that train one after another, or at a time, as they find the steps.

    Each has a disk of its own, which it may lose when it is killed. What was said to be
    in the bucket stays there, or what came from it; and never two histories are said
    to be. Who restores misses nothing, or is told of two histories.

    **Attributes:**

    - `simulation`: where they run.
    - `parents`: of each value that a step has had, that from which it came.
    - `mirrored`: the values that were said to be in the bucket.
    """

    def __init__(self, seed: int, folder: str) -> None:
        self.seed = seed
        self._folder = pathlib.Path(folder)
        self.parents: dict[int, int] = {}
        self.mirrored: set[int] = set()
        self._notes: list[str] = []
        self._problems: list[str] = []
        self._known: dict[bytes, tuple[int, set[str]]] = {}
        simulation = self.simulation = Simulation(seed, 2)
        simulation.changed = self._look
        self._disk = SimulatedDisk(simulation, folder)
        chance = simulation.chance
        slow = chance.choice((0.02, 1.0, 10.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.draw(0.4, latest=60.0)
        self._incremental = chance.random() < 0.5
        self._keep = chance.choice((1, 1, 2)), chance.choice((1, 1, 2))
        # The second one begins while the first one is only suspended.
        self._are_two = chance.random() < 0.5
        if self._are_two:
            at = chance.choice((COMMIT, chance.randint(1, MANY)))
            simulation.processes[0].stops[at] = chance.uniform(0.2, 1.5) * LONG

    def play(self) -> None:
        works = [self._lives, self._second]
        self._disk.play(lambda index: works[index]())
        self._disk.settle()
        self.simulation.faults = {}
        self.simulation.latency = lambda: 0.02
        self.simulation.grow(1)
        self.simulation.play(self._last)
        assert not self._problems, self._told(self._problems[0])

    def _told(self, what: str) -> str:
        lines = [f"seed {self.seed}: {what}", f"parents: {self.parents}"]
        return "\n".join([*lines, *self._notes])

    def _lives(self) -> None:
        """Machine 1 is killed at some request, and begins anew, or loses its disk."""
        chance = self.simulation.chance
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.6:
                local.process.dies_at = chance.randint(1, MANY)
            try:
                self._train("1")
            except Died:
                self._note("is killed")
            local.process = Process(0)
            if chance.random() < 0.4:
                self._note("loses its disk")
                with aside():
                    shutil.rmtree(self._folder / "1", ignore_errors=True)
            self.simulation.pause(LONG)

    def _second(self) -> None:
        if self._are_two:
            self.simulation.pause(self.simulation.chance.uniform(0, LONG))
            self._train("2")

    def _train(self, name: str) -> None:
        """Go on from the newest step, as long as there is one history."""
        chance = self.simulation.chance
        keep, keep_there = self._keep
        manager = CheckpointManager(
            self._folder / name,
            keep=keep_last(keep),
            incremental=self._incremental,
            mirror=Mirror(path(), keep=keep_last(keep_there), timeout=100.0),
        )
        values: dict[int, int] = {}
        try:
            newest, value = self._restored(manager, name)
            for step in range(newest + 1, newest + 1 + chance.randint(1, 4)):
                self.simulation.pause(chance.choice((0.0, 0.3, 1.0, 10.0)))
                parent, value = value, len(self.parents) + 1
                self.parents[value] = parent
                manager.save(step, tree(value)).result()
                values[step] = value
                self._note(f"has saved step {step}, value {value}")
                self._ask(manager, values)
            self.simulation.pause(chance.choice((0.0, 1.0, 100.0)))
            self._ask(manager, values)
            manager.close(mirror=chance.random() < 0.5)
            self._ask(manager, values)
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._note(text_of(e))
            manager.close(mirror=False)

    def _restored(self, manager: CheckpointManager, name: str) -> tuple[int, int]:
        """The newest step and its value; all that was there has led to it."""
        there = [self._newest_of(name), *self.mirrored]
        try:
            step = manager.latest()
            value = manager.restore(tree(0), step)["s"] if step else 0
        except eqx_ckpt.CheckpointNotFoundError as e:
            # It was removed since it was listed.
            raise eqx_ckpt.CheckpointError("The other machine goes on.") from e
        self._note(f"restores step {step}, value {value}")
        for before in there:
            if not self._comes_from(value, before):
                self._problems.append(f"a restore has missed {before}")
        return step or 0, value

    def _newest_of(self, name: str) -> int:
        """The value of the newest step on a disk."""
        with aside():
            manifests = sorted((self._folder / name).glob("[0-9]*/zarr.json"))
            last = manifests[-1].read_bytes() if manifests else b""
        return _value_of(from_bytes(last, "")) if last else 0

    def _ask(self, manager: CheckpointManager, values: dict[int, int]) -> None:
        """Note what was said to be in the bucket, and see what was said not to be."""
        ended = {
            values[step]: future.exception()
            for step, future in manager.uploads().items()
            if step in values and future.done()
        }
        for value, error in ended.items():
            if error is None and value not in self.mirrored:
                self._note(f"has value {value} in the bucket")
                self.mirrored.add(value)
            if isinstance(error, OtherHistory) and value in self._there():
                self._problems.append(f"{value} was left in the bucket: {error}")
            if isinstance(error, LocalProblem):
                self._problems.append(f"{value} was removed too early: {error}")
        self._look()
        for one, other in itertools.combinations(sorted(self.mirrored), 2):
            if not self._comes_from(other, one):
                self._problems.append(f"{one} and {other} are two histories")

    def _comes_from(self, value: int, before: int) -> bool:
        while value > before:
            value = self.parents[value]
        return value == before

    def _look(self) -> None:
        """See that what was said to be in the bucket is there, or what came from it."""
        there = self._there()
        for value in self.mirrored:
            if not any(self._comes_from(other, value) for other in there):
                self._problems.append(f"at {now():.1f}: {value} is gone, of {there}")

    def _there(self) -> set[int]:
        """The values that are whole in the bucket."""
        found: set[int] = set()
        for key, (data, generation) in self.simulation.values.items():
            if not key.endswith("/zarr.json") or key.count("/") != 2:
                continue
            if generation not in self._known:
                manifest = from_bytes(data, key)
                step = int(key.split("/")[1])
                self._known[generation] = _value_of(manifest), needs(step, manifest)
            value, needed = self._known[generation]
            if needed <= self.simulation.values.keys():
                found.add(value)
        return found

    def _note(self, what: str) -> None:
        number = local.process.index + 1
        self._notes.append(f"{now():.1f}: machine {number} {what}")

    def _last(self, _: int) -> None:
        """A machine with an empty disk restores what the bucket has."""
        manager = CheckpointManager(self._folder / "3", mirror=Mirror(path()))
        try:
            self._restored(manager, "3")
        except OtherHistory as e:
            self._note(text_of(e))
        finally:
            manager.close(mirror=False)


def _value_of(manifest: Manifest) -> int:
    return int(manifest.leaves["s"].value or 0)


def play(seed: int) -> Training:
    with temporary_folder() as folder:
        training = Training(seed, folder)
        training.play()
        return training


if __name__ == "__main__":
    try_all(play, __doc__)
