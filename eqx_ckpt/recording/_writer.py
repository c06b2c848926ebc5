"""A thread that writes samples while the next ones are computed."""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Writer:
    """A queue of bounded size, and the thread that empties it, in order.

    The first failure ends it: what is in the queue is dropped, and `failure` is set.
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
        self._pid = os.getpid()
        self.failure: BaseException | None = None

    def put(self, job: Any, nbytes: int) -> None:
        """Hand a job to the thread, once there is room for it.

        There is for one job, however large, if nothing else is waiting.
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
                # A daemon: what is not committed may be lost, so nobody waits for it.
                self._thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all jobs are done, or one has failed."""
        with self._changed:
            while (self._jobs or self._busy) and self.failure is None:
                self._changed.wait()

    def stop(self) -> None:
        """Drop what is waiting, and end the thread."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        thread = self._thread
        is_ours = self._pid == os.getpid()
        if thread is not None and is_ours and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
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
