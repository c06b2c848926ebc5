"""Threads that share the work of one save or restore."""

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from .threads import start


# Bytes of chunks that have begun to move between memory and a disk.
MAX_IN_FLIGHT = 48 * 2**20


# Handing over fewer bytes costs more than doing the work.
SMALL = 2**17


# A thread that waits for a disk needs no core.
_MOST = 8


# A thread that waits this many times longer than it works is waiting for the disk.
_WAITS = 3


# A disk that keeps the calling thread waiting so long gets several that wait.
_PATIENCE = 0.2  # seconds


# Of what this thread reads, if it may take less memory than others.
_most: ContextVar[float] = ContextVar("most", default=math.inf)


@contextlib.contextmanager
def in_flight_at_most(nbytes: float) -> Generator[None]:
    """Let no more bytes be on their way at a time, or one chunk."""
    token = _most.set(nbytes)
    try:
        yield
    finally:
        _most.reset(token)


def at_most(limit: int) -> int:
    """How many bytes may be on their way here, of `limit` bytes elsewhere."""
    return int(min(limit, _most.get()))


_T = TypeVar("_T")


_R = TypeVar("_R")


class _Done(NamedTuple, Generic[_T, _R]):
    item: _T
    nbytes: int
    result: _R | BaseException
    waited: bool


class Workers(Generic[_T, _R]):
    """Does items of work, in the calling thread and in others.

    Large items are spread over the cores, and over more threads while they wait for the
    disk. The calling thread does small ones itself, unless they wait too. At most
    `limit` bytes of items are pending; `on_done` is called, in the calling thread, with
    those that are done, and their results.
    """

    def __init__(
        self,
        do: Callable[[_T], _R],
        limit: int,
        on_done: Callable[[_T, _R], Any],
    ) -> None:
        self._do = do
        self._limit = at_most(limit)
        self._on_done = on_done
        self._todo: SimpleQueue[tuple[_T, int] | None] = SimpleQueue()
        self._done: SimpleQueue[_Done[_T, _R]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._cores = min(len(os.sched_getaffinity(0)), _MOST)
        # Also if Ctrl-C comes between the end of the work and `__exit__`.
        self._end = weakref.finalize(self, self._todo.put, None)
        self._end.atexit = False  # Saves still go on then.
        self._open = 0  # items
        self._nbytes = 0
        self._wall = self._cpu = 0.0

    def __enter__(self) -> "Workers[_T, _R]":
        return self

    def __exit__(self, *failure: object) -> None:
        """When this returns, no thread works on an item."""
        try:
            with contextlib.suppress(Empty):
                while True:
                    self._todo.get_nowait()
        finally:
            # Not `_end`, which does nothing once the interpreter ends.
            self._todo.put(None)
        for thread in self._threads:
            # One whose start was interrupted does not live yet, and gets no item.
            if thread.is_alive():
                thread.join()

    def put(self, item: _T, nbytes: int) -> None:
        if nbytes < SMALL and self._wall <= _WAITS * self._cpu + _PATIENCE:
            self._do_here(item)
            return
        self._open += 1
        self._nbytes += nbytes
        self._todo.put((item, nbytes))
        if len(self._threads) < self._cores:
            self._add_thread()
        while not self._done.empty():
            self._take()
        while self._nbytes > self._limit:
            self._help()

    def finish(self) -> None:
        while self._open:
            self._help()

    def _help(self) -> None:
        """Do an item that no thread has begun, or wait for the others."""
        try:
            task = self._todo.get_nowait()
        except Empty:
            self._take()
            return
        assert task is not None
        self._do_here(task[0])
        self._open -= 1
        self._nbytes -= task[1]

    def _take(self) -> None:
        item, nbytes, result, waited = self._done.get()
        self._open -= 1
        self._nbytes -= nbytes
        if isinstance(result, BaseException):
            raise result
        if waited and len(self._threads) < _MOST:
            self._add_thread()
        self._on_done(item, result)

    def _do_here(self, item: _T) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self._do(item)
        self._cpu += time.thread_time() - cpu
        self._wall += time.perf_counter() - wall
        self._on_done(item, result)

    def _add_thread(self) -> None:
        what = (self._todo, self._done, self._do)
        thread = threading.Thread(target=_work, args=what, daemon=True)
        # Before it starts: Ctrl-C may come before that returns.
        self._threads.append(thread)
        # If none starts, the calling thread does all.
        if not start(thread):
            self._threads.remove(thread)


def _work(
    todo: SimpleQueue[tuple[_T, int] | None],
    done: SimpleQueue[_Done[_T, _R]],
    do: Callable[[_T], _R],
) -> None:
    """What a thread does, without a reference to the `Workers`."""
    while (task := todo.get()) is not None:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            result = do(task[0])
        except BaseException as e:
            result = e
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        done.put(_Done(*task, result, wall > _WAITS * cpu))
        del task, result
    todo.put(None)  # For the others, however many there are.
