"""What the processes of a job restore through a transform."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt

from .failing_jobs import caught
from .programs import mesh, shared, TIMEOUT


SHAPE = (1024, 1024)
BLOCKS = 3


def data(i: int) -> np.ndarray:
    return np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + i


def save(path: str) -> None:
    rows = NamedSharding(mesh(), P("x"))
    tree = {
        "blocks": [{"w": shared(data(i), rows)} for i in range(BLOCKS)],
        "plain": shared(data(7), NamedSharding(mesh(), P())),
        "few": np.arange(4.0, dtype=np.float32),
        "step": 3,
    }
    eqx_ckpt.tree_serialise_leaves(path, tree, timeout=TIMEOUT)


def transform(old: Any) -> Any:
    blocks = [old["blocks"][i] for i in range(BLOCKS)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    doubled = old["plain"] * 2
    return {
        "blocks": stacked,
        "doubled": doubled,
        "renamed": old["blocks"][0]["w"],
        "part": old["blocks"][1]["w"][2:4],
        "row": old["plain"][3] * 2,
        "few": old["few"] + 1,
        "host": old["few"] * 2,
        "theirs": old["few"] - 1,
        "new": jnp.ones((8, 2)),
        "step": old["step"] + 1,
    }


def computed(old: Any) -> Any:
    """The same, with blocks that are computed, so that each process reads its rows."""
    return jax.tree.map(lambda x: x * 1, transform(old))


def like() -> Any:
    last = [d for d in jax.devices() if d.process_index == jax.process_count() - 1]
    theirs = NamedSharding(Mesh(np.array(last), ("z",)), P())

    def struct(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh(), P(*spec))

    return {
        "blocks": {"w": struct((BLOCKS, *SHAPE), on(None, None, ("x", "y")))},
        "doubled": struct(SHAPE, on("y", "x")),
        "renamed": struct(SHAPE, on("y")),
        "part": struct((2, *SHAPE[1:]), on(None, "x")),
        "row": struct(SHAPE[1:], on("x")),
        "few": jnp.zeros(4),
        "host": np.zeros(4, np.float32),
        "theirs": struct((4,), theirs),
        "new": struct((8, 2), on("x")),
        "step": 0,
    }


class Watched(eqx_ckpt.interop.Source):
    """A checkpoint, of which the largest region that is read is known."""

    def __init__(self, path: str) -> None:
        self._manifest = eqx_ckpt.inspect.read_manifest(path)
        self._arrays = {
            name: array for name, _, array in eqx_ckpt.inspect.iter_leaves(path)
        }
        self.most = 0

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        return self._manifest

    def read(self, reads: Any, damage: Any, report: Any = None) -> list[np.ndarray]:
        self.most = max([self.most, *(read.nbytes for read in reads)])
        return [np.array(self._arrays[read.name][read.region]) for read in reads]

    def __str__(self) -> str:
        return "what is watched"


def restore(path: str) -> int:
    """Restore, compare each shard, and return the bytes of the largest region."""
    save(path)
    expected = {
        "blocks": {"w": np.stack([data(i) for i in range(BLOCKS)])},
        "doubled": data(7) * 2,
        "renamed": data(0),
        "part": data(1)[2:4],
        "row": data(7)[3] * 2,
        "few": np.arange(4.0) + 1,
        "host": np.arange(4.0) * 2,
        "theirs": np.arange(4.0) - 1,
        "new": np.ones((8, 2)),
    }
    watched = Watched(path)
    for source, broadcast_replicas in ((watched, False), (path, True)):
        tree = eqx_ckpt.tree_deserialise_leaves(
            source,
            like(),
            transform=transform,
            broadcast_replicas=broadcast_replicas,
            timeout=TIMEOUT,
        )
        assert tree.pop("step") == 4
        jax.tree.map(_check, tree, expected)
        wanted = jax.tree.leaves({k: v for k, v in like().items() if k != "step"})
        for leaf, struct in zip(jax.tree.leaves(tree), wanted, strict=True):
            if isinstance(struct, jax.ShapeDtypeStruct):
                assert leaf.sharding == struct.sharding
    _initialise(path)
    return watched.most


def _check(found: Any, expected: np.ndarray) -> None:
    if isinstance(found, np.ndarray):
        assert (found == expected).all()
        return
    for shard in found.addressable_shards:
        assert (np.asarray(shard.data) == expected[shard.index]).all()


def _initialise(path: str) -> None:
    """A new leaf is made on the mesh of all processes."""

    def init(key: jax.Array) -> Any:
        return {
            "step": 0,
            "plain": jnp.zeros(SHAPE),
            "head": jax.random.normal(key, (16, 4)),
        }

    found = eqx_ckpt.restore_or_init(
        path,
        init,
        jax.random.key(0),
        sharding=lambda name, struct: NamedSharding(mesh(), P("x")),
        unexpected="ignore",
        timeout=TIMEOUT,
    )
    _check(found["plain"], data(7))
    _check(found["head"], np.asarray(jax.random.normal(jax.random.key(0), (16, 4))))


def damaged(path: str) -> tuple[str, str]:
    """Only the last process reads the damaged chunk, and the others need its part."""
    save(path)
    if jax.process_index() == 0:
        chunks = sorted(pathlib.Path(path, "blocks", "1", "w").glob("c.*"))
        last = max(chunks, key=lambda chunk: int(chunk.name.split(".")[1]))
        last.write_bytes(bytes(last.stat().st_size))
    eqx_ckpt.tree_serialise_leaves(f"{path}-2", {"step": 1}, timeout=TIMEOUT)
    return caught(
        eqx_ckpt.tree_deserialise_leaves,
        path,
        like(),
        transform=computed,
        timeout=TIMEOUT,
    )
