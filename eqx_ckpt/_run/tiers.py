"""The steps of a run and those in its mirrors, as one."""

import contextlib
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from .._errors import CheckpointError, CheckpointNotFoundError
from .._mirroring.one_history import Between, NEWEST_THERE
from .._steps.metrics_log import keep_metrics
from .._steps.retention import check_mode, Mode
from .._steps.run_config import read_config_of
from .._steps.run_steps import best_of, Run
from .._types import check_text, PathLike


# `Run` may be one that says of itself what it has.
_steps_of: Callable[[Run], list[int]] = operator.methodcaller("steps")
_readable_or_not: Callable[[Run], list[int]] = operator.methodcaller("readable_or_not")


class Copy(NamedTuple):
    """A step in one tier: 0 is the directory of the run, and the others are mirrors."""

    step: int
    tier: int


class Tiers:
    """The steps of all tiers. A mirror is asked only if the run does not suffice.

    **Attributes:**

    - `directory`: that of the run.
    - `seen`: the steps in the mirrors, when they were listed last.
    """

    def __init__(self, local: Run, mirrors: Sequence[Run]) -> None:
        self._runs = [local, *mirrors]
        self.directory = local.directory
        self.seen: set[int] = set()
        self._between = Between()

    def steps(self) -> list[int]:
        return self._union(_steps_of)

    def _union(self, list_steps: Callable[[Run], list[int]]) -> list[int]:
        return sorted(set().union(*self._listed(list_steps)))

    def _listed(
        self,
        list_steps: Callable[[Run], list[int]],
        here: Sequence[int] | None = None,
    ) -> list[Sequence[int]]:
        """The steps of each tier; those that are `here` may be known."""
        found: list[Sequence[int]] = [] if here is None else [here]
        for tier in range(len(found), len(self._runs)):
            with self._telling_of(tier):
                found.append(list_steps(self._runs[tier]))
        self.seen.update(*found[1:])
        return found

    @contextlib.contextmanager
    def _telling_of(self, tier: int) -> Generator[None]:
        try:
            yield
        except (OSError, CheckpointError) as e:
            if tier:
                e.add_note(
                    f"The mirror {self._runs[tier].directory!r} was asked. To go on "
                    "without it, create a manager without `mirror`."
                )
            raise

    def latest(self) -> int | None:
        newest: list[Sequence[int]] = []
        for tier, run in enumerate(self._runs):
            with self._telling_of(tier):
                if tier:
                    newest.append(run.newest_steps(NEWEST_THERE))
                else:
                    newest.append([] if (step := run.latest()) is None else [step])
        self.seen.update(*newest[1:])
        self._between.check(self._runs, newest)
        return max((steps[-1] for steps in newest if steps), default=None)

    def best(self, metric: str, mode: Mode) -> int:
        check_text("metric", metric)
        check_mode(mode)
        metadata: dict[int, Any] = {}
        for run, steps in zip(self._runs, self._listed(_steps_of), strict=True):
            for step in steps:
                if step not in metadata:
                    metadata[step] = run.metadata(step)
        return best_of(metadata, metric, mode, self.directory)

    @property
    def has_mirrors(self) -> bool:
        return len(self._runs) > 1

    def here(self) -> list[int]:
        """The steps in the directory of the run, readable or not."""
        return _readable_or_not(self._runs[0])

    def copies(self, here: Sequence[int] | None = None) -> list[Copy]:
        """Those of all steps: the newest step last, and of each the nearest copy last.

        Raise if the newest steps of two tiers are of different histories.
        """
        listed = self._listed(_readable_or_not, here)
        self._between.check(self._runs, listed)
        return sorted(
            (Copy(step, tier) for tier, steps in enumerate(listed) for step in steps),
            key=lambda copy: (copy.step, -copy.tier),
        )

    def nearest(self, step: int) -> Copy:
        """The copy of a step to read first; raise if there is none."""
        for tier in range(len(self._runs)):
            if self._has(tier, step):
                return Copy(step, tier)
        raise self._missing(step)

    def farther(self, copy: Copy) -> list[Copy]:
        """The copies of a step in farther tiers, the farthest first."""
        tiers = range(len(self._runs) - 1, copy.tier, -1)
        return [Copy(copy.step, tier) for tier in tiers if self._has(tier, copy.step)]

    def _has(self, tier: int, step: int) -> bool:
        with self._telling_of(tier):
            return self._runs[tier].has(step)

    def path(self, copy: Copy) -> PathLike:
        return self._runs[copy.tier].path(copy.step)

    def place(self, tier: int) -> str:
        """The directory or the URL of a tier."""
        return self._runs[tier].directory

    def check_unusable(self, copies: Sequence[Copy]) -> None:
        """As `Run.check_unusable`, of each tier."""
        for run in self._runs:
            run.check_unusable([copy.step for copy in copies])

    def explain(self) -> str:
        return self._runs[0].explain()

    def read_config(self, step: int | None) -> dict[str, Any] | None:
        """The config of a step, or of the newest."""
        if step is None:
            copies = self.copies()
            self.check_unusable(copies)
            if not copies:
                self._runs[0].at_least_one()
            copy = copies[-1]
        else:
            copy = self.nearest(step)
        return read_config_of(self._runs, self._runs[copy.tier], copy.step)

    def _missing(self, step: int) -> CheckpointNotFoundError:
        there = self._union(_readable_or_not)
        if not self.has_mirrors or not there:
            return self._runs[0].missing(step)
        return CheckpointNotFoundError(
            f"No committed checkpoint of step {step} in {self.directory!r}, nor in its "
            f"mirror. The steps there are {', '.join(map(str, there))}."
        )

    def delete(self, step: int) -> None:
        """Delete a step in each tier, the farthest first."""
        others = [tier for tier in range(1, len(self._runs)) if self._has(tier, step)]
        for tier in reversed(others):
            with self._telling_of(tier):
                self._delete(tier, step)
        if not others or self._has(0, step):
            self._delete(0, step)

    def _delete(self, tier: int, step: int) -> None:
        run = self._runs[tier]
        run.check(step)
        keep_metrics(run, [step])
        run.delete(step)
