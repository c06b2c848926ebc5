"""A run in a directory that all processes see: what they do there together."""

import contextlib
import functools as ft
import logging
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

from .._distributed.jax_service import is_alone, is_first
from .._distributed.joint_attempt import Together, together
from .._distributed.process_group import from_first, gather_errors, group_or_solo
from .._errors import CheckpointError, CheckpointNotFoundError
from .._format.manifest import Manifest
from .._format.source import Source
from .._inspecting.inspect_checkpoint import read_manifest
from .._mirroring.mirrors import Mirrors
from .._restoring.restore import Check
from .._saving.save import Alone
from .._steps.retention import Keep
from .._steps.run_steps import may_be_deleted, Run
from .._steps.step_removal import retain
from .._tree.plans.write_plan import WritePlan
from .._types import Layout, PathLike
from .damage_fallback import copies_of, OnDamage, resumed
from .fork_step import check_is_new, fork
from .state_origin import StateOrigin
from .tiers import Copy, Tiers


logger = logging.getLogger("eqx_ckpt")


_T = TypeVar("_T")


class SharedDirectory:
    """The steps of a run and of its mirrors, as all processes of a job see them.

    **Attributes:**

    - `run`: the steps in the directory, and `tiers` with those in the mirrors.
    """

    # Whether each process has to clean up, and to close together with the others.
    is_own = False

    def __init__(self, run: Run, mirrors: Mirrors, timeout: float) -> None:
        self.run = run
        self.tiers = Tiers(run, mirrors.runs)
        self._mirrors = mirrors
        self.timeout = timeout

    def begin(self, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Remove what dead saves have left, and upload what is due.

        Return the config that counts.
        """
        if is_first():
            self.run.clean_up()
        self._mirrors.begin()
        return config

    def call(self, call: str) -> str:
        """The text of a call, for errors when not all processes make it."""
        mirrors = [repr(run.directory) for run in self._mirrors.runs]
        return f"{call} in {' and '.join([self._where(), *mirrors])}"

    def _where(self) -> str:
        return repr(self.run.directory)

    def meet(self, call: str) -> Together | Alone:
        return together(call, self.timeout) or Alone()

    def plan(
        self,
        group: Together | Alone,
        step: int,
        plan: WritePlan,
        metadata: Any,
        origin: StateOrigin,
        layout: Layout,
    ) -> tuple[WritePlan, Any]:
        """What this process saves of a step, and the metadata that count."""
        if is_first():
            plan = plan._replace(history=origin.of_step(step))
        return plan, metadata

    def replaces(self, step: int, damaged: Set[int]) -> bool:
        """Whether the step that was planned replaces what is there."""
        # A restore fell back to an older step, so these may be replaced.
        return step in damaged

    def latest(self) -> int | None:
        return from_first(self.call("latest()"), self.tiers.latest, self.timeout)

    def listed(self, call: str) -> list[int]:
        """The steps that are known, without waiting for a mirror."""

        def listed() -> list[int]:
            # What was seen in the mirrors counts.
            return [*self.run.readable_or_not(), *self.tiers.seen]

        return from_first(f"{call}, the first", listed, self.timeout)

    def restore(
        self,
        step: int | None,
        restored: Callable[[PathLike | Source, int, Check], _T],
        on_damage: OnDamage,
    ) -> tuple[_T, list[int]]:
        """Restore a step, or the newest; return it with those that are passed over."""

        def of_copy(copy: Copy, check: Check) -> _T:
            return restored(self.tiers.path(copy), copy.step, check)

        if step is None or self._mirrors.runs:
            return resumed(self.tiers, step, of_copy, on_damage, self.timeout)
        try:
            return of_copy(Copy(step, 0), None), []
        except CheckpointNotFoundError as e:
            if is_alone():
                raise self.run.missing(step) from e
            raise

    def read_manifest(self, step: int) -> Manifest:
        copy = self.tiers.nearest(step) if self._mirrors.runs else Copy(step, 0)
        return read_manifest(self.tiers.path(copy))

    def steps_between(
        self, call: str, first: int, last: int, check: Callable[[int], None]
    ) -> list[int]:
        """Two steps and those between them; raise what `check` raises of one."""

        def checked() -> list[int]:
            steps = between(self.tiers, first, last)
            for step in steps:
                check(step)
            return steps

        return from_first(call, checked, self.timeout)

    def delete(self, call: str, check: Callable[[], int]) -> int:
        """Delete a step, which `check` returns, in each place; return it."""
        number, problem = gather_errors(call, check, self.timeout)
        if problem is not None:
            raise problem
        assert number is not None
        delete = ft.partial(self.tiers.delete, number)
        from_first(call, delete, self.timeout, so_far=f"{may_be_deleted(number)} ")
        return number

    def fork(self, call: str, path: PathLike, step: int | None) -> None:
        """Begin a run at a path with a step of this one, or with the newest."""

        def forked() -> None:
            new = Run(path)
            runs = [self.run, *self._mirrors.runs]
            check_is_new(new, runs)
            copy = copies_of(self.tiers, step)[-1]
            goes_on = ft.partial(group.goes_on, "forked")
            fork(self.tiers.path(copy), copy.step, new, runs, goes_on)

        with contextlib.closing(group_or_solo(call, self.timeout)) as group:
            so_far = f"Whether there is a run at {path!r} is not known. "
            group.from_first("forked", forked, so_far=so_far)

    def saved(
        self,
        group: Together | Alone,
        step: int,
        keep: Sequence[Keep],
        damaged: set[int],
        *,
        is_last: bool,
    ) -> list[int]:
        """Upload a step that was saved, if it is due; return older ones, now removed.

        Those that are `damaged` stay.
        """

        def tidy_up() -> list[int]:
            self._mirrors.saved(step, is_last=is_last)
            goes_on = ft.partial(group.goes_on, "retained")
            return retain(self.run, keep, damaged, step, goes_on)

        return group.from_first("retained", tidy_up, so_far=so_far(step))

    def make_room(self, keep: Sequence[Keep], damaged: set[int]) -> list[int]:
        """Remove what `keep` does not keep any more, before a save; return it.

        Only the first process does so: the others may not know that it is needed.
        """
        if not is_first():
            return []
        try:
            newest = self.run.newest(damaged)
            if newest is None:
                return []
            return retain(self.run, keep, damaged, newest, lambda: None)
        except (CheckpointError, OSError) as e:
            logger.warning("What `keep` does not keep was not removed: %s", e)
            return []

    def finish(self) -> None:
        """What is left for all processes to do together, before a manager ends."""


def so_far(step: int) -> str:
    return f"Step {step} was saved; whether older steps were removed is not known. "


def between(tiers: Tiers, first: int, last: int) -> list[int]:
    """Two steps and those between them; raise if one of the two is not there."""
    for step in (first, last):
        tiers.nearest(step)
    return [step for step in tiers.steps() if first <= step <= last]
