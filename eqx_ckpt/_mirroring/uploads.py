"""What every kind of upload in the background has: a queue, a pace, and an end.

Only its threads wait for the mirror, and nothing that they raise reaches the training.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from .._errors import CheckpointError, CheckpointExistsError, LeafNameError
from .._steps.run_config import Configs, ConfigWriter
from .._steps.run_steps import Run
from .._steps.run_sweeps import RunSweeps
from .._steps.step_removal import retain
from .._storage.calls.threads import lower_priority, start
from .mirror import Mirror
from .one_history import Beside, OtherHistory
from .step_upload import LocalProblem
from .upload_queue import UploadQueue


logger = logging.getLogger("eqx_ckpt")


# How much less than the training an upload asks of the processor.
NICENESS = 10


# Seconds that the interpreter waits at its end for a request that was sent. It would
# otherwise kill the thread, and with it the process, in the middle of TensorStore.
LAST_PATIENCE = 60.0


# What fails again, however often it is tried: another step may not.
FINAL = (LocalProblem, CheckpointExistsError, LeafNameError, OtherHistory)


class Stopped(Exception):
    """The upload was stopped, for a newer step, or for ever."""


class Uploads:
    """Uploads the steps of a run that are due to a mirror, one at a time.

    **Attributes:**

    - `there`: the run in the mirror.
    - `error`: why the last thing that was tried has failed, or `None`.
    """

    def __init__(self, run: Run, mirror: Mirror) -> None:
        self._run = run
        self._mirror = mirror
        self.there = Run(mirror.path)
        self._sweeps = RunSweeps(self.there)
        self.error: BaseException | None = None
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._queue = UploadQueue(self._mirror.when)
        self._beside = Beside(self.there)
        self._configs = ConfigWriter(Configs([self._run.place]), self.there.place)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._threads = 0
        self._is_ended = False
        self._free = 0.0  # When a line of bounded speed has sent what it was given.

    def saved(self, step: int, *, is_last: bool) -> None:
        """Upload a step, if it is due; the last one of a process is, and goes first."""
        with self._changed:
            if self._is_ended:
                return
            try:
                self._queue.saved(step, is_last=is_last)
            except Exception as e:  # Of a function of `when`.
                self._tell(e)
            if is_last or step == self._queue.running:
                self._stop.set()

    def deleted(self, step: int) -> None:
        with self._changed:
            self._queue.deleted(step)

    def held(self) -> set[int]:
        """The steps that may have to be uploaded still."""
        with self._changed:
            return self._queue.held()

    def futures(self) -> dict[int, Future[None]]:
        """Of each step that was due, of the last hundred."""
        with self._changed:
            return dict(self._queue.futures)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until no thread uploads, for some time at most."""
        most = self._mirror.timeout if seconds is None else seconds
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, most)

    def end(self) -> None:
        """Upload nothing more, and give up what is on its way."""
        with self._changed:
            left = sorted(self._queue.held())
            if left:
                steps = ", ".join(map(str, left))
                message = (
                    f"Of the steps that are due for {self.there.directory!r}, these "
                    f"were not uploaded: {steps}. The next manager of the run uploads "
                    "the newest one."
                )
                logger.warning("%s", message)
                self._queue.give_up(CheckpointError(message))
            self._is_ended = True
            self._stop.set()
            self._changed.notify_all()
        self.there.stored.end_sweeps()

    def finish(self) -> None:
        """Do what is still to be done before the interpreter ends."""

    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._threads or self._queue.held())

    def forget(self) -> None:
        """Upload nothing, in a forked child, which does not have the threads."""
        self._reset()
        self._is_ended = True

    def _start(self, work: Callable[[], None]) -> bool:
        """Let a thread work until it calls `_rest`; return whether it has started.

        If it raises, which it should not, it is not waited for any more.
        """

        def with_low_priority() -> None:
            lower_priority(NICENESS)
            try:
                work()
            except BaseException as e:  # Such as `SystemExit`, of a function of `keep`.
                self._broke(e)

        name = f"eqx_ckpt uploads to {self.there.directory}"
        with self._changed:
            self._threads += 1
        return start(threading.Thread(target=with_low_priority, name=name, daemon=True))

    def _broke(self, error: BaseException) -> None:
        """The thread ends in the middle of its work; the next save starts another."""
        logger.error("Uploads to %s: ", self.there.directory, exc_info=error)
        with self._changed:
            self.error = error
            try:
                if self._queue.running is not None:
                    self._queue.ended(error)
            finally:
                self._rest()

    def _rest(self) -> None:
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return not self._is_ended and self._queue.has_work()

    def _next(self) -> int | None:
        """Begin with the next step that is due; list what is there before the first."""
        if not self._queue.is_listed:
            there, local = self.there.readable_or_not(), self._run.readable_or_not()
            with self._changed:
                if not self._is_ended:
                    self._queue.listed(local, there)
        self._sweep()
        with self._changed:
            if self._is_ended:
                return None
            self._stop.clear()
            return self._queue.begin()

    def _sweep(self) -> None:
        """Remove what dead attempts left there; in a store, while the upload goes on.

        There, an attempt counts as dead after it was watched for long.
        """
        if self.there.stored.only_time_tells:
            self._sweeps.begin()
        else:
            self.there.clean_up()

    def _watch(self, nbytes: int) -> None:
        """Wait until a piece may be sent, or stop."""
        self._go_on()
        if self._mirror.bytes_per_second is not None:
            now = time.monotonic()
            begin = max(self._free, now)
            self._free = begin + nbytes / self._mirror.bytes_per_second
            self._stop.wait(begin - now)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _uploaded(self, step: int) -> None:
        """A step is there: remove what `keep` does not keep."""
        if self.error is not None:
            logger.info("Uploads to %s work again.", self.there.directory)
        self.error = None
        try:
            retain(self.there, self._mirror.keep, set(), step, self._go_on)
        finally:
            with self._changed:
                if self._queue.running is not None:  # Otherwise it was given up.
                    self._queue.ended()

    def _failed(self, error: Exception) -> None:
        """Put the step back, or give it up; say why once in an outage."""
        is_final = isinstance(error, FINAL)
        may_succeed = isinstance(error, OSError | CheckpointError | Stopped)
        with self._changed:
            if self._queue.running is None:
                pass
            elif may_succeed and not is_final:
                self._queue.put_back()
            else:
                self._queue.ended(error)
        if not isinstance(error, Stopped):
            self._tell(error, again=is_final)

    def _tell(self, error: Exception, *, again: bool = False) -> None:
        """Note what fails; say it once in an outage, or `again`."""
        if self.error is None or again:
            logger.warning(
                "The upload to %s failed; the training goes on. %s: %s",
                self.there.directory,
                type(error).__name__,
                str(error),
            )
        self.error = error


_all: "weakref.WeakSet[Uploads]" = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    busy = [uploads for uploads in list(_all) if uploads.is_busy()]
    with contextlib.suppress(KeyboardInterrupt):
        for uploads in busy:
            uploads.finish()
    for uploads in busy:
        uploads.end()
    for uploads in busy:
        uploads.wait(LAST_PATIENCE)


def _forget() -> None:
    for uploads in list(_all):
        uploads.forget()


os.register_at_fork(after_in_child=_forget)
