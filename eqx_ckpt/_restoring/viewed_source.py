"""Parts of the leaves of a source, each as a leaf of its own."""

from collections.abc import Sequence

import jax
import numpy as np

from .._format.chunk_grid import Region
from .._format.manifest import Manifest
from .._format.source import nothing, read_or_note, RegionRead, Source
from .._tree.transform.transform_argument import Derived
from .._types import Report


class Seen(Source):
    """A source, seen through a `transform`; what it says of itself stays."""

    def __init__(self, source: Source, derived: Derived) -> None:
        self._source = source
        self._derived = derived

    @property
    def has_checksums(self) -> bool:
        return self._source.has_checksums

    def has_changed(self) -> bool:
        return self._source.has_changed()

    def __str__(self) -> str:
        return str(self._source)


class Viewed(Seen):
    """A source, and the parts of its leaves that a `transform` indexes."""

    @property
    def manifest(self) -> Manifest:
        return self._source.manifest

    def held(self, name: str) -> jax.Array | None:
        return None if name in self._derived.views else self._source.held(name)

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        asked = [self.asked(read) for read in reads]
        shown = _shown(reads, asked, report)
        arrays = read_or_note(self._source, asked, damage, shown)
        return [
            nothing(read) if one.name in damage else array.reshape(read.shape)
            for array, read, one in zip(arrays, reads, asked, strict=True)
        ]

    def read_into(
        self,
        reads: Sequence[RegionRead],
        targets: Sequence[np.ndarray],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> None:
        asked = [self.asked(read) for read in reads]
        places = [
            target.reshape(one.shape)
            for target, one in zip(targets, asked, strict=True)
        ]
        self._source.read_into(asked, places, damage, _shown(reads, asked, report))

    def asked(self, read: RegionRead) -> RegionRead:
        """The region of the leaf that a region of a part of it is."""
        found = self._derived.views.get(read.name)
        if found is None:
            return read
        name, view = found
        record = self._derived.inputs[name]
        region: list[slice] = [slice(*span) for span in view.spans]
        for axis, part in zip(view.axes, read.region, strict=False):
            first = view.spans[axis][0]
            region[axis] = slice(first + part.start, first + part.stop)
        # The data of a key have axes of their own, which come last.
        whole: Region = (*region, *read.region[len(view.axes) :])
        return RegionRead(name, record, whole)


def _shown(
    reads: Sequence[RegionRead], asked: Sequence[RegionRead], report: Report | None
) -> Report | None:
    """Report reads of a leaf under the name of the first part that needs it."""
    if report is None:
        return None
    names: dict[str, str] = {}
    for read, one in zip(reads, asked, strict=True):
        names.setdefault(one.name, read.name)
    return lambda name, nbytes: report(names[name], nbytes)
