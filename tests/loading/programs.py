"""What the processes of a job draw from loaders; see tests/faults/jobs.py."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import data
from eqx_ckpt.data._order import Rows


KINDS = ("array", "on device", "random access", "stored")
CHUNK, WINDOW = 3, 2


class LoaderSettings(NamedTuple):
    """What makes a loader, but for `folder`, where stored rows are."""

    kind: str
    total: int
    order: str
    size: int
    cache: int

    @property
    def rows(self) -> Rows:
        if self.kind != "stored":
            return Rows(self.total)
        return Rows(self.total, CHUNK, WINDOW)

    def loader(self, folder: str) -> data.Loader:
        rows = np.arange(self.total)
        if self.kind == "random access":
            source = data.RandomAccessDataSource([{"i": i} for i in rows])
        elif self.kind == "stored":
            stored: Any = {"i": f"{folder}/rows{self.total}"}
            source = data.StoredDataSource(window=WINDOW, **stored)
        else:
            on_device = self.kind == "on device"
            source = data.ArrayDataSource(on_device=on_device, i=rows)
        return data.Loader(source, self.size, order=self.order, cache=self.cache)  # type: ignore[arg-type]


def store(folder: str, counts: tuple[int, ...]) -> None:
    """Write the rows that stored sources read."""
    for count in counts:
        array = zarr.create_array(
            f"{folder}/rows{count}", shape=(count,), chunks=(CHUNK,), dtype="i4"
        )
        array[:] = np.arange(count)


# The rows at these positions of a batch, and its mask.
Batch = tuple[dict[int, int], list[bool]]
Operations = list[tuple[str, int]]


def draw(
    folder: str, makes: list[LoaderSettings], operations: list[Operations], is_new: bool
) -> list[list[Batch]]:
    """Go on where the last job has stopped: draw from each loader, save its cursor."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    place = NamedSharding(mesh, P("d"))
    found: list[list[Batch]] = []
    for number, (make, some) in enumerate(zip(makes, operations, strict=True)):
        loader, path = make.loader(folder), f"{folder}/cursor{number}"
        cursor = loader.start(number)
        if not is_new:
            cursor = eqx_ckpt.tree_deserialise_leaves(path, cursor)
        found.append([])
        for operation, n in some:
            for after, batch in _drawn(loader, cursor, operation, n, place):
                cursor = after
                found[-1].append(batch)
        eqx_ckpt.tree_serialise_leaves(path, cursor, overwrite=True)
    return found


def _drawn(
    loader: data.Loader, cursor: Any, operation: str, n: int, place: NamedSharding
) -> Iterator[tuple[Any, Batch]]:
    if operation == "iterate":
        batches = loader.iterate(cursor, sharding=place, info=True)
        for after, batch, info in itertools.islice(batches, n):
            rows: dict[int, int] = {}
            for shard in batch["i"].addressable_shards:
                start = shard.index[0].start or 0
                rows.update(enumerate(np.asarray(shard.data).tolist(), start))
            yield after, (rows, np.asarray(info.mask).tolist())
    for _ in range(n if operation == "next" else 0):
        cursor, batch, info = loader.next(cursor, info=True)
        rows = dict(enumerate(np.asarray(batch["i"]).tolist()))
        yield cursor, (rows, np.asarray(info.mask).tolist())
