"""The checkpoints of one training run."""

import contextlib
import functools as ft
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, SupportsIndex

from jaxtyping import PyTree

from .._distributed.jax_service import is_first
from .._distributed.joint_attempt import Together
from .._distributed.meeting import check_timeout, TIMEOUT
from .._distributed.process_group import most_said
from .._errors import besides, CheckpointError, CorruptCheckpointError
from .._format.manifest import Manifest
from .._format.source import Source
from .._format.user_metadata import exactly
from .._inspecting.audit import Audit, check_like, damaged, replay
from .._mirroring.mirror import Mirror
from .._mirroring.mirrors import Mirrors
from .._progress import check_progress, Progress
from .._restoring.restore import Check, Means, Restored, restored
from .._saving.background_save import (
    pending_saves,
    raise_pending_failure,
    saves_of,
)
from .._saving.finite_check import FiniteCheck
from .._saving.save import Alone, Save, save_in_background
from .._saving.staging import checked_limit
from .._steps.retention import checked_keep, Keep, Mode
from .._steps.run_config import checked_config, GivenConfig
from .._steps.run_steps import as_step, in_words, Run
from .._steps.run_sweeps import RunSweeps
from .._steps.save_times import (
    caught_sigterm,
    checked_when,
    is_due,
    stop_watching,
    When,
)
from .._steps.save_when_idle import note_save
from .._steps.step_before import StepBefore
from .._steps.step_removal import KnownSteps, what_keep_frees
from .._storage.calls.garbage_collector import collector_paused
from .._storage.calls.threads import ForkedLock
from .._storage.interface.base import Base
from .._storage.interface.place import check_layout, check_shares
from .._tree.leaves.casting import Casting
from .._tree.leaves.filter_spec import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
)
from .._tree.leaves.frozen_spec import check_frozen
from .._tree.plans.read_plan import (
    Mismatched,
    Missing,
    plan_reads,
    Request,
    Unexpected,
)
from .._tree.plans.write_plan import (
    check_compression,
    Compression,
    plan_writes,
    Write,
)
from .._tree.transform.transform_argument import Transform
from .._types import check_flag, check_function, IsLeaf, Layout, PathLike
from .damage_fallback import check_on_damage, OnDamage
from .failed_saves import FailedSaves, OnError
from .own_disks import OwnDisks
from .shared_directory import SharedDirectory
from .state_origin import StateOrigin


class CheckpointManager:
    """Saves the steps of a training run, removes old steps, and resumes the run.

    Each step is a checkpoint of its own, such as `directory/000100`. The manager lists
    the directory each time: it has no index that could disagree with the disk. Several
    managers may use one directory. A new manager removes the remains of saves that were
    killed. Use it in a `with` statement, whose end waits for the last save, and raises
    if that save failed.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        state = {"w": jnp.zeros(3), "step": 0}
        keep = [eqx_ckpt.keep_last(2), eqx_ckpt.keep_best("loss", 1)]
        with eqx_ckpt.CheckpointManager("runs/a", keep=keep) as manager:
            if manager.latest() is not None:
                state = manager.restore(state)
            for step in range(state["step"] + 1, 501):
                state = {"w": state["w"] + 1, "step": step}
                if step % 100 == 0:
                    manager.save(step, state, metadata={"loss": 1 / step})
        assert manager.steps() == [400, 500]
        ```
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: Keep | Sequence[Keep] | None = None,
        when: When | Sequence[When] | None = None,
        layout: Layout = "zarr",
        compression: Compression = None,
        progress: Progress = False,
        staging_bytes: int | None = None,
        timeout: float = TIMEOUT,
        check_finite: bool = False,
        incremental: bool = False,
        frozen: PyTree = None,
        mirror: Mirror | Sequence[Mirror] | None = None,
        on_error: OnError = "raise",
        max_failures: int | None = None,
        shared: bool = True,
        config: dict[str, Any] | None = None,
    ) -> None:
        """**Arguments:**

        - `directory`: the directory of the run; the first save creates it. Or a
            location in an object store, as in [`eqx_ckpt.tree_serialise_leaves`][].
        - `keep`: which steps to keep after each save: [`eqx_ckpt.keep_last`][],
            [`eqx_ckpt.keep_every`][], [`eqx_ckpt.keep_best`][], or any other function
            from `{step: metadata}` to steps. Of several functions, each keeps its own
            steps; by default, all are kept. The newest step, the step just saved, and a
            step that this process is reading are never removed.
        - `when`: when `should_save` returns `True`: [`eqx_ckpt.save_every_steps`][],
            [`eqx_ckpt.save_every_seconds`][], [`eqx_ckpt.save_when_idle`][], or any
            other function `(step, last) -> bool`, where `last` is the newest step that
            exists or is being saved, or `None`. Of several, one `True` is enough.
        - `layout`, `compression`, `staging_bytes`: for saves, as in
            [`eqx_ckpt.tree_serialise_leaves_async`][].
        - `progress`, `timeout`: for saves, as in [`eqx_ckpt.tree_serialise_leaves`][],
            and for restores, as in [`eqx_ckpt.tree_deserialise_leaves`][].
        - `check_finite`: refuse to save a step with NaNs (or NaTs, among dates) or
            infinities. The error names the leaves, and is raised like other errors of a
            background save.
        - `incremental`: share what has not changed with the newest step, as with the
            `base` of [`eqx_ckpt.tree_serialise_leaves`][]. Any step may be deleted.
            What has not changed is not uploaded to a `mirror` again, either.
        - `frozen`: which leaves of the trees do not change between the steps, as in
            [`eqx_ckpt.tree_serialise_leaves`][]. Only with `incremental=True`.
        - `mirror`: an [`eqx_ckpt.Mirror`][], to which steps are uploaded in the
            background; or several. `keep` does not remove a step that is being
            uploaded, or is next. In a job, process 0 uploads.
        - `on_error`: what happens when a save fails, in the call or in the background.
            `"raise"`: its error is raised, as `save` says. `"warn"`: it is logged as a
            warning, and the training goes on. Its future raises all the same, and the
            step counts for `when`, so that the next try is as far away as any save.
            `close` raises the error of the last save. What is wrong with the arguments
            is raised in any case.
        - `max_failures`: so many failures in a row are survived with
            `on_error="warn"`; the next one is raised. By default, 3.
        - `shared`: in a job of several processes, whether all of them see `directory`.
            With `False`, each passes a directory of its own, such as on a disk of its
            machine: it saves its shards there, and uploads its part of each step to
            the `mirror`, which all see. All processes have to create the manager, and
            close it, at the same time.
        - `config`: of the training, such as its hyperparameters: a dictionary with
            string keys, of strings, finite numbers, bools, `None`, lists and such
            dictionaries. It is written once, beside the steps, and again when it has
            changed: see `read_config`. In a job, that of process 0 counts.
        """
        self._run = Run(directory)
        self._when = checked_when(when)
        check_layout(layout)
        check_compression(compression)
        check_progress(progress)
        self._staging_bytes = checked_limit(staging_bytes)
        check_timeout(timeout)
        check_flag("check_finite", check_finite)
        check_flag("incremental", incremental)
        if incremental:
            check_shares("incremental", layout)
        if frozen is not None:
            check_frozen(frozen)
            if not incremental:
                raise ValueError(
                    "`frozen` is for `incremental=True`: pass that, or leave `frozen` "
                    "out."
                )
        check_flag("shared", shared)
        config = checked_config(config)
        self._frozen = frozen
        self._layout: Layout = layout
        self._compression: Compression = compression
        self._progress: Progress = progress
        self._check_finite = check_finite
        self._before = StepBefore(self._run) if incremental else None
        self._one_at_a_time = ForkedLock()
        self._known = KnownSteps()
        self._closed = self._told = False
        self._sweeps = RunSweeps(self._run)
        self._mirrors = Mirrors(
            directory, mirror, incremental=incremental, is_shared=shared
        )
        # What is to be uploaded stays.
        self._keep = [*checked_keep(keep), self._mirrors.held]
        kind = SharedDirectory if shared else OwnDisks
        self._disk = kind(self._run, self._mirrors, timeout)
        self._failed = FailedSaves(self._run, on_error, max_failures)
        self._is_tidy = True  # Whether the last save has removed what was not kept.
        self._asks_keep: int | None = None  # The thread that asks what it would remove.
        given = self._disk.begin(config)
        self._config = GivenConfig([self._run, *self._mirrors.runs], given)
        self._origin = StateOrigin(self._run, self._config.id)

    def save(
        self,
        step: SupportsIndex,
        pytree: PyTree,
        filter_spec: PyTree = default_serialise_filter_spec,
        is_leaf: IsLeaf = None,
        *,
        metadata: Any = None,
    ) -> Future[None]:
        """Save a step in the background, while the training continues.

        When this returns, you may donate, delete or overwrite the tree. If the previous
        save is still running, this waits for it first.

        **Arguments:**

        - `step`: a non-negative integer that has not been saved; a NumPy integer, too.
        - `metadata`: any JSON value. Put metrics here: `{"loss": 0.31}`.
        - All others: as [`eqx_ckpt.tree_serialise_leaves`][].

        **Returns:**

        A `concurrent.futures.Future`. When its `result()` returns, the step survives a
        power cut, and the steps that `keep` does not keep are deleted. You can ignore
        it: if the save fails, the next `save`, `wait` or `close` raises, or the next
        `save` of another manager of the run in this process.

        **Raises:**

        - [`eqx_ckpt.CheckpointExistsError`][]: the step exists.
        - `ValueError`: `step` is not valid.
        - [`eqx_ckpt.CheckpointError`][]: the manager is closed.
        - As [`eqx_ckpt.tree_serialise_leaves_async`][], and as an earlier save.
        """
        began = time.monotonic()
        self._check_thread()
        with self._one_at_a_time.own:
            try:
                saving = self._begin(step, pytree, filter_spec, is_leaf, metadata)
            except (OSError, CheckpointError) as e:
                saving = self._failed.instead(e)
            finally:
                self._failed.over()
            note_save(self._when, began, saving)
            return saving

    def _begin(
        self,
        step: SupportsIndex,
        pytree: PyTree,
        filter_spec: PyTree,
        is_leaf: IsLeaf,
        metadata: Any,
    ) -> Future[None]:
        with contextlib.ExitStack() as stack:
            how = ", check_finite=True" if self._check_finite else ""
            how += ", incremental=True" if self._before else ""
            call = self._disk.call(f"save({in_words(step)}{how}{self._failed})")
            group = stack.enter_context(self._disk.meet(call))
            number = as_step(step)
            self._check_open()
            self._wait_for_save()
            self._raise_of_others()
            self._failed.begin(number)
            self._run.stored.check_place()
            # On disks of their own, all processes see in the plan whether one needs it.
            if not self._is_tidy or self._disk.is_own:
                self._make_room(number)
            self._is_tidy = False
            with collector_paused():
                given = pytree, filter_spec, is_leaf, metadata
                writes, save = self._planned(group, number, *given)
                new = None
                if self._before:
                    newest = ft.partial(self._run.newest, self._known.damaged)
                    base = self._before.find(group.from_first("base", newest))
                    new = save.share(base)
                save.way_out = ft.cache(ft.partial(self._way_out, number, metadata))
                save.begin(group, self._disk.replaces(number, self._known.damaged))
                if self._check_finite:
                    save.finite = FiniteCheck({w.name: w.record for w in writes})
                save.before_commit = self._config.put
                afterwards = ft.partial(self._retain, number, group, new)
                held = stack.pop_all()
                saving = save_in_background(
                    save, group, held, self._staging_bytes, self, afterwards
                )
            self._known.begin(number, saving)
            self._failed.goes_on(saving)
            return saving

    def _planned(
        self,
        group: Together | Alone,
        step: int,
        pytree: PyTree,
        filter_spec: PyTree,
        is_leaf: IsLeaf,
        metadata: Any,
    ) -> tuple[list[Write], Save]:
        """The leaves to write, and the save of those that this process writes."""
        with self._failed.checking_arguments():
            plan = plan_writes(
                pytree, filter_spec, is_leaf, self._frozen, self._compression
            )
            metadata = exactly(metadata)
        with self._asking_keep():
            mine, metadata = self._disk.plan(
                group, step, plan, metadata, self._origin, self._layout
            )
        with self._failed.checking_arguments():
            path = self._run.path(step)
            save = Save(path, mine, metadata, self._layout, self._progress)
        return plan.writes, save

    def _way_out(self, step: int, metadata: Any) -> str:
        """Make room for a step; say what else would."""
        self._make_room(step)
        with self._asking_keep():
            return what_keep_frees(
                self._run, self._keep, self._known.damaged, step, metadata
            )

    def _make_room(self, step: int) -> None:
        """Remove what `keep` does not keep, such as what an upload had spared.

        Not the step that is to be saved: if it is there, that is an error. And not the
        last one of this training, although another one may have newer ones.
        """
        with self._asking_keep():
            self._known.remove(
                self._disk.make_room(
                    [*self._keep, lambda _: {step, *self._known.last}],
                    self._known.damaged,
                )
            )

    @contextlib.contextmanager
    def _asking_keep(self) -> Generator[None]:
        before, self._asks_keep = self._asks_keep, threading.get_ident()
        try:
            yield
        finally:
            self._asks_keep = before

    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        filter_spec: PyTree = default_deserialise_filter_spec,
        is_leaf: IsLeaf = None,
        *,
        where: Callable[[PyTree], Any] | None = None,
        prefix: str = "",
        sharding: PyTree = None,
        casting: Casting = "no",
        missing: Missing = "raise",
        mismatched: Mismatched = "raise",
        unexpected: Unexpected = "raise",
        transform: Transform | None = None,
        broadcast_replicas: bool = False,
        max_host_bytes: int | None = None,
        on_damage: OnDamage = "raise",
    ) -> PyTree:
        """Restore a step, by default the newest. Waits for a running save.

        The next step that this manager saves counts as one that goes on from this one:
        see [`eqx_ckpt.inspect.History`][].

        **Arguments:**

        - `step`: the step to restore; the default is the newest.
        - `on_damage`: if the newest step is damaged, `"raise"` an error that names the
            newest undamaged step, or `"fallback"` to that step, with a warning; a later
            save then replaces the damaged one. In place of a damaged `step`,
            `"fallback"` restores its copy in a mirror, and never another step. With
            `shared=False`, what other processes or a mirror have first replaces what is
            damaged.
        - All others: as [`eqx_ckpt.tree_deserialise_leaves`][].

        **Returns:**

        `like`, with the restored leaves in their places.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step, or no step. To
            start a new run then, call `latest()` first.
        - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing.
        - As [`eqx_ckpt.tree_deserialise_leaves`][].
        """
        check_on_damage(on_damage)
        request = Request(
            like,
            filter_spec,
            is_leaf,
            where,
            prefix,
            sharding,
            casting,
            missing,
            mismatched,
            unexpected,
            transform,
        )
        means = self._means._replace(
            broadcast_replicas=broadcast_replicas, max_host_bytes=max_host_bytes
        )
        return self._restored(request, step, on_damage, means)

    @property
    def _means(self) -> Means:
        return Means(False, None, self._progress, self._disk.timeout)

    def _restored(
        self,
        request: Request,
        step: SupportsIndex | None,
        on_damage: OnDamage,
        means: Means,
        *,
        goes_on: bool = True,
    ) -> PyTree:
        """Restore a step, from which this manager may go on."""

        def of(
            path: PathLike | Source, step: int, check: Check
        ) -> tuple[Restored, int]:
            return restored(path, request, means._replace(check=check)), step

        self._settle()
        number = None if step is None else as_step(step)
        (found, number), passed = self._disk.restore(number, of, on_damage)
        self._known.damaged.update(passed)
        # `keep` looks at steps, and does not go on from them.
        if goes_on and not self._is_run_here():
            is_whole = request.where is None and not request.prefix
            begins = self._origin.restored(number, found.source, is_whole=is_whole)
            if begins and is_first():
                self._config.restored(found.source.manifest.history)
        return found.tree

    def steps(self) -> list[int]:
        """The saved steps, in order, also those in a mirror.

        Other entries of the directory are ignored. With `shared=False`, these are the
        steps of which this process has its part.

        **Raises:**

        - [`eqx_ckpt.CheckpointError`][]: a newer checkpoint is there whose name is a
            number, but not a step's name; or the directory was moved.
        """
        return self._disk.tiers.steps()

    def latest(self) -> int | None:
        """The newest saved step, or `None` if there are no steps.

        **Raises:**

        - As `steps`.
        - [`eqx_ckpt.CheckpointError`][]: the newest step in a mirror, and that in the
            directory, did not come from one another.
        """
        return self._disk.latest()

    def best(self, metric: str, mode: Mode = "min") -> int:
        """The step with the best value of a metric.

        **Arguments:**

        - `metric`: a number in the `metadata`, such as `loss`; of a nested one, such as
            `eval/loss`. Steps without it, or with NaN, are ignored.
        - `mode`: `"min"` if smaller is better, `"max"` if larger is.

        **Returns:**

        The step; among equal ones, the newest.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no step has the metric.
        - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest of a step is damaged.
        """
        return self._disk.tiers.best(metric, mode)

    def read_manifest(self, step: SupportsIndex) -> Manifest:
        """Read the manifest of a step: see [`eqx_ckpt.inspect.read_manifest`][]."""
        return self._disk.read_manifest(as_step(step))

    def read_config(self, step: SupportsIndex | None = None) -> dict[str, Any] | None:
        """The `config` of a step: see [`eqx_ckpt.inspect.read_config`][].

        **Arguments:**

        - `step`: a saved step; the default is the newest.
        """
        return self._disk.tiers.read_config(None if step is None else as_step(step))

    def path(self, step: SupportsIndex) -> PathLike:
        """The path or URL of a step, for all functions that take one.

        **Arguments:**

        - `step`: a saved step.

        **Returns:**

        The path or URL in the directory of the run, or else in the mirror.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step.
        """
        tiers = self._disk.tiers
        return tiers.path(tiers.nearest(as_step(step)))

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step and all of its files. Waits for a running save.

        The deletion is atomic: readers find the whole step or nothing, even after a
        power cut. In a job of several processes, call this in each of them.

        **Arguments:**

        - `step`: the step to delete; it may be damaged, or the newest.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step.
        - [`eqx_ckpt.CheckpointError`][]: this process is reading the step, or it is the
            state of a recording.
        """
        self._check_thread()
        call = self._disk.call(f"delete({in_words(step)})")
        with self._one_at_a_time.own:
            self._settle()
            number = self._disk.delete(call, lambda: self._run.idle(as_step(step)))
            self._known.remove([number])
            self._mirrors.deleted(number)

    def fork(self, path: PathLike, step: SupportsIndex | None = None) -> None:
        """Begin a new run with a step of this one. Waits for a running save.

        The new run has the step under the same number, and goes on from there with a
        manager of its own. Its history says where it comes from: see
        [`eqx_ckpt.inspect.History`][]. Like a save, a fork is there whole and durably,
        or not at all; and either run may be deleted.

        On one disk, the files of the step become hard links, with `layout="zarr"`:
        that takes a fraction of a save, and no space. Nothing is read, so
        [`eqx_ckpt.inspect.verify`][] either of them if you doubt the disk. Otherwise
        the step is copied, and compared with its checksums. In a job of several
        processes, call this in each of them; process 0 copies.

        **Arguments:**

        - `path`: the directory or URL of the new run. There must be no run.
        - `step`: the step to begin with; the default is the newest.

        **Raises:**

        - [`eqx_ckpt.CheckpointExistsError`][]: there is a run at `path`, or something
            else that cannot become one. Nothing was written.
        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step, or no step.
        - [`eqx_ckpt.CorruptCheckpointError`][]: the step is damaged.
        - [`eqx_ckpt.CheckpointError`][]: the manager has `shared=False`.

        !!! example

            ```python
            import eqx_ckpt

            with eqx_ckpt.CheckpointManager("runs/a") as manager:
                manager.save(100, {"step": 100})
                manager.fork("runs/b", step=100)
            with eqx_ckpt.CheckpointManager("runs/b") as manager:
                state = manager.restore({"step": 0})
                manager.save(200, state)
            assert manager.steps() == [100, 200]
            ```
        """
        self._check_thread()
        number = "" if step is None else f", {in_words(step)}"
        call = self._disk.call(f"fork({path!r}{number})")
        with self._one_at_a_time.own:
            self._settle()
            self._disk.fork(call, path, None if step is None else as_step(step))

    def audit(
        self,
        step_fn: Callable[[PyTree, int], PyTree],
        like: PyTree,
        a: SupportsIndex,
        b: SupportsIndex,
        *,
        sharding: PyTree = None,
    ) -> Audit:
        """Replay the training between two saved steps, and compare it bit for bit.

        This restores step `a`, goes on from there with `step_fn`, compares what that
        returns with each saved step up to `b`, and stops at the first one that differs.
        So it finds hardware that computes wrong values in silence, and code that is
        not as deterministic as it should be. Nothing is written.

        **Arguments:**

        - `step_fn`: called with the tree and the number of the step to make, `a + 1`,
            `a + 2` and so on to `b`; returns the tree after that step. It has to do
            what the training did: with the same data, the same random numbers, and on
            as many devices of the same kind.
        - `like`, `sharding`: for the restore of step `a`, as in `restore`. Later steps
            are restored onto the devices of what `step_fn` returns.
        - `a`, `b`: saved steps; `a` comes before `b`.

        **Returns:**

        An [`eqx_ckpt.inspect.Audit`][]: the first saved step that differs, and the
        names of its leaves that do. In a job, call this in each process; all get the
        same.

        **Raises:**

        - `ValueError`: `a` does not come before `b`, or `step_fn` returns another tree
            than it got.
        - [`eqx_ckpt.CheckpointNotFoundError`][]: `a` or `b` is not there.
        - [`eqx_ckpt.LeafMismatchError`][]: a step that would be compared does not match
            `like`. This and what is wrong with `a` and `b` is said before the replay.
        - As `restore`.

        !!! example

            ```python
            import eqx_ckpt
            import jax.numpy as jnp

            def step_fn(state, step):
                return {"w": state["w"] * 0.5 + step}

            state = {"w": jnp.zeros(3)}
            with eqx_ckpt.CheckpointManager("runs/a") as manager:
                for step in range(1, 31):
                    state = step_fn(state, step)
                    if step == 15:
                        state["w"] += 1e-6  # As if a device had made a mistake.
                    if step % 10 == 0:
                        manager.save(step, state)
                found = manager.audit(step_fn, state, 10, 30)
            assert (found.since, found.step) == (10, 20)
            assert found.leaves == ("w",)
            ```
        """
        check_function("step_fn", step_fn)
        self._check_thread()
        first, last = as_step(a), as_step(b)
        if first >= last:
            raise ValueError(
                f"`a` is {first}, and `b` is {last}: pass a step, and a later one."
            )
        call = self._disk.call(f"audit({first}, {last})")
        request = Request(like, sharding=sharding)

        def check(number: int) -> None:
            plan = plan_reads(self._disk.read_manifest(number), request)
            check_like(number, plan)

        def restore(step: int, placed: PyTree | None) -> PyTree:
            # Of NumPy's arrays, `step_fn` may change the order of the bytes.
            asked = request if placed is None else Request(placed, casting="safe")
            try:
                return self._restored(asked, step, "raise", self._means, goes_on=False)
            except CorruptCheckpointError as e:
                raise damaged(e, is_own=self._disk.is_own) from e

        def agree(step: int, differ: list[int]) -> list[int]:
            return most_said(f"{call}, step {step}", differ, self._disk.timeout)

        self._settle()
        steps = self._disk.steps_between(call, first, last, check)
        return replay(steps, step_fn, restore, agree)

    def should_save(self, step: SupportsIndex) -> bool:
        """Whether to save now: because of `when`, or because of SIGTERM.

        From the first call until `close`, SIGTERM does not end the process. Call this
        in each step, in the main thread; in a job, in each process.

        **Arguments:**

        - `step`: the step that would be saved.

        **Returns:**

        `True` in all processes if, in any of them, a function of `when` returned `True`
        or SIGTERM arrived. `False` if this manager has saved `step`, is saving it, or,
        if there is a `when`, has found it in the run.
        """
        self._check_open()
        number, why = as_step(step), 2 * caught_sigterm(self)
        call = self._disk.call(f"should_save({in_words(step)})")
        if self._when and not self._known.are_listed:
            self._known.list(self._disk.listed(call))
        there = self._known.now()
        if not why:
            tried = self._failed.tried
            last = there if tried is None else {*there, tried}
            why = is_due(self._when, number, max(last, default=None))
        why, is_there = most_said(call, [why, number in there], self._disk.timeout)
        self._told = why == 2
        return why > 0 and not is_there

    @property
    def reached_preemption(self) -> bool:
        """Whether `should_save` has seen SIGTERM: then save, and leave the loop."""
        return self._told

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self} is closed. Create a new one.")

    def _check_thread(self) -> None:
        if self._is_run_here():
            raise CheckpointError(
                "`keep` and `progress` are called by a save, and may not save, delete "
                "or wait: the save would wait for itself. They may `restore`."
            )

    def _is_run_here(self) -> bool:
        """Whether a save calls this, by `keep` or `progress`."""
        if self._asks_keep == threading.get_ident():
            return True
        return any(saving.is_run_here() for saving in saves_of(self))

    def __repr__(self) -> str:
        return f"CheckpointManager({self._run.directory!r})"

    def _repr_html_(self) -> str:
        return self._run.as_html(repr(self))

    def wait(self) -> None:
        """Wait for the running save; raise if it, or an earlier one, failed.

        A failure that the future of the save has raised is not raised again. In an
        object store, this also waits for the clean-up that follows a save, for ten
        seconds at most.
        """
        self._wait_for_save()
        self._sweeps.wait()

    def _wait_for_save(self) -> None:
        self._check_thread()
        self._settle()
        self._failed.settle(self)

    def _raise_of_others(self) -> None:
        """Raise a failure that other managers of the run have not raised.

        They may be lost, as after a cell of a notebook that made one was run again.
        """
        for saving in sorted(pending_saves, key=lambda saving: saving.what):
            other = saving.owner
            if isinstance(other, CheckpointManager) and (
                other._run.directory == self._run.directory
            ):
                raise_pending_failure(other)

    def _settle(self) -> None:
        wait([saving for saving in saves_of(self) if not saving.is_run_here()])

    def mirrored(self) -> list[int]:
        """The steps that are in the mirror, in order; of several, in any of them.

        **Raises:**

        - `OSError`, [`eqx_ckpt.CheckpointError`][]: a mirror cannot be listed.
        """
        return self._mirrors.steps()

    def uploads(self) -> dict[int, Future[None]]:
        """The uploads of this manager, as futures by step: of the last hundred steps.

        The `result()` of one returns when the step is in each mirror for which it was
        due. It raises if the step cannot be uploaded, or if a newer one is in its
        place. In a job, they are those of process 0.
        """
        return self._mirrors.futures()

    @property
    def upload_error(self) -> BaseException | None:
        """Why uploads fail now, or `None`; they are tried again."""
        return self._mirrors.error()

    def close(self, *, mirror: bool = True) -> None:
        """Wait for the running save, as `wait` does, and refuse further saves.

        A clean-up that goes on is stopped; the next manager does the rest. This
        restores the signal handler of SIGTERM. A closed manager can still restore.

        **Arguments:**

        - `mirror`: whether to wait for uploads, until the `timeout` of the mirror.
            Otherwise, an upload that runs is given up. What is left, the next manager
            of the run uploads.
        """
        check_flag("mirror", mirror)
        self._check_thread()
        with self._one_at_a_time.own:
            was_open, self._closed = not self._closed, True
            stop_watching(self)
            try:
                self._wait_for_save()
                if mirror and was_open:
                    self._disk.finish()
                self._failed.end()
            finally:
                self._mirrors.close(waits=mirror)
                self._sweeps.end()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with besides(error, "a save"):
            self.close(mirror=error is None or not self._disk.is_own)

    def _retain(self, saved: int, group: Together | Alone, base: Base | None) -> None:
        self._known.add(saved)
        if self._before and base:
            self._before.remember(saved, base)
        self._known.remove(
            self._disk.saved(
                group, saved, self._keep, self._known.damaged, is_last=self._told
            )
        )
        self._is_tidy = True
        if is_first():
            self._sweeps.begin()
