"""Compression with zstd, which other programs for Zarr read."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..._errors import CorruptCheckpointError


# The level that the metadata of an array name.
LEVEL = 1


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


def decompressed(data: memoryview, nbytes: int) -> bytes:
    """The content of one frame; raise unless it has `nbytes`."""
    zstd = _zstd()
    decompressor = zstd.ZstdDecompressor()
    try:
        content = decompressor.decompress(data, nbytes + 1)
    except zstd.ZstdError as e:
        raise CorruptCheckpointError(f"zstd cannot decompress it: {e}") from None
    if len(content) != nbytes or not decompressor.eof or decompressor.unused_data:
        raise CorruptCheckpointError(f"it is not one frame of {nbytes} bytes")
    return content
