"""Saves of jobs of many processes, which are threads here: what they say to each other.

```bash
python -m benchmarks.scale --processes 10 100 1000 10000
```

Each thread has an index of its own, and runs the real save into one directory. JAX's
coordination service is simulated: it has the same calls, and a clock for each process,
and of all requests the one that comes first by these clocks is answered next. So each
run is the same, and the seconds are those of a job whose processes run side by side;
they come out of the messages alone: neither the disk nor this machine counts.

A request takes `_LATENCY`. The service answers one after the other, each in `_SERVED`,
and `_PER_VALUE` more for each value of a list. The processes begin within `_SPREAD`.
"""

import argparse
import contextlib
import functools as ft
import heapq
import random
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import jax
import numpy as np

import eqx_ckpt
from eqx_ckpt._distributed import jax_service, meeting

from .table import markdown


_Item = TypeVar("_Item")
_T = TypeVar("_T")


# Seconds, as `jax.distributed` needs them on one machine.
_LATENCY = 300e-6
_SERVED = 30e-6
_PER_VALUE = 2e-6

_SPREAD = 0.1

# Requests that the first process has under way at a time.
_AT_ONCE = 32

_LEAVES = 100


class Counted(NamedTuple):
    """What one process has asked of the service, and when that was."""

    requests: int
    sent: int
    received: int
    end: float

    def since(self, before: "Counted") -> "Counted":
        requests, sent, received, _ = before
        return Counted(
            self.requests - requests,
            self.sent - sent,
            self.received - received,
            self.end,
        )


class Line:
    """A thread of a process, and its clock."""

    def __init__(self, clock: float) -> None:
        self.clock = clock
        self.turn = threading.Event()
        self.number = 0


class Simulation:
    """Many processes and their coordination service; one thread runs at a time."""

    def __init__(self, size: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.begins = [chance.uniform(0, _SPREAD) for _ in range(size)]
        self.values: dict[str, str] = {}
        self.most_bytes = self._bytes = 0
        self._free = 0.0
        # Who goes on when; and by key, who waits for its value.
        self._turns: list[tuple[float, int, Line]] = []
        self._waiting: dict[str, list[Line]] = {}
        self._count = 0

    def run(self, call: Callable[[int], None]) -> None:
        """Make the call in each process."""
        failures: list[BaseException] = []

        def work(index: int) -> None:
            _local.client, _local.index = Client(self), index
            try:
                call(index)
            except BaseException as e:
                failures.append(e)

        with _simulated(len(self.begins)):
            works = [ft.partial(work, i) for i in range(len(self.begins))]
            threads = self.start(zip(self.begins, works, strict=True))
            self.next()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def start(
        self, works: Iterable[tuple[float, Callable[[], None]]]
    ) -> list[threading.Thread]:
        """Let threads work, each from some time on."""

        def within(line: Line, work: Callable[[], None]) -> None:
            line.turn.wait()
            _local.line = line
            work()
            self.next()

        threads: list[threading.Thread] = []
        for clock, work in works:
            line = Line(clock)
            threads.append(threading.Thread(target=within, args=(line, work)))
            threads[-1].start()
            self.go_on(line, clock)
        return threads

    def go_on(self, line: Line, when: float) -> None:
        """Let a line go on at some time, and not when it was to before."""
        self._count += 1
        line.number = self._count
        heapq.heappush(self._turns, (when, self._count, line))

    def next(self) -> None:
        """Hand over to the line that goes on first."""
        while self._turns:
            when, number, line = heapq.heappop(self._turns)
            if number == line.number:
                line.clock = when
                line.turn.set()
                return

    def sleep(self, until: float | None) -> None:
        """Let others go on until some time, or until one of them says so."""
        line: Line = _local.line
        line.turn.clear()
        if until is not None:
            self.go_on(line, until)
        self.next()
        line.turn.wait()

    def answered(self, values: int) -> float:
        """When the service has answered the request of the line that runs."""
        arrival = _local.line.clock + _LATENCY / 2
        self._free = max(self._free, arrival) + _SERVED + values * _PER_VALUE
        return self._free + _LATENCY / 2

    def put(self, key: str, value: str) -> None:
        self.drop(key)
        self.values[key] = value
        self._bytes += len(key) + len(value)
        self.most_bytes = max(self.most_bytes, self._bytes)
        for line in self._waiting.pop(key, ()):
            self.go_on(line, self._free + _LATENCY / 2)

    def drop(self, key: str) -> None:
        if key in self.values:
            self._bytes -= len(key) + len(self.values.pop(key))

    def wait(self, key: str, seconds: float) -> None:
        """Wait until there is a value, for some time at most."""
        line: Line = _local.line
        self._waiting.setdefault(key, []).append(line)
        self.sleep(line.clock + seconds)


class Client:
    """The service as one process sees it, with the calls of JAX's client."""

    def __init__(self, simulation: Simulation) -> None:
        self.all = simulation
        self.requests = self.sent = self.received = 0

    def counted(self) -> Counted:
        return Counted(self.requests, self.sent, self.received, _local.line.clock)

    def _ask(self, *said: str, values: int = 0) -> Callable[[], None]:
        """Send a request; return a function that waits for its answer."""
        self.requests += 1
        self.sent += sum(map(len, said))
        return ft.partial(self.all.sleep, self.all.answered(values))

    def _got(self, text: str) -> str:
        self.received += len(text)
        return text

    def key_value_set(self, key: str, value: str, overwrite: bool = False) -> None:
        wait = self._ask(key, value)
        is_there = key in self.all.values and not overwrite
        if not is_there:
            self.all.put(key, value)
        wait()
        if is_there:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")

    def key_value_try_get(self, key: str) -> str:
        wait, found = self._ask(key), self.all.values.get(key)
        wait()
        if found is None:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self._got(found)

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        wait, found = self._ask(key), self.all.values.get(key)
        if found is None:
            self.all.wait(key, milliseconds / 1000)
            found = self.all.values.get(key)
        else:
            wait()
        if found is None:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return self._got(found)

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        found = [(k, v) for k, v in self.all.values.items() if k.startswith(prefix)]
        self._ask(prefix, values=len(found))()
        return [(self._got(key), self._got(value)) for key, value in found]

    def key_value_increment(self, key: str, by: int) -> int:
        wait, count = self._ask(key), int(self.all.values.get(key, "0")) + by
        self.all.put(key, str(count))
        wait()
        return count

    def key_value_delete(self, key: str) -> None:
        wait = self._ask(key)
        self.all.drop(key)
        if key.endswith("/"):
            for one in [one for one in self.all.values if one.startswith(key)]:
                self.all.drop(one)
        wait()


class _Circles(dict[Any, Any]):
    """What each process keeps for itself, in a module that all threads share."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((_local.index, key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((_local.index, key), value)


def _at_once(ask: Callable[[_Item], _T], items: Iterable[_Item]) -> dict[_Item, _T]:
    """As the function of this name, by the clocks of the simulation."""
    todo, line, client, index = [*items], _local.line, _local.client, _local.index
    simulation: Simulation = client.all
    answers: dict[_Item, _T] = {}
    working = min(_AT_ONCE, len(todo))

    def work() -> None:
        nonlocal working
        _local.client, _local.index = client, index
        while todo:
            item = todo.pop()
            answers[item] = ask(item)
        working -= 1
        if not working:
            simulation.go_on(line, _local.line.clock)

    if todo:
        simulation.start([(line.clock, work)] * working)
        simulation.sleep(None)
    return answers


_local = threading.local()


@contextlib.contextmanager
def _simulated(size: int) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (jax_service, "_client", lambda: _local.client),
            (meeting, "_circles", _Circles()),
            (meeting, "_making", contextlib.nullcontext()),
            (meeting, "at_once", _at_once),
            (jax, "process_index", lambda: _local.index),
            (jax, "process_count", lambda: size),
            (jax.distributed, "is_initialized", lambda: True),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def saves(size: int, saves: int = 2) -> tuple[list[list[Counted]], Simulation]:
    """What each process says in each of some saves of one run."""
    tree = {f"leaf{i}": np.arange(i + 1) for i in range(_LEAVES)}
    simulation, counted = Simulation(size), [list[Counted]() for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:

        def save(index: int) -> None:
            for step in range(saves):
                path = Path(folder) / f"{step:06d}"
                eqx_ckpt.tree_serialise_leaves(path, tree)
                counted[index].append(_local.client.counted())

        simulation.run(save)
    return counted, simulation


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[10, 100, 1000, 10_000]
    )
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for size in args.processes:
        counted, simulation = saves(size)
        # The second save: the processes have met before.
        first, *others = [after.since(before) for before, after in counted]
        most = max(others)
        seconds = max(of[1].end for of in counted) - min(of[0].end for of in counted)
        rows.append(
            (
                f"{size:,}",
                f"{first.requests:,}",
                f"{first.sent / 1024:,.0f} / {first.received / 1024:,.0f} KiB",
                f"{most.requests:,}",
                f"{most.sent / 1024:,.1f} / {most.received / 1024:,.1f} KiB",
                f"{simulation.most_bytes / 2**20:,.1f} MiB",
                f"{seconds:.2f} s",
            )
        )
    print(markdown(_HEAD, rows))


_HEAD = (
    "processes",
    "requests of process 0",
    "sent / received",
    "of any other",
    "sent / received",
    "held by the service",
    "seconds",
)


if __name__ == "__main__":
    main()
