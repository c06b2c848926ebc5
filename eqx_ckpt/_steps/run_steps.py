"""The steps of a training run, as its storage lists them."""

import contextlib
import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    warn,
)
from .._format.display import escape, table_html
from .._format.manifest import MANIFEST
from .._format.run_history import History
from .._sources.consistent_read import being_read
from .._storage.calls.store_path import StorePath
from .._storage.interface.committed_manifest import is_checkpoint, read_history
from .._storage.interface.place import MAX_STEP, step_name, Storage
from .._storage.locate import locate
from .._types import as_integer, PathLike
from .retention import Mode, numbers_in, ranked


logger = logging.getLogger("eqx_ckpt")


# The most characters of an invalid step that errors show.
_LONGEST = 80


# So many steps are shown in a notebook.
_SHOWN = 50


def as_step(value: Any) -> int:
    """Convert a step to an `int`, from an integer of Python, NumPy or JAX."""
    step = as_integer(value)
    if step is None or not 0 <= step <= MAX_STEP:
        raise ValueError(
            f"{in_words(value)} is not a step. Pass a non-negative integer below 2**63."
        )
    return step


def in_words(step: Any) -> str:
    """A step as text, whatever its type; equal for equal integers."""
    try:
        text = repr(step) if isinstance(step, str) else str(step)
    except ValueError:  # Python does not write integers of more than 4300 digits.
        text = f"this `{type(step).__name__}`"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def may_be_deleted(step: int) -> str:
    return (
        f"Whether step {step} was deleted is not known: `steps()` says what is there. "
        "What is left of it goes when a manager starts."
    )


class UnusableEntry(NamedTuple):
    """An entry of a run that looks like a step, and is none."""

    step: int
    path: str
    problem: str
    is_checkpoint: bool


class Run:
    """The steps of a run, listed anew each time, so that nothing is stale.

    **Attributes:**

    - `place`: where the run is, and `stored` the steps as their storage has them.
    - `directory`: the path or the URL of the run.
    """

    def __init__(self, directory: PathLike) -> None:
        self.place = locate(directory)
        self._path = directory
        self.stored = self.place.steps()
        self.directory = self.place.url()

    def path(self, step: int) -> PathLike:
        if isinstance(self._path, StorePath):
            return self._path / step_name(step)
        return self.location(step).url()

    def location(self, step: int) -> Storage:
        return self.place / f"{step_name(step)}/"

    def steps(self) -> list[int]:
        """The saved steps, in order, damaged or not."""
        steps = self.stored.saved()
        self.check_unusable(steps)
        return steps

    def unusable(self) -> list[UnusableEntry]:
        """What looked like a step in the last listing, and is none."""
        found = sorted(self.stored.unusable().items())
        return [self._as_unusable(name, is_one) for name, is_one in found]

    def _as_unusable(self, name: str, is_checkpoint: bool) -> UnusableEntry:
        place, step = self.place / f"{name}/", int(name)
        if step > MAX_STEP:
            problem = (
                f"{place} is a checkpoint, but no step has its number: they are below "
                "2**63. Rename it, or move it out of the run."
            )
        elif is_checkpoint:
            problem = (
                f"{place} is a checkpoint, but step {step} is named "
                f"{step_name(step)!r}. Rename it, or move it out of the run."
            )
        else:
            problem = (
                f"{place} is not a checkpoint: it has no `{MANIFEST}`. If it was "
                "copied here in part, copy all of it; otherwise move it out of the run."
            )
        return UnusableEntry(step, place.url(), problem, is_checkpoint)

    def check_unusable(self, steps: Sequence[int]) -> None:
        """Raise if the newest checkpoint is misnamed: it would be lost. Warn of others.

        `steps` are those of the last listing.
        """
        newest = max(steps, default=-1)
        for entry in self.unusable():
            is_newest = newest < entry.step <= MAX_STEP
            if is_newest and entry.is_checkpoint:
                raise CheckpointError(entry.problem)
            if entry.step > newest or entry.is_checkpoint:
                logger.warning("%s", entry.problem)

    def readable_or_not(self) -> list[int]:
        """The saved steps, and those that cannot be read."""
        doubtful: dict[int, OSError] = {}
        return sorted([*self.stored.saved(doubtful), *doubtful])

    def at_least_one(self) -> list[int]:
        """As `readable_or_not`; raise if there is none, or the newest is misnamed."""
        steps = self.readable_or_not()
        self.check_unusable(steps)
        if not steps:
            raise CheckpointNotFoundError(
                f"There is no step in {self.directory!r}. {self.explain()}".rstrip()
            )
        return steps

    def removable(self) -> list[int]:
        """The saved steps; a step that cannot be read stays, with a warning."""
        doubtful: dict[int, OSError] = {}
        saved = self.stored.saved(doubtful)
        for step, error in doubtful.items():
            logger.warning("Step %d stays, as it cannot be read: %s", step, error)
        return saved

    def latest(self) -> int | None:
        return max(self.newest_steps(1), default=None)

    def newest_steps(self, most: int) -> list[int]:
        """So many of the steps, the newest of which can be read."""
        doubtful: dict[int, OSError] = {}
        steps = self.stored.saved(doubtful)
        self.check_unusable(steps)
        newest = max(steps, default=None)
        for step, error in doubtful.items():
            if newest is None or step > newest:
                raise error
        if newest is None and (found := self.explain()):
            warn(f"There is no step in {self.directory!r}. {found}")
        return sorted(steps)[-most:]

    def newest(self, without: Collection[int]) -> int | None:
        """The newest step that can be read, of all but some."""
        for step in reversed(self.stored.named()):
            with contextlib.suppress(OSError):
                if step not in without and is_checkpoint(self.location(step)):
                    return step
        return None

    def has(self, step: int) -> bool:
        """Whether a step is there, damaged or not."""
        return is_checkpoint(self.location(step))

    def explain(self) -> str:
        """A sentence that says what the directory is, if it is not a run."""
        return self.place.explain_run()

    def metadata(self, step: int) -> Any:
        """The metadata of a step; a copy, which the caller may change."""
        return copy.deepcopy(self.stored.metadata(step))

    def history(self, step: int) -> History | None:
        """That of a step; `None` if it has none that can be read, or is gone."""
        try:
            return read_history(self.location(step))
        except (CorruptCheckpointError, CheckpointNotFoundError):
            return None

    def readable_history(self, step: int) -> History | None:
        """As `history`; `None` also if the storage fails."""
        with contextlib.suppress(CheckpointError, OSError):
            return read_history(self.location(step))
        return None

    def newest_history(self) -> History | None:
        """The history of the newest readable step that has one."""
        newest_first = reversed(self.readable_or_not())
        return next(filter(None, map(self.readable_history, newest_first)), None)

    def missing(self, step: int) -> CheckpointNotFoundError:
        there = ", ".join(map(str, self.readable_or_not()))
        steps = f"The steps there are {there}." if there else self.explain()
        return CheckpointNotFoundError(
            f"No committed checkpoint at {self.location(step)}. "
            f"{steps or 'There are no steps.'}"
        )

    def idle(self, step: int) -> int:
        """Return the step; raise if this process is reading it."""
        if self.is_read(step):
            raise CheckpointError(
                f"Step {step} is being read, and was not deleted. Delete it when that "
                "has ended."
            )
        return step

    def is_read(self, step: int) -> bool:
        """Whether this process is reading a step."""
        return str(self.location(step)) in being_read

    def as_html(self, head: str) -> str:
        """A table of the newest steps and their metadata, for notebooks."""
        try:
            steps = self.readable_or_not()
            rows = [
                (str(step), self._words(step)) for step in steps[: -_SHOWN - 1 : -1]
            ]
        except (OSError, CheckpointError) as e:
            return f"<p>{escape(head)}: {escape(str(e))}</p>"
        more = f"<p>... and {len(steps) - _SHOWN} older ones</p>"
        counted = f"{head}: {len(steps)} step{'s' * (len(steps) != 1)}"
        table = table_html(("step", "metadata"), rows) if rows else ""
        return f"<p>{escape(counted)}</p>{table}{more * (len(steps) > _SHOWN)}"

    def _words(self, step: int) -> str:
        """The metadata of a step as text, or what is wrong with it."""
        try:
            metadata = self.metadata(step)
        except (CheckpointError, OSError) as e:
            return str(e)
        if not isinstance(metadata, dict):
            return "" if metadata is None else repr(metadata)
        return ", ".join(f"{key}={value!r}" for key, value in metadata.items())

    def check(self, step: int) -> None:
        """Raise if a step was not saved; other steps may be unreadable."""
        doubtful: dict[int, OSError] = {}
        if step not in self.stored.saved(doubtful):
            raise doubtful.get(step) or self.missing(step)

    def delete(self, step: int) -> None:
        self.check(step)
        what, above = self.place.whole_above()
        if what:
            raise CheckpointError(
                f"Step {step} in {self.directory!r} was not deleted: it belongs to the "
                f"{what} {above!r}, which needs it."
            )
        try:
            self.stored.remove([step])
        except (OSError, CheckpointError) as e:
            e.add_note(may_be_deleted(step))
            raise

    def clean_up(self) -> None:
        """Remove the remains of dead attempts, as far as this process is allowed to."""
        try:
            self.stored.sweep()
        except (OSError, CheckpointError) as e:
            # A process with read-only access, or without locks, can still restore.
            logger.warning("Could not clean up in %s: %s", self.directory, e)


def check_places(places: Sequence[Run], mirror: object) -> None:
    """Raise if a run and its mirrors are not all in places of their own."""
    urls = [run.directory for run in places]
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(
                f"`mirror` is {mirror!r}, and {url!r} would have each step twice. "
                "Pass another place, such as a bucket."
            )


def best_of(steps: Mapping[int, Any], metric: str, mode: Mode, where: str) -> int:
    """The step of best metadata; raise if none has the metric."""
    best = ranked(steps, metric, mode)
    if not best:
        names = {
            name
            for metadata in steps.values()
            for name, value in numbers_in(metadata).items()
            if value == value
        }
        known = ", ".join(map(repr, sorted(names)))
        raise CheckpointNotFoundError(
            f"None of the {len(steps)} steps in {where!r} has a number {metric!r} in "
            f"its metadata, other than NaN. The numbers there are {known or 'none'}. "
            f"Save it there: `metadata={{{metric!r}: float(value)}}`."
        )
    return best[0]
