"""Whether the steps in two places came from one another.

Two histories that are more than 32 sessions apart do not tell it alone: the steps in
between do. Where these are gone, it is enough that one may have led to the other.
"""

import bisect
from collections.abc import Collection, Sequence

from .._errors import CheckpointError
from .._format.run_history import History, last_sessions
from .._steps.compare_histories import Line, Sessions
from .._steps.run_steps import Run
from .._storage.calls.threads import at_once


# With so many steps before it, and so many after it, a step is compared. Of those that
# lie next to each other, whoever uploads the later one sees the other.
_NEAREST = 32


# So many steps of a mirror are compared, its newest ones: whoever uploaded the one
# before the newest may have died before it saw the other one.
NEWEST_THERE = 2


class OtherHistory(CheckpointError):
    """Two steps did not come from one another."""


class Between:
    """Compares the newest steps of some places, and reads each other step once."""

    def __init__(self) -> None:
        self._sessions = Sessions()
        self._read: set[tuple[str, int]] = set()

    def check(self, runs: Sequence[Run], listed: Sequence[Sequence[int]]) -> None:
        """Raise if the newest steps of a run and its mirrors did not come from another.

        `listed` are the steps of each, the newest one last; first those of the run.
        """
        newest = [
            (run, step)
            for tier, (run, steps) in enumerate(zip(runs, listed, strict=True))
            for step in reversed(steps[-NEWEST_THERE if tier else -1 :])
        ]
        if len(newest) < 2:
            return
        histories = at_once(lambda at: at[0].history(at[1]), newest)
        found: list[tuple[Run, int, History]] = []
        for (run, step), history in histories.items():
            if history is None:
                continue
            self._sessions.add(history)
            for other, older, before in found:
                if why := self._difference({run, other}, history, before):
                    raise OtherHistory(
                        f"Step {older} in {other.directory!r} and step {step} in "
                        f"{run.directory!r} are of different histories: {why}. Nothing "
                        "was chosen. To go on from one of them, delete the steps of "
                        "the other one, use one of the two places alone, or pass "
                        "another `mirror`."
                    )
            found.append((run, step, history))

    def _difference(self, runs: Collection[Run], one: History, other: History) -> str:
        if Line(self._sessions, one).relation(other).kind == "unknown":
            first, last = sorted((one.step, other.step))
            for run in runs:
                self._read_between(run, first, last)
        return _difference(Line(self._sessions, one), one, other)

    def _read_between(self, run: Run, first: int, last: int) -> None:
        steps = [
            step
            for step in run.readable_or_not()
            if first < step < last and (run.directory, step) not in self._read
        ]
        for step, history in at_once(run.history, steps).items():
            self._read.add((run.directory, step))
            if history is not None:
                self._sessions.add(history)


class Beside:
    """Compares steps with those near them in a mirror, and reads each of these once."""

    def __init__(self, mirror: Run) -> None:
        self._mirror = mirror
        self._sessions = Sessions()
        # Of each step the end of its history, if it has one.
        self._ends: dict[int, History | None] = {}

    def check(self, step: int, history: History | None) -> None:
        """Raise if a step and one near it there did not come from one another."""
        if history is None:
            return
        others = self._near(step)
        self._read([other for other in others if other not in self._ends])
        self._sessions.add(history)
        if self._unlike(others, history):
            self._read(others)  # Some may have been replaced meanwhile.
        for other, why in self._unlike(others, history).items():
            raise OtherHistory(
                f"Step {step} does not belong to the steps in "
                f"{self._mirror.directory!r}: step {other} there is of a different "
                f"history ({why}). It was not uploaded. To go on with one of them, "
                "delete the steps of the other one, or pass another `mirror`. A "
                "training that goes on from a step has to restore it with the manager "
                "that saves."
            )

    def note(self, step: int, history: History | None) -> None:
        """Note the history of a step that is there now."""
        self._ends[step] = None
        if history is not None:
            self._sessions.add(history)
            self._ends[step] = last_sessions(history, 1)

    def _near(self, step: int) -> list[int]:
        there = [other for other in self._mirror.readable_or_not() if other != step]
        at = bisect.bisect(there, step)
        return there[max(at - _NEAREST, 0) : at + _NEAREST]

    def _read(self, steps: Collection[int]) -> None:
        for step, history in at_once(self._mirror.history, steps).items():
            self.note(step, history)

    def _unlike(self, steps: Collection[int], history: History) -> dict[int, str]:
        """Those that did not come from a step, nor it from them, and why."""
        line = Line(self._sessions, history)
        ends = {step: end for step in steps if (end := self._ends[step]) is not None}
        found = {step: _difference(line, history, end) for step, end in ends.items()}
        return {step: why for step, why in found.items() if why}


def _difference(line: Line, one: History, other: History) -> str:
    """Why two steps did not come from one another, or `''`. The line is that of one."""
    if last_sessions(one, 1) == last_sessions(other, 1):
        return ""
    if one.step == other.step:
        return f"both were saved as step {one.step}, and not once"
    relation = line.relation(other)
    return "" if relation.kind == "unknown" else str(relation)
