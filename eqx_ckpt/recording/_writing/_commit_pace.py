"""How many samples a scan computes at a time, and when it commits."""

from time import monotonic as clock
from typing import NamedTuple

from ._recording_team import Team


# Blocks take at most this part of the seconds between two commits.
_PART = 1 / 8


class Every(NamedTuple):
    """How much may be lost: so many steps, and so many seconds; 0 and `None`: any."""

    steps: int
    seconds: float | None


class Pace:
    """Measures blocks of samples, and chooses their size so that commits are in time.

    The number of samples is a power of two, or the largest possible, because each
    number is compiled anew. It is more than one, if possible: XLA compiles one step
    without a loop, and may then round differently, so that what is recorded would
    depend on the time that steps take.

    **Attributes:**

    - `rows`: the number of samples to compute at a time.
    - `steps`: the steps since the last commit.
    """

    def __init__(self, team: Team, block: int, thin: int, every: Every) -> None:
        self._team = team
        self._thin = thin
        self._every = every
        self._most = block
        if every.steps:
            rows = max(1, every.steps // thin)
            blocks = -(-rows // block)
            self._most = rows // blocks
        self._least = 1 if every.seconds == 0 else min(2, self._most)
        self.rows = self._most if every.seconds is None else self._least
        self.steps = 0
        self._committed = self._mark = clock()
        # The first block of each size is compiled, so its time says nothing.
        self._is_new = True
        self._seconds = 0.0

    def next(self, left: int) -> int:
        """The number of samples to compute next, of those that are left."""
        rows = min(self.rows, left)
        if left - rows != 1 or rows == 1:
            return rows
        # Leave no block of one sample.
        return rows - 1 if rows > 2 else min(rows + 1, self._most)

    @property
    def is_measuring(self) -> bool:
        """Whether to wait for each block, because its size was not measured yet."""
        return self._every.seconds is not None and (self._is_new or not self._seconds)

    def finished(self, rows: int) -> None:
        """Note that so many samples were computed since this was last called."""
        now = clock()
        if rows == self.rows:
            if not self._is_new:
                self._seconds = (now - self._mark) / rows
            self._is_new = False
        self._mark = now

    def is_due(self, rows: int) -> bool:
        """Whether to commit after a block of so many samples; choose the next size."""
        self.steps += rows * self._thin
        seconds = self._every.seconds
        if seconds is not None:
            # The first process decides, because clocks differ.
            rows, due = self._team.from_first("time", lambda: self._decided(seconds))
            self._is_new |= rows != self.rows
            self.rows = rows
            if due:
                return True
        # The next block may be one longer; see `next`.
        longest = min(self.rows + (self.rows == 2), self._most)
        steps = self.steps + longest * self._thin
        return bool(self._every.steps) and steps > self._every.steps

    def _decided(self, seconds: float) -> tuple[int, bool]:
        rows = self._wanted(seconds)
        waited = clock() - self._committed
        # One block may be running, and another one is next.
        due = waited + 2 * rows * self._seconds >= seconds
        # To compile takes time.
        return rows, due or (rows != self.rows and waited >= seconds / 4)

    def _wanted(self, seconds: float) -> int:
        if not self._seconds:
            return self.rows
        rows = int(min(self._most, seconds * _PART / self._seconds))
        if rows < self._most:
            rows = max(self._least, 1 << max(0, rows.bit_length() - 1))
        return rows if rows < self.rows or rows >= 4 * self.rows else self.rows

    def committed(self) -> int:
        """Begin to count again; return the steps since the last commit."""
        steps, self.steps = self.steps, 0
        self._committed = self._mark = clock()
        return steps
