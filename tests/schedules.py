"""Processes that save, overwrite, delete and restore some steps, and what must hold."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

import eqx_ckpt
from eqx_ckpt import StorePath
from tests.linearizable import Call, find_order
from tests.scheduler import now
from tests.stores.simulated_bucket import COMMIT, Simulation


ROUNDS = 4

# Longer than a manager waits for an attempt that is silent.
LONG = 700.0

# Where a step is; and the run, which is at step 0.
Path = Callable[[int], str | StorePath]


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

    - `path`: where.
    - `processes`: how many.
    - `steps`: which steps.
    - `first`: those of them that one process saves before all else.
    - `tree`: what a value looks like.
    """

    path: Path
    processes: int
    steps: tuple[int, ...]
    first: tuple[int, ...]
    tree: Callable[[int], dict[str, Any]]

    def fail(self, simulation: Simulation) -> None:
        """Draw which processes stop and die, by their requests to a bucket."""

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

    def __init__(self, seed: int, path: Path) -> None:
        self.path = path
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
        eqx_ckpt.tree_serialise_leaves(
            self.path(step), tree(value), overwrite=overwrite
        )

    def delete(self, step: int) -> None:
        delete(self.path, step)

    def end(self) -> None: ...


class Schedule:
    """Some processes that save, overwrite, delete and restore some steps, and sweep.

    Each step must look as if these calls had come one after another, whatever was lost,
    late, stopped or dead.

    **Attributes:**

    - `simulation`: where they run.
    - `calls`: of each step, what was done and what came of it.
    - `errors`: what was raised.
    - `is_doubtful`: whether what has failed may have taken effect, as an answer was
        lost.
    """

    def __init__(self, seed: int, simulation: Simulation, saves: Saves) -> None:
        self.seed = seed
        self.simulation = simulation
        self.calls: dict[int, list[Call]] = {step: [] for step in saves.steps}
        self.errors: list[str] = []
        self.is_doubtful = False
        self._saves = saves
        # What may have been taken back: of suspended processes, or as its name could
        # not be flushed; and what was being deleted while it was saved.
        self._taken_back: set[int] = set()
        self._deleted: set[int] = set()
        self._values = itertools.count(1)

    def begin(self) -> None:
        """Save the first steps."""
        for step in self._saves.first:
            self.simulation.play(lambda _, step=step: self.call("save", step))
        self.simulation.grow(self._saves.processes)

    def process(self, index: int) -> None:
        """Do what a process does."""
        for pause, kind, step in self._saves.calls(index, self.simulation.chance):
            self.simulation.pause(pause)
            if kind == "sweep":
                self._sweep()
            else:
                self.call(kind, step)
        self._saves.end()

    def check_order(self) -> None:
        for step, calls in self.calls.items():
            order = find_order(
                [call for call in calls if not self._saw_it(call, calls)]
            )
            assert order is not None, self.said(f"step {step} has no order")

    def _saw_it(self, call: Call, calls: list[Call]) -> bool:
        """Whether it may have seen what was taken back later."""
        return (call.kind == "read" or call.outcome == "refused") and any(
            taken.begin < call.end and call.begin < taken.end
            for taken in calls
            if taken.outcome == "failed" and taken.value in self._taken_back
        )

    def said(self, what: str) -> str:
        lines = [f"seed {self.seed}: {what}"]
        for step, calls in self.calls.items():
            lines += [f"step {step}: {call}" for call in calls]
        return "\n".join([*lines, *self.errors])

    def saved(self, value: int) -> None:
        """A save has returned."""

    def may_be_damaged(self, step: int) -> bool:
        """Whether it is no defect if a step is damaged."""
        return False

    def never_knew(self, step: int) -> list[int | None]:
        """The values whose writer has died, or which were deleted meanwhile."""
        return [
            call.value
            for call in self.calls[step]
            if call.end == math.inf or call.value in self._deleted
        ]

    def last(self, index: int) -> None:
        """Read all, sweep, and see that all is still there."""
        path, steps = self._saves.path, self._saves.steps
        found = {step: self._value_now(step) for step in steps}
        for _ in range(3):
            eqx_ckpt.inspect.garbage_collect(path(0))
        for step, value in found.items():
            is_there = self._value_now(step) == value
            assert is_there, self.said(f"step {step} was swept")

    def _value_now(self, step: int) -> int | None:
        self.call("read", step)
        last = self.calls[step][-1]
        return last.value if last.kind == "read" else None

    def _sweep(self) -> None:
        try:
            eqx_ckpt.inspect.garbage_collect(self._saves.path(0))
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self.errors.append(f"sweep: {e!r}")

    def call(self, kind: str, step: int) -> None:
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
        is_doubtful = outcome != "done" and self.is_doubtful
        calls.append(Call(kind, begin, now(), outcome, value, is_doubtful))
        if kind == "delete" and self.is_doubtful:
            # The request was sent twice: in between, another may have saved.
            calls.append(Call(kind, begin, now(), "failed", None, True))

    def _outcome(
        self, kind: str, step: int, value: int | None
    ) -> tuple[str, int | None]:
        saves = self._saves
        try:
            if kind == "read":
                return "done", read(saves.path(step), saves.tree)
            if kind == "delete":
                saves.delete(step)
                return "done", None
            assert value is not None
            saves.save(step, value, overwrite=kind == "overwrite")
        except eqx_ckpt.CheckpointNotFoundError:
            # A save has no base.
            return "refused" if kind == "delete" else "failed", value
        except eqx_ckpt.CheckpointExistsError:
            # Of two that overwrite, one may be told that the other was faster.
            return "failed" if kind == "overwrite" else "refused", value
        except (eqx_ckpt.CorruptCheckpointError, AssertionError) as e:
            if self.may_be_damaged(step):
                return "failed", value
            raise AssertionError(self.said(f"{kind} of step {step}: {e!r}")) from e
        except (OSError, eqx_ckpt.CheckpointError) as e:
            self.errors.append(f"{kind} of step {step} at {now():.1f}: {text_of(e)}")
            was_suspended = "was suspended" in text_of(e)
            if value is not None and (was_suspended or isinstance(e, OSError)):
                self._taken_back.add(value)
            if value is not None and "A manager is removing" in text_of(e):
                self._deleted.add(value)
            is_open = kind == "delete" or any(
                # What comes after the commit may fail, too.
                words in text_of(e)
                for words in ("is not known", "was saved.")
            )
            return "unknown" if is_open else "failed", value
        self.saved(value)
        return "done", value


def read(
    path: str | StorePath, tree: Callable[[int], dict[str, Any]] = tree
) -> int | None:
    """The value of a step, all of it; `None` if there is none."""
    try:
        found = eqx_ckpt.tree_deserialise_leaves(path, tree(0))
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    value = int(found["a"][0])
    for name, expected in tree(value).items():
        assert np.array_equal(found[name], expected), (path, found)
    return value


def delete(path: Path, step: int) -> None:
    with eqx_ckpt.CheckpointManager(path(0)) as manager:
        manager.delete(step)


def text_of(error: Exception) -> str:
    return f"{error!r} {getattr(error, '__notes__', '')}"
