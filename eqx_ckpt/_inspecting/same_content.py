"""Which leaves of a checkpoint have the content that those of an earlier one have."""

from collections.abc import Mapping

from .._format.leaf_record import CRC32C_DIGITS, LeafRecord
from .._format.source import Source
from .._sources.checkpoint_source import opened
from .._types import PathLike


def same_leaves(later: PathLike | Source, earlier: PathLike | Source) -> set[str]:
    """The leaves of a checkpoint that are equal to those of an earlier one.

    The manifests are compared, with the hash of each chunk: nothing else is read. In a
    run that was saved with `incremental=True`, these leaves are shared.

    **Arguments:**

    - `later`, `earlier`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].

    **Returns:**

    The names of the leaves that have the same type, and the same content. A leaf that
    is stored in other chunks, as after a change of the mesh, is not among them, nor is
    an array of a source that has no hashes.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][], [`eqx_ckpt.CorruptCheckpointError`][]: as
        [`eqx_ckpt.inspect.read_manifest`][].

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        with eqx_ckpt.CheckpointManager("runs/a", incremental=True) as manager:
            manager.save(1, {"base": jnp.ones(3), "adapter": jnp.ones(2)})
            manager.save(2, {"base": jnp.ones(3), "adapter": jnp.zeros(2)})
        same = eqx_ckpt.inspect.same_leaves("runs/a/000002", "runs/a/000001")
        assert same == {"base"}
        ```
    """
    return same_content(opened(later).manifest.leaves, opened(earlier).manifest.leaves)


def same_content(
    later: Mapping[str, LeafRecord], earlier: Mapping[str, LeafRecord]
) -> set[str]:
    """As `same_leaves`, of records."""
    return {
        name
        for name, record in later.items()
        if name in earlier and _is_same(record, earlier[name])
    }


def _is_same(a: LeafRecord, b: LeafRecord) -> bool:
    if not a.is_array:
        return (a.kind, a.value) == (b.kind, b.value)
    about = (a.kind, a.dtype, a.shape, a.impl, a.weak_type)
    if about != (b.kind, b.dtype, b.shape, b.impl, b.weak_type):
        return False
    if 0 in a.data_shape:
        return True
    # Those of different chunks differ, too.
    hashes = [text[CRC32C_DIGITS:] for text in a.checksums]
    is_same = hashes == [text[CRC32C_DIGITS:] for text in b.checksums]
    return bool(hashes) and a.chunk_shape == b.chunk_shape and is_same
