"""Each meeting of each call of a job, with faulty processes; run in all of them.

One job makes many calls. In each, some processes are late at one of its meetings, or
leave the call there with an error of their own, or call something else. Where one dies,
the job makes this call only, and another job makes it again.
"""

import functools as ft
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import Circle, Group, jax_service, meeting, process_group as group

from .dying_jobs import die
from .failing_jobs import caught
from .jobs import End
from .programs import assert_same, shared, TIMEOUT


FAULTS = ("late", "gone", "differs")
# Seconds that a process without a fault waits. A late one waits for `DEADLINE`: if it
# were not told at once, the job would not end in time.
SHORT = 1.0
_BARRIER = 90_000  # milliseconds


class Case(NamedTuple):
    """A call, and by process a fault and the number of the meeting where it occurs."""

    call: str
    faults: Mapping[int, tuple[str, int]]


class Gone(Exception):
    """What a process raises that leaves a call without a word."""


class Call(NamedTuple):
    """What is done before a call, and the call, in a fresh place of this number."""

    prepare: Callable[[int], Any]
    make: Callable[[int], Any]


def cases(
    processes: int, count: int | None, seed: int, faults: Sequence[str] = FAULTS
) -> list[Case]:
    """So many of all cases with one or two faulty processes, or all with one."""
    chance = random.Random(seed)
    single = [
        Case(call, {who: (fault, nth)})
        for call in CALLS
        for who in range(processes)
        for fault in faults
        for nth in range(1, MEETINGS[call] + 1)
        # One that leaves before the first meeting is late for that.
        if {"gone": nth > 1, "differs": nth == 1}.get(fault, True)
    ]
    if count is None:
        return single
    chosen = chance.sample(single, count)
    pairs = [
        Case(one.call, {**one.faults, **other.faults})
        for one in chosen[: count // 3]
        for other in chance.sample([c for c in single if c.call == one.call], 3)
        if not one.faults.keys() & other.faults.keys()
        if _is_anybody_left(processes, {**one.faults, **other.faults})
    ]
    return chosen + pairs


def _is_anybody_left(processes: int, faults: Mapping[int, tuple[str, int]]) -> bool:
    return sum(fault == "dies" for fault, _ in faults.values()) < processes


def state(seed: int) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    data = np.arange(48, dtype=np.float32).reshape(12, 4) + seed
    return {
        "w": shared(data, NamedSharding(mesh, P("x"))),
        "same": shared(data, NamedSharding(mesh, P())),
        "step": seed,
    }


# How many meetings the calls have, at least.
MEETINGS = {
    "save": 5,
    "async": 5,
    "manager.save": 6,
    "latest": 1,
    "should_save": 1,
    "restore": 3,
    "broadcast_replicas": 4,
    "manager.restore": 5,
    "delete": 2,
    "copy": 7,
    "recording": 15,
}
CALLS = [*MEETINGS]


def run(where: str, chosen: list[Case]) -> list[tuple[list[str], str]]:
    """For each case what the call raised here, and the same call without a fault.

    The first is a list of one text.
    """
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = 0.5
    job = _Job(where)
    return [job.play(number, case) for number, case in enumerate(chosen)]


def end(where: str, case: Case) -> str:
    """What the call raises in a process that does not die."""
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = 0.5
    return _Job(where).make(0, case)


def resume(ended: Sequence[tuple[str, Case]]) -> list[str]:
    """What the same call raises in a new job, in each of these places."""
    return [_Job(where, is_new=False).again(1, case.call) for where, case in ended]


def count_meetings(where: str) -> dict[str, int]:
    """How many meetings each call has in this process."""
    job = _Job(where)
    found: dict[str, int] = {}
    for number, name in enumerate(CALLS):
        job.again(number, name)
        found[name] = job.passed
    return found


class _Job:
    def __init__(self, where: str, *, is_new: bool = True) -> None:
        self._where = where
        self._index = jax.process_index()
        self._client = jax_service._client()
        self._lock = threading.Lock()
        self.passed = 0
        self._act: Callable[[], object] = lambda: None
        self._nth = 0
        self._manager = eqx_ckpt.CheckpointManager(f"{where}/run", timeout=TIMEOUT)
        if is_new:
            eqx_ckpt.tree_serialise_leaves(f"{where}/there", state(1), timeout=TIMEOUT)
            self._manager.save(1, state(1)).result()
        self._timeout = TIMEOUT
        self._calls = self._all_calls()
        for owner, name in (
            (Circle, "together"),
            (Group, "combine"),
            (Group, "from_first"),
        ):
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @ft.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.passed += 1
                is_now = self.passed == self._nth
            if is_now:
                self._act()
            return method(*args, **kwargs)

        return watched

    def play(self, number: int, case: Case) -> tuple[list[str], str]:
        text = self.make(number, case)
        self._client.key_value_set(f"crossed/{number}/{self._index}", "ended")
        self._barrier(f"{number} ends")
        return [text], self.again(2 * number + 1, case.call)

    def make(self, number: int, case: Case) -> str:
        """The call, with its faults; what it raises."""
        call = self._calls[case.call]
        fault, nth = case.faults.get(self._index, ("", 0))
        self._set(TIMEOUT, 0)
        call.prepare(2 * number)
        self._barrier(f"{number} begins")
        others = set(range(jax.process_count())) - case.faults.keys()
        if fault == "late":
            self._act = lambda: self._wait_for(number, others)
            # Of two, the other one may leave before this one is late.
            self._set(TIMEOUT if len(case.faults) == 1 else SHORT, nth)
        elif fault == "gone":
            self._act = self._leave
            self._set(SHORT, nth)
        elif fault == "dies":
            self._act = die
            self._set(SHORT, nth)
        else:
            self._set(SHORT, 0)
        made = call.make
        if fault == "differs":
            made = self._calls[
                "latest" if case.call != "latest" else "should_save"
            ].make
        return caught(made, 2 * number)[1]

    def again(self, number: int, name: str) -> str:
        """The call without a fault."""
        call = self._calls[name]
        self._set(TIMEOUT, 0)
        call.prepare(number)
        self._barrier(f"again {number}")
        self._set(TIMEOUT, 0)
        text = caught(call.make, number)[1]
        self._barrier(f"again {number} ends")
        return text

    def _set(self, timeout: float, nth: int) -> None:
        self._timeout = self._manager._disk.timeout = timeout
        with self._lock:
            self.passed, self._nth = 0, nth

    def _leave(self) -> None:
        raise Gone("This process has left.")

    def _wait_for(self, number: int, others: set[int]) -> None:
        for i in others:
            self._client.blocking_key_value_get(f"crossed/{number}/{i}", _BARRIER)

    def _barrier(self, name: str) -> None:
        self._client.wait_at_barrier(f"{self._where} {name}", _BARRIER)

    def _all_calls(self) -> dict[str, Call]:
        where, run = self._where, self._manager
        like = state(0)

        def nothing(number: int) -> None: ...

        def save(number: int) -> None:
            path = f"{where}/save {number}"
            eqx_ckpt.tree_serialise_leaves(path, state(1), timeout=self._timeout)

        def in_background(number: int) -> None:
            path, saved = (
                f"{where}/async {number}",
                eqx_ckpt.tree_serialise_leaves_async,
            )
            saved(path, state(1), timeout=self._timeout).result()

        def manager_save(number: int) -> None:
            run.save(10 + number, state(1)).result()

        def restore(number: int, **how: Any) -> None:
            read = eqx_ckpt.tree_deserialise_leaves
            timeout = self._timeout
            assert_same(read(f"{where}/there", like, timeout=timeout, **how), state(1))

        def manager_restore(number: int) -> None:
            assert_same(run.restore(like), state(1))

        def record(number: int) -> None:
            sample = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
            path, timeout = f"{where}/recording {number}", self._timeout
            recording = eqx_ckpt.recording.Recording(path, sample, timeout=timeout)
            try:
                recording.commit({"a": 1})
            finally:
                recording._log.abandon()

        return {
            "save": Call(nothing, save),
            "async": Call(nothing, in_background),
            "manager.save": Call(nothing, manager_save),
            "latest": Call(nothing, lambda number: run.latest()),
            "should_save": Call(nothing, run.should_save),
            "restore": Call(nothing, restore),
            "broadcast_replicas": Call(
                nothing, ft.partial(restore, broadcast_replicas=True)
            ),
            "manager.restore": Call(nothing, manager_restore),
            "delete": Call(manager_save, lambda number: run.delete(10 + number)),
            "copy": Call(
                nothing,
                lambda number: eqx_ckpt.copy(
                    f"{where}/there", f"{where}/copy {number}", timeout=self._timeout
                ),
            ),
            "recording": Call(nothing, record),
        }


# What calls make, by their number, which is there if they succeed.
MADE: dict[str, Callable[[int], str]] = {
    "save": "save {}".format,
    "async": "async {}".format,
    "copy": "copy {}".format,
    "manager.save": lambda number: f"run/{10 + number:06d}",
}


def check_made(where: str, number: int, call: str) -> Iterator[str]:
    """Whether what a call has made is there, and whole."""
    if call in MADE:
        path = f"{where}/{MADE[call](number)}"
        try:
            eqx_ckpt.inspect.verify(path)
        except (OSError, eqx_ckpt.CheckpointError) as e:
            yield f"{call} was acknowledged, and {path} is not there: {e!r}"


def check_deaths(where: str, case: Case, ends: Sequence[End]) -> Iterator[str]:
    """What is wrong with the ends of a job in which some die."""
    living = [end for i, end in enumerate(ends) if i not in case.faults]
    if 0 not in case.faults:
        # With process 0, JAX's coordination service ends, and JAX ends its clients.
        if any(end.error or end.signal for end in living):
            yield f"{case}: a process died or hangs beside the others: {living}"
        elif len({bool(end.value) for end in living}) > 1:
            yield f"{case} has several outcomes: {living}"
    for i in case.faults:
        # On a busy machine, its call may fail before.
        if ends[i].signal != signal.SIGKILL and not (ends[i].value or ends[i].error):
            yield f"{case}: process {i} did not die: {ends}"
    if any(end.value == "" for end in living):
        yield from check_made(where, 0, case.call)


def check(
    where: str, chosen: list[Case], ends: list[list[tuple[list[str], str]]]
) -> Iterator[str]:
    """What is wrong with the ends of each process: one outcome, and then no error."""
    for number, case in enumerate(chosen):
        texts = [end[number][0][0] for end in ends]
        afterwards = [end[number][1] for end in ends]
        involved = [
            text
            for i, text in enumerate(texts)
            if case.faults.get(i, ("late", 0))[0] == "late"
        ]
        if len({bool(text) for text in involved}) > 1:
            yield f"{case} has several outcomes: {texts}"
        if "" in involved:
            yield from check_made(where, 2 * number, case.call)
        if any("Nothing was saved" in t for t in texts) and "restore" in case.call:
            yield f"{case} speaks of a save: {texts}"
        if any(afterwards):
            yield f"{case}: the same call fails after {texts}: {afterwards}"
