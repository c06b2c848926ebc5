"""Files of other formats, written beside their places and renamed at the end."""

import contextlib
import io
import os
import zipfile
from collections.abc import Generator, Sequence
from typing import Any, BinaryIO

from ..._types import PathLike
from ..calls.opening import reading
from ..calls.posix_calls import fsync, rename_to_new
from ..calls.safe_files import writing_to
from ..calls.store_path import local_path
from .attempt_lock import locked_attempt
from .replacing import already_there, is_replacement, Kind


class NewFiles:
    """Files that are created together: all of them at the end, or none.

    They are written beside their places, and renamed in the order of `paths`. Other
    files that they take the place of, `replaces`, are removed after that, in order.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        kind: Kind,
        *,
        overwrite: bool,
        replaces: Sequence[str] = (),
    ) -> None:
        self.paths = [local_path(path) for path in paths]
        self._replaces = replaces
        self._kind = kind
        self._overwrite = overwrite
        self._temporary: list[str] = []
        self._held = contextlib.ExitStack()
        self._folders: list[str] = []
        self._check()

    def _check(self) -> None:
        for path in (*self.paths, *self._replaces):
            is_replacement(path, self._kind, overwrite=self._overwrite)

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._check()
                for temporary, path in zip(self._temporary, self.paths, strict=True):
                    self._commit(temporary, path)
                for path in self._replaces:
                    _remove(path)
        finally:
            for temporary in self._temporary:
                _remove(temporary)
            self._held.close()
            for folder in self._folders:
                # It stays if it has a file.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    @contextlib.contextmanager
    def next(self) -> Generator[BinaryIO, None, None]:
        """The next file of `paths`, to write; it is flushed when the context ends."""
        path = self.paths[len(self._temporary)]
        folder = os.path.dirname(path)
        self._make(folder)
        # In the directory of a run, a manager would remove the file if its lock were
        # not held.
        stem = self._held.enter_context(locked_attempt(path))
        self._temporary.append(f"{stem}.tmp")
        new = _NewFile(self._temporary[-1], folder)
        with io.BufferedWriter(new) as f:
            yield f
            f.flush()
            new.sync()

    def _make(self, folder: str) -> None:
        """Make a folder, and list those made, the innermost first."""
        missing = folder
        while not os.path.exists(missing):
            self._folders.append(missing)
            missing = os.path.dirname(missing)
        os.makedirs(folder, exist_ok=True)

    def _commit(self, temporary: str, path: str) -> None:
        if self._overwrite:
            os.replace(temporary, path)
        else:
            try:
                rename_to_new(temporary, path)
            except FileExistsError:
                raise already_there(repr(path)) from None
        fsync(os.path.dirname(path))


# What to do when a disk is full no longer.
AGAIN = "write the file again"


class _NewFile(io.FileIO):
    """A file that does not exist yet, whose errors say where, and what to do."""

    def __init__(self, path: str, folder: str) -> None:
        super().__init__(path, "xb")
        self._folder = folder

    def write(self, data: Any) -> int:
        with writing_to(self._folder, AGAIN):
            return super().write(data)

    def sync(self) -> None:
        with writing_to(self._folder, AGAIN):
            os.fsync(self.fileno())


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _differs(path: str) -> str:
    """Why a file is not an archive of NumPy, or `""`."""
    try:
        with reading(path) as f, zipfile.ZipFile(f) as archive:
            others = [n for n in archive.namelist() if not n.endswith(".npy")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        return "It is not a zip file."
    return f"It has {others[0]!r}." if others else ""


NPZ = Kind("an npz file", _differs)
