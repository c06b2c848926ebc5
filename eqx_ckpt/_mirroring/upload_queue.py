"""Which steps are due for a mirror, and which of them is next: plain decisions."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from .._errors import CheckpointError
from .._steps.save_times import is_due, When


logger = logging.getLogger("eqx_ckpt")


# Futures of so many uploads that have ended are kept.
_MOST_ENDED = 100


class UploadQueue:
    """One step is uploaded, and the newest one that is due after it waits.

    **Attributes:**

    - `futures`: of each step that was due, or may have been; of the last hundred. Of a
      step that was saved again meanwhile, it is about what was saved last.
    - `is_listed`: whether it is known what is in the mirror.
    - `running`: the step that is uploaded, or `None`.
    """

    def __init__(self, when: Sequence[When] | None) -> None:
        self._when = when
        self.futures: dict[int, Future[None]] = {}
        self.is_listed = False
        self.running: int | None = None
        # They were saved again when the mirror had them already, or may get what they
        # held before, or it has newer ones. No newer step takes their place: they are
        # compared first.
        self._again: set[int] = set()
        self._waiting: int | None = None
        # The newest step that was saved before the mirror was listed.
        self._unlisted: int | None = None
        # These are gone, although a list that was read before may still have them.
        self._deleted: set[int] = set()
        # The newest step that is in the mirror, and that was due.
        self._there: int | None = None
        self._last: int | None = None

    def held(self) -> set[int]:
        """The steps that may have to be uploaded still."""
        steps = (self.running, *self._again, self._waiting, self._unlisted)
        return {step for step in steps if step is not None}

    def has_work(self) -> bool:
        return not self.is_listed or bool(self._again) or self._waiting is not None

    def listed(self, local: Iterable[int], there: Iterable[int]) -> None:
        """Note what is in the mirror; local steps that are newer may be due."""
        self._there = max({*there} - self._deleted, default=None)
        known = (self._there, self._waiting)
        self._last = max((step for step in known if step is not None), default=None)
        newest, self._unlisted = self._unlisted, None
        # It may have been saved after the local steps were listed.
        here = {*local} if newest is None else {*local, newest}
        self.is_listed = True
        problem: Exception = CheckpointError(f"Step {newest} was not due.")
        try:
            for step in sorted(here - self._deleted):
                self._consider(step, is_new=step == newest)
        except Exception as e:  # Of a function of `when`.
            problem = e
            raise
        finally:
            future = None if newest is None else self.futures.get(newest)
            if newest not in self.held() and future is not None and not future.done():
                future.set_exception(problem)

    def saved(self, step: int, *, is_last: bool) -> None:
        """Note a step that was saved; the last one of a process is due in any case."""
        if is_last or step in (self.running, self._waiting) or step in self._again:
            self._put(step)
        elif self.is_listed:
            if step == self._last:  # It has replaced one that was damaged.
                self._last = None if self._there == step else self._there
            self._consider(step, is_new=True)
        else:
            if self._unlisted not in (None, step, self._waiting):
                self._drop(self._unlisted, step)
            self._unlisted = step
            self._deleted.discard(step)
            self._open(step)

    def deleted(self, step: int) -> None:
        """Note a step that is in no place any more: an older one may be due then."""
        self._deleted.add(step)
        if step == self._there:
            self._there = None
        if step == self._last:
            self._last = None

    def _consider(self, step: int, *, is_new: bool) -> None:
        if is_new and self._when != [] and self._is_older(step):
            self._put(step)  # It may have left the line of those there.
        elif self._last is not None and step <= self._last:
            return
        elif self._when is None or is_due(self._when, step, self._last):
            self._put(step)

    def _is_older(self, step: int) -> bool:
        return self._there is not None and step < self._there

    def _put(self, step: int) -> None:
        """Let a step wait, in place of an older one."""
        self._open(step)
        self._last = max(step, self._last or 0)
        is_known = step in (self.running, self._there) or step in self._again
        if (is_known or self._is_older(step)) and step != self._waiting:
            self._again.add(step)
            return
        if self._waiting not in (None, step, self._unlisted):
            self._drop(self._waiting, step)
        self._waiting = step

    def _open(self, step: int) -> None:
        if step not in self.futures or self.futures[step].done():
            self.futures.pop(step, None)
            self.futures[step] = future = Future[None]()
            future.set_running_or_notify_cancel()  # Nobody else can end it.

    def begin(self) -> int | None:
        """The next step to upload, or `None`."""
        if self._again:
            self.running = min(self._again)
            self._again.remove(self.running)
        else:
            self.running, self._waiting = self._waiting, None
        return self.running

    def put_back(self) -> None:
        """The upload did not end; it is tried again, unless a newer step waits."""
        step, self.running = self.running, None
        assert step is not None
        self._again.discard(step)
        if self._waiting is None:
            self._waiting = step
        else:
            self._drop(step, self._waiting)

    def ended(self, error: BaseException | None = None) -> None:
        """The step is in the mirror, or will never be.

        If it was saved again meanwhile, that is still to be uploaded.
        """
        step = self.running
        assert step is not None
        if error is not None and step in self._again:
            self.put_back()
            return
        self.running = None
        if error is None:
            self._there = max(step, self._there or 0)
        elif self._last == step:
            self._last = self._there  # The next one is due in its place.
        if step not in self._again:
            self._end(step, error)

    def _drop(self, step: int, newer: int) -> None:
        message = f"Step {step} is not uploaded, as step {newer} is newer."
        logger.info("%s", message)
        self._end(step, CheckpointError(message))

    def _end(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self.futures[step].set_result(None)
        else:
            self.futures[step].set_exception(error)
        ended = [step for step, future in self.futures.items() if future.done()]
        for old in ended[:-_MOST_ENDED]:
            del self.futures[old]

    def give_up(self, error: BaseException) -> None:
        """Nothing more is uploaded."""
        for step in self.held() & self.futures.keys():
            self._end(step, error)
        self.running = self._waiting = self._unlisted = None
        self._again.clear()
