"""The metadata of the checkpoint that was committed at a location."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ..._format.manifest import MANIFEST
from ..._format.manifest_parser import (
    from_bytes,
    HEAD,
    HEAD_BYTES,
    history_from_bytes,
    is_foreign,
    metadata_and_history_from_bytes,
    metadata_from_bytes,
)
from ..._format.run_history import History
from .place import Storage
from .referred_chunks import stored_chunks
from .sure_reads import missing_surely, parse_surely, read_surely


_T = TypeVar("_T")


_ROOT = re.compile(rb'\n"root": "(@[0-9a-f]{32}/)",\n')


def read_committed(
    place: Storage, parse: Callable[[bytes, str], _T]
) -> tuple[bytes, _T]:
    """The manifest, and what a function makes of it and the name of its place.

    `CheckpointNotFoundError` if there is none.
    """
    found = parse_surely(place, MANIFEST, lambda data: parse(data, str(place)))
    if found is None:
        raise CheckpointNotFoundError(
            f"No committed checkpoint at {place}: there is no `{MANIFEST}`."
        )
    return found


def read_metadata(place: Storage) -> tuple[str, Any]:
    """The root and the metadata of a checkpoint, without its leaves."""
    data, metadata = read_committed(place, metadata_from_bytes)
    return root_of(data[:HEAD_BYTES]), metadata


def read_metadata_and_history(place: Storage) -> tuple[Any, History | None]:
    """Both, of one version of a checkpoint."""
    return read_committed(place, metadata_and_history_from_bytes)[1]


def read_history(place: Storage) -> History | None:
    """The history of a step, without its leaves."""
    return read_committed(place, history_from_bytes)[1]


def root_of(head: bytes) -> str:
    """The prefix of the attempt that the head of a manifest refers to, or `''`."""
    root = _ROOT.search(head)
    return root[1].decode() if root else ""


def committed_steps(
    places: Mapping[int, Storage], doubtful: dict[int, OSError] | None
) -> list[int]:
    """The steps at whose place a checkpoint was committed; see `Steps.saved`."""
    steps: list[int] = []
    for step, place in places.items():
        try:
            if is_checkpoint(place):
                steps.append(step)
        except OSError as e:
            if doubtful is None:
                raise
            doubtful[step] = e
    return steps


def is_checkpoint(place: Storage) -> bool:
    """Whether a checkpoint was committed here, damaged or not."""
    try:
        head = read_surely(place, MANIFEST, HEAD_BYTES)
        if head is None or HEAD.match(head):
            return head is not None
        return not is_foreign(read_surely(place, MANIFEST) or b"")
    except CorruptCheckpointError:
        return True


def problem_of(place: Storage) -> str:
    """Why the checkpoint at a place is not intact, or `''`.

    It is intact if its manifest is, and if each chunk that this names is there, as long
    as it was written. No data are read: a changed bit is not seen.
    """
    try:
        _, manifest = read_committed(place, from_bytes)
    except CheckpointNotFoundError:
        raise
    except CheckpointError as e:
        return str(e)
    try:
        chunks = stored_chunks(place, manifest)
        return chunks.problem() or missing_surely(chunks, manifest.leaves)
    except CorruptCheckpointError as e:
        return str(e)


class SeenIntact:
    """Remembers which checkpoints were seen intact since they were committed."""

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}

    def problem(self, place: Storage) -> str:
        """As `problem_of`; of one version, if others replace or remove it meanwhile."""
        key = str(place)
        now = place.identity()
        if now is None or self._seen.get(key) != now:
            problem = problem_of(place)
            if place.identity() != now:
                return self.problem(place)
            if problem:
                return problem
            self._seen[key] = now
        return ""
