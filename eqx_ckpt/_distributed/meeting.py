"""Meetings of the processes of a job: each announces its call, the first compares.

A process announces each of its calls under a number of its own, and waits for the
answer to it. The first process waits until all have announced the same call as its own,
and then tells each of them where the outcome will be. That is created once: with what
the first process finds, or with the error of a process that waits no longer, so that
all get the same. A call that differs from the others is answered with an error.
"""

import contextlib
import hashlib
import itertools
import json
import numbers
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from .._errors import CheckpointError
from .._storage.calls.threads import at_once
from .._types import is_real, shown, wrong
from .call_matching import Call, Calls, Number
from .device_meeting import meet_on_devices
from .jax_service import Service, service
from .process_errors import from_json, to_json, too_late


TIMEOUT = 300.0  # seconds


_LONGEST = 1e9


# The other processes wait a little longer than the first one, whose error names the
# late processes.
TIMEOUT_MARGIN = 5.0


# How often the first process looks for calls that it does not wait for.
_GLANCE = 0.5  # seconds


_making = threading.Lock()


_circles: "dict[tuple[int, ...], Circle]" = {}


def check_timeout(timeout: float) -> None:
    """Raise if it is not a positive number of seconds."""
    if not is_real(timeout) or not 0 < timeout <= _LONGEST:
        raise wrong(timeout, numbers.Real)(
            f"`timeout` is {shown(timeout)}. Pass a positive number of seconds, such "
            f"as {TIMEOUT:g}; at most {_LONGEST:g}."
        )


class Circle:
    """Processes of a job that meet: some, or all.

    **Attributes:**

    - `seen`: on the first process, the places that all have seen to be the same.
    """

    def __init__(self, members: tuple[int, ...], service: Service | None) -> None:
        self.members = members
        self.index = jax.process_index()
        self.first = members[0]
        self.service = service
        # Short, as it is in each message: of many processes, too.
        who = hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]
        self.prefix = f"eqx_ckpt/{who}/"
        # A process that replaces a dead one has a life of its own.
        self._life = (
            1 if service is None else service.count(f"{self.prefix}{self.index}")
        )
        self.seen: set[str] = set()
        self._numbers = itertools.count(1)
        # On the first process: what all call, after how many matches it has published
        # which failures, and whether others have published theirs since the last one.
        others = members[1:] if self.index == self.first else ()
        self._calls = Calls(self.first, others)
        self._published: tuple[int, set[str]] = (0, set())
        self._others_have = False
        # On the others: where failures since the last match are that this one knows,
        # or whose meetings were those of a dead process.
        self._known: set[str] = set()
        # The number of the last match.
        self._matched = 0
        if service is not None and self._life > 1:
            prefix = f"{self.prefix}failed/"
            self._known = {prefix + key for key in service.below(prefix)}
        self._lock = threading.Lock()
        # For each other process: life and number of its last announcement read.
        self._seen: dict[int, Number] = dict.fromkeys(others, (1, 0))
        self._groups = itertools.count(1)
        # Operations that the first process has released, and others may not have.
        self._ended: list[int] = []
        self._still_used: dict[int, set[int]] = {}

    def together(
        self,
        text: str,
        value: Any,
        timeout: float,
        make: Callable[[list[Any]], Any],
        so_far: str = "",
    ) -> Any:
        """Combine all messages on the first process; return the result on each.

        Whoever gives up while the first process does that says what is known `so_far`.
        """
        if self.service is None:
            return meet_on_devices(self.first, text, value, make)
        if self.index == self.first:
            return self._lead(self.service, text, value, timeout, make)
        return self._follow(self.service, text, value, timeout, so_far)

    def _lead(
        self,
        service: Service,
        text: str,
        value: Any,
        timeout: float,
        make: Callable[[list[Any]], Any],
    ) -> Any:
        call = Call(self.index, (self._life, next(self._numbers)), text, value)
        outcome: dict[str, Any] = {}
        number = None
        try:
            service.set(self._place(call), {"text": text})
            self._wait_for_all(service, call, timeout)
            if call.answer is not None:
                raise from_json(None, call.answer["error"])
            number = self.new_number()
            outcome = self._begin(service, call, number)
            if not outcome:
                values = {p.process: p.value for p in call.partners or ()}
                values[self.index] = value
                outcome = {"value": make([values[i] for i in self.members])}
            outcome = service.decide(self._outcome_of(number), outcome)
            if "error" in outcome:
                raise from_json(None, outcome["error"])
            return outcome["value"]
        except BaseException as e:
            if "error" not in outcome:
                is_own = call.partners is not None or not isinstance(e, CheckpointError)
                own = {"from": self.index} if is_own else {}
                outcome = {"error": to_json(e)} | own
                if number is not None:
                    service.decide(self._outcome_of(number), outcome)
            raise
        finally:
            if number is not None:
                self.end(number)
            with self._lock:
                late = self._calls.fail(call, outcome)
                self._publish(service)
            for partner in late:
                self._tell(service, partner, outcome)
            service.delete(self._place(call))
            if self._published[1]:
                # Other processes may have made this call before they could find the
                # failure.
                self._look(service)

    def _begin(self, service: Service, call: Call, number: int) -> dict[str, Any]:
        """Tell the partners where the outcome will be; it is there if one has left."""
        outcome: dict[str, Any] = {}
        where = {"outcome": number}
        told = at_once(lambda one: self._tell(service, one, where), call.partners or ())
        for partner, said in told.items():
            if "withdrawn" in said:
                outcome = said["withdrawn"]
                with self._lock:
                    self._forget(partner.process, [number])
        return outcome

    def _outcome_of(self, number: int) -> str:
        """The key of what comes of a meeting, which any of its processes creates."""
        return f"{self.prefix}groups/{number}/outcome"

    def _wait_for_all(self, service: Service, call: Call, timeout: float) -> None:
        """Wait until the call has partners or an answer."""
        end = time.monotonic() + timeout
        with self._lock:
            self._calls.open(call)
        self._look(service)
        while call.partners is None and call.answer is None:
            left = end - time.monotonic()
            with self._lock:
                late = self._calls.missing(call)
            if left <= 0 or not late:
                raise too_late(call.text, late, self.members, timeout)
            # When the last one has come, most others have.
            life, number = self._seen[late[-1]]
            coming = f"{self.prefix}calls/{late[-1]}/{life}/{number + 1}"
            service.wait(coming, min(left, _GLANCE))
            self._look(service)

    def _look(self, service: Service) -> None:
        """Read the announcements of the others, and answer decided calls."""
        with self._lock:
            found = service.below(f"{self.prefix}calls/")
            for key in sorted(tuple(map(int, key.split("/"))) for key in found):
                process, *number = key
                if process != self.first:
                    self._note(process, tuple(number), found["/".join(map(str, key))])
            answered = self._calls.settle()
            self._publish(service)
        for call in answered:
            self._tell(service, call, call.answer or {})

    def _publish(self, service: Service) -> None:
        """Publish the failures since the last match, for processes that are late."""
        matches, published = self._published
        failed = self._calls.failed()
        if (published or self._others_have) and matches != self._calls.matches:
            service.delete(f"{self.prefix}failed/")
            published, self._others_have = set[str](), False
        for text in sorted(failed.keys() - published):
            failure = failed[text]
            said = {"error": failure.answers[text]["error"], "age": failure.age}
            service.set(self._failure_of(text), said, again=True)
        self._published = self._calls.matches, {*failed}

    def _note(self, process: int, number: Number, said: dict[str, Any]) -> None:
        if number[0] > self._seen[process][0]:
            self._forget(process, list(self._still_used))
        call = Call(process, number, said["text"], said.get("value"))
        if "withdrawn" in said:
            self._forget(process, said["ended"])
            self._others_have = True
            assert self.service is not None
            # If it has partners, these are about to find out.
            if number > self._seen[process] or self._calls.is_waiting(call):
                self._calls.withdrawn(call, said["withdrawn"])
                self.service.delete(self._place(call, "answers"))
            self.service.delete(self._place(call))
        elif number > self._seen[process]:
            self._forget(process, said["ended"])
            self._calls.arrived(call)
        self._seen[process] = max(self._seen[process], number)

    def _place(self, call: Call, of: str = "calls") -> str:
        life, number = call.number
        return f"{self.prefix}{of}/{call.process}/{life}/{number}"

    def _tell(
        self, service: Service, call: Call, answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Answer a call, unless its process waits no longer; return what is there."""
        place = self._place(call, "answers")
        said = service.decide(place, answer)
        if "withdrawn" in said:
            service.delete(place)
        return said

    def _follow(
        self, service: Service, text: str, value: Any, timeout: float, so_far: str
    ) -> Any:
        call = Call(self.index, (self._life, next(self._numbers)), text, value)
        with self._lock:
            ended, self._ended = self._ended, []
        service.set(self._place(call), {"text": text, "value": value, "ended": ended})
        answer: dict[str, Any] = {}
        try:
            answer = self._answer(service, call, timeout)
        except BaseException as e:
            # This process stops waiting; it says so, and why.
            with contextlib.suppress(CheckpointError):
                self._withdraw(service, call, ended, {"error": to_json(e)})
            raise
        finally:
            if "outcome" in answer:
                self._known.clear()
                self._matched = call.number[1]
            else:
                self._known.add(self._failure_of(text))
        service.delete(self._place(call))
        service.delete(self._place(call, "answers"))
        if "outcome" in answer:
            late = too_late(text, [self.first], self.members, timeout, so_far)
            answer = self._outcome(service, answer["outcome"], timeout, late)
        if "error" in answer:
            raise from_json(answer.get("from"), answer["error"])
        return answer["value"]

    def _outcome(
        self, service: Service, number: int, timeout: float, late: CheckpointError
    ) -> dict[str, Any]:
        """Wait for what comes of a meeting; if there is none in time, it is `late`."""
        key = self._outcome_of(number)
        try:
            outcome = service.wait(key, timeout + TIMEOUT_MARGIN)
            if outcome is None:
                outcome = service.decide(key, {"error": to_json(late)})
            return outcome
        except BaseException as e:
            with contextlib.suppress(CheckpointError):
                service.decide(key, {"error": to_json(e)})
            raise
        finally:
            self.end(number)

    def _answer(self, service: Service, call: Call, timeout: float) -> dict[str, Any]:
        """Wait for the answer to a call; raise if its meeting fails, or has failed."""
        known, place = self._failure_of(call.text), self._place(call, "answers")
        failure = None if known in self._known else service.look(known)
        if failure is not None and self._age(call) > failure["age"]:
            # This process took part in that meeting, with a different call.
            failure = None
        answer = None
        if failure is None:
            answer = service.wait(place, timeout + TIMEOUT_MARGIN)
            if answer is None:
                late = self._no_answer(service, call.text, timeout)
                failure = {"error": to_json(late)}
        # The first process may have answered meanwhile; from here on, it cannot.
        answer = answer or service.decide(place, {"withdrawn": failure})
        if "withdrawn" in answer:
            raise from_json(None, answer["withdrawn"]["error"])
        return answer

    def _withdraw(
        self, service: Service, call: Call, ended: list[int], why: dict[str, Any]
    ) -> None:
        """Say that this process does not wait for a call any longer."""
        said, place = self._place(call), self._place(call, "answers")
        answer = service.decide(place, {"withdrawn": why})
        if "withdrawn" in answer:
            withdrawn = {"text": call.text, "withdrawn": why, "ended": ended}
            service.set(said, withdrawn, again=True)
            said = why | {"age": self._age(call)}
            service.decide(self._failure_of(call.text), said)
            return
        if "outcome" in answer:
            service.decide(self._outcome_of(answer["outcome"]), why)
            self.end(answer["outcome"])
        service.delete(said)
        service.delete(place)

    def _age(self, call: Call) -> int:
        """How many calls this process has made since the last match, with this one."""
        return call.number[1] - self._matched

    def _failure_of(self, text: str) -> str:
        """The key under which the failure of a call is published."""
        digest = hashlib.sha256(json.dumps(text).encode()).hexdigest()
        return f"{self.prefix}failed/{digest}"

    def _no_answer(
        self, service: Service, text: str, timeout: float
    ) -> CheckpointError:
        found = service.below(f"{self.prefix}calls/")
        called = {
            int(key.split("/")[0])
            for key, said in found.items()
            if said["text"] == text
        }
        late = [i for i in self.members if i not in called] or [self.first]
        return too_late(text, late, self.members, timeout)

    # Operations with several messages, see `Group`.

    def new_number(self) -> int:
        """A new number for an operation until `end`; first process only."""
        number = next(self._groups)
        with self._lock:
            self._still_used[number] = set(self.members)
        return number

    def end(self, number: int) -> None:
        """Release an operation; it is deleted when all processes have."""
        with self._lock:
            if self.index == self.first:
                self._forget(self.index, [number])
            else:
                self._ended.append(number)

    def _forget(self, process: int, numbers: list[int]) -> None:
        for number in numbers:
            users = self._still_used.get(number, {process})
            users.discard(process)
            if not users and self.service is not None:
                self._still_used.pop(number, None)
                self.service.delete(f"{self.prefix}groups/{number}/")


def circle_of(members: tuple[int, ...]) -> Circle:
    """The circle of these processes; a new one after JAX was initialised again."""
    now = service()
    with _making:
        circle = _circles.get(members)
        if circle is None or circle.service != now:
            circle = _circles[members] = Circle(members, now)
        return circle
