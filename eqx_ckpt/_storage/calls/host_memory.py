"""Host memory for data between a disk and JAX."""

import contextlib
import math
import mmap
import os
from collections.abc import Sequence

from ..._lazy import Array, np


_ALIGNMENT = 64


_HUGE_PAGE = 2**21


def memory() -> int:
    """The bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def taken(nbytes: int) -> int:
    """What `empty` takes of the memory for an array: a large one has whole pages."""
    return nbytes if nbytes < _HUGE_PAGE else nbytes + -nbytes % _HUGE_PAGE


def empty(shape: Sequence[int], dtype: "np.typing.DTypeLike") -> Array:
    """An uninitialised array at an address that `jax.device_put` need not copy from.

    Large arrays are on huge pages: fresh small pages cost several times more.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory, alignment = np.empty(nbytes + _ALIGNMENT, np.uint8), _ALIGNMENT
    else:
        # By default Python maps shared memory, which has no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
        with contextlib.suppress(OSError):  # Some kernels lack them.
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory, alignment = np.frombuffer(pages, np.uint8), _HUGE_PAGE
    offset = -memory.__array_interface__["data"][0] % alignment
    return memory[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned(nbytes: int, alignment: int) -> memoryview:
    """Uninitialised bytes at an address that is a multiple, and of such a length."""
    nbytes += -nbytes % alignment
    memory = np.empty(nbytes + alignment, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + nbytes].data


def copied(array: Array) -> Array:
    """The same values in fresh memory."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy
