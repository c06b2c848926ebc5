"""Schedules of the scenes of the model of a commit, and what the model says of them.

`python -m tests.stores.commits --seed SEED --count 1` repeats one.
"""

import functools as ft
import re
from collections.abc import Callable, Set
from typing import NamedTuple

import eqx_ckpt
from tests.model.bucket import Bucket, OLD, State
from tests.model.traces import Follower, Sight, Trace
from tests.scheduler import now, try_all
from tests.schedules import delete, read, text_of, tree
from tests.stores.schedules import path
from tests.stores.simulated_bucket import COMMIT, Simulation, STALLED


STEP = 100
KEY = f"run/{STEP:06}/zarr.json"
ATTEMPT = re.compile(rf"run/{STEP:06}/(@[0-9a-f]{{32}}/)([ab]/.*)")

# Longer than any lease.
LONG = 1400.0

SCENES = [*Bucket.scenes]

SAID = {"saved": "saved", "unknown": "unknown", "failed": "failed", "refused": "failed"}


class Stored(NamedTuple):
    """Whose manifest is there, whose data are whole, and whose are there in part."""

    manifest: str
    whole: Set[str]
    partly: Set[str]


def see(state: State) -> Sight:
    """What is stored, and what A and B have said."""
    said = ("" if w.is_dead else SAID.get(w.at, "") for w in state.writers)
    return Sight(Stored(state.manifest, state.data, state.data), tuple(said))


def shows(model: Stored, code: Stored) -> bool:
    """Whether the model may have what the code has: data in part are there, or not."""
    return model.manifest == code.manifest and code.whole <= model.whole <= code.partly


@ft.cache
def follower(scene: str, faults: tuple[int, int, int, int]) -> Follower[Stored]:
    """For a scene in which at most this goes wrong; a reader changes nothing."""
    model = Bucket(scene)
    start = model.start()._replace(faults=faults, reader=("stopped", ""))
    return Follower(model, start, see, shows)


class Scene:
    """One schedule of a scene.

    **Attributes:**

    - `simulation`: where it runs.
    - `trace`: what was there, one after another.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.scene = SCENES[seed % len(SCENES)]
        self.trace = Trace[Stored]()
        self._said = ["", ""]
        self._notes: list[str] = []
        self._names: dict[str, str] = {}
        self._overwrites = self.scene in ("overwrite", "delete")
        simulation = self.simulation = Simulation(seed, 1)
        simulation.changed = self._look
        if self._overwrites:
            simulation.play(
                lambda _: eqx_ckpt.tree_serialise_leaves(path(STEP), tree(0))
            )
            self._names = dict.fromkeys(self._names, OLD)
        self.trace = Trace[Stored]()
        self._look()

    def play(self) -> None:
        simulation, chance = self.simulation, self.simulation.chance
        slow = chance.choice((0.02, 1.0, 10.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        works: list[Callable[[], None]] = [ft.partial(self._write, 0)]
        if self.scene in ("create", "overwrite"):
            works.append(ft.partial(self._write, 1))
        writers = len(works)
        works += [self._sweep, self._read]
        if self.scene in ("delete", "at once"):
            works.append(self._delete)
        simulation.grow(len(works))
        self._fail(writers)
        simulation.play(lambda index: works[index]())
        model = follower(self.scene, self._faults())
        self.trace.check(model, f"seed {self.seed}, {self.scene}", self._notes)

    def _fail(self, writers: int) -> None:
        simulation, chance = self.simulation, self.simulation.chance
        simulation.draw(0.5, latest=STALLED)
        # In the model, a deletion is sent once.
        for request in [*simulation.faults]:
            if request.kind == "delete":
                del simulation.faults[request]
        if chance.random() < 0.5:
            process = simulation.processes[chance.randrange(writers)]
            process.stops[chance.choice((COMMIT, chance.randint(1, 25)))] = LONG
        if chance.random() < 0.3:
            process = simulation.processes[chance.randrange(writers)]
            process.dies_at = chance.randint(1, 25)

    def _faults(self) -> tuple[int, int, int, int]:
        """How often the model may do what went wrong here."""
        simulation = self.simulation
        kinds = [*simulation.faults.values()]
        wrong = kinds.count("wrong")
        stopped = any(p.has_stopped for p in simulation.processes)
        dead = any(p.dies_at <= p.requests for p in simulation.processes)
        return len(kinds) - wrong, wrong, int(stopped), int(dead)

    def _write(self, index: int) -> None:
        chance = self.simulation.chance
        self.simulation.pause(chance.choice((0.0, 0.0, 0.1, 1.0, LONG)))
        try:
            eqx_ckpt.tree_serialise_leaves(
                path(STEP), tree(index + 1), overwrite=self._overwrites
            )
            outcome = "saved"
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._notes.append(f"{'AB'[index]} at {now():.1f}: {text_of(e)}")
            outcome = "unknown" if "is not known" in text_of(e) else "failed"
            if "both would seem to succeed" in text_of(e):
                outcome = ""  # The model does not try what the store can do.
        self._said[index] = outcome
        self._look()

    def _sweep(self) -> None:
        for _ in range(3):
            self.simulation.pause(self.simulation.chance.choice((0.0, 100.0)))
            self._try(lambda: eqx_ckpt.inspect.garbage_collect(path()))

    def _read(self) -> None:
        for _ in range(6):
            self.simulation.pause(self.simulation.chance.choice((0.0, 1.0, 500.0)))
            self._try(lambda: read(path(STEP)))

    def _delete(self) -> None:
        self.simulation.pause(self.simulation.chance.choice((0.0, 1.0, LONG)))
        self._try(lambda: delete(path, STEP))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._notes.append(f"at {now():.1f}: {e!r}")

    def _look(self) -> None:
        """Note what is there, if it is not what was there before."""
        values = self.simulation.values
        data: dict[str, set[str]] = {}
        for key in values:
            if found := ATTEMPT.fullmatch(key):
                data.setdefault(found[1], set()).add(found[2])
        for root in data.keys() - self._names.keys():
            self._names[root] = "AB"[self.simulation.sender]
        manifest = values.get(KEY, (b"", b""))[0].decode()
        named = [name for root, name in self._names.items() if root in manifest]
        whole = {self._names[root] for root in data if len(data[root]) == 4}
        there = Stored("".join(named), whole, {self._names[root] for root in data})
        self.trace.note(Sight(there, tuple(self._said)))


def play(seed: int) -> Scene:
    scene = Scene(seed)
    scene.play()
    return scene


if __name__ == "__main__":
    try_all(play, __doc__)
