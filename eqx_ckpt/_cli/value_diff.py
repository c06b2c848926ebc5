"""Read parts of leaves."""

import re
from typing import Any, NamedTuple

import eqx_ckpt

from .._format.chunk_grid import Region
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.manifest import Manifest
from .._format.source import read_regions, RegionRead, Source
from .._inspecting.array_statistics import Moments
from .._inspecting.leaf_stats import LeafStats, moments_of, stats_of
from .._lazy import Array, np
from .._tree.matching.similar_names import instead_of


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
