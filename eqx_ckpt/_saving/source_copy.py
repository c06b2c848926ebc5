"""Saving what a source has: a few chunks are in memory at a time."""

from collections.abc import Iterator, Sequence

from .._format.chunk_grid import blocks, chunk_keys, start_of, whole
from .._format.leaf_record import CRC32C_DIGITS
from .._format.manifest import Manifest
from .._format.source import read_regions, RegionRead, Source
from .._storage.interface.base import Base
from .._storage.interface.chunk_bytes import Piece
from .._tree.plans.write_plan import Write, WritePlan


def plan_copy(manifest: Manifest) -> WritePlan:
    """The plan to save all leaves of a manifest, compressed as they are."""
    writes: list[Write] = []
    for name, record in manifest.leaves.items():
        record = record._replace(checksums=())
        writes.append(Write(name, record, record if record.is_array else None))
    unsaved = dict(manifest.unsaved)
    plan = WritePlan(writes, unsaved, manifest.separators, manifest.history)
    return plan._replace(part=manifest.part)


def equal_to(manifest: Manifest, writes: Sequence[Write], base: Base) -> list[Write]:
    """Those of which a base has each chunk, as the hashes of their content say."""
    found: list[Write] = []
    for write in writes:
        record = manifest.leaves[write.name]
        keys = chunk_keys(record.data_shape, record.chunk_shape)
        known = [base.chunks.get(f"{write.name}/{key}") for key in keys]
        pairs = zip(record.checksums, known, strict=True)
        if all(
            chunk is not None
            and chunk.checksums[CRC32C_DIGITS:] == checksums[CRC32C_DIGITS:]
            for checksums, chunk in pairs
        ):
            found.append(write)
    return found


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
