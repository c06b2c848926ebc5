"""Reading what is committed of a recording, and comparing it with its checksums."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CorruptCheckpointError
from .._format.chunks import batches, blocks, chunk_key, Region, whole
from .._format.leaves import from_stored, LeafRecord
from .._format.source import RegionRead
from .._storage.chunk_reads import read_chunks
from .._storage.storage import Chunks, Storage
from ._columns import crc, FOLDER, memory, tail
from ._leaves import Leaf
from ._record import Record


_WINDOW = 64 * 2**20
# A writer may replace the last chunk of an array while it is read.
_TRIES = 10


def read_samples(
    base: Storage, record: Record, leaf: Leaf, chains: range, draws: range
) -> Any:
    """Samples of a leaf: an array `(chain, draw, ...)`, or `(draw, ...)`."""
    if not leaf.row_bytes or not draws or not chains:
        stored = _empty(record, leaf, chains, draws)
    else:
        stored = _retried(base, record, leaf, chains, draws)
    inner = leaf.record
    if inner.kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=inner.impl)
    return from_stored(stored, inner)


def _empty(record: Record, leaf: Leaf, chains: range, draws: range) -> np.ndarray:
    lead = (len(draws),) if record.chains is None else (len(chains), len(draws))
    return np.empty((*lead, *leaf.record.data_shape), leaf.record.data_type)


def _retried(
    base: Storage, record: Record, leaf: Leaf, chains: range, draws: range
) -> np.ndarray:
    damage: dict[str, str] = {}
    for _ in range(_TRIES):
        damage.clear()
        array = array_record(base, record, leaf, chains, draws[-1], damage)
        stored = _read(base, record, leaf, array, chains, draws, damage)
        if not damage:
            return stored
    raise_damage(damage, record, base)
    raise AssertionError


def raise_damage(damage: dict[str, str], record: Record, base: Storage) -> None:
    """Raise, if there is damage."""
    if damage:
        raise CorruptCheckpointError(
            f"The recording {base} is damaged. These leaves are "
            "not what was recorded:\n"
            + "\n".join(f"- {name!r}: {reason}." for name, reason in damage.items())
            + "\nRead draws before the damaged ones, or other leaves by `where`."
        )


def samples_in(base: Storage) -> Chunks:
    """The arrays of a recording."""
    return base.layouts["zarr"](base / f"{FOLDER}/")


def array_record(
    base: Storage,
    record: Record,
    leaf: Leaf,
    chains: range,
    last: int,
    damage: dict[str, str],
) -> LeafRecord:
    """The record of the array of a leaf, with a checksum for each of its chunks.

    Of a chunk that is not full, the record of the recording has the checksum of the
    committed samples, and its file may have more of them. So these are compared here.
    """
    total = max(record.draws)
    count = -(-total // leaf.rows)
    found = [
        record.checksum(leaf, chain, number)
        for chain in range(len(record.draws))
        for number in range(count)
    ]
    array = leaf.array(record.chains, total)
    for chain in chains:
        number, rest = divmod(record.draws[chain], leaf.rows)
        if rest and last >= number * leaf.rows:
            position = chain * count + number
            key = f"{leaf.name}/"
            key += chunk_key(leaf.chunk_at(record.chains, chain, number))
            data = base.read(f"{FOLDER}/{key}")
            if data is None:
                damage[leaf.name] = f"{key} is missing"
                continue
            expected, found[position] = found[position], data[-4:].hex()
            checked = array._replace(crc32c=tuple(found))
            region = tail(leaf, record.chains, chain, record.draws[chain])
            (rows,) = read_chunks(
                samples_in(base), [RegionRead(leaf.name, checked, region)], damage
            )
            if leaf.name not in damage and crc(memory(rows)) != expected:
                damage[leaf.name] = f"{key} does not begin with what was recorded"
    return array._replace(crc32c=tuple(found))


def last_rows(base: Storage, record: Record, leaf: Leaf, chain: int) -> np.ndarray:
    """The samples of a chain that fill no chunk, as they are stored."""
    draws = record.draws[chain]
    some = range(draws // leaf.rows * leaf.rows, draws)
    stored = _retried(base, record, leaf, range(chain, chain + 1), some)
    return stored if record.chains is None else stored[0]


def _read(
    base: Storage,
    record: Record,
    leaf: Leaf,
    array: LeafRecord,
    chains: range,
    draws: range,
    damage: dict[str, str],
) -> np.ndarray:
    place = samples_in(base)
    if damage:
        return _empty(record, leaf, chains, draws)
    if draws.step == 1:
        read = RegionRead(leaf.name, array, _region(record, leaf, chains, draws))
        return read_chunks(place, [read], damage)[0]
    out = _empty(record, leaf, chains, draws)
    axis = 0 if record.chains is None else 1
    size = max(1, _WINDOW // (leaf.row_bytes * len(chains)))
    for some, first in _windows(draws, leaf.rows, size):
        reads = [
            RegionRead(leaf.name, array, _region(record, leaf, chains, part))
            for part in some
        ]
        arrays = read_chunks(place, reads, damage)
        if damage:
            break
        for found, part in zip(arrays, some, strict=True):
            rows = found[:: draws.step] if axis == 0 else found[:, :: draws.step]
            count = len(part[:: draws.step])
            at = slice(first, first + count)
            out[at if axis == 0 else (slice(None), at)] = rows
            first += count
    return out


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


def _region(record: Record, leaf: Leaf, chains: range, draws: range) -> Region:
    lead = (slice(draws.start, draws.stop),)
    if record.chains is not None:
        lead = (slice(chains.start, chains.stop), *lead)
    return (*lead, *whole(leaf.record.data_shape))


def verify_samples(base: Storage, record: Record) -> None:
    """Read all samples, and compare them with their checksums."""
    damage: dict[str, str] = {}
    for leaf in record.leaves:
        for chain, draws in enumerate(record.draws):
            if draws and leaf.row_bytes:
                _verify(base, record, leaf, chain, draws, damage)
    raise_damage(damage, record, base)


def _verify(
    base: Storage,
    record: Record,
    leaf: Leaf,
    chain: int,
    draws: int,
    damage: dict[str, str],
) -> None:
    chains = range(chain, chain + 1)
    problems: dict[str, str] = {}
    for _ in range(_TRIES):
        problems = {}
        array = array_record(base, record, leaf, chains, draws - 1, problems)
        region = _region(record, leaf, chains, range(draws))
        pieces: Sequence[Region] = (
            list(blocks(region, array.chunk_shape, array.itemsize))
            if not problems
            else []
        )
        reads = (RegionRead(leaf.name, array, piece) for piece in pieces)
        for window in batches(reads, lambda read: read.nbytes, _WINDOW):
            read_chunks(samples_in(base), window, problems)
        if not problems:
            return
    for name, problem in problems.items():
        damage.setdefault(name, problem)
