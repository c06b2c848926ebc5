"""Which steps of a run have led to its newest one, and which belong to others."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from .._format.manifest import Manifest
from .._format.run_history import Fork, History


# Above each first session.
_ROOT = ""


class Relation(NamedTuple):
    """How a step is related to the newest one.

    **Attributes:**

    - `kind`: `"same"`: one of them came from the other. `"fork"`: both went on from a
        step. `"start"`: both sessions began without a restore. `"run"`: it is of
        another run. `"unknown"`: too many sessions are between them.
    - `common`: of a fork, the last step that both came from.
    """

    kind: Literal["same", "fork", "start", "run", "unknown"]
    common: int | None = None

    def __str__(self) -> str:
        words = {
            "same": "",
            "fork": f"fork of step {self.common}",
            "start": "another start",
            "run": "another run",
            "unknown": "unknown history",
        }
        return words[self.kind]


def in_marks(
    step: int, saved_as: int, relation: Relation, fork: Fork | None
) -> list[str]:
    """What is unusual of a step, if anything, in words."""
    renamed = "" if step == saved_as else f"saved as step {saved_as}"
    begun = "" if fork is None else in_words(fork)
    return [*filter(None, [str(relation), renamed, begun])]


def in_words(fork: Fork, name: str | None = None) -> str:
    """Where a run comes from, by the name of the other one, if that is known."""
    run = "a run without a history" if fork.run is None else f"run {fork.run[:8]}"
    return f"forked from step {fork.step} of {name or run}"


def begun_by(history: History) -> Fork | None:
    """The fork that has saved a step, if one has."""
    fork, session = history.forked, history.sessions[-1]
    is_first = fork is not None and session[1:] == (fork.step, fork.digest)
    return fork if is_first else None


def relations(histories: Mapping[int, History]) -> dict[int, Relation]:
    """How each of some steps is related to the newest one.

    Of a newest one that is a renamed older step, what came from that counts as well.
    """
    if not histories:
        return {}
    newest = max(histories)
    found = _relations_to(newest, histories)
    near = [step for step in histories if found[step].kind == "same"]
    last = max(near, key=lambda step: (histories[step].step, step))
    return found if last == newest else _relations_to(last, histories)


def _relations_to(last: int, histories: Mapping[int, History]) -> dict[int, Relation]:
    line = _Line(histories, histories[last])
    return {step: line.relation(history) for step, history in histories.items()}


class _Line:
    """The sessions that have led to one step, among all that some histories name."""

    def __init__(self, histories: Mapping[int, History], newest: History) -> None:
        # For each session, the one that it goes on from, and from which of its steps.
        self._above: dict[str, tuple[str, int | None]] = {}
        for history in histories.values():
            first, *others = sessions = history.sessions
            if not history.earlier:
                # The digest of a step without a history stands for its session.
                above = first.digest or _ROOT
                self._above.setdefault(first.id, (above, first.step))
                self._above.setdefault(above, (_ROOT, None))
            for before, session in zip(sessions, others, strict=False):
                self._above.setdefault(session.id, (before.id, session.step))
        self._newest = newest
        self._last_of = dict(self._way(newest))

    def relation(self, history: History) -> Relation:
        if history.run != self._newest.run:
            return Relation("run")
        is_known = _ROOT in self._last_of
        for session, step in self._way(history):
            if session == _ROOT and is_known:
                return Relation("start")
            if session in self._last_of and session != _ROOT:
                common = min(step, self._last_of[session])
                ends = [(h.sessions[-1].id, h.step) for h in (history, self._newest)]
                is_end = (session, common) in ends
                return Relation("same") if is_end else Relation("fork", common)
        return Relation("unknown")

    def _way(self, history: History) -> Iterator[tuple[str, int]]:
        """The sessions that have led to a step, and the last step of each that did."""
        session, step, seen = history.sessions[-1].id, history.step, set[str]()
        while session not in seen:
            seen.add(session)
            yield session, step
            session, restored = self._above.get(session, (session, None))
            step = 0 if restored is None else restored


def is_same_step(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests are of the same step, which was saved once."""
    if one.history or other.history:
        return one.history == other.history
    return _content(one) == _content(other)


def _content(manifest: Manifest) -> object:
    leaves = {
        name: record._replace(compression=None)
        for name, record in manifest.leaves.items()
    }
    return leaves, manifest.unsaved, manifest.metadata


def why_not_the_same(step: int, place: str, other: str) -> str:
    return (
        f"Step {step} in {place!r} is not step {step} in {other!r}: they were saved by "
        "different runs, or after different restores."
    )
