"""Arrays whose chunks are values of keys.

Each chunk is transferred once, as a whole. So its checksum is known without a request
for it.
"""

import abc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.chunk_grid import batches, chunk_keys
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..._types import Checksums, Report
from ..calls.send_window import Mark, window_of
from ..calls.tensorstore_calls import check_written, KvSpec, open_kvstore, value_of
from ..calls.worker_threads import Crew
from ..interface.chunk_bytes import (
    Chunk,
    ChunkBytes,
    no_checksums,
    Piece,
    Problem,
    stored,
    Value,
    Wanted,
)
from ..interface.place import Chunks, every_chunk, Storage


# Maximum length of a key without the path and the leaf name, such as
# `@<uuid>/p1234/d/<uuid>`.
_OWN_KEY = 80


# Bytes of pieces that are compressed at a time.
_MAX_IN_FLIGHT = 32 * 2**20


# A request counts as so many bytes, at least.
_LEAST = 2**16


# A chunk, what is stored of it, and its checksums.
_Value: TypeAlias = tuple[Chunk, bytes, str]


# Written if there are no arrays, so that each attempt leaves a key.
_EMPTY = b'{"zarr_format": 3, "node_type": "group"}'


class Target(abc.ABC):
    """Where one save writes its values."""

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until all values are written."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Give up; when this returns, nothing more is written to a disk."""


class ChunkValues(Chunks):
    """Each chunk is a value of its own."""

    def __init__(self, place: Storage) -> None:
        self.place = place

    @property
    def spec(self) -> KvSpec:
        return self.place.spec

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        check_limits(self.place, leaves, self.key_of)

    def key_of(self, name: str, record: LeafRecord) -> str:
        """The longest key of a leaf."""
        last = chunk_keys(record.data_shape, record.chunk_shape)[-1:]
        return f"@{'0' * 32}/{name}/{max(MANIFEST, *last, key=len)}"

    def target(self) -> Target:
        return _Requests(self.place)

    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        target = self.target()
        checksums = no_checksums(arrays)

        def put(piece: Piece, values: Iterable[_Value]) -> None:
            for chunk, value, found in values:
                checksums[chunk.name][chunk.position] = found
                target.put(chunk.key, value)
            if written:
                written(piece.name, piece.array.nbytes)

        try:
            if create and not arrays:
                target.put(MANIFEST, _EMPTY)
            for name, record in arrays.items() if create else ():
                target.put(f"{name}/{MANIFEST}", zarr_json(record[:9]))
            with Crew(_compressed, _MAX_IN_FLIGHT, put) as crew:
                for piece in pieces:
                    if piece.record.compression is None:
                        put(piece, _values(piece))
                    else:
                        crew.put(piece, piece.array.nbytes)
                crew.finish()
            target.finish()
        except BaseException:
            target.cancel()
            raise
        return checksums

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        """Ask for chunks, many at a time."""
        asking = _Asking(self)
        try:
            for batch in batches(wanted, _weight, asking.window.own):
                while not asking.has_room(batch):
                    yield from self._answered(asking.next())
                asking.ask(batch)
            while asking.is_open():
                yield from self._answered(asking.next())
        finally:
            asking.end()

    def _answered(
        self, asked: Iterable[tuple[Wanted, Any]]
    ) -> Iterator[tuple[Wanted, Value]]:
        for one, future in asked:
            yield one, Value(self._value(one.chunk.key, future))

    def _value(self, key: str, future: Any) -> bytes | Problem:
        try:
            found = value_of(self.place.wait_for(future, key), self.place.url(key))
        except CorruptCheckpointError as e:
            return Problem(str(e))
        # A lost value is empty in a database, and missing in other stores.
        return found or Problem(f"{key} is missing", is_missing=True)

    def listed(self) -> set[str]:
        return {*self.place.list_keys()}

    def missing(self, leaves: Mapping[str, LeafRecord]) -> str:
        """One listing: a request for a chunk would transfer it."""
        there = self.listed()
        keys = (one.chunk.key for one in every_chunk(leaves))
        lost = next((key for key in keys if key not in there), "")
        return f"{lost} is missing" if lost else ""

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        store = open_kvstore(self.spec)
        for key, future in [(key, store.read(key)) for key in keys]:
            try:
                yield value_of(self.place.wait_for(future, key), self.place.url(key))
            except CorruptCheckpointError as e:
                yield e


def check_limits(
    place: Storage,
    leaves: Mapping[str, LeafRecord],
    key_of: Callable[[str, LeafRecord], str],
) -> None:
    """Raise `LeafNameError` if a key or a chunk is larger than the storage takes."""
    if math.inf in (place.max_key, place.max_object):
        return
    above = len(place.spec["path"].encode())
    problems: list[str] = []
    if (length := above + _OWN_KEY) > place.max_key:
        problems.append(f"- any leaf: without its name, keys would have {length} bytes")
    for name, record in leaves.items():
        if not record.is_array:
            continue
        key = key_of(name, record)
        length = above + len(key.encode())
        nbytes = math.prod(record.chunk_shape) * record.itemsize
        if key and length > place.max_key:
            problems.append(f"- {name!r}: its key would have {length} bytes")
        elif nbytes > place.max_object:
            problems.append(f"- {name!r}: a chunk would have {nbytes} bytes")
    if problems:
        raise LeafNameError(
            f"{place} cannot take these leaves:\n"
            + "\n".join(problems)
            + f"\nA key has {place.max_key} bytes at most, an object "
            f"{place.max_object}. Pass `layout='ocdbt'`, which has keys of any length, "
            "or a shorter path; shard the leaf so that its shards can be cut evenly."
        )


def _values(piece: Piece) -> Iterator[_Value]:
    for chunk, encoded in stored(piece):
        yield chunk, b"".join(encoded), encoded.checksums


def _compressed(piece: Piece) -> list[_Value]:
    return [*_values(piece)]


def _weight(wanted: Wanted) -> int:
    return max(wanted.chunk.nbytes, _LEAST)


class _Asking:
    """Batches of chunks that were asked for, and may be on their way.

    **Attributes:**

    - `window`: of the line that they come over.
    """

    def __init__(self, chunks: ChunkValues) -> None:
        self._store = open_kvstore(chunks.spec)
        self.window = window_of(chunks.place.spec, "from")
        self._asked: deque[tuple[list[tuple[Wanted, Any]], int, Mark]] = deque()
        self._nbytes = 0

    def has_room(self, batch: Sequence[Wanted]) -> bool:
        return self.window.has_room(sum(map(_weight, batch)), self._nbytes)

    def ask(self, batch: Sequence[Wanted]) -> None:
        nbytes = sum(map(_weight, batch))
        since = self.window.send(nbytes)
        self._nbytes += nbytes
        reading = [(one, self._store.read(one.chunk.key)) for one in batch]
        self._asked.append((reading, nbytes, since))

    def is_open(self) -> bool:
        return bool(self._asked)

    def next(self) -> Iterator[tuple[Wanted, Any]]:
        """The oldest batch; it has arrived when all of it was taken."""
        reading, nbytes, since = self._asked[0]
        yield from reading
        self._asked.popleft()
        self._nbytes -= nbytes
        self.window.arrived(nbytes, since)

    def end(self) -> None:
        """Give up what was not taken."""
        for reading, *_ in self._asked:
            for _, future in reading:
                future.cancel()
        self.window.given_up(self._nbytes)
        self._asked.clear()
        self._nbytes = 0


class _Requests(Target):
    """Requests for values, many at a time."""

    def __init__(self, place: Storage) -> None:
        self._place = place
        self._store = open_kvstore(place.spec)
        self._writing: deque[tuple[Any, str, int, Mark]] = deque()
        self._nbytes = 0
        self._window = window_of(place.spec, "to")

    def put(self, key: str, value: bytes) -> None:
        while not self._window.has_room(len(value), self._nbytes):
            self._wait()
        since = self._window.send(len(value))
        self._nbytes += len(value)
        self._writing.append((self._store.write(key, value), key, len(value), since))

    def finish(self) -> None:
        while self._writing:
            self._wait()

    def _wait(self) -> None:
        future, key, nbytes, since = self._writing[0]
        check_written(self._place.wait_for(future, key), self._place.url(key))
        self._writing.popleft()
        self._nbytes -= nbytes
        self._window.arrived(nbytes, since)

    def cancel(self) -> None:
        """Requests already sent may still land, under a prefix that is never reused."""
        for future, *_ in self._writing:
            future.cancel()
        self._window.given_up(self._nbytes)
