"""Leaves that a `transform` stacks or concatenates: they are read to their places."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same


BLOCKS = 20  # Some versions of JAX concatenate 16 arrays at a time.
MESH = jax.make_mesh((4, 2), ("x", "y"))


def tree() -> Any:
    blocks = [
        {
            "w": jnp.arange(6.0).reshape(3, 2) + i,
            "half": jnp.full(4, i, jnp.bfloat16),
            "scale": jnp.float32(i),
            "int4": jnp.full(3, i % 7, jnp.int4),
            "host": np.arange(3, dtype=np.int32) * i,
            "key": jax.random.key(i),
            "none": jnp.zeros((0, 2)),
        }
        for i in range(BLOCKS)
    ]
    return {"blocks": blocks, "q": jnp.ones((2, 3)), "k": jnp.zeros((5, 3))}


def joined(old: Any) -> Any:
    blocks = [old["blocks"][i] for i in range(BLOCKS)]
    rows = [block["w"] for block in blocks]
    return {
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks),
        "rows": jnp.concatenate(rows),
        "fused": jnp.concatenate([old["q"], old["k"]]),
        "one": old["q"][None],
    }


def expected(old: Any) -> Any:
    return joined(old | {"blocks": dict(enumerate(old["blocks"]))})


@pytest.mark.parametrize(
    "how", [{}, {"layout": "ocdbt"}, {"compression": "zstd"}], ids=str
)
def test_is_read_and_not_computed(tmp_path: pathlib.Path, how: Any) -> None:
    old, new = tree(), expected(tree())
    eqx_ckpt.tree_serialise_leaves(tmp_path / "old", old, **how)
    heard: dict[str, int] = {}

    def progress(phase: str, leaf: str, done: int, total: int) -> None:
        assert phase != "compute"
        heard[leaf] = done

    found = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "old",
        jax.eval_shape(lambda: new),
        transform=joined,
        progress=progress,
    )
    assert_same(found, new)
    match = eqx_ckpt.tree_match(tmp_path / "old", new, transform=joined)
    assert match.leaves["rows"].status == "computed"
    assert match.leaves["rows"].origin[-1] == f"blocks/{BLOCKS - 1}/w"
    assert max(heard.values()) == match.nbytes


@pytest.mark.parametrize(
    ("join", "spec"),
    [
        (np.stack, P("x")),
        (np.stack, P(None, "y")),
        (np.stack, P(None, None, "y")),
        (np.concatenate, P(("x", "y"))),
        (np.concatenate, P("y", "x")),
    ],
)
def test_onto_a_mesh(tmp_path: pathlib.Path, join: Any, spec: P) -> None:
    w = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    old = {"a": w, "b": w + 1, "c": w + 2, "d": w + 3}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "old", old)
    whole = join([*old.values()])
    sharding = NamedSharding(MESH, spec)
    like = {"all": jax.ShapeDtypeStruct(whole.shape, "float32", sharding=sharding)}
    in_jax = getattr(jnp, join.__name__)
    found = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "old", like, transform=lambda old: {"all": in_jax([*old.values()])}
    )
    assert found["all"].sharding == sharding
    assert (np.asarray(found["all"]) == whole).all()


class InMemory(eqx_ckpt.interop.Source):
    """A source of which each region is a new array."""

    def __init__(self, tree: dict[str, np.ndarray], returned: Any = None) -> None:
        self._tree = tree
        self._returned = returned

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        of = eqx_ckpt.inspect.LeafRecord.of_array
        return eqx_ckpt.inspect.Manifest(
            {
                name: of(array.shape, array.dtype, path=(("key", name),))
                for name, array in self._tree.items()
            }
        )

    def read(self, reads: Any, damage: Any, report: Any = None) -> Any:
        if self._returned is not None:
            return [self._returned for _ in reads]
        return [self._tree[read.name][read.region].copy() for read in reads]

    def __str__(self) -> str:
        return "what is in memory"


def test_from_a_source_that_cannot_read_into_arrays() -> None:
    old = {"a": np.arange(3.0, dtype=np.float32), "b": np.ones(2, np.float32)}

    def transform(old: Any) -> Any:
        return {"both": jnp.concatenate([old["a"], old["b"]])}

    like = {"both": jnp.zeros(5)}
    found = eqx_ckpt.tree_deserialise_leaves(InMemory(old), like, transform=transform)
    assert found["both"].tolist() == [0, 1, 2, 1, 1]
    with pytest.raises(eqx_ckpt.CheckpointError, match="what is in memory returned"):
        eqx_ckpt.tree_deserialise_leaves(
            InMemory(old, np.zeros(1, np.float32)), like, transform=transform
        )


def test_damage_is_found(tmp_path: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(tmp_path / "old", tree())
    new = expected(tree())
    (chunk,) = (tmp_path / "old/blocks/7/w").glob("c.*")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'blocks/7/w'"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "old", new, transform=joined)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: jnp.stack([a, b], axis=1),
        lambda a, b: jnp.concatenate([a, b], axis=1),
        lambda a, b: jnp.stack([a, a]),
        lambda a, b: jnp.stack([a, b + 1]),
        lambda a, b: jnp.concatenate([a, jnp.ones((1, 3))]),
        lambda a, b: jnp.stack([jnp.concatenate([a, b]), jnp.concatenate([b, a])]),
        lambda a, b: jnp.stack([a, b]).astype("bfloat16"),
        lambda a, b: jnp.broadcast_to(a, (2, 3, 3)),
        lambda a, b: jnp.stack([a, b])[::-1],
        lambda a, b: jnp.concatenate([a[None], jnp.stack([b, a])]),
    ],
)
def test_what_only_looks_so(change: Any) -> None:
    a, b = jnp.arange(9.0).reshape(3, 3), jnp.ones((3, 3))
    path = "memory://joined"
    eqx_ckpt.tree_serialise_leaves(path, {"a": a, "b": b}, overwrite=True)
    new = {"c": change(a, b)}
    found = eqx_ckpt.tree_deserialise_leaves(
        path, new, transform=lambda old: {"c": change(old["a"], old["b"])}
    )
    assert_same(found, new)


def test_nothing_is_narrowed() -> None:
    path = "memory://wide"
    eqx_ckpt.tree_serialise_leaves(path, {"a": np.ones(2), "b": np.ones(2)})
    like = {"c": jnp.zeros(4)}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="enable_x64"):
        eqx_ckpt.tree_deserialise_leaves(
            path, like, transform=lambda o: {"c": jnp.concatenate([o["a"], o["b"]])}
        )
    with jax.enable_x64(True):
        like = {"c": np.zeros(4)}
        found = eqx_ckpt.tree_deserialise_leaves(
            path, like, transform=lambda o: {"c": jnp.concatenate([o["a"], o["b"]])}
        )
    assert_same(found, {"c": np.ones(4)})
