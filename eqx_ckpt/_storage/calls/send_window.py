"""How much is sent to a store at a time.

A hop on the way may take whole requests in at once, and forward them slowly. As seen
from here, they then make no progress, and after `STALLED` seconds each is sent again.
So no more is on its way than the line carries in a part of that time.
"""

import time
from typing import NamedTuple


# Seconds without a byte after which a request is sent again; after which one is slow;
# and in which a slow line is to carry what is on its way.
STALLED = 60


SLOW = 5.0


SECONDS = 15.0


# Bytes, until it is known how fast the line is.
FIRST = 48 * 2**20


class Mark(NamedTuple):
    """When something was sent, and how many bytes had arrived before."""

    time: float
    arrived: int


class Window:
    """The bytes that may be on their way, by how long others took.

    **Attributes:**

    - `nbytes`: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._arrived = 0
        self.nbytes = min(FIRST, most)

    def mark(self) -> Mark:
        """To be taken when something is sent."""
        return Mark(time.monotonic(), self._arrived)

    def arrived(self, nbytes: int, since: Mark) -> None:
        self._arrived += nbytes
        seconds = time.monotonic() - since.time
        if seconds > SLOW:
            rate = (self._arrived - since.arrived) / seconds
            self.nbytes = min(int(rate * SECONDS), self._most)
        else:
            self.nbytes = min(self.nbytes + nbytes, self._most)
