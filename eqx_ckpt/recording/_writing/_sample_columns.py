"""Write growing Zarr arrays: one column for each leaf and band of chains."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import chunk_key
from ..._format.leaf_names import folders
from ..._format.manifest import MANIFEST, zarr_json
from ..._format.sample_record import dimension_names, FOLDER, Leaf, Record
from ..._sources.recording_source import crc, decoded, memory, recorded_part
from ..._storage.interface.chunk_bytes import Chunk, Encoded
from ..._storage.interface.place import SoleWriter


_GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


# Host memory for chunks that are not full.
_OPEN_BYTES = 64 * 2**20


def array_path(leaf: Leaf) -> str:
    return f"{FOLDER}/{leaf.name}"


class OpenChunks:
    """The chunks of all columns that are not full, as far as they fit into memory.

    There are many if some chains have far more draws than others of their band. The one
    that was not used for longest is written, and read again when it is needed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nbytes = 0
        self._chunks: OrderedDict[tuple[Column, int], np.ndarray] = OrderedDict()

    def get(self, column: "Column", number: int) -> np.ndarray:
        chunk = self._chunks.pop((column, number), None)
        if chunk is None:
            chunk = column.load(number)
            self._nbytes += chunk.nbytes
            while self._chunks and self._nbytes > self._limit:
                (other, oldest), least = next(iter(self._chunks.items()))
                other.save(oldest, least)
                self.drop(other, oldest)
        self._chunks[column, number] = chunk
        return chunk

    def drop(self, column: "Column", number: int) -> None:
        self._nbytes -= self._chunks.pop((column, number)).nbytes


class Column:
    """The samples of one leaf and one band of chains, written chunk by chunk.

    **Attributes:**

    - `leaf`, `chains`: whose samples it holds.
    - `has_changed`: whether there are samples that were not committed.
    """

    def __init__(
        self,
        files: SoleWriter,
        chunks: OpenChunks,
        leaf: Leaf,
        record: Record,
        band: int,
    ) -> None:
        self.leaf = leaf
        self.chains = leaf.bands(record.chains)[band]
        self.has_changed = False
        self._files = files
        self._open = chunks
        self._record = record
        self._band = band
        # The draws of each chain, and the checksums as a record has them.
        self._draws = np.array(record.draws[self.chains.start : self.chains.stop])
        self._checksums = record.checksums_of(leaf, band)
        # The number of chunks that the last commit may refer to: replace these
        # atomically.
        self._committed = len(self._checksums)
        # The chunks whose samples are not in their files.
        self._changed: set[int] = set()

    def check(self) -> None:
        """Read the chunks that the next draws go to; raise for damage."""
        partial = self._draws[self._draws % self.leaf.rows > 0] // self.leaf.rows
        for number in np.unique(partial).tolist() if self._checksums else ():
            self._open.get(self, number)

    def append(self, first: int, rows: np.ndarray, kept: np.ndarray | None) -> None:
        """Add draws of some chains, from the chain `first` on.

        `rows` is an array `(chain, draw, ...)`, and `kept` is `None`, or an array
        `(chain, draw)` that is true for the draws to add. Write chunks that are full.
        """
        self.has_changed = True
        if not self.leaf.row_bytes:
            return
        start = first - self.chains.start
        at = slice(start, start + len(rows))
        if kept is not None and (kept == kept[:1]).all():
            rows, kept = rows[:, kept[0]], None
        draws = self._draws[at]
        if kept is None and (draws == draws[0]).all():
            self._append(at, rows)
        else:
            kept = np.ones(rows.shape[:2], bool) if kept is None else kept
            self._scatter(at, rows, kept)

    def _append(self, at: slice, rows: np.ndarray) -> None:
        """Add draws of chains that have equally many."""
        size = self.leaf.rows
        while rows.shape[1]:
            number, row = divmod(int(self._draws[at.start]), size)
            some, rows = rows[:, : size - row], rows[:, size - row :]
            count = some.shape[1]
            if count == size and len(some) == len(self.chains):
                self._draws[at] += count
                self._write(number, some)
                continue
            self._open_chunk(number)[at, row : row + count] = some
            self._draws[at] += count
            if row + count == size:
                self._write_if_full(number)

    def _scatter(self, at: slice, rows: np.ndarray, kept: np.ndarray) -> None:
        """Add draws of chains that have, or add, different numbers of them."""
        size = self.leaf.rows
        chain, draw = np.nonzero(kept)
        numbers, row = divmod(
            self._draws[at][chain] + kept.cumsum(1)[chain, draw] - 1, size
        )
        order = numbers.argsort(kind="stable")
        edges = np.flatnonzero(np.diff(numbers[order])) + 1
        for some in np.split(order, edges) if len(order) else ():
            number, chains = int(numbers[some[0]]), at.start + chain[some]
            chunk = self._open_chunk(number)
            chunk[chains, row[some]] = rows[chain[some], draw[some]]
            self._draws += np.bincount(chains, minlength=len(self._draws))
            self._write_if_full(number)

    def _open_chunk(self, number: int) -> np.ndarray:
        chunk = self._open.get(self, number)
        self._changed.add(number)
        return chunk

    def _write_if_full(self, number: int) -> None:
        if self._draws.min() >= (number + 1) * self.leaf.rows:
            self._write(number, self._open.get(self, number))
            self._open.drop(self, number)

    def settle(self) -> str:
        """Write the chunks that are not full, too; return all checksums."""
        for number in sorted(self._changed):
            self.save(number, self._open.get(self, number))
        self._committed = len(self._checksums)
        return "".join(self._checksums)

    def save(self, number: int, chunk: np.ndarray) -> None:
        """Write a chunk if its file does not have all of its samples."""
        if number in self._changed:
            self._write(number, chunk)

    def load(self, number: int) -> np.ndarray:
        """A chunk that is not full: the samples in its file, and zeros."""
        leaf = self.leaf
        has_file = number < len(self._checksums) and self._checksums[number]
        found = self._read(number) if has_file else None
        shape = (leaf.chains, leaf.rows, *leaf.record.data_shape)
        chunk = np.zeros(shape, leaf.record.data_type)
        if found is not None:
            # The file of a commit that did not happen may have more samples.
            counts = self._counts(number)
            has = np.arange(leaf.rows) < counts[:, None]
            chunk[: len(counts)][has] = found[: len(counts)][has]
        return chunk

    def _read(self, number: int) -> np.ndarray:
        key = self._key(number)
        data = self._files.read(f"{FOLDER}/{key}")
        try:
            if data is None:
                raise CorruptCheckpointError(f"{key} is missing")
            chunk = decoded(self.leaf, key, data)
            rows = recorded_part(chunk, self._counts(number))
            if crc(memory(rows)) != self._checksums[number]:
                raise CorruptCheckpointError(f"{key} is not what was saved")
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(
                f"The recording cannot continue, because the last samples of the leaf "
                f"{self.leaf.name!r} are damaged: {e}. Restore the file from a copy."
            ) from e
        return chunk

    def _key(self, number: int) -> str:
        index = self.leaf.chunk_at(self._record.chains, self._band, number)
        return f"{self.leaf.name}/{chunk_key(index)}"

    def _counts(self, number: int) -> np.ndarray:
        """The number of draws of each chain in a chunk."""
        size = self.leaf.rows
        return (self._draws - number * size).clip(0, size)

    def _write(self, number: int, chunk: np.ndarray) -> None:
        """Write a chunk, and note its checksum."""
        leaf = self.leaf
        if len(chunk) < leaf.chains:
            padding = [(0, leaf.chains - len(chunk)), *[(0, 0)] * (chunk.ndim - 1)]
            chunk = np.pad(chunk, padding)
        encoded = self._encoded(chunk)
        parts = [*encoded]
        key = f"{FOLDER}/{self._key(number)}"
        if number < self._committed:
            self._files.replace(key, parts)
        else:
            self._files.write(key, parts)
        counts = self._counts(number)
        is_full = counts.min() == leaf.rows
        checksum = (
            encoded.crc32c if is_full else crc(memory(recorded_part(chunk, counts)))
        )
        missing = number + 1 - len(self._checksums)
        self._checksums += [""] * missing
        self._checksums[number] = checksum
        self._changed.discard(number)

    def _encoded(self, chunk: np.ndarray) -> Encoded:
        record = self.leaf.array(self.leaf.chains, self.leaf.rows)
        one = Chunk("", record, 0, (0,) * len(record.data_shape), "")
        return Encoded(one, np.ascontiguousarray(chunk))


def columns_of(files: SoleWriter, record: Record) -> list[list[Column]]:
    """The columns of each leaf, one per band of chains."""
    sizes = [
        leaf.chains * leaf.rows * leaf.row_bytes * len(leaf.bands(record.chains))
        for leaf in record.leaves
    ]
    chunks = OpenChunks(max(_OPEN_BYTES, 2 * sum(sizes)))
    return [
        [
            Column(files, chunks, leaf, record, band)
            for band in range(len(leaf.bands(record.chains)))
        ]
        for leaf in record.leaves
    ]


def append(
    columns: Sequence[Column], first: int, rows: np.ndarray, kept: np.ndarray | None
) -> None:
    """Add draws of some chains to the columns of a leaf; see `Column.append`."""
    stop, size = first + len(rows), columns[0].leaf.chains
    for column in columns[first // size : -(-stop // size)]:
        chains = column.chains
        start, end = max(first, chains.start), min(stop, chains.stop)
        part = slice(start - first, end - first)
        column.append(start, rows[part], None if kept is None else kept[part])


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
    for band, chains in enumerate(leaf.bands(record.chains)):
        for number in range(leaf.chunks(record.most(chains))):
            key = chunk_key(leaf.chunk_at(record.chains, band, number))
            yield f"{array_path(leaf)}/{key}"


def trim(files: SoleWriter, record: Record) -> None:
    """Drop what was written after the last commit."""
    files.forget()
    for leaf in record.leaves:
        folder = array_path(leaf)
        known = [f"{folder}/{MANIFEST}", *committed_keys(leaf, record)]
        files.delete_others(folder, known)


def is_complete(files: SoleWriter, record: Record) -> bool:
    """Whether no committed file is missing."""
    return all(
        set(files.list(array_path(leaf))).issuperset(committed_keys(leaf, record))
        for leaf in record.leaves
    )
