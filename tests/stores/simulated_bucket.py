"""Processes, which are threads here, and a bucket; and what may go wrong between them.

The processes run the real code. What is simulated is the key-value store that
TensorStore opens, clocks, and threads. Requests take as long as `latency` says; some
lose their answer, or arrive late, and a process stops for long, or dies.
"""

import contextlib
import functools as ft
import itertools
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple
from unittest import mock

from tests.scheduler import Died, Line, local, now, Scheduler, within_lines
from tests.support import (
    background_save,
    bucket_attempt,
    bucket_steps,
    bucket_writer,
    chunk_values,
    consistent_read,
    damage_fallback,
    heartbeat,
    keyvalue_place,
    KnownBases,
    manager,
    publication,
    recording,
    run_steps,
    run_sweeps,
    save as saving,
    send_window,
    step_upload,
    store_patience,
    threads,
    uploads,
    writer_thread,
)


# Of a key that is not there.
ABSENT = b"absent"

MANIFEST = "zarr.json"

COMMIT = -1

# TensorStore sends a request again when it has made no progress for so long.
STALLED = 60.0


class Stamp(NamedTuple):
    generation: bytes


class Found(NamedTuple):
    state: str
    value: bytes
    stamp: Stamp


Kind = Literal["read", "list", "write", "delete"]


class Request(NamedTuple):
    """The one of this number, from 1, of its kind, for manifests or for all else.

    A manifest is that of a step, and not the metadata of an array.
    """

    kind: Kind
    is_manifest: bool
    number: int


# Its answer is lost; it is lost, and the request arrives after so many seconds; or a
# read finds nothing.
Fault = Literal["lost", "wrong"] | float


class Process:
    """What happens to one process, by the number of its request.

    **Attributes:**

    - `index`: its number.
    - `requests`: how many requests it has sent.
    - `dies_at`: the request that it does not send any more.
    - `dies_after_commit`: whether it is the one after its next commit.
    - `stops`: before which requests it stops, and for how many seconds. `COMMIT` is its
        next commit.
    - `has_stopped`: whether it has.
    - `bases`: what it knows of checkpoints.
    - `reads`: what it is reading.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.requests = 0
        self.dies_at: float = math.inf
        self.dies_after_commit = False
        self.stops: dict[int, float] = {}
        self.has_stopped = False
        self.runs_from = 0.0
        self.bases = KnownBases()
        self.reads: list[str] = []

    def check(self) -> None:
        """Raise if the process is dead."""
        if self.requests >= self.dies_at:
            raise Died


class Simulation(Scheduler):
    """Processes and one bucket.

    **Attributes:**

    - `values`: the objects there, and their generations.
    - `changed`: called when one has changed.
    - `sender`: the process whose request has just changed it.
    - `latency`: the seconds of the next request, half of them until it arrives.
    - `faults`: what happens to a request.
    """

    def __init__(self, seed: int, processes: int) -> None:
        super().__init__(seed)
        self.grow(processes)
        self.values: dict[str, tuple[bytes, bytes]] = {}
        self.changed: Callable[[], None] = lambda: None
        self.sender = 0
        self.faults: dict[Request, Fault] = {}
        self._sent: Counter[tuple[str, bool]] = Counter()
        self.latency: Callable[[], float] = lambda: 0.02
        self._generations = itertools.count(1)

    def grow(self, processes: int) -> None:
        """Have so many processes from now on, which begin anew."""
        self.processes = [*map(Process, range(processes))]

    def play(self, call: Callable[[int], None]) -> None:
        """Make the call in each process, with its number; raise what one raises."""

        def work(index: int, process: Process) -> None:
            local.process = process
            call(index)

        works = [ft.partial(work, *of) for of in enumerate(self.processes)]
        with _simulated(self):
            self.run((self.clock, work) for work in works)

    def sleep(self, until: float | None) -> None:
        super().sleep(until)
        line: Line = local.line
        while line.clock < local.process.runs_from:
            super().sleep(local.process.runs_from)

    def pause(self, seconds: float) -> None:
        self.sleep(now() + seconds)
        local.process.check()

    def request(
        self, key: str, apply: Callable[[], Any], kind: Kind = "read", *, once: bool
    ) -> "Answer":
        """Send a request, whose effect and answer come later."""
        process: Process = local.process
        is_manifest = key.endswith(MANIFEST) and "@" not in key
        self.count(is_commit=is_manifest and kind == "write")
        fault = self._fault(kind, is_manifest)
        answer = Answer(self)

        def effect() -> Any:
            self.sender = process.index
            return apply()

        arrival = now() + self.latency() / 2
        if fault == "wrong":
            found = Found("missing", b"", Stamp(ABSENT))
            self.at(arrival, lambda when: answer.comes(when, found))
            return answer
        if not fault:
            self.at(arrival, lambda when: answer.comes(when, effect()))
            return answer
        late = arrival if fault == "lost" else now() + fault
        self.at(late, lambda _: effect())
        again = arrival + STALLED
        if once:
            error = ValueError("UNAVAILABLE: simulated: no answer")
            self.at(again, lambda when: answer.comes(when, error))
        else:
            self.at(again, lambda when: answer.comes(when, effect()))
        return answer

    def count(self, *, is_commit: bool) -> None:
        """Let the process send a request; it may die before it, or stop."""
        process: Process = local.process
        process.requests += 1
        process.check()
        stops = process.stops.pop(process.requests, 0.0)
        if is_commit:
            stops += process.stops.pop(COMMIT, 0.0)
            if process.dies_after_commit:
                process.dies_at = process.requests + 1
        if stops:
            process.has_stopped = True
            process.runs_from = now() + stops
            self.pause(0)

    def _fault(self, kind: Kind, is_manifest: bool) -> "Fault | None":
        self._sent[kind, is_manifest] += 1
        return self.faults.get(
            Request(kind, is_manifest, self._sent[kind, is_manifest])
        )

    def draw(self, chance_of_each: float, latest: float) -> None:
        """Let something go wrong with some of the next requests.

        A late one arrives within `latest` seconds.
        """
        chance = self.chance

        def happens() -> bool:
            return chance.random() < chance_of_each

        def request(kind: Kind) -> Request:
            is_manifest = chance.random() < 0.7
            most = 6 if is_manifest else 40
            number = self._sent[kind, is_manifest] + chance.randint(1, most)
            return Request(kind, is_manifest, number)

        if happens():
            self.faults[request(chance.choice(("write", "write", "delete")))] = "lost"
        elif happens():
            # A deletion has no condition: late, it would delete what came after it.
            self.faults[request("write")] = chance.uniform(1, latest)
        if happens():
            self.faults[request("read")] = "wrong"

    def put(self, key: str, value: bytes | None) -> bytes:
        """Write or delete an object; return its generation."""
        if value is None:
            generation = ABSENT
            self.values.pop(key, None)
        else:
            generation = b"g%d" % next(self._generations)
            self.values[key] = value, generation
        self.changed()
        return generation


class _Event:
    """As `threading.Event`, between lines of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._all = simulation
        self._is_set = False
        self._waiting: list[Line] = []

    def set(self) -> None:
        self._is_set = True
        for line in self._waiting:
            self._all.go_on(line, self._all.clock)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            line: Line = local.line
            self._waiting.append(line)
            self._all.sleep(None if timeout is None else now() + timeout)
            self._waiting.remove(line)
        local.process.check()
        return self._is_set


class _Condition:
    """As `threading.Condition`; its lock keeps nobody out, as one line runs at a time.

    Nobody may wait for anything else while holding it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._all = simulation
        self._changed = _Event(simulation)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = _Event(self._all)

    def wait_for(self, is_so: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else now() + timeout
        while not (found := is_so()):
            left = None if end is None else end - now()
            if not self._changed.wait(left):
                return is_so()
        return found


class Answer:
    """A future of TensorStore."""

    def __init__(self, simulation: Simulation) -> None:
        self._all = simulation
        self._found: Any = None
        self._is_here = _Event(simulation)

    def comes(self, when: float, found: Any) -> None:
        """Send the answer on its way."""
        self._all.at(when + self._all.latency() / 2, ft.partial(self._arrives, found))

    def _arrives(self, found: Any, when: float) -> None:
        self._found = found
        self._is_here.set()

    def _wait(self, timeout: float | None) -> None:
        if not self._is_here.wait(timeout):
            raise TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def exception(self, timeout: float | None = None) -> Exception | None:
        self._wait(timeout)
        return self._found if isinstance(self._found, Exception) else None

    def cancel(self) -> None:
        """What was sent may arrive nevertheless."""

    def cancelled(self) -> bool:
        return False


class Store:
    """The calls of `ts.KvStore` that this package makes, at a path of the bucket."""

    def __init__(self, simulation: Simulation, path: str, retries: bool) -> None:
        self._all = simulation
        self._path = path
        self._once = not retries

    def read(self, key: str, *, byte_range: slice = slice(0, None)) -> Answer:
        whole = self._path + key

        def apply() -> Any:
            if whole not in self._all.values:
                return Found("missing", b"", Stamp(ABSENT))
            value, generation = self._all.values[whole]
            if byte_range.stop is not None and byte_range.stop > len(value):
                return ValueError("OUT_OF_RANGE: simulated")
            return Found("value", value[byte_range], Stamp(generation))

        return self._all.request(whole, apply, once=self._once)

    def write(
        self, key: str, value: bytes | None, *, if_equal: bytes | None = None
    ) -> Answer:
        whole = self._path + key

        def apply() -> Stamp:
            found = self._all.values.get(whole, (b"", ABSENT))[1]
            if if_equal and found != if_equal:
                return Stamp(b"")
            return Stamp(self._all.put(whole, value))

        kind: Kind = "delete" if value is None else "write"
        return self._all.request(whole, apply, kind, once=self._once)

    def list(self, range: Any) -> Answer:
        first = self._path.encode() + range.inclusive_min
        after = range.exclusive_max

        def apply() -> list[bytes]:
            keys = sorted(key.encode() for key in self._all.values)
            skip = len(self._path)
            return [
                key[skip:]
                for key in keys
                if key.startswith(self._path.encode())
                and key >= first
                and not (after and key[skip:] >= after)
            ]

        return self._all.request(self._path, apply, "list", once=self._once)


class _Thread:
    """As `threading.Thread`: a further line of the process that starts it."""

    def __init__(
        self,
        simulation: Simulation,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        **_: Any,
    ) -> None:
        self._all = simulation
        self._call = ft.partial(target, *args)
        self._process: Process = local.process
        self._has_begun = False
        self._end = _Event(simulation)

    def start(self) -> None:
        self._has_begun = True
        self._all.start([(now(), self._work)])

    def _work(self) -> None:
        local.process = self._process
        with contextlib.suppress(Died):
            self._call()
        self._end.set()

    def is_alive(self) -> bool:
        return self._has_begun and not self._end.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._end.wait(timeout)


class _Threading:
    """In place of the module `threading`, where it is imported as a whole."""

    def __init__(self, simulation: Simulation) -> None:
        self.Condition = ft.partial(_Condition, simulation)
        self.Event = ft.partial(_Event, simulation)
        self.Thread = ft.partial(_Thread, simulation)
        self.current_thread = lambda: local.line
        self.get_ident = lambda: id(local.line)


class _OfProcess:
    """In place of a list of a module: each process has its own, of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _list(self) -> list[Any]:
        return getattr(local.process, self._name)

    def extend(self, items: Iterable[Any]) -> None:
        self._list().extend(items)

    def remove(self, item: Any) -> None:
        self._list().remove(item)

    def __contains__(self, item: Any) -> bool:
        return item in self._list()


class _Time:
    """In place of the module `time`."""

    monotonic = staticmethod(now)
    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, simulation: Simulation) -> None:
        self.sleep = simulation.pause


class _Pool:
    """In place of a pool of threads: each call in a further line of the process."""

    def __init__(self, simulation: Simulation, *_: Any) -> None:
        self._all = simulation
        self._asked: list[_Asked] = []

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        for asked in self._asked:
            asked.exception()

    def submit(self, call: Callable[..., Any], *args: Any) -> "_Asked":
        self._asked.append(_Asked(self._all, call, args))
        return self._asked[-1]

    def shutdown(self, **_: Any) -> None: ...


class _Asked(Future[Any]):
    """A call in a further line, and its result."""

    def __init__(
        self, simulation: Simulation, call: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        super().__init__()
        self._thread = _Thread(simulation, self._keep, (call, *args))
        self._thread.start()

    def _keep(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            self.set_result(call(*args))
        except BaseException as e:
            self.set_exception(e)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._thread.join(timeout)
        return super().exception(0)

    def result(self, timeout: float | None = None) -> Any:
        self._thread.join(timeout)
        return super().result(0)


@contextlib.contextmanager
def _simulated(simulation: Simulation) -> Generator[None]:
    exception = background_save.Saving.exception

    def opened(spec: Any, *, retries: bool = True) -> Store:
        return Store(simulation, spec["path"], retries)

    def found(future: Any, timeout: float | None = None) -> Any:
        ended = _Event(simulation)
        future.add_done_callback(lambda _: ended.set())
        ended.wait(timeout)
        return exception(future, 0.0)

    def of_process(name: str) -> Callable[..., Any]:
        real = getattr(KnownBases, name)
        return lambda _, *args: real(local.process.bases, *args)

    def in_line(call: Callable[[], Any], name: str) -> _Asked:
        return _Asked(simulation, call, ())

    saves: set[background_save.Saving] = set()
    names = (
        uuid.UUID(int=simulation.chance.getrandbits(128)) for _ in itertools.count()
    )
    modules = _Threading(simulation), _Time(simulation)
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (background_save, "threading", modules[0]),
            (background_save, "pending_saves", saves),
            (manager, "pending_saves", saves),
            (saving, "pending_saves", saves),
            (bucket_attempt, "time", modules[1]),
            (bucket_steps, "time", modules[1]),
            (bucket_steps, "threading", modules[0]),
            (bucket_writer, "threading", modules[0]),
            (heartbeat, "threading", modules[0]),
            (manager, "threading", modules[0]),
            (manager, "time", modules[1]),
            (publication, "time", modules[1]),
            # Who dies releases nothing.
            (recording, "weakref", mock.Mock()),
            (run_sweeps, "threading", modules[0]),
            (send_window, "time", modules[1]),
            (send_window, "_windows", {}),
            (store_patience, "time", modules[1]),
            (uploads, "threading", modules[0]),
            (uploads, "time", modules[1]),
            (store_patience, "_silent", set()),
            (store_patience, "_last_answer", {}),
            (bucket_attempt, "_keep_conditions", set()),
            (bucket_writer, "clock", now),
            (heartbeat, "clock", now),
            (consistent_read, "being_read", _OfProcess("reads")),
            (run_steps, "being_read", _OfProcess("reads")),
            (damage_fallback, "in_thread", in_line),
            (step_upload, "Pool", ft.partial(_Pool, simulation)),
            (threads, "Pool", ft.partial(_Pool, simulation)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        for place, name, ours in (
            (chunk_values, "open_kvstore", opened),
            (keyvalue_place, "open_kvstore", opened),
            (keyvalue_place.KeyValues, "open", lambda place: opened(place.spec)),
            (store_patience, "_ask", lambda *_: None),
            # Samples are written where they are recorded.
            (writer_thread, "start", lambda _: False),
            (background_save.Saving, "exception", found),
            (manager.CheckpointManager, "_raise_of_others", lambda _: None),
            (KnownBases, "find", of_process("find")),
            (KnownBases, "remember", of_process("remember")),
            (uuid, "uuid4", lambda: next(names)),
        ):
            stack.enter_context(within_lines(place, name, ours))
        yield
