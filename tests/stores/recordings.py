"""Schedules of processes that record to one place in a bucket, and resume there.

`python -m tests.stores.recordings --seed SEED --count 1` repeats one.
"""

import numpy as np

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from tests.scheduler import Died, local, now, try_all
from tests.schedules import text_of
from tests.stores.schedules import path
from tests.stores.simulated_bucket import COMMIT, Process, Simulation, STALLED


LIKE = {"x": np.int32(0)}
STATE = {"count": 0, "last": 0}

# Longer than a lease, and than a sweeper waits.
STOPS = (5.0, 60.0, 700.0)

# About how many requests of a process there are.
MANY = 150


class Recordings:
    """Processes that record numbers, each a new one, one after another or at a time.

    What `commit` has returned stays, followed by what was recorded after it; and so
    does its state.

    **Attributes:**

    - `simulation`: where they run.
    - `acknowledged`: all samples that are known to be committed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.acknowledged: list[int] = []
        self._count = 0
        self._notes: list[str] = []
        simulation = self.simulation = Simulation(seed, 3)
        chance = simulation.chance
        self._resumes = chance.random() < 0.7
        slow = chance.choice((0.02, 1.0, 10.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.draw(0.4, latest=STALLED)
        for process in chance.sample(simulation.processes, chance.choice((0, 1, 1, 2))):
            at = chance.choice((COMMIT, chance.randint(1, MANY)))
            process.stops[at] = chance.choice(STOPS)

    def play(self) -> None:
        self.simulation.play(self._process)
        self.simulation.faults = {}
        self.simulation.latency = lambda: 0.02
        self.simulation.grow(1)
        self.simulation.play(self._last)

    def _process(self, index: int) -> None:
        """Record, or read, a few times; it may be killed, and then begins anew."""
        chance = self.simulation.chance
        for _ in range(3):
            self.simulation.pause(chance.choice((0.0, 0.1, 5.0, 50.0)))
            if chance.random() < 0.2:
                local.process.dies_at = local.process.requests + chance.randint(1, MANY)
            try:
                if index == 2:
                    self._read()
                else:
                    self._record()
            except Died:
                self._note("is killed")
                stops, local.process = local.process.stops, Process(index)
                local.process.stops = stops

    def _record(self) -> None:
        chance = self.simulation.chance
        try:
            with Recording(path(), LIKE, chunk_bytes=8, timeout=100.0) as recording:
                values = self._values(recording.samples)
                self._resume(recording, values)
                for _ in range(chance.randint(1, 3)):
                    self.simulation.pause(chance.choice((0.0, 0.3, 30.0)))
                    for _ in range(chance.randint(1, 5)):
                        self._count += 1
                        values.append(self._count)
                        recording.append({"x": np.int32(self._count)})
                    self._commit(recording, values)
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._note(text_of(e))
            self._check_kind(e)

    def _commit(self, recording: Recording, values: list[int]) -> None:
        state = {"count": len(values), "last": values[-1]}
        recording.commit(state if self._resumes else None)
        self._note(f"has committed {values}")
        self._see(values)

    def _read(self) -> None:
        known = len(self.acknowledged)
        try:
            values = self._values(Samples(path()))
        except eqx_ckpt.CheckpointNotFoundError:
            values = []
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self._note(text_of(e))
            self._check_kind(e)
            return
        self._note(f"reads {values}")
        assert values[:known] == self.acknowledged[:known], self._told("a read")

    def _see(self, values: list[int]) -> None:
        """See that samples that are committed follow those before."""
        known = self.acknowledged
        self.acknowledged = max(known, [*values], key=len)
        together = min(len(known), len(values))
        assert known[:together] == values[:together], self._told(f"{values}")

    def _values(self, samples: Samples) -> list[int]:
        values = samples.read()["x"].tolist()
        self._see(values)
        return values

    def _resume(self, recording: Recording, values: list[int]) -> None:
        try:
            where = recording.state_path
        except eqx_ckpt.CheckpointNotFoundError:
            return  # Nothing was committed, or samples only, at the end of a process.
        try:
            state = recording.resume(STATE)
        except eqx_ckpt.CheckpointNotFoundError:
            is_over = Samples(path()).committed != len(values)
            assert is_over, self._told(f"{where} of {values} is gone")
            raise  # Another process has taken over.
        expected = {"count": len(values), "last": values[-1]}
        assert state == expected, self._told(f"the state of {values} is {state}")

    def _check_kind(self, error: Exception) -> None:
        assert not isinstance(error, eqx_ckpt.CorruptCheckpointError), self._told(
            f"{error}"
        )

    def _told(self, what: str) -> str:
        lines = [f"seed {self.seed}: {what}", f"acknowledged: {self.acknowledged}"]
        return "\n".join([*lines, *self._notes])

    def _note(self, what: str) -> None:
        self._notes.append(f"{now():.1f}: process {local.process.index} {what}")

    def _last(self, _: int) -> None:
        """All that was acknowledged is there, and the recording goes on."""
        self.simulation.pause(STALLED)
        for _ in range(2):
            with Recording(path(), LIKE, chunk_bytes=8, timeout=100.0) as recording:
                values = self._values(recording.samples)
                lost = self.acknowledged[len(values) :]
                assert not lost, self._told(f"{lost} is lost")
                self._resume(recording, values)
                values.append(0)
                recording.append({"x": np.int32(0)})
                self._commit(recording, values)


def play(seed: int) -> Recordings:
    recordings = Recordings(seed)
    recordings.play()
    return recordings


if __name__ == "__main__":
    try_all(play, __doc__)
