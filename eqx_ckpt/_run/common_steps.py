"""The steps of which the processes of a job have the parts, each on its own disk."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._format.run_history import History, history_from_json
from .._steps.run_steps import Run
from .step_states import Combine, Held, held_at, PART, states_of, StepState


logger = logging.getLogger("eqx_ckpt")


class CommonSteps(Run):
    """The steps that the parts of all processes make, as they last agreed.

    **Attributes:**

    - `index`, `size`: which process this is, and of how many.
    """

    index, size = 0, 1
    # What this process has, and what all have: one value, as saves read it in a thread.
    _agreed: tuple[Mapping[int, Held], Mapping[int, StepState]] = {}, {}

    def agree(self, combine: Combine, listed: Callable[[], list[int]]) -> None:
        """Find the steps, on all processes; raise if one cannot list or read its own.

        `listed` lists those of this process, readable or not.
        """
        self._agreed = self._seen(combine, listed)

    def state(self, combine: Combine, step: int) -> StepState | None:
        """As `agree`, of one step, as it is now; `None` if nobody has any of it."""
        return self._seen(combine, lambda: [step])[1].get(step)

    def _seen(
        self, combine: Combine, listed: Callable[[], list[int]]
    ) -> tuple[Mapping[int, Held], dict[int, StepState]]:
        def look() -> dict[int, Held]:
            found = {step: self.held(step) for step in listed()}
            return {step: held for step, held in found.items() if held}

        return states_of(combine, look, self.location)

    @property
    def _states(self) -> Mapping[int, StepState]:
        return self._agreed[1]

    def held(self, step: int) -> Held | None:
        """What the disk of this process has of a step now."""
        return held_at(self.location(step), self.index, self.size)

    def has_part(self, step: int) -> bool:
        """Whether this process has its part of the step on which all have agreed."""
        state = self._states.get(step)
        if state is None or not state.id:
            return False
        return self.held(step) == (PART, state.id)

    def is_whole(self, step: int) -> bool:
        """Whether each process has its part, or no parts count."""
        state = self._states.get(step)
        return state is None or not state.id or not state.lacking

    def is_partial(self, step: int) -> bool:
        """Whether there are parts of a step, and the others lack too much."""
        state = self._states.get(step)
        return state is not None and bool(state.id) and not state.is_step

    def damage(self, step: int) -> str:
        """What is damaged of the parts of a step, as far as that is known, or `''`."""
        state = self._states.get(step)
        return "" if state is None else state.damage

    @property
    def useless(self) -> set[int]:
        """The steps of which this process has a part, and the others lack too much."""
        here, states = self._agreed
        parts = [step for step, held in here.items() if held.what == PART]
        return {step for step in parts if step in states and not states[step].is_step}

    def why_stale(self, step: int, mirrors: Sequence[Run]) -> str | None:
        """Why the parts of a step are not of the save that the mirrors have.

        `None` if they are; `""` if no mirror has the step.
        """
        own = self.history(step)
        others = {mirror: mirror.history(step) for mirror in mirrors}
        if own in others.values():
            return None
        found = next(((at, of) for at, of in others.items() if of), None)
        if own is None or found is None:
            return ""
        mirror, other = found
        return (
            f"Step {step} of the disks {_in_words(own)}, and not all processes have "
            f"their parts of it. Step {step} in {mirror.directory!r} "
            f"{_in_words(other)}: it is another save, and counts in place of them. "
            "If you want what was on the disks, bring back the disk that is lost, and "
            "restore without `mirror`. To go on from a step before both, pass `step`."
        )

    def note_whole(self, step: int) -> None:
        """Note that each process has its part of a step now."""
        self._note(step, lacking=[], is_covered=True, damage="")

    def note_stale(self, step: int, why: str) -> None:
        """Note that no parts of a step count, and warn of it if the mirrors have it."""
        if why:
            logger.warning("%s", why)
        self._note(step, id="", history="")

    def _note(self, step: int, **now: Any) -> None:
        state = self._states[step]._replace(**now)
        self._agreed = self._agreed[0], {**self._states, step: state}

    def forget(self, step: int) -> None:
        """Forget what was agreed on a step."""
        states = {s: state for s, state in self._states.items() if s != step}
        self._agreed = self._agreed[0], states

    def history(self, step: int) -> History | None:
        state = self._states.get(step)
        if state is not None and state.history:
            return history_from_json(json.loads(state.history))
        return super().history(step)

    def steps(self) -> list[int]:
        return [step for step, state in self._states.items() if state.is_step]

    def readable_or_not(self) -> list[int]:
        return self.steps()

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def has(self, step: int) -> bool:
        state = self._states.get(step)
        return state is not None and state.is_step

    def check(self, step: int) -> None:
        """Raise if no process has anything of a step."""
        if step not in self._states:
            raise self.missing(step)

    def delete(self, step: int) -> None:
        """Delete what this process has of a step; raise if nobody has any of it."""
        self.check(step)
        if self.held(step):
            super().delete(step)


def _in_words(history: History) -> str:
    id, restored, _ = history.sessions[-1]
    begun = "restored none" if restored is None else f"restored step {restored}"
    return f"was saved in session {id}, which {begun}"
