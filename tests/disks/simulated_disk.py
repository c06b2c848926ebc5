"""A disk that the processes of a simulation share, and what may go wrong with it.

The files are real, below a folder in memory. Each call of the system that changes or
looks up a name, or that takes a lock, is an operation, before which other processes may
go on. A process stops or dies before one; one fails; or a power cut ends all processes,
and leaves any of the states that POSIX allows.
"""

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Generator
from typing import Any

from tests.faults.replay import Disk, Operation, write_files
from tests.scheduler import Died, local, within_lines
from tests.stores.simulated_bucket import Process, Simulation
from tests.support import LIBC


# Those of the system, which are replaced.
_OPEN, _CLOSE, _WRITE, _LSTAT, _FLOCK = (
    os.open,
    os.close,
    os.write,
    os.lstat,
    fcntl.flock,
)

# What a disk that is full refuses.
_GROWS = {"create", "mkdir", "write", "link"}


class SimulatedDisk:
    """What is below one folder, as the processes of a simulation see it.

    **Attributes:**

    - `root`: the folder.
    - `operations`: how many there were.
    - `latency`: the seconds of the next one.
    - `is_cut`: whether the power was cut.
    - `is_full`: whether the disk is.
    - `changed`: called with the path that a process has changed.
    """

    def __init__(self, simulation: Simulation, root: str) -> None:
        self._all = simulation
        self.root = root
        self.operations = 0
        self.latency: Callable[[], float] = lambda: 0.001
        self.is_full: Callable[[], bool] = lambda: False
        self.changed: Callable[[str], None] = lambda path: None
        self.is_cut = False
        self._cut_at: float = math.inf
        self._error = 0
        self._fails: Callable[[str], bool] = lambda what: False
        self._states: Disk | None = None
        self._left: dict[str, bytes | None] = {}
        # Of each lock its file, and who holds it.
        self._locks: dict[int, tuple[int, Process]] = {}

    def cut_after(self, operations: int) -> None:
        """Let the power be cut after so many operations from now on."""
        self._cut_at = self.operations + operations
        self._states = Disk(self.root, pathlib.Path(self.root))

    def fail_once(self, error: int, when: Callable[[str], bool]) -> None:
        """Let the next operation fail of whose kind `when` says so."""
        self._error, self._fails = error, when

    def settle(self) -> None:
        """Let nothing go wrong from now on, and take no time."""
        self.latency = lambda: 0.0
        self._fails = lambda what: False
        self.is_full = lambda: False
        self._states = None

    def restart(self) -> None:
        """Begin anew with the files that the power cut has left."""
        shutil.rmtree(self.root)
        write_files(pathlib.Path(self.root), self._left)
        self.is_cut = False

    def play(self, call: Callable[[int], None]) -> None:
        """Make the call in each process, as `Simulation.play`; these share the disk."""
        with contextlib.ExitStack() as stack:
            for place, name, ours in self._calls():
                stack.enter_context(within_lines(place, name, ours))
            self._all.play(call)
        for fd in self._held():  # By the dead.
            os.close(fd)
        self._locks.clear()

    # What comes before an operation, and what after it.

    def _begin(self, what: str, path: str, *, is_commit: bool = False) -> None:
        """Let time pass before an operation; raise if it does not happen."""
        process: Process = local.process
        try:
            self._all.count(is_commit=is_commit)
            self._all.pause(self.latency())
            self._count()
        except Died:
            self._unlock(process)
            raise
        number = 0
        if self._fails(what):
            number, self._fails = self._error, lambda what: False
        if what in _GROWS and self.is_full():
            number = errno.ENOSPC
        if number:
            raise OSError(number, os.strerror(number), path)

    def _count(self) -> None:
        self.operations += 1
        if self._states and self.operations > self._cut_at:
            self._left = self._states.drawn(self._all.chance)
            self._states, self.is_cut = None, True
            for process in self._all.processes:
                process.dies_at = 0
            for fd in self._held():
                _FLOCK(fd, fcntl.LOCK_UN)
        local.process.check()

    def _unlock(self, process: Process) -> None:
        """The kernel releases the locks of a process that ends."""
        for fd in self._held():
            if self._locks[fd][1] is process:
                _FLOCK(fd, fcntl.LOCK_UN)

    def _held(self) -> list[int]:
        """The locks; one may have been closed by the collector of garbage."""
        with aside():
            return [
                fd
                for fd, (inode, _) in self._locks.items()
                if _is_there(f"/proc/self/fd/{fd}") and os.fstat(fd).st_ino == inode
            ]

    def _end(
        self, what: str, path: str, other: str = "", number: int = 0, data: bytes = b""
    ) -> None:
        if self._states:
            self._states.apply(Operation(what, path, other, number, data))
        with aside():
            self.changed(other or path)

    # Where something is.

    def _path(self, path: Any, folder: int | None = None) -> str | None:
        """The absolute path, if it is on this disk, and a process asks."""
        if getattr(local, "is_aside", False):
            return None
        if isinstance(path, int):
            whole = os.readlink(f"/proc/self/fd/{path}")
        else:
            whole = os.fsdecode(path)
            if not os.path.isabs(whole) and folder is not None:
                whole = f"{os.readlink(f'/proc/self/fd/{folder}')}/{whole}"
            whole = os.path.normpath(whole)
        is_here = whole == self.root or whole.startswith(self.root + "/")
        return whole if is_here else None

    def _is_step(self, path: str) -> bool:
        return os.path.basename(path).isdigit()

    # The calls of the system.

    def _calls(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        looks = [
            (os, name, self._looking(getattr(os, name)))
            for name in ("stat", "lstat", "listdir", "scandir", "access")
        ]
        return [
            *looks,
            (os, "open", self._open),
            (os, "close", self._close),
            (os, "mkdir", self._one("mkdir", os.mkdir)),
            (os, "unlink", self._one("unlink", os.unlink)),
            (os, "rmdir", self._one("unlink", os.rmdir)),
            (os, "rename", self._two("rename", os.rename)),
            (os, "replace", self._two("rename", os.replace)),
            (os, "link", self._two("link", os.link)),
            (os, "write", self._write),
            (os, "fsync", self._fsync),
            (fcntl, "flock", self._flock),
            (LIBC, "syncfs", self._syncfs),
            (LIBC, "sync_file_range", lambda *_: 0),
            (LIBC, "renameat2", self._renameat2()),
        ]

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(path: Any = ".", *args: Any, dir_fd: int | None = None, **how: Any):
            if whole := self._path(path, dir_fd):
                self._begin("look", whole)
            if dir_fd is not None:
                how["dir_fd"] = dir_fd
            return real(path, *args, **how)

        return ours

    def _open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        whole = self._path(path, dir_fd)
        if not whole:
            return _OPEN(path, flags, mode, dir_fd=dir_fd)
        is_new = flags & os.O_CREAT and not _is_there(whole)
        self._begin("create" if is_new else "look", whole)
        was_there = _is_there(whole)
        fd = _OPEN(path, flags, mode, dir_fd=dir_fd)
        if not was_there:
            self._end("create", whole)
        return fd

    def _close(self, fd: int) -> None:
        self._locks.pop(fd, None)
        _CLOSE(fd)

    def _one(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            whole = self._path(path, dir_fd)
            if whole:
                self._begin(what, whole)
            real(path, *args, dir_fd=dir_fd)
            if whole:
                self._end(what, whole)

        return ours

    def _two(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(
            one: Any,
            other: Any,
            *,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
            **how: Any,
        ) -> None:
            before = self._path(one, src_dir_fd)
            after = self._path(other, dst_dir_fd)
            if after:
                self._begin(what, after, is_commit=self._is_step(after))
            real(one, other, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **how)
            if before and after:
                self._end(what, before, after)

        return ours

    def _write(self, fd: int, data: Any) -> int:
        whole = self._path(fd)
        if not whole:
            return _WRITE(fd, data)
        self._begin("write", whole)
        at = os.lseek(fd, 0, os.SEEK_CUR)
        count = _WRITE(fd, data)
        # Nobody sees what has no name any more.
        if not whole.endswith(" (deleted)"):
            self._end("write", whole, "", at, bytes(data[:count]))
        return count

    def _fsync(self, fd: int) -> None:
        whole = self._path(fd)
        if whole:
            self._begin("fsync", whole)
        if whole and not whole.endswith(" (deleted)"):
            self._end("fsync", whole)

    def _syncfs(self, fd: int) -> int:
        return self._as_c(lambda: self._sync(fd))

    def _sync(self, fd: int) -> None:
        if whole := self._path(fd):
            self._begin("syncfs", whole)
            self._end("syncfs", self.root)

    def _flock(self, fd: int, how: int) -> None:
        if whole := self._path(fd):
            self._begin("lock", whole)
        _FLOCK(fd, how)
        if whole:
            self._locks[fd] = os.fstat(fd).st_ino, local.process

    def _renameat2(self) -> Callable[..., int]:
        real = LIBC.renameat2

        def exchange(of_a: int, a: bytes, of_b: int, b: bytes, flags: int) -> None:
            one = self._path(a, of_a if of_a >= 0 else None)
            other = self._path(b, of_b if of_b >= 0 else None)
            if other:
                self._begin("exchange", other, is_commit=True)
            if real(of_a, a, of_b, b, flags):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            if one and other:
                self._end("exchange", one, other)

        return lambda *args: self._as_c(lambda: exchange(*args))

    def _as_c(self, call: Callable[[], None]) -> int:
        try:
            call()
        except OSError as e:
            ctypes.set_errno(e.errno or 0)
            return -1
        return 0


@contextlib.contextmanager
def aside() -> Generator[None]:
    """Let the test look at the files, which is no operation of a process."""
    local.is_aside = True
    try:
        yield
    finally:
        local.is_aside = False


def _is_there(path: str) -> bool:
    try:
        _LSTAT(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def temporary_folder() -> Generator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.realpath(folder)
