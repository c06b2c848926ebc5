"""Save the leaves of a PyTree to a checkpoint."""

import contextlib
import importlib.metadata
import itertools
import logging
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._distributed.joint_attempt import all_saving, Together
from .._distributed.meeting import check_timeout, TIMEOUT
from .._format.display import in_bytes
from .._format.leaf_record import CHECKSUM_DIGITS
from .._format.manifest import check_size, Manifest, to_bytes, zarr_json
from .._format.run_history import History
from .._format.user_metadata import exactly
from .._progress import Progress, Reporter
from .._storage.calls.garbage_collector import collector_paused
from .._storage.calls.threads import is_ending
from .._storage.interface.base import Base
from .._storage.interface.chunk_bytes import Piece
from .._storage.interface.free_space import WhyTooFew
from .._storage.interface.place import Attempt, check_layout, check_shares, Storage
from .._storage.locate import locate
from .._tree.leaves.filter_spec import default_serialise_filter_spec
from .._tree.plans.write_plan import (
    Compression,
    plan_writes,
    Write,
    WritePlan,
)
from .._types import check_flag, Checksums, IsLeaf, Layout, PathLike
from .background_save import pending_saves, raise_pending_failure, Saving
from .finite_check import FiniteCheck
from .known_bases import known_bases
from .layout_hint import layout_hint
from .staging import checked_limit, Staging
from .unchanged import find_unchanged


logger = logging.getLogger("eqx_ckpt")


T = TypeVar("T")


# Less data may be kept within what names a file.
_SURE_BYTES = 4096


VERSIONS = {
    "eqx_ckpt": importlib.metadata.version("eqx-ckpt"),
    "equinox": eqx.__version__,
    "jax": jax.__version__,
    "numpy": np.__version__,
    "tensorstore": importlib.metadata.version("tensorstore"),
    "python": platform.python_version(),
}


def tree_serialise_leaves(
    path: PathLike,
    pytree: PyTree,
    filter_spec: PyTree = default_serialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    metadata: Any = None,
    overwrite: bool = False,
    layout: Layout = "zarr",
    compression: Compression = None,
    base: PathLike | None = None,
    frozen: PyTree = None,
    progress: Progress = False,
    timeout: float = TIMEOUT,
) -> None:
    """Save the leaves of a PyTree, each array in a directory of its own name.

    When this returns, the checkpoint survives a power cut. If it raises, or the process
    dies, there is no new checkpoint, and every older one is unchanged.

    **Arguments:**

    - `path`: the directory to save to. It must not exist, or be empty; parent
        directories are created. Or a location in an object store: `"s3://bucket/path"`,
        `"gs://bucket/path"`, or an [`eqx_ckpt.StorePath`][].
    - `pytree`: the PyTree to save. JAX arrays (typed PRNG keys too), NumPy arrays and
        Python bool/int/float/complexes are saved; no other leaves are. A warning names
        unsaved leaves that have state, such as an `np.random.Generator`.
    - `filter_spec`: as in `equinox.tree_serialise_leaves`: a function `(f, leaf)` that
        writes the leaf to the file `f`, calls
        [`eqx_ckpt.default_serialise_filter_spec`][] (or Equinox's), or does nothing to
        leave the leaf out; or a PyTree prefix of such functions. It is called once for
        each leaf; `f.name` and `f.path` are the leaf's name and key path.
    - `is_leaf`: called on every node of `pytree`; if `True`, the node is a leaf.
    - `metadata`: any value that JSON can represent, such as `{"loss": 0.31}`.
    - `overwrite`: replace an existing checkpoint at `path`, in one atomic step.
    - `layout`: `"zarr"`, a directory of files for each array, or `"ocdbt"`, a few files
        for all arrays, in TensorStore's database format. Use `"ocdbt"` for thousands of
        small arrays, above all in an object store.
    - `compression`: `None`, `"zstd"`, or a function `(name, record)` that returns one
        of them for each array. `record` is the array's
        [`eqx_ckpt.inspect.LeafRecord`][].
    - `base`: an earlier checkpoint, with which chunks are shared that are equal. On a
        disk, files become hard links, and both checkpoints are complete. In a store,
        both are steps of one run, and this one refers to that: see the page *Saving
        while training*. For `layout="zarr"`.
    - `frozen`: which leaves have not changed since `base`: `True`, or a function
        `leaf -> bool`, or a PyTree prefix of them, as for `equinox.partition`. Such an
        array on a GPU or TPU is compared there, by a fingerprint of 128 bits, with what
        this process has saved; if it is equal, it is not copied to the host. What has
        changed nevertheless is saved, and a warning is logged that names it.
    - `progress`: a function `(phase, leaf, done, total)`, called with `"write"` or
        `"commit"`, the name of a leaf, and two numbers of bytes; or `True`, to show a
        bar.
    - `timeout`: in a job of several processes, the seconds that a process waits for
        the others. Then all of them raise, and the error names the late processes.

    **Returns:**

    Nothing.

    **Raises:**

    - [`eqx_ckpt.CheckpointExistsError`][]: `path` exists already.
    - [`eqx_ckpt.LeafNameError`][]: two leaves would have the same name, or the same
        directory on a file system that ignores letter case.
    - [`eqx_ckpt.LeafMismatchError`][]: `filter_spec` or `frozen` is not a prefix of
        `pytree`.
    - [`eqx_ckpt.CheckpointError`][]: a leaf or `metadata` cannot be saved exactly.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `base`.
    - `OSError`: the disk is full, not writable, or failing.

    !!! example

        ```python
        import equinox as eqx
        import eqx_ckpt
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        eqx_ckpt.tree_serialise_leaves("runs/mlp", {"model": model, "step": 100})
        ```
    """
    if timeout != TIMEOUT:
        check_timeout(timeout)
    is_job = jax.distributed.is_initialized()
    with (all_saving(path, timeout) if is_job else None) or Alone() as group:
        if pending_saves:
            raise_pending_failure()
        _check_frozen(frozen, base)
        plan = plan_writes(pytree, filter_spec, is_leaf, frozen, compression)
        save = Save(path, plan, metadata, layout, progress)
        if base is not None:
            save.share_with(base)
        save.begin(group, overwrite)
        save.run()
        save.remember()


def save_state(path: PathLike, state: PyTree, timeout: float) -> None:
    """Save a state of a recording, in the recording, where nothing else is saved."""
    with all_saving(path, timeout) or Alone() as group:
        raise_pending_failure()
        plan = plan_writes(state, default_serialise_filter_spec, None, None)
        save = Save(path, plan, None, "zarr", False)
        save.is_of_recording()
        save.begin(group, overwrite=False)
        save.run()


def tree_serialise_leaves_async(
    path: PathLike,
    pytree: PyTree,
    filter_spec: PyTree = default_serialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    metadata: Any = None,
    overwrite: bool = False,
    layout: Layout = "zarr",
    compression: Compression = None,
    base: PathLike | None = None,
    frozen: PyTree = None,
    progress: Progress = False,
    staging_bytes: int | None = None,
    timeout: float = TIMEOUT,
) -> Future[None]:
    """Save the leaves of a PyTree in the background.

    When this returns, the save no longer depends on the tree: the next step may donate,
    delete or overwrite every array. This takes as long as a copy of the tree to the
    host. JAX arrays that are in host memory already are not copied; if a step donates
    such an array before it is written, JAX gives the step other memory.

    **Arguments:**

    - `staging_bytes`: the host memory for the copies of all saves together. If a copy
        does not fit, this waits until enough has been written; about 48 MiB are always
        allowed. The default is half of the machine's memory.
    - All others: as [`eqx_ckpt.tree_serialise_leaves`][]. `filter_spec` is called
        before this returns, `progress` in another thread.

    **Returns:**

    A `concurrent.futures.Future`. When its `result()` returns, the checkpoint survives
    a power cut. If the save fails, `result()` raises. If you never call it, the next
    save raises the error instead, or the interpreter prints it at exit. The interpreter
    does not exit before the save has ended. In `atexit`, this saves in the foreground.

    **Raises:**

    - The errors of [`eqx_ckpt.tree_serialise_leaves`][]. Errors in the arguments are
        raised at once, failures of the disk by the future.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np

        tree = {"w": jnp.ones(3), "log": np.zeros(3)}
        saving = eqx_ckpt.tree_serialise_leaves_async("ckpt", tree)
        tree["log"][0] = 1.0  # The checkpoint has a zero here.
        saving.result()
        ```
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(all_saving(path, timeout) or Alone())
        raise_pending_failure()
        limit = checked_limit(staging_bytes)
        with collector_paused():
            _check_frozen(frozen, base)
            plan = plan_writes(pytree, filter_spec, is_leaf, frozen, compression)
            save = Save(path, plan, metadata, layout, progress)
            if base is not None:
                save.share_with(base)
            save.begin(group, overwrite)
            held, afterwards = stack.pop_all(), save.remember
            return save_in_background(save, group, held, limit, None, afterwards)


def _check_frozen(frozen: PyTree, base: PathLike | None) -> None:
    if frozen is not None and base is None:
        raise ValueError(
            "`frozen` says which leaves have not changed since `base`: pass `base`, or "
            "leave `frozen` out."
        )


def save_in_background(
    save: "Save",
    group: "Together | Alone",
    held: contextlib.ExitStack,
    limit: int,
    owner: object = None,
    afterwards: Callable[[], None] = lambda: None,
) -> Saving:
    """Stage the data of a save that has begun; a thread does the rest.

    The thread calls `afterwards` after the commit, and closes `held` at the end. While
    the interpreter ends, this thread saves, and raises.
    """
    if is_ending():
        return _save_here(save, held, owner, afterwards)
    staging = Staging(limit)

    def run() -> None:
        with held:
            try:
                save.run(staging.pieces, staging.release)
            finally:
                staging.end()
            afterwards()

    saving = Saving(run, staging.fail, save.path, owner)
    try:
        pending_saves.add(saving)
        save.adopt()
        staging.fill(save.arrays, saving.start)
        save.arrays.clear()
        saving.start()
    except BaseException as e:
        staging.fail(e)
        saving.run_here()  # Fails at once, and cleans up, unless its thread does.
        saving.exception()
        raise
    if not group.in_background:
        # The save's messages must not overlap with programs of the main thread.
        wait([saving])
    return saving


def _save_here(
    save: "Save",
    held: contextlib.ExitStack,
    owner: object,
    afterwards: Callable[[], None],
) -> Saving:
    def run() -> None:
        with held:
            save.run()
            afterwards()

    saving = Saving(run, lambda error: None, save.path, owner)
    saving.run_here()
    saving.result()
    return saving


class Alone(contextlib.ExitStack):
    """A group of one process; `Together` is a group of several."""

    in_background = True

    def begin(
        self,
        target: Storage,
        layout: Layout,
        overwrite: bool,
        writes: Sequence[Write],
        why_too_few: WhyTooFew,
    ) -> tuple[Attempt, list[Write]]:
        """Begin the attempt; return it with the writes that have data."""
        arrays = [write for write in writes if write.leaf is not None]
        names = [write.name for write in arrays]
        attempt = target.begin(
            layout, names, overwrite=overwrite, why_too_few=why_too_few
        )
        return attempt, arrays

    def from_first(self, topic: str, make: Callable[[], T], *, so_far: str = "") -> T:
        return make()

    def goes_on(self, topic: str) -> None:
        """Nobody waits for this process."""


class Save:
    """A save, which is planned, begun, and run.

    **Attributes:**

    - `arrays`: the leaves whose data this process writes, wholly or in part.
    - `finite`: the check that refuses to commit NaNs and infinities, or `None`.
    - `bases`: the base that it shares chunks with, and what is to be the next one.
    - `way_out`: says what makes room on a disk that is full.
    - `before_commit`: writes what has to be beside the step before that is there; it is
        called with the history of the step, in a process that commits.
    """

    arrays: list[Write]
    finite: FiniteCheck | None = None
    bases: tuple[Base, Base] | None = None
    way_out: Callable[[], str] = str
    before_commit: Callable[[History | None], None] | None = None

    def __init__(
        self,
        path: PathLike,
        plan: WritePlan,
        metadata: Any,
        layout: Layout,
        progress: Progress,
    ) -> None:
        """Plan the save; raise all errors that can be found without writing."""
        self._writes = plan.writes
        self._leaves = {write.name: write.record for write in self._writes}
        self._adopted: Checksums = {}
        self._frozen, self._leaf_of = plan.frozen, plan.leaf_of
        self._report: Reporter | None = None
        if progress:
            total = sum(write.record.nbytes for write in self._writes)
            self._report = Reporter(progress, total)
        check_layout(layout)
        self._target = target = locate(path)
        self.path = os.fspath(path)
        longest = max(map(len, self._leaves), default=0)
        if len(target.spec["path"]) + longest > target.always_fits:
            target.layouts[layout](target).check(self._leaves)
        if metadata is not None:
            metadata = exactly(metadata)
        self._manifest = Manifest(
            self._leaves,
            plan.unsaved,
            metadata,
            VERSIONS,
            layout=layout,
            separators=plan.separators,
            history=plan.history,
            part=plan.part,
        )
        check_size(self._manifest)

    def is_of_recording(self) -> None:
        """What is saved is a state of the recording that its path is in."""
        self._target = self._target.as_state()

    def share_with(self, path: PathLike) -> None:
        """Share chunks with a checkpoint."""
        check_shares("base", self._manifest.layout)
        self.share(known_bases.find(path, self._target))

    def share(self, base: Base | None) -> Base:
        """Share chunks with a base; return what `run` makes the next one."""
        new = Base(self._target.spec["path"])
        self.bases = base or Base(""), new
        return new

    def begin(self, group: "Together | Alone", overwrite: bool) -> None:
        """Agree with the other processes, and begin the attempt."""
        if overwrite is not True and overwrite is not False:
            check_flag("overwrite", overwrite)
        writes, self._writes = self._writes, []
        self._attempt, self.arrays = group.begin(
            self._target, self._manifest.layout, overwrite, writes, self._why_too_few
        )
        self._records = {write.name: write.record for write in self.arrays}
        if self.bases is not None:
            self._attempt.share(*self.bases)

    def _why_too_few(self, free: int) -> str:
        """Why so many free bytes are surely too few, or `''`.

        How far chunks can be compressed, and which are those of a base, is not known.
        """
        arrays = {
            name: record
            for name, record in self._leaves.items()
            if record.is_array
            and record.compression is None
            and math.prod(record.chunk_shape) * record.itemsize >= _SURE_BYTES
        }
        if sum(record.nbytes for record in arrays.values()) <= free:
            return ""
        shared = self.bases[0].metadata if self.bases else {}
        needed = sum(
            record.nbytes
            for name, record in arrays.items()
            if shared.get(name) != zarr_json(record[:9])
        )
        if needed <= free:
            return ""
        way_out = self.way_out() or "Delete what is no longer needed, and save again."
        return (
            f"the save writes {in_bytes(needed)} at least, and {in_bytes(free)} are "
            f"free. Nothing was written. {way_out}"
        )

    def send_at_most(self, nbytes: int) -> None:
        """Bound the memory of what is on its way, once this process has begun."""
        self._attempt.send_at_most(nbytes)

    def adopt(self, unchanged: Iterable[Write] | None = None) -> None:
        """Share arrays that the base is known to have: they need not be hashed.

        By default, those that are found to be unchanged: those on accelerators are
        shared now, before they may be donated, and are not copied to the host. Only the
        others stay in `arrays`.
        """
        base, new = self.bases or (None, None)
        if base is None or new is None:
            return
        if unchanged is None:
            unchanged = find_unchanged(self.arrays, self._frozen, base, new)
        for write in unchanged:
            name, record = write.name, write.record
            found = self._attempt.adopt(name, record, write.positions())
            if found is not None:
                self._adopted[name] = found
        left = [write for write in self.arrays if write.name not in self._adopted]
        self.arrays = left

    def run(
        self,
        pieces: Iterable[Piece] | None = None,
        release: Callable[[int], None] | None = None,
    ) -> None:
        """Write the pieces of all arrays, by default from the tree, and commit.

        Call `release` with the size of each piece that has been written.
        """
        attempt, report = self._attempt, self._report

        def written(name: str, nbytes: int) -> None:
            if release:
                release(nbytes)
            if report:
                report("write", self._leaf(name), nbytes)

        try:
            with attempt:
                if pieces is None:
                    self.adopt()
                    pieces = itertools.chain.from_iterable(
                        map(Write.pieces, self.arrays)
                    )
                if report:
                    for name in self._adopted:
                        nbytes = self._records[name].nbytes
                        report("write", self._leaf(name), nbytes)
                if self.finite:
                    pieces = self.finite.watch(pieces, self._leaf)
                watch = written if release or report else None
                checksums = attempt.write(self._records, pieces, watch)
                if self.finite:
                    self.finite.raise_for_found(self.path)
                checksums.update(self._adopted)
                attempt.gather(checksums)
                manifest = b""
                if attempt.is_first:
                    attempt.chunks.complete(self._records, checksums)
                    if report:
                        report("commit")
                    references = self._record(checksums)
                    found = replace(
                        self._manifest, root=attempt.root, references=references
                    )
                    manifest = to_bytes(found)
                    if self.before_commit:
                        self.before_commit(self._manifest.history)
                attempt.commit(manifest)
        finally:
            if report:
                report.close()
        self._learn()
        if attempt.is_first:
            logger.info("Saved %s: %d leaves.", self.path, len(self._leaves))
            if attempt.chunks.has_folders:
                layout_hint.give(self.path, self._leaves)

    def _leaf(self, name: str) -> str:
        """The leaf that an array is of."""
        return self._leaf_of.get(name, name)

    def _record(self, checksums: Checksums) -> dict[str, tuple[str, ...]]:
        """Put the checksums into the records; return what is in other attempts."""
        references: dict[str, tuple[str, ...]] = {}
        for name, found in checksums.items():
            assert all(found), name
            own = tuple([text[:CHECKSUM_DIGITS] for text in found])
            self._leaves[name] = self._records[name]._replace(checksums=own)
            attempts = tuple([text[CHECKSUM_DIGITS:] for text in found])
            if any(attempts):
                references[name] = attempts
        return references

    def _learn(self) -> None:
        """Note what the base and the next one share; warn of what is not frozen."""
        if self.bases is None:
            return
        base, new = self.bases
        base.learn(new)
        changed = new.changed.intersection(self._frozen)
        if leaves := sorted({*map(self._leaf, changed)}):
            logger.warning(
                "Leaves that are `frozen` have changed, and were saved in %s: %s.",
                self.path,
                ", ".join(map(repr, leaves)),
            )

    def remember(self) -> None:
        """Keep what this process knows of it, for a save of which it is the base."""
        if self.bases is not None:
            known_bases.remember(self._target, self.bases[1])
