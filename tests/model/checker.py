"""Check a protocol in every order of its steps, breadth first.

A protocol is a `Model`: what its states are, which atomic steps each state allows, and
what must be true. The checker visits every state that can be reached. If one is wrong,
the steps that lead there, which are as few as possible, are the counterexample.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeAlias


State: TypeAlias = Any


class Step(NamedTuple):
    """One atomic step: a system call, a request or a message, and what is after it."""

    words: str
    after: State


class Model:
    """A protocol in one scene: which actors there are, and what may fail.

    **Attributes:**

    - `name`: how the page names it.
    - `scenes`: what there is to check, each by a sentence.
    - `guards`: the rules that keep it right, which can be removed one by one: for each,
        the scene that shows what goes wrong without it, and a sentence.
    """

    name: ClassVar[str]
    scenes: ClassVar[dict[str, str]]
    guards: ClassVar[dict[str, tuple[str, str]]]

    def __init__(self, scene: str, without: Collection[str] = ()) -> None:
        assert scene in self.scenes, scene
        assert {*without} <= self.guards.keys(), without
        self.scene = scene
        self.kept = self.guards.keys() - {*without}

    def keeps(self, guard: str) -> bool:
        """Whether a guard is there."""
        assert guard in self.guards, guard
        return guard in self.kept

    def start(self) -> State:
        raise NotImplementedError

    def steps(self, state: State, /) -> Iterator[Step]:
        """Every step that anybody can take."""
        raise NotImplementedError

    def problem(self, state: State, /) -> str:
        """What is wrong with a state, in a sentence, or `""`."""
        raise NotImplementedError

    def alone(self, state: State, /) -> Iterable[tuple[str, State]]:
        """For each actor that must end: all others die, and nothing fails."""
        return ()

    def has_ended(self, actor: str, state: State, /) -> bool:
        """Whether this actor has an outcome."""
        raise NotImplementedError


@dataclasses.dataclass
class Found:
    """What a check has found.

    **Attributes:**

    - `states`, `steps`: how many were visited.
    - `problem`: what is wrong, or `""`; `trace` leads there.
    """

    states: int
    steps: int
    problem: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.problem:
            return f"{self.states:,} states, {self.steps:,} steps: nothing is wrong."
        lines = [f"{i:3}. {words}" for i, words in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"  => {self.problem}"])


def check(model: Model) -> Found:
    """Visit every state; stop at the first that is wrong."""
    start = model.start()
    # How each state was first reached: from which one, and by which step.
    came: dict[Hashable, tuple[State, str] | None] = {start: None}
    level, steps = [start], 0
    endings = _Endings(model)
    while level:
        following: list[State] = []
        for state in level:
            problem, more = model.problem(state), ()
            if not problem:
                problem, more = endings.problem(state)
            if problem:
                trace = (*_trace(came, state), *more)
                return Found(len(came), steps, problem, trace)
            for words, after in model.steps(state):
                steps += 1
                if after not in came:
                    came[after] = state, words
                    following.append(after)
        level = following
    return Found(len(came), steps)


def _trace(came: dict[Hashable, Any], state: State) -> list[str]:
    words: list[str] = []
    while (before := came[state]) is not None:
        state = before[0]
        words.append(before[1])
    return words[::-1]


class _Endings:
    """Whether an actor that is left alone ends: it neither stops nor circles."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._end: set[tuple[str, State]] = set()

    def problem(self, state: State) -> tuple[str, tuple[str, ...]]:
        for actor, alone in self._model.alone(state):
            if (actor, alone) not in self._end:
                found = self._follow(actor, alone)
                if found is not None:
                    first = f"All but {actor} die; from here on, nothing fails"
                    return f"{actor} never ends.", (first, *found)
        return "", ()

    def _follow(self, actor: str, start: State) -> tuple[str, ...] | None:
        """The steps to a state that `actor` does not leave, or to one that returns."""
        path: list[tuple[State, str, Iterator[Step]]] = []
        on_path: set[State] = set()

        def enter(state: State, words: str) -> None:
            path.append((state, words, self._model.steps(state)))
            on_path.add(state)

        def words_of(last: str) -> tuple[str, ...]:
            return (*(words for _, words, _ in path[1:]), last)

        if self._model.has_ended(actor, start):
            return None
        enter(start, "")
        moved = False
        while path:
            state, _, steps = path[-1]
            step = next(steps, None)
            if step is None:
                if not moved:
                    return words_of("nothing more can happen")
                on_path.discard(state)
                self._end.add((actor, state))
                path.pop()
                continue
            moved = True
            if self._model.has_ended(actor, step.after):
                continue
            if step.after in on_path:
                return words_of(f"{step.words}, and so on for ever")
            if (actor, step.after) not in self._end:
                moved = False
                enter(step.after, step.words)
        return None
