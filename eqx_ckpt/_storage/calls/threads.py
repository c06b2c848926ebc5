"""Threads, as far as the interpreter still lets them start, and their locks."""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar


_P = ParamSpec("_P")


_T = TypeVar("_T")


_S = TypeVar("_S")


_Item = TypeVar("_Item")


# Requests whose answers are waited for at a time.
_AT_ONCE = 32


def is_ending() -> bool:
    """Whether the main thread has ended: in `atexit`, or in a thread that outlives it.

    From then on, Python 3.12 starts no thread, and Python 3.11 may kill it.
    """
    return not threading.main_thread().is_alive()


def start(thread: threading.Thread) -> bool:
    """Start a thread that the caller can do without; return whether it has started."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def in_thread(call: Callable[[], _T], name: str) -> "Future[_T]":
    """Call a function in a daemon thread; in this one, if no thread starts any more."""
    found = Future[_T]()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as e:
            found.set_exception(e)

    if not start(threading.Thread(target=work, name=name, daemon=True)):
        work()
    return found


def lower_priority(by: int) -> None:
    """Let this thread ask less of the processor than the main one.

    Those that it starts do so, too.
    """
    if sys.platform == "linux":  # Elsewhere it would be that of the whole process.
        with contextlib.suppress(OSError):  # A sandbox may forbid it.
            main = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), main + by)


class ForkedLock:
    """A re-entrant lock that a forked child finds free, and a copy, too.

    There, a thread of the parent that held it would never release it.

    **Attributes:**

    - `own`: the lock of this process, for `with`.
    """

    def __init__(self) -> None:
        self.own = threading.RLock()
        _locks.add(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ForkedLock, ()

    def free(self) -> None:
        """Free it, unless the calling thread holds it."""
        if self.own.acquire(blocking=False):
            self.own.release()
        else:
            self.own = threading.RLock()


_locks: "weakref.WeakSet[ForkedLock]" = weakref.WeakSet()


def _free_all() -> None:
    for lock in list(_locks):
        lock.free()


os.register_at_fork(after_in_child=_free_all)


class Pool(ThreadPoolExecutor):
    """A pool of threads; without threads, the calling thread does the work."""

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if not is_ending():
                raise
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as e:
            future.set_exception(e)
        return future


def at_once(ask: Callable[[_Item], _T], items: Iterable[_Item]) -> dict[_Item, _T]:
    """Call a function with each item, many of them at a time; return the results."""
    with Pool(_AT_ONCE) as pool:
        asking = {item: pool.submit(ask, item) for item in items}
        try:
            return {item: answer.result() for item, answer in asking.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def both(one: Callable[[], _T], other: Callable[[], _S]) -> tuple[_T, _S]:
    """Call two functions at once; if both raise, raise what the first one did."""
    with Pool(1) as pool:
        asking = pool.submit(other)
        return one(), asking.result()
