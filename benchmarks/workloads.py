"""The trees that are saved and restored."""

import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import PyTree


SCALES = ("small", "full")

# What a run of each workload saves. D restores a part of what B saved; E is A, saved
# from a mesh and restored onto another one.
SAVED_BY = {"A": "A", "B": "B", "C": "C", "D": "B", "E": "E"}


class Block(eqx.Module):
    """One layer of a transformer: only its parameters matter here."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.Linear
    output: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, width: int, *, key: jax.Array):
        keys = jr.split(key, 4)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.output = eqx.nn.Linear(width, width, key=keys[1])
        self.norm2 = eqx.nn.LayerNorm(width)
        self.widen = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.narrow = eqx.nn.Linear(4 * width, width, key=keys[3])


class Transformer(eqx.Module):
    """With the default sizes it has the 124 million parameters of GPT-2 small."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(
        self, width: int = 768, layers: int = 12, vocabulary: int = 50257, *, key: Any
    ):
        keys = jr.split(key, layers + 2)
        self.tokens = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = eqx.nn.Embedding(1024, width, key=keys[1])
        self.blocks = [Block(width, key=k) for k in keys[2:]]
        self.norm = eqx.nn.LayerNorm(width)


def skeleton(name: str, scale: str) -> PyTree:
    """A workload's tree, with `jax.ShapeDtypeStruct`s for arrays.

    `C` may be followed by the number of leaves, as in `C20000`.
    """
    small = scale == "small"
    if name in ("A", "E"):
        rows = 64 if small else 8192
        arrays = {f"array{i}": _struct(rows, 4096) for i in range(16)}
        return arrays if name == "A" else _sharded(arrays, (4, 2), P("x", "y"))
    if name in ("B", "D"):
        sizes = {"width": 64, "layers": 2, "vocabulary": 512} if small else {}
        state = eqx.filter_eval_shape(ft.partial(train_state, **sizes), jr.key(0))
        return {"model": state["model"]} if name == "D" else state
    return _many(int(name[1:] or (200 if small else 5000)))


def target(name: str, scale: str) -> PyTree:
    """What a restore is to fill: for E, half of the arrays in other parts each."""
    like = skeleton(name, scale)
    if name != "E":
        return like
    blocks = _sharded(like, (2, 4), P("x", "y"))
    rows = _sharded(like, (2, 4), P(("x", "y")))
    return {key: (rows if i % 2 else blocks)[key] for i, key in enumerate(like)}


def _sharded(tree: PyTree, shape: tuple[int, int], spec: P) -> PyTree:
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    return jtu.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train_state(key: jax.Array, **sizes: int) -> PyTree:
    model = Transformer(**sizes, key=key)
    optimiser = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
    half = jtu.tree_map(lambda x: x.astype(jnp.bfloat16), model)
    return {"model": half, "optimiser": optimiser}


def state_of_width(width: int) -> PyTree:
    """The skeleton of a training state; the vocabulary grows with its width."""
    vocabulary = 50257 * width // 768
    make = ft.partial(train_state, width=width, vocabulary=vocabulary)
    return eqx.filter_eval_shape(make, jax.random.key(0))


def _many(count: int) -> PyTree:
    """Leaves of 1 to 16 KiB, 50 in each dictionary."""
    sizes = np.random.default_rng(0).integers(256, 4096, count, endpoint=True)
    return {
        f"part{i}": {
            f"leaf{j}": _struct(int(size)) for j, size in enumerate(sizes[i : i + 50])
        }
        for i in range(0, count, 50)
    }


def tiny(tree: PyTree) -> PyTree:
    """The same tree with arrays of one number each."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1,), x.dtype), tree)


def filled(tree: PyTree) -> PyTree:
    """The same tree with arrays of noise, no two of them alike."""
    noise = np.random.default_rng(0).random(2**24, np.float32)
    structs, treedef = jtu.tree_flatten(tree)
    arrays = [_noisy(noise, i, struct) for i, struct in enumerate(structs)]
    places = [struct.sharding for struct in structs]
    placed = jax.device_put(arrays, None if None in places else places)
    return jax.block_until_ready(treedef.unflatten(placed))


def _noisy(noise: np.ndarray, i: int, struct: jax.ShapeDtypeStruct) -> np.ndarray:
    size = math.prod(struct.shape)
    start = 4099 * i % 2**22
    array = np.resize(noise[start : start + size], size).astype(struct.dtype)
    array[:1] = i
    return array.reshape(struct.shape)


def nbytes(tree: PyTree) -> int:
    return sum(
        math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jtu.tree_leaves(tree)
    )


def named(tree: PyTree) -> dict[str, Any]:
    """The leaves by their names, such as `model/blocks/0/norm1/weight`."""
    return {
        jtu.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jtu.tree_leaves_with_path(tree)
    }


def nested(tree: PyTree) -> dict[str, Any]:
    """The same leaves in dictionaries only, for libraries that refuse modules."""
    top: dict[str, Any] = {}
    for name, leaf in named(tree).items():
        *parents, last = name.split("/")
        node = top
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return top


def check_same(restored: PyTree, expected: PyTree) -> None:
    """Raise unless all leaves have the names, dtypes and bits that they had."""
    found, wanted = named(restored), named(expected)
    if found.keys() != wanted.keys():
        raise ValueError(f"other leaves: {sorted(found.keys() ^ wanted.keys())[:3]}")
    for name, leaf in wanted.items():
        a, b = np.asarray(found[name]), np.asarray(leaf)
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not np.array_equal(_bits(a), _bits(b)):
            raise ValueError(f"{name} came back changed")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
