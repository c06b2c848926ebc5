"""The steps of a run of which each process of a job has its part on its own disk."""

import contextlib
import functools as ft
import json
import logging
import secrets
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from jaxtyping import PyTree

from .._distributed.apart_attempt import Apart, check_alike
from .._distributed.joint_attempt import Together
from .._distributed.process_group import (
    combined,
    from_first,
    gather_errors,
    group_or_solo,
)
from .._distributed.shared_place import check_apart
from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.manifest import Manifest
from .._format.run_history import history_from_json, history_to_json, Part
from .._format.source import Source
from .._format.user_metadata import exactly, pack, unpack
from .._mirroring.mirrors import Mirrors
from .._saving.save import Alone, Save
from .._saving.step_part import plan_part
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import PartSource, StepPart
from .._steps.retention import Keep
from .._steps.run_steps import Run
from .._storage.locate import locate
from .._tree.plans.write_plan import compressed, WritePlan
from .._types import PathLike
from .damage_fallback import copies_of, OnDamage
from .shared_directory import How, SharedDirectory, so_far
from .state_origin import StateOrigin
from .tiers import Tiers


logger = logging.getLogger("eqx_ckpt")


# What is where a part of a step would be.
_WHOLE, _STALE = "a whole step", "no part of a step of this job"


class CommonSteps(Run):
    """The steps of which every process has its part, as the processes last agreed."""

    def __init__(self, directory: PathLike) -> None:
        super().__init__(directory)
        self.listed: list[int] = []

    def steps(self) -> list[int]:
        return [*self.listed]

    def readable_or_not(self) -> list[int]:
        return [*self.listed]

    def latest(self) -> int | None:
        return max(self.listed, default=None)

    def has(self, step: int) -> bool:
        return step in self.listed


class OwnDisks(SharedDirectory):
    """A directory of each process, in place of one that all see.

    **Attributes:**

    - `common`: the steps of which all have their parts.
    - `useless`: parts of this process of which other processes do not have theirs.
    """

    is_own = True

    def __init__(self, run: Run, mirrors: Mirrors, timeout: float) -> None:
        super().__init__(run, mirrors, timeout)
        self.common = CommonSteps(run.directory)
        self.useless: set[int] = set()
        self._agreed = Tiers(self.common, mirrors.runs)
        self._index, self._size = 0, 1
        self._is_there = False

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
        """Find the steps of which each process has its part of the same save."""
        ids: dict[str, str] = {}
        try:
            for step in self.run.readable_or_not():
                if id := self._id(step):
                    ids[str(step)] = id
        except (OSError, CheckpointError) as e:
            logger.warning("The steps of this process cannot be listed: %s", e)

        def common(everyone: Sequence[dict[str, str]]) -> list[int]:
            first, *others = everyone
            return sorted(
                int(step)
                for step, id in first.items()
                if all(other.get(step) == id for other in others)
            )

        text = f"{call}, the steps of each"
        self.common.listed = combined(text, ids, common, self.timeout)
        self.useless = {*map(int, ids)} - {*self.common.listed}

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
        if on_damage != "raise":
            raise ValueError(
                "With `shared=False`, what is damaged in the directory of a process is "
                "read from the mirror. If it has no copy, pass an older `step`."
            )
        call = self.call(f"restore({'' if step is None else f'step={step}'})")
        self._agree(call)

        def choose() -> int:
            return copies_of(self._agreed, step)[-1].step

        number = from_first(f"{call}, which step", choose, self.timeout)
        tree, problem = gather_errors(
            f"{call}, step {number}",
            lambda: restored(self._source(number), number),
            self.timeout,
        )
        if problem is not None:
            raise problem
        return tree, []

    def _source(self, step: int) -> PartSource:
        """A step, of which as much as possible is read here."""
        part = None
        if self._id(step):
            try:
                part = StepPart(self.run.location(step))
            except (CheckpointError, OSError) as e:
                logger.warning("Step %d is read from the mirror: %s", step, e)

        def find_whole() -> Checkpoint | None:
            for mirror in self._mirrors.runs:
                try:
                    found = Checkpoint(mirror.location(step))
                except CheckpointNotFoundError:
                    continue
                manifest = found.manifest
                is_same = part is None or manifest.history == part.manifest.history
                if manifest.part is None and is_same:
                    return found
            return None

        if part is not None and not self.common.has(step) and find_whole() is None:
            part = None
        return PartSource(step, part, find_whole)

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
        owned, places = group.agree(place, plan.writes)
        part = plan_part(plan, owned, places, how.layout)

        def said() -> list[Any]:
            history = json.dumps(history_to_json(origin.of_step(step)))
            return [secrets.token_hex(16), history, pack(exactly(metadata))]

        id, history, packed = group.from_first("step", said)
        here = self._there(step)

        def check(there: Sequence[Sequence[Any]]) -> None:
            check_alike([values for _, values in there])
            found = [state for state, _ in there]
            if _WHOLE in found or len({*found}) == 1 and found[0] not in ("", _STALE):
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
        without = damaged | self.useless
        removed = super().saved(group, step, keep, without, is_last=is_last)

        def left() -> tuple[list[int], list[tuple[int, int]]]:
            ready = self._mirrors.ready(group.new_number)
            return self.run.readable_or_not(), ready

        kept, ready = group.from_first("left", left, so_far=so_far(step))
        # Nobody can restore a part of which the first process does not have its own.
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
