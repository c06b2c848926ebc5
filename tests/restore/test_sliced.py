"""Static slices of a leaf in a `transform`: only they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import interop
from faults.workloads import small_chunks
from helpers import assert_same


SHAPE = (8, 3, 4)
PATH = "memory://sliced/tree"


def tree():
    numbers = np.random.default_rng(0).integers(-8, 8, SHAPE)
    return {
        "f32": jnp.asarray(numbers, jnp.float32),
        "bf16": jnp.asarray(numbers, jnp.bfloat16),
        "int4": jnp.asarray(numbers, jnp.int4),
        "key": jax.random.split(jax.random.key(1), SHAPE),
        "host": numbers.astype(np.int16),
        "swapped": numbers.astype(">f4"),
        "dates": numbers.astype("M8[D]"),
    }


NAMES = sorted(tree())
# JAX computes with these.
COMPUTED = ["bf16", "f32", "host"]


@pytest.fixture(scope="module", autouse=True)
def saved():
    with small_chunks(48):
        eqx_ckpt.tree_serialise_leaves(PATH, tree(), overwrite=True)


@st.composite
def indices(draw, shape=SHAPE):
    """A static index that leaves something of an array."""
    index = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        index.append(
            draw(
                st.sampled_from(
                    [start, start - size, slice(start, stop), slice(start - size, None)]
                )
            )
        )
    return tuple(index)


def nbytes(path, transform, like):
    return eqx_ckpt.tree_match(path, like, transform=transform).nbytes


def restored(like, transform, path=PATH, **how):
    seen = {}

    def progress(phase, leaf, done, total):
        if phase == "read":
            seen[leaf] = (done, total)

    found = eqx_ckpt.tree_deserialise_leaves(
        path, like, transform=transform, progress=progress, **how
    )
    read = max((done for done, _ in seen.values()), default=0)
    assert all(total == nbytes(path, transform, like) for _, total in seen.values())
    return found, read


@settings(max_examples=60)
@given(data=st.data())
def test_what_is_indexed_is_read_alone(data):
    name = data.draw(st.sampled_from(NAMES), "leaf")
    first = data.draw(indices(), "index")
    array = tree()[name]
    again = data.draw(indices(array[first].shape), "index of that")

    def transform(old):
        return {"x": old[name][first][again]}

    expected = array[first][again]
    is_host = isinstance(array, np.ndarray)
    expected = np.asarray(expected) if is_host else expected
    (found, read) = restored({"x": expected}, transform)
    assert_same(found, {"x": expected})
    itemsize = 8 if name == "key" else 1 if name == "int4" else array.dtype.itemsize
    assert read == expected.size * itemsize
    assert nbytes(PATH, transform, {"x": expected}) == read


@settings(max_examples=30)
@given(data=st.data())
def test_what_is_computed_of_it_reads_no_more(data):
    name = data.draw(st.sampled_from(COMPUTED), "leaf")
    found = data.draw(st.lists(indices(), min_size=1, max_size=3), "indices")
    join = data.draw(st.sampled_from(["sum", "stack", "concatenate", "jit"]), "join")

    def transform(old):
        parts = [old[name][index] for index in found]
        if join == "stack":
            return {"x": jnp.stack([parts[0], parts[0]])}
        if join == "concatenate" and parts[0].ndim:
            return {"x": jnp.concatenate([parts[0], parts[0]])}
        if join == "jit":
            return {"x": jax.jit(lambda x: x[found[0]] * 2)(old[name])}
        return {"x": sum(part.sum() for part in parts)}

    expected = jax.jit(transform)({name: tree()[name]})
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), expected)
    got, _ = restored(like, transform)
    np.testing.assert_array_equal(np.asarray(got["x"]), np.asarray(expected["x"]))
    if join == "jit":
        assert nbytes(PATH, transform, like) < 1 + (
            tree()[name][found[0]].size * tree()[name].dtype.itemsize
        )


def test_a_member_of_an_ensemble_costs_what_it_is(tmp_path):
    weights = jnp.arange(16 * 64.0).reshape(16, 64)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {"layers": {"w": weights}})
    like = {"w": jnp.zeros(64), "last": jnp.zeros(64), "some": jnp.zeros((4, 64))}

    def transform(old):
        w = old["layers"]["w"]
        return {"w": w[3], "last": w[-1], "some": w[2:6]}

    found, read = restored(like, transform, tmp_path / "ckpt")
    assert_same(found, {"w": weights[3], "last": weights[-1], "some": weights[2:6]})
    assert read == 6 * 64 * 4
    match = eqx_ckpt.tree_match(tmp_path / "ckpt", like, transform=transform)
    assert match.leaves["w"].origin == ("layers/w[3]",)
    assert match.leaves["some"].origin == ("layers/w[2:6]",)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=r"layers/w\[3\]"):
        eqx_ckpt.tree_deserialise_leaves(
            tmp_path / "ckpt", {**like, "w": jnp.zeros(3)}, transform=transform
        )


def test_all_parts_at_once(tmp_path):
    """By `jnp.split`, by a loop over the first axis, and beside the whole."""
    weights = np.arange(48.0, dtype=np.float32).reshape(4, 12)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {"w": jnp.asarray(weights)})

    def transform(old):
        q, k, v = jnp.split(old["w"], 3, axis=1)
        return {"q": q, "k": k, "v": v, "rows": [*old["w"]], "w": old["w"]}

    expected = jax.tree.map(jnp.asarray, transform({"w": weights}))
    found, _ = restored(expected, transform, tmp_path / "ckpt")
    assert_same(found, expected)


MESH = jax.make_mesh((4, 2), ("x", "y"))


@pytest.mark.parametrize("sharding", [P("x"), P(None, "x"), P("y", "x"), "mesh"])
@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_onto_a_mesh_and_from_other_sources(tmp_path, sharding, kind):
    weights = jnp.arange(6 * 8 * 4.0).reshape(6, 8, 4)
    rows = jax.device_put(weights, NamedSharding(MESH, P(None, "x")))
    source = tmp_path / "ckpt"
    eqx_ckpt.tree_serialise_leaves(source, {"w": rows})
    if kind == "safetensors":
        with pytest.warns(UserWarning, match="sharding"):
            interop.to_safetensors(source, tmp_path / "w.safetensors")
        source = interop.open_safetensors(tmp_path / "w.safetensors")
    like = {"one": jnp.zeros((8, 4)), "double": jnp.zeros((8, 4))}
    where = MESH if sharding == "mesh" else NamedSharding(MESH, sharding)
    found = eqx_ckpt.tree_deserialise_leaves(
        source,
        like,
        transform=lambda old: {"one": old["w"][2], "double": old["w"][3] * 2},
        sharding=where,
    )
    np.testing.assert_array_equal(found["one"], weights[2])
    np.testing.assert_array_equal(found["double"], weights[3] * 2)
    if sharding != "mesh":
        assert found["one"].sharding == where
        assert found["double"].sharding == where
    elif kind == "checkpoint":
        assert found["one"].sharding.spec == P("x", None)


def test_damage_outside_of_what_is_read_does_not_matter(tmp_path):
    tree = {"w": jnp.arange(32.0).reshape(8, 4)}
    with small_chunks(16):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    (tmp_path / "ckpt" / "w" / "c.5.0").write_bytes(b"")
    like = {"w": jnp.zeros(4)}
    found, _ = restored(like, lambda old: {"w": old["w"][4]}, tmp_path / "ckpt")
    assert_same(found, {"w": tree["w"][4]})
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=r"'w'"):
        restored(like, lambda old: {"w": old["w"][5]}, tmp_path / "ckpt")


def test_a_leaf_that_is_renamed_and_damaged_is_named(tmp_path):
    tree = {"old": jnp.ones(4), "other": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    (tmp_path / "ckpt" / "old" / "c.0").unlink()
    for change in (lambda x: x, lambda x: x[:4], lambda x: x[None][0], lambda x: x * 2):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'old': old/c.0 is"):
            eqx_ckpt.tree_deserialise_leaves(
                tmp_path / "ckpt",
                {"new": jnp.ones(4)},
                transform=lambda old, change=change: {"new": change(old["old"])},
            )


def test_an_export_of_parts(tmp_path):
    """What writes other formats reads them as a restore does."""
    tree = {"w": jnp.arange(12.0).reshape(4, 3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)

    def transform(old):
        w = old["w"]
        return {"row": w[2], "rows": w[1:3], "sum": w[0] + w[3], "two": [*w[:2]]}

    path = tmp_path / "w.safetensors"
    interop.to_safetensors(tmp_path / "ckpt", path, transform=transform)
    opened = interop.open_safetensors(path)
    found = {name: array for name, _, array in eqx_ckpt.inspect.iter_leaves(opened)}
    w = np.asarray(tree["w"])
    expected = {"row": w[2], "rows": w[1:3], "sum": w[0] + w[3]}
    expected |= {"two/0": w[0], "two/1": w[1]}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
