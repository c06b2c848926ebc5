"""The steps of which the processes of a job have the parts, each on its own disk."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._distributed.apart_attempt import Apart
from .._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.chunk_grid import start_of
from .._format.run_history import History, history_from_json
from .._inspecting.inspect_checkpoint import read_all
from .._sources.part_source import StepPart
from .._sources.shard_senders import Shard
from .._steps.retention import Keep
from .._steps.run_steps import Run
from .._steps.step_removal import retain
from .step_states import Combine, Held, held_at, PART, states_of, StepState, WHOLE


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

    def part(self, step: int) -> StepPart | None:
        """The part of this process; `None` if it has none, or one that is damaged."""
        if not self.has_part(step):
            return None
        try:
            return StepPart(self.location(step))
        except (CorruptCheckpointError, CheckpointNotFoundError) as e:
            logger.warning("Step %d of this process cannot be read: %s", step, e)
            return None

    def damaged_shards(self, step: int) -> list[Shard]:
        """The shards of this process that are not what was saved."""
        part, damage = self.part(step), dict[str, str]()
        if part is not None:
            read_all(part.checkpoint, damage)
        leaves = {} if part is None else part.shards
        return [
            (leaf, start_of(region))
            for leaf, shards in leaves.items()
            for region, name in shards
            if name in damage
        ]

    def holds_part(self, step: int) -> bool:
        """Whether the disk of this process has a part of a step, or one is damaged."""
        try:
            held = self.held(step)
        except (CheckpointError, OSError) as e:
            logger.warning("The part of step %d stays, as it is not read: %s", step, e)
            return False
        return held is not None and held.what != WHOLE

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

    def is_short(self, nbytes: int) -> bool:
        """Whether the disk of this process has fewer free bytes, as far as is known."""
        try:
            found = os.statvfs(self.directory)
        except OSError:  # There is nothing yet.
            return False
        return nbytes > found.f_bavail * found.f_frsize

    def choose_removed(
        self, group: Apart, run: Run, keep: Sequence[Keep], damaged: set[int]
    ) -> list[int]:
        """The steps that `keep` does not keep, which the first process has removed.

        Of the others, each process has to have all of its part, as far as can be seen.
        """

        def combine(topic: str, value: Any, make: Callable[[list[Any]], Any]) -> Any:
            return group.combine(f"before, {topic}", value, make)

        self.agree(combine, run.readable_or_not)
        doubtful = [step for step in self.steps() if not self._has_all(step)]
        every = group.combine("doubtful", doubtful, lambda said: sum(said, []))

        def remove() -> list[int]:
            without = {*damaged, *every, *self.useless}
            newest = max({*self.steps()} - without, default=None)
            if newest is None:
                return []
            try:
                return retain(run, keep, without, newest, lambda: None)
            except (CheckpointError, OSError) as e:
                logger.warning("What `keep` does not keep was not removed: %s", e)
                return []

        return group.from_first("room", remove)

    def _has_all(self, step: int) -> bool:
        """Whether this process has its part of a step, with all of its files."""
        try:
            return self.has_part(step) and not self.stored.problem(step)
        except (CheckpointError, OSError):
            return False

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
