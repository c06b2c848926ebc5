"""Programs that draw batches; each function runs in all processes of a job."""

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import data


class Counted(list[dict[str, np.int32]]):
    """A data set that counts the rows that it is asked for."""

    taken = 0

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.int32]]:
        self.taken += len(indices)
        return [self[i] for i in indices]


def draw(path: str, batches: int) -> tuple[list[list[int]], int]:
    """Go on from the cursor at `path`, if there is one; save it again.

    **Returns:**

    The rows of each global batch, and how many this process has read.
    """
    dataset = Counted({"i": i} for i in np.arange(50, dtype=np.int32))
    source = data.RandomAccessDataSource(dataset)
    loader = data.Loader(source, 8, order="epochs", cache=3)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    placed = NamedSharding(mesh, P("x"))
    with eqx_ckpt.CheckpointManager(path) as manager:
        cursor = loader.start(seed=1)
        if manager.latest() is not None:
            cursor = manager.restore({"cursor": cursor})["cursor"]
        found: list[list[int]] = []
        drawn = loader.iterate(cursor, prefetch=0, sharding=placed)
        for after, batch in itertools.islice(drawn, batches):
            cursor = after
            found.append(_rows(batch["i"]))
        manager.save((manager.latest() or 0) + 1, {"cursor": cursor})
    return found, dataset.taken


def _rows(batch: Any) -> list[int]:
    """The rows of a global array, on every process."""
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(batch.sharding.mesh, P()))
    return np.asarray(whole(batch).addressable_data(0)).tolist()
