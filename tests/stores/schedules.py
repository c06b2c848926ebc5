"""Random schedules of processes that use one bucket, and what must hold.

`make simulate MINUTES=10` tries as many as it can. A failure names its seed, and
`python -m tests.stores.schedules --seed SEED --count 1` repeats it.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

import eqx_ckpt
from eqx_ckpt import StorePath
from eqx_ckpt._format.chunk_grid import chunk_keys
from eqx_ckpt._format.manifest import Manifest
from eqx_ckpt._format.manifest_parser import from_bytes
from tests.scheduler import now, try_all
from tests.stores.linearizable import Call, find_order
from tests.stores.simulated_bucket import COMMIT, Simulation, STALLED


RUN = "s3://bucket/run"
ROUNDS = 4

# Longer than a manager waits for an attempt that is silent.
LONG = 700.0


def tree(value: int) -> dict[str, Any]:
    return {"a": np.full(4, value), "b": np.arange(3.0), "s": value}


class Doing(NamedTuple):
    """After some seconds, do something with a step."""

    pause: float
    kind: str
    step: int = 0


class Saves(Protocol):
    """How the processes of a schedule save, and delete.

    **Attributes:**

    - `processes`: how many.
    - `steps`: which steps.
    - `first`: those of them that one process saves before all else.
    - `tree`: what a value looks like.
    """

    processes: int
    steps: tuple[int, ...]
    first: tuple[int, ...]
    tree: Callable[[int], dict[str, Any]]

    def fail(self, simulation: Simulation) -> None:
        """Draw which processes stop and die."""

    def calls(self, index: int, chance: random.Random) -> Iterator[Doing]:
        """What a process does, one after another."""
        ...

    def save(self, step: int, value: int, *, overwrite: bool) -> None: ...

    def delete(self, step: int) -> None: ...

    def end(self) -> None:
        """End what the process has."""


class Whole:
    """Each step has all of its data."""

    steps = (100, 200)
    first = ()
    tree = staticmethod(tree)

    def __init__(self, seed: int) -> None:
        self.processes = 2 + seed % 3

    def fail(self, simulation: Simulation) -> None:
        chance = simulation.chance
        for process in chance.sample(simulation.processes, chance.choice((0, 1))):
            at = chance.choice((COMMIT, chance.randint(1, 60)))
            process.stops[at] = chance.choice((100.0, 400.0, LONG, 2 * LONG))
        for process in chance.sample(simulation.processes, chance.choice((0, 0, 1))):
            process.dies_at = chance.randint(1, 60)

    def calls(self, index: int, chance: random.Random) -> Iterator[Doing]:
        for _ in range(ROUNDS):
            pause = chance.choice((0.0, 0.0, 0.1, 5.0, LONG))
            kinds = (
                "save",
                "save",
                "overwrite",
                "overwrite",
                "delete",
                "read",
                "sweep",
            )
            yield Doing(pause, chance.choice(kinds), chance.choice(self.steps))

    def save(self, step: int, value: int, *, overwrite: bool) -> None:
        eqx_ckpt.tree_serialise_leaves(path(step), tree(value), overwrite=overwrite)

    def delete(self, step: int) -> None:
        delete(step)

    def end(self) -> None: ...


class _Seen(NamedTuple):
    """A manifest, its generation, and the keys of the chunks that it needs."""

    generation: bytes
    manifest: Manifest
    needs: set[str]


class Schedule:
    """Some processes that save, overwrite, delete and restore some steps, and sweep.

    Each step must look as if these calls had come one after another, whatever was lost,
    late, stopped or dead. At no moment something is missing of a step that a save has
    returned; and in the end, nothing is left over.

    **Attributes:**

    - `simulation`: where they run.
    - `calls`: of each step, what was done and what came of it.
    - `errors`: what was raised.
    """

    def __init__(self, seed: int, saves: Saves) -> None:
        self.seed = seed
        self._saves = saves
        self.calls: dict[int, list[Call]] = {step: [] for step in saves.steps}
        self.errors: list[str] = []
        self._values = itertools.count(1)
        self._saved: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._lost: list[str] = []
        self._is_lossy = False
        simulation = self.simulation = Simulation(seed, 1)
        simulation.changed = self._look
        for step in saves.first:
            simulation.play(lambda _, step=step: self._call("save", step))
        simulation.grow(saves.processes)
        chance = simulation.chance
        slow = chance.choice((0.02, 1.0, 30.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.draw(0.4, latest=STALLED)
        self._is_lossy = bool({*simulation.faults.values()} - {"wrong"})
        saves.fail(simulation)

    def play(self) -> None:
        self.simulation.play(self._process)
        self._settle()
        self.simulation.play(self._last)
        for step, calls in self.calls.items():
            assert find_order(calls), self._said(f"step {step} has no order")
        assert not self._lost, self._said(f"{self._lost}")

    def _said(self, what: str) -> str:
        lines = [f"seed {self.seed}: {what}"]
        for step, calls in self.calls.items():
            lines += [f"step {step}: {call}" for call in calls]
        return "\n".join([*lines, *self.errors])

    def _settle(self) -> None:
        """What comes after this is right, and at once."""
        simulation = self.simulation
        simulation.faults = {}
        simulation.latency = lambda: 0.02
        simulation.grow(1)

    def _process(self, index: int) -> None:
        chance = self.simulation.chance
        for pause, kind, step in self._saves.calls(index, chance):
            self.simulation.pause(pause)
            if kind == "sweep":
                self._sweep()
            else:
                self._call(kind, step)
        self._saves.end()

    def _sweep(self) -> None:
        try:
            eqx_ckpt.inspect.garbage_collect(path())
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self.errors.append(f"sweep: {e!r}")

    def _call(self, kind: str, step: int) -> None:
        begin = now()
        calls = self.calls[step]
        value = next(self._values) if kind in ("save", "overwrite") else None
        # Until it is known what came of it.
        open_ = Call(kind, begin, math.inf, "unknown", value)
        calls.append(open_)
        outcome, value = self._outcome(kind, step, value)
        calls.remove(open_)
        if kind == "read" and outcome != "done":
            return
        is_doubtful = outcome != "done" and self._is_lossy
        calls.append(Call(kind, begin, now(), outcome, value, is_doubtful))
        if kind == "delete" and self._is_lossy:
            # The request was sent twice: in between, another may have saved.
            calls.append(Call(kind, begin, now(), "failed", None, True))

    def _outcome(
        self, kind: str, step: int, value: int | None
    ) -> tuple[str, int | None]:
        try:
            if kind == "read":
                return "done", read(step, self._saves.tree)
            if kind == "delete":
                self._saves.delete(step)
                return "done", None
            assert value is not None
            self._saves.save(step, value, overwrite=kind == "overwrite")
        except eqx_ckpt.CheckpointNotFoundError:
            # A save has no base.
            return "refused" if kind == "delete" else "failed", value
        except eqx_ckpt.CheckpointExistsError:
            # Of two that overwrite, one may be told that the other was faster.
            return "failed" if kind == "overwrite" else "refused", value
        except eqx_ckpt.CorruptCheckpointError as e:
            raise AssertionError(self._said(f"{kind} of step {step}: {e!r}")) from e
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self.errors.append(f"{kind} of step {step} at {now():.1f}: {said(e)}")
            is_open = kind == "delete" or "is not known" in said(e)
            return "unknown" if is_open else "failed", value
        self._saved.add(str(value))
        self._look()
        return "done", value

    def _look(self) -> None:
        """See that nothing is missing of what was saved, and is committed now."""
        values = self.simulation.values
        for step in self._saves.steps:
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

    def _last(self, index: int) -> None:
        """Read all of it, let time pass, and see that nothing else is there."""
        found = {}
        for step in self._saves.steps:
            self._call("read", step)
            found[step] = self.calls[step][-1].value
        for _ in range(3):
            eqx_ckpt.inspect.garbage_collect(path())
        for step, value in found.items():
            self._call("read", step)
            is_there = self.calls[step][-1].value == value
            assert is_there, self._said(f"step {step} was swept")
        self._look()
        steps = [self._seen[key] for key in self.simulation.values if key in self._seen]
        needed = set().union(*(step.needs for step in steps))
        roots = [step.manifest.root for step in steps]
        left = [
            key
            for key in self.simulation.values
            if key not in needed
            and not key.endswith(("/zarr.json", "/incremental"))
            and not any(root in key for root in roots)
        ]
        assert not left, self._said(f"{left} is left over")


def path(step: int = 0) -> StorePath:
    return StorePath(f"{RUN}/{step:06}" if step else RUN, endpoint="http://localhost:1")


def read(step: int, tree: Callable[[int], dict[str, Any]] = tree) -> int | None:
    """The value of a step, all of it; `None` if there is none."""
    try:
        found = eqx_ckpt.tree_deserialise_leaves(path(step), tree(0))
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    value = int(found["a"][0])
    for name, expected in tree(value).items():
        assert np.array_equal(found[name], expected), (step, found)
    return value


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


def play(seed: int) -> Schedule:
    schedule = Schedule(seed, Whole(seed))
    schedule.play()
    return schedule


def delete(step: int) -> None:
    with eqx_ckpt.CheckpointManager(path()) as manager:
        manager.delete(step)


def said(error: Exception) -> str:
    return f"{error!r} {getattr(error, '__notes__', '')}"


if __name__ == "__main__":
    try_all(play, __doc__)
