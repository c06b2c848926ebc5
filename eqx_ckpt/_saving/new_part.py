"""The new part of a process that has lost shards, or all of its part."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._errors import CorruptCheckpointError
from .._format.chunk_grid import Region, shape_of, start_of
from .._format.leaf_names import encode
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._format.run_history import Part
from .._format.source import nothing, read_regions, RegionRead
from .._sources.checkpoint_source import Checkpoint, other_chunk
from .._sources.part_source import (
    shard_of,
    shard_path,
    STEP,
    StepPart,
    StepShards,
)
from .._sources.shard_senders import Block, blocks_of, Parcel, Shard
from .._storage.interface.chunk_bytes import Piece
from .._tree.leaves.leaf_kinds import describe
from .._tree.plans.write_plan import Write, WritePlan
from .._types import PathLike
from .save import Alone, Save


logger = logging.getLogger("eqx_ckpt")


# Buffers of bytes, each with the number of the process that has sent it.
Received = Iterator[tuple[int, np.ndarray]]


class OldPart(NamedTuple):
    """What a process has: a part of which some shards are damaged, or none."""

    part: StepPart | None
    damaged: Collection[Shard]

    def kept(self) -> dict[str, LeafRecord]:
        """What stays: all that is not damaged."""
        leaves = {} if self.part is None else self.part.checkpoint.manifest.leaves
        return {
            name: record
            for name, record in leaves.items()
            if _shard(record) not in self.damaged
        }

    def lost(
        self, step: StepShards, own: Mapping[str, Sequence[Region]], index: int
    ) -> dict[Shard, Region]:
        """The shards that process `index` lacks; `own` are those that all have."""
        if self.part is not None:
            return {
                (leaf, start_of(region)): region
                for leaf, shards in self.part.shards.items()
                for region, _ in shards
                if (leaf, start_of(region)) in self.damaged
            }
        lost = {
            (leaf, start_of(region)): region
            for leaf, holders in step.holders.items()
            for region, processes in holders
            if index in processes
        }
        return lost | {
            (leaf, start_of(region)): region
            for leaf, regions in own.items()
            for region in regions
        }


def _shard(record: LeafRecord) -> Shard:
    if record.path == STEP:
        return encode(STEP), ()
    leaf, region = shard_of(record)
    return leaf, start_of(region)


class NewPart:
    """Where each array of a new part comes from, once all have told what they send.

    It is compared with its hashes when it arrives.
    """

    def __init__(
        self,
        old: OldPart,
        process: tuple[int, int],
        parcels: Mapping[int, Parcel],
        find_whole: Callable[[Manifest], Checkpoint | None],
    ) -> None:
        """`process` is which one this is, and of how many.

        Raise if a shard is nowhere.
        """
        self._old = old
        self._process = process
        self._parcels = parcels
        own: Mapping[str, Sequence[Region]] = {}
        if old.part is not None:
            self._like, step = old.part.checkpoint.manifest, old.part.step
        else:
            first = next(parcel for parcel in parcels.values() if parcel.step)
            self._like, own = first.part, first.own
            step = StepShards.from_text(first.step, "of another process")
        lost = old.lost(step, own, process[0])
        self._sent: dict[str, LeafRecord] = {}
        self._sender: dict[str, int] = {}
        for sender, parcel in parcels.items():
            for name, record in parcel.part.leaves.items():
                if _shard(record) in lost or old.part is None and record.path == STEP:
                    self._sent[name], self._sender[name] = record, sender
        arrived = {_shard(record) for record in self._sent.values()}
        self._own = old.kept()
        self._in_mirror: dict[str, tuple[LeafRecord, Block]] = {}
        self._whole: Checkpoint | None = None
        rest = {shard: region for shard, region in lost.items() if shard not in arrived}
        if rest:
            self._whole = find_whole(self._like)
            self._look_in_mirror(rest, step)

    def _look_in_mirror(self, lost: Mapping[Shard, Region], step: StepShards) -> None:
        if self._whole is None:
            damaged = ", ".join(sorted({repr(leaf) for leaf, _ in lost}))
            raise CorruptCheckpointError(
                f"Of these leaves, shards are damaged or lost on its disk: {damaged}. "
                "No other process has them, and no mirror has the step."
            )
        for (leaf, _), region in lost.items():
            of = self._whole.manifest.leaves[leaf]
            record = describe(nothing(RegionRead(leaf, of, region)))
            assert record is not None
            path, codec = shard_path(of, region), step.manifest.leaves[leaf].compression
            record = record._replace(path=path, compression=codec)
            self._in_mirror[encode(path)] = record, (leaf, of, region)

    def save(self, path: PathLike, received: Received, *, overwrite: bool) -> None:
        """Save the part, of what is here and what is received."""
        like = self._like
        assert like.part is not None
        from_mirror = {name: record for name, (record, _) in self._in_mirror.items()}
        writes = [
            Write(name, _unchecked(record), record)
            for name, record in (self._own | self._sent | from_mirror).items()
        ]
        part = Part(like.part.id, *self._process)
        plan = WritePlan(writes, dict(like.unsaved), like.separators, like.history)
        plan = plan._replace(part=part)
        save = Save(path, plan, like.metadata, like.layout, progress=False)
        save.begin(Alone(), overwrite)
        save.run(self._pieces(received))
        logger.warning(
            "%s is whole again: %d of its arrays are from other processes, and %d from "
            "the mirror.",
            path,
            len(self._sent),
            len(from_mirror),
        )

    def _pieces(self, received: Received) -> Iterator[Piece]:
        for process, of_process in itertools.groupby(received, lambda one: one[0]):
            buffers = (buffer for _, buffer in of_process)
            for block, array in assembled(self._parcels[process].blocks(), buffers):
                # Several may send it: it is written once.
                if self._sender.get(block[0]) == process and array.size:
                    yield _checked(block, array, process)
        for name, record in self._own.items():
            assert self._old.part is not None
            for block in blocks_of(name, record):
                read = RegionRead(*block)
                (array,) = read_regions(self._old.part.checkpoint, [read])
                if array.size:
                    yield Piece(name, _unchecked(record), read.region, array)
        for name, (record, (leaf, of, region)) in self._in_mirror.items():
            assert self._whole is not None
            for _, _, inside in blocks_of(name, record):
                read = RegionRead(leaf, of, _moved(inside, region))
                (array,) = read_regions(self._whole, [read])
                if array.size:
                    yield Piece(name, record, inside, array)


def assembled(
    blocks: Iterator[Block], buffers: Iterator[np.ndarray]
) -> Iterator[tuple[Block, np.ndarray]]:
    """The arrays of blocks whose bytes follow one another in some buffers."""
    rest = np.empty(0, np.uint8)
    for block in blocks:
        _, record, region = block
        array = np.empty(shape_of(region), record.data_type)
        left = array.reshape(-1).view(np.uint8)
        while left.size:
            if not rest.size:
                rest = next(buffers)
            size = min(left.size, rest.size)
            left[:size] = rest[:size]
            left, rest = left[size:], rest[size:]
        yield block, array


def _checked(block: Block, array: np.ndarray, process: int) -> Piece:
    name, record, region = block
    if key := other_chunk(RegionRead(*block), array):
        raise CorruptCheckpointError(
            f"{key}, of process {process}, did not arrive as it was saved: its hash "
            "differs."
        )
    return Piece(name, _unchecked(record), region, array)


def _unchecked(record: LeafRecord) -> LeafRecord:
    return record._replace(checksums=())


def _moved(region: Region, base: Region) -> Region:
    """A region that is relative to the start of another one."""
    return tuple(
        slice(part.start + of.start, part.stop + of.start)
        for part, of in zip(region, base, strict=True)
    )
