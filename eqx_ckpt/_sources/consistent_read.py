"""Read one version of a checkpoint, although it may be replaced meanwhile."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from .._errors import CheckpointError, CorruptCheckpointError
from .._format.manifest import MANIFEST
from .._format.manifest_parser import HEAD_BYTES
from .._format.source import Source
from .._storage.calls.host_memory import collector_paused
from .._storage.locate import locate
from .._types import PathLike
from .checkpoint_source import opened
from .recording_source import Recorded


# The paths that this process is reading. Changes to a list are atomic, without a lock.
being_read: list[str] = []


os.register_at_fork(after_in_child=being_read.clear)


# What a restore raises that reads one version, and then another one.
OF_TWO_VERSIONS = (CorruptCheckpointError, CheckpointError)


_TRIES = 10


_T = TypeVar("_T")


# From the version that was planned for, whether that was replaced meanwhile, and what
# failed: whether to go on. If not, it is read again, or an error is raised.
Agree: TypeAlias = Callable[[Callable[[], str], bool, Exception | None], bool]


class Reading:
    """A source of which one version is read; a checkpoint may be replaced meanwhile.

    Other sources never change; a recording only grows.
    """

    def __init__(self, source: PathLike | Source) -> None:
        self._source = source
        self._place = None if isinstance(source, Source) else locate(source)
        self._before: object = None
        self._recorded: Recorded | None = None

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
            return self._recorded.digest
        if self._place is None:
            return ""
        head = self._place.read(MANIFEST, HEAD_BYTES)
        return "" if head is None else hashlib.sha256(head).hexdigest()

    @contextlib.contextmanager
    def announced(self) -> Generator[None, None, None]:
        """Keep other threads of this process from removing what is read."""
        if self._place is None:
            yield
            return
        being_read.append(str(self._place))
        try:
            yield
        finally:
            being_read.remove(str(self._place))

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


def read_consistently(
    source: PathLike | Source,
    plan: Callable[[Source], Callable[[], _T]],
    agree: Agree | None = None,
) -> _T:
    """Read a checkpoint, all of it from before or all of it from after a replacement.

    `plan` looks at the manifest, and returns the function that reads. If another
    process saves with `overwrite=True` meanwhile, both start again. Processes that read
    together `agree` on that, before and after they read.
    """
    reading = Reading(source)
    with reading.announced():
        for _ in range(_TRIES):
            with collector_paused():
                result = _try_to_read(reading, plan, agree)
            if result:
                return result[0]
    raise CheckpointError(
        f"{reading} was replaced {_TRIES} times while it was read. Restore a "
        "checkpoint that nobody overwrites."
    )


def _try_to_read(
    reading: Reading, plan: Callable[[Source], Callable[[], _T]], agree: Agree | None
) -> list[_T]:
    """What is read; nothing if the checkpoint was replaced meanwhile."""
    result, read, error = [], None, None
    try:
        read = plan(reading.open())
    except Exception as e:
        error = e
    if agree is not None and not agree(reading.digest, reading.has_changed(), error):
        return []
    try:
        result = [] if read is None else [read()]
    except Exception as e:
        error = e
    has_changed = error is None or type(error) in OF_TWO_VERSIONS
    has_changed = has_changed and reading.has_changed()
    if agree is not None:
        return result if agree(reading.digest, has_changed, error) else []
    if error is not None and not has_changed:
        raise error
    return [] if has_changed else result
