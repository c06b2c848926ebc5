"""A thread that writes samples while the device computes the next ones."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..._storage.calls.threads import start


class Writer:
    """A bounded queue of jobs, and the thread that runs them in order.

    The first failure ends the thread: it sets `failure`, and the rest of the queue is
    dropped.
    """

    def __init__(self, write: Callable[[Any], None], limit: int, name: str) -> None:
        self._write = write
        self._limit = limit
        self._name = name
        self._jobs: deque[tuple[Any, int]] = deque()
        self._nbytes = 0
        self._busy = self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def put(self, job: Any, nbytes: int) -> None:
        """Queue a job for the thread, once there is room; without a thread, run it.

        A job of any size fits into an empty queue.
        """
        with self._changed:
            while self._nbytes and self._nbytes + nbytes > self._limit:
                if self.failure is not None:
                    return
                self._changed.wait()
            if self.failure is not None or self._stopped:
                return
            self._jobs.append((job, nbytes))
            self._nbytes += nbytes
            if self._thread is None:
                # A daemon thread: uncommitted samples may be lost, so the interpreter
                # need not wait.
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread = thread if start(thread) else None
            has_thread = self._thread is not None
            self._changed.notify_all()
        if not has_thread:
            self._do_next()

    def drain(self) -> None:
        """Wait until all jobs have run, or one has failed."""
        with self._changed:
            while (self._jobs or self._busy) and self.failure is None:
                self._changed.wait()

    def stop(self) -> None:
        """Drop the queued jobs, and end the thread."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for a job, and run it; whether there was one before the end."""
        with self._changed:
            while not self._jobs and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return False
            job, nbytes = self._jobs.popleft()
            self._busy = True
        failure = None
        try:
            self._write(job)
        except BaseException as e:
            failure = e
        del job
        with self._changed:
            self._busy = False
            self._nbytes -= nbytes
            if failure is not None:
                self.failure = failure
                self._stopped = True
                self._jobs.clear()
            self._changed.notify_all()
        return True
