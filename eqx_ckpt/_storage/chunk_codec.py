"""Memory in which TensorStore makes chunks of arrays, and arrays of chunks."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from .._errors import CorruptCheckpointError
from .._format.chunks import (
    chunk_index,
    chunk_key,
    chunk_region,
    overlap,
    Region,
    shape_of,
    touched,
)
from .._format.leaves import LeafRecord
from .kvstore import array_spec, result


if TYPE_CHECKING:
    import tensorstore as ts


class Piece(NamedTuple):
    """Chunks of an array, next to each other, that are still an array."""

    name: str
    record: LeafRecord
    region: Region
    array: np.ndarray


class Chunk(NamedTuple):
    """A chunk as it is at rest, and which one of its array it is."""

    name: str
    record: LeafRecord
    position: int  # in C order
    at: tuple[int, ...]  # along each axis
    key: str
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """Of the array that it is when it is decoded, its padding included."""
        return math.prod(self.record.chunk_shape) * self.record.itemsize

    @property
    def region(self) -> Region:
        return chunk_region(self.at, self.record.data_shape, self.record.chunk_shape)


def chunks_of(name: str, record: LeafRecord, region: Region) -> Iterator[Chunk]:
    """Those that a region touches, without their values."""
    shape, chunk = record.data_shape, record.chunk_shape
    for position in touched(region, shape, chunk):
        at = chunk_index(position, shape, chunk)
        yield Chunk(name, record, position, at, f"{name}/{chunk_key(at)}")


class Scratch:
    """Some chunks at a time; nothing stays there."""

    def __init__(self) -> None:
        import tensorstore as ts

        self._context = ts.Context()
        self._memory = ts.KvStore.open(
            {"driver": "memory"}, context=self._context
        ).result()
        self._specs: dict[LeafRecord, ts.Spec] = {}

    def encoded(self, pieces: Sequence[Piece]) -> Iterator[Chunk]:
        stores = self._opened({piece.name: piece.record for piece in pieces})
        writing = [
            (
                piece,
                _at(stores[piece.name], piece.region).write(
                    piece.array, can_reference_source_data_indefinitely=True
                ),
            )
            for piece in pieces
        ]
        chunks = [
            chunk
            for piece in pieces
            for chunk in chunks_of(piece.name, piece.record, piece.region)
        ]
        for piece, future in writing:
            result(future, piece.name)
        reading = [self._memory.read(chunk.key) for chunk in chunks]
        for chunk, future in zip(chunks, reading, strict=True):
            yield chunk._replace(value=future.result().value)
        self._clear()

    def decode(
        self,
        parts: Sequence[tuple[Chunk, Sequence[tuple[Region, np.ndarray]]]],
        damage: dict[str, str],
    ) -> None:
        """Fill arrays, of which the regions are given, with what is in each chunk."""
        import tensorstore as ts

        stores = self._opened({chunk.name: chunk.record for chunk, _ in parts})
        for chunk, _ in parts:
            self._memory.write(chunk.key, chunk.value).result()
        reading: list[tuple[str, ts.WriteFutures]] = []
        for chunk, targets in parts:
            for region, array in targets:
                common = overlap(chunk.region, region)
                inside = tuple(
                    slice(c.start - r.start, c.stop - r.start)
                    for c, r in zip(common, region, strict=True)
                )
                target = _at(ts.array(array), inside)
                source = _at(stores[chunk.name], common)
                reading.append((chunk.name, target.write(source)))
        for name, future in reading:
            try:
                result(future, name)
            except CorruptCheckpointError as e:
                damage.setdefault(name, str(e))
        self._clear()

    def _opened(self, records: dict[str, LeafRecord]) -> "dict[str, ts.TensorStore]":
        import tensorstore as ts

        opening = {
            name: ts.open(
                array_spec(record, self._specs),
                kvstore=self._memory / f"{name}/",
                context=self._context,
                open=True,
                assume_metadata=True,
            )
            for name, record in records.items()
        }
        return {name: future.result() for name, future in opening.items()}

    def _clear(self) -> None:
        import tensorstore as ts

        self._memory.delete_range(ts.KvStore.KeyRange("", "")).result()


def _at(array: "ts.TensorStore", region: Region) -> "ts.TensorStore":
    return array if array.shape == shape_of(region) else array[region]
