"""Leaves that are no checkpoint of ours, and going through leaves one by one."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


class InMemory(eqx_ckpt.interop.Source):
    """Arrays of a dictionary; `bad` are damaged, `cut` ones are too short."""

    def __init__(self, arrays, bad=(), cut=()):
        self.arrays, self.bad, self.cut = arrays, bad, cut
        self.nbytes = 0

    @property
    def manifest(self):
        return eqx_ckpt.inspect.Manifest(
            {
                name: eqx_ckpt.inspect.LeafRecord.of_array(
                    array.shape,
                    array.dtype,
                    path=[("key", key) for key in name.split("/")],
                )
                for name, array in self.arrays.items()
            }
        )

    def read(self, reads, damage, report=None):
        damage |= {r.name: "it is gone" for r in reads if r.name in self.bad}
        self.nbytes += sum(read.nbytes for read in reads)
        for read in reads:
            assert read.shape == self.arrays[read.name][read.region].shape
            if report:
                report(read.name, read.nbytes)
        arrays = [self.arrays[r.name][r.region].copy() for r in reads]
        return [
            array[1:] if read.name in self.cut else array
            for read, array in zip(reads, arrays, strict=True)
        ]

    def __str__(self):
        return "the dictionary"


ARRAYS = {
    "model/w": np.arange(32, dtype=np.float32).reshape(8, 4),
    "model/b": np.arange(8, dtype=jnp.bfloat16),
    "step": np.array(7, np.int32),
}


def test_a_source_of_ones_own():
    source = InMemory(ARRAYS)
    like = eqx_ckpt.tree_like(source)
    assert like["model"]["w"] == jax.ShapeDtypeStruct((8, 4), np.float32)
    assert eqx_ckpt.tree_match(source, like).nbytes == 32 * 4 + 16 + 4
    told = []
    tree = eqx_ckpt.tree_deserialise_leaves(
        source, like, progress=lambda *args: told.append(args)
    )
    for name, array in ARRAYS.items():
        *above, key = name.split("/")
        leaf = tree[above[0]][key] if above else tree[key]
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == array.dtype
        assert (np.asarray(leaf) == array).all()
    assert told[-1][2:] == (148, 148)
    eqx_ckpt.inspect.verify(source)
    assert eqx_ckpt.inspect.read_manifest(source).nbytes == 148


def test_a_part_of_a_source_is_read_alone():
    source = InMemory(ARRAYS)
    like = eqx_ckpt.tree_like(source, prefix="model")
    part = eqx_ckpt.tree_deserialise_leaves(
        source, like, prefix="model", where=lambda model: model["b"]
    )
    assert isinstance(part["w"], jax.ShapeDtypeStruct)
    assert source.nbytes == 16


def test_a_source_is_read_by_regions():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    source = InMemory({"w": ARRAYS["model/w"]})
    like = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)}
    w = eqx_ckpt.tree_deserialise_leaves(source, like)["w"]
    assert w.sharding == sharding
    assert (np.asarray(w) == ARRAYS["model/w"]).all()
    assert source.nbytes == 128


def test_what_is_wrong_with_a_source():
    like = eqx_ckpt.tree_like(InMemory(ARRAYS))
    source = InMemory(ARRAYS, bad=["model/w"])
    for read in (
        lambda: eqx_ckpt.tree_deserialise_leaves(source, like),
        lambda: eqx_ckpt.inspect.verify(source),
        lambda: list(eqx_ckpt.inspect.iter_leaves(source)),
    ):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError) as error:
            read()
        assert "the dictionary is damaged" in str(error.value)
        assert "'model/w': it is gone." in str(error.value)
    source = InMemory(ARRAYS, cut=["model/b"])
    for read in (
        lambda: eqx_ckpt.tree_deserialise_leaves(source, like),
        lambda: eqx_ckpt.inspect.verify(source),
        lambda: eqx_ckpt.inspect.stats(source),
        lambda: eqx_ckpt.inspect.digest(source),
        lambda: eqx_ckpt.inspect.diff(source, InMemory(ARRAYS), values=True),
    ):
        with pytest.raises(
            eqx_ckpt.CheckpointError, match=r"leaf 'model/b' that is bfloat"
        ):
            read()
    for dtype, problem in {
        "U3": "cannot be stored exactly",
        ">f4": "pass `kind=",
    }.items():
        with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
            eqx_ckpt.inspect.LeafRecord.of_array((2,), dtype, path=())


def test_the_byte_order_of_a_source(monkeypatch):
    source = InMemory({"w": np.ones(3, np.float32)})
    monkeypatch.setattr(source, "read", lambda *_: [np.ones(3, ">f4")])
    with pytest.raises(eqx_ckpt.CheckpointError, match=r"returned >f4\[3\] for .*'w'"):
        eqx_ckpt.tree_deserialise_leaves(source, {"w": jnp.zeros(3)})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("layer 1", "'layer 1': its `path` has the name 'layer%201'"),
        ("../other/w", "'../other/w': its `path` has the name '%2E%2E/other/w'"),
        ("a//b", "'a/@empty/b'"),
        ("", "'@empty'"),
        ("CON", "'%43ON'"),
        ("model", "'model': another leaf is inside it"),
    ],
)
def test_names_that_no_checkpoint_can_have(tmp_path, name, problem):
    """A copy of such a source would be a checkpoint that nobody can read."""
    source = InMemory(ARRAYS | {name: np.ones(2)})
    eqx_ckpt.tree_serialise_leaves(tmp_path / "good", {"w": jnp.ones(3)})
    for read in (
        lambda: eqx_ckpt.tree_like(source),
        lambda: eqx_ckpt.inspect.verify(source),
        lambda: eqx_ckpt.copy(source, tmp_path / "good", overwrite=True),
    ):
        with pytest.raises(eqx_ckpt.CheckpointError) as error:
            read()
        assert "the dictionary lists leaves that no checkpoint" in str(error.value)
        assert problem in str(error.value)
    assert [*eqx_ckpt.inspect.iter_leaves(tmp_path / "good")][0][0] == "w"


@pytest.mark.parametrize(
    ("leaves", "problem"),
    [
        ({"n": {"kind": "int", "value": "5\n"}}, "is not the text of a Python int"),
        ({"n": {"kind": "float", "value": "Infinity"}}, "is not the text of"),
        ({"n": {"value": '"'}}, "an array, and has a `value`"),
        ({"n": {"kind": "bytes"}}, "is not the bytes of"),
        ({"n": {"kind": "numpy_scalar"}}, "is a scalar, and has a shape"),
        ({"n": {"shape": (np.int64(3),)}}, "sizes that are not each an `int`"),
        ({"n": {"sharding": {"axis_names": ["x"]}}}, "a `sharding` that no array"),
    ],
)
def test_leaves_that_no_checkpoint_can_have(leaves, problem, monkeypatch):
    source = InMemory({name: np.ones(3, np.float32) for name in leaves})
    found = dict(source.manifest.leaves)
    found |= {name: found[name]._replace(**leaf) for name, leaf in leaves.items()}
    monkeypatch.setattr(InMemory, "manifest", eqx_ckpt.inspect.Manifest(found))
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
        eqx_ckpt.copy(source, "memory://of_no_leaf")


@pytest.mark.parametrize("unsaved", [{'\xe9"': "text"}, {"f": 3}])
def test_what_no_checkpoint_can_leave_out(unsaved, monkeypatch):
    manifest = eqx_ckpt.inspect.Manifest({}, unsaved)
    monkeypatch.setattr(InMemory, "manifest", manifest)
    with pytest.raises(eqx_ckpt.CheckpointError, match="what `unsaved` has is not"):
        eqx_ckpt.copy(InMemory({}), "memory://of_no_leaf")


def test_the_shape_of_a_record():
    of_array = eqx_ckpt.inspect.LeafRecord.of_array
    record = of_array((np.int64(3), jnp.int32(2)), np.float32, path=[("key", "w")])
    assert [*map(type, record.shape)] == [int, int]
    for shape, error in (((-3,), ValueError), ((3.0,), TypeError)):
        with pytest.raises(error, match="`shape` is"):
            of_array(shape, np.float32, path=[("key", "w")])


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_leaves_one_by_one(tmp_path, layout, is_in_memory):
    path = f"memory://leaves-{layout}" if is_in_memory else tmp_path / "ckpt"
    key = jax.random.key(3)
    tree = {
        "model": {"w": jnp.arange(6.0, dtype=jnp.bfloat16), "p": 0.5},
        "key": key,
        "host": np.arange(3),
        "flags": np.array([True, False]),
        "none": None,
    }
    eqx_ckpt.tree_serialise_leaves(path, tree, layout=layout)
    found = {name: (r, x) for name, r, x in eqx_ckpt.inspect.iter_leaves(path)}
    assert found.keys() == eqx_ckpt.inspect.read_manifest(path).leaves.keys()
    record, w = found["model/w"]
    assert str(record) == "bfloat16[6]"
    assert type(w) is np.ndarray
    assert w.dtype == jnp.bfloat16
    assert (w == np.arange(6)).all()
    assert found["model/p"][1] == 0.5
    assert (found["key"][1] == np.asarray(jax.random.key_data(key))).all()
    assert found["host"][1].dtype == np.int64
    assert found["flags"][1].tolist() == [True, False]
    names = [name for name, _, _ in eqx_ckpt.inspect.iter_leaves(path, "model")]
    assert sorted(names) == ["model/p", "model/w"]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="Did you mean 'model'"):
        eqx_ckpt.inspect.iter_leaves(path, prefix="modle")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.inspect.iter_leaves(f"{path}-not-there")


def test_one_leaf_is_in_memory_at_a_time(tmp_path):
    size = 40 * 2**20  # More than is read at a time.
    tree = {name: np.zeros(size, np.uint8) for name in "abc"}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    alive: list[weakref.ref[np.ndarray]] = []
    for _, _, array in eqx_ckpt.inspect.iter_leaves(tmp_path / "c"):
        alive.append(weakref.ref(array))
        gc.collect()
        assert len([ref for ref in alive if ref() is not None]) == 1
        del array
    assert len(alive) == 3


def test_leaves_before_a_damaged_one_are_given(tmp_path):
    tree = {"a": np.zeros(2**25, np.uint8), "b": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    (tmp_path / "c/b/c.0").unlink()
    leaves = eqx_ckpt.inspect.iter_leaves(tmp_path / "c")
    assert next(leaves)[0] == "a"
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'b'"):
        next(leaves)


def test_leaves_of_two_versions_are_not_mixed(tmp_path):
    tree = {"a": np.zeros(2**25, np.uint8), "b": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    leaves = eqx_ckpt.inspect.iter_leaves(tmp_path / "c")
    assert next(leaves)[0] == "a"
    other = {"a": tree["a"], "b": jnp.zeros(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", other, overwrite=True)
    with pytest.raises(eqx_ckpt.CheckpointError, match="was replaced") as error:
        next(leaves)
    assert not isinstance(error.value, eqx_ckpt.CorruptCheckpointError)
