"""Inspect a checkpoint without restoring it."""

import functools as ft
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from .._errors import CheckpointError, CorruptCheckpointError
from .._format.chunk_grid import batches, blocks, whole
from .._format.leaf_names import is_below
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.manifest import Manifest
from .._format.sample_record import state_folder
from .._format.source import (
    raise_damage,
    read_or_note,
    read_regions,
    RegionRead,
    Source,
)
from .._lazy import Array
from .._progress import check_progress, Progress, reporting
from .._sources.checkpoint_source import Checkpoint, opened
from .._sources.consistent_read import read_consistently, Reading
from .._sources.recording_source import find_recorded, Recorded
from .._tree.matching.name_tree import checked_prefix
from .._types import check_digest, PathLike, Report
from .content_digest import digest_and_damage


# Host memory for one read.
_WINDOW = 32 * 2**20


def read_manifest(source: PathLike | Source) -> Manifest:
    """Read the manifest of a checkpoint; reads no array.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][]. Here and in all functions, it may also be that of
        an [`eqx_ckpt.recording.Recording`][].

    **Returns:**

    A [`eqx_ckpt.inspect.Manifest`][]: the records of the leaves, the metadata, and the
    package versions that saved them.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"w": jnp.ones(3), "step": 5}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree, metadata={"loss": 0.31})
        manifest = eqx_ckpt.inspect.read_manifest("ckpt")
        assert manifest.metadata == {"loss": 0.31}
        assert manifest.leaves["w"].shape == (3,)
        assert manifest.leaves["step"].value == "5"
        ```
    """
    return opened(source).manifest


def iter_leaves(
    source: PathLike | Source, prefix: str = ""
) -> Iterator[tuple[str, LeafRecord, Any]]:
    """Iterate over the leaves; at most one leaf, or 32 MiB of leaves, is in memory.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `prefix`: only the leaves below this name.

    **Returns:**

    An iterator of `(name, record, value)`: the leaf's name, its
    [`eqx_ckpt.inspect.LeafRecord`][], and its value in host memory. The value of an
    array is a NumPy array; of typed PRNG keys, their key data; of bytes that a custom
    `filter_spec` wrote, an array of `uint8`; of a Python scalar, the scalar. The
    checksums of each leaf are verified before it is returned.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: there is no leaf below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing; raised when
        the iterator reaches its leaf.
    - [`eqx_ckpt.CheckpointError`][]: the checkpoint was replaced during the iteration.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np

        eqx_ckpt.tree_serialise_leaves("ckpt", {"model": {"w": jnp.ones(3)}, "step": 5})
        leaves = eqx_ckpt.inspect.iter_leaves("ckpt", prefix="model")
        largest = {name: np.abs(array).max() for name, record, array in leaves}
        assert largest == {"model/w": 1.0}
        ```
    """
    reading = Reading(source)
    found = reading.open()
    prefix = checked_prefix(prefix, found.manifest)
    records = found.manifest.leaves.items()
    chosen = [(name, record) for name, record in records if is_below(prefix, name)]
    return _one_by_one(reading, found, chosen)


def _one_by_one(
    reading: Reading, source: Source, leaves: Sequence[tuple[str, LeafRecord]]
) -> Iterator[tuple[str, LeafRecord, Any]]:
    with reading:
        for window in batches(leaves, lambda leaf: leaf[1].nbytes, _WINDOW):
            reads = [
                RegionRead(name, record, whole(record.data_shape))
                for name, record in window
                if record.is_array
            ]
            with reading.unless_replaced():
                arrays = deque(read_regions(source, reads))
            for name, record in window:
                yield name, record, _value(record, arrays)


def _value(record: LeafRecord, arrays: deque[Array]) -> Any:
    """The value of a leaf in host memory; that of an array is the next of `arrays`."""
    if not record.is_array:
        return scalar_from_text(record.kind, record.value or "")
    return from_stored(arrays.popleft(), record)


def verify(
    source: PathLike | Source,
    *,
    digest: str | None = None,
    progress: Progress = False,
) -> bool:
    """Read every byte of every leaf, and verify the checksums and the hashes.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `digest`: what [`eqx_ckpt.inspect.digest`][] has to be of the content. It is
        computed of the same reads. Checksums detect damage; a digest that was kept
        elsewhere also detects that somebody has changed values and checksums together.
    - `progress`: as [`eqx_ckpt.tree_serialise_leaves`][]; its phase is `"verify"`.

    **Returns:**

    `True` for a checkpoint and a recording, and with `digest`. `False` if there are no
    checksums to compare with, as in most files of other formats: then every byte can be
    read, and nothing more is known.

    **Raises:**

    - [`eqx_ckpt.CorruptCheckpointError`][]: leaves are damaged; names each of them, and
        the damage. Or nothing is, but the content has another digest; names both.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        assert eqx_ckpt.inspect.verify("ckpt")
        ```
    """
    check_progress(progress)
    if digest is not None:
        check_digest("digest", digest)
    return read_consistently(source, lambda found: _verify(found, digest, progress))


def _verify(source: Source, digest: str | None, progress: Progress) -> bool:
    damage: dict[str, str] = {}
    found: str | None = None
    with reporting(progress, source.manifest.nbytes) as report:
        verified = report and ft.partial(report, "verify")
        if digest is None:
            read_all(source, damage, verified)
        else:
            found = digest_and_damage(source, damage, verified)
    if isinstance(source, Checkpoint | Recorded):
        source.check_the_rest(damage)
    raise_damage(damage, source)
    if isinstance(source, Recorded):
        _verify_state(source)
    if found != digest:
        raise CorruptCheckpointError(
            f"{source} is not what was expected: its content has the digest {found}, "
            f"and {digest} was expected. It holds other names, types, values or "
            "metadata. Restore another copy; `diff` compares the leaves of two."
        )
    return digest is not None or source.has_checksums


def read_all(
    source: Source, damage: dict[str, str], verified: Report | None = None
) -> None:
    """Read every byte of every leaf, and note which are damaged."""
    reads = (
        RegionRead(name, record, piece)
        for name, record in source.manifest.leaves.items()
        if record.is_array
        for piece in blocks(
            whole(record.data_shape), record.chunk_shape, record.itemsize
        )
    )
    for window in batches(reads, lambda read: read.nbytes, _WINDOW):
        arrays = read_or_note(source, window, damage, verified)
        if isinstance(source, Checkpoint):
            source.check_hashes(window, arrays, damage)


def _verify_state(source: Recorded) -> None:
    """Verify the state that follows the samples of a recording."""
    state = source.record.state
    if state is None:
        return
    try:
        _verify(Checkpoint(source.base / state_folder(state)), None, False)
    except CheckpointError as e:
        now = find_recorded(source.base)
        # A writer has committed in the meantime, and removed the state.
        if now is None or now.record.commit == source.record.commit:
            raise CorruptCheckpointError(
                f"The state of the recording {source} is damaged: {e}"
            ) from e
