"""Random schedules of processes that use one bucket, and what must hold.

`make simulate MINUTES=10` tries as many as it can. A failure names its seed, and
`python -m tests.stores.schedules --seed SEED --count 1` repeats it.
"""

import itertools
import math
from typing import Any

import numpy as np

import eqx_ckpt
from eqx_ckpt import StorePath
from tests.scheduler import now, try_all
from tests.stores.linearizable import Call, find_order
from tests.stores.simulated_bucket import COMMIT, Simulation, STALLED


RUN = "s3://bucket/run"
STEPS = (100, 200)
ROUNDS = 4

# Longer than a manager waits for an attempt that is silent.
LONG = 700.0


def tree(value: int) -> dict[str, Any]:
    return {"a": np.full(4, value), "b": np.arange(3.0)}


LIKE = tree(0)


class Schedule:
    """Some processes that save, overwrite, delete and restore two steps, and sweep.

    Each step must look as if these calls had come one after another, whatever was lost,
    late, stopped or dead; and in the end, nothing is left over.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        size = 2 + seed % 3
        simulation = self._simulation = Simulation(seed, size)
        chance = simulation.chance
        slow = chance.choice((0.02, 1.0, 30.0))
        simulation.latency = lambda: chance.choice((0.02, 0.02, 0.2, slow))
        simulation.draw(0.4, latest=STALLED)
        self._is_lossy = bool({*simulation.faults.values()} - {"wrong"})
        for process in chance.sample(simulation.processes, chance.choice((0, 1))):
            process.stops_at = chance.choice((COMMIT, chance.randint(1, 60)))
            process.stops_for = chance.choice((100.0, 400.0, LONG, 2 * LONG))
        for process in chance.sample(simulation.processes, chance.choice((0, 0, 1))):
            process.dies_at = chance.randint(1, 60)
        self.calls: dict[int, list[Call]] = {step: [] for step in STEPS}
        self.errors: list[str] = []
        self._values = itertools.count(1)

    def play(self) -> None:
        self._simulation.play(self._process)
        self._settle()
        self._simulation.play(self._last)
        for step, calls in self.calls.items():
            assert find_order(calls), self._said(f"step {step} has no order")

    def _said(self, what: str) -> str:
        lines = [f"seed {self.seed}: {what}"]
        for step, calls in self.calls.items():
            lines += [f"step {step}: {call}" for call in calls]
        return "\n".join([*lines, *self.errors])

    def _settle(self) -> None:
        """What comes after this is right, and at once."""
        simulation = self._simulation
        simulation.faults = {}
        simulation.latency = lambda: 0.02
        simulation.grow(1)

    def _process(self, index: int) -> None:
        chance = self._simulation.chance
        for _ in range(ROUNDS):
            self._simulation.pause(chance.choice((0.0, 0.0, 0.1, 5.0, LONG)))
            kind = chance.choice(
                ("save", "save", "overwrite", "overwrite", "delete", "read", "sweep")
            )
            if kind == "sweep":
                self._sweep()
            else:
                self._call(kind, chance.choice(STEPS))

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
                return "done", read(step)
            if kind == "delete":
                delete(step)
                return "done", None
            assert value is not None
            eqx_ckpt.tree_serialise_leaves(
                path(step), tree(value), overwrite=kind == "overwrite"
            )
        except eqx_ckpt.CheckpointNotFoundError:
            return "refused", None
        except eqx_ckpt.CheckpointExistsError:
            # Of two that overwrite, one may be told that the other was faster.
            return "failed" if kind == "overwrite" else "refused", value
        except eqx_ckpt.CorruptCheckpointError as e:
            raise AssertionError(self._said(f"{kind} of step {step}: {e!r}")) from e
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self.errors.append(f"{kind} of step {step} at {now():.1f}: {said(e)}")
            is_open = kind == "delete" or "is not known" in said(e)
            return "unknown" if is_open else "failed", value
        return "done", value

    def _last(self, index: int) -> None:
        """Read all of it, let time pass, and see that nothing else is there."""
        found = {}
        for step in STEPS:
            self._call("read", step)
            found[step] = self.calls[step][-1].value
        for _ in range(3):
            eqx_ckpt.inspect.garbage_collect(path())
        for step, value in found.items():
            assert read(step) == value, self._said(f"step {step} was swept")
        roots = [
            eqx_ckpt.inspect.read_manifest(path(step)).root
            for step, value in found.items()
            if value is not None
        ]
        left = [
            key
            for key in self._simulation.values
            if not key.endswith("/zarr.json") and not any(r in key for r in roots)
        ]
        assert not left, self._said(f"{left} is left over")


def path(step: int = 0) -> StorePath:
    return StorePath(f"{RUN}/{step:06}" if step else RUN, endpoint="http://localhost:1")


def read(step: int) -> int | None:
    """The value of a step, all of it; `None` if there is none."""
    try:
        found = eqx_ckpt.tree_deserialise_leaves(path(step), LIKE)
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    value = int(found["a"][0])
    assert (found["a"] == value).all()
    assert (found["b"] == LIKE["b"]).all()
    return value


def play(seed: int) -> Schedule:
    schedule = Schedule(seed)
    schedule.play()
    return schedule


def delete(step: int) -> None:
    with eqx_ckpt.CheckpointManager(path()) as manager:
        manager.delete(step)


def said(error: Exception) -> str:
    return f"{error!r} {getattr(error, '__notes__', '')}"


if __name__ == "__main__":
    try_all(play, __doc__)
