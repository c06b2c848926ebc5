"""Read one version of a checkpoint, although it may be replaced meanwhile."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

from .._errors import CheckpointError, CorruptCheckpointError
from .._format.manifest import MANIFEST
from .._format.manifest_parser import HEAD_BYTES
from .._format.source import Source
from .._storage.calls.garbage_collector import collector_paused
from .._storage.locate import locate
from .._types import PathLike
from .average_source import Averaged
from .checkpoint_source import check_is_source, Checkpoint, opened
from .recording_source import Recorded


# The paths that this process is reading. Changes to a list are atomic, without a lock.
being_read: list[str] = []


os.register_at_fork(after_in_child=being_read.clear)


# What a restore raises that reads one version, and then another one.
OF_TWO_VERSIONS = (CorruptCheckpointError, CheckpointError)


_TRIES = 10


_T = TypeVar("_T")


class Replaced(Exception):
    """Another version is there now: begin again."""


class Reading(contextlib.AbstractContextManager[Any]):
    """A source of which one version is read; a checkpoint may be replaced meanwhile.

    Other sources never change; a recording only grows. In its context, other threads of
    this process do not remove what is read.
    """

    def __init__(self, source: PathLike | Source) -> None:
        check_is_source(source)
        self._source = source
        self._place = None if isinstance(source, Source) else locate(source)
        self._reads = _places(source) if self._place is None else [str(self._place)]
        self._before: object = None
        self._recorded: Recorded | None = None
        self._tries = 0

    def __enter__(self) -> Self:
        being_read.extend(self._reads)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for place in self._reads:
            with contextlib.suppress(ValueError):  # In a child that was forked since.
                being_read.remove(place)

    @contextlib.contextmanager
    def version(self) -> Generator[None, None, None]:
        """Read one version: `open` it, and `confirm` that it is there still.

        If it was replaced, the block ends without an error: enter it again.
        """
        if self._tries == _TRIES:
            raise CheckpointError(
                f"{self} was replaced {_TRIES} times while it was read. Restore a "
                "checkpoint that nobody overwrites."
            )
        self._tries += 1
        with contextlib.suppress(Replaced), collector_paused():
            try:
                yield
            except Exception as e:
                self.confirm(e)

    def open(self) -> Source:
        """The version that is there now."""
        self._before = self._identity()
        found = opened(self._source)
        self._recorded = found if isinstance(found, Recorded) else None
        return found

    def has_changed(self) -> bool:
        """Whether the version that was opened was replaced."""
        return self._recorded is None and self._identity() != self._before

    def digest(self) -> str:
        """The digest of the current version: the same in all processes of a job."""
        if self._recorded is not None:
            return self._recorded.version
        if isinstance(self._source, Source):
            return self._source.version
        assert self._place is not None
        head = self._place.read(MANIFEST, HEAD_BYTES)
        return "" if head is None else hashlib.sha256(head).hexdigest()

    def confirm(self, error: Exception | None = None) -> None:
        """Raise `Replaced` if the version was; otherwise what failed, if anything."""
        may_be_of_two = error is None or type(error) in OF_TWO_VERSIONS
        if may_be_of_two and self.has_changed():
            raise Replaced from error
        if error is not None:
            raise error

    @contextlib.contextmanager
    def unless_replaced(self) -> Generator[None, None, None]:
        """Distinguish damage from data of another version."""
        try:
            yield
        except OF_TWO_VERSIONS as e:
            if type(e) not in OF_TWO_VERSIONS or not self.has_changed():
                raise
            raise CheckpointError(
                f"{self} was replaced or removed while its leaves were read. Begin "
                "again."
            ) from e

    def _identity(self) -> object:
        return None if self._place is None else self._place.identity()

    def __str__(self) -> str:
        return str(self._source if self._place is None else self._place)


def _places(source: PathLike | Source) -> list[str]:
    """The checkpoints that a source reads."""
    if isinstance(source, Averaged):
        return [place for one in source.sources for place in _places(one)]
    return [str(source.place)] if isinstance(source, Checkpoint) else []


def read_consistently(source: PathLike | Source, read: Callable[[Source], _T]) -> _T:
    """What `read` returns of one version of a source, before or after a replacement."""
    with Reading(source) as reading:
        while True:
            with reading.version():
                result = read(reading.open())
                reading.confirm()
                return result
