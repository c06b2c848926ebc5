"""What the first of the processes that meet decides: which calls are the same.

Beside the code: `_distributed/call_matching.py`, whose methods have the same names.
"""

from collections.abc import Callable
from typing import NamedTuple


# Of two different calls, the one that is listed first here is given up.
VERBS = ("latest", "restore", "save")
OK, FAILED, UNKNOWN = "+", "-", "?"


class Process(NamedTuple):
    at: int = 0  # The position of its next call, or of the one in which it waits.
    is_waiting: bool = False
    # It has announced its call, and not yet looked whether that has failed.
    is_new: bool = False
    outcomes: str = ""
    life: int = 1
    is_dead: bool = False
    # How many calls it has made in this life, and how many until the last match.
    number: int = 0
    matched: int = 0
    # What failed since then, as far as it knows.
    known: frozenset[str] = frozenset()


class Call(NamedTuple):
    """An announcement, as the first process finds it."""

    process: int
    life: int
    number: int
    at: int
    text: str
    is_withdrawn: bool = False
    survived: frozenset[int] = frozenset()


class Failure(NamedTuple):
    """A meeting that failed: its calls, the texts that are told of it, and its age."""

    calls: frozenset[tuple[int, str]]
    texts: frozenset[str]
    age: int

    def processes(self) -> set[int]:
        return {process for process, _ in self.calls}


class State(NamedTuple):
    processes: tuple[Process, ...]
    calls: frozenset[Call] = frozenset()
    # What process 0 remembers since the last match.
    failures: tuple[Failure, ...] = ()
    told: frozenset[tuple[int, str]] = frozenset()
    missed: tuple[
        tuple[int, ...], ...
    ] = ()  # Of each process, as places in `failures`.
    matched: tuple[tuple[int, int], ...] = ()  # Of each process, a life and a number.
    lives: tuple[int, ...] = ()
    # What everybody can find: texts, and the ages of their failures.
    published: frozenset[tuple[str, int]] = frozenset()
    # Deadlines that pass although nobody died; deaths.
    faults: tuple[int, int] = (0, 0)
    problem: str = ""


class Board:
    """What the first process decides with: the calls that wait, and what failed."""

    def __init__(self, keeps: Callable[[str], bool], s: State) -> None:
        self._keeps = keeps
        self._s = s
        self._failures = [*s.failures]
        self._told = {*s.told}
        self._missed = [[*of] for of in s.missed]
        self._lives = [*s.lives]
        self._has_matched = False
        self.mine: Call | None = None
        self._theirs: dict[int, Call] = {}
        for call in sorted(s.calls):
            self._note(call)

    def state(self) -> State:
        s = self._s
        if self._has_matched:
            if self._keeps("forget"):
                s = s._replace(published=frozenset())
        else:
            texts = {text: f.age for f in self._failures[::-1] for text in f.texts}
            others = {(t, age) for t, age in s.published if t not in texts}
            s = s._replace(published=frozenset({*others, *texts.items()}))
        waiting = {self.mine, *self._theirs.values()} - {None}
        return s._replace(
            calls=frozenset(waiting),
            failures=tuple(self._failures),
            told=frozenset(self._told),
            missed=tuple(map(tuple, self._missed)),
            lives=tuple(self._lives),
        )

    def _note(self, call: Call) -> None:
        i = call.process
        if call.life > self._lives[i] and self._keeps("lives"):
            # Nobody waits for the calls of a dead process, which knew what failed.
            self._theirs.pop(i, None)
            self._missed[i].clear()
            self._told |= {(i, text) for f in self._failures for text in f.texts}
        self._lives[i] = max(call.life, self._lives[i])
        if not i:
            self.mine = call
        elif not call.is_withdrawn:
            if self._keeps("lives") or i not in self._theirs:
                self._theirs[i] = call
        else:
            if i in self._theirs and self._theirs[i][:3] == call[:3]:
                del self._theirs[i]
            if self._keeps("a withdrawn call fails"):
                self._failed([call], {call.text})
            self._told.add((i, call.text))

    def settle(self) -> None:
        for call in [*([self.mine] if self.mine else []), *self._theirs.values()]:
            failure = next(iter(self._same_before(call)), None)
            if failure is not None and (
                self._age(call) <= self._failures[failure].age or not self._keeps("age")
            ):
                self._has_caught_up(call.process, failure)
                self._answer([call], failure)
        if self.mine is not None:
            self._settle(self.mine)

    def _settle(self, call: Call) -> None:
        others = [c for c in self._theirs.values() if c.text != call.text]
        for other in list(others):
            if (failure := self._before(other)) is not None:
                others.remove(other)
                self._answer([other], failure)
        is_full = len(self._theirs) + 1 == len(self._s.processes)
        if not self._keeps("same text") and is_full:
            self._match(call)
        elif others:
            ahead = {other.process for other in others}
            if (failure := self._before(call, ahead)) is not None:
                self._answer([call, *self._partners(call)], failure)
            else:
                self._separate([call, *self._partners(call), *others])
        elif is_full:
            self._match(call)

    def fail(self, call: Call) -> None:
        calls = [call, *self._partners(call)]
        self._failed(calls, {call.text})
        self._answer(calls)

    def _match(self, call: Call) -> None:
        calls, problem = [call, *self._theirs.values()], ""
        waiting = self._s.processes
        if any(
            c.life < waiting[c.process].life for c in calls if waiting[c.process].number
        ):
            problem = "A call is answered in the name of a process that was replaced."
        if len({c.text for c in calls}) > 1:
            problem = "Different calls are taken for the same."
        self._s = self._s._replace(
            problem=problem, matched=tuple((c.life, c.number) for c in sorted(calls))
        )
        for c in calls:
            if is_of(c, self._s):
                self._s = end(self._s, c.process, OK)
        self.mine = None
        self._theirs.clear()
        self._failures.clear()
        self._told.clear()
        self._missed = [[] for _ in self._missed]
        self._has_matched = True

    def _before(self, call: Call, ahead: set[int] | None = None) -> int | None:
        """The meeting for which this call is too late, if there is one."""
        missed = self._missed[call.process] if self._keeps("tell the late") else []
        for failure in self._same_before(call) + missed:
            if ahead is None or ahead & self._failures[failure].processes():
                self._has_caught_up(call.process, failure)
                return failure
        return None

    def _same_before(self, call: Call) -> list[int]:
        if (call.process, call.text) in self._told:
            return []
        return [n for n, f in enumerate(self._failures) if call.text in f.texts]

    def _has_caught_up(self, process: int, failure: int) -> None:
        missed = self._missed[process]
        if failure in missed:
            del missed[: missed.index(failure) + 1]

    def _separate(self, calls: list[Call]) -> None:
        texts = {call.text: self._strength(call.text, calls) for call in calls}
        best = max(texts.values())
        strongest = [text for text, strength in texts.items() if strength == best]
        survivor = strongest[0] if len(strongest) == 1 else None
        lost = [call for call in calls if call.text != survivor]
        for call in calls:
            if call.text == survivor:
                among = call.survived | {other.process for other in lost}
                self._put(call._replace(survived=among))
        self._failed(lost, {c.text for c in lost}, is_over=survivor is None)
        self._answer(lost)

    def _strength(self, text: str, calls: list[Call]) -> tuple[int, bool, int]:
        against = {call.process for call in calls if call.text != text}
        same = [call for call in calls if call.text == text]
        rank = (
            VERBS.index(text.partition("(")[0]) if self._keeps("a query first") else 0
        )
        age = max(map(self._age, same)) if self._keeps("behind first") else 0
        is_old = any(c.survived & against for c in same)
        return age, not (is_old and self._keeps("survive once")), rank

    def _age(self, call: Call) -> int:
        life, matched = self._s.matched[call.process]
        return call.number - matched if life == call.life else call.number

    def _failed(self, calls: list[Call], texts: set[str], is_over: bool = True) -> None:
        """Remember what processes may still call that come too late for it."""
        of = {call.process: call.text for call in calls}
        age = max(map(self._age, calls))
        known = [self._missed[i][0] for i in of if self._missed[i]]
        known += [n for n, f in enumerate(self._failures) if f.texts >= texts]
        for n in known:
            failure = self._failures[n]
            if not of.items() & failure.calls:
                # Others gave up in the same meeting before.
                self._failures[n] = Failure(
                    frozenset({**dict(failure.calls), **of}.items()),
                    failure.texts | texts,
                    max(age, failure.age),
                )
                for i in of:
                    self._missed[i] = [m for m in self._missed[i] if m != n]
                return
        self._failures.append(Failure(frozenset(of.items()), frozenset(texts), age))
        here = {*self._theirs, *([0] if self.mine else []), *of}
        for i, missed in enumerate(self._missed):
            if is_over and i not in here:
                missed.append(len(self._failures) - 1)

    def _answer(self, calls: list[Call], failure: int | None = None) -> None:
        for call in calls:
            if failure is not None:
                found = self._failures[failure]
                others = dict([(call.process, call.text), *found.calls])
                self._failures[failure] = found._replace(
                    calls=frozenset(others.items()), texts=found.texts | {call.text}
                )
            self._told.add((call.process, call.text))
            if not call.process:
                self.mine = None
            else:
                del self._theirs[call.process]
            if is_of(call, self._s):
                self._s = end(self._s, call.process, FAILED, call.text)

    def _partners(self, call: Call) -> list[Call]:
        return [c for c in self._theirs.values() if c.text == call.text]

    def _put(self, call: Call) -> None:
        if call.process:
            self._theirs[call.process] = call
        else:
            self.mine = call


def is_of(call: Call, s: State) -> bool:
    """Whether a call is the one in which a process waits."""
    p = s.processes[call.process]
    return (call.life, call.number) == (p.life, p.number) and p.is_waiting


def put(s: State, i: int, process: Process) -> State:
    processes = (*s.processes[:i], process, *s.processes[i + 1 :])
    return s._replace(processes=processes)


def end(s: State, i: int, outcome: str, failed: str = "") -> State:
    p = s.processes[i]
    ended = p._replace(
        at=p.at + 1,
        is_waiting=False,
        is_new=False,
        outcomes=p.outcomes + outcome,
        matched=p.number if outcome == OK else p.matched,
        known=frozenset() if outcome == OK else p.known | {failed},
    )
    return put(s, i, ended)
