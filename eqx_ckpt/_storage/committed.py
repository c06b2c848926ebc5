"""The metadata of the checkpoint that was committed at a location."""

import re
from collections.abc import Mapping
from typing import Any

from .._errors import CheckpointNotFoundError, CorruptCheckpointError
from .._format.manifest import MANIFEST
from .._format.parse import HEAD, HEAD_BYTES, is_foreign, metadata_from_bytes
from .storage import Storage


_ROOT = re.compile(rb'\n"root": "(@[0-9a-f]{32}/)",\n')


def read_committed(place: Storage) -> bytes:
    """The manifest; `CheckpointNotFoundError` if there is none."""
    try:
        data = place.read(MANIFEST)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"{place} is damaged: {e}.") from None
    if data is None:
        place.check_exists()
        raise CheckpointNotFoundError(
            f"No committed checkpoint at {place}: there is no `{MANIFEST}`."
        )
    return data


def read_metadata(place: Storage) -> tuple[str, Any]:
    """The root and the metadata of a checkpoint, without its leaves."""
    data = read_committed(place)
    metadata = metadata_from_bytes(data, str(place))
    root = _ROOT.search(data)
    return root[1].decode() if root else "", metadata


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
        head = place.read(MANIFEST, HEAD_BYTES)
        if head is None or HEAD.match(head):
            return head is not None
        return not is_foreign(place.read(MANIFEST) or b"")
    except CorruptCheckpointError:
        return True
