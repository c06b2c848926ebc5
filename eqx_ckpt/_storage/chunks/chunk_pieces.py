"""The parts of arrays that are written."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..._format.chunk_grid import Region, relative
from ..._format.leaf_record import LeafRecord
from ..._lazy import Array
from ..interface.chunk_bytes import Chunk, chunks_of, encoded
from ..interface.place import ArrayWrite


class Piece(NamedTuple):
    """Adjacent chunks of an array, not yet encoded."""

    name: str
    record: LeafRecord
    region: Region
    array: Array


def pieces_of(write: ArrayWrite) -> Iterator[Piece]:
    name, record, shards = write
    for region, array in shards:
        if array.size:
            yield Piece(name, record, region, array)


def stored(piece: Piece) -> Iterator[tuple[Chunk, Iterable[memoryview | bytes]]]:
    """The chunks of a piece, each in the parts of what is stored."""
    name, record, region, array = piece
    for chunk in chunks_of(name, record, region):
        is_whole = array.shape == record.chunk_shape
        part = array if is_whole else array[relative(chunk.region, region)]
        yield chunk, encoded(chunk, part)
