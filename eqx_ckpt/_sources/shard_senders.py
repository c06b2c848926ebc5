"""Which process sends which shards to those that lack them, and what it tells them."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from .._errors import CorruptCheckpointError
from .._format.chunk_grid import blocks, Region, shape_of, Start, start_of, whole
from .._format.leaf_names import encode
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest, to_bytes
from .._format.manifest_parser import from_bytes
from .._format.source import read_regions, RegionRead
from .._lazy import Array
from .part_source import STEP, StepPart


# A leaf, and where a shard of it begins.
Shard: TypeAlias = tuple[str, Start]


# What some processes lack: these shards, or, if `None`, all of their part.
Lacking: TypeAlias = Mapping[int, set[Shard] | None]


# A piece of an array of a part.
Block: TypeAlias = tuple[str, LeafRecord, Region]


def blocks_of(name: str, record: LeafRecord) -> Iterator[Block]:
    region = whole(record.data_shape)
    for block in blocks(region, record.chunk_shape, record.itemsize):
        yield name, record, block


def sent_by(part: StepPart, lacking: Lacking) -> list[str]:
    """The arrays of a part that its process sends.

    Each shard that is lacking somewhere is sent by one process that has it: by the one
    that has the fewest bytes to send so far. What each process has for itself, all have
    in the same shards. All that have a part compute the same.
    """
    index, processes = part.part.process, range(part.part.processes)
    loads = dict.fromkeys(processes, 0)
    names = {
        (leaf, start_of(region)): name
        for leaf, shards in part.shards.items()
        for region, name in shards
    }
    found: list[str] = []
    everywhere = [*processes]
    of_all = {
        leaf: [(region, everywhere) for region in regions]
        for leaf, regions in sorted(part.own.items())
    }
    for leaf, holders in (part.step.holders | of_all).items():
        itemsize = part.manifest.leaves[leaf].itemsize
        for region, having in holders:
            shard = leaf, start_of(region)
            able = [i for i in having if not _lacks(lacking, i, shard)]
            if able and len(able) < len(having):
                sender = min(able, key=lambda i: loads[i])
                loads[sender] += itemsize * math.prod(s.stop - s.start for s in region)
                found += [names[shard]] if sender == index else []
    if None in lacking.values():
        able = [i for i in processes if lacking.get(i, ()) is not None]
        found += [encode(STEP)] if able[0] == index else []
    return found


def _lacks(lacking: Lacking, process: int, shard: Shard) -> bool:
    lost = lacking.get(process, ())
    return lost is None or shard in lost


class Parcel(NamedTuple):
    """What one process sends: arrays of its part, in this order.

    **Attributes:**

    - `part`: the manifest of the part, with these arrays alone.
    - `step`: what the part says of its step, if that is sent.
    - `own`: if it is, the shards of what each process has for itself.
    """

    part: Manifest
    step: str
    own: Mapping[str, Sequence[Region]]

    @classmethod
    def of(cls, part: StepPart, names: Iterable[str]) -> "Parcel":
        whole = part.checkpoint.manifest
        leaves = {name: whole.leaves[name] for name in names}
        sent = replace(whole, leaves=leaves, references={})
        if encode(STEP) not in leaves:
            return cls(sent, "", {})
        return cls(sent, part.step.text, part.own)

    def to_bytes(self) -> bytes:
        """It as bytes, which begin with their digest."""
        own = {
            leaf: [[start_of(region), shape_of(region)] for region in regions]
            for leaf, regions in self.own.items()
        }
        said = [to_bytes(self.part).decode(), [*self.part.leaves], self.step, own]
        text = json.dumps(said).encode()
        return hashlib.sha256(text).digest() + text

    @classmethod
    def from_bytes(cls, data: bytes) -> "Parcel":
        digest, text = data[:32], data[32:]
        if hashlib.sha256(text).digest() != digest:
            raise CorruptCheckpointError(
                "What a process says of its part did not arrive as it was sent."
            )
        part, names, step, own = json.loads(text)
        found = from_bytes(part.encode(), "that a process has sent")
        leaves = {name: found.leaves[name] for name in names}
        regions = {
            leaf: [
                tuple(slice(i, i + size) for i, size in zip(*shard, strict=True))
                for shard in shards
            ]
            for leaf, shards in own.items()
        }
        return cls(replace(found, leaves=leaves), step, regions)

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.part.leaves.values())

    def blocks(self) -> Iterator[Block]:
        for name, record in self.part.leaves.items():
            yield from blocks_of(name, record)

    def arrays(self, part: StepPart) -> Iterator[Array]:
        """The bytes of all blocks, of the part of this process."""
        for name, record, region in self.blocks():
            (array,) = read_regions(part.checkpoint, [RegionRead(name, record, region)])
            yield array.reshape(-1).view("uint8")
