"""The thread that uploads the steps of a run to one mirror.

Only that thread waits for the mirror, and nothing that it raises reaches the training.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future

from .._errors import CheckpointError, CheckpointExistsError, LeafNameError
from .._steps.run_steps import Run
from .._steps.step_before import StepBefore
from .._steps.step_removal import retain
from .._storage.calls.threads import lower_priority, start
from .mirror import Mirror
from .one_history import OtherHistory
from .step_upload import LocalProblem, Target, upload
from .upload_queue import UploadQueue


logger = logging.getLogger("eqx_ckpt")


# How much less than the training an upload asks of the processor.
NICENESS = 10


# Seconds before the second try, before the third one, and so on; the last one stays.
PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


# How many of these are used while somebody waits for the upload.
_SHORT = 3


_PATIENCE = 3.0  # seconds


# Seconds that the interpreter waits at its end for a request that was sent. It would
# otherwise kill the thread, and with it the process, in the middle of TensorStore.
LAST_PATIENCE = 60.0


# What fails again, however often it is tried: another step may not.
FINAL = (LocalProblem, CheckpointExistsError, LeafNameError, OtherHistory)


class Stopped(Exception):
    """The upload was stopped, for a newer step, or for ever."""


class Pace:
    """Lets so many bytes a second pass, or all, if there is no bound."""

    def __init__(self, bytes_per_second: float | None, stop: threading.Event) -> None:
        self._bytes_per_second = bytes_per_second
        self._stop = stop
        self._free = 0.0  # When a bounded line has sent what it was given.

    def wait(self, nbytes: int) -> None:
        """Wait until a piece may be sent, or until the upload is stopped."""
        if self._bytes_per_second is not None:
            now = time.monotonic()
            since = max(self._free, now)
            self._free = since + nbytes / self._bytes_per_second
            self._stop.wait(since - now)


class Uploader:
    """Uploads the steps of a run that are due to a mirror, one at a time.

    **Attributes:**

    - `there`: the run in the mirror.
    - `error`: why the last thing that was tried has failed, or `None`.
    """

    def __init__(self, run: Run, mirror: Mirror, incremental: bool) -> None:
        self._run = run
        self._mirror = mirror
        self.there = Run(mirror.path)
        self.error: Exception | None = None
        self._before = StepBefore(self.there) if incremental else None
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._queue = UploadQueue(self._mirror.when)
        self._related: set[int] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_ended = self._is_awaited = self._is_woken = False
        self._pace = Pace(self._mirror.bytes_per_second, self._stop)

    def begin(self) -> None:
        """Upload what is due, and not there."""
        with self._changed:
            self._start()

    def saved(self, step: int, *, is_last: bool) -> None:
        """Upload a step, if it is due; the last one of a process is, and goes first."""
        with self._changed:
            if self._is_ended:
                return
            self._queue.saved(step, is_last=is_last)
            if is_last or step == self._queue.running:
                self._stop.set()
                self._wake()
            has_thread = self._start()
        if not has_thread:  # The interpreter ends, and waits for the calling thread.
            self._try_next()

    def _start(self) -> bool:
        if self._thread is None and not self._is_ended:
            name = f"eqx_ckpt uploads to {self.there.directory}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            _working.add(self)
            if not start(self._thread):
                self._rest()
                return False
        return True

    def _rest(self) -> None:
        self._thread = None
        _working.discard(self)
        self._changed.notify_all()

    def _wake(self) -> None:
        self._is_woken = True
        self._changed.notify_all()

    def held(self) -> set[int]:
        """The steps that may have to be uploaded still."""
        with self._changed:
            return self._queue.held()

    def futures(self) -> dict[int, Future[None]]:
        """Of each step that was due, of the last hundred."""
        with self._changed:
            return dict(self._queue.futures)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all is uploaded, for some time at most."""
        with self._changed:
            self._is_awaited = True
            self._wake()
            most = self._mirror.timeout if seconds is None else seconds
            self._changed.wait_for(lambda: self._thread is None, most)

    def end(self) -> None:
        """Upload nothing more, and give up what is on its way."""
        with self._changed:
            left = sorted(self._queue.held())
            if left and not self._is_ended:
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

    def forget(self) -> None:
        """Upload nothing, in a forked child, which does not have the thread."""
        self._reset()
        self._is_ended = True

    def finish(self) -> None:
        """Wait before the interpreter ends, and say so."""
        self.wait(_PATIENCE)
        if self.held():
            where = self.there.directory
            logger.warning("Waiting for the upload to %s. Ctrl-C gives up.", where)
            self.wait()
        self.end()

    def _work(self) -> None:
        lower_priority(NICENESS)
        tries = 0
        while self._has_work():
            tries = 0 if self._try_next() else self._pause(tries)

    def _has_work(self) -> bool:
        with self._changed:
            has_work = not self._is_ended and self._queue.has_work()
            if not has_work:
                self._rest()
            return has_work

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
            if not self._queue.is_listed:
                self._look()
            with self._changed:
                self._stop.clear()
                step = None if self._is_ended else self._queue.begin()
            if step is not None:
                self._upload(step)
        except FINAL as e:
            self._note(e)
        except (OSError, CheckpointError) as e:
            self._note(e)
            return False
        except Stopped:
            pass
        except Exception as e:  # Such as of a function of `when` or `keep`.
            self._note(e)
            return False
        return True

    def _look(self) -> None:
        there = self.there.readable_or_not()
        local = self._run.readable_or_not()
        with self._changed:
            if not self._is_ended:
                self._queue.listed(local, there)
            self._changed.notify_all()
        self.there.clean_up()

    def _upload(self, step: int) -> None:
        try:
            there = Target(self.there, self._related, self._before)
            upload(self._run, step, there, self._watch)
        except Exception as e:
            may_succeed = isinstance(e, OSError | CheckpointError | Stopped)
            with self._changed:
                if self._is_ended:
                    pass
                elif may_succeed and not isinstance(e, FINAL):
                    self._queue.put_back()
                else:
                    self._queue.ended(e)
            raise
        if self.error is not None:
            logger.info("Uploads to %s work again.", self.there.directory)
        self.error = None
        try:
            retain(self.there, self._mirror.keep, set(), step, self._go_on)
            self.there.clean_up()
        finally:
            with self._changed:
                if not self._is_ended:
                    self._queue.ended()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _watch(self, nbytes: int) -> None:
        """Wait until a piece may be sent, or stop."""
        self._go_on()
        self._pace.wait(nbytes)
        self._go_on()

    def _note(self, error: Exception) -> None:
        """Keep an error; say so once, until something was uploaded again."""
        if self.error is None or isinstance(error, FINAL):
            logger.warning(
                "The upload to %s failed; the training goes on. %s: %s",
                self.there.directory,
                type(error).__name__,
                str(error),
            )
        self.error = error


_all: "weakref.WeakSet[Uploader]" = weakref.WeakSet()


# Those whose thread runs.
_working: set[Uploader] = set()


@atexit.register
def _finish() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for uploader in list(_working):
            uploader.finish()
    for uploader in list(_working):
        uploader.end()
    for uploader in list(_working):
        uploader.wait(LAST_PATIENCE)


def _forget() -> None:
    _working.clear()
    for uploader in list(_all):
        uploader.forget()


os.register_at_fork(after_in_child=_forget)
