"""Random schedules of processes that use one bucket, and what must hold.

`make simulate MINUTES=10` tries as many as it can. A failure names its seed, and
`python -m tests.stores.schedules --seed SEED --count 1` repeats it.
"""

from typing import NamedTuple

from eqx_ckpt import StorePath
from tests.scheduler import now, try_all
from tests.schedules import Saves, Schedule, Whole
from tests.stores.simulated_bucket import Simulation, STALLED
from tests.support import chunk_keys, from_bytes, Manifest


RUN = "s3://bucket/run"


class _Seen(NamedTuple):
    """A manifest, its generation, and the keys of the chunks that it needs."""

    generation: bytes
    manifest: Manifest
    needs: set[str]


class BucketSchedule(Schedule):
    """Processes that use one bucket, where answers are lost.

    At no moment something is missing of a step that a save has returned; and in the
    end, nothing is left over.
    """

    def __init__(self, seed: int, saves: Saves) -> None:
        super().__init__(seed, Simulation(seed, 1), saves)
        self._saved: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._lost: list[str] = []
        simulation = self.simulation
        simulation.changed = self._look
        self.begin()
        chance = simulation.chance
        slow = chance.choice((0.02, 1.0, 30.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.draw(0.4, latest=STALLED)
        self.is_doubtful = bool({*simulation.faults.values()} - {"wrong"})
        saves.fail(simulation)

    def play(self) -> None:
        self.simulation.play(self.process)
        self._settle()
        self.simulation.play(self.last)
        self._look()
        self._check_rest()
        self.check_order()
        assert not self._lost, self.said(f"{self._lost}")

    def _settle(self) -> None:
        """What comes after this is right, and at once."""
        simulation = self.simulation
        simulation.faults = {}
        simulation.latency = lambda: 0.02
        simulation.grow(1)

    def saved(self, value: int) -> None:
        self._saved.add(str(value))
        self._look()

    def may_be_damaged(self, step: int) -> bool:
        """Whether its manifest is of a save that has not returned, or does not know.

        Who was suspended before its manifest, and whose chunks were swept, takes it
        back; it dies before that, perhaps. Who had no answer may write its manifest
        again while a deletion removes its chunks.
        """
        seen = self._seen.get(f"run/{step:06}/zarr.json")
        value = seen and seen.manifest.leaves["s"].value
        return value in [str(one) for one in self.never_knew(step)]

    def _look(self) -> None:
        """See that nothing is missing of what was saved, and is committed now."""
        values = self.simulation.values
        for step in self.calls:
            key = f"run/{step:06}/zarr.json"
            if key not in values:
                continue
            value, generation = values[key]
            seen = self._seen.get(key)
            if seen is None or seen.generation != generation:
                manifest = from_bytes(value, key)
                seen = _Seen(generation, manifest, needs(step, manifest))
                self._seen[key] = seen
            if seen.manifest.leaves["s"].value in self._saved:
                lost = seen.needs - values.keys()
                self._lost += [f"at {now():.1f}: {key} is gone" for key in lost]

    def _check_rest(self) -> None:
        """See that nothing is there that no step needs; beside damage, all stays."""
        steps = [self._seen[key] for key in self.simulation.values if key in self._seen]
        needed = set().union(*(step.needs for step in steps))
        roots = [step.manifest.root for step in steps]
        roots += [f"run/{step:06}/" for step in self.calls if self.may_be_damaged(step)]
        left = [
            key
            for key in self.simulation.values
            if key not in needed
            and not key.endswith(("/zarr.json", "/incremental"))
            and not any(root in key for root in roots)
        ]
        assert not left, self.said(f"{left} is left over")


def path(step: int = 0) -> StorePath:
    return StorePath(f"{RUN}/{step:06}" if step else RUN, endpoint="http://localhost:1")


def needs(step: int, manifest: Manifest) -> set[str]:
    """The keys in the bucket of the chunks that a step needs."""
    found: set[str] = set()
    for name, record in manifest.leaves.items():
        if record.is_array:
            keys = chunk_keys(record.data_shape, record.chunk_shape)
            attempts = manifest.references.get(name, ("",) * len(keys))
            own = f"{step:06}/{manifest.root}"
            for key, attempt in zip(keys, attempts, strict=True):
                found.add(f"run/{attempt or own}{name}/{key}")
    return found


def play(seed: int) -> BucketSchedule:
    schedule = BucketSchedule(seed, Whole(seed, path))
    schedule.play()
    return schedule


if __name__ == "__main__":
    try_all(play, __doc__)
