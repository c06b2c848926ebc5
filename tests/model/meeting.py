"""How the processes of a job meet: each announces its call, and the first one decides.

Beside the code: `_distributed/meeting.py` (announce, find out, wait, withdraw, look,
publish). What the first process decides when it looks is in `matching.py`. Process 0 is
the first.

A call of one process is a text and its position in that process's program; nobody sends
positions, and the model uses them only to tell whether the processes stay in step.
"""

from collections.abc import Iterator

from .checker import Model, Step
from .matching import Board, Call, end, FAILED, OK, Process, put, State, UNKNOWN


# Who gives up its first call, and nobody else does.
_GIVES_UP = {"alone": 1, "outlives": 0}


class Meeting(Model):
    name = "Processes that meet"
    scenes = {
        "differ": "3 processes save three different steps, and then the same one",
        "late": "3 processes restore, save and restore again; one or two are late",
        "two": "2 processes restore twice; one is late or dies",
        "behind": "3 processes; one of them calls `latest()` once less",
        "ahead": "3 processes; one of them makes a save that the others do not make",
        "apart": "3 processes make two calls that differ, and then the same one",
        "save over": "2 processes; one of them makes a query before its save",
        "missed": "3 processes; two save, and one makes two queries meanwhile",
        "twice": "3 processes; one makes the same save twice, and the others do not",
        "alone": "2 processes; one of them gives up a call that only it makes",
        "outlives": "3 processes; one gives up a save that outlived other calls",
        "replaced": "3 processes; one dies in a save, and is replaced",
    }
    guards = {
        "same text": ("replaced", "two calls are the same if they have the same text"),
        "tell the late": ("missed", "who missed a failure is told of it when it comes"),
        "behind first": ("apart", "who has made fewer calls is given up first"),
        "a query first": (
            "save over",
            "of different calls, a query is given up before a save",
        ),
        "survive once": (
            "save over",
            "a call that outlived others is given up the next time",
        ),
        "known": ("twice", "who knows of a failure does not look for it again"),
        "withdraw": ("two", "a process that waits no longer withdraws its call"),
        "a withdrawn call fails": (
            "two",
            "all others fail the call that one has withdrawn",
        ),
        "age": ("outlives", "a call that is newer than a failure is not told of it"),
        "forget": ("alone", "what failed is forgotten at the next match"),
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
            "apart": (
                ("latest()", "restore()", "save(9)"),
                ("save(1)", "latest()", "save(9)"),
                ("save(1)", "save(2)", "save(9)"),
            )[i],
            "save over": (("save(1)",) if not i else ("restore()", "save(2)"))
            + ("save(9)",),
            "missed": (("latest()", "restore()") if i == 1 else (f"save({i})",))
            + ("save(9)",),
            "twice": (
                ("restore()", "save(1)", "save(9)"),
                ("latest()", "save(2)", "save(9)"),
                ("save(2)", "save(2)", "save(9)"),
            )[i],
            "alone": (("latest()",) if i else ()) + ("save(1)", "latest()"),
            "outlives": ("latest()" if i else "save(1)", "latest()"),
            "replaced": ("save(1)", "restore()"),
        }[self.scene]

    def start(self) -> State:
        count = 2 if self.scene in ("two", "save over", "alone") else 3
        faults = {"late": (2, 0), "two": (1, 1), "replaced": (0, 1)}
        if self.scene in _GIVES_UP:
            faults[self.scene] = (1, 0)
        return State(
            (Process(),) * count,
            missed=((),) * count,
            matched=((1, 0),) * count,
            lives=(1,) * count,
            faults=faults.get(self.scene, (0, 0)),
        )

    def steps(self, s: State) -> Iterator[Step]:
        for i, p in enumerate(s.processes):
            name = f"process {i}"
            if p.is_dead:
                if self.scene == "replaced" and p.life == 1:
                    # It knows what has failed so far: see `Circle`.
                    known = frozenset(text for text, _ in s.published)
                    new = Process(1, outcomes=UNKNOWN, life=2, known=known)
                    yield Step(f"{name} is replaced by a new one", put(s, i, new))
                continue
            if s.faults[1] and i and p.is_waiting and not p.at:
                now = put(s, i, p._replace(is_dead=True, is_waiting=False))
                yield Step(f"{name} dies", now._replace(faults=(s.faults[0], 0)))
            if not p.is_waiting and p.at < len(self.program(i)):
                yield self._announces(s, i)
            if p.is_new:
                yield self._finds_out(s, i)
                continue
            if p.is_waiting and i == 0 and (after := self._look(s)) != s:
                yield Step(_words(s, after), after)
            if p.is_waiting and (self._may_be_late(s, i) or self._is_in_vain(s)):
                yield from self._stops_waiting(s, i)

    def _announces(self, s: State, i: int) -> Step:
        p, text = s.processes[i], self.program(i)[s.processes[i].at]
        now = p._replace(is_waiting=True, is_new=i > 0, number=p.number + 1)
        call = Call(i, p.life, now.number, p.at, text)
        after = put(s, i, now)._replace(calls=s.calls | {call})
        return Step(f"process {i} announces {text}", after)

    def _finds_out(self, s: State, i: int) -> Step:
        """Once, a process looks for a failure of its call that is published."""
        p = s.processes[i]
        text, age = self.program(i)[p.at], p.number - p.matched
        ages = [found for of, found in s.published if of == text]
        is_known = text in p.known and self.keeps("known")
        is_late = not is_known and any(
            age <= found or not self.keeps("age") for found in ages
        )
        after = put(s, i, p._replace(is_new=False))
        if not is_late:
            return Step(f"process {i} finds no failure of its call", after)
        words = f"process {i} finds that its call has failed, and withdraws it"
        return Step(words, self._withdraws(after, i))

    def _may_be_late(self, s: State, i: int) -> bool:
        if self.scene not in _GIVES_UP:
            return bool(s.faults[0])
        is_time = i == 1 or all(p.outcomes for p in s.processes[1:])
        is_first = i == _GIVES_UP[self.scene] and not s.processes[i].at
        return bool(s.faults[0]) and is_first and is_time

    def _is_in_vain(self, s: State) -> bool:
        """Whether somebody will never come: it is dead, or has no more calls."""
        return any(
            p.is_dead or not p.is_waiting and p.at == len(self.program(i))
            for i, p in enumerate(s.processes)
        )

    def _stops_waiting(self, s: State, i: int) -> Iterator[Step]:
        words = f"the deadline of process {i} passes"
        left = s.faults[0] - (not self._is_in_vain(s))
        s = s._replace(faults=(left, s.faults[1]))
        if i:
            yield Step(f"{words}, and it withdraws its call", self._withdraws(s, i))
            return
        board = Board(self.keeps, self._look(s))
        if board.mine is not None:
            board.fail(board.mine)
        yield Step(words, board.state())

    def _withdraws(self, s: State, i: int) -> State:
        p = s.processes[i]
        text, age = self.program(i)[p.at], p.number - p.matched
        now = Call(i, p.life, p.number, p.at, text, is_withdrawn=True)
        if self.keeps("withdraw"):
            s = s._replace(calls=frozenset(c for c in s.calls if c[:3] != now[:3]))
            s = s._replace(calls=s.calls | {now})
        if text not in {of for of, _ in s.published}:
            s = s._replace(published=s.published | {(text, age)})
        return end(s, i, FAILED, text)

    def _look(self, s: State) -> State:
        board = Board(self.keeps, s)
        board.settle()
        return board.state()

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
        differed = self.scene not in ("late", "two", "replaced")
        if has_ended and differed and not all(of.endswith(OK) for of in outcomes):
            return "A call fails that all processes make, after they had differed."
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


def _words(before: State, after: State) -> str:
    said = [
        f"{'succeeds' if q.outcomes[-1] == OK else 'fails'} in process {i}"
        for i, (p, q) in enumerate(zip(before.processes, after.processes, strict=True))
        if len(q.outcomes) > len(p.outcomes)
    ]
    return "process 0 looks: the call " + (", ".join(said) or "is noted")
