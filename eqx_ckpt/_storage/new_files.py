"""Files of other formats, written beside their places and renamed at the end."""

import contextlib
import os
import uuid
from collections.abc import Generator, Sequence
from typing import BinaryIO

from .._errors import CheckpointExistsError
from .._types import PathLike


class NewFiles:
    """Files that come into being together: all of them at the end, or none.

    They are written beside their places, and renamed in the order of `paths`.
    """

    def __init__(self, paths: Sequence[PathLike], *, overwrite: bool) -> None:
        self.paths = [os.path.abspath(os.path.expanduser(path)) for path in paths]
        self._overwrite = overwrite
        self._temporary: list[str] = []
        for path in self.paths:
            if os.path.lexists(path) and (not overwrite or os.path.isdir(path)):
                raise _exists(path)

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                for temporary, path in zip(self._temporary, self.paths, strict=True):
                    self._commit(temporary, path)
        finally:
            for temporary in self._temporary:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

    @contextlib.contextmanager
    def next(self) -> Generator[BinaryIO, None, None]:
        """The file that is to be the next one of `paths`, flushed at the end."""
        folder, name = os.path.split(self.paths[len(self._temporary)])
        os.makedirs(folder, exist_ok=True)
        self._temporary.append(f"{folder}/.{name}.{uuid.uuid4().hex}.tmp")
        with open(self._temporary[-1], "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())

    def _commit(self, temporary: str, path: str) -> None:
        if self._overwrite:
            os.replace(temporary, path)
        else:
            try:
                # Unlike a rename, a link never takes the place of a file.
                os.link(temporary, path)
            except FileExistsError:
                raise _exists(path) from None
            os.unlink(temporary)
        fd = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _exists(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path!r} exists already. Choose another path, or pass `overwrite=True`."
    )
