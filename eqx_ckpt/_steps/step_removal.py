"""Which steps a manager keeps, and the removal of the others."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.display import in_bytes
from .._storage.calls.threads import at_once
from .._types import shown
from .metrics_log import keep_metrics
from .retention import Keep, KEEP_ALL
from .run_steps import as_step, Run


logger = logging.getLogger("eqx_ckpt")


# So many steps are named in an error.
_MOST_SHOWN = 10


class KnownSteps:
    """The steps that a manager knows without listing the run each time.

    **Attributes:**

    - `are_listed`: whether those of earlier managers are known.
    - `damaged`: those that a restore has passed over.
    - `last`: the one that was saved last, if it is there.
    """

    def __init__(self) -> None:
        self._there: set[int] = set()
        self.are_listed = False
        self._running: list[tuple[int, Future[None]]] = []  # one at a time
        self.damaged: set[int] = set()
        self.last: set[int] = set()

    def list(self, steps: Iterable[int]) -> None:
        self._there.update(steps)
        self.are_listed = True

    def begin(self, step: int, saving: Future[None]) -> None:
        self._running = [(step, saving)]

    def add(self, step: int) -> None:
        self._there.add(step)
        self.damaged.discard(step)
        self.last = {step}

    def remove(self, steps: Iterable[int]) -> None:
        self._there.difference_update(steps)
        self.damaged.difference_update(steps)
        self.last.difference_update(steps)

    def now(self) -> set[int]:
        """The undamaged steps that exist or are being saved."""
        # Read first, because a save that ends meanwhile is then among those that exist.
        running = {step for step, saving in self._running if not saving.done()}
        return running | (self._there - self.damaged)


class Candidates(Mapping[int, Any]):
    """The metadata of the steps that may be removed, read on access.

    **Attributes:**

    - `unreadable`: the steps whose metadata were accessed and cannot be read.
    """

    def __init__(
        self, run: Run, without: set[int], goes_on: Callable[[], None]
    ) -> None:
        self._run = run
        self._goes_on = goes_on
        steps = (step for step in run.removable() if step not in without)
        self._steps = dict.fromkeys(steps)
        self.unreadable: set[int] = set()

    def __getitem__(self, step: int) -> Any:
        if step not in self._steps:
            raise KeyError(step)
        self._goes_on()
        try:
            return self._run.metadata(step)
        except (CorruptCheckpointError, CheckpointNotFoundError, OSError) as e:
            # Keep it: its metadata cannot show that it is worse.
            logger.warning("The metadata of step %d cannot be read: %s", step, e)
            self.unreadable.add(step)
            return None

    def drop_damaged(self, kept: set[int], saved: int) -> bool:
        """Drop the steps that are not intact; return whether there are any.

        Raise if it is the step that was just saved.
        """
        is_whole = at_once(
            lambda step: self._is_whole(step, saved), kept & self._steps.keys()
        )
        dropped = [step for step, whole in is_whole.items() if not whole]
        for step in dropped:
            del self._steps[step]
        self.unreadable.difference_update(dropped)
        return bool(dropped)

    def _is_whole(self, step: int, saved: int) -> bool:
        self._goes_on()
        try:
            problem = self._run.stored.problem(step)
        except CheckpointNotFoundError:
            return False  # Another process has removed it.
        except OSError as e:
            if step == saved:
                raise
            problem = str(e)
        if problem and step == saved:
            raise CorruptCheckpointError(
                f"{self._run.location(step)} was saved, and is not intact any more: "
                f"{problem}. No older step was removed; save another step."
            )
        if problem:
            logger.warning(
                "Step %d was not seen intact, and does not count: %s", step, problem
            )
        return not problem

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def _chosen(answer: Any) -> list[int]:
    """Validate the steps that a function of `keep` returned."""
    try:
        return [as_step(step) for step in answer]
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"`keep` returned {shown(answer)}. It has to return steps, as integers. No "
            "step was removed."
        ) from e


def retain(
    run: Run,
    keep: Sequence[Keep],
    damaged: set[int],
    saved: int,
    goes_on: Callable[[], None],
) -> list[int]:
    """Remove, and return, the steps that no function keeps, after `saved`.

    `goes_on` is called for each step that is looked at or removed.
    """
    try:
        if KEEP_ALL in keep:
            # Nothing is listed; but the save may have made the directory of the run.
            run.stored.check_place()
            return []
        steps = Candidates(run, damaged, goes_on)
        removed = _steps_to_remove(run, keep, steps, saved)
        keep_metrics(run, removed)
        for step in removed:
            goes_on()
            run.stored.remove([step])
    except Exception as e:
        e.add_note(f"Step {saved} was saved. Removing older steps failed.")
        raise
    for step in removed:
        logger.info("Removed %s.", run.path(step))
    return removed


def _steps_to_remove(
    run: Run, keep: Sequence[Keep], steps: Candidates, saved: int
) -> list[int]:
    """The steps that are not kept, if all that are kept have been seen intact.

    A step that is not intact does not count, and stays.
    """
    while True:
        kept = {saved, max(steps, default=saved)}
        for function in keep:
            kept.update(_chosen(function(steps)))
        kept |= steps.unreadable
        removed = [step for step in steps if step not in kept and not run.is_read(step)]
        if not removed or not steps.drop_damaged(kept, saved):
            return removed


def what_keep_frees(
    run: Run, keep: Sequence[Keep], damaged: set[int], step: int, metadata: Any
) -> str:
    """How to make room for a step that is to be saved; `''` if that is not known."""
    try:
        steps = Candidates(run, damaged, lambda: None)
        found = {**{before: steps[before] for before in steps}, step: metadata}
        kept = {step, *steps.unreadable}
        for function in keep:
            kept.update(_chosen(function(found)))
        own = run.stored.own_bytes([*steps])
    except Exception as e:  # Such as of a function of `keep`; the disk is full anyway.
        logger.warning("What `keep` would free is not known: %s", e)
        return ""
    if not own:
        return ""
    removed = {before: own[before] for before in own if before not in kept}
    if not removed:
        return f"`keep` keeps all steps: {_sizes(own)}. Keep fewer, or `delete` one."
    return (
        f"After this save, `keep` would free {in_bytes(sum(removed.values()))} at "
        f"least: {_sizes(removed)}. `delete` one of them before it."
    )


def _sizes(steps: Mapping[int, int]) -> str:
    shown = [f"{step} ({in_bytes(steps[step])})" for step in sorted(steps)]
    if len(shown) > _MOST_SHOWN:
        shown[_MOST_SHOWN:] = [f"{len(shown) - _MOST_SHOWN} more"]
    return ", ".join(shown)
