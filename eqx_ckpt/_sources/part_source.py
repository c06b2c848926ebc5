"""A step of which this process has its part on its own disk."""

import functools as ft
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.chunk_grid import (
    overlap,
    Region,
    relative,
    shape_of,
    Start,
    start_of,
    whole,
)
from .._format.leaf_names import encode
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._format.manifest_parser import from_bytes
from .._format.source import read_regions, RegionRead, Source
from .._lazy import Array
from .._storage.calls.host_memory import empty
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


class ShardRead(NamedTuple):
    """A request for what one shard has of a region, and where in that it belongs."""

    read: RegionRead
    at: Region


# A request, and what makes its region.
Made: TypeAlias = tuple[RegionRead, Sequence[ShardRead]]


class StepPart(Source):
    """The shards that a process has of a step: a source of what they make together.

    **Attributes:**

    - `checkpoint`: with each shard as a leaf.
    - `part`: which part it is.
    - `step`: what it says of the step.
    - `manifest`: of the whole step, without checksums.
    - `shards`: of each leaf, the regions that are here, by where they start, and the
        names of their arrays.
    - `own`: the shards of what each process has for itself, which are alike in all.
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
        for shards in self.shards.values():
            shards.sort(key=lambda shard: start_of(shard[0]))
        self.step = StepShards.from_text(text, str(place))
        self._check_shards()
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

    def _check_shards(self) -> None:
        """Raise unless the arrays are the shards of this process that its step has."""
        holders, index = self.step.holders, self.part.process
        for leaf in {**self.shards, **holders}:
            shards = self.shards.get(leaf, [])
            record = self.step.manifest.leaves.get(leaf)
            stored = self.checkpoint.manifest.leaves
            is_wrong = (
                record is None
                or not record.is_array
                or any(stored[n].data_type != record.data_type for _, n in shards)
                or not _fit([region for region, _ in shards], record.data_shape)
            )
            if leaf in holders and not is_wrong:
                expected = [region for region, of in holders[leaf] if index in of]
                found = [region for region, _ in shards]
                is_wrong = sorted(map(_spans, expected)) != [*map(_spans, found)]
            if is_wrong:
                raise CorruptCheckpointError(
                    f"{self} is damaged: its arrays are not the shards of leaf "
                    f"{leaf!r} that its step has in this process."
                )

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def own(self) -> dict[str, list[Region]]:
        return {
            leaf: [region for region, _ in shards]
            for leaf, shards in self.shards.items()
            if leaf not in self.step.holders
        }

    def find(self, read: RegionRead) -> list[ShardRead] | None:
        """What makes a region, if the shards that are here do. They do not overlap."""
        found: list[ShardRead] = []
        for region, name in self.shards.get(read.name, ()):
            common = overlap(region, read.region)
            if all(span.start < span.stop for span in common):
                record = self.checkpoint.manifest.leaves[name]
                here = RegionRead(name, record, relative(common, region))
                found.append(ShardRead(here, relative(common, read.region)))
        nbytes = sum(math.prod(one.read.shape) for one in found)
        return found if nbytes == math.prod(read.shape) else None

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        """As of any source; what is not here counts as damaged."""
        found = [(read, self.find(read)) for read in reads]
        lacking = {read.name for read, shards in found if shards is None}
        damage.update(dict.fromkeys(lacking, "not all of it is on this disk"))
        made = [(read, shards or ()) for read, shards in found]
        return self.read_made(made, damage, report)

    def read_made(
        self,
        made: Sequence[Made],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        """As `read`, once `find` has said what makes each region."""
        arrays = [empty(read.shape, read.record.data_type) for read, _ in made]
        pieces: list[RegionRead] = []
        targets: list[Array] = []
        leaf_of: dict[str, str] = {}
        for (read, shards), array in zip(made, arrays, strict=True):
            for piece, at in shards:
                pieces.append(piece)
                targets.append(array[(*at, ...)])
                leaf_of[piece.name] = read.name
        told = report and (lambda name, nbytes: report(leaf_of[name], nbytes))
        damaged: dict[str, str] = {}
        self.checkpoint.read_into(pieces, targets, damaged, told)
        damage.update((leaf_of[name], why) for name, why in damaged.items())
        return arrays

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


def _spans(region: Region) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in region]


def _fit(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Whether regions are different cells of one grid, inside an array."""
    cells = {(start_of(region), shape_of(region)) for region in regions}
    if len(cells) < len(regions) or len({cell for _, cell in cells}) > 1:
        return False
    return all(
        len(start) == len(shape)
        and all(
            i >= 0 and i + n <= size and i % max(1, n) == 0
            for i, n, size in zip(start, cell, shape, strict=True)
        )
        for start, cell in cells
    )


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
        here, there = self._divided(reads)
        arrays: dict[int, Array] = {}
        if here:
            part = self._part()
            assert part is not None
            read = part.read_made([*here.values()], damage, report)
            arrays |= zip(here, read, strict=True)
        if there:
            first = next(iter(there.values()))
            found = self._in_mirror(first.name).read([*there.values()], damage, report)
            arrays |= zip(there, found, strict=True)
        return [arrays[i] for i in range(len(reads))]

    def asked(self, read: RegionRead) -> list[RegionRead]:
        """What is read for a region, of the part or of the mirror."""
        here, there = self._divided([read])
        return [piece.read for _, shards in here.values() for piece in shards] + [
            *there.values()
        ]

    def _divided(
        self, reads: Sequence[RegionRead]
    ) -> tuple[dict[int, Made], dict[int, RegionRead]]:
        """Of requests, by their numbers: what is here, and what the mirror is asked."""
        part = self._part()
        here: dict[int, Made] = {}
        there: dict[int, RegionRead] = {}
        for i, read in enumerate(reads):
            shards = None if part is None else part.find(read)
            if shards is None:
                whole = self._in_mirror(read.name)
                record = whole.manifest.leaves[read.name]
                there[i] = read._replace(record=record)
            else:
                here[i] = read, shards
        return here, there

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
