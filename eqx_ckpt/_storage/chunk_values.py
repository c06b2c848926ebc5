"""Arrays whose chunks are values of a store: of objects, or of a database.

Between memory and the store go whole chunks, once each. So what they end with is known
without asking the store for it.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

from .._errors import CorruptCheckpointError
from .._format.chunks import batches, TARGET_BYTES
from .._format.manifest import MANIFEST, zarr_metadata
from .._types import Report, Tails
from .chunk_bytes import CHECKSUM_BYTES, Value, Wanted
from .chunk_codec import Piece, values
from .kvstore import (
    ArrayWrite,
    KvSpec,
    kvstore,
    MAX_IN_FLIGHT,
    new_database,
    own_context,
    result,
    url,
)
from .patience import answer


if TYPE_CHECKING:
    import tensorstore as ts

# Many requests at a time, since each of them takes long.
_MAX_REQUESTED = 256 * 2**20
# Seconds: a database tries again for ever, where a store refuses what is right.
_COMMIT = 900.0
# What is encoded or decoded at a time: so many bytes, or chunks.
_BATCH = 32 * 2**20
_LEAST = _BATCH // 512
# In the place of arrays if there are none, so that each attempt to save leaves a key.
_EMPTY = b'{"zarr_format": 3, "node_type": "group"}'


def write_objects(
    base: KvSpec,
    writes: Sequence[ArrayWrite],
    written: Report | None = None,
    *,
    create: bool = True,
) -> Tails:
    """Write every array, and return what its chunks end with.

    Unless `create`, another process writes the metadata of arrays. `written` is told of
    every piece that is not needed any more.
    """
    target = (_Transactions if base["driver"] == "ocdbt" else _Requests)(base)
    tails: Tails = {write.name: {} for write in writes}
    try:
        if create and not writes:
            target.put(MANIFEST, _EMPTY)
        for name, record, _ in writes if create else ():
            text = json.dumps(zarr_metadata(record))
            target.put(f"{name}/{MANIFEST}", text.encode())
        for pieces in _batches_of_pieces(writes):
            for chunk, value in values(pieces):
                tails[chunk.name][chunk.position] = value[-CHECKSUM_BYTES:].hex()
                target.put(chunk.key, value)
            if written:
                for piece in pieces:
                    written(piece.name, piece.array.nbytes)
        target.finish()
    except BaseException:
        target.cancel()
        raise
    return tails


def _batches_of_pieces(writes: Sequence[ArrayWrite]) -> Iterator[list[Piece]]:
    pieces = (
        Piece(name, record, region, array)
        for name, record, shards in writes
        for region, array in shards
        if array.size
    )
    return batches(pieces, lambda piece: max(piece.array.nbytes, _LEAST), _BATCH)


class _Requests:
    """One request for each value, many at a time."""

    def __init__(self, base: KvSpec) -> None:
        self._base = base
        self._store = kvstore(base)
        self._writing: deque[tuple[Any, str, int]] = deque()
        self._nbytes = 0

    def put(self, key: str, value: bytes) -> None:
        self._writing.append((self._store.write(key, value), key, len(value)))
        self._nbytes += len(value)
        while self._nbytes > _MAX_REQUESTED:
            self._wait()

    def finish(self) -> None:
        while self._writing:
            self._wait()

    def _wait(self) -> None:
        future, key, nbytes = self._writing.popleft()
        answer(self._base, future, key)
        self._nbytes -= nbytes

    def cancel(self) -> None:
        """What arrives all the same is below a name that nobody uses again."""
        for future, _, _ in self._writing:
            future.cancel()


class _Transactions:
    """One transaction of a database; more than one if all values do not fit in memory.

    They need not be atomic together: the manifest is written after the last one.
    """

    def __init__(self, base: KvSpec) -> None:
        self._base = base
        self._store = self._bound = kvstore(base)
        self._on_disk = base["base"]["driver"] == "file"
        self._most = MAX_IN_FLIGHT if self._on_disk else _MAX_REQUESTED
        self._nbytes = 0
        self._transaction: ts.Transaction | None = None

    def put(self, key: str, value: bytes) -> None:
        import tensorstore as ts

        if self._transaction is None:
            self._transaction = ts.Transaction(atomic=True)
            self._bound = self._store.with_transaction(self._transaction)
        answer(self._base, self._bound.write(key, value), key)
        self._nbytes += len(value)
        if self._nbytes > self._most:
            self.finish()

    def finish(self) -> None:
        if self._transaction is not None:
            answer(self._base, self._transaction.commit_async(), most=_COMMIT)
        self._transaction, self._nbytes = None, 0

    def cancel(self) -> None:
        """Nothing is written to a disk any more when this returns."""
        if self._transaction is not None:
            self._transaction.abort()
            if self._on_disk:
                # A commit that has begun is not aborted.
                self._transaction.future.exception()


def link_databases(base: KvSpec, names: Sequence[str]) -> None:
    """Make one database of those at names below it, and copy nothing of their data."""
    import tensorstore as ts

    # TensorStore links only within one context.
    context = own_context()
    transaction = ts.Transaction(atomic=True)
    whole, *parts = [
        result(ts.KvStore.open(new_database(base, name), context=context), url(base))
        for name in ("", *names)
    ]
    target = whole.with_transaction(transaction)
    for linking in [part.experimental_copy_range_to(target) for part in parts]:
        answer(base, linking)
    answer(base, transaction.commit_async(), most=_COMMIT)


def values_of(base: KvSpec, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, Value]]:
    """Ask for chunks, many at a time; `Value` raises what is wrong with one."""
    store = kvstore(base)
    on_disk = base["driver"] == "ocdbt" and base["base"]["driver"] == "file"
    size, most = (TARGET_BYTES, 1) if on_disk else (_BATCH, _MAX_REQUESTED // _BATCH)
    asked: deque[list[tuple[Wanted, Any]]] = deque()
    for batch in batches(wanted, lambda one: max(one.chunk.nbytes, _LEAST), size):
        asked.append([(one, store.read(one.chunk.key)) for one in batch])
        if len(asked) > most:
            yield from _answered(base, asked.popleft())
    while asked:
        yield from _answered(base, asked.popleft())


def _answered(
    base: KvSpec, asked: Iterable[tuple[Wanted, Any]]
) -> Iterator[tuple[Wanted, Value]]:
    for one, future in asked:
        key = one.chunk.key
        try:
            # What is lost is an empty value in a database, and none in another store.
            value = answer(base, future, key).value
            yield one, Value(value or CorruptCheckpointError(f"{key} is missing"))
        except CorruptCheckpointError as e:
            yield one, Value(e)
