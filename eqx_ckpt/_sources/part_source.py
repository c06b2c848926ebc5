"""A step of which this process has its part on its own disk."""

import functools as ft
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.chunk_grid import (
    blocks,
    overlap,
    Region,
    relative,
    Start,
    start_of,
    whole,
)
from .._format.leaf_names import encode
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._format.manifest_parser import from_bytes
from .._format.source import nothing, read_regions, RegionRead, Source
from .._lazy import Array
from .._storage.interface.place import Storage
from .._types import Report, TypedPath
from .checkpoint_source import Checkpoint


# Where the part of a step has the shards, and what is said of the step.
SHARDS = (("key", "shards"),)
STEP = (("key", "step"),)
# What the description of a step raises that is not one.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


# What the name of a shard begins with; where it begins in its leaf follows.
BEGIN = "at"


# Each distinct region, and the processes that have it.
Holders: TypeAlias = list[tuple[Region, list[int]]]


def check_is_whole(source: Source) -> None:
    """Raise if a source is the part of a step, of which other processes have more."""
    if (part := source.manifest.part) is not None:
        raise CheckpointError(
            f"{source} is {part} of a job whose processes have disks of their own. "
            "Restore the step with a `CheckpointManager` with `shared=False` in each "
            "of them, or from its mirror."
        )


class StepShards(NamedTuple):
    """What each part says of its step.

    **Attributes:**

    - `text`: what it says.
    - `manifest`: of the whole step, without checksums.
    - `holders`: of each global leaf, the regions, and the processes that have them.
    """

    text: str
    manifest: Manifest
    holders: dict[str, Holders]

    @classmethod
    def from_text(cls, text: str, where: str) -> "StepShards":
        try:
            said = json.loads(text)
            manifest = from_bytes(said["manifest"].encode(), f"of the step at {where}")
            leaves = {n: r._replace(checksums=()) for n, r in manifest.leaves.items()}
            return cls(
                text, replace(manifest, leaves=leaves), _holders(said["holders"])
            )
        except _MALFORMED as e:
            raise _malformed(where, e) from None


def _malformed(where: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where} is damaged: it does not say of which step it is a part ({error})."
    )


class _ShardRead(NamedTuple):
    """A request for what one shard has of a region, and where in that it belongs."""

    read: RegionRead
    at: Region


class StepPart(Source):
    """The shards that a process has of a step: a source of what they make together.

    **Attributes:**

    - `checkpoint`: with each shard as a leaf.
    - `part`: which part it is.
    - `step`: what it says of the step.
    - `manifest`: of the whole step, without checksums.
    - `shards`: of each leaf, the regions that are here, and the names of their arrays.
    """

    def __init__(self, place: Storage) -> None:
        self.checkpoint = found = Checkpoint(place)
        if found.manifest.part is None:
            raise CheckpointError(f"{place} is a whole step, and not a part of one.")
        self.part = found.manifest.part
        self.shards = dict[str, list[tuple[Region, str]]]()
        try:
            text = self._read_step()
            for name, record in found.manifest.leaves.items():
                if record.path != STEP:
                    leaf, region = shard_of(record)
                    self.shards.setdefault(leaf, []).append((region, name))
        except _MALFORMED as e:
            raise _malformed(str(place), e) from None
        self.step = StepShards.from_text(text, str(place))
        self._manifest = replace(
            self.step.manifest,
            metadata=found.manifest.metadata,
            versions=found.manifest.versions,
            history=found.manifest.history,
        )

    def _read_step(self) -> str:
        name = encode(STEP)
        record = self.checkpoint.manifest.leaves[name]
        read = RegionRead(name, record, whole(record.data_shape))
        (data,) = read_regions(self.checkpoint, [read])
        return data.tobytes().decode()

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def own(self) -> dict[str, list[Region]]:
        """The shards of what each process has for itself, which are alike in all."""
        return {
            leaf: [region for region, _ in shards]
            for leaf, shards in self.shards.items()
            if leaf not in self.step.holders
        }

    def has(self, read: RegionRead) -> bool:
        """Whether the shards that are here make a region."""
        found = sum(math.prod(one.read.shape) for one in self._find(read))
        return found == math.prod(read.shape)

    def _find(self, read: RegionRead) -> list[_ShardRead]:
        """What each shard has of a region. Shards do not overlap."""
        found: list[_ShardRead] = []
        for region, name in self.shards.get(read.name, ()):
            common = overlap(region, read.region)
            if all(span.start < span.stop for span in common):
                record = self.checkpoint.manifest.leaves[name]
                here = RegionRead(name, record, relative(common, region))
                found.append(_ShardRead(here, relative(common, read.region)))
        return found

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        """As of any source; only what `has` says is here."""
        found = [self._find(read) for read in reads]
        leaf_of = {
            one.read.name: read.name
            for read, pieces in zip(reads, found, strict=True)
            for one in pieces
        }
        damaged: dict[str, str] = {}
        told = report and (lambda name, nbytes: report(leaf_of[name], nbytes))
        alone = [pieces[0].read for pieces in found if len(pieces) == 1]
        arrays = iter(self.checkpoint.read(alone, damaged, told))
        made = [
            next(arrays)
            if len(pieces) == 1
            else self._joined(read, pieces, damaged, told)
            for read, pieces in zip(reads, found, strict=True)
        ]
        damage.update((leaf_of[name], why) for name, why in damaged.items())
        return made

    def _joined(
        self,
        read: RegionRead,
        pieces: Sequence[_ShardRead],
        damaged: dict[str, str],
        report: Report | None,
    ) -> Array:
        """A region that is made of several shards."""
        array = nothing(read)
        for (name, record, region), at in pieces:
            target = array[(*at, ...)]
            # Little at a time: what is read is a copy.
            for block in blocks(region, record.chunk_shape, record.itemsize):
                asked = RegionRead(name, record, block)
                (part,) = self.checkpoint.read([asked], damaged, report)
                target[(*relative(block, region), ...)] = part
        return array

    @property
    def has_checksums(self) -> bool:
        return True

    def has_changed(self) -> bool:
        return self.checkpoint.has_changed()

    def __str__(self) -> str:
        return str(self.checkpoint)


def shard_of(record: LeafRecord) -> tuple[str, Region]:
    """The leaf of which an array of a part is a shard, and the region."""
    leaf = encode(record.path[len(SHARDS) : -1])
    start = str(record.path[-1][1]).removeprefix(BEGIN)
    starts = map(int, start.split(".") if start else [])
    region = tuple(
        slice(i, i + size) for i, size in zip(starts, record.data_shape, strict=True)
    )
    return leaf, region


def shard_path(leaf: LeafRecord, region: Region) -> TypedPath:
    """The path of the array of a shard."""
    start = BEGIN + ".".join(map(str, start_of(region)))
    return (*SHARDS, *leaf.path, ("key", start))


def _holders(said: Any) -> dict[str, Holders]:
    found: dict[str, Holders] = {}
    for leaf, (table, shape) in said["leaves"].items():
        processes: dict[Start, list[int]] = {}
        for process, of in enumerate(said["tables"][table]):
            for at in of:
                processes.setdefault(tuple(map(int, at)), []).append(process)
        for at, of in processes.items():
            starts = [(i * n, n) for i, n in zip(at, shape, strict=True)]
            region = tuple(slice(start, start + n) for start, n in starts)
            found.setdefault(leaf, []).append((region, of))
    return found


class PartSource(Source):
    """A step, of which this process reads its part here, and what it lacks elsewhere.

    What fails when it is opened is raised when it is used, as of any source.
    """

    def __init__(
        self,
        step: int,
        open_part: Callable[[], StepPart | None],
        find_whole: Callable[[], Checkpoint | None],
    ) -> None:
        self._step = step
        self._part = ft.cache(open_part)
        self._whole = ft.cache(find_whole)

    @property
    def checkpoint(self) -> Checkpoint:
        """The part, or, if there is none, the step in a mirror."""
        part = self._part()
        found = self._whole() if part is None else part.checkpoint
        if found is None:
            raise CheckpointNotFoundError(
                f"Of {self}, this process does not have its own, and no mirror has it."
            )
        return found

    @property
    def manifest(self) -> Manifest:
        part = self._part()
        return self.checkpoint.manifest if part is None else part.manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        part = self._part()
        is_here = [part is not None and part.has(read) for read in reads]
        here = [read for read, is_one in zip(reads, is_here, strict=True) if is_one]
        rest = [read for read, is_one in zip(reads, is_here, strict=True) if not is_one]
        of_part = of_mirror = iter(())
        if part is not None:
            of_part = iter(part.read(here, damage, report))
        if rest:
            whole = self._in_mirror(rest[0].name)
            wanted = [_of(whole, read) for read in rest]
            of_mirror = iter(whole.read(wanted, damage, report))
        return [next(of_part if is_one else of_mirror) for is_one in is_here]

    def _in_mirror(self, leaf: str) -> Checkpoint:
        """The step in a mirror; raise if there is none that has what is not here."""
        found = self._whole()
        if found is None:
            raise CheckpointError(
                f"Of leaf {leaf!r} of {self}, this process does not have all regions "
                "that it is to restore, and no mirror has the step. Restore it "
                "with the shardings with which it was saved, or pass a `step` that is "
                "in the mirror: see `mirrored()`."
            )
        return found

    @property
    def has_checksums(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"step {self._step} (of which each process has a part)"


def _of(found: Checkpoint, read: RegionRead) -> RegionRead:
    """The same request to another copy of the step."""
    return read._replace(record=found.manifest.leaves[read.name])
