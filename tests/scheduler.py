"""Threads of which one runs at a time, by clocks of their own.

Of all threads that could go on, the one that comes first by its own clock does. So each
run is the same, whatever this machine does, and waiting takes no time.
"""

import argparse
import functools as ft
import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from tests.helpers import use_memory


_STACK = 2**20


class Died(BaseException):
    """The process has died: what it does after this has no effect."""


class Line:
    """A thread, and its clock."""

    def __init__(self, clock: float) -> None:
        self.clock = clock
        self._turn = threading.Lock()
        self._turn.acquire()
        self.number = 0

    def wait(self) -> None:
        """Wait until it has the turn."""
        self._turn.acquire()

    def give_turn(self) -> None:
        self._turn.release()


class Scheduler:
    """Lets one thread run at a time, and events happen between.

    **Attributes:**

    - `chance`: decides all that is random.
    - `clock`: when the last event was.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        # Who goes on, or what happens, when.
        self._turns: list[tuple[float, int, Line | Callable[[float], None]]] = []
        self._count = 0
        self.clock = 0.0
        self._working = 0
        self._is_over = threading.Event()

    def run(self, works: Iterable[tuple[float, Callable[[], None]]]) -> None:
        """Let threads work, each from some time on, until all have ended.

        Raises what one of them raises, but for the death of a process.
        """
        failures: list[BaseException] = []

        def caught(work: Callable[[], None]) -> None:
            try:
                work()
            except Died:
                pass
            except BaseException as e:
                failures.append(e)

        self._is_over.clear()
        before = threading.stack_size(_STACK)
        try:
            self.start((clock, ft.partial(caught, work)) for clock, work in works)
            self.next()
            self._is_over.wait()
        finally:
            threading.stack_size(before)
        if failures:
            raise failures[0]
        assert not self._working, "Some threads wait for ever."

    def start(self, works: Iterable[tuple[float, Callable[[], None]]]) -> None:
        """Let further threads work, each from some time on."""

        def within(line: Line, work: Callable[[], None]) -> None:
            line.wait()
            local.line = line
            work()
            self._working -= 1
            self.next()

        for clock, work in works:
            line = Line(clock)
            self._working += 1
            threading.Thread(target=within, args=(line, work), daemon=True).start()
            self.go_on(line, clock)

    def go_on(self, line: Line, when: float) -> None:
        """Let a line go on at some time, and not when it was to before."""
        self._count += 1
        line.number = self._count
        heapq.heappush(self._turns, (when, self._count, line))

    def at(self, when: float, happens: Callable[[float], None]) -> None:
        """Call a function at some time, with the time; it may not wait."""
        self._count += 1
        heapq.heappush(self._turns, (when, self._count, happens))

    def next(self) -> None:
        """Hand over to the line that goes on first, after what happens before."""
        while self._turns:
            when, number, what = heapq.heappop(self._turns)
            self.clock = max(self.clock, when)
            if not isinstance(what, Line):
                what(when)
            elif number == what.number:
                what.clock = max(when, what.clock)
                what.give_turn()
                return
        self._is_over.set()

    def sleep(self, until: float | None) -> None:
        """Let others go on until some time, or until one of them says so."""
        line: Line = local.line
        if until is not None:
            self.go_on(line, until)
        self.next()
        line.wait()


# Of a thread: its `line`, and whatever the simulation keeps.
local = threading.local()


def now() -> float:
    """The time of the thread that runs; the real one outside of a simulation."""
    return local.line.clock if hasattr(local, "line") else time.monotonic()


def within_lines(place: Any, name: str, ours: Callable[..., Any]) -> Any:
    """Replace a function in the threads of a scheduler; others may run, too."""
    real = getattr(place, name)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        is_simulated = hasattr(local, "line")
        return (ours if is_simulated else real)(*args, **kwargs)

    return mock.patch.object(place, name, chosen)


def play_all(play: Callable[[int], Any], seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


def try_all(play: Callable[[int], Any], description: str | None) -> None:
    """Play the seeds that the command line asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--minutes", type=float, default=1.0)
    args: Any = parser.parse_args()
    use_memory()
    logging.getLogger("eqx_ckpt").setLevel(logging.CRITICAL)  # It has much to warn of.
    end = time.monotonic() + 60 * args.minutes
    done = 0
    for seed in itertools.islice(itertools.count(args.seed), args.count):
        play(seed)
        done += 1
        if time.monotonic() > end:
            break
    print(f"{done} schedules, from seed {args.seed} on: all are right.")
