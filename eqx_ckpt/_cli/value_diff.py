"""Read parts of leaves, and compare two checkpoints."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import eqx_ckpt

from .._format.chunk_grid import blocks, Region, whole
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.manifest import Manifest
from .._format.source import read_regions, RegionRead, Source
from .._inspecting.array_statistics import distances, Moments
from .._inspecting.leaf_stats import LeafStats, moments_of, stats_of
from .._lazy import Array, np
from .._tree.matching.foreign_spelling import respelled
from .._tree.matching.similar_names import instead_of
from .option_words import in_options


_INDEX = re.compile(r"(?P<name>.*?)(\[(?P<index>[-0-9:, ]*)\])?\Z", re.S)


def split_index(text: str) -> tuple[str, tuple[Any, ...]]:
    """Split `NAME[0:3, :]` into the name and the index, which is as in NumPy."""
    found = _INDEX.match(text)
    assert found is not None
    name, index = found["name"], found["index"] or ""
    try:
        return name, tuple(_slice(part) for part in index.split(",") if part.strip())
    except (TypeError, ValueError):
        raise eqx_ckpt.CheckpointError(
            f"[{index}] is not an index. Pass integers and slices: `{name}[0, 2:5]`."
        ) from None


def _slice(text: str) -> int | slice:
    if ":" not in text:
        return int(text)
    found = slice(*(int(part) if part.strip() else None for part in text.split(":")))
    # As NumPy, this refuses a step of zero.
    found.indices(0)
    return found


class Part(NamedTuple):
    """A part of a leaf: its values, and their statistics."""

    record: LeafRecord
    values: Array
    stats: LeafStats


def part_of(source: Source, name: str, index: tuple[Any, ...]) -> Part:
    """Read a part of one leaf, and no more of it."""
    record = _record_named(source.manifest, name)
    try:
        shape = np.broadcast_to(np.empty((), bool), record.shape)[index].shape
    except IndexError as e:
        raise eqx_ckpt.CheckpointError(f"{name!r} is {record}: {e}.") from None
    alone = record._replace(shape=shape)
    if not record.is_array:
        value = scalar_from_text(record.kind, record.value or "")
        return Part(record, np.asarray(value), stats_of(alone, Moments()))
    region, inside = _bounds(index, record.data_shape)
    (found,) = read_regions(source, [RegionRead(name, record, region)])
    stored = np.asarray(found[inside])
    stats = stats_of(alone, moments_of(record, stored))
    return Part(record, from_stored(stored, record), stats)


def _record_named(manifest: Manifest, name: str) -> LeafRecord:
    names = manifest.leaves
    if (why := manifest.unsaved.get(name)) is not None:
        raise eqx_ckpt.LeafMismatchError(f"{name!r} was left out: {why}.")
    if name in names:
        return names[name]
    raise eqx_ckpt.LeafMismatchError(
        f"There is no leaf {name!r}.{instead_of(name, [*names])}"
    )


def _bounds(
    index: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Region, tuple[Any, ...]]:
    """The smallest region with all that an index picks, and the index inside of it."""
    region: list[slice] = []
    inside: list[int | slice] = []
    rest = [slice(None)] * (len(shape) - len(index))
    for one, size in zip([*index, *rest], shape, strict=True):
        if isinstance(one, int):
            first = last = range(size)[one]
            inside.append(0)
        else:
            picked = range(size)[one]
            first, last = sorted((picked[0], picked[-1])) if picked else (0, -1)
            inside.append(slice(None, None, picked.step))
        region.append(slice(first, last + 1))
    return tuple(region), tuple(inside)


def differences(
    first: Source, second: Source, values: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """How the leaves differ, in the manifests and, if asked for, in the data; and what
    is damaged."""
    damage: dict[str, str] = {}
    return list(_differences(first, second, values, damage)), damage


def _differences(
    first: Source,
    second: Source,
    values: bool,
    damage: dict[str, str],
) -> Iterator[dict[str, Any]]:
    left, right = first.manifest.leaves, second.manifest.leaves
    other = respelled(first.manifest, second.manifest)
    found = {*other.values()}
    for name in dict.fromkeys([*left, *(n for n in right if n not in found)]):
        there = other.get(name, name)
        x, y = left.get(name), right.get(there)
        entry: dict[str, Any] = {"name": name, "a": _words(x), "b": _words(y)}
        if x is None or y is None:
            yield entry | {"status": "only in a" if y is None else "only in b"}
        elif (x[:3], x.impl) != (y[:3], y.impl):
            yield entry | {"status": "another type"}
        elif x.value is not None:
            if x.value != y.value:
                entry |= {"a": x.value, "b": y.value}
                yield entry | {"status": "another value"}
        elif values:
            try:
                apart = _compare(first, second, (name, there), x, y)
            except eqx_ckpt.CorruptCheckpointError as e:
                damage[name] = in_options(e)
                continue
            if apart:
                yield entry | {"status": "other values"} | apart


def _words(record: LeafRecord | None) -> str | None:
    return None if record is None else str(record)


def _compare(
    first: Source,
    second: Source,
    names: tuple[str, str],
    x: LeafRecord,
    y: LeafRecord,
) -> dict[str, Any]:
    """Measure how much the data of two leaves differ; nothing if they are equal."""
    count, apart = 0, 0.0
    shares: list[float] = []
    for piece in blocks(whole(x.data_shape), x.chunk_shape, x.itemsize):
        (a,) = read_regions(first, [RegionRead(names[0], x, piece)])
        (b,) = read_regions(second, [RegionRead(names[1], y, piece)])
        if a.tobytes() == b.tobytes():
            continue
        a, b = from_stored(a, x), from_stored(b, y)
        far = distances(a, b)
        count += int(np.count_nonzero(far))
        apart = max(apart, float(np.max(far)))
        # A date has no size that its distance could be a share of.
        if a.dtype.kind not in "mM":
            shares.append(_relative(far, a, b))
    if not count:
        return {}
    return {"count": count, "max_abs": apart, "max_rel": max(shares, default=None)}


def _relative(far: Array, a: Array, b: Array) -> float:
    """The largest of the distances, each as a share of the larger number."""
    if np.isinf(far).any():
        return math.inf
    a, b = a[far > 0], b[far > 0]
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    sizes = np.maximum(np.abs(a.astype(kind)), np.abs(b.astype(kind)))
    return float(np.max(far[far > 0] / sizes, initial=0))
