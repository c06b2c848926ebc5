"""Host memory that restored arrays are read into."""

import contextlib
import math
import mmap

import numpy as np

from .._format.chunks import Region, shape_of
from .._format.leaves import LeafRecord


_ALIGNMENT = 64
_HUGE_PAGE = 2**21


def empty(region: Region, record: LeafRecord) -> np.ndarray:
    """An uninitialised array at an address that `jax.device_put` need not copy from.

    Large ones are on huge pages: fresh memory is several times dearer on small ones.
    """
    shape, dtype = shape_of(region), np.dtype(record.data_type)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory, alignment = np.empty(nbytes + _ALIGNMENT, np.uint8), _ALIGNMENT
    else:
        pages = mmap.mmap(-1, nbytes + _HUGE_PAGE)
        with contextlib.suppress(OSError):  # A kernel may be without them.
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory, alignment = np.frombuffer(pages, np.uint8), _HUGE_PAGE
    offset = -memory.__array_interface__["data"][0] % alignment
    return memory[offset : offset + nbytes].view(dtype).reshape(shape)
