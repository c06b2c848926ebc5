"""Compression with zstd, which other programs for Zarr read."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..._errors import CorruptCheckpointError
from .host_memory import empty


# The level that the metadata of an array name.
LEVEL = 1


_PIECE_BYTES = 2**18


def _zstd() -> Any:
    """The module, which only compressed arrays need."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def compressed(parts: Iterable[memoryview], nbytes: int) -> Iterator[bytes]:
    """One frame that says its size, for parts of `nbytes` in all."""
    compressor = _zstd().ZstdCompressor(LEVEL)
    compressor.set_pledged_input_size(nbytes)
    for part in parts:
        yield compressor.compress(part)
    yield compressor.flush()


def decompressed(data: memoryview, nbytes: int) -> memoryview:
    """The content of one frame; raise unless it has `nbytes`.

    It passes through memory in small pieces: large ones, which are freed soon, would
    leave holes between what stays.
    """
    zstd = _zstd()
    decompressor = zstd.ZstdDecompressor()
    content = empty((nbytes,), "uint8").data
    done = read = 0
    try:
        while not decompressor.eof:
            part = data[read : read + _PIECE_BYTES] if decompressor.needs_input else b""
            if decompressor.needs_input and not part:
                break
            read += len(part)
            piece = decompressor.decompress(part, min(_PIECE_BYTES, nbytes - done + 1))
            if done + len(piece) > nbytes:
                break
            content[done : done + len(piece)] = piece
            done += len(piece)
    except zstd.ZstdError as e:
        raise CorruptCheckpointError(f"zstd cannot decompress it: {e}") from None
    is_whole = decompressor.eof and not decompressor.unused_data and read == len(data)
    if done != nbytes or not is_whole:
        raise CorruptCheckpointError(f"it is not one frame of {nbytes} bytes")
    return content


def decompressed_at_most(data: bytes, most: int) -> bytes:
    """The content of one frame; raise if it has more than `most` bytes."""
    zstd = _zstd()
    decompressor = zstd.ZstdDecompressor()
    try:
        found = decompressor.decompress(data, most)
    except zstd.ZstdError as e:
        raise CorruptCheckpointError(f"zstd cannot decompress it: {e}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise CorruptCheckpointError(f"it is not one frame of {most} bytes at most")
    return found
