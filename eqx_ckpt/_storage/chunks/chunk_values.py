"""Arrays whose chunks are values of keys.

Each chunk is transferred once, as a whole. So its checksum is known without a request
for it.
"""

import abc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.chunk_grid import batches, chunk_keys
from ..._format.leaf_record import CHECKSUM_DIGITS, LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..._types import Checksums, Report
from ..calls.send_window import MOST, Transfers, window_of
from ..calls.tensorstore_calls import check_written, KvSpec, open_kvstore, value_of
from ..calls.worker_threads import Workers
from ..interface.base import Base
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
from ..interface.place import Chunks, Storage
from .shared_values import SharedValues


# Maximum length of a key without the path and the leaf name, such as
# `@<uuid>/p1234/d/<uuid>`.
_OWN_KEY = 80


# Bytes of pieces that are compressed at a time.
_MAX_IN_FLIGHT = 32 * 2**20


# A request counts as so many bytes, at least.
_LEAST = 2**16


# A chunk, what is stored of it, and its checksums. A chunk that is shared has no value,
# and its attempt follows the checksums.
_Value: TypeAlias = tuple[Chunk, bytes | None, str]


# A batch of chunks, and the answers that are waited for.
_Asked: TypeAlias = list[tuple[Wanted, Any]]


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

    are_values = True
    _shared: SharedValues | None = None
    _most = MOST

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
        return _Requests(self.place, self._most)

    def send_at_most(self, nbytes: int) -> None:
        self._most = nbytes

    def share(self, base: Base, new: Base) -> None:
        self._shared = SharedValues(self.place, base, new)

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        assert self._shared is not None
        self._shared.begin(_put)
        return self._shared.adopt(name, record, positions)

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
                if value is not None:
                    target.put(chunk.key, value)
            if written:
                written(piece.name, piece.array.nbytes)

        try:
            if create and not arrays:
                target.put(MANIFEST, _EMPTY)
            if self._shared:
                self._shared.begin(_put)
            elif create:
                _put_metadata(target, arrays)
            with Workers(self._compressed, _MAX_IN_FLIGHT, put) as workers:
                for piece in pieces:
                    if piece.record.compression is None:
                        put(piece, self._values(piece))
                    else:
                        workers.put(piece, piece.array.nbytes)
                workers.finish()
            target.finish()
        except BaseException:
            target.cancel()
            raise
        return checksums

    def complete(self, arrays: Mapping[str, LeafRecord], checksums: Checksums) -> None:
        if self._shared is None:
            return
        # A Zarr reader would take chunks that are elsewhere for zeros.
        whole = {
            name: record
            for name, record in arrays.items()
            if all(len(text) == CHECKSUM_DIGITS for text in checksums[name])
        }
        target = self.target()
        try:
            _put_metadata(target, whole)
            target.finish()
        except BaseException:
            target.cancel()
            raise

    def _values(self, piece: Piece) -> Iterator[_Value]:
        for chunk, encoded in stored(piece):
            found = self._shared.find(chunk, encoded) if self._shared else ""
            value = None if found else b"".join(encoded)
            found = found or encoded.checksums
            if self._shared:
                self._shared.note(chunk, found)
            yield chunk, value, found

    def _compressed(self, piece: Piece) -> list[_Value]:
        return [*self._values(piece)]

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        """Ask for chunks, many at a time."""
        store = open_kvstore(self.spec)
        asked = Transfers[_Asked](window_of(self.place.spec, "from"))
        try:
            for batch in batches(wanted, _weight, min(asked.window.own, asked.most)):
                nbytes = sum(map(_weight, batch))
                while not asked.has_room(nbytes):
                    yield from self._answered(asked)
                asked.add([(one, store.read(one.chunk.key)) for one in batch], nbytes)
            while asked:
                yield from self._answered(asked)
        finally:
            asked.give_up()

    def _answered(self, asked: Transfers[_Asked]) -> Iterator[tuple[Wanted, Value]]:
        with asked.oldest() as batch:
            for one, future in batch:
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

    def missing(self, wanted: Iterable[Wanted]) -> str:
        """One listing: a request for a chunk would transfer it."""
        there = self.listed()
        keys = (one.chunk.key for one in wanted)
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


def _put_metadata(target: Target, arrays: Mapping[str, LeafRecord]) -> None:
    for name, record in arrays.items():
        target.put(f"{name}/{MANIFEST}", zarr_json(record[:9]))


def _weight(wanted: Wanted) -> int:
    return max(wanted.chunk.nbytes, _LEAST)


class _Requests(Target):
    """Requests for values, many at a time."""

    def __init__(self, place: Storage, most: int = MOST) -> None:
        self._place = place
        self._store = open_kvstore(place.spec)
        self._writing = Transfers[tuple[str, Any]](window_of(place.spec, "to"), most)

    def put(self, key: str, value: bytes) -> None:
        while not self._writing.has_room(len(value)):
            self._wait()
        self._writing.add((key, self._store.write(key, value)), len(value))

    def finish(self) -> None:
        while self._writing:
            self._wait()

    def _wait(self) -> None:
        with self._writing.oldest() as (key, future):
            check_written(self._place.wait_for(future, key), self._place.url(key))

    def cancel(self) -> None:
        """Requests already sent may still land, under a prefix that is never reused."""
        self._writing.give_up()


def _put(place: Storage, key: str, value: bytes) -> None:
    writing = _Requests(place)
    writing.put(key, value)
    writing.finish()
