"""Write growing Zarr arrays: one column for each leaf and chain."""

import json
from collections.abc import Iterator, Sequence

import numpy as np
from fastcrc import crc32

from .._format.chunks import chunk_key, whole
from .._format.manifest import MANIFEST, zarr_json
from .._format.names import folders
from .._format.recorded import dimension_names, FOLDER, Leaf, Record
from .._storage.chunk_codec import ChunkCodec, Piece
from .._storage.recorded import crc, memory
from .._storage.storage import SoleWriter


_GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


def array_path(leaf: Leaf) -> str:
    return f"{FOLDER}/{leaf.name}"


class Column:
    """The samples of one leaf and one chain, written chunk by chunk.

    **Attributes:**

    - `leaf`: the leaf whose samples it holds.
    """

    def __init__(
        self, files: SoleWriter, leaf: Leaf, chains: int | None, chain: int, draws: int
    ) -> None:
        self.leaf = leaf
        self._files = files
        self._chains = chains
        self._chain = chain
        if not leaf.row_bytes:
            draws = 0  # It has no chunks that could hold samples.
        self._full, self._filled = divmod(draws, leaf.rows)
        # The number of chunks that the last commit may refer to: replace these
        # atomically.
        self._committed = leaf.chunks(draws)
        self._checksums: list[str] = []
        self._buffer: np.ndarray | None = None

    def go_on(self, checksums: Sequence[str], rows: np.ndarray | None) -> None:
        """Continue after a commit: checksums of full chunks, rows of the last one."""
        self._checksums = list(checksums)
        if rows is not None:
            self._rest()[: self._filled] = rows

    def append(self, rows: np.ndarray) -> None:
        """Add samples, and write each chunk that is full."""
        size = self.leaf.rows
        if not self.leaf.row_bytes:
            return
        while len(rows):
            if not self._filled and len(rows) >= size:
                self._write(rows[:size])
                rows = rows[size:]
                continue
            count = min(size - self._filled, len(rows))
            rest = self._rest()
            rest[self._filled : self._filled + count] = rows[:count]
            self._filled += count
            rows = rows[count:]
            if self._filled == size:
                self._filled = 0
                self._write(rest)

    def settle(self) -> str:
        """Write the last chunk even if it is not full; return all checksums."""
        if not self._filled:
            self._committed = self._full
            return "".join(self._checksums)
        rest = self._rest()
        rest[self._filled :] = 0
        self._put(rest)
        self._committed = self._full + 1
        return "".join(self._checksums) + crc(memory(rest[: self._filled]))

    def _rest(self) -> np.ndarray:
        if self._buffer is None:
            record = self.leaf.record
            shape = (self.leaf.rows, *record.data_shape)
            self._buffer = np.zeros(shape, record.data_type)
        return self._buffer

    def _write(self, rows: np.ndarray) -> None:
        checksum = self._put(rows)
        self._checksums.append(checksum)
        self._full += 1

    def _put(self, rows: np.ndarray) -> str:
        """Write a chunk; return the checksum at the end of its file."""
        key = chunk_key(self.leaf.chunk_at(self._chains, self._chain, self._full))
        key = f"{array_path(self.leaf)}/{key}"
        parts = self._encoded(rows)
        if self._full < self._committed:
            self._files.replace(key, parts)
        else:
            self._files.write(key, parts)
        return bytes(parts[-1])[-4:].hex()

    def _encoded(self, rows: np.ndarray) -> list[memoryview | bytes]:
        leaf = self.leaf
        if leaf.record.compression is None:
            data = memory(rows)
            return [data, crc32.iscsi(data).to_bytes(4, "little")]
        record = leaf.array(None, leaf.rows)
        piece = Piece("0", record, whole(record.data_shape), np.ascontiguousarray(rows))
        ((_, value),) = ChunkCodec().encoded([piece])
        return [value]


def columns_of(files: SoleWriter, record: Record) -> list[list[Column]]:
    """The columns of each leaf, one per chain."""
    return [
        [
            Column(files, leaf, record.chains, chain, draws)
            for chain, draws in enumerate(record.draws)
        ]
        for leaf in record.leaves
    ]


def make_groups(files: SoleWriter, record: Record) -> None:
    """Make the directories, each with the group metadata that Zarr readers need."""
    names = [leaf.name for leaf in record.leaves]
    inner = [f"{FOLDER}/{name}" for name in sorted(folders(names))]
    for folder in (FOLDER, *inner):
        files.make(folder)
        files.show(f"{folder}/{MANIFEST}", _GROUP)
    for leaf in record.leaves:
        files.make(array_path(leaf))


def show(files: SoleWriter, record: Record) -> None:
    """Show Zarr readers the committed samples, as far as all chains have them."""
    draws = min(record.draws)
    for leaf in record.leaves:
        metadata = json.loads(zarr_json(leaf.array(record.chains, draws)[:9]))
        metadata["dimension_names"] = dimension_names(leaf, record.chains)
        value = json.dumps(metadata).encode()
        files.show(f"{array_path(leaf)}/{MANIFEST}", value)


def committed_keys(leaf: Leaf, record: Record) -> Iterator[str]:
    """The keys of a leaf's chunks that belong to a record."""
    for chain, draws in enumerate(record.draws):
        for number in range(leaf.chunks(draws)):
            key = chunk_key(leaf.chunk_at(record.chains, chain, number))
            yield f"{array_path(leaf)}/{key}"


def trim(files: SoleWriter, record: Record) -> None:
    """Delete what was written after the last commit."""
    files.forget()
    for leaf in record.leaves:
        known = {f"{array_path(leaf)}/{MANIFEST}", *committed_keys(leaf, record)}
        found = files.list(array_path(leaf))
        files.delete([key for key in found if key not in known])


def is_complete(files: SoleWriter, record: Record) -> bool:
    """Whether no committed file is missing."""
    return all(
        set(files.list(array_path(leaf))).issuperset(committed_keys(leaf, record))
        for leaf in record.leaves
    )
