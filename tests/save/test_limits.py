"""What no reader takes is not saved: each limit is found before a byte is written."""

import enum

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import manifest


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_TOKENS"])
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_manifest_that_would_be_too_large(tmp_path, monkeypatch, limit, layout):
    """It used to be committed, and `keep_last(1)` deleted the step that was intact."""
    monkeypatch.setattr(manifest, limit, 5000)
    history = [i + 0.1 for i in range(2000)]
    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(tmp_path, keep=keep, layout=layout) as manager:
        manager.save(1, {"history": history[:10]})
        manager.wait()
        with pytest.raises(eqx_ckpt.CheckpointError, match=r"too large.*np\.array"):
            manager.save(2, {"history": history})
        assert manager.steps() == [1]
        assert len(list(tmp_path.iterdir())) == 1
    eqx_ckpt.inspect.verify(tmp_path / "000001")


def test_a_manifest_that_would_be_too_large_with_its_checksums(tmp_path, monkeypatch):
    """That is known before anything is written."""
    monkeypatch.setattr(manifest, "MAX_BYTES", 5000)
    tree = [np.zeros(2) for _ in range(80)]
    with pytest.raises(eqx_ckpt.CheckpointError, match="too large"):
        eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", tree)
    assert not [*tmp_path.iterdir()]
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree[:40])


def test_metadata_fit_where_their_save_says_so():
    """The largest and the deepest that are accepted can be read."""
    deep: list = []
    for _ in range(63):
        deep = [deep]
    text = "x" * (2**24 - 4)
    for most, more in [(deep, [deep]), ([text], [text + "x"])]:
        args = ("memory://limits", 1)
        eqx_ckpt.tree_serialise_leaves(*args, metadata=most, overwrite=True)
        assert eqx_ckpt.inspect.read_manifest("memory://limits").metadata == most
        with pytest.raises(eqx_ckpt.CheckpointError, match="`metadata` cannot be"):
            eqx_ckpt.tree_serialise_leaves(*args, metadata=more, overwrite=True)


@pytest.mark.parametrize(
    "save",
    [
        eqx_ckpt.tree_serialise_leaves,
        eqx_ckpt.tree_serialise_leaves_async,
    ],
)
@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        (np.zeros((1,) * 33), "has 33 dimensions"),
        (np.zeros((0, 2**59)), "is too large"),
        (np.zeros((0, 2**40, 2**22), np.int8), "is too large"),
    ],
)
def test_an_array_that_no_reader_takes(tmp_path, save, leaf, problem):
    tree = {"good": 1, "layer": [leaf]}
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"'layer/0' {problem}"):
        save(tmp_path / "new", tree)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("axis", [1.5, True, enum.Enum("Axis", "ROWS").ROWS])
def test_a_mesh_with_axes_that_no_reader_takes(axis):
    mesh = Mesh(np.array(jax.devices()[:2]), (axis,))
    leaf = jax.device_put(jnp.ones(4), NamedSharding(mesh, P(axis)))
    with pytest.raises(eqx_ckpt.CheckpointError, match="'w' is on a mesh with the"):
        eqx_ckpt.tree_serialise_leaves("memory://limits", {"w": leaf}, overwrite=True)


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("mine", 2, "has keys of `PRNGSpec.'mine'.`, .* save `jax.random.key_data`"),
        ("rbg", 3, "has the shape of a different PRNG implementation"),
    ],
)
def test_keys_that_no_reader_takes(name, size, problem):
    def zeros(*shape):
        return jnp.zeros((*shape, size), jnp.uint32)

    impl = define_prng_impl(
        key_shape=(size,),
        seed=lambda seed: zeros(),
        split=lambda key, shape: zeros(*shape),
        random_bits=lambda key, width, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
        name=name,
        tag="fry",
    )
    key = jax.random.key(0, impl=impl)
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"'k' {problem}"):
        eqx_ckpt.tree_serialise_leaves("memory://limits", {"k": key}, overwrite=True)


def test_keys_have_more_dimensions_as_they_are_stored():
    keys = jax.random.split(jax.random.key(0), 1).reshape((1,) * 32)
    with pytest.raises(eqx_ckpt.CheckpointError, match="has 33 dimensions as it is st"):
        eqx_ckpt.tree_serialise_leaves("memory://limits", keys, overwrite=True)


@pytest.mark.parametrize("shape", [(1,) * 32, (0, 2**55), (2, 1) * 8])
def test_an_array_that_readers_just_take(tmp_path, shape):
    tree = np.zeros(shape, np.int8)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree)
    assert restored.shape == shape


@pytest.mark.parametrize("key", ["é" * 300, "\ud83d\ude00" * 50, "x" * 201])
def test_a_key_of_which_the_name_is_cut(key):
    """Its path is in the manifest as a text that JSON does not change."""
    tree = {"a": [{key: {"b": 5}}]}
    eqx_ckpt.tree_serialise_leaves("memory://cut", tree, overwrite=True)
    (record,) = eqx_ckpt.inspect.read_manifest("memory://cut").leaves.values()
    assert record.path == (("key", "a"), ("index", 0), ("key", key), ("key", "b"))
    assert eqx_ckpt.tree_deserialise_leaves("memory://cut", tree) == tree


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.mean([0.25, 0.5]), 0.375),
        (jnp.float32(0.5), 0.5),
        (jnp.bfloat16(0.5), 0.5),
        (np.int64(2**60), 2**60),
        (np.uint8(7), 7),
        (jnp.int32(-1), -1),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (np.longdouble(0.5), 0.5),
        (np.float32("inf"), float("inf")),
        (jnp.float32("nan"), float("nan")),
    ],
)
def test_scalars_of_arrays_as_metadata(scalar, expected):
    eqx_ckpt.tree_serialise_leaves(
        "memory://metadata", 1, metadata={"loss": [scalar]}, overwrite=True
    )
    (found,) = eqx_ckpt.inspect.read_manifest("memory://metadata").metadata["loss"]
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros(2), r"`ndarray` of dtype float64 and shape \(2,\)"),
        (np.complex64(1), "`complex64`"),
        (np.datetime64("2026-11-20"), "`datetime64`"),
        (np.longdouble(1) / 3, "`longdouble`"),
        (jax.random.key(0), "of dtype key<fry>"),
        (Colour.RED, "`Colour`"),
        ((1, 2), "`tuple`"),
        ({1: 2}, "has the key 1, which is not a string"),
        ({"@float": 2}, "the key '@float', which is reserved"),
        ([10**5000], "more than 4,000 digits"),
        (eqx.nn.Identity(), "`Identity`"),
    ],
)
def test_metadata_that_are_refused_by_key_and_type(value, problem):
    with pytest.raises(eqx_ckpt.CheckpointError, match="cannot be saved") as error:
        eqx_ckpt.tree_serialise_leaves("memory://no", 1, metadata={"a": [0, value]})
    assert error.match(r"`metadata\['a'\]\[1\](\[0\])?` .*" + problem)


def nested(levels: int):
    tree = 1.5 * np.ones(2)
    for i in range(levels):
        tree = {f"a_name_of_17_{i:04d}": tree}
    return tree


@pytest.mark.parametrize(
    "save",
    [
        eqx_ckpt.tree_serialise_leaves,
        eqx_ckpt.tree_serialise_leaves_async,
    ],
)
def test_a_name_that_is_too_long_for_a_path(tmp_path, save):
    with pytest.raises(eqx_ckpt.LeafNameError, match="layout='ocdbt'") as error:
        save(tmp_path / "new", nested(300))
    assert len(str(error.value)) < 500
    assert list(tmp_path.iterdir()) == []


def test_names_of_any_length_in_a_database(tmp_path):
    tree = nested(300)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, layout="ocdbt")
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree)
    assert jax.tree.leaves(restored)[0].tolist() == [1.5, 1.5]


def test_a_path_that_is_just_short_enough(tmp_path):
    """What is not refused can be written."""
    levels = (4095 - 80 - len(str(tmp_path))) // 18
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", nested(levels))
    eqx_ckpt.inspect.verify(tmp_path / "new")
    with pytest.raises(eqx_ckpt.LeafNameError, match="nest the PyTree less"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "other", nested(levels + 2))


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_the_name_of_a_directory_that_is_too_long(tmp_path, layout):
    eqx_ckpt.tree_serialise_leaves(tmp_path / ("x" * 216), 5, layout=layout)
    with pytest.raises(eqx_ckpt.CheckpointError, match="has 217 bytes"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / ("x" * 217), 5, layout=layout)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["x" * 256, "\u4e2d" * 86 + "/1"])
def test_the_name_of_a_directory_that_no_file_system_takes(tmp_path, name):
    """Not only in saves: an `OSError` says nothing of the limit."""
    path = tmp_path / name
    for use in (
        lambda: eqx_ckpt.tree_serialise_leaves(path, 5),
        lambda: eqx_ckpt.tree_deserialise_leaves(path, 5),
        lambda: eqx_ckpt.inspect.verify(path),
        lambda: eqx_ckpt.CheckpointManager(path),
    ):
        with pytest.raises(
            eqx_ckpt.CheckpointError, match="bytes, and file systems take 255"
        ):
            use()


@pytest.mark.parametrize("digits", [19, 300])
def test_a_step_of_too_many_digits(tmp_path, digits):
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="is not a step"):
            manager.save(10**digits, {"a": 1})
        (tmp_path / ("9" * 200)).mkdir()
        assert manager.steps() == []


def test_steps_that_are_numpy_integers(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(np.int64(3), {"a": 1}).result()
        assert manager.latest() == 3
        assert manager.restore({"a": 0}, step=np.int32(3)) == {"a": 1}
        with pytest.raises(ValueError, match="is not a step"):
            manager.save(np.int64(-1), {"a": 1})


def test_a_long_list_of_numbers_is_warned_of():
    tree = {"w": np.ones(2), "history": [i + 0.1 for i in range(10_001)]}
    with pytest.warns(UserWarning, match=r"'history' has 10001 .*np\.array"):
        eqx_ckpt.tree_serialise_leaves("memory://history", tree)
    like = {"w": np.zeros(2), "history": [0.0] * 10_001}
    assert (
        eqx_ckpt.tree_deserialise_leaves("memory://history", like)["history"]
        == (tree["history"])
    )
