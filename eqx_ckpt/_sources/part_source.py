"""A step of which this process has its part on its own disk."""

import functools as ft
import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.chunk_grid import Region, relative, Start, whole
from .._format.leaf_names import encode
from .._format.manifest import Manifest
from .._format.manifest_parser import from_bytes
from .._format.source import nothing, read_regions, RegionRead, Source
from .._lazy import Array
from .._storage.interface.place import Storage
from .._types import Report
from .checkpoint_source import Checkpoint


logger = logging.getLogger("eqx_ckpt")


# Where the part of a step has the shards, and what is said of the step.
SHARDS = (("key", "shards"),)
STEP = (("key", "step"),)
# What the description of a step raises that is not one.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


_ELSEWHERE = "another process has it"


# What the name of a shard begins with; where it begins in its leaf follows.
BEGIN = "at"


def check_is_whole(source: Source) -> None:
    """Raise if a source is the part of a step, of which other processes have more."""
    if (part := source.manifest.part) is not None:
        raise CheckpointError(
            f"{source} is {part} of a job whose processes have disks of their own. "
            "Restore the step with a `CheckpointManager` with `shared=False` in each "
            "of them, or from its mirror."
        )


class StepPart:
    """The shards that a process has of a step.

    **Attributes:**

    - `checkpoint`: with each shard as a leaf.
    - `part`: which part it is.
    - `manifest`: of the whole step, without checksums.
    - `shards`: of each leaf, the regions that are here, and the names of their arrays.
    - `owned`: where the pieces begin that this process uploads; `None`: all of a leaf.
    """

    def __init__(self, place: Storage) -> None:
        self.checkpoint = found = Checkpoint(place)
        if found.manifest.part is None:
            raise CheckpointError(f"{place} is a whole step, and not a part of one.")
        self.part = found.manifest.part
        try:
            said = self._read_step()
            manifest = from_bytes(said["manifest"].encode(), f"of the step at {place}")
            self.owned = {name: _starts(of) for name, of in said["owned"].items()}
            self.shards = dict[str, list[tuple[Region, str]]]()
            for name, record in found.manifest.leaves.items():
                if record.path != STEP:
                    leaf = encode(record.path[len(SHARDS) : -1])
                    start = str(record.path[-1][1]).removeprefix(BEGIN)
                    starts = start.split(".") if start else []
                    region = tuple(
                        slice(int(i), int(i) + size)
                        for i, size in zip(starts, record.data_shape, strict=True)
                    )
                    self.shards.setdefault(leaf, []).append((region, name))
        except _MALFORMED as e:
            raise CorruptCheckpointError(
                f"{place} is damaged: it does not say of which step it is a part ({e})."
            ) from None
        leaves = {n: r._replace(checksums=()) for n, r in manifest.leaves.items()}
        self.manifest = replace(
            manifest,
            leaves=leaves,
            metadata=found.manifest.metadata,
            versions=found.manifest.versions,
            history=found.manifest.history,
        )

    def _read_step(self) -> Any:
        name = encode(STEP)
        record = self.checkpoint.manifest.leaves[name]
        read = RegionRead(name, record, whole(record.data_shape))
        (data,) = read_regions(self.checkpoint, [read])
        return json.loads(data.tobytes())

    def find(self, read: RegionRead) -> RegionRead | None:
        """The same region, of the shard that contains it; `None` if none here does."""
        for region, name in self.shards.get(read.name, ()):
            if all(
                here.start <= wanted.start and wanted.stop <= here.stop
                for here, wanted in zip(region, read.region, strict=True)
            ):
                record = self.checkpoint.manifest.leaves[name]
                return RegionRead(name, record, relative(read.region, region))
        return None


def _starts(of_leaf: Any) -> Collection[Start] | None:
    return None if of_leaf is None else {tuple(map(int, start)) for start in of_leaf}


class PartSource(Source):
    """A step, of which this process reads its part here, and what it lacks elsewhere.

    **Attributes:**

    - `checkpoint`: the part, or, if there is none, the step in a mirror.
    """

    def __init__(
        self,
        step: int,
        part: StepPart | None,
        find_whole: Callable[[], Checkpoint | None],
    ) -> None:
        self._step = step
        self._part = part
        self._whole = ft.cache(find_whole)
        found = part.checkpoint if part is not None else self._whole()
        if found is None:
            raise CheckpointNotFoundError(
                f"Of {self}, this process does not have its own, and no mirror has it."
            )
        self.checkpoint: Checkpoint = found

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest if self._part is None else self._part.manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        arrays: list[Array | None] = [None] * len(reads)
        problems: dict[int, str] = {}
        if self._part is not None:
            problems = self._read_here(self._part, reads, arrays, report)
        elsewhere = [i for i, array in enumerate(arrays) if array is None]
        found = self._whole() if elsewhere else None
        if found is not None:
            if problems:
                logger.warning(
                    "Of %s, %d regions are read from the mirror: %s.",
                    self,
                    len(problems),
                    next(iter(problems.values())),
                )
            wanted = [_of(found, reads[i]) for i in elsewhere]
            for i, array in zip(
                elsewhere, found.read(wanted, damage, report), strict=True
            ):
                arrays[i] = array
        for i, problem in problems.items() if found is None else ():
            if problem == _ELSEWHERE:
                raise CheckpointError(
                    f"Of leaf {reads[i].name!r} of {self}, this process has other "
                    "regions than those that it is to restore, and no mirror has the "
                    "step. Restore it with the shardings with which it was saved, or "
                    "pass a `step` that is in the mirror: see `mirrored()`."
                )
            damage[reads[i].name] = f"{problem}, and no mirror has the step"
        return [
            nothing(r) if a is None else a for r, a in zip(reads, arrays, strict=True)
        ]

    def _read_here(
        self,
        part: StepPart,
        reads: Sequence[RegionRead],
        arrays: list[Array | None],
        report: Report | None,
    ) -> dict[int, str]:
        """Read what is here into `arrays`; return what is wrong with the others."""
        found = [part.find(read) for read in reads]
        here = [(i, read) for i, read in enumerate(found) if read is not None]
        leaf_of = {read.name: reads[i].name for i, read in here}
        damage: dict[str, str] = {}
        told = report and (lambda name, nbytes: report(leaf_of[name], nbytes))
        read = part.checkpoint.read([read for _, read in here], damage, told)
        for (i, asked), array in zip(here, read, strict=True):
            if asked.name not in damage:
                arrays[i] = array
        return {
            i: _ELSEWHERE if asked is None else damage[asked.name]
            for i, asked in enumerate(found)
            if arrays[i] is None
        }

    @property
    def has_checksums(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"step {self._step}, of which each process has a part"


def _of(found: Checkpoint, read: RegionRead) -> RegionRead:
    """The same request to another copy of the step."""
    return read._replace(record=found.manifest.leaves[read.name])
