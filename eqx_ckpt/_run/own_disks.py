"""The steps of a run of which each process of a job has its part on its own disk."""

import contextlib
import functools as ft
import json
import logging
import secrets
import warnings
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from jaxtyping import PyTree

from .._distributed.apart_attempt import Apart, check_alike
from .._distributed.joint_attempt import Together
from .._distributed.process_group import from_first, gather_errors, group_or_solo
from .._distributed.shared_place import check_apart
from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.chunk_grid import start_of
from .._format.manifest import Manifest
from .._format.run_history import history_from_json, history_to_json, Part
from .._format.source import Source
from .._format.user_metadata import exactly, pack, unpack
from .._inspecting.inspect_checkpoint import read_all
from .._mirroring.mirrors import Mirrors
from .._saving.save import Alone, Save
from .._saving.step_part import plan_part
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import PartSource, StepPart
from .._sources.shard_senders import Shard
from .._steps.retention import Keep
from .._steps.run_steps import Run
from .._storage.locate import locate
from .._tree.plans.write_plan import compressed, WritePlan
from .._types import PathLike
from .common_steps import CommonSteps
from .damage_fallback import copies_of, OnDamage
from .part_repair import PartRepair
from .shared_directory import How, SharedDirectory, so_far
from .state_origin import StateOrigin
from .tiers import Tiers


logger = logging.getLogger("eqx_ckpt")


_HINT = (
    "Pass `on_damage='fallback'` to replace what is damaged by what other processes or "
    "the mirror have. If nobody has it, and you did not pass `step`, an older step is "
    "restored then."
)


# What is where a part of a step would be.
_WHOLE, _STALE = "a whole step", "no part of a step of this job"


class OwnDisks(SharedDirectory):
    """A directory of each process, in place of one that all see.

    **Attributes:**

    - `common`: the steps that the parts of all make.
    - `useless`: parts of this process of which other processes do not have theirs.
    """

    is_own = True

    def __init__(self, run: Run, mirrors: Mirrors, timeout: float) -> None:
        super().__init__(run, mirrors, timeout)
        self.common = CommonSteps(run.directory, timeout)
        self.useless: set[int] = set()
        self._agreed = Tiers(self.common, mirrors.runs)
        self._index, self._size = 0, 1
        self._is_there = False
        self._passed: set[int] = set()

    def begin(self) -> None:
        """Raise on all processes unless each has a directory of its own."""
        group = group_or_solo(self.call("CheckpointManager()"), self.timeout)
        self._index, self._size = group.index, group.size
        with contextlib.closing(group):
            if not group.has_service:
                raise CheckpointError(
                    "`shared=False` needs JAX's coordination service, which this "
                    "version of JAX does not have where eqx_ckpt knows it."
                )
            check_apart(group, locate(self.run.directory))
        self.run.clean_up()

    def _where(self) -> str:
        return "directories of their own"

    def meet(self, call: str) -> Apart:
        return Apart(group_or_solo(call, self.timeout))

    def latest(self) -> int | None:
        call = self.call("latest()")
        self._agree(call)
        return from_first(call, self._agreed.latest, self.timeout)

    def listed(self, call: str) -> list[int]:
        self._agree(call)
        return [*self.common.listed, *self._agreed.seen]

    def _agree(self, call: str) -> None:
        """Find the steps that the parts of all processes make."""
        ids: dict[int, str] = {}
        try:
            for step in self.run.readable_or_not():
                if id := self._id(step):
                    ids[step] = id
        except (OSError, CheckpointError) as e:
            logger.warning("The steps of this process cannot be listed: %s", e)

        self.common.agree(call, ids)
        self.useless = {*ids} - {*self.common.listed}

    def _id(self, step: int) -> str:
        """The id of a step of which this process has its part, or `''`."""
        try:
            part = Checkpoint(self.run.location(step)).manifest.part
        except (OSError, CheckpointError) as e:
            if not isinstance(e, CheckpointNotFoundError):
                logger.warning("Step %d of this process cannot be read: %s", step, e)
            return ""
        return part.id if part and part[1:] == (self._index, self._size) else ""

    def restore(
        self,
        step: int | None,
        restored: Callable[[PathLike | Source, int], PyTree],
        on_damage: OnDamage,
    ) -> tuple[PyTree, list[int]]:
        how = "" if step is None else f"step={step}"
        how += "" if on_damage == "raise" else f"on_damage={on_damage!r}"
        call = self.call(f"restore({how})")
        self._agree(call)

        def choose() -> list[int]:
            return sorted({copy.step for copy in copies_of(self._agreed, step)})

        numbers = from_first(f"{call}, which step", choose, self.timeout)
        passed: dict[int, Exception] = {}
        while True:
            number = numbers.pop()
            tree, problem = self._tried(call, number, restored)
            is_damaged = isinstance(problem, CorruptCheckpointError)
            if is_damaged and on_damage == "fallback":
                again = f"{call}, again"
                tree, found = self._tried_again(again, number, restored)
                is_gone = isinstance(found, CheckpointNotFoundError)
                problem = problem if is_gone else found
            if problem is None:
                break
            if is_damaged and on_damage == "raise":
                raise CorruptCheckpointError(f"{problem}\n{_HINT}") from problem
            if not is_damaged or not numbers:
                raise problem
            passed[number] = problem
        for newer, why in passed.items():
            warnings.warn(
                f"Step {newer} is damaged, and step {number} was restored: {why}",
                stacklevel=3,
            )
        self._passed.update(passed)
        return tree, [*passed]

    def _tried(
        self, call: str, step: int, restored: Callable[[PathLike | Source, int], PyTree]
    ) -> tuple[PyTree, Exception | None]:
        """Restore a step, or return why that is not possible, on all processes.

        Before, the parts that some of them have lost are made anew.
        """
        if step in self.common.partly and (why := self._repaired(call, step, ())):
            return None, why
        return gather_errors(
            f"{call}, step {step}",
            lambda: restored(self._source(step), step),
            self.timeout,
        )

    def _tried_again(
        self, call: str, step: int, restored: Callable[[PathLike | Source, int], PyTree]
    ) -> tuple[PyTree, Exception | None]:
        """As `_tried`, once all shards that are damaged have been replaced."""
        damaged, why = gather_errors(
            f"{call}, verify", lambda: self._damaged(step), self.timeout
        )
        why = why or self._repaired(call, step, damaged or ())
        return (None, why) if why else self._tried(call, step, restored)

    def _repaired(
        self, call: str, step: int, damaged: Collection[Shard]
    ) -> Exception | None:
        """Replace what processes lack of a step; return why that is not possible."""
        part = self._part(step)
        overwrite = self._there(step) not in ("", _WHOLE)
        text = f"{call}, parts of step {step}"
        find = ft.partial(self._in_mirror, step)
        try:
            with contextlib.closing(group_or_solo(text, self.timeout)) as group:
                repair = PartRepair(group, self.run.path(step), part, damaged, find)
                is_there = repair.run(self.timeout, overwrite=overwrite)
        except (CheckpointError, OSError) as e:
            return e
        self.common.note(step, is_there=is_there)
        return None

    def _part(self, step: int) -> StepPart | None:
        if not self._id(step):
            return None
        try:
            return StepPart(self.run.location(step))
        except (CheckpointError, OSError) as e:
            logger.warning("Step %d of this process cannot be read: %s", step, e)
            return None

    def _damaged(self, step: int) -> list[Shard]:
        """The shards of this process that are not what was saved."""
        part, damage = self._part(step), dict[str, str]()
        if part is not None:
            read_all(part.checkpoint, damage)
        leaves = {} if part is None else part.shards
        return [
            (leaf, start_of(region))
            for leaf, shards in leaves.items()
            for region, name in shards
            if name in damage
        ]

    def _source(self, step: int) -> PartSource:
        """A step, of which as much as possible is read here."""

        def open_part() -> StepPart | None:
            is_here = self.common.has(step)
            return StepPart(self.run.location(step)) if is_here else None

        def find_whole() -> Checkpoint | None:
            part = open_part()
            like = None if part is None else part.checkpoint.manifest
            return self._in_mirror(step, like)

        return PartSource(step, open_part, find_whole)

    def _in_mirror(self, step: int, like: Manifest | None) -> Checkpoint | None:
        """The step in a mirror; of the history of a part, if there is one."""
        for mirror in self._mirrors.runs:
            try:
                found = Checkpoint(mirror.location(step))
            except CheckpointNotFoundError:
                continue
            manifest = found.manifest
            is_same = like is None or manifest.history == like.history
            if manifest.part is None and is_same:
                return found
        return None

    def plan(
        self,
        group: Together | Alone,
        step: int,
        plan: WritePlan,
        metadata: Any,
        origin: StateOrigin,
        how: How,
    ) -> Save:
        """The save of the part of this process."""
        assert isinstance(group, Apart)
        if how.compression is not None:
            plan = plan._replace(writes=compressed(plan.writes, how.compression))
        place = f"step {step}, layout={how.layout!r}"
        _, places = group.agree(place, plan.writes)
        part = plan_part(plan, places, how.layout)

        def said() -> list[Any]:
            history = json.dumps(history_to_json(origin.of_step(step)))
            return [secrets.token_hex(16), history, pack(exactly(metadata))]

        id, history, packed = group.from_first("step", said)
        here = self._there(step)

        def check(there: Sequence[Sequence[Any]]) -> None:
            check_alike([values for _, values in there])
            found = {state for state, _ in there}
            parts = found - {"", _STALE, _WHOLE}
            is_one = parts and (found == parts or self.common.has(step))
            is_step = is_one and len(parts) == 1 and step not in self._passed
            if _WHOLE in found or is_step:
                raise CheckpointExistsError(
                    f"Step {step} exists already in the directories of the processes. "
                    "Delete it first, or save another step."
                )

        group.combine("there", [here, part.values], check)
        self._is_there = here != ""
        group.prepare(part.alike, lambda: self._remove([step]))
        planned = part.plan._replace(
            history=history_from_json(json.loads(history)),
            part=Part(id, self._index, self._size),
        )
        path, metadata = self.run.path(step), unpack(packed)
        return Save(path, planned, None, metadata, how.layout, how.progress)

    def replaces(self, step: int, damaged: Set[int]) -> bool:
        # A part that other processes lack is no step.
        return self._is_there

    def read_manifest(self, step: int) -> Manifest:
        if self.tiers.nearest(step).tier:
            return super().read_manifest(step)
        return StepPart(self.run.location(step)).manifest

    def delete(self, call: str, check: Callable[[], int]) -> int:
        number = super().delete(call, check)
        self._remove([number])
        return number

    def fork(self, call: str, path: PathLike, step: int | None) -> None:
        raise CheckpointError(
            "With `shared=False`, no process sees a step whole: fork one of the "
            "mirror, by a manager of that, which leaves `shared=False` out."
        )

    def saved(
        self,
        group: Together | Alone,
        step: int,
        keep: Sequence[Keep],
        damaged: set[int],
        *,
        is_last: bool,
    ) -> list[int]:
        assert isinstance(group, Apart)
        self.useless.discard(step)
        self._passed.discard(step)
        without = damaged | self.useless
        removed = super().saved(group, step, keep, without, is_last=is_last)

        def left() -> tuple[list[int], list[tuple[int, int]]]:
            ready = self._mirrors.ready(group.new_number)
            here = self.run.readable_or_not()
            return [number for number in here if number not in self.useless], ready

        kept, ready = group.from_first("left", left, so_far=so_far(step))
        # Of the others, nobody can make a step, nor of those that the first one lacks.
        here = self.run.readable_or_not()
        self._remove([number for number in here if number not in kept])
        self._mirrors.upload_parts(ready, group.again)
        return removed

    def finish(self) -> None:
        """Let all processes upload the newest step that is due."""
        self._mirrors.wait()
        call = self.call("close()")
        try:
            with contextlib.closing(group_or_solo(call, self.timeout)) as group:
                ready = ft.partial(self._mirrors.ready, group.new_number)
                chosen = group.from_first("uploads", ready)
                self._mirrors.upload_parts(chosen, group.again)
        except CheckpointError as e:
            logger.warning("The last step may not be in the mirror: %s", e)

    def _there(self, step: int) -> str:
        """The id of a part that this process has of a step, or what is there."""
        try:
            part = Checkpoint(self.run.location(step)).manifest.part
        except CorruptCheckpointError:
            return _STALE
        except (OSError, CheckpointError):
            return ""
        if part is None:
            return _WHOLE
        return part.id if part[1:] == (self._index, self._size) else _STALE

    def _remove(self, steps: Collection[int]) -> None:
        """Remove the parts of some steps, if they are here."""
        here = [s for s in steps if self._there(s) not in ("", _WHOLE)]
        self.run.stored.remove([step for step in here if not self.run.is_read(step)])
