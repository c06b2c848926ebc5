"""Saving what a source has: a few chunks are in memory at a time."""

from collections.abc import Iterator, Sequence

from .._format.chunk_grid import blocks, start_of, whole
from .._format.manifest import Manifest
from .._format.source import read_regions, RegionRead, Source
from .._storage.interface.chunk_bytes import Piece
from .._tree.plans.write_plan import Write, WritePlan


def plan_copy(manifest: Manifest) -> WritePlan:
    """The plan to save all leaves of a manifest, compressed as they are."""
    writes: list[Write] = []
    for name, record in manifest.leaves.items():
        record = record._replace(checksums=())
        writes.append(Write(name, record, record if record.is_array else None))
    unsaved = dict(manifest.unsaved)
    return WritePlan(writes, unsaved, manifest.separators, manifest.history)


def pieces_of(source: Source, writes: Sequence[Write]) -> Iterator[Piece]:
    """What this process writes, in pieces along the chunks."""
    for name, new, _, owned in writes:
        record = source.manifest.leaves[name]
        region = whole(record.data_shape)
        for part in blocks(region, record.chunk_shape, record.itemsize):
            if owned is None or start_of(part) in owned:
                (array,) = read_regions(source, [RegionRead(name, record, part)])
                if array.size:
                    yield Piece(name, new, part, array)
