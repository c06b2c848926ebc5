"""Pausing Python's garbage collector, from several threads."""

import contextlib
import gc
import os
from collections.abc import Generator

from .threads import ForkedLock


class _Collector:
    """The garbage collector, which is off as long as any thread pauses it.

    Each thread would otherwise restore what it has found, which may be the pause of
    another one; then the collector would stay off.
    """

    def __init__(self) -> None:
        self._lock = ForkedLock()
        self._pauses: set[object] = set()
        self._was_on = False

    @contextlib.contextmanager
    def paused(self) -> Generator[None, None, None]:
        pause = object()
        try:
            with self._lock.own:
                if not self._pauses:
                    self._was_on = gc.isenabled()
                self._pauses.add(pause)
                gc.disable()
            yield
        finally:
            with self._lock.own:
                self._pauses.discard(pause)
                if not self._pauses and self._was_on:
                    gc.enable()

    def forget(self) -> None:
        """Forget the threads of the parent, in a forked child."""
        if self._pauses and self._was_on:
            gc.enable()
        self._pauses.clear()


_collector = _Collector()


os.register_at_fork(after_in_child=_collector.forget)


def collector_paused() -> contextlib.AbstractContextManager[None]:
    """Pause the garbage collector: of thousands of new objects, none is garbage.

    Scanning them repeatedly takes a seventh of the time for 5,000 leaves.
    """
    return _collector.paused()
