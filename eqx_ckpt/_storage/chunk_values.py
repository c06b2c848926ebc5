"""Arrays whose chunks are values of a store: of objects, or of a database.

Between memory and the store go whole chunks, once each. So what they end with is known
without asking the store for it, and it is compared before anything else is done with
what came back.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import numpy as np

from .._errors import CorruptCheckpointError
from .._format.chunks import (
    batches,
    chunk_key,
    overlap,
    Region,
    shape_of,
    TARGET_BYTES,
)
from .._format.manifest import MANIFEST, zarr_metadata
from .._types import Report, Tails
from .buffers import empty
from .chunk_codec import Chunk, chunks_of, Piece, Scratch
from .kvstore import (
    ArrayWrite,
    CHECKSUM_BYTES,
    KvSpec,
    kvstore,
    MAX_IN_FLIGHT,
    new_database,
    own_context,
    RegionRead,
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
    scratch = Scratch()
    try:
        for name, record, _ in writes if create else ():
            text = json.dumps(zarr_metadata(record))
            target.put(f"{name}/{MANIFEST}", text.encode())
        for pieces in _batches_of_pieces(writes):
            for chunk in scratch.encoded(pieces):
                tails[chunk.name][chunk.position] = chunk.value[-CHECKSUM_BYTES:].hex()
                target.put(chunk.key, chunk.value)
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


class _Wanted(NamedTuple):
    """A chunk, and which of the reads want a part of it."""

    chunk: Chunk
    reads: list[int]

    @property
    def cost(self) -> int:
        return max(self.chunk.nbytes, _LEAST)


def read_objects(
    base: KvSpec,
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    arrived: Report | None = None,
) -> list[np.ndarray]:
    """As `read_regions`; a chunk is asked for once, however many regions it is in."""
    store, scratch = kvstore(base), Scratch()
    buffers = [
        np.empty(0)
        if read.nbytes
        else empty(shape_of(read.region), read.record.data_type)
        for read in reads
    ]
    asked: deque[tuple[list[_Wanted], list[Any]]] = deque()

    def take() -> None:
        parts: list[tuple[Chunk, list[tuple[Region, np.ndarray]]]] = []
        for (chunk, indices), future in zip(*asked.popleft(), strict=True):
            try:
                value = answer(base, future, chunk.key).value
                chunk = _checked(chunk, value)
            except CorruptCheckpointError as e:
                damage.setdefault(chunk.name, str(e))
                continue
            for i in indices:
                if not buffers[i].size:
                    buffers[i] = empty(
                        shape_of(reads[i].region), chunk.record.data_type
                    )
            targets = [(reads[i].region, buffers[i]) for i in indices]
            parts.append((chunk, targets))
        scratch.decode(parts, damage)
        if arrived:
            for chunk, targets in parts:
                for region, array in targets:
                    size = math.prod(shape_of(overlap(chunk.region, region)))
                    arrived(chunk.name, size * array.itemsize)

    on_disk = base["driver"] == "ocdbt" and base["base"]["driver"] == "file"
    size, most = (TARGET_BYTES, 1) if on_disk else (_BATCH, _MAX_REQUESTED // _BATCH)
    for batch in batches(_wanted(reads), lambda wanted: wanted.cost, size):
        asked.append((batch, [store.read(wanted.chunk.key) for wanted in batch]))
        if len(asked) > most:
            take()
    while asked:
        take()
    return buffers


def _wanted(reads: Sequence[RegionRead]) -> Iterable[_Wanted]:
    wanted: dict[str, _Wanted] = {}
    for i, (name, record, region) in enumerate(reads):
        if 0 in shape_of(region):
            continue
        for chunk in chunks_of(name, record, region):
            wanted.setdefault(chunk.key, _Wanted(chunk, [])).reads.append(i)
    return wanted.values()


def _checked(chunk: Chunk, value: bytes) -> Chunk:
    """A chunk with its value, if that ends as the manifest says.

    What is lost is an empty value in a database, and none in another store.
    """
    if not value:
        raise CorruptCheckpointError(f"{chunk.key} is missing")
    expected = chunk.nbytes + CHECKSUM_BYTES
    if len(value) != expected and chunk.record.compression is None:
        raise CorruptCheckpointError(
            f"{chunk.key} has {len(value)} bytes instead of {expected}"
        )
    if value[-CHECKSUM_BYTES:].hex() != chunk.record.crc32c[chunk.position]:
        raise CorruptCheckpointError(
            f"{chunk_key(chunk.at)} is not the chunk that was saved"
        )
    return chunk._replace(value=value)
