"""A source as a `transform` shows it, for what writes other formats."""

from collections.abc import Sequence

import numpy as np

from ..._format.source import RegionRead, Source
from ..._restoring.leaf_reader import How
from ..._restoring.transform_compute import Leaves, Transformed
from ..._sources.checkpoint_source import opened
from ..._tree.matching.sharding_argument import Place
from ..._tree.transform.transform_argument import derive, Derived, Transform
from ..._tree.transform.transform_parts import Read
from ..._types import PathLike, Report


def transformed(source: PathLike | Source, transform: Transform | None) -> Source:
    """What a `transform` makes of a source; each leaf is computed when it is read."""
    found = opened(source)
    if transform is None:
        return found
    return _Transformed(found, derive(found.manifest, "", transform))


class _Transformed(Transformed):
    def __init__(self, source: Source, derived: Derived) -> None:
        super().__init__(source, derived)
        self._leaves = Leaves(source, derived, How())

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        for read in reads:
            if self._derived.origins[read.name].output is None:
                arrays += super().read([read], damage, report)
            else:
                arrays.append(self._computed(read))
        return arrays

    def _computed(self, read: RegionRead) -> np.ndarray:
        origin = self._derived.origins[read.name]
        record = read.record
        leaf = Read(0, read.name, (), None, None, record, record, Place(None), origin)
        host = self._leaves.on_host(leaf)[read.region]
        return np.array(host, order="C").view(record.data_type)
