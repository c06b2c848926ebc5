"""Decide which calls of several processes are the same, and which are out of order.

The first process of those that meet decides with this module; nothing here waits.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._errors import CheckpointError


# The number of a process's life (a process that replaces a dead one begins a new life),
# and the number of a call in that life.
Number: TypeAlias = tuple[int, ...]


# If two processes make different calls, the call whose verb is listed first fails.
_VERBS = ("latest", "should_save", "restore", "save")


_DONE = {
    "save": "saved",
    "copy": "saved",
    "restore": "restored",
    "delete": "deleted",
}


class Call:
    """The announcement of a call that all processes have to make.

    `text` is the call with its arguments, and `value` its message. `answer` is the
    outcome, as JSON; `partners` are the same calls of the other processes.
    """

    def __init__(self, process: int, number: Number, text: str, value: Any) -> None:
        self.process = process
        self.number = number
        self.text = text
        self.value = value
        self.answer: dict[str, Any] | None = None
        self.partners: list[Call] | None = None
        # The processes that lost a call because of this one.
        self.survived: set[int] = set()


@dataclass(eq=False)
class Failure:
    """A meeting that failed: its calls, by process, and the error of each text.

    `age`: how many calls its processes had made since the last match.
    """

    calls: dict[int, str]
    answers: dict[str, dict[str, Any]]
    age: int

    def answer(self, call: Call) -> dict[str, Any]:
        """What to tell a process that comes too late, with this call."""
        self.calls.setdefault(call.process, call.text)
        if call.text not in self.answers:
            self.answers[call.text] = {"error": out_of_order(self.calls)}
        return self.answers[call.text]


class Calls:
    """The calls that wait for the same calls of other processes.

    In a correct program, a call waits for the same one of a process only while that
    process has called nothing else. If it has, all the calls that differ are out of
    order, and fail. A process that had made no call yet fails later, in its own call of
    that meeting. So the next call that all processes make succeeds again.

    **Attributes:**

    - `matches`: how many calls have found their partners.
    """

    def __init__(self, first: int, others: Iterable[int]) -> None:
        self._first = first
        self._mine: list[Call] = []
        self._theirs: dict[int, list[Call]] = {i: [] for i in others}
        self._lives: dict[int, int] = {}
        self.matches = 0
        # The last call of each process that found its partners.
        self._matched: dict[int, Number] = {}
        # Since the last match: what failed, the calls of processes that know it, and
        # for each process the meetings in which it had no call.
        self._failures: list[Failure] = []
        self._caught_up: set[tuple[int, str]] = set()
        self._missed: dict[int, list[Failure]] = {i: [] for i in (first, *self._theirs)}

    def open(self, call: Call) -> None:
        self._mine.append(call)

    def arrived(self, call: Call) -> None:
        theirs, life = self._theirs[call.process], call.number[0]
        if life > self._lives.get(call.process, life):
            # Nobody waits for the calls of a dead process, which knew what failed.
            theirs.clear()
            self._missed[call.process].clear()
            self._caught_up |= {(call.process, text) for text in self.failed()}
        self._lives[call.process] = life
        theirs.append(call)

    def is_waiting(self, call: Call) -> bool:
        """Whether this call of another process has arrived, and has no answer yet."""
        return any(call.number == c.number for c in self._theirs[call.process])

    def withdrawn(self, call: Call, answer: dict[str, Any]) -> None:
        """A process stopped waiting for its call; `answer` is its error."""
        theirs = self._theirs[call.process]
        theirs[:] = [other for other in theirs if other.number != call.number]
        self._failed([call], {call.text: answer})
        self._caught_up.add((call.process, call.text))

    def missing(self, call: Call) -> list[int]:
        """The processes that have not made the call."""
        return [i for i in self._theirs if self._same(i, call) is None]

    def failed(self) -> dict[str, Failure]:
        """The calls that have failed since the last match, by text."""
        found: dict[str, Failure] = {}
        for failure in self._failures:
            found = dict.fromkeys(failure.answers, failure) | found
        return found

    def settle(self) -> list[Call]:
        """Answer what is too late or out of order, and find partners.

        Return the calls of others that now have an answer.
        """
        answered: list[Call] = []
        for call in [*self._mine, *itertools.chain(*self._theirs.values())]:
            failure = next(iter(self._same_before(call)), None)
            if failure is not None and self._age(call) <= failure.age:
                self._has_caught_up(call.process, failure)
                answered += self._answered([call], failure.answer(call))
        for call in list(self._mine):
            if call in self._mine:
                answered += self._settle(call)
        return answered

    def fail(self, call: Call, answer: dict[str, Any]) -> list[Call]:
        """Give up a call of this process; return its partners, now answered."""
        if call not in self._mine:
            return []
        calls = [call, *self._partners(call)]
        self._failed(calls, {call.text: answer})
        return self._answered(calls, answer)

    def _settle(self, call: Call) -> list[Call]:
        open_here = {mine.text for mine in self._mine}
        others = [
            other
            for theirs in self._theirs.values()
            for other in theirs
            if other.text not in open_here
        ]
        answered: list[Call] = []
        for other in others:
            if (failure := self._before(other)) is not None:
                answered += self._answered([other], failure.answer(other))
        others = [
            other
            for other in others
            if other.answer is None and self._same(other.process, call) is None
        ]
        if others:
            ahead = {other.process for other in others}
            failure = self._before(call, ahead)
            if failure is not None:
                late = [call, *self._partners(call)]
                return answered + self._answered(late, failure.answer(call))
            return answered + self._separate([call, *self._partners(call), *others])
        if not self.missing(call):
            self._match(call)
        return answered

    def _match(self, call: Call) -> None:
        call.partners = self._partners(call)
        for made in (call, *call.partners):
            self._remove(made)
            self._matched[made.process] = made.number
        self.matches += 1
        self._failures.clear()
        self._caught_up.clear()
        for missed in self._missed.values():
            missed.clear()

    def _before(self, call: Call, ahead: set[int] | None = None) -> Failure | None:
        """The meeting for which this call is too late, if there is one.

        Some of the processes `ahead` have gone on from it.
        """
        missed = self._missed[call.process]
        found = next(
            (
                failure
                for failure in self._same_before(call) + missed
                if ahead is None or ahead & failure.calls.keys()
            ),
            None,
        )
        if found is not None:
            self._has_caught_up(call.process, found)
        return found

    def _same_before(self, call: Call) -> list[Failure]:
        """Where the same call failed, unless its process has caught up."""
        if (call.process, call.text) in self._caught_up:
            return []
        return [failure for failure in self._failures if call.text in failure.answers]

    def _has_caught_up(self, process: int, failure: Failure) -> None:
        """Note that a process knows how a meeting ended, and all earlier ones."""
        missed = self._missed[process]
        if failure in missed:
            del missed[: missed.index(failure) + 1]

    def _separate(self, calls: list[Call]) -> list[Call]:
        """Give up different calls that wait for each other's processes.

        Return those of others. At most one text survives: it still waits.
        """
        strengths = {call.text: self._strength(call.text, calls) for call in calls}
        best = max(strengths.values())
        strongest = [text for text, strength in strengths.items() if strength == best]
        survivor = strongest[0] if len(strongest) == 1 else None
        answer = {"error": out_of_order({call.process: call.text for call in calls})}
        lost = [call for call in calls if call.text != survivor]
        for call in calls:
            if call.text == survivor:
                call.survived |= {other.process for other in lost}
        answers = {call.text: answer for call in lost}
        self._failed(lost, answers, is_over=survivor is None)
        return self._answered(lost, answer)

    def _strength(self, text: str, calls: list[Call]) -> tuple[int, bool, int]:
        """Rank calls that exclude each other: the weaker ones fail.

        The calls of processes that are behind are the strongest: the other processes
        have failed since then.
        """
        verb = text.partition("(")[0]
        rank = _VERBS.index(verb) if verb in _VERBS else -1
        against = {call.process for call in calls if call.text != text}
        same = [call for call in calls if call.text == text]
        is_new = not any(call.survived & against for call in same)
        return max(map(self._age, same)), is_new, rank

    def _age(self, call: Call) -> int:
        """How many calls its process has made since the last match, with this one."""
        life, number = call.number
        matched_life, matched = self._matched.get(call.process, (life, 0))
        return number - matched if matched_life == life else number

    def _failed(
        self,
        calls: list[Call],
        answers: dict[str, dict[str, Any]],
        is_over: bool = True,
    ) -> None:
        """Remember failed calls, for processes that still make them later."""
        of = {call.process: call.text for call in calls}
        age = max(map(self._age, calls))
        missed = [failure for process in of for failure in self._missed[process][:1]]
        same = [f for f in self._failures if f.answers.keys() >= answers.keys()]
        known = next(
            (f for f in missed + same if not of.items() & f.calls.items()), None
        )
        if known is not None:
            # Others gave up in the same meeting before.
            known.calls |= of
            known.age = max(known.age, age)
            known.answers = answers | known.answers
            for process in of:
                missed = self._missed[process]
                self._missed[process] = [f for f in missed if f is not known]
            return
        failure = Failure(of, answers, age)
        self._failures.append(failure)
        here = {self._first} if self._mine else set[int]()
        here |= {i for i, theirs in self._theirs.items() if theirs}
        if is_over:
            for process in self._missed.keys() - here - of.keys():
                self._missed[process].append(failure)

    def _answered(self, calls: list[Call], answer: dict[str, Any]) -> list[Call]:
        """Answer calls; return those of others."""
        for call in calls:
            call.answer = answer
            self._caught_up.add((call.process, call.text))
            self._remove(call)
        return [call for call in calls if call.process != self._first]

    def _remove(self, call: Call) -> None:
        is_mine = call.process == self._first
        (self._mine if is_mine else self._theirs[call.process]).remove(call)

    def _partners(self, call: Call) -> list[Call]:
        return [other for i in self._theirs if (other := self._same(i, call))]

    def _same(self, process: int, call: Call) -> Call | None:
        theirs = self._theirs[process]
        return next((other for other in theirs if other.text == call.text), None)


def out_of_order(calls: dict[int, str]) -> dict[str, Any]:
    """The error that the processes raise."""
    is_place = len({text.partition(" in ")[0] for text in calls.values()}) == 1
    error = CheckpointError(
        "The processes do not call the same:\n"
        + "\n".join(f"- process {i}: {calls[i]}" for i in sorted(calls))
        + f"\n{nothing_done(*calls.values())}All processes have to make the same "
        "calls, with the same arguments, in the same order."
        + (f" {one_for_all('use')}" if is_place else "")
    )
    return {"kind": "CheckpointError", "text": str(error), "errno": None}


def one_for_all(verb: str) -> str:
    """What to do about places of which each process has its own."""
    return (
        f"All processes have to {verb} one shared directory, or one store. If each has "
        "a disk of its own, pass `shared=False` to `CheckpointManager`."
    )


def nothing_done(*calls: str) -> str:
    """A sentence that says what these failed calls did not do, or nothing."""
    verbs = (call.partition("(")[0] for call in calls)
    done = {_DONE[verb]: None for verb in verbs if verb in _DONE}
    return f"Nothing was {' or '.join(done)} by this call. " if done else ""
