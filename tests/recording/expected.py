"""What a recording must have, as lists, after any sequence of operations."""

from typing import Any, NamedTuple

import numpy as np


# A draw, as the numbers of its chains, or as one number without chains.
Draw = np.ndarray


class Found(NamedTuple):
    """What a reader finds, and a program that resumes."""

    committed: list[Draw] | None
    state: Any
    steps: int


class Expected:
    """A recording, as its documentation describes it.

    **Attributes:**

    - `committed`, `state`, `steps`: what is committed; `None` before the first commit.
    - `taken`: the draws that the recording has, in order.
    - `device`: the draws after them that a recorder has on the device.
    - `failed`: whether the recorder could not record all of them.
    - `most`: `max_samples`.
    - `has_gap`: whether any draw was refused since the recording was opened.
    - `refused`: the error that the next call raises, or "".
    - `commit_failed`: whether the last commit raised.
    - `has_overflowed`: whether one was refused because of `max_samples`.
    """

    def __init__(self) -> None:
        self.committed: list[Draw] | None = None
        self.state: Any = None
        self.steps = 0
        self.open(None)

    def open(self, most: int | None) -> None:
        self.most = most
        self.taken = [*(self.committed or [])]
        self.device: list[Draw] = []
        self.has_gap = self.has_overflowed = self.commit_failed = False
        self.refused = ""
        self.failed = False

    def room(self, wanted: int) -> int:
        most = self.most
        return wanted if most is None else min(wanted, max(0, most - len(self.taken)))

    def take(self, draws: list[Draw]) -> bool:
        """Take what fits; return whether that is not all."""
        room = self.room(len(draws))
        self.taken += draws[:room]
        if room < len(draws):
            self.refuse(f"`max_samples` is {self.most}")
            self.has_overflowed = True
        return room < len(draws)

    def refuse(self, error: str) -> None:
        self.has_gap = True
        self.refused = self.refused or error

    def save(self, draws: list[Draw], block: int) -> int:
        """Take the blocks that are full; return how many were sent."""
        self.device += draws
        whole = len(self.device) // block * block
        sent, self.device = self.device[:whole], self.device[whole:]
        self.failed |= self.take(sent)
        return whole // block

    def flush(self) -> None:
        draws, self.device = self.device, []
        self.failed |= self.take(draws)

    def commit(self, state: Any = None, steps: int = 0) -> None:
        self.committed, self.state = [*self.taken], state
        self.steps += steps
        self.commit_failed = False

    def found(self) -> Found:
        return Found(self.committed, self.state, self.steps)

    @property
    def rest(self) -> int:
        return len(self.taken) - len(self.committed or [])

    def close(self) -> bool:
        """Commit what needs no state; return whether the rest is dropped."""
        if self.rest and (self.state is None or self.has_overflowed):
            self.commit()
        return bool(self.rest)
