"""What a recording needs of a file system: appended files, one of them the commit."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Sequence

from .._errors import CheckpointError
from .._storage.directory import flush
from .._storage.storage import Storage


_LOCK = "writer.lock"
_TEMPORARY = ".tmp"
_NO_LOCK = "The recording is written by another process, or by another `Recording`"
# Of all recordings of this process.
_held: set[int] = set()


class Files:
    """A directory that one writer at a time may write to.

    What is written is durable after `flush`. A key that has committed data is
    replaced, not written: its old value stays until `flush`, and after a power cut it
    has one value or the other.
    """

    def __init__(self, base: Storage) -> None:
        self.base = base
        self._root = base.spec["path"]
        self._replaced: set[str] = set()
        self._lock = self._directory = -1

    def acquire(self) -> None:
        """Make the directory, and be its only writer until `release`."""
        os.makedirs(self._root, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(self._root + _LOCK, flags, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Opened before the first write: it reports the errors of writes since then.
            self._directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(
                f"{_NO_LOCK}: {self._root!r}. Wait for it to close, or choose another "
                "path."
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _held.update((lock, self._directory))

    def release(self) -> None:
        """Let others write."""
        for fd in (self._lock, self._directory):
            if fd in _held:
                _held.discard(fd)
                os.close(fd)
        self._lock = self._directory = -1

    def strangers(self) -> list[str]:
        """What is in the directory that is not a writer's, before there is a record."""
        names = sorted(os.listdir(self._root))
        return [n for n in names if n != _LOCK and not n.endswith(_TEMPORARY)]

    def read(self, key: str) -> bytes | None:
        return self.base.read(key)

    def list(self, folder: str) -> list[str]:
        """The keys directly below a folder."""
        try:
            return [f"{folder}/{name}" for name in os.listdir(self._root + folder)]
        except FileNotFoundError:
            return []

    def make(self, folder: str) -> None:
        os.makedirs(self._root + folder, exist_ok=True)

    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        """Write a value that no commit refers to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(self._root + key, flags, 0o666)
        try:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    view = view[os.write(fd, view) :]
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), self._root + key) from e
        finally:
            os.close(fd)

    def replace(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        """Write a value in place of a committed one, at the next `flush`."""
        self.write(key + _TEMPORARY, parts)
        self._replaced.add(key)

    def flush(self) -> None:
        """Make all that was written durable."""
        flush(self._directory, self._root)
        if self._replaced:
            for key in self._replaced:
                os.rename(f"{self._root}{key}{_TEMPORARY}", self._root + key)
            self._replaced.clear()
            flush(self._directory, self._root)

    def show(self, key: str, value: bytes) -> None:
        """Replace a value that nothing depends on, in one step."""
        self.write(key + _TEMPORARY, [value])
        os.rename(f"{self._root}{key}{_TEMPORARY}", self._root + key)

    def commit(self, key: str, value: bytes) -> None:
        """Replace a value durably, in one step."""
        temporary = f"{self._root}{key}{_TEMPORARY}"
        with open(temporary, "wb") as f:
            f.write(value)
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, self._root + key)
        os.fsync(self._directory)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root + key)

    def forget(self) -> None:
        """Replace nothing at the next `flush`."""
        self._replaced.clear()


def _let_go() -> None:
    """A forked child shares the locks of its parent, and could outlive it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
