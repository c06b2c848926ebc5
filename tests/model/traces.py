"""Whether the code, in a simulation, did only what its model can do."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from .checker import Model, State


_Stored = TypeVar("_Stored")


class Sight(NamedTuple, Generic[_Stored]):
    """What can be seen.

    - `there`: of what is stored.
    - `said`: of what each actor has reported; `""` while it has not. It may report
        later what it knows.
    """

    there: _Stored
    said: tuple[str, ...]


class Follower(Generic[_Stored]):
    """Follows what was seen of the code in the states of a model.

    It begins in `start`. `see` is what can be seen of a state, and `shows` whether a
    model that stores this may be seen as that. States have numbers here, and the steps
    from each are kept.
    """

    def __init__(
        self,
        model: Model,
        start: State,
        see: Callable[[State], Sight[_Stored]],
        shows: Callable[[_Stored, _Stored], bool],
    ) -> None:
        self._model = model
        self._see = see
        self._shows = shows
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._sights: list[Sight[_Stored]] = []
        self._after: dict[int, list[int]] = {}
        self._number(start)

    def follow(self, seen: Sequence[Sight[_Stored]]) -> int:
        """How many of the sights in a row the model can show; all, if it does the same.

        From one to the next, the model may take one step, and before it any that look
        like no change.
        """
        states = {0}
        for count, sight in enumerate(seen):
            todo = [one for one in states if self._shows_there(one, sight)]
            states = {*todo}
            changed: set[int] = set()
            for state in todo:  # It grows.
                for after in self._steps(state):
                    if after in states:
                        continue
                    if self._shows_there(after, sight):
                        states.add(after)
                        todo.append(after)
                    else:
                        changed.add(after)
            states = {one for one in states if self._has_said(one, sight)}
            if not states:
                return count
            states |= {
                after
                for one in states
                for after in self._after[one]
                if after in changed
            }
        return len(seen)

    def _shows_there(self, state: int, sight: Sight[_Stored]) -> bool:
        return self._shows(self._sights[state].there, sight.there)

    def _has_said(self, state: int, sight: Sight[_Stored]) -> bool:
        known = self._sights[state].said
        return all(one in ("", of) for one, of in zip(sight.said, known, strict=True))

    def _steps(self, state: int) -> list[int]:
        if state not in self._after:
            steps = self._model.steps(self._states[state])
            self._after[state] = [self._number(step.after) for step in steps]
        return self._after[state]

    def _number(self, state: State) -> int:
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._sights.append(self._see(state))
        return self._numbers[state]


class Trace(Generic[_Stored]):
    """What was seen of the code, one after another.

    **Attributes:**

    - `sights`: each that differs from the one before.
    """

    def __init__(self) -> None:
        self.sights: list[Sight[_Stored]] = []

    def note(self, sight: Sight[_Stored]) -> None:
        if self.sights[-1:] != [sight]:
            self.sights.append(sight)

    def check(
        self, follower: Follower[_Stored], what: str, notes: Sequence[str]
    ) -> None:
        """Raise unless the model can do the same; `what` says of which schedule."""
        right = follower.follow(self.sights)
        lines = [f"{what}: the model cannot do what comes next."]
        for i, sight in enumerate(self.sights):
            lines.append(f"{'!' if i == right else ' '} {sight}")
        assert right == len(self.sights), "\n".join([*lines, *notes])
