"""Threads, as far as the interpreter still lets them start."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar


_P = ParamSpec("_P")


_T = TypeVar("_T")


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
