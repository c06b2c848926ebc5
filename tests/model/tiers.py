"""A run in two tiers: a local disk now, a bucket soon, and a machine that is replaced.

A design that is checked before it is code. Machine 1 trains, and is suspended or loses
its disk; machine 2 then continues from what it finds. A step is written as its history:
`aab` is step 3, which a machine with the id b saved after it had restored `aa`. Its
manifest has that history, so of two steps one can see whether one came from the other.

Locally, only the newest step is kept, and in the bucket too. The commit in each tier is
in `directory.py` and `bucket.py`; here that is one step.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


LENGTH = 3
ENDED = {"idle", "conflict", "off"}


class Machine(NamedTuple):
    at: str = "idle"
    head: str = ""  # The state of its training, as a history.
    local: frozenset[str] = frozenset()
    uploads: str = ""
    is_suspended: bool = False


class State(NamedTuple):
    machines: tuple[Machine, Machine]
    bucket: frozenset[str] = frozenset()
    # What a manager was told is in the bucket, and who was told.
    mirrored: frozenset[str] = frozenset()
    disks: int = 1  # How many disks may still be lost.
    suspensions: int = 1
    restarts: int = 1
    problem: str = ""


class Tiers(Model):
    name = "A run in two tiers"
    scenes = {
        "one": "one machine, which is restarted or loses its disk",
        "two": "machine 2 continues while machine 1 is only suspended",
    }
    guards = {
        "due stays": ("one", "a local step stays until its upload has ended"),
        "both": ("one", "what is restored is the newest step of both tiers"),
        "tell apart": ("two", "who finds two histories raises, and restores neither"),
        "condition": ("two", "a step is created in the bucket only if it is not there"),
        "look after": ("two", "an upload looks for other histories once it is there"),
        "take back": ("two", "and is taken back if there are any"),
    }

    def start(self) -> State:
        return State((Machine(), Machine("off")))

    def steps(self, s: State) -> Iterator[Step]:
        for i, m in enumerate(s.machines):
            name = f"machine {i + 1}"
            if m.is_suspended:
                yield Step(f"{name} continues", _set(s, i, is_suspended=False))
            elif m.at == "off":
                if i and self.scene == "two" and not self._runs(s, 0):
                    yield from self._restore(s, i, name)
            elif m.at != "conflict":
                yield from getattr(self, f"_{m.at}")(s, i, name)
                if m.at != "restore" and len(m.head) < LENGTH:
                    yield from self._save(s, i, name)
                if s.suspensions and self.scene == "two" and not i:
                    now = _set(s, i, is_suspended=True)
                    yield Step(f"{name} is suspended", now._replace(suspensions=0))
                if s.restarts:
                    now = _set(s, i, head="", at="restore", uploads="")
                    yield Step(f"{name} is killed", now._replace(restarts=0))
                if s.disks:
                    lost = Machine("restore" if self.scene == "one" else "off")
                    machines = (*s.machines[:i], lost, *s.machines[i + 1 :])
                    now = s._replace(machines=machines, disks=0)
                    yield Step(f"{name} loses its disk", now)

    @staticmethod
    def _runs(s: State, i: int) -> bool:
        return s.machines[i].at != "off" and not s.machines[i].is_suspended

    def _restore(self, s: State, i: int, name: str) -> Iterator[Step]:
        local = s.machines[i].local
        found = local | s.bucket
        if not self.keeps("both") and local:
            found = local
        if not self.keeps("both") and s.bucket:
            found = s.bucket
        if self.keeps("tell apart") and _differ(found):
            words = f"{name} finds {_all(found)}: it raises"
            yield Step(words, _set(s, i, at="conflict"))
            return
        head = max(found, key=lambda step: (len(step), step), default="")
        now = _set(s, i, at="idle", head=head)
        if _differ(found):
            now = now._replace(problem="A restore has chosen between two histories.")
        best = max((local | s.bucket), key=len, default="")
        if len(best) > len(head):
            now = now._replace(problem=f"A restore has missed {best}, which is there.")
        yield Step(f"{name} restores {head or 'nothing'}", now)

    def _save(self, s: State, i: int, name: str) -> Iterator[Step]:
        """The training goes on during an upload, and removes older local steps."""
        m = s.machines[i]
        head = m.head + "ab"[i]
        due = m.uploads or max(
            (x for x in m.local if x not in s.bucket), key=len, default=""
        )
        kept = {x for x in m.local if x == due and self.keeps("due stays")}
        now = _set(s, i, head=head, local=frozenset(kept | {head}))
        yield Step(f"{name} saves {head}, and removes older ones", now)

    def _idle(self, s: State, i: int, name: str) -> Iterator[Step]:
        """Of the steps that are not in the bucket, the newest is uploaded."""
        due = [x for x in s.machines[i].local if x not in s.bucket]
        if due:
            now = _set(s, i, at="put", uploads=max(due, key=len))
            yield Step(f"{name} begins to upload {max(due, key=len)}", now)

    def _put(self, s: State, i: int, name: str) -> Iterator[Step]:
        step = s.machines[i].uploads
        there = {x for x in s.bucket if len(x) == len(step)}
        if step not in s.machines[i].local:
            words = f"{step} is removed while it is uploaded."
            yield Step(f"{name} reads {step}", s._replace(problem=words))
        elif there and self.keeps("condition"):
            words = f"{name} is refused: step {len(step)} is there, {_all(there)}"
            yield Step(words, _set(s, i, at="conflict"))
        else:
            after = "look" if self.keeps("look after") else "retain"
            now = s._replace(bucket=s.bucket - there | {step})
            if after == "retain":
                now = now._replace(mirrored=now.mirrored | {step})
            yield Step(f"{name} commits {step} in the bucket", _set(now, i, at=after))

    def _look(self, s: State, i: int, name: str) -> Iterator[Step]:
        step = s.machines[i].uploads
        others = {x for x in s.bucket if _differ({x, step})}
        if others:
            after = "take_back" if self.keeps("take back") else "conflict"
            words = f"{name} finds {_all(others)} beside {step}"
            yield Step(words, _set(s, i, at=after))
        else:
            now = s._replace(mirrored=s.mirrored | {step})
            words = f"{name} finds one history: {step} is in the bucket"
            yield Step(words, _set(now, i, at="retain"))

    def _take_back(self, s: State, i: int, name: str) -> Iterator[Step]:
        step = s.machines[i].uploads
        now = s._replace(bucket=s.bucket - {step})
        yield Step(f"{name} takes {step} back", _set(now, i, at="conflict"))

    def _retain(self, s: State, i: int, name: str) -> Iterator[Step]:
        step = s.machines[i].uploads
        old = {x for x in s.bucket if len(x) < len(step)}
        mirrored = frozenset(
            x for x in s.mirrored if not step.startswith(x) or x == step
        )
        now = s._replace(bucket=s.bucket - old, mirrored=mirrored)
        words = (
            f"{name} removes {_all(old)} from the bucket" if old else f"{name} goes on"
        )
        yield Step(words, _set(now, i, at="idle", uploads=""))

    def problem(self, s: State) -> str:
        if s.problem:
            return s.problem
        for step in s.mirrored:
            if step not in s.bucket and not any(x.startswith(step) for x in s.bucket):
                return f"{step} was said to be in the bucket, and is gone."
        for i, m in enumerate(s.machines):
            if m.at == "retain" and _differ({m.uploads, *s.mirrored}):
                return (
                    f"Two histories were said to be in the bucket, {_all(s.mirrored)}."
                )
            left = m.at == "conflict" and m.uploads in s.bucket
            if left and _differ(s.bucket):
                return f"Machine {i + 1} has raised, and left a second history."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        for i, m in enumerate(s.machines):
            if m.at not in ENDED and not m.is_suspended:
                other = s.machines[1 - i]._replace(at="conflict", is_suspended=False)
                machines = (m, other) if i == 0 else (other, m)
                quiet = s._replace(
                    machines=machines, disks=0, suspensions=0, restarts=0
                )
                yield f"machine {i + 1}", quiet

    def has_ended(self, actor: str, s: State) -> bool:
        return s.machines[int(actor[-1]) - 1].at in ENDED or bool(s.problem)


def _differ(steps: set[str] | frozenset[str]) -> bool:
    """Whether two steps are of two histories: neither came from the other."""
    return any(not b.startswith(a) for a, b in itertools.pairwise(sorted(steps)))


def _all(steps: set[str] | frozenset[str]) -> str:
    return " and ".join(sorted(steps))


def _set(s: State, i: int, **changes: object) -> State:
    machines = [*s.machines]
    machines[i] = machines[i]._replace(**changes)
    return s._replace(machines=(machines[0], machines[1]))
