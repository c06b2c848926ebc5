"""Reading one version of a checkpoint that others may replace meanwhile."""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from .._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.lazy import Array
from .._format.manifest import MANIFEST, Manifest
from .._format.parse import check_records, from_bytes, HEAD_BYTES
from .._format.source import raise_damage, RegionRead, Source
from .._types import PathLike, Report
from .checkpoint import (
    being_read,
    check_array_metadata,
    collector_paused,
)
from .chunk_reads import read_chunks
from .committed import read_committed
from .directory import locate
from .recorded import find_recorded, Recorded
from .storage import Storage


# What a restore raises that reads one version, and then another one.
OF_TWO_VERSIONS = (CorruptCheckpointError, CheckpointError)
_TRIES = 10
_T = TypeVar("_T")
# From the version that was planned for, whether that was replaced meanwhile, and what
# failed: whether to go on. If not, it is read again, or an error is raised.
Agree: TypeAlias = Callable[[Callable[[], str], bool, Exception | None], bool]


class Checkpoint(Source):
    """A committed checkpoint, as it is now.

    **Attributes:**

    - `chunks`: its arrays.
    """

    def __init__(self, path: PathLike | Storage) -> None:
        place = path if isinstance(path, Storage) else locate(path)
        try:
            data = read_committed(place)
            manifest = from_bytes(data, str(place))
        except CheckpointNotFoundError as e:
            raise CheckpointNotFoundError(f"{e} {place.explain()}".rstrip()) from None
        self._place, self._head = place, data[:HEAD_BYTES]
        self.chunks = place.layouts[manifest.layout](place.arrays(manifest.root))
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        return read_chunks(self.chunks, reads, damage, report)

    def read_into(
        self,
        reads: Sequence[RegionRead],
        targets: Sequence[Array],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> None:
        read_chunks(self.chunks, reads, damage, report, targets)

    @property
    def has_checksums(self) -> bool:
        return True

    def has_changed(self) -> bool:
        # The head has the digest of the manifest, which has all checksums.
        return self._place.read(MANIFEST, HEAD_BYTES) != self._head

    def check_the_rest(self, damage: dict[str, str]) -> None:
        """Raise for damage to files that no restore reads, and for all other damage."""
        arrays = self._manifest.leaves.items()
        undamaged = {n: r for n, r in arrays if r.is_array and n not in damage}
        check_array_metadata(self.chunks, undamaged, damage)
        raise_damage(damage, self)
        self.chunks.verify()

    def __str__(self) -> str:
        return str(self.chunks)


def opened(source: PathLike | Source) -> Source:
    """The checkpoint at a path, or the recording, as it is now."""
    if isinstance(source, Checkpoint | Recorded):
        return source
    if isinstance(source, Source):
        check_records(source.manifest.leaves, str(source))
        return source
    try:
        return Checkpoint(source)
    except CheckpointNotFoundError:
        recorded = find_recorded(locate(source))
        if recorded is None:
            raise
        return recorded


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
