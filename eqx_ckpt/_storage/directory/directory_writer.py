"""A directory whose only writer is this process, as long as that lives."""

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Collection, Generator, Sequence

from ..._errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError
from ..calls.opening import is_link_at, open_folder, open_plain
from ..calls.posix_calls import flush, fsync
from ..calls.safe_files import check_case, read_file, write_file
from ..interface.attempt_lock import held, lock_file
from ..interface.place import has_a_writer, SoleWriter, Storage, WRITER_LOCK
from ..interface.replacing import check_above, check_inode


_TEMPORARY = ".tmp"


class DirectoryWriter(SoleWriter):
    """A directory and a lock; what is replaced changes its name at the next `flush`.

    The directory is open as long as this writes to it, as somebody else may put another
    one at its path.
    """

    def __init__(self, base: Storage) -> None:
        self._root = base.spec["path"]
        self._replaced: set[str] = set()
        self._lock = self._directory = -1

    def acquire(self) -> int:
        check_above(self._root.rstrip("/"))
        try:
            os.makedirs(self._root, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointExistsError(
                f"{self._root.rstrip('/')!r} is a file, or is in one. Choose another "
                "path."
            ) from None
        try:
            # Opened before the first write: it reports the errors of writes since then.
            self._open()
            for name in os.listdir(self._directory):
                self._check_is_no_link(name)
            flags = os.O_RDWR | os.O_CREAT
            with self._errors_name(WRITER_LOCK):
                self._lock = open_plain(WRITER_LOCK, flags, folder=self._directory)[0]
            held.add(self._lock)
            lock_file(self._lock, fcntl.LOCK_EX, self._root + WRITER_LOCK)
        except BlockingIOError:
            self.release()
            raise has_a_writer(repr(self._root)) from None
        except BaseException:
            self.release()
            raise
        return os.fstat(self._directory).st_ino

    def join(self, number: int) -> None:
        self._open()
        check_inode(self._directory, number, self._root)

    def _open(self) -> None:
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

    @property
    def _within(self) -> tuple[int | None, str]:
        """The directory if it is open, and what comes before a key there."""
        return (None, self._root) if self._directory < 0 else (self._directory, "")

    def unrelated_key(self) -> str | None:
        try:
            names = sorted(os.listdir(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return None
        ours = [n for n in names if n == WRITER_LOCK or n.endswith(_TEMPORARY)]
        return next((name for name in names if name not in ours), None)

    def read(self, key: str) -> bytes | None:
        folder, path = self._within
        name = key + _TEMPORARY if key in self._replaced else key
        return read_file(path, name, folder=folder)

    def list(self, folder: str) -> list[str]:
        within, path = self._within
        try:
            fd = open_folder(path + folder, folder=within)
        except FileNotFoundError:
            return []
        try:
            return [f"{folder}/{name}" for name in os.listdir(fd)]
        finally:
            os.close(fd)

    def check(self, arrays: Sequence[str]) -> None:
        if os.path.lexists(self._root + WRITER_LOCK.upper()):
            check_case(arrays, self._root)

    def make(self, folder: str) -> None:
        for part in itertools.accumulate(folder.split("/"), "{}/{}".format):
            self._check_is_no_link(part)
            with self._errors_name(part):
                try:
                    os.mkdir(part, dir_fd=self._directory)
                except FileExistsError:
                    os.close(open_folder(part, follow=False, folder=self._directory))

    def _check_is_no_link(self, key: str) -> None:
        if is_link_at(key, self._directory):
            raise CorruptCheckpointError(
                f"{self._root + key!r} is a symbolic link, and what it leads to is "
                "not of the recording. Nothing was written there; put a copy of it in "
                "place of the link."
            )

    @contextlib.contextmanager
    def _errors_name(self, key: str) -> Generator[None, None, None]:
        try:
            yield
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), self._root + key) from e

    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        with self._errors_name(key):
            self._check_is_there()
            # Through a link or a pipe, the parts would go elsewhere.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key, dir_fd=self._directory)
            write_file(key, parts, self._directory)

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
                self._put_in_place(key)
            self._replaced.clear()
            flush(self._directory, self._root)

    def _put_in_place(self, key: str) -> None:
        here = self._directory
        with self._errors_name(key):
            os.rename(key + _TEMPORARY, key, src_dir_fd=here, dst_dir_fd=here)

    def show(self, key: str, value: bytes) -> None:
        self.write(key + _TEMPORARY, [value])
        self._put_in_place(key)

    def take_over(self, key: str, value: bytes) -> None:
        # There is a lock against earlier writers.
        os.fsync(self._directory)

    def check_is_here(self, folder: str) -> None:
        try:
            os.close(open_folder(folder, follow=False, folder=self._directory))
        except OSError:
            raise CheckpointError(
                f"{self._root + folder!r} was written elsewhere: {self._root!r} was "
                "replaced for a time, by a process that may write to its parent "
                "directory. Record to a directory that only you can write to."
            ) from None

    def commit(self, key: str, value: bytes) -> None:
        self.write(key + _TEMPORARY, [value])
        with self._errors_name(key):
            fsync(key + _TEMPORARY, self._directory)
        self._put_in_place(key)
        os.fsync(self._directory)

    def forget(self) -> None:
        self._replaced.clear()

    def delete_others(self, folder: str, keys: Collection[str]) -> None:
        self._check_is_there()
        for key in {*self.list(folder)} - {*keys}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key, dir_fd=self._directory)
