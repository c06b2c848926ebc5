"""Statistics of the leaves of a checkpoint."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .._format.chunk_grid import batches, blocks, whole
from .._format.leaf_names import is_below
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.source import raise_damage, read_or_note, RegionRead, Source
from .._lazy import Array, np
from .._sources.consistent_read import read_consistently
from .._storage.calls.threads import Pool
from .._tree.matching.name_tree import checked_prefix
from .._types import PathLike
from .array_statistics import Moments, moments


# Host memory for one read, while the statistics of the previous one are computed.
_WINDOW = 32 * 2**20


# The size of the pieces that one thread computes statistics of.
_TASK = 4 * 2**20


@dataclass(frozen=True)
class LeafStats:
    """Statistics of one leaf; `None` where its dtype has no such statistic.

    **Attributes:**

    - `count`: the number of elements (numbers, keys, dates, or bytes).
    - `nan`, `inf`: the number of NaNs (of NaTs among dates), and of positive and
        negative infinities. All other statistics are of the finite numbers only.
    - `min`, `max`: exact, as an `int`, a `float`, or a NumPy date; `None` for complex
        numbers.
    - `mean`, `std`, `norm`: the average, the standard deviation, and the square root of
        the sum of squares, in 64 bits, where booleans are 0 and 1.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.array([1.0, 3.0, jnp.nan])})
        found = eqx_ckpt.inspect.stats("ckpt")["w"]
        assert (found.count, found.nan, found.mean) == (3, 1, 2)
        ```
    """

    count: int
    nan: int = 0
    inf: int = 0
    min: Any = None
    max: Any = None
    mean: float | complex | None = None
    std: float | None = None
    norm: float | None = None


def stats(source: PathLike | Source, prefix: str = "") -> dict[str, LeafStats]:
    """Compute minimum, maximum, mean, norm, NaNs and infinities of each leaf.

    Everything is read once, chunk by chunk, and its checksums, if it has any, are
    verified. At most 64 MiB are in memory, however large a leaf is.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `prefix`: only the leaves below this name.

    **Returns:**

    A [`eqx_ckpt.inspect.LeafStats`][] for each leaf, by name.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: there is no leaf below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: leaves are damaged; names each of them, and
        the damage.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"w": jnp.array([1.0, 2.0, jnp.nan]), "step": 5}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree)
        found = eqx_ckpt.inspect.stats("ckpt")
        assert found["w"].nan == 1
        assert found["w"].mean == 1.5
        assert found["step"].max == 5
        ```
    """
    return read_consistently(source, lambda found: _stats(found, prefix))


def _stats(source: Source, prefix: str) -> dict[str, LeafStats]:
    damage: dict[str, str] = {}
    found = stats_and_damage(source, prefix, damage)
    raise_damage(damage, source)
    return found


def stats_and_damage(
    source: Source, prefix: str, damage: dict[str, str]
) -> dict[str, LeafStats]:
    """As `stats`, but put damaged leaves into `damage` instead of raising."""
    manifest = source.manifest
    prefix = checked_prefix(prefix, manifest)
    records = {n: r for n, r in manifest.leaves.items() if is_below(prefix, n)}
    found: dict[str, Moments] = {}
    for name, piece in _pieces(source, records, damage):
        found[name] = found[name].plus(piece) if name in found else piece
    return {
        name: stats_of(record, found.get(name, Moments()))
        for name, record in records.items()
        if name not in damage
    }


def _pieces(
    source: Source, records: dict[str, LeafRecord], damage: dict[str, str]
) -> Iterator[tuple[str, Moments]]:
    """The moments of each piece, in order, computed while the next pieces are read."""
    reads = (
        RegionRead(name, record, piece)
        for name, record in records.items()
        if record.is_array
        for piece in blocks(
            whole(record.data_shape), record.chunk_shape, record.itemsize
        )
    )
    computing: list[Future[list[tuple[str, Moments]]]] = []
    with Pool(len(os.sched_getaffinity(0))) as pool:
        for window in batches(reads, lambda read: read.nbytes, _WINDOW):
            arrays = read_or_note(source, window, damage)
            done, computing = computing, []
            for future in done:
                yield from future.result()
            items = [
                (read, array)
                for read, array in zip(window, arrays, strict=True)
                if read.name not in damage
            ]
            for task in batches(items, lambda item: item[0].nbytes, _TASK):
                computing.append(pool.submit(_moments_of, task))
        for future in computing:
            yield from future.result()


def _moments_of(
    items: Sequence[tuple[RegionRead, Array]],
) -> list[tuple[str, Moments]]:
    return [(read.name, moments_of(read.record, array)) for read, array in items]


def moments_of(record: LeafRecord, array: Array) -> Moments:
    """The moments of a piece of a leaf, as it is stored."""
    if record.kind in ("key", "bytes"):
        return Moments()
    array = from_stored(array, record)
    if array.dtype.kind not in "mM":
        return moments(array)
    dates = array[~np.isnat(array)]
    if dates.size == 0:
        return Moments(nan=array.size)
    low, high = dates.min(), dates.max()
    return Moments(dates.size, array.size - dates.size, 0, low, high)


def stats_of(record: LeafRecord, found: Moments) -> LeafStats:
    """The statistics of a leaf, from its moments; those of a scalar are its own."""
    if not record.is_array:
        value = scalar_from_text(record.kind, record.value or "")
        if isinstance(value, int) and abs(value) >= 2**63:
            return LeafStats(1, min=value, max=value)
        found = moments(np.asarray(value))
    count = found.count + found.nan + found.inf
    if record.kind in ("key", "bytes"):
        return LeafStats(int(np.prod(record.shape, dtype=int)))
    low, high, bad = found.min, found.max, (found.nan, found.inf)
    if found.count == 0 or record.dtype[1:3] in ("M8", "m8"):
        return LeafStats(count, *bad, low, high)
    return LeafStats(count, *bad, low, high, found.mean, found.std, found.norm)
