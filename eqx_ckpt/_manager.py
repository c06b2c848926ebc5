"""The checkpoints of one training run."""

import contextlib
import functools as ft
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, SupportsIndex, Unpack

from jaxtyping import PyTree

from ._distributed.coordination import is_first
from ._distributed.group import from_first, gather_errors, most_said
from ._distributed.joint import Together, together
from ._distributed.meeting import check_deadline, DEADLINE
from ._errors import CheckpointError, CheckpointNotFoundError
from ._format.manifest import Manifest
from ._futures import raise_pending_failure, saves_of
from ._inspect import read_manifest
from ._progress import check_progress, Progress
from ._restore import tree_deserialise_leaves
from ._resume import check_on_damage, OnDamage, resumed
from ._retention import checked_keep, Keep, keep_all, Mode
from ._save import Alone, Save, save_in_background
from ._steps import as_step, in_words, retain, Run
from ._storage.checkpoint import collector_paused
from ._storage.storage import check_layout
from ._transfer.finite import FiniteCheck
from ._transfer.staging import checked_limit
from ._tree.compression import check_compression, Compression
from ._tree.filter_spec import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
)
from ._tree.plan import plan_writes
from ._tree.reads import How
from ._types import IsLeaf, Layout, PathLike
from ._when import checked_when, is_due, stop_watching, told_to_end, When


class CheckpointManager:
    """Saves the steps of a training run, keeps what it is to keep, and resumes.

    Each step is a checkpoint of its own, `directory/000100`, which all the other
    functions of this package take too. What is there is what the disk says: there is no
    index that could disagree with it. Several managers may use one directory.

    At its start, a manager removes what saves that died have left. Use it in a `with`
    statement: its end waits for the last save, and raises if that failed.

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
        keep: Keep | Sequence[Keep] = keep_all,
        save: When | Sequence[When] = (),
        layout: Layout = "zarr",
        compression: Compression = None,
        progress: Progress = False,
        staging_bytes: int | None = None,
        deadline: float = DEADLINE,
        check_finite: bool = False,
    ) -> None:
        """**Arguments:**

        - `directory`: of the run; the first save creates it. Or a place in an object
            store, as [`eqx_ckpt.tree_serialise_leaves`][].
        - `keep`: which steps to keep, after each save: [`eqx_ckpt.keep_last`][],
            [`eqx_ckpt.keep_every`][], [`eqx_ckpt.keep_best`][], any other function from
            `{step: metadata}` to steps, or several, of which each keeps its own. The
            newest step, the one just saved, and one that this process is reading are
            never removed.
        - `save`: when `should_save` is true: [`eqx_ckpt.every_steps`][],
            [`eqx_ckpt.every_seconds`][], any other function `(step, last) -> bool`, or
            several, of which one is enough. `last` is the newest step of the run.
        - `layout`, `compression`, `staging_bytes`: of saves, as
            [`eqx_ckpt.tree_serialise_leaves_async`][].
        - `progress`, `deadline`: of saves as [`eqx_ckpt.tree_serialise_leaves`][], and
            of restores as [`eqx_ckpt.tree_deserialise_leaves`][].
        - `check_finite`: do not save a step with NaNs or infinities; the error, which
            comes like any other of a save in the background, names the leaves.
        """
        self._run = Run(directory)
        self._keep = checked_keep(keep)
        self._when = checked_when(save)
        check_layout(layout)
        check_compression(compression)
        check_progress(progress)
        checked_limit(staging_bytes)
        check_deadline(deadline)
        self._layout: Layout = layout
        self._compression: Compression = compression
        self._progress: Progress = progress
        self._staging_bytes = staging_bytes
        self._deadline = deadline
        self._check_finite = check_finite
        self._one_at_a_time = threading.RLock()
        self._saved: set[int] = set()
        self._damaged: set[int] = set()
        self._closed = self._told = False
        if is_first():
            self._run.clean_up()

    def save(
        self,
        step: SupportsIndex,
        pytree: PyTree,
        filter_spec: PyTree = default_serialise_filter_spec,
        is_leaf: IsLeaf = None,
        *,
        metadata: Any = None,
    ) -> Future[None]:
        """Save a step while the training goes on.

        When this returns, the tree may be donated, deleted or overwritten. If the save
        before this one has not ended, this waits for it.

        **Arguments:**

        - `step`: a non-negative integer that has not been saved; NumPy's will do.
        - `metadata`: anything that JSON can hold. Metrics go here: `{"loss": 0.31}`.
        - All others: as [`eqx_ckpt.tree_serialise_leaves`][].

        **Returns:**

        A `concurrent.futures.Future`. When its `result()` returns, the step survives a
        power cut, and the steps that `keep` does not keep are gone. It need not be
        looked at: if the save fails, the next `save`, `wait` or `close` raises.

        **Raises:**

        - [`eqx_ckpt.CheckpointExistsError`][]: the step exists.
        - [`eqx_ckpt.CheckpointError`][]: `step` is no step, or the manager is closed.
        - As [`eqx_ckpt.tree_serialise_leaves_async`][], and as an earlier save.
        """
        self._check_thread()
        with self._one_at_a_time, contextlib.ExitStack() as stack:
            call = self._call(f"save({in_words(step)})")
            group = stack.enter_context(together(call, self._deadline) or Alone())
            number = as_step(step)
            self._check_open()
            self.wait()
            limit = checked_limit(self._staging_bytes)
            with collector_paused():
                save = Save(
                    self._run.path(number),
                    plan_writes(pytree, filter_spec, is_leaf),
                    self._compression,
                    metadata,
                    self._layout,
                    self._progress,
                )
                # A restore fell back behind it; it would be in the way for ever.
                save.begin(group, overwrite=number in self._damaged)
                save.finite = FiniteCheck() if self._check_finite else None
                afterwards = ft.partial(self._retain, number, group)
                held = stack.pop_all()
                saving = save_in_background(save, group, held, limit, self, afterwards)
            self._saved.add(number)
            return saving

    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        filter_spec: PyTree = default_deserialise_filter_spec,
        is_leaf: IsLeaf = None,
        *,
        read_once: bool = False,
        on_damage: OnDamage = "raise",
        **how: Unpack[How],
    ) -> PyTree:
        """Restore a step, or the newest one. Waits for a save that is going on.

        **Arguments:**

        - `step`: which one; the default is the newest.
        - `on_damage`: what to do if the newest step is damaged: `"raise"` an error that
            says which older step is whole, or `"fallback"` to that one, with a warning.
            A later save of the damaged step then replaces it. If you name a `step`,
            damage is always an error.
        - All others: as [`eqx_ckpt.tree_deserialise_leaves`][].

        **Returns:**

        `like`, with the restored leaves in their places.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step, or none at all.
            Whether to start at step 0 then is for the caller to say.
        - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing.
        - As [`eqx_ckpt.tree_deserialise_leaves`][].
        """
        check_on_damage(on_damage)

        def restored(step: int) -> PyTree:
            return tree_deserialise_leaves(
                self._run.path(step),
                like,
                filter_spec,
                is_leaf,
                **how,
                read_once=read_once,
                progress=self._progress,
                deadline=self._deadline,
            )

        self._settle()
        if step is not None:
            step = as_step(step)
            try:
                return restored(step)
            except CheckpointNotFoundError as e:
                raise self._run.missing(step) from e
        result, passed = resumed(self._run, restored, on_damage, self._deadline)
        self._damaged.update(passed)
        return result

    def steps(self) -> list[int]:
        """The steps that are saved, in order. Anything else in there is ignored."""
        return self._run.steps()

    def latest(self) -> int | None:
        """The newest step that is saved, or `None` if there is none."""
        return from_first(self._call("latest()"), self._run.latest, self._deadline)

    def best(self, metric: str, mode: Mode = "min") -> int:
        """The step whose metric is best.

        **Arguments:**

        - `metric`: the name of a number in the `metadata` of the steps. Steps without
            it, or with a NaN, are not considered.
        - `mode`: `"min"` if smaller is better, `"max"` if larger is.

        **Returns:**

        The step; of several equal ones, the newest.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no step has the metric.
        - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest of a step is damaged.
        """
        return self._run.best(metric, mode)

    def read_manifest(self, step: SupportsIndex) -> Manifest:
        """The [`eqx_ckpt.Manifest`][] of a step. As [`eqx_ckpt.read_manifest`][]."""
        return read_manifest(self._run.path(as_step(step)))

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step, with all that is in it. Waits for a save that is going on.

        It is never half there: a reader finds all of it or nothing, and so does whoever
        comes after a power cut. In a job of several processes, call it in each of them.

        **Arguments:**

        - `step`: which one; it may be damaged, and it may be the newest.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step.
        - [`eqx_ckpt.CheckpointError`][]: this process is reading the step.
        """
        self._check_thread()
        call = self._call(f"delete({in_words(step)})")
        with self._one_at_a_time:
            self._settle()
            number, problem = gather_errors(
                call, lambda: self._run.idle(as_step(step)), self._deadline
            )
            if problem is not None:
                raise problem
            assert number is not None
            from_first(call, lambda: self._run.delete(number), self._deadline)
            self._saved.discard(number)
            self._damaged.discard(number)

    def should_save(self, step: SupportsIndex) -> bool:
        """Whether to save now: `save` says so, or the process was told to end.

        From the first call on, SIGTERM does not end the process; `close` changes that
        back. Call it in each step, in the main thread; in a job, in each process.

        **Arguments:**

        - `step`: that would be saved.

        **Returns:**

        `True`, in all processes, if a function of `save` says so in one of them, or
        SIGTERM came to one; `False` if this manager has saved `step`.
        """
        self._check_open()
        why = 2 * told_to_end(self)
        if self._when and not why:
            last = max(self._saved, default=self._found)
            why = is_due(self._when, as_step(step), last)
        call = self._call(f"should_save({in_words(step)})")
        why = most_said(call, why, self._deadline)
        self._told = why == 2
        return why > 0 and as_step(step) not in self._saved

    @property
    def told_to_end(self) -> bool:
        """Whether SIGTERM had come, in any process, at the last `should_save`.

        Save, and leave the loop: the end of the `with` statement waits for the save.
        """
        return self._told

    @ft.cached_property
    def _found(self) -> int | None:
        """The newest step that was there, and whole as far as this manager knows."""
        newest = ft.partial(self._run.newest_except, self._damaged)
        return from_first(self._call("latest()"), newest, self._deadline)

    def _call(self, call: str) -> str:
        """A call, as its errors name it when not all processes make it."""
        return f"{call} in {self._run.directory!r}"

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self} is closed. Make a new one.")

    def _check_thread(self) -> None:
        if any(saving.is_run_here() for saving in saves_of(self)):
            raise CheckpointError(
                "`keep` and `progress` are called by a save, and may not save, delete "
                "or wait: the save would wait for itself. They may `restore`."
            )

    def __repr__(self) -> str:
        return f"CheckpointManager({self._run.directory!r})"

    def wait(self) -> None:
        """Wait for the save that is going on; raises if it, or an earlier one, failed.

        A failure that you had from the future of that save is not raised again.
        """
        self._check_thread()
        self._settle()
        raise_pending_failure(self)

    def _settle(self) -> None:
        wait([saving for saving in saves_of(self) if not saving.is_run_here()])

    def close(self) -> None:
        """Wait for the save that is going on, as `wait` does, and save no more.

        SIGTERM does again what it did before `should_save`. One can still restore.
        """
        self._check_thread()
        with self._one_at_a_time:
            self._closed = True
            stop_watching(self)
            self.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as e:
            if error is None:
                raise
            error.add_note(f"Besides, a save failed: {e!r}")

    def _retain(self, saved: int, group: Together | Alone) -> None:
        self._damaged.discard(saved)  # Now it is whole, and counts again.
        tidy_up = ft.partial(retain, self._run, self._keep, self._damaged, saved)
        group.from_first("retained", tidy_up, slow=True)
