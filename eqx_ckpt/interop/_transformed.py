"""A source as a `transform` shows it, for what writes other formats."""

from collections.abc import Sequence

import numpy as np

from .._format.manifest import Manifest
from .._format.source import RegionRead, Source
from .._storage.reading import opened
from .._transfer.computing import Leaves, Transformed
from .._tree.parts import Read
from .._tree.sharding import Place
from .._tree.transform import derive, Derived, Transform
from .._types import PathLike, Report


def transformed(source: PathLike | Source, transform: Transform | None) -> Source:
    """What a `transform` makes of a source; each leaf is computed when it is read."""
    found = opened(source)
    if transform is None:
        return found
    return _Transformed(found, derive(found.manifest, "", transform))


class _Transformed(Source):
    def __init__(self, source: Source, derived: Derived) -> None:
        self._derived = derived
        self._there = Transformed(source, derived)
        self._leaves = Leaves(source, derived, None)

    @property
    def manifest(self) -> Manifest:
        return self._derived.manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        return [
            array
            for read in reads
            for array in (
                self._there.read([read], damage, report)
                if self._derived.origins[read.name].output is None
                else [self._computed(read)]
            )
        ]

    def _computed(self, read: RegionRead) -> np.ndarray:
        origin = self._derived.origins[read.name]
        record = read.record
        leaf = Read(0, read.name, (), None, None, record, record, Place(None), origin)
        host = self._leaves.on_host(leaf)[read.region]
        return np.array(host, order="C").view(record.data_type)

    def __str__(self) -> str:
        return str(self._there)
