"""Schedules of the scenes of the model of a recording, and what the model says of them.

`python -m tests.stores.appends --seed SEED --count 1` repeats one.
"""

import contextlib
import functools as ft
import json
from typing import NamedTuple

import numpy as np

import eqx_ckpt
from eqx_ckpt.recording import Recording
from tests.model.recording import Recording as Model, State
from tests.model.traces import Follower, Sight, Trace
from tests.scheduler import Died, local, now, try_all
from tests.schedules import text_of
from tests.stores.schedules import path
from tests.stores.simulated_bucket import Simulation


LIKE = {"x": np.int32(0)}

RECORD, LEASE = "run/recording.json", "run/writer.lock"
CHUNKS = ("run/samples/x/c.0", "run/samples/x/c.1")

# The samples of a dead writer, of A and of B.
NAMES = ("O", "A", "B")

# Longer than a lease.
LONG = 60.0

# About how many requests a writer sends.
MANY = 40

SCENES = [*Model.scenes]
SAID = {"committed": "committed", "refused": "refused", "taken": "refused"}


class Stored(NamedTuple):
    """Who has the lease; whose record it is, and whose chunks it names; the chunks."""

    lease: str
    record: tuple[str, ...]
    chunks: tuple[str, ...]


def see(state: State) -> Sight:
    """What is stored, and what A and B have said."""
    said = ("" if w.is_dead else SAID.get(w.at, "") for w in state.writers)
    return Sight(Stored(state.lease, state.record, state.chunks), tuple(said))


@ft.cache
def follower(scene: str, suspensions: int, deaths: int, lost: int) -> Follower[Stored]:
    """For a scene in which at most this goes wrong; the dead writer has the lease."""
    model = Model(scene)
    start = model.start()._replace(
        lease="O", suspensions=suspensions, deaths=deaths, lost=lost
    )
    return Follower(model, start, see, Stored.__eq__)


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
        # By their first values: of a lease, a record, and a chunk.
        self._names = {"free": "", "": ""}
        self._is_begun = False
        simulation = self.simulation = Simulation(seed, 1)
        simulation.changed = self._look
        simulation.play(self._die)
        self.trace = Trace[Stored]()
        self._is_begun = True
        self._look()

    def play(self) -> None:
        simulation, chance = self.simulation, self.simulation.chance
        slow = chance.choice((0.02, 1.0, 10.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.grow(2 if self.scene == "two" else 1)
        self._fail()
        simulation.play(self._write)
        model = follower(self.scene, *self._faults())
        self.trace.check(model, f"seed {self.seed}, {self.scene}", self._notes)

    def _fail(self) -> None:
        simulation, chance = self.simulation, self.simulation.chance
        simulation.draw(0.7, latest=LONG)
        # The model knows of lost and late requests, and of no wrong answers.
        for request, fault in [*simulation.faults.items()]:
            if fault == "wrong":
                del simulation.faults[request]
        for process in simulation.processes:
            if chance.random() < 0.3:
                process.stops[chance.randint(1, MANY)] = LONG
            if chance.random() < 0.2:
                process.dies_at = chance.randint(1, MANY)

    def _faults(self) -> tuple[int, int, int]:
        """How often the model may do what went wrong here.

        A lease also lapses if its writer has to wait for a request for long.
        """
        simulation = self.simulation
        stopped = sum(p.has_stopped for p in simulation.processes)
        dead = sum(p.dies_at <= p.requests for p in simulation.processes)
        lost = len(simulation.faults)
        return stopped + lost, dead, lost

    def _die(self, _: int) -> None:
        """Append a chunk, and die before it is committed."""
        with contextlib.suppress(Died):
            recording = self._opened()
            recording.append({"x": np.int32(NAMES.index("O"))})
            local.process.dies_at = local.process.requests + 1
            recording.commit()

    def _write(self, index: int) -> None:
        """Append a chunk, and commit it."""
        chance = self.simulation.chance
        name = "AB"[index]
        self.simulation.pause(chance.choice((0.0, 0.0, 0.1, 1.0, LONG)))
        try:
            with contextlib.closing(self._opened()) as recording:
                self.simulation.pause(chance.choice((0.0, 0.0, 1.0, LONG)))
                recording.append({"x": np.int32(NAMES.index(name))})
                recording.commit()
                self._says(index, "committed")
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._notes.append(f"{name} at {now():.1f}: {text_of(e)}")
            # The model does not try what the store can do.
            if "both would seem to succeed" not in text_of(e):
                self._says(index, self._said[index] or "refused")

    def _says(self, index: int, what: str) -> None:
        self._said[index] = what
        self._look()

    def _opened(self) -> Recording:
        return Recording(path(), LIKE, chunk_bytes=4, timeout=100.0)

    def _look(self) -> None:
        """Note what is there, if it is not what was there before."""
        values = {key: value for key, (value, _) in self.simulation.values.items()}
        sender = "AB"[self.simulation.sender] if self._is_begun else "O"
        chunks = [values.get(key, b"") for key in CHUNKS]
        for chunk in filter(None, chunks):
            self._names[chunk[4:].hex()] = NAMES[chunk[0]]
        lease = values.get(LEASE, b"").decode().split(" ")[0]
        record = json.loads(values.get(RECORD, b'{"writer": "", "checksums": {}}'))
        for name in (lease, record["writer"]):
            self._names.setdefault(name, sender)
        text = "".join(record["checksums"].get("x", ""))
        named = [text[i : i + 8] for i in range(0, len(text), 8)]
        there = Stored(
            self._names[lease],
            tuple(self._names[one] for one in (record["writer"], *named)),
            tuple(self._names[chunk[4:].hex()] for chunk in chunks),
        )
        self.trace.note(Sight(there, tuple(self._said)))


def play(seed: int) -> Scene:
    scene = Scene(seed)
    scene.play()
    return scene


if __name__ == "__main__":
    try_all(play, __doc__)
