"""Parts of what a `transform` joins, reshapes, transposes or casts: no more is read.

A tree of operations is drawn, and applied by NumPy to the leaves, and to the numbers of
their elements; these say which chunks a result needs.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


LEAVES = {"a": (8, 4, 6), "b": (8, 4, 6), "c": (12,), "d": (6, 8), "e": ()}
DTYPES = {"a": "float32", "b": "float32", "c": "float16", "d": "int8", "e": "int32"}
CASTS = ["float32", "bfloat16", "int32"]
MESHES = {
    "none": None,
    "auto": jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2),
    "explicit": jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2),
}


class Chunked(eqx_ckpt.interop.Source):
    """Arrays in chunks, with what was read of them.

    **Attributes:**

    - `chunks`: those that were touched.
    """

    def __init__(self, grids: dict[str, tuple[int, ...]]) -> None:
        self._grids = grids
        self.chunks: set[tuple[str, tuple[int, ...]]] = set()
        self.nbytes = 0

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        of = eqx_ckpt.inspect.LeafRecord.of_array
        return eqx_ckpt.inspect.Manifest(
            {
                name: of(
                    shape, jnp.dtype(DTYPES[name]), path=(("key", name),)
                )._replace(chunk_shape=self._grids[name])
                for name, shape in LEAVES.items()
            }
        )

    def read(self, reads: Any, damage: Any, report: Any = None) -> Any:
        found = []
        for name, record, region in reads:
            array = np.array(stored(name)[(*region, ...)])
            found.append(array)
            self.nbytes += array.nbytes
            axes = [
                range(span.start // c, -(-span.stop // c))
                for span, c in zip(region, record.chunk_shape, strict=True)
                if array.size
            ]
            if array.size:
                self.chunks |= {(name, at) for at in itertools.product(*axes)}
            if report:
                report(name, array.nbytes)
        return found

    def __str__(self) -> str:
        return "chunks"


def stored(name: str) -> np.ndarray:
    numbers = np.arange(math.prod(LEAVES[name])).reshape(LEAVES[name]) * 7 % 23 - 11
    return np.asarray(numbers).astype(jnp.dtype(DTYPES[name]))


class Array(NamedTuple):
    """What NumPy makes of the leaves, and which elements of which leaf they are.

    `make` does the same with JAX.

    `most`: elements whose chunks may be read. They are its elements until these are
    sliced twice after a reshape; `since` counts the reshapes and what follows them.
    """

    make: Callable[[Any], Any]
    values: np.ndarray
    elements: np.ndarray
    most: np.ndarray
    since: int = 0


def leaf(name: str) -> Array:
    shape = LEAVES[name]
    first = sum(math.prod(LEAVES[other]) for other in LEAVES if other < name)
    elements = np.arange(first, first + math.prod(shape)).reshape(shape)
    return Array(lambda old: old[name], stored(name), elements, elements.reshape(-1))


def after(array: Array, change: Callable[[Any], Any]) -> Array:
    """An array after what NumPy and JAX do alike."""
    make = array.make
    # An index of all axes gives a scalar.
    return array._replace(
        make=lambda old: change(make(old)),
        values=np.asarray(change(array.values)),
        elements=np.asarray(change(array.elements)),
    )


def moved(array: Array, shape: tuple[int, ...]) -> Array:
    found = after(array, lambda x: x.reshape(shape))
    return found._replace(since=min(2, array.since + 1))


def chosen(array: Array, change: Callable[[Any], Any]) -> Array:
    found = after(array, change)
    if array.since == 2:
        return found
    since = 2 if array.since else 0
    return found._replace(most=found.elements.reshape(-1), since=since)


def cast(array: Array, dtype: str) -> Array:
    make = array.make
    values = array.values.astype(jnp.dtype(dtype))
    return array._replace(make=lambda old: make(old).astype(dtype), values=values)


def together(arrays: list[Array], how: str, axis: int) -> Array:
    makes = [array.make for array in arrays]
    join: Any = getattr(np, how)
    return Array(
        lambda old: getattr(jnp, how)([make(old) for make in makes], axis=axis),
        join([array.values for array in arrays], axis=axis),
        join([array.elements for array in arrays], axis=axis),
        np.concatenate([array.most for array in arrays]),
        max(array.since for array in arrays),
    )


@st.composite
def slices(draw: Any, size: int) -> Any:
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    step = draw(st.integers(1, 4))
    return draw(
        st.sampled_from([start, start - size, slice(start, stop), (start, stop, step)])
    )


def sliced(array: Array, axis: int, part: Any) -> Array:
    if isinstance(part, tuple):
        start, stop, step = part

        def thinned(x: Any) -> Any:
            if isinstance(x, np.ndarray):
                return x[(slice(None),) * axis + (slice(start, stop, step),)]
            # Old versions of JAX gather `x[::2]` by computed indices.
            return jax.lax.slice_in_dim(x, start, stop, step, axis)

        return chosen(array, thinned)
    index = (slice(None),) * axis + (part,)
    return chosen(array, lambda x: x[index])


@st.composite
def shapes(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    left, new = math.prod(shape), list[int]()
    while left > 1 and len(new) < 3:
        new.append(
            draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        )
        left //= new[-1]
    return (*new, left) if left > 1 or not new else tuple(new)


@st.composite
def arrays(draw: Any) -> Array:
    """A leaf, or several joined, after a few operations."""
    array = leaf(draw(st.sampled_from([*LEAVES])))
    for _ in range(draw(st.integers(1, 6))):
        shape = array.values.shape
        ways = ["slice"] * 3 + ["transpose"] if shape else []
        # Of very many pieces, all is read.
        ways += ["join"] if array.values.size <= 256 else []
        how = draw(st.sampled_from([*ways, "reshape", "cast", "new axis"]))
        if how == "slice":
            axis = draw(st.integers(0, len(shape) - 1))
            array = sliced(array, axis, draw(slices(shape[axis])))
        elif how == "reshape":
            array = moved(array, draw(shapes(shape)))
        elif how == "transpose":
            order = draw(st.permutations(range(len(shape))))
            array = after(array, lambda x, order=order: x.transpose(order))
        elif how == "cast":
            array = cast(array, draw(st.sampled_from(CASTS)))
        elif how == "new axis":
            axis = draw(st.integers(0, len(shape)))
            index = (slice(None),) * axis + (None,)
            array = after(array, lambda x, index=index: x[index])
        else:
            others = [leaf(n) for n in LEAVES if LEAVES[n] == shape] + [array]
            dtype = str(array.values.dtype)
            more = draw(st.lists(st.sampled_from(others), min_size=1, max_size=3))
            found = [array, *(cast(other, dtype) for other in more)]
            join = "concatenate" if shape and draw(st.booleans()) else "stack"
            axis = draw(st.integers(0, max(0, len(shape) - 1)))
            array = together(found, join, axis)
    return array


def chunks_of(elements: np.ndarray, grids: dict[str, tuple[int, ...]]) -> set[Any]:
    """The chunks that have some elements."""
    found, first = set(), 0
    for name in sorted(LEAVES):
        count = math.prod(LEAVES[name])
        own = elements[(elements >= first) & (elements < first + count)] - first
        at = np.unravel_index(own.reshape(-1), LEAVES[name]) if LEAVES[name] else ()
        indices = [i // c for i, c in zip(at, grids[name], strict=True)]
        if own.size:
            found |= {
                (name, tuple(map(int, i))) for i in zip(*indices, strict=True)
            } or {(name, ())}
        first += count
    return found


def restored(source: Any, found: list[Array], sharding: Any = None) -> int:
    """Restore what was drawn; the bytes that are read are those that are announced."""
    like = [
        jax.ShapeDtypeStruct(x.values.shape, x.values.dtype, sharding=sharding)
        for x in found
    ]

    def transform(old: Any) -> Any:
        return [x.make(old) for x in found]

    done = [0]
    got = eqx_ckpt.tree_deserialise_leaves(
        source,
        like,
        transform=transform,
        progress=lambda phase, leaf, read, total: done.append(read),
    )
    for x, y in zip(got, found, strict=True):
        assert_same(np.asarray(x), y.values)
        assert sharding is None or x.sharding == sharding
    nbytes = eqx_ckpt.tree_match(source, like, transform=transform).nbytes
    assert done[-1] == nbytes
    return nbytes


@pytest.mark.once
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("mesh", [*MESHES])
def test_no_other_chunks_are_read(mesh: str, data: st.DataObject) -> None:
    grids = {
        name: tuple(data.draw(st.integers(1, size)) for size in shape)
        for name, shape in LEAVES.items()
    }
    found = data.draw(st.lists(arrays(), min_size=1, max_size=2), "arrays")
    where = MESHES[mesh]
    source = Chunked(grids)
    sharding = None if where is None else NamedSharding(where, P())
    nbytes = restored(source, found, sharding)
    assert source.chunks <= set[Any]().union(*(chunks_of(x.most, grids) for x in found))
    assert mesh != "none" or nbytes == source.nbytes


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("sources")
    tree = {name: stored(name) for name in LEAVES}
    np.savez(root / "w.npz", **tree)
    eqx_ckpt.tree_serialise_leaves(root / "ckpt", jax.tree.map(jnp.asarray, tree))
    for name, array in tree.items():
        at = {"driver": "file", "path": str(root / "zarr" / name)}
        chunks = ts.ChunkLayout(chunk_shape=[*map(min, array.shape, (2, 3, 4))])
        ts.open(
            {"driver": "zarr3", "kvstore": at},
            create=True,
            dtype=ts.dtype(array.dtype),
            shape=array.shape,
            chunk_layout=chunks,
        ).result()[...] = array
    return {
        "zarr": interop.open_jax_arrays(root / "zarr"),
        "npz": interop.open_npz(root / "w.npz"),
        "safetensors": interop.open_safetensors(
            interop.to_safetensors(root / "ckpt", root / "w.safetensors")
        ),
    }


@settings(max_examples=20)
@given(array=arrays())
@pytest.mark.parametrize("kind", ["zarr", "npz", "safetensors"])
def test_from_other_sources(sources: dict[str, Any], kind: str, array: Array) -> None:
    restored(sources[kind], [array])


@pytest.mark.parametrize("kind", ["zarr", "npz", "safetensors"])
def test_what_is_read_of_them(sources: dict[str, Any], kind: str) -> None:
    """A row of a leaf that is reshaped, and all that is between those of a step.

    Of a step over nothing, nothing is.
    """
    row = sliced(moved(leaf("a"), (32, 6)), 0, 5)
    assert restored(sources[kind], [row]) == 6 * 4
    rows = sliced(leaf("d"), 0, (1, 6, 2))
    assert restored(sources[kind], [rows]) == 5 * 8
    assert restored(sources[kind], [sliced(leaf("d"), 0, (1, 1, 2))]) == 0
