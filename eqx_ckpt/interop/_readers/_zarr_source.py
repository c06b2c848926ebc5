"""A source of Zarr arrays that TensorStore reads."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._format.manifest import Manifest
from ..._format.source import RegionRead, Source
from ..._sources.foreign_zarr import Place, read_zarr, ZarrArray
from ..._types import Report
from ._foreign_records import corrupt


def check_arrays(damage: Mapping[str, str], where: Place, format: str) -> None:
    """Raise if arrays cannot be opened: the problem with each, by its key."""
    if damage:
        shown = "; ".join(f"{key!r}: {why}" for key, why in [*damage.items()][:5])
        raise corrupt(where.url(), format, f"of {len(damage)} arrays, {shown}")


class ZarrSource(Source):
    """Arrays by the names of their leaves."""

    def __init__(
        self,
        where: str,
        manifest: Manifest,
        arrays: Mapping[str, ZarrArray],
        *,
        allow_missing_chunks: bool,
    ) -> None:
        self._where = where
        self._manifest = manifest
        self._arrays = arrays
        self._allow_missing_chunks = allow_missing_chunks

    def __str__(self) -> str:
        return self._where

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        found = read_zarr(
            self._arrays,
            reads,
            damage,
            report,
            allow_missing_chunks=self._allow_missing_chunks,
        )
        return [
            array.view(read.record.data_type)
            for array, read in zip(found, reads, strict=True)
        ]
