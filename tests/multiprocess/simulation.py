"""Jobs of many processes, which are threads here, and JAX's coordination service.

The processes run the real code; what is simulated is the service, with the calls of
JAX's client, the clock, and what is called at once in threads.
"""

import contextlib
import functools as ft
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import jax

from tests.scheduler import Died, Line, local, now, Scheduler, within_lines
from tests.support import jax_service, meeting, process_group


_Item = TypeVar("_Item")
_T = TypeVar("_T")


# Seconds for a request, while the service is busy with it, and for each value of a
# list, as `jax.distributed` needs them on one machine.
LATENCY = 300e-6
_SERVED = 30e-6
_PER_VALUE = 2e-6

_AT_ONCE = 32


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


class Simulation(Scheduler):
    """Many processes and their coordination service; one thread runs at a time.

    **Attributes:**

    - `clients`: by process, the service as it sees it.
    - `latency`: the seconds of the next request.
    """

    def __init__(self, size: int, seed: int = 0, spread: float = 0.1) -> None:
        super().__init__(seed)
        self._begins = [self.chance.uniform(0, spread) for _ in range(size)]
        self.clients = [Client(self) for _ in range(size)]
        self.latency: Callable[[], float] = lambda: LATENCY
        self.values: dict[str, str] = {}
        self.most_bytes = self._bytes = 0
        self._free = 0.0
        # By key, who waits for its value.
        self._waiting: dict[str, list[Line]] = {}

    def play(self, call: Callable[[int], None]) -> None:
        """Make the call in each process, with its number; raise what one raises."""

        def work(index: int, client: "Client") -> None:
            local.client, local.index = client, index
            call(index)

        works = [ft.partial(work, *of) for of in enumerate(self.clients)]
        with _simulated(len(works)):
            self.run(zip(self._begins, works, strict=True))

    def answered(self, values: int) -> float:
        """When the service has answered the request of the line that runs."""
        latency = self.latency()
        arrival = local.line.clock + latency / 2
        self._free = max(self._free, arrival) + _SERVED + values * _PER_VALUE
        return self._free + latency / 2

    def put(self, key: str, value: str) -> None:
        self.drop(key)
        self.values[key] = value
        self._bytes += len(key) + len(value)
        self.most_bytes = max(self.most_bytes, self._bytes)
        for line in self._waiting.pop(key, ()):
            self.go_on(line, self._free + self.latency() / 2)

    def drop(self, key: str) -> None:
        if key in self.values:
            self._bytes -= len(key) + len(self.values.pop(key))

    def wait(self, key: str, seconds: float) -> None:
        """Wait until there is a value, for some time at most."""
        line: Line = local.line
        self._waiting.setdefault(key, []).append(line)
        self.sleep(line.clock + seconds)
        if line in (others := self._waiting.get(key, [])):
            others.remove(line)


class Client:
    """The service as one process sees it, with the calls of JAX's client.

    **Attributes:**

    - `dies_at`: the request that this process does not send any more, or `None`.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.all = simulation
        self.dies_at: int | None = None
        self.requests = self.sent = self.received = 0

    @property
    def is_dead(self) -> bool:
        return self.dies_at is not None and self.requests >= self.dies_at

    def counted(self) -> Counted:
        return Counted(self.requests, self.sent, self.received, now())

    def _ask(self, *said: str, values: int = 0) -> Callable[[], None]:
        """Send a request; return a function that waits for its answer."""
        if self.is_dead:
            raise Died
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
        return super().get((_index(), key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((_index(), key), value)


def _at_once(ask: Callable[[_Item], _T], items: Iterable[_Item]) -> dict[_Item, _T]:
    """As the function of this name, by the clocks of the simulation."""
    todo, line, client, index = [*items], local.line, local.client, local.index
    simulation: Simulation = client.all
    answers: dict[_Item, _T] = {}
    failures: list[BaseException] = []
    working = min(_AT_ONCE, len(todo))

    def work() -> None:
        nonlocal working
        local.client, local.index = client, index
        try:
            while todo:
                item = todo.pop()
                answers[item] = ask(item)
        except BaseException as e:
            failures.append(e)
        working -= 1
        if not working:
            simulation.go_on(line, now())

    if todo:
        simulation.start([(line.clock, work)] * working)
        simulation.sleep(None)
    if failures:
        raise failures[0]
    return answers


class _Clock:
    """In place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return now()

    @staticmethod
    def sleep(seconds: float) -> None:
        pause(seconds)


def pause(seconds: float) -> None:
    if _index() is None:
        time.sleep(seconds)
    else:
        local.client.all.sleep(now() + seconds)


def _index() -> int | None:
    """The number of the process of this thread; `None` if it is not simulated."""
    return getattr(local, "index", None)


@contextlib.contextmanager
def _simulated(size: int) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (jax_service, "time", _Clock),
            (meeting, "_circles", _Circles()),
            (meeting, "_making", contextlib.nullcontext()),
            (meeting, "time", _Clock),
            (process_group, "time", _Clock),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        for place, name, ours in (
            (jax_service, "_client", lambda: local.client),
            (meeting, "at_once", _at_once),
            (jax, "process_index", lambda: local.index),
            (jax, "process_count", lambda: size),
            (jax.distributed, "is_initialized", lambda: True),
        ):
            stack.enter_context(within_lines(place, name, ours))
        yield
