"""A source that is the average of others."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from .._errors import LeafMismatchError
from .._format.chunk_grid import batches, blocks, relative, TARGET_BYTES
from .._format.leaf_names import is_below
from .._format.leaf_record import dtype_from_tag, LeafRecord
from .._format.manifest import Manifest
from .._format.source import read_or_note, RegionRead, Source
from .._lazy import Array, DType, np
from .._types import check_text, is_real, PathLike, Report, shown
from .checkpoint_source import opened


# Host memory for what is read of one source.
_WINDOW = 32 * 2**20


_MOST_LINES = 20


def average(
    sources: Sequence[PathLike | Source],
    weights: Sequence[float] | Array | None = None,
    prefix: str = "",
) -> Source:
    """The average of several checkpoints, as a source to restore from or to copy.

    Nothing is read now. Whatever reads a leaf of it, merges that leaf chunk by chunk,
    so that about 100 MiB of the sources are in memory, however large they are.

    Arrays of floating-point and complex numbers are averaged, in their own dtype if
    that has 32 bits in each number or more, and else in `float32`, which is rounded
    once, at the end. With each source after the first one, the average becomes
    `average + (x[i] - average) * share`, where `share` is `weights[i]` divided by the
    sum of the weights so far; and `average * (1 - share) + x[i] * share` where that is
    not finite. So equal values stay exactly what they are. All other leaves are those
    of the first source: integers, such as the counts of an optimiser, booleans, PRNG
    keys, dates, Python numbers, and bytes of a custom `filter_spec`.

    **Arguments:**

    - `sources`: directories or URLs of checkpoints, or [`eqx_ckpt.interop.Source`][]s,
        at least one. Their leaves need to have the same names, dtypes and shapes.
    - `weights`: a positive number for each source; only their ratios count. `None` are
        equal weights.
    - `prefix`: only the leaves below this name, which keep their names; others may
        differ.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. It has no metadata.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at a path.
    - [`eqx_ckpt.LeafMismatchError`][]: lists the leaves that only some of the sources
        have, or whose types differ; or the first source has none below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a manifest is damaged; when it is read, a
        leaf of a source.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        with eqx_ckpt.CheckpointManager("runs/a") as manager:
            for step in range(3):
                manager.save(step, {"w": jnp.full(2, float(step)), "step": step})
            manager.wait()
            last = [manager.path(step) for step in manager.steps()[-2:]]
        like = {"w": jnp.zeros(2), "step": 0}
        mean = eqx_ckpt.tree_deserialise_leaves(eqx_ckpt.average(last), like)
        assert mean["w"][0] == 1.5
        ```
    """
    if isinstance(sources, str | os.PathLike | Source) or not hasattr(
        sources, "__len__"
    ):
        raise TypeError(f"`sources` is {shown(sources)}. Pass a list of sources.")
    if not sources:
        raise ValueError("`sources` is empty. Pass at least one source.")
    numbers = [1.0] * len(sources) if weights is None else _checked(weights, sources)
    check_text("prefix", prefix)
    found = [*map(_opened, sources)]
    every = [_below(source, prefix.strip("/")) for source in found]
    _check_alike(found, every)
    return Averaged(found, numbers, every[0])


def _below(source: Source, prefix: str) -> dict[str, LeafRecord]:
    leaves = source.manifest.leaves
    below = {name: r for name, r in leaves.items() if is_below(prefix, name)}
    if prefix and not below:
        raise LeafMismatchError(
            f"`prefix` is {prefix!r}, and {source} has no leaf of that name or below "
            "it."
        )
    return below


def _opened(source: PathLike | Source) -> Source:
    try:
        return opened(source)
    except TypeError as e:
        raise TypeError(f"`sources`: {e}") from None


def _checked(
    weights: Sequence[float] | Array, sources: Sequence[object]
) -> list[float]:
    numbers: list[object] = []
    if not isinstance(weights, Mapping | Set):  # These have no order of the sources.
        with contextlib.suppress(TypeError):
            numbers.extend(weights)
    if not numbers or not all(map(is_real, numbers)):
        raise TypeError(
            f"`weights` is {shown(weights)}. Pass a list of numbers, or `None`."
        )
    try:
        found = [float(x) for x in numbers]  # pyright: ignore[reportArgumentType]
    except OverflowError:
        found = [math.inf]
    if not all(math.isfinite(x) and x > 0 for x in found):
        raise ValueError(
            f"`weights` is {shown(weights)}. Pass positive, finite numbers."
        )
    if len(found) != len(sources):
        raise ValueError(
            f"`weights` is {shown(weights)}. Pass one for each of {len(sources)} "
            "sources."
        )
    # Their sum must not overflow; powers of two keep all digits.
    _, exponent = math.frexp(max(found))
    return [math.ldexp(x, -exponent) for x in found]


def _check_alike(
    sources: Sequence[Source], every: Sequence[Mapping[str, LeafRecord]]
) -> None:
    """Raise one error with all leaves that the sources do not have in common."""
    first, expected, lines = sources[0], every[0], list[str]()
    for other, leaves in zip(sources[1:], every[1:], strict=True):
        for name in dict.fromkeys([*expected, *leaves]):
            a, b = expected.get(name), leaves.get(name)
            if a is None or b is None or _type_of(a) != _type_of(b):
                lines.append(
                    f"- {name!r}: {a or 'nothing'} in {first}, {b or 'nothing'} in "
                    f"{other}."
                )
    if lines:
        shown = lines[:_MOST_LINES]
        if more := len(lines) - len(shown):
            shown.append(f"- And {more} more.")
        raise LeafMismatchError(
            "These checkpoints have no average, because their leaves differ:\n"
            + "\n".join(shown)
            + "\nOf a part that they share, pass the name as `prefix`."
        )


def _type_of(record: LeafRecord) -> tuple[object, ...]:
    """What has to be the same; whether an array was JAX's or NumPy's need not be."""
    if record.is_array and record.kind != "bytes":
        return record.dtype, record.shape, record.impl
    return (record.kind,)


class Averaged(Source):
    """The average of `sources`, whose leaves are alike."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        leaves: Mapping[str, LeafRecord],
    ) -> None:
        self.sources = sources
        self._weights = weights
        sums = [*itertools.accumulate(weights)]
        # What each source after the first one adds.
        self._shares = [w / s for w, s in zip(weights[1:], sums[1:], strict=True)]
        first = sources[0].manifest
        self._manifest = replace(
            first,
            leaves={n: r._replace(checksums=()) for n, r in leaves.items()},
            metadata=None,
            history=None,
            references={},
        )

    def __str__(self) -> str:
        sources = ", ".join(map(str, self.sources))
        # Processes that weigh in other ways make different calls.
        weights = f" by {self._weights}" if len({*self._weights}) > 1 else ""
        return f"the average of {sources}{weights}"

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def has_checksums(self) -> bool:
        return all(source.has_checksums for source in self.sources)

    @property
    def version(self) -> str:
        versions = json.dumps([source.version for source in self.sources])
        return hashlib.sha256(versions.encode()).hexdigest()

    def has_changed(self) -> bool:
        return any(source.has_changed() for source in self.sources)

    @property
    def host_bytes(self) -> int:
        """The most host memory that a merge takes, besides that of its result."""
        records = [r for r in self._manifest.leaves.values() if r.is_array]
        piece = max(map(_largest_piece, records), default=0)
        window = min(max(_WINDOW, piece), sum(record.nbytes for record in records))
        wider = max(map(_widening, records), default=0)
        # What two sources have of a window, and it once more, in 32 bits.
        return 2 * window + piece + wider * (window + piece)

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        targets = [np.empty(read.shape, read.record.data_type) for read in reads]
        self.read_into(reads, targets, damage, report)
        return targets

    def read_into(
        self,
        reads: Sequence[RegionRead],
        targets: Sequence[Array],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> None:
        pieces = _pieces(reads, targets)
        for batch in batches(pieces, lambda piece: piece[0].nbytes, _WINDOW):
            asked = [read for read, _ in batch]
            for (read, target), array in zip(
                batch, self._merged(asked, damage), strict=True
            ):
                if read.name not in damage:
                    target[...] = array
                if report:
                    report(read.name, read.nbytes)

    def _merged(
        self, reads: Sequence[RegionRead], damage: dict[str, str]
    ) -> list[Array]:
        """The average of some regions, as it is stored."""
        found = self._read(self.sources[0], reads, damage)
        averaged = {
            i: dtype
            for i, read in enumerate(reads)
            if (dtype := _dtype_of_numbers(read.record)) is not None
        }
        chosen = [reads[i] for i in averaged]
        means: dict[int, Array] = {}
        for source, share in zip(self.sources[1:], self._shares, strict=True):
            # Without a name, its arrays go before the next source is read.
            for (i, dtype), array in zip(
                averaged.items(), self._read(source, chosen, damage), strict=True
            ):
                if reads[i].name in damage:
                    continue
                if i not in means and not _is_same(found[i], array):
                    means[i] = _widened(found[i], dtype)
                if i in means:
                    _move(means[i], _widened(array, dtype), share)
        for i, mean in means.items():
            stored = _narrowed(mean, found[i].view(averaged[i]))
            found[i] = stored.view(reads[i].record.data_type)
        return found

    def _read(
        self, source: Source, reads: Sequence[RegionRead], damage: dict[str, str]
    ) -> list[Array]:
        leaves = source.manifest.leaves
        own = [read._replace(record=leaves[read.name]) for read in reads]
        problems: dict[str, str] = {}
        arrays = read_or_note(source, own, problems)
        for name, problem in problems.items():
            damage.setdefault(name, f"{problem}, in {source}")
        return arrays


def _pieces(
    reads: Sequence[RegionRead], targets: Sequence[Array]
) -> Iterator[tuple[RegionRead, Array]]:
    """The regions along the chunks, each with its part of the target."""
    for read, target in zip(reads, targets, strict=True):
        record = read.record
        for part in blocks(read.region, record.chunk_shape, record.itemsize):
            inside = relative(part, read.region)
            yield read._replace(region=part), target[(*inside, ...)]


def _largest_piece(record: LeafRecord) -> int:
    """The bytes of the largest of these regions, of one array."""
    chunk = math.prod(record.chunk_shape) * record.itemsize
    return min(record.nbytes, max(chunk, TARGET_BYTES))


def _widening(record: LeafRecord) -> int:
    """By what numbers grow when they are averaged; 0 if they stay as they are."""
    dtype = _dtype_of_numbers(record)
    return 0 if dtype is None or dtype.name in _WIDE else 4 // dtype.itemsize


def _dtype_of_numbers(record: LeafRecord) -> DType | None:
    """The dtype, in the order of this machine, of numbers that have an average."""
    if record.kind in ("key", "bytes") or not record.is_array:
        return None
    dtype = dtype_from_tag(record.dtype).newbyteorder("=")
    return dtype if re.match("bfloat|float|complex", dtype.name) else None


def _widened(stored: Array, dtype: DType) -> Array:
    """Numbers as they are averaged: in 32 bits or more."""
    array = stored.view(dtype)
    wide = dtype if dtype.name in _WIDE else np.dtype("float32")
    return np.ascontiguousarray(array.astype(wide, copy=False)).reshape(array.shape)


def _narrowed(mean: Array, first: Array) -> Array:
    """An average in the dtype of the first source, with the bits of that where it has
    not moved: a conversion there and back may change a NaN."""
    if mean.dtype == first.dtype:
        return mean
    with np.errstate(all="ignore"):
        narrow = np.asarray(mean.astype(first.dtype))
    np.copyto(narrow, first, where=_bits(mean) == _bits(_widened(first, first.dtype)))
    return narrow


_WIDE = ("float32", "float64", "complex64", "complex128")


def _is_same(a: Array, b: Array) -> bool:
    """Whether two arrays have the same bits, as leaves that are frozen have."""
    x, y = (np.atleast_1d(array).reshape(-1) for array in (a, b))
    # Most that differ do so at once.
    return all(
        np.array_equal(u.view(np.uint8), v.view(np.uint8))
        for u, v in ((x[:_FIRST], y[:_FIRST]), (x, y))
    )


_FIRST = 1024


def _move(mean: Array, array: Array, share: float) -> None:
    """Take one more array into an average, in place; both are in C order. Where both
    have the same bits, they stay: `-0.0`, for one, would move to `0.0`."""
    means, news = (_real(x.reshape(-1)) for x in (mean, array))
    for start in range(0, means.size, _BLOCK):
        old, new = means[start : start + _BLOCK], news[start : start + _BLOCK]
        with np.errstate(all="ignore"):
            moved = new - old
            moved *= share
            moved += old
            if not np.isfinite(moved.sum()):
                odd = ~np.isfinite(moved)
                moved[odd] = old[odd] * (1 - share) + new[odd] * share
        np.copyto(old, moved, where=_bits(old) != _bits(new))


def _bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def _real(array: Array) -> Array:
    """Complex numbers as pairs."""
    is_complex = array.dtype.kind == "c"
    return array.view(f"f{array.itemsize // 2}") if is_complex else array


# Numbers that a cache holds.
_BLOCK = 2**15
