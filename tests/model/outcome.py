"""How each step of a save by several processes gets one outcome.

Beside the code: `_distributed/process_group.py`. All processes send a message and wait
(`combine`); then process 0 commits (`from_first`, which is `final`). Process 0 says the
outcome of each; a process that has waited for too long says that it failed. Whoever
says it first is right: the service creates each key once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


OK, FAILED, UNKNOWN = "saved", "failed", "not known"


class Process(NamedTuple):
    # What it does next.
    next: str = "say"
    # What its caller is told.
    told: str = ""
    is_dead: bool = False


class State(NamedTuple):
    processes: tuple[Process, ...]
    said: frozenset[int] = frozenset()
    gathered: str = ""
    begun: str = ""
    outcome: str = ""
    is_committed: bool = False
    deaths: int = 1


class Outcome(Model):
    name = "One outcome of a step"
    scenes = {
        "save": "3 processes write and commit; each may be late or die at any step",
    }
    guards = {
        "all": ("save", "a step succeeds only if all have sent their messages"),
        "once": ("save", "an outcome is created once, and never written over"),
        "keep to it": ("save", "who gives up takes the outcome that is there already"),
        "begin": ("save", "process 0 says that it begins, before it commits"),
        "unknown": (
            "save",
            "who gives up after that says that the outcome is not known",
        ),
    }

    def start(self) -> State:
        return State((Process(),) * 3)

    def steps(self, s: State) -> Iterator[Step]:
        for i, p in enumerate(s.processes):
            if p.is_dead or p.told:
                continue
            if s.deaths:
                dead = _set(s, i, p._replace(is_dead=True))
                yield Step(f"process {i} dies", dead._replace(deaths=0))
            if p.next == "say":
                after = s._replace(said=s.said | {i})
                yield Step(f"process {i} sends its message", _next(after, i, "gather"))
            elif i == 0:
                yield from self._first(s, p.next)
            else:
                yield from self._other(s, i, p.next)

    def _first(self, s: State, doing: str) -> Iterator[Step]:
        if doing == "gather":
            if len(s.said) == len(s.processes) or not self.keeps("all"):
                yield Step("process 0 has all messages", _next(s, 0, "have all"))
            yield Step("the deadline of process 0 passes", _next(s, 0, "miss some"))
        elif doing in ("have all", "miss some"):
            said = OK if doing == "have all" else FAILED
            now, said = self._decide(s, "gathered", said)
            doing = "begin" if self.keeps("begin") else "commit"
            after = _next(now, 0, doing) if said == OK else _tell(now, 0, FAILED)
            yield Step(f"process 0 says of the messages: {said}", after)
        elif doing == "begin":
            now, said = self._decide(s, "begun", OK)
            doing = "commit" if said == OK else "fail"
            yield Step("process 0 says that it begins", _next(now, 0, doing))
        elif doing == "commit":
            after = _next(s._replace(is_committed=True), 0, "succeed")
            yield Step("process 0 commits", after)
            yield Step("process 0 cannot commit", _next(s, 0, "fail"))
        else:
            said = OK if doing == "succeed" else FAILED
            now, said = self._decide(s, "outcome", said)
            yield Step(f"process 0 says that it {doing}s", _tell(now, 0, said))

    def _other(self, s: State, i: int, doing: str) -> Iterator[Step]:
        key = "gathered" if doing == "gather" else "outcome"
        if said := getattr(s, key):
            is_last = key == "outcome" or said == FAILED
            after = _tell(s, i, said) if is_last else _next(s, i, "wait")
            yield Step(f"process {i} hears: {said}", after)
        if key == "outcome" and self.keeps("begin"):
            key = "begun"
        now, said = self._decide(s, key, FAILED)
        if said == OK and key == "gathered":
            after = _next(now, i, "wait")
        else:
            # Once process 0 has begun, nobody else knows what comes of it.
            unknown = said == OK and key == "begun" and self.keeps("unknown")
            after = _tell(now, i, UNKNOWN if unknown else FAILED)
            if said == OK and key == "outcome":
                after = _tell(now, i, OK)
        yield Step(f"the deadline of process {i} passes", after)

    def _decide(self, s: State, key: str, said: str) -> tuple[State, str]:
        """Create a key, unless it is there; what its process then takes for true."""
        there = getattr(s, key)
        if there and self.keeps("once"):
            return s, there if self.keeps("keep to it") else said
        return s._replace(**{key: said}), said

    def problem(self, s: State) -> str:
        told = {p.told for p in s.processes}
        if s.is_committed and len(s.said) < len(s.processes):
            return "It is committed, and a process has not written."
        if {OK, FAILED} <= told:
            return "One process is told that it is saved, and another that it failed."
        if FAILED in told and s.is_committed:
            return "A process is told that it failed, and it is committed."
        if OK in told and not s.is_committed:
            return "A process is told that it is saved, and it is not."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        for i, p in enumerate(s.processes):
            if not p.is_dead:
                dead = [
                    q if i == j else q._replace(is_dead=True)
                    for j, q in enumerate(s.processes)
                ]
                yield f"process {i}", s._replace(processes=tuple(dead), deaths=0)

    def has_ended(self, actor: str, s: State) -> bool:
        return bool(s.processes[int(actor[-1])].told)


def _set(s: State, i: int, process: Process) -> State:
    return s._replace(processes=(*s.processes[:i], process, *s.processes[i + 1 :]))


def _next(s: State, i: int, doing: str) -> State:
    return _set(s, i, s.processes[i]._replace(next=doing))


def _tell(s: State, i: int, told: str) -> State:
    return _set(s, i, s.processes[i]._replace(told=told))
