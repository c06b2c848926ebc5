"""How a checkpoint comes into being, and goes: wholly, in one step, or not at all.

Two ways behind one interface: `base` and `root` say where the arrays go, `commit` makes
the checkpoint exist, `abandon` removes what was written.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import sys
import uuid
from collections.abc import Generator, Iterable, Mapping
from typing import Protocol, runtime_checkable

from .._errors import CheckpointError, CheckpointExistsError, LeafNameError
from .._format.chunks import chunk_keys
from .._format.leaves import LeafRecord
from .._format.manifest import MANIFEST
from .._format.parse import strangers
from .key_values import read_key
from .kvstore import KvSpec


logger = logging.getLogger("eqx_ckpt")
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# `.000100.<uuid>`, the directory of an attempt and the lock of its process.
_CLAIM = re.compile(r"(\..+\.[0-9a-f]{32})\.(?:tmp|lock)")
# What comes around the name of a target: `.`, and `.<uuid>.lock`.
_MAX_NAME = 255 - 39
# Around that of a leaf, `/` and what TensorStore appends to a file while it writes.
_AROUND = 39 + 16
_MAX_PATH = 4095
# A target and a name that are shorter together need no look.
LONG_PATH = 2000
_held: set[int] = set()


@runtime_checkable
class Attempt(Protocol):
    """One try to save one checkpoint.

    **Attributes:**

    - `base`: where to write the arrays.
    - `root`: what the manifest is to say of that place.
    """

    base: KvSpec
    root: str

    def commit(self, manifest: bytes) -> None:
        """Make the checkpoint exist, durably; `CheckpointExistsError` if it lost."""
        ...

    def abandon(self) -> None:
        """Always the end: remove what was written, unless it was committed."""
        ...


class DirectoryAttempt:
    """A hidden directory beside the target, flushed and then renamed."""

    root = ""

    def __init__(self, target: KvSpec, overwrite: bool) -> None:
        self._target = target["path"].rstrip("/") or "/"
        self._overwrite = overwrite
        self._is_replacement()
        parent = os.path.dirname(self._target)
        os.makedirs(parent, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # Opened before the first write: it reports the errors of writes since then.
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, self._parent)
            self._temporary = stack.enter_context(_claimed(self._target)) + ".tmp"
            self.base = {"driver": "file", "path": self._temporary + "/"}
            os.mkdir(self._temporary)
            self._inode = os.stat(self._temporary).st_ino
            self._is_ours = True
            self._stack = stack.pop_all()

    def commit(self, manifest: bytes) -> None:
        with open(self.base["path"] + MANIFEST, "xb") as f:
            f.write(manifest)
        flush(self._parent, self._temporary)
        replaced = self._is_replacement()
        # From here on the directory may be the target, or what the target was. Only a
        # failed rename says that it is still ours to delete.
        self._is_ours = False
        try:
            if replaced:
                _exchange(self._temporary, self._target)
            else:
                # Fails unless the target is missing or an empty directory, which a
                # checkpoint never is: of two writers, one gets the error.
                os.rename(self._temporary, self._target)
        except OSError as e:
            self._is_ours = True
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise already_there(repr(self._target)) from None
            raise
        try:
            os.fsync(self._parent)
        except OSError:
            self._undo(replaced)
            raise
        if replaced:
            _delete(self._temporary)

    def abandon(self) -> None:
        with self._stack:
            if self._is_ours:
                _delete(self._temporary)

    def _is_replacement(self) -> bool:
        """Whether a checkpoint is replaced; raises if that is not wanted or safe."""
        try:
            with os.scandir(self._target) as entries:
                if not any(entries):
                    return False
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            if not os.path.lexists(self._target):
                raise
            raise CheckpointExistsError(
                f"{self._target} is a file. Nothing was saved; choose another path."
            ) from None
        if not self._overwrite:
            raise already_there(repr(self._target))
        foreign = _foreign_files(self._target)
        if foreign:
            raise CheckpointExistsError(
                f"{self._target} holds files that are not of a checkpoint, such as "
                f"{foreign[0]!r}, and `overwrite=True` replaces only checkpoints. "
                "Nothing was saved; move them away, or choose another path."
            )
        return True

    def _undo(self, replaced: bool) -> None:
        """The rename may not survive a power cut, so it must not be seen either."""
        try:
            if os.stat(self._target).st_ino != self._inode:
                # Another writer has replaced it in the meantime.
                self._is_ours = replaced
                return
            if replaced:
                _exchange(self._temporary, self._target)
            else:
                os.rename(self._target, self._temporary)
        except OSError as e:
            logger.warning("Could not take back the save of %s: %s", self._target, e)
        else:
            self._is_ours = True


def check_paths(target: KvSpec, leaves: Mapping[str, LeafRecord]) -> None:
    """Raise `LeafNameError` if the path of a file would be too long for the system."""
    above = len(os.fsencode(target["path"])) + _AROUND
    for name, record in leaves.items():
        keys = chunk_keys(record.data_shape, record.chunk_shape)[-1:]
        length = above + len(name) + max(map(len, (MANIFEST, *keys)))
        if length > _MAX_PATH and record.is_array:
            raise LeafNameError(
                f"Nothing was saved: files of the leaf {name[:80] + '...'!r}, whose "
                f"name has {len(name)} bytes, would have paths of {length} bytes, and "
                f"the system takes {_MAX_PATH}. Pass `layout='ocdbt'`, which has names "
                "of any length, or nest the PyTree less."
            )


def remove(checkpoints: Iterable[str]) -> None:
    """Delete checkpoints in one directory; none of them is ever half there.

    First their names go, durably, then what is in them.
    """
    with contextlib.ExitStack() as stack:
        hidden: list[str] = []
        try:
            for path in checkpoints:
                temporary = stack.enter_context(_claimed(path)) + ".tmp"
                # Another process may have removed it.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, temporary)
                    hidden.append(temporary)
        finally:
            # Those before one that failed are gone all the same, and so is their data.
            if hidden:
                _fsync(os.path.dirname(hidden[0]))
            for temporary in hidden:
                _delete(temporary)


def sweep(directory: str) -> None:
    """Remove what dead attempts left in a directory, and nothing of a live one."""
    names = {m[1] for name in os.listdir(directory) if (m := _CLAIM.fullmatch(name))}
    if names:
        # What a dead process exchanged or hid must not come back half deleted.
        _fsync(directory)
    for name in sorted(names):
        _sweep(os.path.join(directory, name))


def _sweep(stem: str) -> None:
    lock = os.open(stem + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            logger.info("Removing %s.tmp, which a dead process left.", stem)
            _delete(stem + ".tmp")
            os.unlink(stem + ".lock")
    except BlockingIOError:
        logger.debug("%s.tmp is in use.", stem)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _claimed(target: str) -> Generator[str, None, None]:
    """A fresh hidden name beside a target, and a lock that lasts as long as we do.

    The lock dies with the process, so that `sweep` can tell a dead attempt. It is a
    file of its own: NFS has no locks of directories.
    """
    parent, name = os.path.split(target)
    if len(os.fsencode(name)) > _MAX_NAME:
        raise CheckpointError(
            f"The directory's name {name[:40] + '...'!r} has {len(os.fsencode(name))} "
            f"bytes. Nothing was saved; choose a name of {_MAX_NAME} at most: a save "
            "needs a longer one beside it, and file systems take 255."
        )
    while True:
        stem = f"{parent}/.{name}.{uuid.uuid4().hex}"
        lock = os.open(stem + ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = not os.fstat(lock).st_nlink
        except BlockingIOError:
            swept = True
        except OSError:
            # A file system without locks: `sweep` fails there too, and removes nothing.
            swept = False
        if not swept:
            break
        os.close(lock)
    _held.add(lock)
    try:
        yield stem
    finally:
        with contextlib.suppress(OSError):
            os.unlink(stem + ".lock")
        _held.discard(lock)
        os.close(lock)


def _let_go() -> None:
    """A forked child shares the locks of its parent, and could outlive it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def already_there(target: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{target} exists already. Nothing was saved, and it was left as it is: choose "
        "another path or step, or remove it; `tree_serialise_leaves` replaces a "
        "checkpoint with `overwrite=True`."
    )


def _foreign_files(checkpoint: str) -> list[str]:
    """The files below a checkpoint's directory that are not of the checkpoint."""
    data = read_key({"driver": "file", "path": checkpoint + "/"}, MANIFEST)
    found = (
        os.path.relpath(f"{folder}/{name}", checkpoint)
        for folder, _, names in os.walk(checkpoint)
        for name in names
    )
    return strangers(found, data, repr(checkpoint))


def _delete(directory: str) -> None:
    """Delete a directory that nobody is shown; what cannot be deleted harms nobody.

    Of a link, only the link: what it points to is not ours.
    """
    if os.path.islink(directory):
        with contextlib.suppress(OSError):
            os.unlink(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        logger.warning("Could not delete all of %s; delete it by hand.", directory)


def flush(fd: int, directory: str) -> None:
    """Make everything below `directory` durable, and the directories above it.

    One `syncfs` costs a tenth of an `fsync` per file. See docs/performance.md.
    """
    if sys.platform != "linux":
        _fsync_all(directory)
    elif _LIBC.syncfs(fd) != 0:
        raise _os_error(directory)


def _fsync_all(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (*(f"{folder}/{name}" for name in names), folder):
            _fsync(path)
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        _fsync(directory)


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(a: str, b: str) -> None:
    """Let two directories change places, in one atomic step."""
    if sys.platform != "linux":
        raise OSError(
            errno.ENOTSUP, "`overwrite=True` needs Linux's atomic exchange of names"
        )
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    if _LIBC.renameat2(*arguments, _RENAME_EXCHANGE) != 0:
        raise _os_error(b)


def _os_error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)
