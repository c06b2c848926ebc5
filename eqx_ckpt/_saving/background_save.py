"""Background saves, whose failures are never lost."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from .._errors import CheckpointError
from .._storage.calls.threads import lower_priority


logger = logging.getLogger("eqx_ckpt")


_PATIENCE = 3.0  # seconds


# How much less than the training a save in the background asks of the processor.
_NICENESS = 5


# Saves in progress, and failed saves whose error has not been raised yet.
pending_saves: "set[Saving]" = set()


class Saving(Future[None]):
    """The future of a save, which runs in a thread of its own after `start`.

    `what` is the path, for messages. `owner` identifies the manager that raises the
    failure if nobody calls `result`: see `raise_pending_failure`. `give_up` makes the
    save fail soon with the given error.
    """

    def __init__(
        self,
        run: Callable[[], None],
        give_up: Callable[[BaseException], None],
        what: str,
        owner: object,
    ) -> None:
        super().__init__()
        self.what = what
        self.owner = owner
        self.give_up = give_up
        # Taken by the one thread that runs it.
        self._run = [run]
        self._thread: threading.Thread | None = None
        self._runner: threading.Thread | None = None
        self._pid = os.getpid()
        # A running future cannot be cancelled.
        self.set_running_or_notify_cancel()

    def start(self) -> None:
        """Start the thread, unless it has started."""
        if self._thread is not None:
            return
        # A daemon, because the interpreter would wait for another thread without a
        # message.
        name = f"eqx_ckpt saves {self.what}"
        self._thread = threading.Thread(
            target=self._thread_main, name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as e:
            error = CheckpointError(f"The save of {self.what} got no thread: {e}.")
            error.__cause__ = e
            self.give_up(error)
            self.run_here()  # Fails at once, and cleans up.

    def _thread_main(self) -> None:
        lower_priority(_NICENESS)
        self.run_here()

    def run_here(self) -> None:
        """Run the save in the calling thread, unless another thread does or did."""
        # The future may outlive the save; the tree must not.
        try:
            run = self._run.pop()
        except IndexError:
            return
        self._runner = threading.current_thread()
        try:
            run()
        except BaseException as e:
            self._runner = None
            self.set_exception(e)
        else:
            self._runner = None
            self.set_result(None)
            pending_saves.discard(self)

    def is_run_here(self) -> bool:
        """Whether the calling thread runs this save, so that waiting would deadlock."""
        return self._runner is threading.current_thread()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._pid != os.getpid() and not self.done():
            raise CheckpointError(
                f"The save of {self.what} goes on in the process that began it, of "
                "which this one is a fork. Ask its future there."
            )
        error = super().exception(timeout)
        pending_saves.discard(self)
        return error

    def result(self, timeout: float | None = None) -> None:
        error = self.exception(timeout)
        if error is not None:
            raise error

    def unseen_failure(self, verb: str) -> BaseException | None:
        """The exception of the save, if it failed, with a note that names the save."""
        error = self.exception()
        if error is not None:
            error.add_note(
                f"This is how the save of {self.what} failed. It is {verb} here "
                "because nobody had asked its future for the result."
            )
        return error


def saves_of(owner: object) -> list[Saving]:
    """All saves of an owner, including those in progress."""
    return [saving for saving in list(pending_saves) if saving.owner is owner]


def raise_pending_failure(owner: object = None) -> None:
    """Raise the failure of an earlier save that has not been raised yet."""
    for saving in saves_of(owner):
        error = saving.unseen_failure("raised") if saving.done() else None
        if error is not None:
            raise error


@atexit.register
def _finish() -> None:
    """Wait for all saves before the interpreter exits; print failures."""
    try:
        wait(pending_saves, _PATIENCE)
        unfinished = [
            saving.what for saving in list(pending_saves) if not saving.done()
        ]
        if unfinished:
            logger.warning(
                "Waiting for the save of %s. Ctrl-C gives up.", " and ".join(unfinished)
            )
        # A signal that arrives just before a wait begins is handled when it ends.
        while wait(pending_saves, _PATIENCE).not_done:
            pass
    except KeyboardInterrupt:
        for saving in list(pending_saves):
            saving.give_up(CheckpointError("The save was given up."))
        wait(pending_saves)
    for saving in list(pending_saves):
        error = saving.unseen_failure("shown")
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)


# A forked child does not have the parent's threads.
os.register_at_fork(after_in_child=pending_saves.clear)
