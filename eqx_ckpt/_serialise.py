"""Saving."""

from typing import Any

from jaxtyping import PyTree

from ._commit import begin
from ._filter_spec import default_serialise_filter_spec
from ._leaves import LeafRecord, shards
from ._manifest import check_metadata, Manifest, to_bytes, VERSIONS
from ._plan import plan_writes
from ._store import ArrayWrite, locate, read_checksums, write_arrays
from ._types import IsLeaf, PathLike


def tree_serialise_leaves(
    path: PathLike,
    pytree: PyTree,
    filter_spec: PyTree = default_serialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    metadata: Any = None,
    overwrite: bool = False,
) -> None:
    """Save the leaves of a PyTree, each array in a directory of its own name.

    When this returns, the checkpoint survives a power cut. When it raises, or the
    process dies in it, there is no new checkpoint, and every older one is as it was.

    **Arguments:**

    - `path`: the directory to save to. It must not exist, or be empty; directories
        above it are created.
    - `pytree`: the PyTree to save. JAX arrays (typed PRNG keys too), NumPy arrays and
        Python bool/int/float/complexes are saved; all other leaves are not.
    - `filter_spec`: as that of `equinox.tree_serialise_leaves`: a function `(f, leaf)`
        that writes the leaf to the file `f`, or hands it on to
        [`eqx_ckpt.default_serialise_filter_spec`][] (or Equinox's), or does nothing to
        leave it out; or a PyTree prefix of such functions. `f.name` and `f.path` say
        which leaf it is. It may be called more than once for a leaf.
    - `is_leaf`: called on every node of `pytree`; if `True`, the node is a leaf.
    - `metadata`: anything that JSON can hold, such as `{"loss": 0.31}`.
    - `overwrite`: replace a checkpoint that is at `path` already, in one atomic step.

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
    writes, others = plan_writes(pytree, filter_spec, is_leaf)
    if metadata is not None:
        check_metadata(metadata)
    arrays = [
        ArrayWrite(w.name, w.record, shards(w.leaf, w.record))
        for w in writes
        if w.leaf is not None
    ]
    attempt = begin(locate(path), overwrite=overwrite)
    try:
        write_arrays(attempt.base, arrays)
        leaves: dict[str, LeafRecord] = {w.name: w.record for w in writes}
        for name, record, _ in arrays:
            checksums = read_checksums(attempt.base, name, record)
            leaves[name] = record._replace(crc32c=checksums)
        manifest = Manifest(leaves, others, metadata, VERSIONS, attempt.root)
        attempt.commit(to_bytes(manifest))
    finally:
        attempt.abandon()
