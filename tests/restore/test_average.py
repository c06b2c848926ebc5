"""The average of checkpoints: what it refuses, reads and keeps in memory."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


def save(path, tree, **how):
    eqx_ckpt.tree_serialise_leaves(path, tree, **how)
    return path


def tree_of(value, n=3):
    return {"w": jnp.full((4, n), value, jnp.bfloat16), "count": jnp.array(value, int)}


def test_the_last_steps_of_a_run(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 7):
            manager.save(step, tree_of(float(step)), metadata={"loss": step})
        manager.wait()
        source = eqx_ckpt.average([manager.path(s) for s in manager.steps()[-5:]])
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
            manager.path(9)
    assert source.manifest.metadata is None
    assert source.has_checksums
    like = jax.eval_shape(lambda: tree_of(0.0))
    found = eqx_ckpt.tree_deserialise_leaves(source, like)
    assert_same(found, {"w": tree_of(4.0)["w"], "count": jnp.array(2.0, int)})
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P("x"))
    spread = eqx_ckpt.tree_deserialise_leaves(
        source,
        {"w": like["w"]},
        sharding=rows,
        transform=lambda old: {"w": old["w"] * 2},
        casting="safe",
    )
    assert spread["w"].sharding == rows
    assert (jax.device_get(spread["w"]) == 8).all()
    eqx_ckpt.copy(source, tmp_path / "copy", layout="ocdbt")
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", like), found)
    interop.to_safetensors(source, tmp_path / "mean.safetensors")
    file = interop.open_safetensors(tmp_path / "mean.safetensors")
    assert_same(eqx_ckpt.tree_deserialise_leaves(file, like), found)
    assert eqx_ckpt.inspect.diff(source, file, values=True) == {}
    # A file of another format is as good as a checkpoint.
    both = eqx_ckpt.average([file, tmp_path / "run" / "000006"], [3.0, 1.0])
    assert (eqx_ckpt.tree_deserialise_leaves(both, like)["w"] == 4.5).all()


def test_trees_that_differ_are_one_error(tmp_path):
    a = save(tmp_path / "a", tree_of(1.0) | {"old": 1, "same": 2})
    b = save(tmp_path / "b", tree_of(1.0, 5) | {"new": jnp.ones(2), "same": 2})
    c = save(tmp_path / "c", {"w": jnp.ones((4, 3)), "same": 2.0})
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.average([a, b, c])
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:-1]] == [
        *("- 'old'", "- 'w'", "- 'new'"),
        *("- 'count'", "- 'old'", "- 'same'", "- 'w'"),
    ]
    assert f"- 'w': bfloat16[4, 3] in '{a}', bfloat16[4, 5] in '{b}'." in str(
        error.value
    )
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.average([a, tmp_path / "nothing"])


def test_a_part_that_is_the_same(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for x, path in enumerate(paths):
        tree = {"model": {"w": jnp.full(2, float(x))}, "log": [0] * x, "models": x}
        eqx_ckpt.tree_serialise_leaves(path, tree)
    mean = eqx_ckpt.average(paths, prefix="/model/")
    assert [*mean.manifest.leaves] == ["model/w"]
    like = {"w": jnp.zeros(2)}
    found = eqx_ckpt.tree_deserialise_leaves(mean, like, prefix="model")
    assert found["w"].tolist() == [0.5, 0.5]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="pass the name as `prefix`"):
        eqx_ckpt.average(paths)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="has no leaf of that name"):
        eqx_ckpt.average(paths, prefix="none")


def test_damage_says_where(tmp_path):
    paths = [save(tmp_path / str(i), tree_of(float(i))) for i in range(3)]
    source = eqx_ckpt.average(paths)
    chunk = tmp_path / "1" / "w" / "c.0.0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=r"'w': .*, in '.*/1'\."):
        eqx_ckpt.tree_deserialise_leaves(source, tree_of(0.0))
    (tmp_path / "1").rename(tmp_path / "gone")
    with pytest.raises(eqx_ckpt.CheckpointError, match="replaced or removed"):
        eqx_ckpt.inspect.stats(source)


def test_a_few_chunks_are_in_memory(tmp_path):
    """Of sources of 128 MiB each."""
    target = np.zeros((2**21, 16), np.float32)
    size = target.nbytes
    paths = [save(tmp_path / str(i), {"w": np.full_like(target, i)}) for i in (0, 1)]
    source = eqx_ckpt.average([*paths, *paths])
    record = source.manifest.leaves["w"]
    read = interop.RegionRead("w", record, tuple(slice(0, n) for n in record.shape))
    tracemalloc.start()
    try:
        source.read_into([read], [target], {})
        assert tracemalloc.get_traced_memory()[1] < size * 3 / 4
    finally:
        tracemalloc.stop()
    assert (target == 0.5).all()


@pytest.mark.parametrize("weights", [[1e308, 1e308], [1e-320, 1e-320]])
def test_weights_of_any_size(tmp_path, weights):
    paths = [save(tmp_path / str(i), {"w": np.full(2, 2.0 * i)}) for i in (0, 1)]
    assert eqx_ckpt.load(eqx_ckpt.average(paths, weights), "w").tolist() == [1, 1]


def test_weights_that_numpy_has_computed(tmp_path, unchecked):
    paths = [save(tmp_path / str(i), {"w": np.full(2, 4.0 * i)}) for i in (0, 1)]
    source = eqx_ckpt.average(paths, np.array([1.0, 3.0]))
    assert eqx_ckpt.load(source, "w").tolist() == [3, 3]
    for wrong in ({1: 2, 3: 4}, np.float32(1), {1, 3}):
        with pytest.raises(TypeError, match="`weights`"):
            unchecked.average(paths, wrong)
    with pytest.raises(ValueError, match="`weights`"):
        unchecked.average(paths, [10**400, 1])


# As stored: -0.0, NaNs with a payload, quiet and signalling, infinities, subnormals.
_ODD = {
    "float32": [0x80000000, 0x7FC12345, 0x7F812345, 0xFF800000, 1, 0x3F800000],
    "float16": [0x8000, 0x7E01, 0x7C01, 0xFC00, 1, 0x3C00],
    "bfloat16": [0x8000, 0x7FC1, 0x7F81, 0xFF80, 1, 0x3F80],
    "float8_e4m3fn": [0x80, 0x7F, 0xFF, 0x01, 0x38, 0xB8],
}


def bits(array):
    array = np.ascontiguousarray(jax.device_get(array))
    return array.view(np.uint8).reshape(*array.shape, array.itemsize)


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 3.0]])
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_equal_elements_keep_their_bits(tmp_path, layout, weights):
    rng = np.random.default_rng(0)
    first, frozen = {}, {}
    for name, odd in _ODD.items():
        dtype = jnp.dtype(name)
        stored = rng.choice(np.array(odd, f"u{dtype.itemsize}"), (8, 6))
        first[name], frozen[name] = stored.view(dtype), rng.random((8, 6)) < 0.7
    pairs = np.stack([first["float32"]] * 2, -1)
    first["complex64"] = pairs.view(np.complex64)[..., 0]
    frozen["complex64"] = frozen["float32"]
    paths = []
    for i in range(3):
        tree = {
            name: np.where(frozen[name], array, np.asarray(i, array.dtype))
            for name, array in first.items()
        }
        paths.append(save(tmp_path / str(i), tree, layout=layout))
    source = eqx_ckpt.average(paths, weights)
    like = jax.eval_shape(lambda: first)
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8])
    eqx_ckpt.copy(source, tmp_path / "copy")
    found = [
        eqx_ckpt.tree_deserialise_leaves(source, like),
        eqx_ckpt.tree_deserialise_leaves(
            source, like, sharding=NamedSharding(mesh, P("x", "y"))
        ),
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", like),
        eqx_ckpt.tree_deserialise_leaves(eqx_ckpt.average([source]), like),
    ]
    for tree in found:
        for name, array in first.items():
            same = frozen[name]
            assert (bits(tree[name])[same] == bits(array)[same]).all(), name
            assert (bits(tree[name]) == bits(found[0][name])).all(), name
