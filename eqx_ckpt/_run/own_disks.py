"""The steps of a run of which each process of a job has its part on its own disk."""

import contextlib
import functools as ft
import json
import logging
import secrets
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, TypeVar

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
    warn,
)
from .._format.manifest import Manifest
from .._format.run_history import history_from_json, history_to_json, Part
from .._format.source import Source
from .._format.user_metadata import pack, unpack
from .._mirroring.mirrors import Mirrors
from .._restoring.restore import Check
from .._saving.save import Alone
from .._saving.step_part import plan_part
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import PartSource, StepPart
from .._sources.shard_senders import Shard
from .._steps.retention import Keep, KEEP_ALL
from .._steps.run_steps import may_be_deleted, Run
from .._storage.locate import locate
from .._tree.plans.write_plan import WritePlan
from .._types import Layout, PathLike
from .common_steps import CommonSteps
from .damage_fallback import copies_of, OnDamage, tried_last
from .part_repair import PartRepair
from .shared_directory import between, SharedDirectory, so_far
from .state_origin import StateOrigin
from .step_states import WHOLE
from .tiers import Copy, Tiers


logger = logging.getLogger("eqx_ckpt")


_T = TypeVar("_T")


_HINT = (
    "Pass `on_damage='fallback'` to replace what is damaged by what other processes or "
    "the mirror have. If nobody has it, and you did not pass `step`, an older step is "
    "restored then."
)


class OwnDisks(SharedDirectory):
    """A directory of each process, in place of one that all see.

    **Attributes:**

    - `common`: the steps that the parts of all make.
    """

    is_own = True

    def __init__(self, run: Run, mirrors: Mirrors, timeout: float) -> None:
        super().__init__(run, mirrors, timeout)
        self.common = CommonSteps(run.directory)
        self._agreed = Tiers(self.common, mirrors.runs)
        self._is_there = False
        # Others may have seen what this manager saves half-way: it is never useless.
        self._saved: set[int] = set()
        self._passed: set[int] = set()
        # What `make_room` was last called with.
        self._kept: tuple[Sequence[Keep], set[int]] = [KEEP_ALL], set()
        # Whether the last save has not ended well, and what went before the next one.
        self._has_failed = False
        self._cleared: list[int] = []

    def begin(self, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raise on all processes unless each has a directory of its own."""
        group = group_or_solo(self.call("CheckpointManager()"), self.timeout)
        self.common.index, self.common.size = group.index, group.size
        with contextlib.closing(group):
            if not group.has_service:
                raise CheckpointError(
                    "`shared=False` needs JAX's coordination service, which this "
                    "version of JAX does not have where eqx_ckpt knows it."
                )
            check_apart(group, locate(self.run.directory))
            # Each process writes it to its own disk.
            config = group.from_first("config", lambda: config)
        self.run.clean_up()
        return config

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
        return [*self.common.steps(), *self._agreed.seen]

    def _agree(self, call: str) -> None:
        """Find the steps that the parts of all processes make."""

        def combine(topic: str, value: Any, make: Callable[[list[Any]], Any]) -> Any:
            return combined(f"{call}, {topic}", value, make, self.timeout)

        self.common.agree(combine, self.run.readable_or_not)

    def restore(
        self,
        step: int | None,
        restored: Callable[[PathLike | Source, int, Check], _T],
        on_damage: OnDamage,
    ) -> tuple[_T, list[int]]:
        how = "" if step is None else f"step={step}"
        how += "" if on_damage == "raise" else f"on_damage={on_damage!r}"
        call = self.call(f"restore({how})")
        self._agree(call)

        def choose() -> list[Copy]:
            found = copies_of(self._agreed, step)
            return [Copy(n, 0) for n in sorted({copy.step for copy in found})]

        def read(copy: Copy, check: Check) -> _T:
            return restored(
                self._source(copy.step, self._mirrors.runs), copy.step, check
            )

        def again(copy: Copy) -> tuple[_T | None, Exception | None]:
            return self._tried(call, copy.step, restored, self._mirrors.runs)

        likely = self._whole_here() if step is None else None
        copies, tried = tried_last(
            f"{call}, which step", choose, likely, read, again, self.timeout
        )
        passed: dict[int, Exception] = {}
        while True:
            number = copies.pop().step
            (tree, problem), tried = tried, None
            is_damaged = isinstance(problem, CorruptCheckpointError)
            if is_damaged and on_damage == "fallback":
                logger.warning("Step %d is damaged: %s", number, problem)
                tree, problem = self._from_others(call, number, restored, problem)
            if problem is None:
                assert tree is not None
                break
            if is_damaged and on_damage == "raise":
                raise CorruptCheckpointError(f"{problem}\n{_HINT}") from problem
            if not isinstance(problem, CorruptCheckpointError) or not copies:
                raise problem
            passed[number] = problem
            tried = again(copies[-1])
        for newer, why in passed.items():
            warn(f"Step {newer} is damaged, and step {number} was restored: {why}")
        self._passed.update(passed)
        return tree, [*passed]

    def _whole_here(self) -> Copy | None:
        """The newest step of the disks, if each process has an undamaged part."""
        newest = self.common.latest() if self._mirrors.runs else None
        if newest is None or self.common.damage(newest):
            return None
        return Copy(newest, 0) if self.common.is_whole(newest) else None

    def _tried(
        self,
        call: str,
        step: int,
        restored: Callable[[PathLike | Source, int, Check], _T],
        mirrors: Sequence[Run],
    ) -> tuple[_T | None, Exception | None]:
        """Restore a step, or return why that is not possible, on all processes.

        Before, the parts that some of them have lost are made anew.
        """
        if damage := self.common.damage(step):
            return None, CorruptCheckpointError(damage)
        if self.common.is_partial(step):
            self._leave_stale(call, step, mirrors)
        is_whole = self.common.is_whole(step)
        if not is_whole and (why := self._repaired(call, step, (), mirrors)):
            return None, why
        return gather_errors(
            f"{call}, step {step}",
            lambda: restored(self._source(step, mirrors), step, None),
            self.timeout,
        )

    def _leave_stale(self, call: str, step: int, mirrors: Sequence[Run]) -> None:
        """Do without parts of an earlier save than that in the mirrors.

        No disk has the rest of it: they count as if they were lost.
        """

        why = from_first(
            f"{call}, whose parts of step {step}",
            ft.partial(self.common.why_stale, step, mirrors),
            self.timeout,
        )
        if why is not None:
            self.common.note_stale(step, why)

    def _from_others(
        self,
        call: str,
        step: int,
        restored: Callable[[PathLike | Source, int, Check], _T],
        problem: Exception | None,
    ) -> tuple[_T | None, Exception | None]:
        """As `_tried`, once all shards that are damaged have been replaced.

        What no process has is read from the first mirror that has it undamaged.
        """
        runs = self._mirrors.runs
        for first in range(max(1, len(runs))):
            again, mirrors = f"{call}, again, mirror {first}", runs[first:]
            if first and not self._is_in_one(again, step, mirrors):
                break
            damaged, why = gather_errors(
                f"{again}, verify",
                ft.partial(self.common.damaged_shards, step),
                self.timeout,
            )
            why = why or self._repaired(again, step, damaged or (), mirrors)
            tree = None
            if why is None:
                tree, why = self._tried(again, step, restored, mirrors)
            if not isinstance(why, CorruptCheckpointError | CheckpointNotFoundError):
                return tree, why
            if not first and isinstance(why, CorruptCheckpointError):
                problem = why
        return None, problem

    def _is_in_one(self, call: str, step: int, mirrors: Sequence[Run]) -> bool:
        """Whether one of some mirrors has a step."""
        text = f"{call}, who has it"
        has = ft.partial(any, (mirror.has(step) for mirror in mirrors))
        return from_first(text, has, self.timeout)

    def _repaired(
        self, call: str, step: int, damaged: Collection[Shard], mirrors: Sequence[Run]
    ) -> Exception | None:
        """Replace what processes lack of a step; return why that is not possible."""
        text = f"{call}, parts of step {step}"

        def look() -> tuple[StepPart | None, bool]:
            held = self.common.held(step)
            return self.common.part(step), held is not None and held.what != WHOLE

        seen, why = gather_errors(f"{text}, here", look, self.timeout)
        if why is not None:
            return why
        assert seen is not None
        part, overwrite = seen
        find = ft.partial(self._in_mirror, step, mirrors)
        try:
            with contextlib.closing(group_or_solo(text, self.timeout)) as group:
                repair = PartRepair(group, self.run.path(step), part, damaged, find)
                is_there = repair.run(self.timeout, overwrite=overwrite)
        except (CheckpointError, OSError) as e:
            return e
        if is_there:
            self.common.note_whole(step)
        else:
            self.common.forget(step)
        return None

    def _source(self, step: int, mirrors: Sequence[Run]) -> PartSource:
        """A step, of which as much as possible is read here."""

        def open_part() -> StepPart | None:
            is_here = self.common.has_part(step)
            return StepPart(self.run.location(step)) if is_here else None

        def find_whole() -> Checkpoint | None:
            part = open_part()
            like = None if part is None else part.checkpoint.manifest
            return self._in_mirror(step, mirrors, like)

        return PartSource(step, open_part, find_whole)

    def _in_mirror(
        self, step: int, mirrors: Sequence[Run], like: Manifest | None
    ) -> Checkpoint | None:
        """The step in a mirror; of the history of a part, if there is one."""
        for mirror in mirrors:
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
        layout: Layout,
    ) -> tuple[WritePlan, Any]:
        assert isinstance(group, Apart)
        place = f"step {step}, layout={layout!r}"
        _, places = group.agree(place, plan.writes)
        part = plan_part(plan, places, layout)

        def said() -> list[Any]:
            history = json.dumps(history_to_json(origin.of_step(step)))
            return [secrets.token_hex(16), history, pack(metadata)]

        id, history, packed = group.from_first("step", said)
        state = self.common.state(group.combine, step)
        is_step = state is not None and state.is_step and step not in self._passed
        if state is not None and (state.has_whole or is_step):
            raise CheckpointExistsError(
                f"Step {step} exists already in the directories of the processes. "
                "Delete it first, or save another step."
            )
        nbytes = sum(write.record.nbytes for write in part.plan.writes)
        mine = [part.values, self._has_failed or self.common.is_short(nbytes)]
        if group.combine("alike", mine, _check_and_ask):
            self._cleared = self.common.choose_removed(group, self.run, *self._kept)
            self._remove(self._cleared)
        self._has_failed = True
        self._saved.add(step)
        self._is_there = self.common.held(step) is not None
        group.prepare(part.alike, lambda: self._remove([step]))
        planned = part.plan._replace(
            history=history_from_json(json.loads(history)),
            part=Part(id, group.index, group.size),
        )
        return planned, unpack(packed)

    def make_room(self, keep: Sequence[Keep], damaged: set[int]) -> list[int]:
        """Do so when a save is planned: all have to agree on what can go."""
        self._kept = keep, {*damaged}
        return []

    def replaces(self, step: int, damaged: Set[int]) -> bool:
        # A part that other processes lack is no step.
        return self._is_there

    def read_manifest(self, step: int) -> Manifest:
        if self.tiers.nearest(step).tier:
            return super().read_manifest(step)
        return StepPart(self.run.location(step)).manifest

    def steps_between(
        self, call: str, first: int, last: int, check: Callable[[int], None]
    ) -> list[int]:
        self._agree(call)
        find = ft.partial(between, self._agreed, first, last)
        steps = from_first(f"{call}, which steps", find, self.timeout)
        for damage in filter(None, map(self.common.damage, steps)):
            raise CorruptCheckpointError(damage)

        def check_those_here() -> None:
            for step in steps:
                # Of a step that the processes have together, one has a part at least.
                if self.common.has_part(step) or not self.common.has(step):
                    check(step)

        _, problem = gather_errors(f"{call}, each step", check_those_here, self.timeout)
        if problem is not None:
            raise problem
        return steps

    def delete(self, call: str, check: Callable[[], int]) -> int:
        number, problem = gather_errors(call, check, self.timeout)
        if problem is not None:
            raise problem
        assert number is not None
        self._agree(call)
        delete = ft.partial(self._agreed.delete, number)
        so_far = f"{may_be_deleted(number)} "
        from_first(f"{call}, in the mirrors", delete, self.timeout, so_far=so_far)
        self.run.stored.remove([number] if self.common.held(number) else [])
        self.common.forget(number)
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
        self._passed.discard(step)
        useless = self.common.useless - self._saved
        without = damaged | useless
        removed = super().saved(group, step, keep, without, is_last=is_last)

        def left() -> tuple[list[int], list[tuple[int, int]]]:
            ready = self._mirrors.ready(group.new_number)
            return self.run.readable_or_not(), ready

        kept, ready = group.from_first("left", left, so_far=so_far(step))
        # Of useless ones, nobody can make a step. What the first process does not keep,
        # the others do not.
        here = [] if KEEP_ALL in keep else self.run.readable_or_not()
        self._remove(useless | ({*here} - {*kept}))
        self._mirrors.upload_parts(ready, group.again)
        self._has_failed = False
        cleared, self._cleared = self._cleared, []
        return [*removed, *(n for n in cleared if n != step)]

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

    def _remove(self, steps: Collection[int]) -> None:
        """Remove the parts of some steps, if they are here."""
        parts = [step for step in steps if self.common.holds_part(step)]
        self.run.stored.remove([step for step in parts if not self.run.is_read(step)])


def _check_and_ask(said: Sequence[list[Any]]) -> bool:
    """Raise unless all say the same of their leaves; return whether one needs room."""
    check_alike([values for values, _ in said])
    return any(needs_room for _, needs_room in said)
