"""Directories: locating paths, and creating checkpoints in them.

A checkpoint is written to a hidden directory beside its target, and is then renamed in
one atomic operation.
"""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.manifest import MANIFEST, MAX_BYTES
from ..._format.manifest_parser import unrelated_keys
from ..._types import Layout
from ..calls.opening import open_folder
from ..calls.posix_calls import delete, exchange, flush
from ..calls.safe_files import (
    check_case,
    list_files,
    read_file,
    read_files,
    write_file,
    writing_to,
)
from ..calls.tensorstore_calls import KvSpec, wait_for
from ..calls.worker_threads import MAX_IN_FLIGHT
from ..chunks.chunk_files import ChunkFiles
from ..chunks.ocdbt_files import database_problem, DatabaseFiles, folder_problem
from ..interface.attempt_lock import locked_attempt
from ..interface.place import (
    Attempt,
    Chunks,
    DatabaseOptions,
    Share,
    SoleWriter,
    Steps,
    Storage,
)
from ..interface.replacing import already_there, is_replacement, Kind, whole_above
from .directory_steps import DirectorySteps
from .directory_writer import DirectoryWriter
from .foreign_paths import instead_of_a_run, what_is_at


logger = logging.getLogger("eqx_ckpt")


@dataclass(frozen=True, eq=False)
class Directory(Storage):
    """A directory of a file system, or a path where one may be created.

    **Attributes:**

    - `link`: the symbolic link that leads to it, if its path ends in one.
    """

    spec: KvSpec
    link: str = ""
    always_fits = 2000
    layouts: ClassVar[Mapping[Layout, Callable[[Storage], Chunks]]] = {
        "zarr": ChunkFiles,
        "ocdbt": DatabaseFiles,
    }
    database: ClassVar[DatabaseOptions] = DatabaseOptions(
        read={},
        write={},
        max_transaction=MAX_IN_FLIGHT,
        waits=True,
    )

    def url(self, key: str = "") -> str:
        path = self.spec["path"]
        return path + key if key else path.rstrip("/") or "/"

    def arrays(self, root: str) -> "Directory":
        if root and os.path.islink(self.url(root.rstrip("/"))):
            raise CorruptCheckpointError(
                f"{self} is damaged: {root.rstrip('/')} is a symbolic link."
            )
        return self / root

    def at(self, path: str) -> "Directory":
        return Directory({**self.spec, "path": path})

    def read(self, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
        return read_file(self.spec["path"], key, most)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return read_files(self.spec["path"], keys)

    def list_keys(self) -> list[str]:
        return list_files(self.spec["path"])

    def is_listed(self, key: str) -> bool:
        return False

    def identity(self) -> object:
        try:
            status = os.stat(self.spec["path"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def wait_for(self, future: Any, key: str = "", most: float | None = None) -> Any:
        return wait_for(future, self.url(key), most)

    def begin(
        self, layout: Layout, arrays: Sequence[str], *, overwrite: bool
    ) -> Attempt:
        target = self.spec["path"].rstrip("/") or "/"
        if self.link and os.path.isdir(target) and os.listdir(target):
            target = self.link
        is_replacement(target, CHECKPOINT, overwrite=overwrite)
        above = os.path.dirname(target)
        os.makedirs(above, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # Opened before the first write: it reports the errors of writes since then.
            parent = open_folder(above)
            stack.callback(os.close, parent)
            stem = stack.enter_context(locked_attempt(target))
            place = Directory({**self.spec, "path": stem + ".tmp/"})
            chunks = self.layouts[layout](place)
            # What ignores letter case here does so in each directory that is made here.
            if chunks.has_folders and os.path.lexists(stem + ".LOCK"):
                check_case(arrays, above, "pass `layout='ocdbt'`, ")
            temporary = stem + ".tmp"
            os.mkdir(temporary)
            inode = os.lstat(temporary).st_ino
            held = stack.pop_all()
        return _DirectoryAttempt(
            chunks,
            target,
            temporary,
            parent,
            inode,
            overwrite,
            held,
        )

    def join(self, path: str, layout: Layout) -> Share:
        # Opened before the first write: it reports the errors of writes since then.
        fd = open_folder(path)
        return _DirectoryShare(self.layouts[layout](self.at(path)), path, fd)

    def steps(self) -> Steps:
        return DirectorySteps(self)

    def writer(self) -> SoleWriter:
        return DirectoryWriter(self)

    def database_problem(self) -> str:
        return database_problem(self.spec["path"])

    def folder_problem(self, folder: str, most: int, *, links: bool = False) -> str:
        return folder_problem(self.spec["path"], folder, most, links=links)

    def whole_above(self) -> tuple[str, str]:
        return whole_above(os.path.realpath(self.url()))

    def explain(self) -> str:
        return what_is_at(self.url())

    def explain_run(self) -> str:
        return instead_of_a_run(self.url())


@dataclass
class _DirectoryAttempt(Attempt):
    """A hidden directory beside the target, flushed and then renamed."""

    chunks: Chunks
    target: str
    temporary: str
    parent: int
    inode: int
    overwrite: bool
    held: contextlib.ExitStack
    is_ours: bool = True
    root = ""

    def commit(self, manifest: bytes) -> None:
        with writing_to(self.target, "save again"):
            write_file(f"{self.temporary}/{MANIFEST}", [manifest])
        flush(self.parent, self.temporary)
        replaced = is_replacement(self.target, CHECKPOINT, overwrite=self.overwrite)
        if os.lstat(self.temporary).st_ino != self.inode:
            self.is_ours = False
            raise CheckpointError(
                f"{self.temporary!r} was replaced while it was written, by a process "
                f"that may write to its parent directory. {self.target!r} was left as "
                "it is; save to a directory that only you can write to."
            )
        # From here on the directory may be the target, or what the target was. Only a
        # failed rename says that it is still ours to delete.
        self.is_ours = False
        try:
            if replaced:
                exchange(self.temporary, self.target)
            else:
                # Fails unless the target is missing or an empty directory, which a
                # checkpoint never is: of two writers, one gets the error.
                os.rename(self.temporary, self.target)
        except OSError as e:
            self.is_ours = True
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise already_there(repr(self.target)) from None
            raise
        try:
            os.fsync(self.parent)
        except OSError:
            self._undo(replaced)
            raise
        if replaced:
            delete(self.temporary)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self.held:
            if self.is_ours:
                delete(self.temporary)

    def _undo(self, replaced: bool) -> None:
        """Undo a rename that might not survive a power cut."""
        try:
            if os.stat(self.target).st_ino != self.inode:
                # Another writer has replaced it in the meantime.
                self.is_ours = replaced
                return
            if replaced:
                exchange(self.temporary, self.target)
            else:
                os.rename(self.target, self.temporary)
        except OSError as e:
            logger.warning("Could not take back the save of %s: %s", self.target, e)
        else:
            self.is_ours = True


@dataclass
class _DirectoryShare(Share):
    """Writes into the hidden directory of another process's attempt."""

    chunks: Chunks
    path: str
    fd: int

    def flush(self) -> None:
        flush(self.fd, self.path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # If process 0 did not wait, this process has written to a new directory.
        if not os.fstat(self.fd).st_nlink:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.fd)


def _differs(target: str) -> str:
    """Why a directory is not a checkpoint and nothing else, or `""`."""
    try:
        data = read_file(target + "/", MANIFEST)
    except CorruptCheckpointError as e:
        return f"Its {e}."
    foreign = unrelated_keys(list_files(target), data, repr(target), on_disk=True)
    return f"It holds {foreign[0]!r}." if foreign else ""


CHECKPOINT = Kind("a checkpoint", _differs, is_folder=True)
