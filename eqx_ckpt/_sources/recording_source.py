"""Reading what is committed of a recording, and comparing it with its checksums."""

import hashlib
from collections.abc import Iterator, Sequence

from fastcrc import crc32

from .._errors import CorruptCheckpointError
from .._format.chunk_grid import batches, blocks, chunk_key, Region, whole
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._format.sample_record import FOLDER, from_bytes, Leaf, RECORD, Record
from .._format.source import RegionRead, Source
from .._lazy import Array, np
from .._storage.chunks.chunk_reads import read_chunks
from .._storage.interface.chunk_bytes import (
    check_size,
    CHECKSUM_BYTES,
    Chunk,
    content,
)
from .._storage.interface.place import Storage
from .._storage.interface.sure_reads import parse_surely
from .._types import Report


# Host memory for what is read at a time.
_WINDOW = 64 * 2**20


# The same, of a band of chains.
_BAND_BYTES = 16 * 2**20


# A writer may replace a chunk that is not full while it is read.
_TRIES = 10


def memory(array: Array) -> memoryview:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def crc(data: memoryview) -> str:
    return crc32.iscsi(data).to_bytes(4, "little").hex()


def decoded(leaf: Leaf, key: str, data: bytes) -> Array:
    """The array `(chain, draw, ...)` of a chunk as it is stored; raise for damage."""
    record = leaf.array(leaf.chains, leaf.rows)
    chunk = Chunk(leaf.name, record, 0, (0,) * len(record.data_shape), key)
    check_size(chunk, len(data))
    stored = memoryview(data)[:-CHECKSUM_BYTES]
    if crc(stored) != data[-CHECKSUM_BYTES:].hex():
        raise CorruptCheckpointError(f"{key} is damaged: its checksum differs")
    return content(chunk, stored).view(record.data_type)


def recorded_part(chunk: Array, counts: Array) -> Array:
    """The samples in a chunk of which each chain has so many draws, chain by chain."""
    counts = counts.clip(0, chunk.shape[1])
    if (counts == counts[0]).all():
        return chunk[: len(counts), : counts[0]]
    return chunk[: len(counts)][np.arange(chunk.shape[1]) < counts[:, None]]


def read_record(base: Storage) -> Record | None:
    found = parse_surely(base, RECORD, lambda data: from_bytes(data, str(base)))
    return None if found is None else found[1]


class Recorded(Source):
    """What was committed to a recording when this was made.

    As a source, it has the draws that all chains have. A writer may go on: it only adds
    samples, and never changes those that are here.

    **Attributes:**

    - `base`: where the recording is.
    - `record`: what is committed.
    """

    def __init__(self, base: Storage, record: Record) -> None:
        self.base = base
        self.record = record
        self._chunks = base.layouts["zarr"](base.arrays(f"{FOLDER}/"))
        self._leaves = {leaf.name: leaf for leaf in record.leaves}
        self._draws = np.array(record.draws, np.int64)
        self._arrays: dict[str, LeafRecord] = {}

    @property
    def manifest(self) -> Manifest:
        record = self.record
        draws = min(record.draws)
        leaves = {leaf.name: leaf.array(record.chains, draws) for leaf in record.leaves}
        return Manifest(leaves, metadata=record.metadata, root=f"{FOLDER}/")

    @property
    def has_checksums(self) -> bool:
        return True

    @property
    def version(self) -> str:
        """The digest of what is committed."""
        return hashlib.sha256(self.record.to_bytes()).hexdigest()

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        problems: dict[str, str] = {}
        arrays: list[Array] = []
        for _ in range(_TRIES):
            problems.clear()
            tails: dict[tuple[str, int, int], str] = {}
            checked = [self._checked(read, tails, problems) for read in reads]
            arrays = read_chunks(self._chunks, checked, problems, report)
            if not problems or not tails:
                break
        damage.update(problems)
        return arrays

    def _checked(
        self,
        read: RegionRead,
        tails: dict[tuple[str, int, int], str],
        damage: dict[str, str],
    ) -> RegionRead:
        """A read, with a checksum for each chunk as it is now.

        Of a chunk that is not full, the record of the recording has the checksum of the
        committed samples, and its file may have more of them. So these are compared
        here; `tails` has the checksums of such chunks.
        """
        record = self.record
        leaf = self._leaves[read.name]
        array = self._array(leaf)
        axis = 0 if record.chains is None else 1
        chains = slice(0, 1) if axis == 0 else read.region[0]
        draws = read.region[axis]
        found: list[str] | None = None
        count = leaf.chunks(max(record.draws))
        bands = range(chains.start // leaf.chains, -(-chains.stop // leaf.chains))
        for band in bands if leaf.row_bytes else ():
            counts = self._counts(leaf, band)
            first = max(int(counts.min()), draws.start) // leaf.rows
            stop = min(leaf.chunks(int(counts.max())), leaf.chunks(draws.stop))
            for number in range(first, stop):
                key = (leaf.name, band, number)
                if key not in tails:
                    tails[key] = self._tail(leaf, band, number, damage)
                found = list(array.checksums) if found is None else found
                found[band * count + number] = tails[key]
        return read._replace(
            record=array if found is None else array._replace(checksums=tuple(found))
        )

    def _counts(self, leaf: Leaf, band: int) -> Array:
        """The number of draws of each chain of a band."""
        return self._draws[band * leaf.chains : (band + 1) * leaf.chains]

    def _array(self, leaf: Leaf) -> LeafRecord:
        """The record of a leaf's array, with the checksums that the recording has."""
        record = self.record
        if leaf.name not in self._arrays:
            total = max(record.draws)
            checksums: list[str] = []
            for band, _ in enumerate(leaf.bands(record.chains)):
                own = record.checksums_of(leaf, band)
                checksums += [*own, *[""] * (leaf.chunks(total) - len(own))]
            array = leaf.array(record.chains, total)
            self._arrays[leaf.name] = array._replace(checksums=tuple(checksums))
        return self._arrays[leaf.name]

    def _tail(self, leaf: Leaf, band: int, number: int, damage: dict[str, str]) -> str:
        """The checksum of a chunk that is not full, whose committed samples are intact.

        What is wrong with them goes into `damage`.
        """
        index = leaf.chunk_at(self.record.chains, band, number)
        key = f"{leaf.name}/{chunk_key(index)}"
        data = self.base.read(f"{FOLDER}/{key}")
        if data is None:
            damage[leaf.name] = f"{key} is missing"
            return ""
        try:
            chunk = decoded(leaf, key, data)
        except CorruptCheckpointError as e:
            damage[leaf.name] = str(e)
            return ""
        rows = recorded_part(chunk, self._counts(leaf, band) - number * leaf.rows)
        position = band * leaf.chunks(max(self.record.draws)) + number
        if crc(memory(rows)) != self._array(leaf).checksums[position]:
            damage[leaf.name] = f"{key} does not begin with what was saved"
        return data[-CHECKSUM_BYTES:].hex()

    def samples(self, leaf: Leaf, chains: range, draws: range) -> Array:
        """Samples as they are stored: an array `(chain, draw, ...)`, or `(draw, ...)`.

        Raises for damage.
        """
        damage: dict[str, str] = {}
        if not leaf.row_bytes or not draws or not chains:
            return self._empty(leaf, chains, draws)
        if draws.step == 1:
            region = self._region(leaf, chains, draws)
            (found,) = self.read([RegionRead(leaf.name, _ANY, region)], damage)
            self._raise(damage)
            return found
        return self._thinned(leaf, chains, draws)

    def samples_of_each(self, leaf: Leaf, chains: range) -> Iterator[Array]:
        """The samples of some chains, one after another, as they are stored."""
        for band in leaf.bands(self.record.chains):
            some = range(max(chains.start, band.start), min(chains.stop, band.stop))
            if not some:
                continue
            counts = self._draws[some.start : some.stop].tolist()
            parts: list[list[Array]] = [[] for _ in some]
            chunk = leaf.rows * leaf.row_bytes * len(some)
            size = leaf.rows * max(1, _BAND_BYTES // max(1, chunk))
            for start in range(0, max(1, *counts), size):
                draws = range(start, min(start + size, max(counts)))
                rows = self.samples(leaf, some, draws)
                rows = rows.reshape(len(some), len(draws), *leaf.record.data_shape)
                for part, one, count in zip(parts, rows, counts, strict=True):
                    # A copy, because one chain may have far more draws than others.
                    part.append(one[: max(0, count - start)].copy())
            yield from map(np.concatenate, parts)

    def _thinned(self, leaf: Leaf, chains: range, draws: range) -> Array:
        damage: dict[str, str] = {}
        out: Array | None = None
        axis = 0 if self.record.chains is None else 1
        size = max(1, _WINDOW // (leaf.row_bytes * len(chains)))
        for some, first in _windows(draws, leaf.rows, size):
            regions = [self._region(leaf, chains, part) for part in some]
            reads = [RegionRead(leaf.name, _ANY, region) for region in regions]
            arrays = self.read(reads, damage)
            self._raise(damage)
            if out is None:
                # Not before a chunk has the size that the record claims.
                out = self._empty(leaf, chains, draws)
            for found, part in zip(arrays, some, strict=True):
                rows = found[:: draws.step] if axis == 0 else found[:, :: draws.step]
                count = len(part[:: draws.step])
                at = slice(first, first + count)
                out[at if axis == 0 else (slice(None), at)] = rows
                first += count
        assert out is not None
        return out

    def _empty(self, leaf: Leaf, chains: range, draws: range) -> Array:
        lead = (len(draws),)
        if self.record.chains is not None:
            lead = (len(chains), *lead)
        return np.empty((*lead, *leaf.record.data_shape), leaf.record.data_type)

    def _region(self, leaf: Leaf, chains: range, draws: range) -> Region:
        lead = (slice(draws.start, draws.stop),)
        if self.record.chains is not None:
            lead = (slice(chains.start, chains.stop), *lead)
        return (*lead, *whole(leaf.record.data_shape))

    def verify(self) -> None:
        """Read all samples of all chains; raise for all leaves that are damaged."""
        damage: dict[str, str] = {}
        self.check_the_rest(damage, start=0)
        self._raise(damage)

    def check_the_rest(self, damage: dict[str, str], start: int | None = None) -> None:
        """Read what only some of the chains have, or what is after `start`."""
        start = min(self.record.draws) if start is None else start
        for leaf in self.record.leaves:
            for band in leaf.bands(self.record.chains):
                most = self.record.most(band)
                if leaf.row_bytes and start < most and leaf.name not in damage:
                    self._verify(leaf, band, range(start, most), damage)

    def _verify(
        self, leaf: Leaf, chains: range, draws: range, damage: dict[str, str]
    ) -> None:
        array = self._array(leaf)
        region = self._region(leaf, chains, draws)
        pieces = blocks(region, array.chunk_shape, array.itemsize)
        reads = (RegionRead(leaf.name, array, piece) for piece in pieces)
        for window in batches(reads, lambda read: read.nbytes, _WINDOW):
            self.read(window, damage)

    def _raise(self, damage: dict[str, str]) -> None:
        if damage:
            raise CorruptCheckpointError(
                f"The recording {self.base} is damaged. These leaves are "
                "not what was recorded:\n"
                + "\n".join(f"- {name!r}: {reason}." for name, reason in damage.items())
                + "\nRead draws before the damaged ones, or other leaves by `where`."
            )

    def __str__(self) -> str:
        return str(self.base)


# A recording knows the records of its leaves itself.
_ANY = LeafRecord("numpy")


def find_recorded(base: Storage) -> Recorded | None:
    """What is committed of the recording at a location, if there is one."""
    record = read_record(base)
    return None if record is None else Recorded(base, record)


def _windows(draws: range, rows: int, size: int) -> Iterator[tuple[list[range], int]]:
    """Runs of draws to read at a time, and which of the wanted ones is the first."""
    if draws.step >= rows:
        # Each wanted draw is in a chunk of its own, and other chunks need not be read.
        for i in range(0, len(draws), size):
            yield [range(d, d + 1) for d in draws[i : i + size]], i
        return
    per = max(1, size // draws.step)
    for i in range(0, len(draws), per):
        some = draws[i : i + per]
        yield [range(some[0], some[-1] + 1)], i
