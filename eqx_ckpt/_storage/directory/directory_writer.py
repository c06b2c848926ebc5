"""A directory whose only writer is this process, as long as that lives."""

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterable, Sequence

from ..._errors import CheckpointExistsError, CorruptCheckpointError
from ..calls.opening import open_folder, open_plain
from ..calls.posix_calls import flush, fsync
from ..calls.safe_files import check_case, read_file, write_file
from ..interface.attempt_lock import held
from ..interface.place import has_a_writer, SoleWriter, Storage, WRITER_LOCK
from ..interface.replacing import check_above


_TEMPORARY = ".tmp"


class DirectoryWriter(SoleWriter):
    """A directory and a lock; what is replaced changes its name at the next `flush`."""

    def __init__(self, base: Storage) -> None:
        self._root = base.spec["path"]
        self._replaced: set[str] = set()
        self._lock = self._directory = -1

    def acquire(self) -> None:
        check_above(self._root.rstrip("/"), is_new=False)
        try:
            os.makedirs(self._root, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointExistsError(
                f"{self._root.rstrip('/')!r} is a file, or is in one. Choose another "
                "path."
            ) from None
        for name in os.listdir(self._root):
            self._check_is_no_link(name)
        path = self._root + WRITER_LOCK
        self._lock = open_plain(path, os.O_RDWR | os.O_CREAT)[0]
        try:
            held.add(self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Opened before the first write: it reports the errors of writes since then.
            self._directory = open_folder(self._root)
            held.add(self._directory)
        except BlockingIOError:
            self.release()
            raise has_a_writer(repr(self._root)) from None
        except BaseException:
            self.release()
            raise

    def join(self) -> None:
        self._directory = open_folder(self._root)
        held.add(self._directory)

    def release(self) -> None:
        if self._lock in held:
            # First, because Ctrl-C may come between the next lines.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        for fd in (self._lock, self._directory):
            if fd in held:
                held.discard(fd)
                os.close(fd)
        self._lock = self._directory = -1

    def unrelated_keys(self) -> list[str]:
        try:
            names = sorted(os.listdir(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [n for n in names if n != WRITER_LOCK and not n.endswith(_TEMPORARY)]

    def read(self, key: str) -> bytes | None:
        is_replaced = key in self._replaced
        return read_file(self._root, key + _TEMPORARY if is_replaced else key)

    def list(self, folder: str) -> list[str]:
        try:
            return [f"{folder}/{name}" for name in os.listdir(self._root + folder)]
        except FileNotFoundError:
            return []

    def check(self, arrays: Sequence[str]) -> None:
        if os.path.lexists(self._root + WRITER_LOCK.upper()):
            check_case(arrays, self._root)

    def make(self, folder: str) -> None:
        for part in itertools.accumulate(folder.split("/"), "{}/{}".format):
            self._check_is_no_link(part)
        os.makedirs(self._root + folder, exist_ok=True)

    def _check_is_no_link(self, key: str) -> None:
        if os.path.islink(self._root + key):
            raise CorruptCheckpointError(
                f"{self._root + key!r} is a symbolic link, and what it leads to is "
                "not of the recording. Nothing was written there; put a copy of it in "
                "place of the link."
            )

    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        path = self._root + key
        try:
            self._check_is_there()
            # Through a link or a pipe, the parts would go elsewhere.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            write_file(path, parts)
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), path) from e

    def _check_is_there(self) -> None:
        """Raise if the directory was deleted: a new one may have a new writer."""
        there = os.path.samestat(os.stat(self._root), os.fstat(self._directory))
        if not there:
            raise FileNotFoundError(errno.ENOENT, "", self._root)

    def replace(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        self.write(key + _TEMPORARY, parts)
        self._replaced.add(key)

    def flush(self) -> None:
        flush(self._directory, self._root)
        if self._replaced:
            for key in self._replaced:
                os.rename(f"{self._root}{key}{_TEMPORARY}", self._root + key)
            self._replaced.clear()
            flush(self._directory, self._root)

    def show(self, key: str, value: bytes) -> None:
        self.write(key + _TEMPORARY, [value])
        os.rename(f"{self._root}{key}{_TEMPORARY}", self._root + key)

    def take_over(self, key: str, value: bytes) -> None: ...

    def commit(self, key: str, value: bytes) -> None:
        temporary = f"{self._root}{key}{_TEMPORARY}"
        self.write(key + _TEMPORARY, [value])
        fsync(temporary)
        os.rename(temporary, self._root + key)
        os.fsync(self._directory)

    def delete(self, keys: Iterable[str]) -> None:
        self._check_is_there()
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root + key)

    def forget(self) -> None:
        self._replaced.clear()
