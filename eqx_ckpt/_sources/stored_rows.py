"""Reading rows of arrays: of a checkpoint, or of other programs' Zarr arrays."""

import bisect
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from .._format.chunk_grid import whole
from .._format.leaf_record import dtype_from_tag, from_stored, LeafRecord
from .._format.sample_record import Leaf
from .._format.source import read_regions, RegionRead, Source
from .._storage.calls.file_reads import read_again_soon
from .._storage.calls.tensorstore_calls import wait_for
from .recording_source import Recorded


if TYPE_CHECKING:
    import tensorstore as ts


class CheckpointRows:
    """The arrays of a checkpoint below a name, which is read chunk by chunk.

    **Attributes:**

    - `structs`: shape and dtype of each array, by its name.
    - `chunk`: how many rows are stored together at most.
    """

    def __init__(self, source: Source, records: Mapping[str, LeafRecord]) -> None:
        self._source = source
        self._records = records
        self.structs = {
            name: jax.ShapeDtypeStruct(r.data_shape, dtype_from_tag(r.dtype))
            for name, r in records.items()
        }
        rows = [r.chunk_shape[0] for r in records.values() if r.chunk_shape]
        self.chunk = max(rows, default=1)

    @read_again_soon()
    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        reads = [
            RegionRead(name, r, (slice(start, stop), *whole(r.data_shape[1:])))
            for name, r in self._records.items()
        ]
        found = read_regions(self._source, reads)
        return {
            read.name: from_stored(array, read.record)
            for array, read in zip(found, reads, strict=True)
        }


class SampleRows:
    """The samples of a recording: those of its first chain, then of the second, ...

    As `CheckpointRows`.
    """

    def __init__(self, recorded: Recorded, records: Mapping[str, LeafRecord]) -> None:
        self._recorded = recorded
        every = recorded.record.leaves
        self._leaves = [leaf for leaf in every if leaf.name in records]
        # Where each chain begins.
        self._starts = [0, *itertools.accumulate(recorded.record.draws)]
        self.structs = {
            leaf.name: jax.ShapeDtypeStruct(
                (self._starts[-1], *leaf.record.data_shape),
                dtype_from_tag(leaf.record.dtype),
            )
            for leaf in self._leaves
        }
        sizes = [leaf.chains * leaf.rows for leaf in self._leaves]
        self.chunk = max(sizes, default=1)

    @read_again_soon()
    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {
            leaf.name: from_stored(self._rows(leaf, start, stop), leaf.record)
            for leaf in self._leaves
        }

    def _rows(self, leaf: Leaf, start: int, stop: int) -> np.ndarray:
        starts, parts = self._starts, []
        while start < stop:
            chain = bisect.bisect_right(starts, start) - 1
            # Whole chains are read together, because they are in the same chunks.
            end = bisect.bisect_right(starts, stop) - 1
            if starts[chain] == start and end > chain + 1:
                each = self._recorded.samples_of_each(leaf, range(chain, end))
                parts += each
                start = starts[end]
                continue
            end = min(stop, starts[chain + 1])
            draws = range(start - starts[chain], end - starts[chain])
            found = self._recorded.samples(leaf, range(chain, chain + 1), draws)
            parts.append(found.reshape(len(draws), *leaf.record.data_shape))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class ZarrRows:
    """Zarr arrays, by names; as `CheckpointRows`, without checksums of ours."""

    def __init__(self, arrays: "Mapping[str, ts.TensorStore]") -> None:
        self._arrays = arrays
        self.structs = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype.numpy_dtype)
            for name, a in arrays.items()
        }
        # The unit of reading in a sharded array is a part of a shard.
        shapes = [a.chunk_layout.read_chunk.shape or (1,) for a in arrays.values()]
        self.chunk = max((shape[0] or 1 for shape in shapes), default=1)

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        reading = {name: a[start:stop].read() for name, a in self._arrays.items()}
        return {name: np.asarray(wait_for(f, name)) for name, f in reading.items()}
