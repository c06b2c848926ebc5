"""The bytes of chunks: their content, and their places in arrays.

Pieces are read and written that are still in a cache for their checksum, and so large
that threads seldom wait for each other in Python.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable, TypeAlias

from fastcrc import crc32
from xxhash import xxh3_128

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import (
    chunk_count,
    chunk_index,
    chunk_key,
    chunk_region,
    overlap,
    Region,
    relative,
    run_start,
    shape_of,
    touched,
    whole,
)
from ..._format.leaf_record import CRC32C_DIGITS, LeafRecord
from ..._lazy import Array, np
from ..._types import Checksums
from ..calls.host_memory import empty
from ..calls.zstd_codec import compressed, decompressed


CHECKSUM_BYTES = 4


# zstd compresses at most 2**17 bytes into a block, which has four bytes at least.
_MAX_RATIO = 2**15


# The page cache of a file that is written in smaller parts has smaller pages.
PIECE_BYTES = 2**21


# Chunks of fewer bytes are written in one step, as there may be thousands of them.
_SMALL = 2**17


# Copy bits, whatever they mean; the types of `ml_dtypes` are slower.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


Target: TypeAlias = tuple[Region, Array]


class Chunk(NamedTuple):
    """One chunk of an array."""

    name: str
    record: LeafRecord
    position: int  # in C order
    at: tuple[int, ...]  # along each axis
    key: str

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array, padding included."""
        return math.prod(self.record.chunk_shape) * self.record.itemsize

    @property
    def region(self) -> Region:
        return chunk_region(self.at, self.record.data_shape, self.record.chunk_shape)


def chunks_of(name: str, record: LeafRecord, region: Region) -> Iterator[Chunk]:
    """The chunks that a region touches."""
    shape, chunk = record.data_shape, record.chunk_shape
    if shape == chunk:
        at = (0,) * len(shape)
        yield Chunk(name, record, 0, at, f"{name}/{chunk_key(at)}")
        return
    for position in touched(region, shape, chunk):
        at = chunk_index(position, shape, chunk)
        yield Chunk(name, record, position, at, f"{name}/{chunk_key(at)}")


class Piece(NamedTuple):
    """Adjacent chunks of an array, not yet encoded."""

    name: str
    record: LeafRecord
    region: Region
    array: Array


def no_checksums(arrays: Mapping[str, LeafRecord]) -> Checksums:
    """Room for the checksums of all chunks."""
    return {
        name: [""] * chunk_count(record.data_shape, record.chunk_shape)
        for name, record in arrays.items()
    }


class Wanted(NamedTuple):
    """A chunk, and which of several reads need a part of it."""

    chunk: Chunk
    reads: list[int]


@runtime_checkable
class ChunkBytes(Protocol):
    """The open source of the bytes of a chunk."""

    nbytes: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Read into all of the buffers, one after another."""
        ...


class Problem(NamedTuple):
    """Why a chunk cannot be read.

    It is kept as text, because an exception would keep its traceback alive.
    """

    text: str
    is_missing: bool = False


class Value:
    """A chunk in memory, or the problem with it."""

    def __init__(self, found: bytes | Problem) -> None:
        self._found = found
        self.is_missing = isinstance(found, Problem) and found.is_missing
        self.nbytes = 0

    def __enter__(self) -> None:
        if isinstance(self._found, Problem):
            raise CorruptCheckpointError(self._found.text)
        self._value = memoryview(self._found)
        self.nbytes = len(self._found)

    def __exit__(self, *_: object) -> None: ...

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            buffer[:] = self._value[offset : offset + len(buffer)]
            offset += len(buffer)


def check_size(chunk: Chunk, nbytes: int) -> None:
    expected = chunk.nbytes + CHECKSUM_BYTES
    # zstd makes incompressible data a little larger.
    packed = chunk.record.compression is not None
    least = chunk.nbytes / _MAX_RATIO + CHECKSUM_BYTES
    most = expected * 1.01 + 1024
    if nbytes != expected and not (packed and least <= nbytes <= most):
        raise CorruptCheckpointError(
            f"{chunk.key} has {nbytes} bytes instead of {expected}"
            f"{' before compression' if packed else ''}"
        )


def place(chunk: Chunk, source: ChunkBytes, targets: Sequence[Target]) -> None:
    """Copy a chunk into the arrays whose regions are given.

    The whole chunk is read and compared with its checksum.
    """
    if chunk.record.compression is not None:
        _place_content(chunk, content(chunk, _verified(chunk, source)), targets)
        return
    reader = _Reader(chunk, source)
    run = _run(chunk, *targets[0]) if len(targets) == 1 else None
    if run is None:
        _scatter(reader, chunk, targets)
    else:
        start, memory = run
        reader.skip(start)
        reader.read(memory)
        reader.skip(source.nbytes - CHECKSUM_BYTES - start - len(memory))
    reader.compare()


def content(chunk: Chunk, stored: memoryview) -> Array:
    """The array of a chunk, padding included, from what precedes its checksum."""
    data = stored
    if chunk.record.compression is not None:
        try:
            data = decompressed(stored, chunk.nbytes)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{chunk.key} is damaged: {e}") from None
    flat = np.frombuffer(data, _BITS[chunk.record.itemsize])
    return flat.reshape(chunk.record.chunk_shape)


def _verified(chunk: Chunk, source: ChunkBytes) -> memoryview:
    """What precedes the checksum of a chunk, compared with that."""
    stored = empty((source.nbytes - CHECKSUM_BYTES,), np.uint8).data
    reader = _Reader(chunk, source)
    reader.read(stored)
    reader.compare()
    return stored


def _place_content(chunk: Chunk, found: Array, targets: Sequence[Target]) -> None:
    for region, array in targets:
        common = overlap(chunk.region, region)
        target = array.view(found.dtype)
        target[relative(common, region)] = found[relative(common, chunk.region)]


class _Reader:
    """Reads a chunk from beginning to end, and computes its checksum."""

    def __init__(self, chunk: Chunk, source: ChunkBytes) -> None:
        self._chunk = chunk
        self._source = source
        self._offset = self._crc = 0
        self._tail = memoryview(bytearray(CHECKSUM_BYTES))

    def read(self, memory: memoryview) -> None:
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            after = self._offset + len(piece)
            is_last = after + CHECKSUM_BYTES == self._source.nbytes
            buffers = [piece, self._tail] if is_last else [piece]
            self._source.fill(buffers, self._offset)
            self._crc = crc32.iscsi(piece, self._crc)
            self._offset = after

    def skip(self, nbytes: int) -> None:
        """Read and drop what no array needs."""
        if nbytes:
            spare = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
            for start in range(0, nbytes, PIECE_BYTES):
                self.read(spare[: nbytes - start])

    def compare(self) -> None:
        """Compare the checksum with those at the chunk's end and in the manifest.

        Chunks that changed places are intact, but differ from the manifest.
        """
        tail = bytes(self._tail)
        if _checksum(self._crc) != tail:
            raise CorruptCheckpointError(
                f"{self._chunk.key} is damaged: its checksum differs"
            )
        expected = self._chunk.record.checksums[self._chunk.position]
        if tail.hex() != expected[:CRC32C_DIGITS]:
            raise CorruptCheckpointError(
                f"{self._chunk.key} is not the chunk that was saved"
            )


def _run(chunk: Chunk, region: Region, array: Array) -> tuple[int, memoryview] | None:
    """The offset of a region in a chunk, and its memory, if both are contiguous."""
    record = chunk.record
    is_whole = record.data_shape == record.chunk_shape == array.shape
    if is_whole and array.flags.c_contiguous:
        return 0, _memory(array)
    common = overlap(chunk.region, region)
    start = run_start(relative(common, chunk.region), record.chunk_shape)
    part = array[relative(common, region)]
    if start is None or not part.flags.c_contiguous:
        return None
    return start * record.itemsize, _memory(part)


def _memory(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _scatter(reader: _Reader, chunk: Chunk, targets: Sequence[Target]) -> None:
    bits = _BITS[chunk.record.itemsize]
    # With an axis in front, since an array may have none.
    shape, first = (1, *chunk.record.chunk_shape), slice(0, 1)
    origin = (0, *(i * c for i, c in zip(chunk.at, shape[1:], strict=True)))
    wanted = [((first, *region), array.view(bits)[None]) for region, array in targets]
    memory = np.empty(0, bits)
    for inside in _blocks(shape, chunk.record.itemsize, PIECE_BYTES):
        size = math.prod(shape_of(inside))
        # Fresh memory would cost more than the copy.
        memory = memory if memory.size >= size else np.empty(size, bits)
        block = memory[:size].reshape(shape_of(inside))
        reader.read(_memory(block))
        region = tuple(
            slice(o + i.start, o + i.stop) for o, i in zip(origin, inside, strict=True)
        )
        for target, array in wanted:
            common = overlap(region, target)
            if all(span.start < span.stop for span in common):
                array[relative(common, target)] = block[relative(common, region)]


def _blocks(shape: Sequence[int], itemsize: int, nbytes: int) -> Iterator[Region]:
    """Split an array into runs of about `nbytes`, along its first long axis."""
    axis = next((i for i, size in enumerate(shape) if size > 1), 0)
    step = max(1, nbytes // (math.prod(shape[axis + 1 :]) * itemsize))
    before, after = whole(shape[:axis]), whole(shape[axis + 1 :])
    for start in range(0, shape[axis], step):
        yield (*before, slice(start, min(start + step, shape[axis])), *after)


def stored(piece: Piece) -> Iterator[tuple[Chunk, "Encoded"]]:
    """The chunks of a piece, each as it is stored."""
    name, record, region, array = piece
    for chunk in chunks_of(name, record, region):
        is_whole = array.shape == record.chunk_shape
        part = array if is_whole else array[relative(chunk.region, region)]
        yield chunk, Encoded(chunk, part)


class Encoded:
    """A chunk as it is stored, in parts, which are made each time.

    `array` is the content of the chunk without padding.

    **Attributes:**

    - `checksums`: of the chunk, as in `Checksums`; known after the last part.
    - `crc32c`: the first of them.
    """

    def __init__(self, chunk: Chunk, array: Array) -> None:
        self._chunk = chunk
        self._array = array
        self._content_hash = ""
        self.checksums = ""

    def content_hash(self) -> str:
        """The hash of the content, before the parts are made."""
        self._content_hash = self._content_hash or content_hash(self._array)
        return self._content_hash

    @property
    def crc32c(self) -> str:
        return self.checksums[:CRC32C_DIGITS]

    def __iter__(self) -> Iterator[memoryview | bytes]:
        chunk, crc = self._chunk, 0
        digest = xxh3_128()
        update = (lambda _: None) if self._content_hash else digest.update
        pieces = self._pieces(update)
        if chunk.record.compression is not None:
            pieces = compressed(pieces, chunk.nbytes)
        if chunk.nbytes < _SMALL:
            data = b"".join(pieces)
            crc = crc32.iscsi(data)
            yield data + self._end(crc, digest)
            return
        for piece in pieces:
            crc = crc32.iscsi(piece, crc)
            yield piece
        yield self._end(crc, digest)

    def _end(self, crc: int, digest: xxh3_128) -> bytes:
        """The last bytes of the chunk."""
        checksum = _checksum(crc)
        self._content_hash = self._content_hash or digest.hexdigest()
        self.checksums = checksum.hex() + self._content_hash
        return checksum

    def _pieces(self, update: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """The content with padding; `update` gets it without."""
        record, array = self._chunk.record, self._array
        if array.shape == record.chunk_shape and array.flags.c_contiguous:
            memory = _memory(array)
            for start in range(0, len(memory), PIECE_BYTES):
                piece = memory[start : start + PIECE_BYTES]
                update(piece)
                yield piece
            return
        bits = _BITS[record.itemsize]
        source, shape = array.view(bits)[None], (1, *record.chunk_shape)
        for inside in _blocks(shape, record.itemsize, PIECE_BYTES):
            block = np.zeros(shape_of(inside), bits)  # The padding is the fill value.
            part = source[inside]
            block[whole(part.shape)] = part
            update(_memory(np.ascontiguousarray(part)))
            yield _memory(block)


def content_hash(array: Array) -> str:
    """The hash of a chunk's content, as it is in a manifest."""
    return xxh3_128(_memory(np.ascontiguousarray(array))).hexdigest()


def _checksum(crc: int) -> bytes:
    return crc.to_bytes(CHECKSUM_BYTES, "little")
