"""Sweeps of a run beside its saves, which they never hold up."""

import atexit
import os
import threading

from .._storage.calls.threads import is_ending, start
from .run_steps import Run


# Seconds that others wait for a sweep.
PATIENCE = 10.0


_running: "set[RunSweeps]" = set()


class RunSweeps:
    """A thread that removes the remains of dead attempts, one sweep at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a sweep, unless one is running, or there can be nothing new."""
        is_running = self._thread is not None and self._thread.is_alive()
        if is_running or not self._run.stored.only_time_tells or is_ending():
            return
        name = f"eqx_ckpt sweeps {self._run.directory}"
        # A daemon, because the interpreter would wait for another thread before `_end`.
        thread = threading.Thread(target=self._sweep, name=name, daemon=True)
        if start(thread):
            self._thread = thread

    def _sweep(self) -> None:
        _running.add(self)
        try:
            self._run.clean_up()
        finally:
            _running.discard(self)

    def wait(self) -> None:
        """Wait for a sweep, for some time at most."""
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def end(self) -> None:
        """Stop a sweep; wait for a request that was sent, for some time at most."""
        self._run.stored.end_sweeps()
        self.wait()


@atexit.register
def _end() -> None:
    for sweeps in list(_running):
        sweeps.end()


# A forked child does not have the parent's threads.
os.register_at_fork(after_in_child=_running.clear)
