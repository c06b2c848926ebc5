"""Decide what is missing or damaged in a store, for which one answer is not enough.

A proxy can answer in place of the store, or cut the store's answer. So a value counts
as missing only if a listing lacks it too, as there only if it can be read, and as
damaged only if it is read twice with the same bytes. Answers that contradict each other
are an error, from which nothing follows.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MAX_BYTES
from ..calls.tensorstore_calls import contradicts
from .place import every_chunk, Storage, StoredChunks


# How often a request is repeated while the answers contradict each other.
TRIES = 3


_T = TypeVar("_T")


def read_surely(place: Storage, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
    """The value of a key, or its first `most` bytes; `None` if it is surely missing."""
    return ask_surely(place, key, lambda: place.read(key, most), lambda value: value)


def ask_surely(
    place: Storage,
    key: str,
    ask: Callable[[], _T],
    value_of: Callable[[_T], bytes | None],
) -> _T:
    """An answer about a key, which is missing only if a listing lacks it, too."""
    for _ in range(TRIES):
        answer = ask()
        if value_of(answer) is not None or not place.is_listed(key):
            return answer
    raise listed_and_missing(place, key)


def parse_surely(
    place: Storage, key: str, parse: Callable[[bytes], _T]
) -> tuple[bytes, _T] | None:
    """The value of a key, and what a function makes of it; `None` if it is missing.

    Raises what the function raises, if two answers are the same.
    """
    before: bytes | None = None
    for _ in range(TRIES):
        try:
            value = read_surely(place, key)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{place} is damaged: {e}.") from None
        if value is None:
            return None
        try:
            return value, parse(value)
        except CheckpointError:
            if value == before:
                raise
            before = value
    raise contradicts(place.url(key), "each time it is damaged in a different way")


def first_surely(place: Storage, keys: Iterable[str]) -> str | None:
    """The first of the listed keys that is surely there; `None` if there is none."""
    return next((key for key in keys if read_surely(place, key, 1) is not None), None)


def missing_surely(chunks: StoredChunks, leaves: Mapping[str, LeafRecord]) -> str:
    """As `Chunks.missing`; a problem counts only if it is found twice."""
    return chunks.missing(every_chunk(leaves)) and chunks.missing(every_chunk(leaves))


def listed_and_missing(place: Storage, key: str) -> ConnectionError:
    return contradicts(place.url(key), "it is listed, and it is missing")
