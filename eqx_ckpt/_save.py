"""Saving."""

import contextlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._distributed.joint import all_saving, Together
from ._distributed.meeting import check_deadline, DEADLINE
from ._format.leaves import shards
from ._format.manifest import Manifest, to_bytes
from ._format.metadata import exactly
from ._futures import pending_saves, raise_pending_failure, Saving
from ._progress import Progress, Reporter
from ._storage.checkpoint import collector_paused
from ._storage.directory import locate
from ._storage.storage import ArrayWrite, Attempt, check_layout, Storage
from ._transfer.finite import FiniteCheck
from ._transfer.staging import checked_limit, Staging
from ._tree.compression import compressed, Compression
from ._tree.filter_spec import default_serialise_filter_spec
from ._tree.plan import plan_writes, Write, WritePlan
from ._types import IsLeaf, Layout, LAYOUTS, PathLike


logger = logging.getLogger("eqx_ckpt")
T = TypeVar("T")

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
    progress: Progress = False,
    deadline: float = DEADLINE,
) -> None:
    """Save the leaves of a PyTree, each array in a directory of its own name.

    When this returns, the checkpoint survives a power cut. When it raises, or the
    process dies in it, there is no new checkpoint, and every older one is as it was.

    **Arguments:**

    - `path`: the directory to save to. It must not exist, or be empty; directories
        above it are created. Or a place in an object store: `"s3://bucket/path"`,
        `"gs://bucket/path"`, or an [`eqx_ckpt.Store`][].
    - `pytree`: the PyTree to save. JAX arrays (typed PRNG keys too), NumPy arrays and
        Python bool/int/float/complexes are saved; all other leaves are not. A warning
        names those that have state, such as an `np.random.Generator`.
    - `filter_spec`: as that of `equinox.tree_serialise_leaves`: a function `(f, leaf)`
        that writes the leaf to the file `f`, or hands it on to
        [`eqx_ckpt.default_serialise_filter_spec`][] (or Equinox's), or does nothing to
        leave it out; or a PyTree prefix of such functions. `f.name` and `f.path` say
        which leaf it is. It is called once for each leaf.
    - `is_leaf`: called on every node of `pytree`; if `True`, the node is a leaf.
    - `metadata`: anything that JSON can hold, such as `{"loss": 0.31}`.
    - `overwrite`: replace a checkpoint that is at `path` already, in one atomic step.
    - `layout`: `"zarr"`, a directory with files for each array, or `"ocdbt"`, a few
        files for all of them, in TensorStore's database format: for thousands of small
        arrays, above all in an object store.
    - `compression`: `None`, `"zstd"`, or a function `(name, record)` that returns one
        of them for each array, of which it gets the [`eqx_ckpt.LeafRecord`][].
    - `progress`: a function `(phase, leaf, done, total)`, which is called with
        `"write"` or `"commit"`, the leaf's name, and bytes; `True` shows a bar.
    - `deadline`: in a job of several processes, how many seconds each of them may let
        the others wait. Then all of them raise, and the error says who was late.

    **Returns:**

    Nothing.

    **Raises:**

    - [`eqx_ckpt.CheckpointExistsError`][]: there is something at `path`.
    - [`eqx_ckpt.LeafNameError`][]: two leaves would have the same name.
    - [`eqx_ckpt.LeafMismatchError`][]: `filter_spec` is not a prefix of `pytree`.
    - [`eqx_ckpt.CheckpointError`][]: a leaf or `metadata` cannot be saved exactly.
    - `OSError`: the disk is full, or may not be written to, or fails.

    !!! example

        ```python
        import equinox as eqx
        import eqx_ckpt
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        eqx_ckpt.tree_serialise_leaves("runs/mlp", {"model": model, "step": 100})
        ```
    """
    if deadline != DEADLINE:
        check_deadline(deadline)
    is_job = jax.distributed.is_initialized()
    with (all_saving(path, deadline) if is_job else None) or Alone() as group:
        if pending_saves:
            raise_pending_failure()
        plan = plan_writes(pytree, filter_spec, is_leaf)
        save = Save(path, plan, compression, metadata, layout, progress)
        save.begin(group, overwrite)
        save.run(
            [
                ArrayWrite(w.name, w.record, shards(w.leaf, w.record, owned=w.owned))
                for w in save.arrays
            ]
        )


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
    progress: Progress = False,
    staging_bytes: int | None = None,
    deadline: float = DEADLINE,
) -> Future[None]:
    """Save the leaves of a PyTree while the program goes on.

    When this returns, the save does not depend on the tree any more: the next step may
    donate, delete or overwrite every array. That takes as long as copying the tree to
    the host; JAX arrays in host memory are not even copied. (JAX then gives a step that
    is to donate one of them other memory, until that array is written.)

    **Arguments:**

    - `staging_bytes`: how much host memory the copies may take, in all saves together.
        If they do not fit, this waits until enough of them is written; about 48 MiB are
        always allowed. The default is half of the machine's memory.
    - All others: as [`eqx_ckpt.tree_serialise_leaves`][]. `filter_spec` is called
        before this returns, and `progress` by another thread.

    **Returns:**

    A `concurrent.futures.Future`. When its `result()` returns, the checkpoint survives
    a power cut. If the save fails, `result()` raises; and if nobody asks for it, the
    next save does, or it is reported when the interpreter ends. The interpreter does
    not end before the save has.

    **Raises:**

    - As [`eqx_ckpt.tree_serialise_leaves`][]. What is wrong with the arguments is
        raised at once, and a failure of the disk by the future.

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
        group = stack.enter_context(all_saving(path, deadline) or Alone())
        raise_pending_failure()
        limit = checked_limit(staging_bytes)
        with collector_paused():
            plan = plan_writes(pytree, filter_spec, is_leaf)
            save = Save(path, plan, compression, metadata, layout, progress)
            save.begin(group, overwrite)
            return save_in_background(save, group, stack.pop_all(), limit)


def save_in_background(
    save: "Save",
    group: "Together | Alone",
    held: contextlib.ExitStack,
    limit: int,
    owner: object = None,
    afterwards: Callable[[], None] = lambda: None,
) -> Saving:
    """Stage the data of a save that has begun; a thread does the rest.

    It ends with `afterwards`, and closes what is `held`.
    """
    staging = Staging(save.arrays, limit)

    def run() -> None:
        with held:
            try:
                save.run(staging.arrays, staging.release)
            finally:
                staging.end()
            afterwards()

    saving = Saving(run, staging.fail, save.path, owner)
    try:
        staging.fill(save.arrays, saving.start)
    except BaseException as e:
        staging.fail(e)
        saving.start()
        saving.exception()
        raise
    save.arrays.clear()
    saving.start()
    if not group.in_background:
        wait([saving])  # Its messages must not meet the programs of the main thread.
    return saving


class Alone(contextlib.ExitStack):
    """One process, as a group: what `Together` is for several."""

    in_background = True

    def begin(
        self, target: Storage, layout: Layout, overwrite: bool, writes: Sequence[Write]
    ) -> tuple[Attempt, list[Write]]:
        """The attempt to save all of `writes`, and those of them that have data."""
        arrays = [write for write in writes if write.leaf is not None]
        return target.begin(layout, overwrite=overwrite), arrays

    def from_first(self, topic: str, make: Callable[[], T], *, slow: bool = False) -> T:
        return make()


class Save:
    """A save: it is planned, then begun, then run.

    **Attributes:**

    - `arrays`: the leaves of which this process writes the data, or a part.
    - `finite`: what refuses to commit NaNs and infinities; `None` to save them.
    """

    arrays: list[Write]
    finite: FiniteCheck | None = None

    def __init__(
        self,
        path: PathLike,
        plan: WritePlan,
        compression: Compression,
        metadata: Any,
        layout: Layout,
        progress: Progress,
    ) -> None:
        """Find everything that is wrong before anything is written."""
        self.path = os.fspath(path)
        self._writes = plan.writes
        if compression is not None:
            self._writes = compressed(self._writes, compression)
        self._leaves = {write.name: write.record for write in self._writes}
        self._report: Reporter | None = None
        if progress:
            total = sum(write.record.nbytes for write in self._writes)
            self._report = Reporter(progress, total)
        if layout not in LAYOUTS:
            check_layout(layout)
        self._target = target = locate(path)
        longest = max(map(len, self._leaves), default=0)
        if len(target.spec["path"]) + longest > target.always_fits:
            target.layouts[layout](target).check(self._leaves)
        if metadata is not None:
            metadata = exactly(metadata)
        self._manifest = Manifest(
            self._leaves, plan.unsaved, metadata, VERSIONS, layout=layout
        )
        to_bytes(self._manifest)  # It says now whether it is too large.

    def begin(self, group: "Together | Alone", overwrite: bool) -> None:
        """Agree with the other processes, and let the attempt begin."""
        writes, self._writes = self._writes, []
        self._attempt, self.arrays = group.begin(
            self._target, self._manifest.layout, overwrite, writes
        )

    def run(
        self,
        arrays: Sequence[ArrayWrite],
        release: Callable[[int], None] | None = None,
    ) -> None:
        """Write the data of all leaves, and commit.

        `release` is called with the bytes of each piece that is written.
        """
        attempt, report = self._attempt, self._report

        def written(name: str, nbytes: int) -> None:
            if release:
                release(nbytes)
            if report:
                report("write", name, nbytes)

        try:
            with attempt:
                if self.finite:
                    arrays = self.finite.watch(arrays)
                checksums = attempt.chunks.write(
                    arrays,
                    written if release or report else None,
                    create=attempt.is_first,
                )
                if self.finite:
                    self.finite.raise_for_found(self.path, self._leaves)
                known, manifest = attempt.gather(checksums), b""
                if attempt.is_first:
                    for name, record, _ in arrays:
                        found = attempt.chunks.checksums(name, record, known)
                        self._leaves[name] = record._replace(crc32c=found)
                    if report:
                        report("commit")
                    manifest = to_bytes(replace(self._manifest, root=attempt.root))
                attempt.commit(manifest)
        finally:
            if report:
                report.close()
        if attempt.is_first:
            logger.info("Saved %s: %d leaves.", self.path, len(self._leaves))
