"""The leaves that a `transform` returns unchanged, or one after another."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._format.manifest import Manifest
from .._format.source import nothing, read_or_note, RegionRead, Source
from .._storage.calls.host_memory import empty
from .._tree.leaves.leaf_kinds import is_key
from .._tree.transform.transform_argument import Derived, Origin
from .._types import Report
from .viewed_source import Seen, Viewed


class Transformed(Seen):
    """A source of the leaves that a `transform` returned unchanged, or joined."""

    def __init__(self, source: Source, derived: Derived) -> None:
        super().__init__(source, derived)
        self._viewed = Viewed(source, derived)

    @property
    def manifest(self) -> Manifest:
        return self._derived.manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        arrays: list[np.ndarray] = [np.empty(0)] * len(reads)
        whole: dict[int, RegionRead] = {}
        parts: list[tuple[RegionRead, np.ndarray]] = []
        names: dict[str, str] = {}
        for i, read in enumerate(reads):
            origin = self._derived.origins[read.name]
            names |= dict.fromkeys(origin.names, read.name)
            if origin.is_joined:
                arrays[i] = empty(read.shape, read.record.data_type)
                parts += self._parts(read, origin, arrays[i])
            elif origin.names:
                (name,) = origin.names
                record = self._derived.inputs[name]
                whole[i] = RegionRead(name, record, read.region)
            else:
                arrays[i] = _stored(origin.value, read)
        renamed = report and _under(names, report)
        found = read_or_note(self._viewed, [*whole.values()], damage, renamed)
        if parts:
            regions, targets = zip(*parts, strict=True)
            self._viewed.read_into(regions, targets, damage, renamed)
        for (i, one), array in zip(whole.items(), found, strict=True):
            arrays[i] = nothing(reads[i]) if one.name in damage else array
        return arrays

    def asked(self, read: RegionRead) -> list[RegionRead]:
        """The regions of the leaves of the source that a region is made of."""
        origin = self._derived.origins[read.name]
        if origin.is_joined:
            return [self._viewed.asked(part) for part, _ in self._rows(read, origin)]
        records = {name: self._derived.inputs[name] for name in origin.names}
        return [
            self._viewed.asked(RegionRead(name, record, read.region))
            for name, record in records.items()
        ]

    def _parts(
        self, read: RegionRead, origin: Origin, array: np.ndarray
    ) -> Iterator[tuple[RegionRead, np.ndarray]]:
        """The regions that make up a region of a joined leaf, each with its target."""
        for part, rows in self._rows(read, origin):
            yield part, array[rows].reshape(part.shape)

    def _rows(
        self, read: RegionRead, origin: Origin
    ) -> Iterator[tuple[RegionRead, slice]]:
        """The regions that make up a region of a joined leaf, each with its rows."""
        rows, *others = read.region
        first = 0
        for name in origin.names:
            record = self._derived.inputs[name]
            is_row = len(record.data_shape) < len(read.region)
            count = 1 if is_row else record.data_shape[0]
            start, stop = max(first, rows.start), min(first + count, rows.stop)
            if start < stop:
                inside = [] if is_row else [slice(start - first, stop - first)]
                region = (*inside, *others)
                target = slice(start - rows.start, stop - rows.start)
                yield RegionRead(name, record, region), target
            first += count


def _under(names: dict[str, str], report: Report) -> Report:
    """Report reads under the names that the `transform` gave the leaves."""
    return lambda name, nbytes: report(names[name], nbytes)


def _stored(value: Any, read: RegionRead) -> np.ndarray:
    """A region of an array that `transform` closes over, as sources return regions."""
    host = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    native = np.array(host[read.region], host.dtype.newbyteorder("="), order="C")
    return native.view(read.record.data_type)
