"""How the processes of a job meet: each announces its call, and the first one decides.

Beside the code: in `_distributed`, `meeting.py` (announce, wait, withdraw, look) and
`call_matching.py` (what the first process decides when it looks). Process 0 is the
first.

A call of one process is a text and its position in that process's program; nobody sends
positions, and the model uses them only to tell whether the processes stay in step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


# Of two different calls, the one that is listed first here is given up.
VERBS = ("latest", "restore", "save")
OK, FAILED, UNKNOWN = "+", "-", "?"


class Process(NamedTuple):
    at: int = 0  # The position of its next call, or of the one in which it waits.
    is_waiting: bool = False
    outcomes: str = ""
    life: int = 1
    is_dead: bool = False


class Call(NamedTuple):
    """An announcement, as the first process finds it."""

    process: int
    at: int
    text: str
    life: int
    is_withdrawn: bool = False
    has_survived: bool = False


class State(NamedTuple):
    processes: tuple[Process, ...]
    calls: frozenset[Call] = frozenset()
    # How many meetings have failed without each process: it is told at its next calls.
    owed: tuple[int, ...] = ()
    faults: tuple[int, int] = (
        0,
        0,
    )  # Deadlines that pass although nobody died; deaths.
    problem: str = ""


class Meeting(Model):
    name = "Processes that meet"
    scenes = {
        "differ": "3 processes save three different steps, and then the same one",
        "late": "3 processes restore, save and restore again; one or two are late",
        "two": "2 processes restore twice; one is late or dies",
        "behind": "3 processes; one of them calls `latest()` once less",
        "ahead": "3 processes; one of them makes a save that the others do not make",
        "replaced": "3 processes; one dies in a save, and is replaced",
    }
    guards = {
        "same text": ("replaced", "two calls are the same if they have the same text"),
        "tell the late": (
            "differ",
            "who missed a failure is told of it at its next call",
        ),
        "a query first": (
            "behind",
            "of different calls, a query is given up before a save",
        ),
        "survive once": (
            "ahead",
            "a call that survived others is given up the next time",
        ),
        "withdraw": ("replaced", "a process that waits no longer withdraws its call"),
        "a withdrawn call fails": (
            "two",
            "all others fail the call that one has withdrawn",
        ),
        "lives": (
            "replaced",
            "the calls of a dead process are dropped when it is replaced",
        ),
    }

    def program(self, i: int) -> tuple[str, ...]:
        return {
            "differ": (f"save(1{i})", "save(20)"),
            "late": ("restore()", "save(1)", "restore()"),
            "two": ("restore()", "restore()"),
            "behind": (("latest()",) if i != 1 else ())
            + ("save(1)", "latest()", "save(2)"),
            "ahead": ("save(5)", "latest()", "save(9)")
            if i == 1
            else ("latest()", "latest()", "save(9)"),
            "replaced": ("save(1)", "restore()"),
        }[self.scene]

    def start(self) -> State:
        count = 2 if self.scene == "two" else 3
        faults = {"late": (2, 0), "two": (1, 1), "replaced": (0, 1)}
        return State(
            (Process(),) * count,
            owed=(0,) * count,
            faults=faults.get(self.scene, (0, 0)),
        )

    def steps(self, s: State) -> Iterator[Step]:
        for i, p in enumerate(s.processes):
            name = f"process {i}"
            if p.is_dead:
                if self.scene == "replaced" and p.life == 1:
                    new = Process(1, outcomes=UNKNOWN, life=2)
                    yield Step(f"{name} is replaced by a new one", _set(s, i, new))
                continue
            if s.faults[1] and i and p.is_waiting and not p.at:
                now = _set(s, i, p._replace(is_dead=True, is_waiting=False))
                yield Step(f"{name} dies", now._replace(faults=(s.faults[0], 0)))
            if not p.is_waiting and p.at < len(self.program(i)):
                text = self.program(i)[p.at]
                call = Call(i, p.at, text, p.life)
                now = _set(s, i, p._replace(is_waiting=True))
                now = now._replace(calls=s.calls | {call})
                yield Step(f"{name} announces {text}", now)
            if p.is_waiting and i == 0 and (after := self._look(s)) != s:
                yield Step(_words(s, after), after)
            if p.is_waiting and (s.faults[0] or self._is_in_vain(s)):
                yield from self._stops_waiting(s, i)

    def _is_in_vain(self, s: State) -> bool:
        """Whether somebody will never come: it is dead, or has no more calls."""
        return any(
            p.is_dead or not p.is_waiting and p.at == len(self.program(i))
            for i, p in enumerate(s.processes)
        )

    def _stops_waiting(self, s: State, i: int) -> Iterator[Step]:
        words = f"the deadline of process {i} passes"
        p = s.processes[i]
        left = s.faults[0] - (not self._is_in_vain(s))
        s = s._replace(faults=(left, s.faults[1]))
        mine = Call(i, p.at, self.program(i)[p.at], p.life)
        if i == 0:
            s = self._look(s)
            if s.processes[0] == p:
                same = [c for c in s.calls if c.text == mine.text]
                s = self._fail(s, same)
        else:
            now = mine._replace(is_withdrawn=True)
            calls = frozenset(c for c in s.calls if not _is_of(c, i, s))
            if self.keeps("withdraw"):
                calls |= {now}
                words += ", and it withdraws its call"
            else:
                calls |= {mine}
            s = _end(s._replace(calls=calls), i, FAILED)
        yield Step(words, s)

    # What the first process decides.

    def _look(self, s: State) -> State:
        if self.keeps("lives"):
            calls = [c for c in s.calls if c.life == s.processes[c.process].life]
            s = s._replace(calls=frozenset(calls))
        s = self._tell_the_late(s)
        withdrawn = [c for c in s.calls if c.is_withdrawn]
        if withdrawn:
            s = s._replace(calls=s.calls.difference(withdrawn))
            if self.keeps("a withdrawn call fails"):
                # They have failed it already; all others do so now, or when they come.
                known = {c.process for c in withdrawn}
                return self._fail(
                    s, [c for c in s.calls if c.process not in known], known
                )
        return self._compare(s)

    def _tell_the_late(self, s: State) -> State:
        for i, owed in enumerate(s.owed):
            for call in sorted(c for c in s.calls if c.process == i)[:owed]:
                if self.keeps("tell the late"):
                    s = s._replace(
                        calls=s.calls - {call}, owed=_put(s.owed, i, owed - 1)
                    )
                    if not call.is_withdrawn:
                        s = _end(s, i, FAILED)
        return s

    def _compare(self, s: State) -> State:
        calls = sorted(s.calls)
        texts = {c.text for c in calls}
        there = {c.process for c in calls}
        is_full = len(there) == len(s.processes)
        if 0 not in there:
            return s
        if is_full and (len(texts) == 1 or not self.keeps("same text")):
            return self._match(s, calls)
        return self._separate(s, calls) if len(texts) > 1 else s

    def _match(self, s: State, calls: list[Call]) -> State:
        problem = ""
        if any(c.life != s.processes[c.process].life for c in calls):
            problem = "A call is answered in the name of a process that was replaced."
        if len({c.text for c in calls}) > 1:
            problem = "Different calls are taken for the same."
        s = s._replace(calls=frozenset(), problem=problem)
        for call in calls:
            if _is_of(call, call.process, s):
                s = _end(s, call.process, OK)
        return s

    def _separate(self, s: State, calls: list[Call]) -> State:
        def strength(text: str) -> tuple[bool, int]:
            same = [c for c in calls if c.text == text]
            rank = VERBS.index(text.partition("(")[0])
            is_old = any(c.has_survived for c in same) and self.keeps("survive once")
            return not is_old, rank if self.keeps("a query first") else 0

        best = max(strength(c.text) for c in calls)
        strongest = {c.text for c in calls if strength(c.text) == best}
        survivors = [c for c in calls if strongest == {c.text}]
        calls = [c for c in calls if c not in survivors]
        s = s._replace(calls=s.calls.difference(survivors))
        again = {c._replace(has_survived=True) for c in survivors}
        s = s._replace(calls=s.calls | again)
        return self._fail(s, calls, {c.process for c in survivors})

    def _fail(
        self, s: State, calls: list[Call], known: set[int] = frozenset()
    ) -> State:
        """These calls fail; who is neither among them nor knows it is told later."""
        told = {c.process for c in calls} | known
        s = s._replace(calls=s.calls.difference(calls))
        for i in range(len(s.processes)):
            if i in told - known:
                if s.processes[i].is_waiting:
                    s = _end(s, i, FAILED)
            elif i not in told:
                s = s._replace(owed=_put(s.owed, i, s.owed[i] + 1))
        return s

    # What must be true.

    def problem(self, s: State) -> str:
        if s.problem:
            return s.problem
        outcomes = [p.outcomes for p in s.processes]
        if self.scene in ("late", "two", "replaced"):
            for of in zip(*outcomes, strict=False):
                if {OK, FAILED} <= {*of}:
                    return "One call fails in one process, and succeeds in another."
        has_ended = all(
            not p.is_dead and p.at == len(self.program(i))
            for i, p in enumerate(s.processes)
        )
        differed = self.scene in ("differ", "behind", "ahead")
        if has_ended and differed and not all(of.endswith(OK) for of in outcomes):
            return "A call fails that all processes make, after they had differed."
        if (
            has_ended
            and self.scene == "late"
            and s.faults == (2, 0)
            and FAILED in outcomes
        ):
            return "A call fails, and nobody was late."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        for i, p in enumerate(s.processes):
            if p.is_waiting:
                dead = [
                    q if i == j else q._replace(is_dead=True, is_waiting=False, life=2)
                    for j, q in enumerate(s.processes)
                ]
                yield f"process {i}", s._replace(processes=tuple(dead), faults=(0, 0))

    def has_ended(self, actor: str, s: State) -> bool:
        return not s.processes[int(actor[-1])].is_waiting


def _is_of(call: Call, i: int, s: State) -> bool:
    """Whether a call is the one in which a process waits."""
    p = s.processes[i]
    return (call.process, call.at, call.life) == (i, p.at, p.life) and p.is_waiting


def _put(values: tuple[int, ...], i: int, value: int) -> tuple[int, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _set(s: State, i: int, process: Process) -> State:
    processes = (*s.processes[:i], process, *s.processes[i + 1 :])
    return s._replace(processes=processes)


def _end(s: State, i: int, outcome: str) -> State:
    p = s.processes[i]
    ended = p._replace(at=p.at + 1, is_waiting=False, outcomes=p.outcomes + outcome)
    return _set(s, i, ended)


def _words(before: State, after: State) -> str:
    said = [
        f"{'succeeds' if q.outcomes[-1] == OK else 'fails'} in process {i}"
        for i, (p, q) in enumerate(zip(before.processes, after.processes, strict=True))
        if len(q.outcomes) > len(p.outcomes)
    ]
    return "process 0 looks: the call " + (", ".join(said) or "is noted")
