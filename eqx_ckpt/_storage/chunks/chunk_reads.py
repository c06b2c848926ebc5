"""Reading regions of arrays, and comparing every byte with its checksum."""

import math
import threading
from collections.abc import Iterable, Sequence

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import overlap, shape_of
from ..._format.source import RegionRead
from ..._lazy import Array, np
from ..._types import Report
from ..calls.host_memory import empty
from ..calls.safe_files import of_leaf
from ..calls.worker_threads import MAX_IN_FLIGHT, Workers
from ..interface.chunk_bytes import (
    check_size,
    ChunkBytes,
    chunks_of,
    place,
    Target,
    Value,
    Wanted,
)
from ..interface.place import StoredChunks
from ..interface.sure_reads import listed_and_missing


def read_chunks(
    chunks: StoredChunks,
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    arrived: Report | None = None,
    targets: Sequence[Array] | None = None,
) -> list[Array]:
    """Read regions of arrays into buffers that JAX takes over without a copy.

    The problem with a damaged leaf is put into `damage` under its name; its array must
    not be used. `arrived` is called with what was read. `targets`: arrays to read
    into, in place of new ones, which may be parts of larger ones.
    """
    reading = _Reading(reads, damage, targets or [None] * len(reads))
    problem = chunks.problem()
    if problem:
        damage.update({read.name: problem for read in reads})
        return reading.arrays

    def on_done(item: tuple[Wanted, ChunkBytes], problem: str) -> None:
        if problem:
            doubtful.append(item[0])
        elif arrived:
            reading.tell(item[0], arrived)

    doubtful: list[Wanted] = []
    with Workers(reading.take, MAX_IN_FLIGHT, on_done) as workers:
        for wanted, source in chunks.fetch(reading.wanted):
            workers.put((wanted, source), wanted.chunk.nbytes)
        workers.finish()
    if doubtful:
        # One answer is not enough to call a chunk damaged.
        listed = chunks.listed()
        for wanted, source in chunks.fetch(doubtful):
            key = wanted.chunk.key
            if isinstance(source, Value) and source.is_missing and key in listed:
                raise listed_and_missing(chunks.place, key)
            if problem := reading.take((wanted, source)):
                damage.setdefault(wanted.chunk.name, problem)
            elif arrived:
                reading.tell(wanted, arrived)
    return reading.arrays


class _Reading:
    """Reads chunks into arrays, which are allocated when their first chunk arrives.

    **Attributes:**

    - `wanted`: all chunks, each of them once, however many regions contain it.
    """

    def __init__(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        targets: Sequence[Array | None],
    ) -> None:
        self._reads = reads
        self._damage = damage
        self._arrays = [*targets]
        self._lock = threading.Lock()
        wanted: dict[str, Wanted] = {}
        for i, (name, record, region) in enumerate(reads):
            shape = shape_of(region)
            if 0 in shape:
                self._arrays[i] = np.empty(shape, record.data_type)
                continue
            for chunk in chunks_of(name, record, region):
                wanted.setdefault(chunk.key, Wanted(chunk, [])).reads.append(i)
        self.wanted: Iterable[Wanted] = wanted.values()

    @property
    def arrays(self) -> list[Array]:
        return [np.empty(0) if array is None else array for array in self._arrays]

    def take(self, item: tuple[Wanted, ChunkBytes]) -> str:
        """Read a chunk into place; return why it is not intact, or `""`.

        Called by any thread.
        """
        wanted, source = item
        chunk = wanted.chunk
        try:
            with source:
                check_size(chunk, source.nbytes)
                place(chunk, source, self._targets(wanted))
        except CorruptCheckpointError as e:
            return str(e)
        except OSError as e:
            raise of_leaf(e, chunk.name) from None
        return ""

    def tell(self, wanted: Wanted, arrived: Report) -> None:
        if wanted.chunk.name in self._damage:
            return
        for region, array in self._targets(wanted):
            common = shape_of(overlap(wanted.chunk.region, region))
            arrived(wanted.chunk.name, math.prod(common) * array.itemsize)

    def _targets(self, wanted: Wanted) -> list[Target]:
        with self._lock:
            return [(self._reads[i].region, self._array(i)) for i in wanted.reads]

    def _array(self, i: int) -> Array:
        array = self._arrays[i]
        if array is None:
            _, record, region = self._reads[i]
            array = self._arrays[i] = empty(shape_of(region), record.data_type)
        return array
