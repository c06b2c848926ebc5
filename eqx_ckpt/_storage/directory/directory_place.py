"""Directories: locating paths, and creating checkpoints in them.

A checkpoint is written to a hidden directory beside its target, and is then renamed in
one atomic operation.
"""

import contextlib
import errno
import functools as ft
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar

from ..._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ..._format.manifest import MANIFEST, MAX_BYTES
from ..._format.manifest_parser import unrelated_keys
from ..._types import Layout
from ..calls.opening import is_open_at, is_removed, make_folder, open_folder
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
from ..interface.committed_manifest import problem_of
from ..interface.free_space import check_room, WhyTooFew
from ..interface.place import (
    Attempt,
    Chunks,
    DatabaseOptions,
    Share,
    Shown,
    SoleWriter,
    Steps,
    Storage,
)
from ..interface.replacing import (
    already_there,
    check_inode,
    has_manifest,
    is_replacement,
    Kind,
    remove_replaced,
    whole_above,
)
from .directory_steps import check_shares_nothing, DirectorySteps
from .directory_writer import DirectoryWriter
from .foreign_paths import instead_of_a_run, what_is_at
from .mounted_bucket import warn_of_bucket


logger = logging.getLogger("eqx_ckpt")


@dataclass(frozen=True, eq=False)
class Directory(Storage):
    """A directory of a file system, or a path where one may be created.

    **Attributes:**

    - `link`: the symbolic link that leads to it, if its path ends in one.
    """

    spec: KvSpec
    link: str = ""
    is_state: bool = False
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

    def as_state(self) -> "Directory":
        return replace(self, is_state=True)

    def read(self, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
        return read_file(self.spec["path"], key, most)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return read_files(self.spec["path"], keys)

    def list_keys(self) -> list[str]:
        return list_files(self.spec["path"])

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.spec["path"]) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

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
        self,
        layout: Layout,
        arrays: Sequence[str],
        *,
        overwrite: bool,
        why_too_few: WhyTooFew,
    ) -> Attempt:
        target = self.spec["path"].rstrip("/") or "/"
        if self.link and os.path.isdir(target) and os.listdir(target):
            target = self.link
        kind = CHECKPOINT._replace(is_state=self.is_state)
        if is_replacement(target, kind, overwrite=overwrite):
            check_shares_nothing(target)
        above = os.path.dirname(target)
        os.makedirs(above, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # Opened before the first write: it reports the errors of writes since then.
            parent = open_folder(above)
            stack.callback(os.close, parent)
            warn_of_bucket(above, parent)
            check_room(parent, target, why_too_few)
            stem = stack.enter_context(locked_attempt(target))
            place = Directory({**self.spec, "path": stem + ".tmp/"})
            chunks = self.layouts[layout](place)
            # What ignores letter case here does so in each directory that is made here.
            if chunks.has_folders and os.path.lexists(stem + ".LOCK"):
                check_case(arrays, above, "pass `layout='ocdbt'`, ")
            temporary = stem + ".tmp"
            folder = make_folder(temporary)
            stack.callback(os.close, folder)
            chunks.write_within(folder)
            held = stack.pop_all()
        return _DirectoryAttempt(
            chunks,
            target,
            temporary,
            parent,
            folder,
            kind,
            overwrite,
            held,
        )

    @contextlib.contextmanager
    def marked(self) -> Generator[str]:
        target = self.spec["path"].rstrip("/") or "/"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with locked_attempt(target) as stem:
            yield f"{stem}.lock"

    def sees(self, mark: str) -> bool:
        return os.path.lexists(mark)

    def marks(self) -> list[str]:
        folder, name = os.path.split(self.spec["path"].rstrip("/"))
        return [
            found
            for found in os.listdir(folder)
            if found.startswith(f".{name}.") and found.endswith(".lock")
        ]

    def join(self, shown: Shown, layout: Layout) -> Share:
        path = shown.path.rstrip("/")
        # Opened before the first write: it reports the errors of writes since then.
        folder = open_folder(path, follow=False)
        try:
            check_inode(folder, shown.inode, path)
        except BaseException:
            os.close(folder)
            raise
        chunks = self.layouts[layout](self.at(shown.path))
        chunks.write_within(folder)
        return _DirectoryShare(chunks, path, folder)

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
    """A hidden directory beside the target, flushed and then renamed.

    Both it and its parent are open. All is written to what is open, as somebody else
    may put a link at its path.
    """

    chunks: Chunks
    target: str
    temporary: str
    parent: int
    folder: int
    kind: Kind
    overwrite: bool
    held: contextlib.ExitStack
    is_ours: bool = True
    root = ""

    def show(self) -> Shown:
        inode = os.fstat(self.folder).st_ino
        return Shown(self.chunks.place.spec["path"], inode)

    def commit(self, manifest: bytes) -> None:
        with writing_to(self.target, "save again"):
            write_file(MANIFEST, [manifest], self.folder)
        flush(self.parent, self.temporary)
        replaced = self._rename()
        try:
            is_other = self._is_other()
            if not is_other:
                os.fsync(self.parent)
        except OSError:
            self._undo(replaced)
            raise
        if is_other:
            self._move_back(replaced)
            raise _was_replaced(self.temporary)
        if replaced:
            remove_replaced(
                repr(self.target),
                self._problem(),
                remove=ft.partial(delete, self.temporary),
                put_back=ft.partial(self._undo, replaced=True),
            )

    def _rename(self) -> bool:
        """Give the directory its name; return whether something else had it."""
        while True:
            replaced = is_replacement(self.target, self.kind, overwrite=self.overwrite)
            if not is_open_at(self.folder, self.temporary):
                self.is_ours = False
                raise _was_replaced(self.temporary)
            # From here on the directory may be the target, or what the target was. Only
            # a failed rename says that it is still ours to delete.
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
                is_taken = e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
                if is_taken and not self.overwrite:
                    raise already_there(repr(self.target)) from None
                if not (e.errno == errno.ENOENT if replaced else is_taken):
                    raise
                # Another process has removed it, or saved there, since this has looked.
            else:
                return replaced

    def _is_other(self) -> bool:
        """Whether the rename took what was at the hidden path for a moment.

        Another process may have removed or replaced this one since, which is no error.
        """
        if is_open_at(self.folder, self.target):
            return False
        try:
            there = open_folder(self.target, follow=False)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return True  # It is a link.
        try:
            return not has_manifest(".", there) and is_open_at(there, self.target)
        finally:
            os.close(there)

    def _problem(self) -> str:
        """Why what has replaced the old checkpoint is not intact, or `''`."""
        try:
            try:
                problem = problem_of(self.chunks.place.at(f"{self.target}/"))
            except CheckpointNotFoundError as e:
                problem = str(e)
            # What another writer has put there meanwhile, that has looked at.
            return problem if is_open_at(self.folder, self.target) else ""
        except OSError:
            self._undo(replaced=True)
            raise

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
        """Undo a rename that might not survive a power cut, or is not to stay.

        What another writer has put there in the meantime stays.
        """
        try:
            if is_open_at(self.folder, self.target):
                if replaced:
                    self._exchange_back()
                else:
                    self._rename_back()
            # What is deleted next may have the name after a power cut until then.
            os.fsync(self.parent)
        except OSError as e:
            logger.warning("Could not take back the save of %s: %s", self.target, e)
        else:
            self.is_ours = replaced or is_open_at(self.folder, self.temporary)

    def _rename_back(self) -> None:
        os.rename(self.target, self.temporary)
        if not is_open_at(self.folder, self.temporary):
            # Another writer has replaced it just before: that one stays.
            os.rename(self.temporary, self.target)

    def _exchange_back(self) -> None:
        """Put back what was replaced, unless another writer replaces ours just before.

        What was not expected to be at the target goes back there: each exchange but the
        first one takes out what the one before has put there, if nobody else has.
        """
        expected, given = os.fstat(self.folder), os.lstat(self.temporary)
        exchange(self.temporary, self.target)
        while not os.path.samestat(found := os.lstat(self.temporary), expected):
            expected, given = given, found
            exchange(self.temporary, self.target)

    def _move_back(self, replaced: bool) -> None:
        if replaced:
            exchange(self.temporary, self.target)
        else:
            os.rename(self.target, self.temporary)


@dataclass
class _DirectoryShare(Share):
    """Writes into the hidden directory of another process's attempt."""

    chunks: Chunks
    path: str
    folder: int

    def is_removed(self) -> bool:
        return is_removed(self.folder)

    def flush(self) -> None:
        flush(self.folder, self.path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.folder)


def _was_replaced(hidden: str) -> CheckpointError:
    return CheckpointError(
        f"{hidden!r} was replaced while it was written, by a process that may write to "
        "its parent directory. Nothing was saved; save to a directory that only you "
        "can write to."
    )


def _differs(target: str) -> str:
    """Why a directory is not a checkpoint and nothing else, or `""`."""
    try:
        data = read_file(target + "/", MANIFEST)
    except CorruptCheckpointError as e:
        return f"Its {e}."
    foreign = unrelated_keys(list_files(target), data, repr(target), on_disk=True)
    return f"It holds {foreign[0]!r}." if foreign else ""


CHECKPOINT = Kind("a checkpoint", _differs, is_folder=True)
