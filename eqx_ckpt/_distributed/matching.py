"""Decide which calls of several processes are the same, and which are out of order.

The first process of those that meet decides with this module; nothing here waits.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from .._errors import CheckpointError


# The life of a process, which is another one if it replaced a dead process, and the
# number of a call in that life.
Number: TypeAlias = tuple[int, ...]

# Of two different calls, the one that is listed first here is out of order.
_VERBS = ("latest", "should_save", "restore", "save")


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
        # The processes that gave up the same call before.
        self.missed: set[int] = set()

    def strength(self, against: int) -> tuple[bool, int]:
        """Of two calls that exclude each other, the weaker is out of order."""
        verb = self.text.partition("(")[0]
        rank = _VERBS.index(verb) if verb in _VERBS else -1
        return against not in self.survived, rank


class Calls:
    """The calls that wait for those of other processes.

    In a correct program, a call waits for the same one of a process only while that
    process has called nothing else. If it has, one of the two is out of order, and the
    next call that both make works again.
    """

    def __init__(self, first: int, others: Iterable[int]) -> None:
        self._first = first
        self._mine: list[Call] = []
        self._theirs: dict[int, list[Call]] = {i: [] for i in others}
        # By process: the outcome of calls that the others may still make.
        self._failed: dict[int, dict[str, dict[str, Any]]] = {
            i: {} for i in (first, *self._theirs)
        }
        self._owed: dict[str, set[int]] = {}

    def open(self, call: Call) -> None:
        self._mine.append(call)

    def arrived(self, call: Call) -> None:
        theirs = self._theirs[call.process]
        # Nobody waits for the calls of a dead process.
        theirs[:] = [other for other in theirs if other.number[0] == call.number[0]]
        theirs.append(call)

    def withdrawn(self, call: Call, answer: dict[str, Any]) -> None:
        """A process stopped waiting for its call; `answer` is its error."""
        theirs = self._theirs[call.process]
        theirs[:] = [other for other in theirs if other.number != call.number]
        self._failed[call.process][call.text] = answer

    def missing(self, call: Call) -> list[int]:
        """The processes that have not made the call."""
        return [i for i in self._theirs if self._same(i, call) is None]

    def settle(self) -> list[Call]:
        """Answer what is out of order, and find partners.

        Return the calls of others that now have an answer.
        """
        answered: list[Call] = []
        for call in list(self._mine):
            self._settle(call, answered)
        return answered

    def _settle(self, call: Call, answered: list[Call]) -> None:
        open_here = {mine.text for mine in self._mine}
        for i, theirs in self._theirs.items():
            for other in [y for y in theirs if y.text not in open_here]:
                if i in self._owed.get(other.text, ()):
                    # Too late: this process gave the call up before.
                    self._owed[other.text].discard(i)
                    theirs.remove(other)
                    other.answer = self._failed[self._first][other.text]
                elif self._same(i, call) is None and call.answer is None:
                    self._separate(call, other)
                if other.answer is not None:
                    answered.append(other)
        if call.answer is not None:
            answered += self.fail(call, call.answer)
        elif not self.missing(call):
            self._match(call)

    def _match(self, call: Call) -> None:
        partners = [self._same(i, call) for i in self._theirs]
        call.partners = [partner for partner in partners if partner is not None]
        for partner in call.partners:
            self._theirs[partner.process].remove(partner)
        self._mine.remove(call)
        self._owed.clear()
        for failed in self._failed.values():
            failed.clear()

    def fail(self, call: Call, answer: dict[str, Any]) -> list[Call]:
        """Give up a call of this process; return its partners, now answered."""
        if call not in self._mine:
            return []
        self._mine.remove(call)
        call.answer = answer
        partners = [y for i in self._theirs if (y := self._same(i, call))]
        for partner in partners:
            self._theirs[partner.process].remove(partner)
            partner.answer = answer
        self._failed[self._first][call.text] = answer
        told = call.missed | {partner.process for partner in partners}
        self._owed[call.text] = set(self._theirs) - told
        return partners

    def _separate(self, mine: Call, theirs: Call) -> None:
        """Find two different calls that wait for each other's process."""
        before = self._failed[theirs.process].pop(mine.text, None)
        if before is not None:
            mine.missed.add(theirs.process)
            mine.answer = before
            return
        answer = {"error": _out_of_order(mine, theirs)}
        strengths = mine.strength(theirs.process), theirs.strength(self._first)
        if strengths[0] <= strengths[1]:
            mine.answer = answer
        if strengths[1] <= strengths[0]:
            self._theirs[theirs.process].remove(theirs)
            self._failed[theirs.process][theirs.text] = theirs.answer = answer
        mine.survived.add(theirs.process)
        theirs.survived.add(self._first)

    def _same(self, process: int, call: Call) -> Call | None:
        theirs = self._theirs[process]
        return next((other for other in theirs if other.text == call.text), None)


def _out_of_order(*calls: Call) -> dict[str, Any]:
    return out_of_order({call.process: call.text for call in calls})


def out_of_order(calls: dict[int, str]) -> dict[str, Any]:
    """The error that the processes raise."""
    error = CheckpointError(
        "The processes do not call the same:\n"
        + "\n".join(f"- process {i}: {calls[i]}" for i in sorted(calls))
        + "\nNothing was saved by this call. All processes have to make the same "
        "calls, with the same arguments, in the same order."
    )
    return {"kind": "CheckpointError", "text": str(error), "errno": None}
