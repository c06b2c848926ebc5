"""Saving."""

import functools as ft
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from ._distributed.group import Group
from ._distributed.joint import all_saving, JointAttempt, refuse, telling
from ._distributed.meeting import check_deadline, DEADLINE
from ._format.chunks import chunk_keys
from ._format.leaves import shards
from ._format.manifest import Manifest, to_bytes, VERSIONS
from ._format.metadata import exactly
from ._futures import open_saves, raise_unseen, Saving
from ._progress import Progress, Reporter
from ._storage.bucket import ATTEMPTS, check_limits
from ._storage.checkpoint import collector_paused
from ._storage.chunk_values import write_objects
from ._storage.directory import check_paths, LONG_PATH
from ._storage.kvstore import ArrayWrite, checksum, locate, new_database, write_arrays
from ._transfer.staging import checked_limit, Staging
from ._tree.compression import compressed, Compression
from ._tree.filter_spec import default_serialise_filter_spec
from ._tree.plan import plan_writes, Write
from ._types import IsLeaf, Layout, PathLike


logger = logging.getLogger("eqx_ckpt")


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
    group = all_saving(path, deadline) if jax.distributed.is_initialized() else None
    if open_saves:
        with telling(group):
            raise_unseen()
    save = Save(
        path,
        ft.partial(plan_writes, pytree, filter_spec, is_leaf),
        metadata,
        overwrite,
        layout,
        compression,
        progress,
        group,
    )
    try:
        save.run(
            [
                ArrayWrite(w.name, w.record, shards(w.leaf, w.record, mine=w.mine))
                for w in save.arrays
            ]
        )
    finally:
        if group is not None:
            group.close()


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
    group = all_saving(path, deadline)
    with telling(group):
        raise_unseen()
    return save_in_background(
        path,
        pytree,
        filter_spec,
        is_leaf,
        metadata=metadata,
        overwrite=overwrite,
        layout=layout,
        compression=compression,
        progress=progress,
        staging_bytes=staging_bytes,
        group=group,
    )


def save_in_background(
    path: PathLike,
    pytree: PyTree,
    filter_spec: PyTree,
    is_leaf: IsLeaf,
    *,
    metadata: Any,
    overwrite: bool,
    layout: Layout,
    compression: Compression,
    progress: Progress,
    staging_bytes: int | None,
    group: Group | None,
    owner: object = None,
    afterwards: Callable[[], None] = lambda: None,
) -> Saving:
    """Begin a save, and stage its data; a thread does the rest, then `afterwards`."""
    with telling(group):
        limit = checked_limit(staging_bytes)
    with collector_paused():
        save = Save(
            path,
            ft.partial(plan_writes, pytree, filter_spec, is_leaf),
            metadata,
            overwrite,
            layout,
            compression,
            progress,
            group,
        )
        staging = Staging(save.arrays, limit)

        def run() -> None:
            try:
                try:
                    save.run(staging.arrays, staging.release)
                finally:
                    staging.end()
                afterwards()
            finally:
                if group is not None:
                    group.close()

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
    if group is not None and not group.has_service:
        wait([saving])  # Its messages must not meet the programs of the main thread.
    return saving


class Save:
    """A save that is planned; `run` is the rest of it.

    **Attributes:**

    - `arrays`: the leaves of which this process is to write the data, or a part.
    """

    def __init__(
        self,
        path: PathLike,
        plan: Callable[[], tuple[list[Write], dict[str, str]]],
        metadata: Any,
        overwrite: bool,
        layout: Layout,
        compression: Compression,
        progress: Progress,
        group: Group | None,
    ) -> None:
        self._report: Reporter | None = None
        try:
            self.path = os.fspath(path)
            writes, others = plan()
            if compression is not None:
                writes = compressed(writes, compression)
            self._leaves = {write.name: write.record for write in writes}
            self.arrays = [write for write in writes if write.leaf is not None]
            if progress:
                total = sum(write.record.nbytes for write in writes)
                self._report = Reporter(progress, total)
            target = locate(path)
            if target["driver"] != "file" or layout != "zarr":
                check_limits(target, self._leaves, layout)
            elif max(map(len, [*self._leaves, ""])) > LONG_PATH - len(target["path"]):
                check_paths(target, self._leaves)
            if metadata is not None:
                metadata = exactly(metadata)
            self._manifest = Manifest(
                self._leaves, others, metadata, VERSIONS, layout=layout
            )
            to_bytes(self._manifest)  # It says now whether it is too large.
            if group is None:
                self._attempt = ATTEMPTS[target["driver"]](target, overwrite)
            else:
                self._attempt = JointAttempt(group, target, overwrite, layout, writes)
        except Exception as e:
            if group is not None:
                refuse(group, e)
            raise
        if isinstance(self._attempt, JointAttempt):
            self.arrays = self._attempt.agree()

    def run(
        self,
        arrays: Sequence[ArrayWrite],
        release: Callable[[int], None] | None = None,
    ) -> None:
        """Write the data of all leaves, and commit; `release` is told what is done."""
        attempt, report = self._attempt, self._report
        joint = attempt if isinstance(attempt, JointAttempt) else None

        def written(name: str, nbytes: int) -> None:
            if release:
                release(nbytes)
            if report:
                report("write", name, nbytes)

        try:
            if joint is not None:
                joint.begin()
            base = attempt.base
            if self._manifest.layout == "ocdbt":
                base = new_database(base, joint.part if joint else "")
            write = write_arrays if base["driver"] == "file" else write_objects
            tails = write(
                base,
                arrays,
                written if release or report else None,
                create=joint is None or joint.is_first,
            )
            if joint is not None and not joint.is_to_commit(
                tails, self._manifest.layout
            ):
                return
            for name, record, _ in arrays:
                keys = chunk_keys(record.data_shape, record.chunk_shape)
                found = (
                    tails[name][i] if tails else checksum(base, f"{name}/{key}", record)
                    for i, key in enumerate(keys)
                )
                self._leaves[name] = record._replace(crc32c=tuple(found))
            if report:
                report("commit")
            attempt.commit(to_bytes(replace(self._manifest, root=attempt.root)))
        except BaseException as e:
            if joint is not None:
                joint.fail(e)
            raise
        finally:
            attempt.abandon()
            if report:
                report.close()
        logger.info("Saved %s: %d leaves.", self.path, len(self._leaves))
