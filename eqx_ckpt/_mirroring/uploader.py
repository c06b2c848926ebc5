"""The thread that uploads the steps of a run to one mirror."""

import logging

from .._steps.run_steps import Run
from .._steps.step_before import StepBefore
from .mirror import Mirror
from .step_upload import Target, upload
from .uploads import FINAL, Stopped, Uploads


logger = logging.getLogger("eqx_ckpt")


# Seconds before the second try, before the third one, and so on; the last one stays.
PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


# How many of these are used while somebody waits for the upload.
_SHORT = 3


_PATIENCE = 3.0  # seconds


class Uploader(Uploads):
    """Uploads whole steps, as soon as they are due."""

    def __init__(self, run: Run, mirror: Mirror, incremental: bool) -> None:
        super().__init__(run, mirror)
        self._before = StepBefore(self.there) if incremental else None

    def _reset(self) -> None:
        super()._reset()
        self._is_awaited = self._is_woken = False

    def begin(self) -> None:
        """Upload what is due, and not there."""
        with self._changed:
            self._begin()

    def saved(self, step: int, *, is_last: bool) -> None:
        with self._changed:
            super().saved(step, is_last=is_last)
            if self._stop.is_set():
                self._wake()
            has_thread = self._begin()
        if not has_thread:  # The interpreter ends, and waits for the calling thread.
            self._try_next()

    def _begin(self) -> bool:
        """Return whether a thread does what there is to do."""
        if not self._threads and not self._is_ended and not self._start(self._work):
            self._rest()
            return False
        return True

    def _wake(self) -> None:
        self._is_woken = True
        self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all is uploaded, for some time at most."""
        with self._changed:
            self._is_awaited = True
            self._wake()
            super().wait(seconds)

    def finish(self) -> None:
        """Wait for what is due, and say so."""
        self.wait(_PATIENCE)
        if self.held():
            where = self.there.directory
            logger.warning("Waiting for the upload to %s. Ctrl-C gives up.", where)
            self.wait()

    def _work(self) -> None:
        tries = 0
        while self._goes_on():
            tries = 0 if self._try_next() else self._pause(tries)

    def _goes_on(self) -> bool:
        with self._changed:
            goes_on = self._has_work()
            if not goes_on:
                self._rest()
            return goes_on

    def _pause(self, tries: int) -> int:
        """Wait before the next try; return how many there were in this outage."""
        with self._changed:
            most = _SHORT if self._is_awaited else len(PAUSES)
            pause = PAUSES[min(tries, most - 1)]
            is_woken = self._changed.wait_for(
                lambda: self._is_woken or self._is_ended, pause
            )
            self._is_woken = False
            return 0 if is_woken else tries + 1

    def _try_next(self) -> bool:
        """Upload the next step; return whether another try needs no pause."""
        try:
            step = self._next()
            if step is not None:
                there = Target(self.there, self._beside, self._configs, self._before)
                upload(self._run, step, there, self._watch)
                self._uploaded(step)
        except Exception as e:  # Also of a function of `when` or `keep`.
            self._failed(e)
            return isinstance(e, (Stopped, *FINAL))
        return True
