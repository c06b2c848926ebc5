"""What a process saves of a step on its own disk: its shards, and how they belong."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from .._format.chunk_grid import chunk_count, start_of
from .._format.leaf_names import encode
from .._format.leaf_record import CHECKSUM_DIGITS, LeafRecord
from .._format.manifest import Manifest, to_bytes
from .._sources.part_source import BEGIN, SHARDS, STEP
from .._tree.leaves.leaf_kinds import describe, parts
from .._tree.plans.write_plan import Write, WritePlan
from .._types import Layout


class StepPart(NamedTuple):
    """The plan of a part; of arrays that all processes have, the names of the leaves.

    `values` are those of the leaves that the manifest has.
    """

    plan: WritePlan
    alike: dict[str, str]
    values: dict[str, str]


def plan_part(
    step: WritePlan,
    owned: Sequence[Write],
    places: Mapping[str, int],
    layout: Layout,
) -> StepPart:
    """Plan what this process saves: each of its shards is an array of its own.

    `owned` is what it would write of a step that all save to one place, and `places`
    has the leaves that are on one process alone.
    """
    writes: list[Write] = []
    alike: dict[str, str] = {}
    for name, record, leaf, _ in step.writes:
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if leaf is None or is_global and not leaf.addressable_shards:
            continue
        for region, data in parts(leaf, record):
            key = BEGIN + ".".join(map(str, start_of(region)))
            found = _described(data)._replace(
                path=(*SHARDS, *record.path, ("key", key)),
                compression=record.compression,
            )
            shard = Write(encode(found.path), found, data)
            writes.append(shard)
            if not is_global and name not in places:
                alike[shard.name] = name
    data = np.frombuffer(_described_step(step, owned, layout), np.uint8)
    record = _described(data)._replace(path=STEP)
    writes.append(Write(encode(STEP), record, data))
    values = {w.name: w.record.value for w in step.writes if w.record.value is not None}
    return StepPart(step._replace(writes=writes, unsaved={}), alike, values)


def _described(data: jax.Array | np.ndarray | np.generic) -> LeafRecord:
    record = describe(data)
    assert record is not None
    return record


def _described_step(step: WritePlan, owned: Sequence[Write], layout: Layout) -> bytes:
    """The manifest of the whole step, and what this process uploads of it."""
    leaves = {write.name: _without_checksums(write.record) for write in step.writes}
    manifest = Manifest(leaves, step.unsaved, layout=layout, separators=step.separators)
    starts = {
        write.name: None if write.owned is None else sorted(write.owned)
        for write in owned
    }
    return json.dumps(
        {"manifest": to_bytes(manifest).decode(), "owned": starts}
    ).encode()


def _without_checksums(record: LeafRecord) -> LeafRecord:
    """A record as a manifest has it, before the chunks of all are known."""
    if not record.is_array:
        return record
    count = chunk_count(record.data_shape, record.chunk_shape)
    return record._replace(checksums=("0" * CHECKSUM_DIGITS,) * count)
