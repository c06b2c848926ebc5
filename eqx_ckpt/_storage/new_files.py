"""Files of other formats, written beside their places and renamed at the end."""

import contextlib
import os
import uuid
from collections.abc import Generator, Sequence
from typing import BinaryIO

from .._errors import CheckpointExistsError
from .._types import PathLike
from .url import local_path


class NewFiles:
    """Files that come into being together: all of them at the end, or none.

    They are written beside their places, and renamed in the order of `paths`. Other
    files that they take the place of, `replaces`, are removed after that, in order.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        *,
        overwrite: bool,
        replaces: Sequence[str] = (),
    ) -> None:
        self.paths = [local_path(path) for path in paths]
        self._replaces = replaces
        self._overwrite = overwrite
        self._temporary: list[str] = []
        self._folders: list[str] = []
        for path in (*self.paths, *replaces):
            if os.path.isdir(path):
                raise CheckpointExistsError(
                    f"{path!r} is a directory, and a file is to be written. Choose "
                    "another path."
                )
            if os.path.lexists(path) and not overwrite:
                raise exists_already(path)

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                for temporary, path in zip(self._temporary, self.paths, strict=True):
                    self._commit(temporary, path)
                for path in self._replaces:
                    _remove(path)
        finally:
            for temporary in self._temporary:
                _remove(temporary)
            for folder in self._folders:
                # It stays if it has a file.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    @contextlib.contextmanager
    def next(self) -> Generator[BinaryIO, None, None]:
        """The file that is to be the next one of `paths`, flushed at the end."""
        folder, name = os.path.split(self.paths[len(self._temporary)])
        self._make(folder)
        self._temporary.append(f"{folder}/.{name}.{uuid.uuid4().hex}.tmp")
        with open(self._temporary[-1], "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())

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
                # Unlike a rename, a link never takes the place of a file.
                os.link(temporary, path)
            except FileExistsError:
                raise exists_already(path) from None
            os.unlink(temporary)
        fd = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def exists_already(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path!r} exists already. Choose another path, or pass `overwrite=True`."
    )
