"""Reading an open file: what the page cache has from there, the rest from the disk.

A read past the page cache (`O_DIRECT`) takes a third of the CPU time of one through it,
as nothing is copied, and evicts nothing that others have cached. See open(2), statx(2)
and docs/performance.md.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Generator, Iterable, Sequence

from ..._errors import CorruptCheckpointError
from ..._lazy import np
from .host_memory import aligned
from .posix_calls import LIBC


# To look whether fewer bytes are cached costs more than it gains.
_LARGE = 2**20


# What a file system answers that has no such reads. `/proc` may be missing, too, and
# they take a second descriptor, and memory.
_REFUSALS = {
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


# What is read meanwhile is read again soon. Changes to a list are atomic.
_soon_again: list[object] = []


@contextlib.contextmanager
def read_again_soon() -> Generator[None, None, None]:
    """Leave in the page cache what is read: others, or later reads, need it too."""
    reason = object()
    _soon_again.append(reason)
    try:
        yield
    finally:
        _soon_again.remove(reason)


class FileReads:
    """Reads of an open file, from several threads, until it is closed.

    **Attributes:**

    - `fd`: its descriptor.
    - `nbytes`: the size of the file when it was opened.
    """

    def __init__(self, fd: int, nbytes: int, key: str) -> None:
        self.fd = fd
        self._key = key
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._direct: _DirectReads | None = None
        self._is_buffered = False

    def close(self) -> None:
        os.close(self.fd)
        if self._direct:
            self._direct.close()

    def fill(self, buffers: Sequence[memoryview], offset: int, total: int) -> None:
        """Read into all of the buffers, from an offset in the file.

        `total` bytes are read around there, by this call and others.
        """
        nbytes = sum(map(len, buffers))
        is_direct = total >= _LARGE and not (self._is_buffered or _soon_again)
        if is_direct and not _is_cached(self.fd, offset, nbytes):
            count = self._read_directly(buffers, offset)
            buffers, offset = rest(buffers, count), offset + count
        if buffers:
            fill(self.fd, self._key, buffers, offset)

    def _read_directly(self, buffers: Sequence[memoryview], offset: int) -> int:
        """The bytes that were read; none where the file system refuses."""
        try:
            with self._lock:
                self._direct = self._direct or _DirectReads(self.fd)
            return self._direct.read(buffers, offset)
        except OSError as e:
            if e.errno not in _REFUSALS:
                raise
            self._is_buffered = True
            return 0


class _DirectReads:
    """Reads of a file past the page cache, whose offsets and addresses are aligned."""

    def __init__(self, fd: int) -> None:
        self._alignment = _direct_alignment(fd)
        # Another description of the file: the flags of one hold for all threads.
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
        self._fd = os.open(f"/proc/self/fd/{fd}", flags)

    def close(self) -> None:
        os.close(self._fd)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers; return how many bytes, up to the end of the file.

        Only the begin of the first buffer can be read in place, if it is aligned.
        """
        nbytes = sum(map(len, buffers))
        before = offset % self._alignment
        in_place = 0 if before else self._aligned_bytes(buffers[0])
        spare = aligned(before + nbytes - in_place, self._alignment)
        target = [buffers[0][:in_place], spare] if in_place else [spare]
        count = os.preadv(self._fd, target, offset - before)
        count = max(0, min(count - before, nbytes))
        copied = spare[before : before + max(0, count - in_place)]
        for buffer in rest(buffers, in_place):
            part = copied[: len(buffer)]
            buffer[: len(part)] = part
            copied = copied[len(part) :]
        return count

    def _aligned_bytes(self, buffer: memoryview) -> int:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        if address % self._alignment:
            return 0
        return len(buffer) // self._alignment * self._alignment


_EMPTY_PATH = 0x1000


_DIOALIGN = 0x2000  # Of `statx`, which tells them as two numbers at these offsets.


_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 0x98, 0x9C


def _direct_alignment(fd: int) -> int:
    """The alignment of memory, offsets and lengths that direct reads of a file need."""
    found = ctypes.create_string_buffer(256)
    status = LIBC.statx(fd, b"", _EMPTY_PATH, _DIOALIGN, found)
    mask, memory, offset = (
        ctypes.c_uint32.from_buffer(found, at).value
        for at in (_MASK_AT, _MEMORY_AT, _OFFSET_AT)
    )
    alignment = max(memory, offset)
    is_known = status == 0 and mask & _DIOALIGN
    if not is_known or not 0 < offset <= alignment <= mmap.PAGESIZE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return alignment


_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "written", "evicted", "evicted_lately")
    ]


def _is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the first, the middle and the last page of a range are cached.

    To count all of them takes a tenth of the time that it takes to copy them. A read
    that must not wait tells it too, but begins to read ahead. Where the system cannot
    tell (before Linux 6.5), this is true.
    """
    if sys.platform != "linux":
        return True
    counts = _Counts()
    for at in (offset, offset + nbytes // 2, offset + nbytes - 1):
        part = _Range(at, 1)
        asked = (ctypes.byref(part), ctypes.byref(counts), 0)
        if LIBC.syscall(_CACHESTAT, fd, *asked) != 0:
            return True
        if not counts.cached:
            return False
    return True


def fill(fd: int, key: str, buffers: Sequence[memoryview], offset: int) -> None:
    """Read into all of the buffers, from an offset in a file."""
    left = sum(map(len, buffers))
    while (count := os.preadv(fd, buffers, offset)) < left:
        offset += count
        left -= count
        buffers = rest(buffers, count)
        if count == 0:
            raise CorruptCheckpointError(
                f"{key} was cut to {offset} bytes while it was read"
            )


def rest(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers after their first bytes are filled."""
    left: list[memoryview] = []
    for buffer in buffers:
        left += [buffer[count:]] if count < len(buffer) else []
        count = max(0, count - len(buffer))
    return left
