"""What a process saves of a step on its own disk: its shards, and how they belong."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from .._distributed.write_assignment import sharding_of
from .._format.chunk_grid import chunk_count, region_of, Start, start_of
from .._format.leaf_names import encode
from .._format.leaf_record import CHECKSUM_DIGITS, LeafRecord
from .._format.manifest import Manifest, to_bytes
from .._sources.part_source import shard_path, STEP
from .._tree.leaves.leaf_data import parts
from .._tree.leaves.leaf_kinds import describe
from .._tree.plans.write_plan import Write, WritePlan
from .._types import Layout


class PartPlan(NamedTuple):
    """The plan of a part.

    `alike` has the arrays that all processes have, each with the leaf that it is of.
    `values` are those of the leaves that the manifest has.
    """

    plan: WritePlan
    alike: dict[str, str]
    values: dict[str, str]


def plan_part(step: WritePlan, places: Mapping[str, int], layout: Layout) -> PartPlan:
    """Plan what this process saves: each of its shards is an array of its own.

    `places` has the leaves that are on one process alone.
    """
    writes: list[Write] = []
    leaf_of: dict[str, str] = {}
    alike: dict[str, str] = {}
    holders = _Holders()
    for name, record, leaf, _ in step.writes:
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if isinstance(leaf, jax.Array) and (is_global or name in places):
            holders.add(name, leaf, record)
        if leaf is None or is_global and not leaf.addressable_shards:
            continue
        for region, data in parts(leaf, record):
            found = _described(data)._replace(
                path=shard_path(record, region), compression=record.compression
            )
            shard = Write(encode(found.path), found, data)
            writes.append(shard)
            leaf_of[shard.name] = name
            if not is_global and name not in places:
                alike[shard.name] = name
    data = np.frombuffer(_described_step(step, holders, layout), np.uint8)
    record = _described(data)._replace(path=STEP)
    writes.append(Write(encode(STEP), record, data))
    values = {w.name: w.record.value for w in step.writes if w.record.value is not None}
    frozen = {shard for shard, leaf in leaf_of.items() if leaf in step.frozen}
    plan = step._replace(writes=writes, unsaved={}, frozen=frozen, leaf_of=leaf_of)
    return PartPlan(plan, alike, values)


def _described(data: jax.Array | np.ndarray | np.generic) -> LeafRecord:
    record = describe(data)
    assert record is not None
    return record


class _Holders:
    """Which process has which part of the global arrays, the same for all processes.

    A table has, for each process, where its shards are, counted in shards along each
    axis. Most arrays of a model have one of a few tables.
    """

    def __init__(self) -> None:
        self._tables: dict[str, int] = {}
        self._of: dict[tuple[Sharding, tuple[int, ...]], tuple[int, list[int]]] = {}
        self._leaves: dict[str, tuple[int, list[int]]] = {}

    def add(self, name: str, leaf: jax.Array, record: LeafRecord) -> None:
        of = sharding_of(leaf, record), record.data_shape
        if of not in self._of:
            table, shape = _table(*of)
            number = self._tables.setdefault(table, len(self._tables))
            self._of[of] = number, [*shape]
        self._leaves[name] = self._of[of]

    def as_json(self) -> dict[str, Any]:
        tables = [json.loads(table) for table in self._tables]
        return {"tables": tables, "leaves": self._leaves}


def _table(sharding: Sharding, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A table as text, and the shape of a shard."""
    sizes = sharding.shard_shape(shape)
    found: list[set[Start]] = [set() for _ in range(jax.process_count())]
    for device, index in sharding.devices_indices_map(shape).items():
        starts = start_of(region_of(index or (), shape))
        at = tuple(i // max(1, size) for i, size in zip(starts, sizes, strict=True))
        found[device.process_index].add(at)
    return json.dumps([sorted(of) for of in found]), sizes


def _described_step(step: WritePlan, holders: _Holders, layout: Layout) -> bytes:
    """The manifest of the whole step, and which process has which shards."""
    leaves = {write.name: _without_checksums(write.record) for write in step.writes}
    manifest = Manifest(leaves, step.unsaved, layout=layout, separators=step.separators)
    said = {"manifest": to_bytes(manifest).decode(), "holders": holders.as_json()}
    return json.dumps(said).encode()


def _without_checksums(record: LeafRecord) -> LeafRecord:
    """A record as a manifest has it, before the chunks of all are known."""
    if not record.is_array:
        return record
    count = chunk_count(record.data_shape, record.chunk_shape)
    return record._replace(checksums=("0" * CHECKSUM_DIGITS,) * count)
