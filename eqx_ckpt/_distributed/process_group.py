"""Agreement between the processes of a job, with a deadline."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import jax

from .._errors import CheckpointError
from .jax_service import gather_on_devices, is_alone
from .meeting import check_timeout, Circle, circle_of, TIMEOUT_MARGIN
from .process_errors import (
    failure_in,
    from_json,
    MOST_NAMED,
    named,
    to_json,
    too_late,
    verdict,
)


_T = TypeVar("_T")


# So many lines of an outline are compared at a time.
_BLOCK = 1024


_UNKNOWN = "Whether this call succeeds is not known: look at what is there. "


# Stands for the process that creates the outcome of a topic.
_OUTCOME = "outcome"


# Where the first process counts what it has done towards an outcome.
_PROGRESS = "progress"


class Group:
    """Processes of a job in one common operation, until `close`.

    They meet when it is created, and get a number. Later messages are kept under that
    number and a topic. Each topic has one outcome: it is what the first process finds,
    or the error of a process that stops waiting before, and all of them get the same.
    The others stop waiting for the first process when it has gone on with nothing for
    as long as the timeout.
    """

    def __init__(
        self, circle: Circle, call: str, timeout: float, number: int | None = None
    ) -> None:
        """Meet; with a `number` that the first process has given them, they have."""
        self.members = circle.members
        self.size = len(circle.members)
        self.index = circle.index
        self.is_first = circle.index == circle.first
        self.has_service = circle.service is not None
        self.seen = circle.seen
        self._circle = circle
        self._call = call
        self._timeout = timeout
        self._number = (
            circle.together(call, None, timeout, lambda _: circle.new_number())
            if number is None
            else number
        )
        self._is_open = True

    def new_number(self) -> int:
        """On the first process, a number for `again`."""
        return self._circle.new_number()

    def again(self, call: str, number: int) -> "Group":
        """The same processes in one more operation, of this number."""
        return Group(self._circle, call, self._timeout, number)

    def close(self) -> None:
        """Release the messages: this process no longer needs them."""
        if self._is_open:
            self._is_open = False
            self._circle.end(self._number)

    def combine(self, topic: str, value: Any, make: Callable[[list[Any]], _T]) -> _T:
        """Combine the messages of all on the first process; return the result on each.

        All raise what `make` raises, and if one of them sends no message.
        """
        if not self.has_service:
            values = gather_on_devices(value)
            return self.from_first(topic, lambda: make(values))
        self.say(topic, value)
        if not self.is_first:
            outcome = self._hear_first(topic)
            self._raise_error(outcome)
            return outcome["value"]
        try:
            made = make(self._hear_all(topic))
        except BaseException as e:
            self._decide(topic, {"error": to_json(e)})
            raise
        self._raise_error(self._decide(topic, {"value": made}))
        return made

    def first_difference(self, outline: Sequence[str]) -> list[str]:
        """The first line of each process in which their outlines differ."""
        blocks = range(0, len(outline), _BLOCK)
        sums = [_sum(*outline[i : i + _BLOCK]) for i in blocks]
        begin = _BLOCK * self.combine("blocks", sums, _first_different)
        sums = [_sum(line) for line in outline[begin : begin + _BLOCK]]
        found = begin + self.combine("lines", sums, _first_different)
        line = outline[found] if found < len(outline) else "no more leaves"
        return self.combine("difference", line, self._said_by)

    def _said_by(self, lines: Sequence[str]) -> list[str]:
        """What each process says, or each of many."""
        who: dict[str, list[int]] = {}
        for i, line in zip(self.members, lines, strict=True):
            who.setdefault(line if self.size > MOST_NAMED else f"{i}", []).append(i)
        of = dict(zip(self.members, lines, strict=True))
        groups = [*who.values()]
        said = [f"- {named(group, ', ')}: {of[group[0]]}" for group in groups]
        return said[:MOST_NAMED]

    def from_first(
        self,
        topic: str,
        make: Callable[[], _T],
        *,
        final: bool = False,
        so_far: str = "",
    ) -> _T:
        """Compute a value on the first process; if that fails, all raise.

        If `final`, `make` cannot be undone: it does not begin once another process has
        given up. Whoever gives up says what is known `so_far`.
        """
        if not self.is_first:
            said = self._from_first(topic, final=final, so_far=so_far)
            if "error" in said:
                raise from_json(said.get("from"), said["error"])
            return said["value"]
        try:
            if final and self.has_service:
                self._raise_error(self._decide(_begun(topic), {}))
            value = make()
        except BaseException as e:
            self._from_first(topic, {"error": to_json(e), "from": self.index})
            raise
        self._raise_error(self._from_first(topic, {"value": value}))
        return value

    def goes_on(self, topic: str) -> None:
        """Let the others wait on: the first process has done a part of its work."""
        service = self._circle.service
        if service is not None:
            service.count(self._key(topic, _PROGRESS))

    def _raise_error(self, outcome: dict[str, Any]) -> None:
        if "error" in outcome:
            raise from_json(None, outcome["error"])

    def say(self, topic: str, value: Any) -> None:
        """Send a message; do not wait for the others."""
        if self.has_service:
            self._say(topic, self.index, [value])

    def _from_first(
        self, topic: str, value: Any = None, *, final: bool = False, so_far: str = ""
    ) -> Any:
        if not self.has_service:
            return gather_on_devices(value)[self._circle.first]
        if self.is_first:
            return self._decide(topic, value)
        return self._hear_first(topic, final=final, so_far=so_far)

    def _say(self, topic: str, who: int | str, value: Any) -> None:
        assert self._circle.service is not None
        self._circle.service.set(self._key(topic, who), value)

    def _decide(self, topic: str, outcome: Any) -> Any:
        """The outcome of a topic: this one, unless another process was before."""
        assert self._circle.service is not None
        return self._circle.service.decide(self._key(topic, _OUTCOME), outcome)

    def _hear_first(
        self, topic: str, *, final: bool = False, so_far: str = ""
    ) -> dict[str, Any]:
        assert self._circle.service is not None
        before, done = None, 0
        while before != done:
            end = time.monotonic() + self._timeout + TIMEOUT_MARGIN
            if outcome := self._hear(topic, _OUTCOME, end):
                return outcome
            before = done
            done = self._circle.service.look(self._key(topic, _PROGRESS)) or 0
        said = self._said(topic)
        late = [i for i in self._circle.members if said and i not in said]
        late = late or [self._circle.first]
        given_up = {"error": to_json(self._too_late(late, so_far))}
        if not final:
            return self._decide(topic, given_up)
        if "error" not in (begun := self._decide(_begun(topic), given_up)):
            raise self._too_late(late, _UNKNOWN)
        return begun

    def _said(self, topic: str) -> set[int]:
        """The processes that have sent a message."""
        assert self._circle.service is not None
        said = self._circle.service.below(self._key(topic, ""))
        return {int(who) for who in said if who.isdecimal()}

    def _hear_all(self, topic: str) -> list[Any]:
        """The messages of all processes; raise if one of them sends none in time."""
        assert self._circle.service is not None
        end = time.monotonic() + self._timeout
        # Most are there when the last one is, and one request reads all of them.
        last = self._hear(topic, self.members[-1], end)
        found = self._circle.service.below(self._key(topic, ""))
        found[str(self.members[-1])] = last
        said = [
            found[who] if (who := str(i)) in found else self._hear(topic, who, end)
            for i in self.members
        ]
        late = [i for i, value in zip(self.members, said, strict=True) if not value]
        if late:
            raise self._too_late(late)
        return [value for (value,) in said]

    def _hear(self, topic: str, who: int | str, end: float) -> Any:
        """Wait for a message; `None` if none was sent in time."""
        assert self._circle.service is not None
        return self._circle.service.wait(self._key(topic, who), end - time.monotonic())

    def _key(self, topic: str, who: int | str) -> str:
        return f"{self._circle.prefix}groups/{self._number}/{topic}/{who}"

    def _too_late(self, late: list[int], outcome: str = "") -> CheckpointError:
        members = self._circle.members
        return too_late(self._call, late, members, self._timeout, outcome)


class Solo:
    """What `Group` is for several processes, for one."""

    members, size, index = (0,), 1, 0
    is_first = has_service = True

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def close(self) -> None:
        """There are no messages."""

    def combine(self, topic: str, value: Any, make: Callable[[list[Any]], _T]) -> _T:
        return make([value])

    def first_difference(self, outline: Sequence[str]) -> list[str]:
        return []

    def from_first(self, topic: str, make: Callable[[], _T], **how: Any) -> _T:
        return make()

    def goes_on(self, topic: str) -> None:
        """Nobody waits for this process."""

    def new_number(self) -> int:
        return 0

    def again(self, call: str, number: int) -> "Solo":
        return self


def _begun(topic: str) -> str:
    return f"{topic}/begun"


def _sum(*lines: str) -> int:
    return crc32("\n".join(lines).encode())


def _first_different(sums: Sequence[Sequence[int]]) -> int:
    shortest = min(map(len, sums))
    same = sums[0][:shortest]
    if all(of[:shortest] == same for of in sums):
        return shortest
    return min(i for of in sums for i in range(shortest) if of[i] != same[i])


def digest_of(outline: Sequence[str]) -> str:
    """Equal if two outlines are."""
    return hashlib.sha256("\n".join(outline).encode()).hexdigest()


def group_of(call: str, timeout: float) -> Group | None:
    """All processes of the job, in the same call; `None` if there is only one."""
    check_timeout(timeout)
    return None if is_alone() else Group(_all(), call, timeout)


def group_or_solo(call: str, timeout: float) -> Group | Solo:
    """All processes of the job, in the same call, also if there is only one."""
    return group_of(call, timeout) or Solo()


def combined(
    call: str, value: Any, make: Callable[[list[Any]], _T], timeout: float
) -> _T:
    """Combine the values of all processes on process 0; return the result on each."""
    if is_alone():
        return make([value])
    return _all().together(call, value, timeout, make)


def from_first(
    call: str, make: Callable[[], _T], timeout: float, *, so_far: str = ""
) -> _T:
    """Compute a value on process 0, and return it on every process.

    Whoever gives up while process 0 does that says what is known `so_far`.
    """
    if is_alone():
        return make()
    return _all().together(call, None, timeout, lambda _: make(), so_far)


def gather_errors(
    call: str, make: Callable[[], _T], timeout: float
) -> tuple[_T | None, Exception | None]:
    """Compute a value; return it with the first failure of any process."""
    made = error = None
    try:
        made = make()
    except Exception as e:
        error = e
    if is_alone():
        return made, error
    said = {"error": None if error is None else to_json(error)}
    try:
        outcome = _all().together(call, said, timeout, verdict)
    except CheckpointError as e:
        raise e from error
    return made, error or failure_in(outcome)


def most_said(call: str, values: list[int], timeout: float) -> list[int]:
    """The largest of each value among all processes."""
    return combined(
        call, values, lambda said: [max(of) for of in zip(*said, strict=True)], timeout
    )


def _all() -> Circle:
    return circle_of(tuple(range(jax.process_count())))
