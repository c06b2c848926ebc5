"""Which steps of a run have led to its newest one, and which belong to others."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from .._format.manifest import Manifest
from .._format.run_history import Fork, History


# Above each first session.
_ROOT = ""


class Relation(NamedTuple):
    """How a step is related to the newest one.

    **Attributes:**

    - `kind`: `"same"`: one of them came from the other. `"fork"`: none came from the
        other. `"start"`: both sessions began without a restore. `"run"`: it is of
        another run. `"unknown"`: one may have come from the other, but too many
        sessions are between them.
    - `common`: of a fork, the last step that both came from, if that is known.
    """

    kind: Literal["same", "fork", "start", "run", "unknown"]
    common: int | None = None

    def __str__(self) -> str:
        known = self.common is not None
        words = {
            "same": "",
            "fork": f"fork of step {self.common}" if known else "another branch",
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
    line = Line(Sessions(histories.values()), histories[last])
    return {step: line.relation(history) for step, history in histories.items()}


class Sessions:
    """The sessions that some histories name, each with the one that it goes on from."""

    def __init__(self, histories: Iterable[History] = ()) -> None:
        # For each session, the one that it goes on from, and from which of its steps.
        self._above: dict[str, tuple[str | None, int | None]] = {}
        for history in histories:
            self.add(history)

    def add(self, history: History) -> None:
        first, *others = sessions = history.sessions
        if history.earlier:
            self._note(first.id, None, first.step)
        else:
            # The digest of a step without a history stands for its session.
            above = first.digest or _ROOT
            self._note(first.id, above, first.step)
            self._note(above, _ROOT, None)
        for before, session in zip(sessions, others, strict=False):
            self._note(session.id, before.id, session.step)

    def _note(self, session: str, above: str | None, step: int | None) -> None:
        if self.above(session)[0] is None:
            self._above[session] = above, step

    def above(self, session: str) -> tuple[str | None, int | None]:
        """What a session goes on from, as far as it is known."""
        return self._above.get(session, (None, None))

    def way(self, history: History) -> Iterator[tuple[str, int]]:
        """The sessions that have led to a step, and the last step of each that did."""
        session, step, seen = history.sessions[-1].id, history.step, set[str]()
        while session is not None and session not in seen:
            seen.add(session)
            yield session, step
            session, restored = self.above(session)
            step = 0 if restored is None else restored


class Line:
    """The sessions that have led to one step, among some that are known.

    These include all that its own history names.
    """

    def __init__(self, sessions: Sessions, newest: History) -> None:
        self._sessions, self._newest = sessions, newest
        self._last_of = dict(sessions.way(newest))

    @property
    def is_known(self) -> bool:
        """Whether the first session is known."""
        return _ROOT in self._last_of

    def relation(self, history: History) -> Relation:
        if history.run != self._newest.run:
            return Relation("run")
        for session, step in self._sessions.way(history):
            if session == _ROOT and self.is_known:
                return Relation("start")
            if session in self._last_of and session != _ROOT:
                common = min(step, self._last_of[session])
                ends = [(h.sessions[-1].id, h.step) for h in (history, self._newest)]
                is_end = (session, common) in ends
                return Relation("same") if is_end else Relation("fork", common)
        is_older = _depth(history) <= _depth(self._newest)
        newer = self if is_older else Line(self._sessions, history)
        older = history if is_older else self._newest
        return Relation("unknown" if newer.may_begin_with(older) else "fork")

    def has_led(self, history: History) -> bool:
        """Whether a step has led to this one, or may have."""
        if history.run != self._newest.run:
            return False
        end = self._last_of.get(history.sessions[-1].id)
        return self.may_begin_with(history) if end is None else history.step <= end

    def may_begin_with(self, history: History) -> bool:
        """Whether a step, of none of these sessions, may be of one that is not known.

        Such a session came before them, and they go on from its last step, or from one
        that came later: so it has at most its number.
        """
        first = next(reversed(self._last_of))
        _, end = self._sessions.above(first)
        is_before = _depth(history) <= _depth(self._newest) - len(self._last_of)
        return is_before and end is not None and history.step <= end


def _depth(history: History) -> int:
    """How many sessions have led to a step."""
    return history.earlier + len(history.sessions)


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
