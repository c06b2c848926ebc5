"""Whether the process has received SIGTERM."""

import signal
import threading
from types import FrameType
from typing import Any

from ._errors import CheckpointError


# The watchers, and the signal handler to restore when there are none left.
_watchers: set[object] = set()
_previous: list[Any] = []
_told = threading.Event()


def told_to_end(watcher: object) -> bool:
    """Whether SIGTERM came since the first call; it no longer ends the process."""
    if not _watchers:
        try:
            _previous[:] = [signal.signal(signal.SIGTERM, _note)]
        except ValueError:
            raise CheckpointError(
                "`should_save` waits for SIGTERM, which Python allows in the main "
                "thread only. Call it there."
            ) from None
        _told.clear()
    _watchers.add(watcher)
    return _told.is_set()


def stop_watching(watcher: object) -> None:
    """Restore the previous handler of SIGTERM once nobody watches."""
    if watcher in _watchers:
        _watchers.discard(watcher)
        if not _watchers:
            signal.signal(signal.SIGTERM, _previous.pop() or signal.SIG_DFL)


def _note(number: int, frame: FrameType | None) -> None:
    _told.set()
