"""Copy a source into a checkpoint."""

from ..._distributed.joint_attempt import all_saving
from ..._distributed.meeting import TIMEOUT
from ..._distributed.process_group import from_first, gather_errors
from ..._errors import CheckpointError
from ..._format.source import Source
from ..._progress import Progress
from ..._saving.save import Alone, Save
from ..._saving.source_copy import pieces_of, plan_copy
from ..._sources.consistent_read import Reading
from ..._tree.plans.write_plan import compressed, Compression
from ..._types import Layout, PathLike
from ._export_checks import check_leaves, Form


def copy(
    source: PathLike | Source,
    path: PathLike,
    *,
    overwrite: bool = False,
    layout: Layout = "zarr",
    compression: Compression = None,
    strict: bool = False,
    progress: Progress = False,
    timeout: float = TIMEOUT,
) -> None:
    """Copy a checkpoint, or any other source, into a new checkpoint.

    The records of the leaves, the metadata and the history of a step are kept, and of
    another format how it joins keys: what restores from the source restores from the
    copy. A few chunks are in memory at a time, each compared with its checksum if the
    source has one. In a job of several processes, call it in each of them: each copies
    a part of the chunks.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or an
        [`eqx_ckpt.interop.Source`][].
    - `path`, `overwrite`, `layout`, `compression`, `progress`, `timeout`: as
        [`eqx_ckpt.tree_serialise_leaves`][], whatever layout and compression the
        source has.
    - `strict`: raise, instead of warning once, if a file of another format has values
        that this package cannot represent. They are left out.

    **Returns:**

    Nothing.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.CheckpointExistsError`][]: something already exists at `path`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a leaf of the source is damaged; nothing
        is written.
    - [`eqx_ckpt.CheckpointError`][]: the source is replaced meanwhile, or a leaf cannot
        be stored.
    - `OSError`: a file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)}, metadata="first")
        eqx_ckpt.copy("ckpt", "compressed", compression="zstd")
        assert eqx_ckpt.inspect.read_manifest("compressed").metadata == "first"
        ```
    """
    reading = Reading(source)
    call = f"copy({reading})"

    def checked() -> Source:
        found = reading.open()
        form = Form("a checkpoint", keeps_settings=True)
        check_leaves(found.manifest, form, strict=strict, loses_metadata=False)
        return found

    with reading:
        opened, error = gather_errors(call, checked, timeout)
        if error is not None:
            raise error
        assert opened is not None
        version = from_first(f"{call}: its version", reading.digest, timeout)
        with all_saving(path, timeout) or Alone() as group:
            if reading.digest() != version:
                raise CheckpointError(
                    f"{reading} was replaced meanwhile, or is not the same for all "
                    "processes. Nothing was written. Begin again."
                )
            plan = plan_copy(opened.manifest)
            plan = plan._replace(writes=compressed(plan.writes, compression))
            metadata = opened.manifest.metadata
            save = Save(path, plan, metadata, layout, progress)
            save.begin(group, overwrite)
            with reading.unless_replaced():
                save.run(pieces_of(opened, save.arrays))
