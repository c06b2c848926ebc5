"""A thread that writes samples while the device computes the next ones."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..._storage.calls.threads import start


_Job = tuple[Any, int]


class Writer:
    """A bounded queue of jobs, and the thread that runs them in order.

    The first failure is kept as `failure`, and no job is run after it. `put` and
    `drain` are called by one thread at a time, and may be interrupted at any line: a
    job is in the queue, or not.
    """

    def __init__(self, write: Callable[[Any], None], limit: int, name: str) -> None:
        self._write = write
        self._limit = limit
        self._name = name
        # Jobs, and where to answer that all jobs before were run.
        self._jobs: SimpleQueue[_Job | SimpleQueue[None] | None] = SimpleQueue()
        # Bytes of jobs; each number is written by one thread.
        self._queued = self._done = 0
        # Has an entry if a job was run since `put` looked last.
        self._ran: SimpleQueue[None] = SimpleQueue()
        self._has_thread = self._is_stopped = False
        # Taken by the one thread that runs the jobs: one whose start was interrupted
        # may run, or not, and then there is another one.
        self._turn = [self._jobs]
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None

    def put(self, job: Any, nbytes: int) -> None:
        """Queue a job for the thread, once there is room; without a thread, run it.

        A job of any size fits into an empty queue.
        """
        if self._is_stopped:
            return
        while self._pending > 0 and self._pending + nbytes > self._limit:
            self._ran.get()
        if not self._has_thread:
            # A daemon thread: uncommitted samples may be lost, so the interpreter need
            # not wait.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            self._has_thread = start(thread)
        if self._has_thread:
            self._jobs.put((job, nbytes))
            self._queued += nbytes
        else:
            self._do(job)

    @property
    def _pending(self) -> int:
        return self._queued - self._done

    def drain(self) -> None:
        """Wait until all jobs have run, or one has failed."""
        if self._has_thread and threading.current_thread() not in self._threads:
            answer: SimpleQueue[None] = SimpleQueue()
            self._jobs.put(answer)
            answer.get()

    def stop(self) -> None:
        """Drop the queued jobs, and end the thread."""
        self._is_stopped = True
        self.drain()
        self._has_thread = False
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            jobs = self._turn.pop()
        except IndexError:
            return
        while (item := jobs.get()) is not None:
            if isinstance(item, tuple):
                self._do(item[0])
                self._done += item[1]
                if self._ran.empty():
                    self._ran.put(None)
            else:
                item.put(None)
            del item

    def _do(self, job: Any) -> None:
        if self.failure is None and not self._is_stopped:
            try:
                self._write(job)
            except BaseException as e:
                self.failure = e
