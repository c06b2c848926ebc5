"""Encoding and decoding chunks; TensorStore does it for compressed ones."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import overlap, Region, relative, shape_of
from ..._format.leaf_record import LeafRecord
from ..._lazy import Array
from ..calls.tensorstore_calls import array_spec, context, wait_for
from ..interface.chunk_bytes import CHECKSUM_BYTES, Chunk, chunks_of, encoded, Target


if TYPE_CHECKING:
    import tensorstore as ts


class Piece(NamedTuple):
    """Adjacent chunks of an array, not yet encoded."""

    name: str
    record: LeafRecord
    region: Region
    array: Array


def stored(
    pieces: Sequence[Piece],
) -> Iterator[tuple[Chunk, Iterable[memoryview | bytes]]]:
    """The chunks of some pieces, each in the parts of what is stored."""
    packed: list[Piece] = []
    for piece in pieces:
        name, record, region, array = piece
        if record.compression is not None:
            packed.append(piece)
            continue
        for chunk in chunks_of(name, record, region):
            is_whole = array.shape == record.chunk_shape
            part = array if is_whole else array[relative(chunk.region, region)]
            yield chunk, encoded(chunk, part)
    if packed:
        for chunk, value in ChunkCodec().encoded(packed):
            yield chunk, (value[:-CHECKSUM_BYTES], value[-CHECKSUM_BYTES:])


class ChunkCodec:
    """TensorStore's codec for a few compressed chunks, which it keeps until it ends."""

    def __init__(self) -> None:
        context()  # Raises in a forked process, which TensorStore would abort.
        import tensorstore as ts

        self._context = ts.Context()
        self._memory = ts.KvStore.open(
            {"driver": "memory"}, context=self._context
        ).result()
        self._specs: dict[tuple[Any, ...], ts.Spec] = {}

    def encoded(self, pieces: Sequence[Piece]) -> Iterator[tuple[Chunk, bytes]]:
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
            wait_for(future, piece.name)
        reading = [self._memory.read(chunk.key) for chunk in chunks]
        for chunk, future in zip(chunks, reading, strict=True):
            yield chunk, future.result().value

    def decode(
        self,
        parts: Sequence[tuple[Chunk, bytes, Sequence[Target]]],
        damage: dict[str, str],
    ) -> None:
        """Decode chunks into the arrays whose regions are given."""
        import tensorstore as ts

        stores = self._opened({chunk.name: chunk.record for chunk, _, _ in parts})
        for chunk, value, _ in parts:
            self._memory.write(chunk.key, value).result()
        reading: list[tuple[str, ts.WriteFutures]] = []
        for chunk, _, targets in parts:
            for region, array in targets:
                common = overlap(chunk.region, region)
                target = _at(ts.array(array), relative(common, region))
                source = _at(stores[chunk.name], common)
                reading.append((chunk.name, target.write(source)))
        for name, future in reading:
            try:
                wait_for(future, name)
            except CorruptCheckpointError as e:
                damage.setdefault(name, str(e))

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


def _at(array: "ts.TensorStore", region: Region) -> "ts.TensorStore":
    return array if array.shape == shape_of(region) else array[region]
