"""Host memory between the caller of a save and its writer thread."""

import numbers
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax

from .._storage.calls.host_memory import copied
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._storage.interface.chunk_bytes import Piece
from .._tree.leaves.leaf_data import is_on_host
from .._tree.plans.write_plan import Write
from .._types import is_real, shown, wrong


# Half of what JAX takes at most, 64 GB by default. It keeps it, for the next copies.
_LIMIT = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
_PINNED_BYTES = (int(_LIMIT) if _LIMIT.isdecimal() else 64) * 2**29


# Half of the machine's memory.
_DEFAULT_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class _Held:
    """The bytes that all saves of this process have staged, and their condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        # Only one save stages at a time: two could wait for each other.
        self.turn = threading.Lock()


_held = _Held()


class Staging:
    """A bounded queue of copied pieces of arrays, which only the save uses.

    The caller of the save fills it. The writer takes the pieces through `pieces`, calls
    `release` for what it has written, and `end` when it takes no more.
    """

    def __init__(self, limit: int) -> None:
        self.pieces = iter(self._take, None)
        self._limit = limit
        self._pieces: deque[Piece | None] = deque()
        self._nbytes = 0
        self._failure: BaseException | None = None
        self._ended = False

    def fill(self, writes: Sequence[Write], before_waiting: Callable[[], None]) -> None:
        """Stage all leaves; on return, the save no longer depends on them.

        If they do not fit, call `before_waiting`, which starts the writer, and wait for
        room.
        """
        with _held.turn:
            limit = min(self._limit, _PINNED_BYTES - _held.nbytes)
            ahead = deque(write.pieces() for write in _first(writes, limit))
            for write in writes:
                # JAX arrays are immutable, and JAX does not reuse their memory while a
                # view of it exists. See tests/save/test_async.py.
                changes = write.record.kind == "numpy"
                leaf = write.leaf
                is_pinned = isinstance(leaf, jax.Array) and not is_on_host(leaf)
                for piece in ahead.popleft() if ahead else write.pieces():
                    nbytes = piece.array.nbytes
                    if not self._has_room(nbytes):
                        before_waiting()
                    if changes or is_pinned and _held.nbytes > _PINNED_BYTES:
                        piece = piece._replace(array=copied(piece.array))
                    self._put(piece, nbytes)
                    if self._ended:
                        return
            self._put(None, 0)

    def _has_room(self, nbytes: int) -> bool:
        # The writer may hold `MAX_IN_FLIGHT` bytes until it gets more.
        limit = max(self._limit, MAX_IN_FLIGHT + nbytes)
        return nbytes == 0 or _held.nbytes + nbytes <= limit

    def _put(self, piece: Piece | None, nbytes: int) -> None:
        """Add a piece when there is room, or `None` after the last one."""
        with _held.changed:
            _held.changed.wait_for(lambda: self._ended or self._has_room(nbytes))
            if not self._ended:
                self._pieces.append(piece)
                self._nbytes += nbytes
                _held.nbytes += nbytes
            _held.changed.notify_all()

    def _take(self) -> Piece | None:
        with _held.changed:
            _held.changed.wait_for(lambda: self._failure or self._pieces)
            if self._failure is not None:
                raise self._failure
            return self._pieces.popleft()

    def release(self, nbytes: int) -> None:
        with _held.changed:
            self._nbytes -= nbytes
            _held.nbytes -= nbytes
            _held.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the writer raise this error when it asks for the next piece."""
        with _held.changed:
            self._failure = error
            _held.changed.notify_all()

    def end(self) -> None:
        """Discard the remaining pieces, because the writer takes no more."""
        with _held.changed:
            self._ended = True
            self._pieces.clear()
            _held.changed.notify_all()
        self.release(self._nbytes)


def checked_limit(staging_bytes: int | None) -> int:
    if staging_bytes is None:
        return _DEFAULT_BYTES
    if not is_real(staging_bytes) or not staging_bytes >= 1:
        raise wrong(staging_bytes, numbers.Real)(
            f"`staging_bytes` is {shown(staging_bytes)}. Pass a positive number of "
            "bytes, such as `2**30`; the default is half of the machine's memory."
        )
    return staging_bytes


def _first(writes: Iterable[Write], limit: int) -> Iterable[Write]:
    """The first writes whose data together fit into `limit` bytes."""
    for write in writes:
        limit -= write.record.nbytes
        if limit < 0:
            return
        yield write


def _forget() -> None:
    """Reset the counters: a forked child inherits no staging threads."""
    global _held
    _held = _Held()


os.register_at_fork(after_in_child=_forget)
