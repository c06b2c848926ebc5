"""The steps of which the processes of a job have the parts, each on its own disk."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._distributed.process_group import combined
from .._errors import CheckpointError
from .._format.run_history import History, history_from_json, history_to_json
from .._sources.part_source import StepPart
from .._steps.run_steps import Run
from .._types import PathLike


logger = logging.getLogger("eqx_ckpt")


class CommonSteps(Run):
    """The steps that the parts of all processes make, as they last agreed.

    **Attributes:**

    - `listed`: those of which each process has its part, or others have all of it.
    - `partly`: those of which some processes have no part, and the others have parts of
        one save. They may need a mirror.
    """

    def __init__(self, directory: PathLike, timeout: float) -> None:
        super().__init__(directory)
        self.listed: list[int] = []
        self.partly: list[int] = []
        self._timeout = timeout
        self._histories: dict[int, History | None] = {}

    def agree(self, call: str, ids: Mapping[int, str]) -> None:
        """Find the steps; `ids` are those of the parts that this process has."""
        said = {str(step): id for step, id in ids.items()}
        text = f"{call}, the steps of each"
        whole, partly = combined(text, said, _compared, self._timeout)
        self.partly = [step for step, _ in partly]
        self._histories = {}
        if partly:
            covered = [
                [step, self._history_text(step)]
                for step, lacking in partly
                if step in ids and self._covers(step, lacking)
            ]
            text = f"{call}, the parts of each"
            found = combined(text, covered, _first_of_each, self._timeout)
            self._histories = {
                step: history_from_json(json.loads(text)) if text else None
                for step, text in found
            }
        self.listed = sorted([*whole, *self._histories])

    def note(self, step: int, *, is_there: bool) -> None:
        """Note that each process has its part of a step now, or that none has."""
        self.partly = [other for other in self.partly if other != step]
        self.listed = sorted({*self.listed} - {step} | ({step} if is_there else set()))

    def _covers(self, step: int, lacking: Collection[int]) -> bool:
        """Whether other processes have all that some lack."""
        try:
            part = StepPart(self.location(step))
        except (CheckpointError, OSError) as e:
            logger.warning("Step %d of this process cannot be read: %s", step, e)
            return False
        without = {*lacking}
        return all(
            not without.issuperset(processes)
            for holders in part.step.holders.values()
            for _, processes in holders
        )

    def _history_text(self, step: int) -> str:
        history = super().history(step)
        return "" if history is None else json.dumps(history_to_json(history))

    def history(self, step: int) -> History | None:
        return self._histories.get(step) or super().history(step)

    def steps(self) -> list[int]:
        return [*self.listed]

    def readable_or_not(self) -> list[int]:
        return [*self.listed]

    def latest(self) -> int | None:
        return max(self.listed, default=None)

    def has(self, step: int) -> bool:
        return step in self.listed


def _compared(everyone: Sequence[dict[str, str]]) -> list[Any]:
    """The steps that all have, and those of one save, each with who lacks it."""
    whole: list[int] = []
    partly: list[tuple[int, list[int]]] = []
    for step in sorted({int(step) for ids in everyone for step in ids}):
        ids = [of.get(str(step), "") for of in everyone]
        lacking = [i for i, id in enumerate(ids) if not id]
        if not lacking and len({*ids}) == 1:
            whole.append(step)
        elif lacking and len({*ids}) == 2:
            partly.append((step, lacking))
    return [whole, partly]


def _first_of_each(everyone: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    found: dict[int, str] = {}
    for said in everyone:
        for step, text in said:
            found.setdefault(step, text)
    return [*found.items()]
