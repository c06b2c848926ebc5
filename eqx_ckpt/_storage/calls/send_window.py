"""How much is on its way to a store, or from it, at a time.

A hop in between may take whole requests or replies in at once, and forward them slowly.
As seen from here, they then make no progress, and after `STALLED` seconds each is sent
again. So no more is on its way than the line carries in a part of that time. All saves
of a process to one store share the line, and so do all restores.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from .worker_threads import at_most


# Seconds without a byte after which a request is sent again; after which one is slow;
# and in which a slow line is to carry what is on its way.
STALLED = 60


SLOW = 5.0


SECONDS = 15.0


# Bytes, until it is known how fast the line is; of each save or restore, whatever the
# others have on their way; and of all.
FIRST = 24 * 2**20


OWN = 8 * 2**20


MOST = 256 * 2**20


_T = TypeVar("_T")


class Mark(NamedTuple):
    """When something was sent, how many bytes had arrived, and were on their way."""

    time: float
    arrived: int
    on_the_way: int


class Window:
    """How many bytes may be on their way, from how long earlier ones took.

    **Attributes:**

    - `nbytes`: how many.
    - `own`: how many of each save or restore, whatever the others have on their way.
    """

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._arrived = self._on_the_way = 0
        self.nbytes = min(FIRST, most)
        self.own = min(OWN, most)

    def has_room(self, nbytes: int, own: int) -> bool:
        """Whether so many bytes may be sent by who has `own` bytes on their way."""
        is_small = own == 0 or own + nbytes <= min(self.own, self.nbytes)
        return is_small or self._on_the_way + nbytes <= self.nbytes

    def send(self, nbytes: int) -> Mark:
        """To be called when something is sent."""
        with self._lock:
            self._on_the_way += nbytes
        return self.mark()

    def mark(self) -> Mark:
        """As of now, for what was announced by `send` and is only sent now."""
        return Mark(time.monotonic(), self._arrived, self._on_the_way)

    def arrived(self, nbytes: int, since: Mark) -> None:
        with self._lock:
            self._on_the_way -= nbytes
            self._arrived += nbytes
            seconds = time.monotonic() - since.time
            if seconds > SLOW:
                rate = (self._arrived - since.arrived) / seconds
                self.nbytes = min(int(rate * SECONDS), self.nbytes)
            elif 2 * since.on_the_way >= self.nbytes:
                # Fewer bytes would say nothing about a line that is full.
                self.nbytes = min(self.nbytes + nbytes, self._most)

    def given_up(self, nbytes: int) -> None:
        with self._lock:
            self._on_the_way -= nbytes


class Transfers(Generic[_T]):
    """Requests of one save, restore or writer that are on their way, the oldest first.

    **Attributes:**

    - `window`: of the line that they take.
    - `most`: how many bytes of them are on their way at a time, or one request.
    """

    def __init__(self, window: Window, most: int = MOST) -> None:
        self.window = window
        self.most = at_most(most)
        self._begun: deque[tuple[_T, int, Mark]] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._begun)

    def __iter__(self) -> Iterator[_T]:
        return (request for request, *_ in self._begun)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may be sent before the oldest request has ended."""
        fits = not self._begun or self._nbytes + nbytes <= self.most
        return fits and self.window.has_room(nbytes, self._nbytes)

    def add(self, request: _T, nbytes: int) -> None:
        """Count a request that was just sent."""
        self._nbytes += nbytes
        self._begun.append((request, nbytes, self.window.send(nbytes)))

    @contextlib.contextmanager
    def oldest(self) -> Generator[_T]:
        """The oldest request, which has ended when the block does."""
        request, nbytes, since = self._begun.popleft()
        try:
            yield request
        finally:
            self._nbytes -= nbytes
            self.window.arrived(nbytes, since)

    def give_up(self) -> None:
        """Wait for none of them."""
        self._begun.clear()
        self.window.given_up(self._nbytes)
        self._nbytes = 0


# By what a line leads to, and in which direction.
_windows: dict[tuple[object, ...], Window] = {}


os.register_at_fork(after_in_child=_windows.clear)


def window_of(
    spec: dict[str, Any], way: Literal["to", "from"], most: int = MOST
) -> Window:
    """The window of all that this process sends to a bucket, or gets from it.

    What is in no bucket has no line to share, and a window of its own.
    """
    line = line_of(spec)
    return _windows.setdefault((*line, way), Window(MOST)) if line else Window(most)


def line_of(spec: dict[str, Any]) -> tuple[object, ...]:
    """What a line leads to: a bucket, or a web server; nothing, if there is none."""
    if "bucket" in spec:
        return spec["driver"], spec.get("endpoint"), spec["bucket"]
    return (urlsplit(spec["base_url"]).netloc,) if "base_url" in spec else ()
