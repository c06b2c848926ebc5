"""What the disks of the processes of a job have of steps, as all of them agree.

There is one answer for each step. A process that cannot see what its disk has says so,
and all raise: only what is surely absent counts as absent.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._distributed.process_errors import failure_in, to_json, verdict
from .._errors import CheckpointNotFoundError, CorruptCheckpointError
from .._format.run_history import history_to_json
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import StepPart
from .._storage.interface.place import Storage


# What one disk may have of a step: a part of this job; something whose manifest is
# damaged; a whole step; or a part of another job.
PART, DAMAGED, WHOLE, OTHER = "part", "damaged", "whole", "other"


class Held(NamedTuple):
    """What one disk has of a step.

    **Attributes:**

    - `what`: one of the words above.
    - `text`: the id of a part, or how it is damaged.
    """

    what: str
    text: str = ""


# A function that combines messages of all processes, as `Group.combine`: its arguments
# are a topic, the message, and what makes the result of all messages.
Combine: TypeAlias = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class StepState(NamedTuple):
    """What all disks together have of a step.

    **Attributes:**

    - `id`: that of the parts that count; `""` if none do. Other parts are stale.
    - `lacking`: the processes that do not have such a part.
    - `is_covered`: whether the others have all that these lack.
    - `damage`: what is damaged, and where.
    - `has_whole`: whether one of the disks has a whole step.
    - `history`: of the parts that count, if some processes lack them, as JSON.
    """

    id: str
    lacking: list[int]
    is_covered: bool
    damage: str
    has_whole: bool
    history: str

    @property
    def is_step(self) -> bool:
        """Whether it is a step. A damaged one is, too."""
        return self.is_covered or bool(self.damage)


class _Part(NamedTuple):
    """What the processes that have parts of one id say of them."""

    id: str
    lacking: list[int]
    covered: list[bool]
    damage: list[str]
    histories: list[str]


def held_at(place: Storage, process: int, processes: int) -> Held | None:
    """What a disk has of a step; `None` if nothing. Raise if that cannot be seen."""
    try:
        part = Checkpoint(place).manifest.part
    except CheckpointNotFoundError:
        return None
    except CorruptCheckpointError as e:
        return Held(DAMAGED, str(e))
    if part is None:
        return Held(WHOLE)
    is_own = part[1:] == (process, processes)
    return Held(PART, part.id) if is_own else Held(OTHER)


def states_of(
    combine: Combine,
    look: Callable[[], Mapping[int, Held]],
    place_of: Callable[[int], Storage],
) -> tuple[Mapping[int, Held], dict[int, StepState]]:
    """What this process has of steps, and what all have.

    `look` says what is on the disk of this process. What it raises on one process, this
    raises on all.
    """
    here: Mapping[int, Held] = {}

    def look_here() -> list[list[Any]]:
        nonlocal here
        here = look()
        return [[step, *held] for step, held in here.items()]

    everywhere = _of_all(combine, "the steps of each", look_here)
    found: dict[int, list[Held | None]] = {}
    for process, said in enumerate(everywhere):
        for step, what, text in said:
            of_all = found.setdefault(step, [None] * len(everywhere))
            of_all[process] = Held(what, text)
    lacking = {step: _lacking(of_all) for step, of_all in sorted(found.items())}

    def look_closer() -> list[list[Any]]:
        return [
            [step, held.text, *_covers(place_of(step), lacking[step][held.text])]
            for step, held in here.items()
            if held.what == PART and lacking[step][held.text]
        ]

    closer: list[list[Any]] = []
    if any(of_id for of_step in lacking.values() for of_id in of_step.values()):
        closer = _of_all(combine, "the parts of each", look_closer)
    parts = {
        step: {id: _Part(id, of_id, [not of_id], [], []) for id, of_id in of.items()}
        for step, of in lacking.items()
    }
    for process, said in enumerate(closer):
        for step, id, covers, damage, history in said:
            part = parts[step][id]
            part.covered.append(covers)
            part.damage.extend([_on(process, len(closer), damage)] if damage else [])
            part.histories.append(history)
    states = {step: _state(found[step], [*parts[step].values()]) for step in parts}
    return here, states


def _of_all(combine: Combine, topic: str, look: Callable[[], Any]) -> list[Any]:
    """What each process sees; raise if one of them cannot."""
    seen = error = None
    try:
        seen = look()
    except Exception as e:
        error = e
    said = {"error": None if error is None else to_json(error), "seen": seen}
    outcome = combine(
        topic,
        said,
        lambda everyone: {**verdict(everyone), "seen": [of["seen"] for of in everyone]},
    )
    if failure := error or failure_in(outcome):
        raise failure
    return outcome["seen"]


def _lacking(of_all: Sequence[Held | None]) -> dict[str, list[int]]:
    """Of each id, the processes that have no part of it."""
    ids = [held.text if held and held.what == PART else "" for held in of_all]
    return {
        id: [i for i, other in enumerate(ids) if other != id]
        for id in dict.fromkeys(ids)
        if id
    }


def _covers(place: Storage, lacking: Collection[int]) -> list[Any]:
    """Whether other processes have all that some lack; or damage; and the history."""
    try:
        part = StepPart(place)
    except CorruptCheckpointError as e:
        return [False, str(e), ""]
    without = {*lacking}
    covers = all(
        not without.issuperset(processes)
        for holders in part.step.holders.values()
        for _, processes in holders
    )
    history = part.manifest.history
    text = "" if history is None else json.dumps(history_to_json(history))
    return [covers, "", text]


def _state(of_all: Sequence[Held | None], parts: Sequence[_Part]) -> StepState:
    """One answer of what all disks have."""
    damage = [
        _on(process, len(of_all), held.text)
        for process, held in enumerate(of_all)
        if held and held.what == DAMAGED
    ]
    # A save that replaces a step may be killed when some have committed, and others
    # have what was there before. If both are covered, what most have counts.
    covered = [part for part in parts if any(part.covered)]
    rest = [part for part in parts if len(parts) == 1]
    part = min(covered or rest, key=lambda one: len(one.lacking), default=None)
    if part is None:
        part = _Part("", [*range(len(of_all))], [], [], [])
    damage += [] if covered else [text for one in parts for text in one.damage]
    has_whole = any(held and held.what == WHOLE for held in of_all)
    history = next(filter(None, part.histories), "")
    return StepState(
        part.id, part.lacking, bool(covered), "\n".join(damage), has_whole, history
    )


def _on(process: int, processes: int, text: str) -> str:
    return text if processes == 1 else f"On the disk of process {process}: {text}"
