"""The digest of what a checkpoint contains, however and wherever that is stored."""

import functools as ft
import hashlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from .._format.chunk_grid import batches, Region, shape_of, TARGET_BYTES, whole
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._format.source import raise_damage, read_or_note, RegionRead, Source
from .._format.user_metadata import exactly, pack
from .._lazy import Array
from .._progress import check_progress, Progress, reporting
from .._sources.consistent_read import read_consistently
from .._sources.recording_source import memory
from .._storage.calls.threads import Pool
from .._types import PathLike, Report


# Of one leaf. A larger one is read where chunks side by side would be read repeatedly.
_SLAB = TARGET_BYTES


_LARGEST_SLAB = 512 * 2**20


# The size of the pieces that one thread hashes.
_TASK = 4 * 2**20


def digest(source: PathLike | Source, *, progress: Progress = False) -> str:
    """Compute the digest of the content: a SHA-256 of names, types, values, metadata.

    It is the same for every layout, chunking, compression, mesh and place of the same
    content, also of what [`eqx_ckpt.copy`][] makes of it. It differs if a bit of a
    value differs, a name, a kind, a dtype, a shape, a weak type, the implementation of
    PRNG keys, what was not saved, or the metadata. Every byte is read, and compared
    with its checksum if it has one; it takes about as long as a SHA-256 of the data, of
    several leaves at a time.

    A few chunks for each core are in memory; of an array that is cut into chunks along
    several axes, as that of a mesh, up to 1 GiB.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][]. Of a recording, the draws that all chains have
        are the content, and not its state: what a copy of it contains.
    - `progress`: as [`eqx_ckpt.tree_serialise_leaves`][]; its phase is `"digest"`.

    **Returns:**

    64 hexadecimal digits, for the `digest` of [`eqx_ckpt.inspect.verify`][].

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: leaves are damaged; names each of them, and
        the damage.
    - [`eqx_ckpt.CheckpointError`][]: the metadata of a `Source` are not JSON.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        pinned = eqx_ckpt.inspect.digest("ckpt")
        eqx_ckpt.copy("ckpt", "compressed", layout="ocdbt", compression="zstd")
        assert eqx_ckpt.inspect.verify("compressed", digest=pinned)
        ```
    """
    check_progress(progress)
    return read_consistently(source, lambda found: _digest(found, progress))


def _digest(source: Source, progress: Progress) -> str:
    damage: dict[str, str] = {}
    with reporting(progress, source.manifest.nbytes) as report:
        found = digest_and_damage(
            source, damage, report and ft.partial(report, "digest")
        )
    raise_damage(damage, source)
    return found


def digest_and_damage(
    source: Source, damage: dict[str, str], report: Report | None
) -> str:
    """As `digest`, but put damaged leaves into `damage` instead of raising.

    If there are any, what is returned is not the digest of anything.
    """
    manifest = source.manifest
    # What cannot be written down is found before anything is read.
    head = ["eqx_ckpt digest 1", pack(exactly(manifest.metadata)), manifest.separators]
    hashes = _hashed(source, damage, report)
    total = hashlib.sha256()
    for line in itertools.chain([head], _lines(manifest, hashes)):
        total.update(json.dumps(line, sort_keys=True).encode() + b"\n")
    return total.hexdigest()


def _lines(manifest: Manifest, hashes: "_Hashes") -> Iterator[Sequence[Any]]:
    """What is not saved, and the leaves; `docs/format.md` describes the lines."""
    for name, text in sorted(manifest.unsaved.items()):
        yield "unsaved", name, text
    for name, record in sorted(manifest.leaves.items()):
        if record.is_array:
            about = (record.dtype, record.shape, record.impl, record.weak_type)
            yield record.kind, name, *about, hashes.hexdigest(name)
        else:
            yield record.kind, name, record.value


class _Hashes:
    """A SHA-256 of the data of each array."""

    def __init__(self, names: Iterable[str]) -> None:
        self._of = {name: hashlib.sha256() for name in names}

    def update(self, parts: Sequence[tuple[str, Sequence[Array]]]) -> None:
        """Go on with what comes next of some leaves; called by any thread."""
        for name, arrays in parts:
            for array in arrays:
                self._of[name].update(memory(array))

    def hexdigest(self, name: str) -> str:
        return self._of[name].hexdigest()


def _hashed(source: Source, damage: dict[str, str], report: Report | None) -> _Hashes:
    """The hashes of all arrays, computed while what comes next is read."""
    records = source.manifest.leaves.items()
    arrays = [(name, record) for name, record in records if record.is_array]
    # A leaf is hashed by one thread at a time: so the largest ones begin first.
    arrays.sort(key=lambda leaf: -leaf[1].nbytes)
    hashes = _Hashes(name for name, _ in arrays)
    cores = len(os.sched_getaffinity(0))
    reads = _in_turn((_slabs_of(*leaf) for leaf in arrays), max(4, cores))
    hashing: list[Future[None]] = []
    with Pool(cores) as pool:
        for window in batches(reads, lambda read: read.nbytes, max(4, cores) * _SLAB):
            found: dict[str, list[Array]] = {}
            read = read_or_note(source, window, damage, report)
            for part, array in zip(window, read, strict=True):
                if part.name not in damage:
                    found.setdefault(part.name, []).append(array)
            del read
            for future in hashing:
                future.result()
            hashing = [
                pool.submit(hashes.update, task)
                for task in batches(found.items(), _nbytes_of, _TASK)
            ]
        for future in hashing:
            future.result()
    return hashes


def _nbytes_of(part: tuple[str, Sequence[Array]]) -> int:
    return sum(array.nbytes for array in part[1])


def _in_turn(
    leaves: Iterable[Iterator[RegionRead]], count: int
) -> Iterator[RegionRead]:
    """The reads of all leaves, those of `count` leaves in turn."""
    waiting = iter(leaves)
    begun = deque(itertools.islice(waiting, count))
    while begun:
        reads = begun.popleft()
        if (read := next(reads, None)) is None:
            begun.extend(itertools.islice(waiting, 1))
        else:
            yield read
            begun.append(reads)


def _slabs_of(name: str, record: LeafRecord) -> Iterator[RegionRead]:
    region = whole(record.data_shape)
    for slab in slabs(region, record.chunk_shape, record.itemsize):
        yield RegionRead(name, record, slab)


def slabs(region: Region, chunk: Sequence[int], itemsize: int) -> Iterator[Region]:
    """Split a region into pieces that follow one another in C order.

    Each chunk is in one piece, if that needs no piece larger than `_LARGEST_SLAB`.
    """
    sizes = shape_of(region)
    axis = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
    if axis == len(sizes) or math.prod(sizes) * itemsize <= _SLAB:
        yield region
        return
    row = math.prod(sizes) // sizes[axis] * itemsize
    step = chunk[axis]
    if row * step <= _SLAB:
        step *= _SLAB // (row * step)
    elif row * step > _LARGEST_SLAB:
        step = max(1, _LARGEST_SLAB // row)
    span = region[axis]
    for start in range(span.start, span.stop, step):
        rows = slice(start, min(start + step, span.stop))
        piece = (*region[:axis], rows, *region[axis + 1 :])
        yield from slabs(piece, chunk, itemsize) if step == 1 else (piece,)
