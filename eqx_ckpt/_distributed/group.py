"""Agreement between the processes of a job, with a deadline."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._errors import CheckpointError
from .coordination import gather_on_devices, is_alone
from .meeting import (
    check_deadline,
    Circle,
    circle_of,
    DEADLINE_MARGIN,
    from_json,
    NOTHING,
    to_json,
    too_late,
)


_T = TypeVar("_T")
_UNKNOWN = "Whether the checkpoint was saved is not known: look at the disk."
# What it means if the first process sends no message on a topic.
_OUTCOMES = {"written": _UNKNOWN, "committed": _UNKNOWN}
# Seconds between two checks of a process that may take any time.
_LONG = 60.0


class Group:
    """Processes of a job in one common operation, until `close`.

    They meet when it is created, and get a number. Later messages are kept under that
    number and a topic.
    """

    def __init__(self, circle: Circle, call: str, deadline: float) -> None:
        self.size = len(circle.members)
        self.index = circle.index
        self.is_first = circle.index == circle.first
        self.has_service = circle.service is not None
        self._circle = circle
        self._deadline = deadline
        self._number = circle.together(
            call, None, deadline, lambda _: circle.new_number()
        )
        self._is_open = True

    def close(self) -> None:
        """Release the messages: this process no longer needs them."""
        if self._is_open:
            self._is_open = False
            self._circle.end(self._number)

    def gather(self, topic: str, value: Any) -> list[Any]:
        """The messages of all processes; raise on all if one of them sends none."""
        if not self.has_service:
            return gather_on_devices(value)
        self.say(topic, value)
        if self.is_first:
            end = time.monotonic() + self._deadline
            values = [self._hear(topic, i, end) for i in self._circle.members]
            self._say(topic, "all", values)
        else:
            values = self._hear_first(topic, "all")
        members = zip(self._circle.members, values, strict=True)
        late = [i for i, value in members if value is None]
        if late:
            raise self._too_late(topic, late)
        return [value for (value,) in values]

    def from_first(
        self, topic: str, make: Callable[[], _T], *, slow: bool = False
    ) -> _T:
        """Compute a value on the first process; if that fails, all raise.

        If `slow`, the others wait as long as that process is alive.
        """
        if not self.is_first:
            said = self._from_first(topic, slow=slow)
            if "error" in said:
                raise from_json(self._circle.first, said["error"])
            return said["value"]
        try:
            value = make()
        except BaseException as e:
            self._from_first(topic, {"error": to_json(e)})
            raise
        self._from_first(topic, {"value": value})
        return value

    def say(self, topic: str, value: Any) -> None:
        """Send a message; do not wait for the others."""
        if self.has_service:
            self._say(topic, self.index, [value])

    def said(self, topic: str) -> dict[int, Any]:
        """The messages that processes have sent so far."""
        if self._circle.service is None:
            return {}
        said = self._circle.service.below(self._key(topic, ""))
        return {int(who): value for who, (value,) in said.items() if who.isdecimal()}

    def _from_first(self, topic: str, value: Any = None, *, slow: bool = False) -> Any:
        if not self.has_service:
            return gather_on_devices(value)[self._circle.first]
        if self.is_first:
            return self._say(topic, "first", value)
        return self._hear_first(topic, "first", slow=slow)

    def _say(self, topic: str, who: int | str, value: Any) -> None:
        assert self._circle.service is not None
        self._circle.service.set(self._key(topic, who), value)

    def _hear_first(self, topic: str, who: str, *, slow: bool = False) -> Any:
        value = None
        while value is None and slow:
            value = self._hear(topic, who, time.monotonic() + _LONG)
        if value is None:
            value = self._hear(
                topic, who, time.monotonic() + self._deadline + DEADLINE_MARGIN
            )
        if value is None:
            said = self.said(topic)
            late = [i for i in self._circle.members if who == "all" and i not in said]
            outcome = _OUTCOMES.get(topic, NOTHING)
            raise self._too_late(topic, late or [self._circle.first], outcome)
        return value

    def _hear(self, topic: str, who: int | str, end: float) -> Any:
        """Wait for a message; `None` if none was sent in time."""
        assert self._circle.service is not None
        return self._circle.service.wait(self._key(topic, who), end - time.monotonic())

    def _key(self, topic: str, who: int | str) -> str:
        return f"{self._circle.prefix}groups/{self._number}/{topic}/{who}"

    def _too_late(
        self, topic: str, late: list[int], outcome: str = NOTHING
    ) -> CheckpointError:
        return too_late(topic, late, self._circle.members, self._deadline, outcome)


def group_of(call: str, deadline: float) -> Group | None:
    """All processes of the job, in the same call; `None` if there is only one."""
    check_deadline(deadline)
    return None if is_alone() else Group(_all(), call, deadline)


def from_first(call: str, make: Callable[[], _T], deadline: float) -> _T:
    """Compute a value on process 0, and return it on every process."""
    if is_alone():
        return make()
    return _all().together(call, None, deadline, lambda _: make())


def gather_errors(
    call: str, make: Callable[[], _T], deadline: float
) -> tuple[_T | None, Exception | None]:
    """Compute a value; return it with the first failure of any process."""
    made = error = None
    try:
        made = make()
    except Exception as e:
        error = e
    if is_alone():
        return made, error
    told = None if error is None else to_json(error)
    try:
        errors = _all().together(call, told, deadline, lambda said: said)
    except CheckpointError as e:
        raise e from error
    others = (from_json(i, e) for i, e in enumerate(errors) if e is not None)
    return made, error or next(others, None)


def most_said(call: str, values: list[int], deadline: float) -> list[int]:
    """The largest of each value among all processes."""
    if is_alone():
        return values
    return _all().together(
        call, values, deadline, lambda said: [max(of) for of in zip(*said, strict=True)]
    )


def _all() -> Circle:
    return circle_of(tuple(range(jax.process_count())))
