"""Ways out: read back by the libraries that define the formats."""

import errno
import functools
import json
import os
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


ARRAYS = {
    "model": {"layers": [{"w": jnp.arange(6.0).reshape(2, 3)}, {"w": jnp.ones(4)}]},
    "empty": jnp.zeros((0, 2)),
    "half": jnp.ones(3, jnp.float16),
    "mask": jnp.array([True, False]),
    "step": jnp.int32(3),
}
MIXED = {
    **ARRAYS,
    "numbers": {"a": True, "b": -3, "c": 2**40, "d": 2.5},
    "numpy": np.arange(3),
}


@pytest.fixture
def ckpt(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", ARRAYS)
    return tmp_path / "ckpt"


@pytest.fixture
def mixed(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "mixed", MIXED)
    return tmp_path / "mixed"


def test_safetensors(tmp_path, ckpt):
    library = pytest.importorskip("safetensors.numpy")
    path = interop.to_safetensors(ckpt, tmp_path / "a.safetensors")
    found = library.load_file(path)
    assert found["model.layers.0.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["step"].dtype == np.int32
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_safetensors(path), ARRAYS)
    assert_same(back, ARRAYS)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}, None])
def test_what_came_in_goes_out_under_the_same_names(tmp_path, metadata):
    library = pytest.importorskip("safetensors.numpy")
    names = ["a.0.w", "a.01.w", "b..c", "d/e", ".", "0"]
    tensors = {name: np.full(3, i, np.float32) for i, name in enumerate(names)}
    library.save_file(tensors, tmp_path / "a.safetensors", metadata)
    source = interop.open_safetensors(tmp_path / "a.safetensors")
    path = interop.to_safetensors(source, tmp_path / "b.safetensors", strict=True)
    found = library.load_file(path)
    assert {name: x.tolist() for name, x in found.items()} == {
        name: x.tolist() for name, x in tensors.items()
    }
    assert interop.open_safetensors(path).manifest.metadata == metadata


def test_safetensors_in_parts(tmp_path, ckpt):
    library = pytest.importorskip("safetensors.numpy")
    path = interop.to_safetensors(ckpt, tmp_path / "m.safetensors", max_shard_bytes=20)
    assert path.name == "m.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    assert len({*weight_map.values()}) == 3
    for name, file in weight_map.items():
        assert name in library.load_file(tmp_path / file)
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_safetensors(path), ARRAYS)
    assert_same(back, ARRAYS)


def test_metadata_of_several_files(tmp_path, ckpt):
    library = pytest.importorskip("safetensors.numpy")
    eqx_ckpt.tree_serialise_leaves(ckpt, ARRAYS, metadata={"a": "b"}, overwrite=True)
    options = {"max_shard_bytes": 20, "strict": True}
    path = interop.to_safetensors(ckpt, tmp_path / "a.safetensors", **options)
    source = interop.open_safetensors(path)
    assert source.manifest.metadata == {"a": "b"}
    again = interop.to_safetensors(source, tmp_path / "b.safetensors", **options)
    assert interop.open_safetensors(again).manifest.metadata == {"a": "b"}
    shard = tmp_path / "a-00001-of-00003.safetensors"
    library.save_file(library.load_file(shard), shard, {"a": "c"})
    metadata = interop.open_safetensors(path).manifest.metadata
    assert metadata == json.loads(path.read_text())["metadata"]


@pytest.mark.parametrize(("before", "after"), [(20, None), (None, 20), (20, 30)])
def test_files_of_another_number_are_not_left(tmp_path, ckpt, before, after):
    path = tmp_path / "out" / "m.safetensors"
    index = path.with_name("m.safetensors.index.json")
    interop.to_safetensors(ckpt, path, max_shard_bytes=before)
    other = path.with_name("m-00001-of-00009.safetensors")
    other.write_text("not of the index")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="overwrite=True"):
        interop.to_safetensors(ckpt, path, max_shard_bytes=after)
    new = {"w": jnp.ones(5), "x": jnp.ones(5)}
    eqx_ckpt.tree_serialise_leaves(ckpt, new, overwrite=True)
    interop.to_safetensors(ckpt, path, max_shard_bytes=after, overwrite=True)
    other.unlink()
    source = interop.open_safetensors(path if after is None else path.parent)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, new), new)
    if after is None:
        assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]
    else:
        shards = {*json.loads(index.read_text())["weight_map"].values()}
        assert {p.name for p in path.parent.iterdir()} == {index.name, *shards}


def test_a_broken_index_is_not_removed(tmp_path, ckpt):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match=index.name):
        interop.to_safetensors(ckpt, tmp_path / "m.safetensors", overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt", index.name}
    assert index.read_text() == "{"


def test_npz(tmp_path, ckpt):
    path = interop.to_npz(ckpt, tmp_path / "a.npz")
    with np.load(path) as found:
        assert found["model/layers/0/w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_npz(path), ARRAYS)
    assert_same(back, ARRAYS)


def test_eqx(tmp_path, mixed):
    path = interop.to_eqx(mixed, tmp_path / "a", MIXED)
    assert path.name == "a.eqx"
    assert_same(eqx.tree_deserialise_leaves(path, MIXED), MIXED)
    eqx.tree_serialise_leaves(tmp_path / "b.eqx", MIXED)
    assert path.read_bytes() == (tmp_path / "b.eqx").read_bytes()
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="numpy"):
        interop.to_eqx(mixed, tmp_path / "c", ARRAYS)


KINDS = {"jax": jnp.asarray, "numpy": np.asarray, "scalar": lambda array: array[1]}
NUMPYS = "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64".split()
WIDE = "int64 uint64 float64 complex128 >i8 >f4".split()
TIMES = ["M8[ns]", ">M8[D]", "m8[s]"]
OF_JAX = (
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn int2 int4 uint4".split()
)


@pytest.mark.parametrize(
    ("kind", "dtype", "is_read"),
    [
        *(("jax", dtype, True) for dtype in [*NUMPYS, "bfloat16"]),
        *(("jax", dtype, False) for dtype in OF_JAX),
        *(("numpy", dtype, True) for dtype in [*NUMPYS, *WIDE, *TIMES]),
        *(("numpy", dtype, False) for dtype in [*OF_JAX, "bfloat16"]),
        *(("scalar", dtype, True) for dtype in [*NUMPYS, *WIDE, "bfloat16"]),
        *(("scalar", dtype, False) for dtype in [*OF_JAX, *TIMES]),
    ],
)
def test_equinox_reads_what_is_written(tmp_path, kind, dtype, is_read):
    tree = {"x": KINDS[kind](np.arange(8).astype(dtype)), "y": 2**64 - 1}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    if not is_read:
        with pytest.raises(eqx_ckpt.CheckpointError, match=r"of 'x', the dtype `.*not"):
            interop.to_eqx(tmp_path / "ckpt", tmp_path / "a.eqx", tree)
        assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
        return
    path = interop.to_eqx(tmp_path / "ckpt", tmp_path / "a.eqx", tree, strict=True)
    skeleton = {**tree, "x": jax.ShapeDtypeStruct(tree["x"].shape, tree["x"].dtype)}
    for like in [tree, skeleton] if kind == "jax" else [tree]:
        assert_same(eqx.tree_deserialise_leaves(path, like), tree)
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_eqx(path, tree), tree)
    assert_same(back, tree)


def test_a_dtype_that_equinox_reads_as_jax_only(tmp_path):
    tree = {"x": jnp.ones(2, jnp.bfloat16)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    like = {"x": np.asarray(tree["x"])}
    with pytest.raises(eqx_ckpt.CheckpointError, match="`bfloat16`, which Equinox"):
        interop.to_eqx(tmp_path / "ckpt", tmp_path / "a.eqx", like)


def test_flax(tmp_path, mixed, monkeypatch):
    serialization = pytest.importorskip("flax.serialization")
    path = interop.to_flax(mixed, tmp_path / "a.msgpack")
    found = serialization.from_bytes(MIXED, path.read_bytes())
    assert found["numbers"] == MIXED["numbers"]
    arrays = jax.tree.map(jnp.asarray, {name: found[name] for name in ARRAYS})
    assert_same(arrays, {**ARRAYS, "step": jnp.asarray(ARRAYS["step"])})
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_flax(path), MIXED)
    assert_same(back, MIXED)


def test_flax_in_chunks(tmp_path, monkeypatch):
    serialization = pytest.importorskip("flax.serialization")
    from eqx_ckpt.interop._writers import _flax_writer as _to_flax

    monkeypatch.setattr(_to_flax, "CHUNK_BYTES", 100)
    tree = {"w": jnp.arange(99.0).reshape(9, 11)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    path = interop.to_flax(tmp_path / "ckpt", tmp_path / "a.msgpack")
    found = serialization.msgpack_restore(path.read_bytes())
    assert np.array_equal(found["w"], tree["w"])
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_flax(path), tree)
    assert_same(back, tree)


@pytest.mark.filterwarnings("default")
def test_orbax(tmp_path, mixed):
    ocp = pytest.importorskip("orbax.checkpoint")
    with pytest.raises(eqx_ckpt.CheckpointError, match="of 'empty', an array without"):
        interop.to_orbax(mixed, tmp_path / "a")
    tree = {name: leaf for name, leaf in MIXED.items() if name != "empty"}
    eqx_ckpt.tree_serialise_leaves(mixed, tree, overwrite=True)
    path = interop.to_orbax(mixed, tmp_path / "a")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path)
    assert found["model"]["layers"][0]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    back = eqx_ckpt.tree_deserialise_leaves(interop.open_orbax(path), tree)
    assert_same(back, tree)
    with pytest.raises(eqx_ckpt.CheckpointExistsError):
        interop.to_orbax(mixed, path)


class Watched(eqx_ckpt.interop.Source):
    """Arrays that are made when they are read, and the most that were alive at once."""

    def __init__(self, kinds):
        self._alive = []
        self.most = 0
        self._manifest = eqx_ckpt.inspect.Manifest(
            {
                f"w{i}": eqx_ckpt.inspect.LeafRecord.of_array(
                    (2**16,), np.float32, path=(("key", f"w{i}"),), kind=kind
                )
                for i, kind in enumerate(kinds)
            }
        )

    @property
    def manifest(self):
        return self._manifest

    def read(self, reads, damage, report=None):
        self._alive = [
            reference for reference in self._alive if reference() is not None
        ]
        # A view of memory that a reference can be made to.
        arrays = [np.frombuffer(bytearray(4 * 2**16), np.float32) for _ in reads]
        self._alive += [weakref.ref(array) for array in arrays]
        self.most = max(self.most, len(self._alive))
        return arrays

    def __str__(self):
        return "watched arrays"


@pytest.mark.filterwarnings("default")
def test_orbax_gets_a_leaf_at_a_time(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    source = Watched(["jax", "numpy"] * 10)
    interop.to_orbax(source, tmp_path / "out")
    assert 1 <= source.most <= 2


def folder(path):
    path.mkdir()
    (path / "text").write_text("mine")


def file(path):
    path.write_text("mine")


def link(path):
    path.symlink_to("elsewhere")


class Interrupted(Watched):
    """An array; something else appears at a path while it is read."""

    def __init__(self, appear, path):
        super().__init__(["jax"])
        self._appear = appear
        self._path = path

    def read(self, reads, damage, report=None):
        self._appear(self._path)
        self.inode = self._path.lstat().st_ino
        return super().read(reads, damage, report)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("appear", [folder, file, link])
def test_what_appears_during_a_write_of_orbax_stays(tmp_path, appear):
    pytest.importorskip("orbax.checkpoint")
    source = Interrupted(appear, tmp_path / "out")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="out' "):
        interop.to_orbax(source, tmp_path / "out")
    assert (tmp_path / "out").lstat().st_ino == source.inode
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


class Swept(Watched):
    """An array; a manager of the run starts while it is read."""

    def __init__(self, run):
        super().__init__(["jax"])
        self._run = run

    def read(self, reads, damage, report=None):
        assert eqx_ckpt.inspect.garbage_collect(self._run, dry_run=True) == {}
        eqx_ckpt.CheckpointManager(self._run)
        return super().read(reads, damage, report)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("write", [interop.to_npz, interop.to_orbax])
def test_a_write_into_a_run(tmp_path, write):
    """A manager removes what a killed one left, and nothing of a living one."""
    if write is interop.to_orbax:
        pytest.importorskip("orbax.checkpoint")
    left = tmp_path / f".out.npz.{'0' * 32}.tmp"
    left.write_bytes(bytes(7))
    assert eqx_ckpt.inspect.garbage_collect(tmp_path, dry_run=True) == {str(left): 7}
    eqx_ckpt.CheckpointManager(tmp_path)
    path = write(Swept(tmp_path), tmp_path / "out.npz")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.filterwarnings("default")
def test_orbax_replaces_its_own(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    from eqx_ckpt.interop._writers import _orbax_writer as _to_orbax

    def fail(*_):
        raise OSError("no exchange today")

    path = tmp_path / "out"
    interop.to_orbax(Watched(["jax"]), path)
    inode = path.lstat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(_to_orbax, "exchange", fail)
        with pytest.raises(OSError, match="no exchange today"):
            interop.to_orbax(Watched(["jax"]), path, overwrite=True)
    assert path.lstat().st_ino == inode
    interop.to_orbax(Watched(["jax"]), path, overwrite=True)
    assert interop.open_orbax(path).manifest.leaves["w0"].shape == (2**16,)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.filterwarnings("default")
def test_orbax_of_damaged_leaves(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    tree = {"a": jnp.ones(3), "key": jax.random.key(0), "n": np.arange(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    path = interop.to_orbax(tmp_path / "ckpt", tmp_path / "out")
    chunk = tmp_path / "ckpt" / "n" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'n'"):
        interop.to_orbax(tmp_path / "ckpt", path, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt", "out"}
    found = eqx_ckpt.tree_deserialise_leaves(
        interop.open_orbax(path), {"n": np.arange(3)}, unexpected="ignore"
    )
    assert_same(found, {"n": np.arange(3)})


@pytest.mark.filterwarnings("default")
def test_orbax_keeps_keys_and_the_type_of_arrays(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {
        "arrays": [jnp.ones((2, 3)), jnp.ones(3, jnp.bfloat16), np.arange(3)],
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2),
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    path = interop.to_orbax(tmp_path / "ckpt", tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(path), tree)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (
            {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}},
            r"of 'a/b', the key 'a\.b', which 'a\.b' has too",
        ),
        ({"a.b": 1, "a": {"b": 2}}, r"which 'a\.b' has too"),
        ({"x": jnp.ones(2, jnp.uint4)}, "of 'x', the dtype `uint4`"),
        ({"x": np.array("2026", "M8[D]")}, "of 'x', the dtype `datetime64"),
        ({"\ud800": jnp.ones(2)}, "of '%ED%A0%80', a key that is not Unicode"),
        ({"\ud800": 3}, "a key that is not Unicode"),
        ({}, "has no leaves"),
    ],
)
def test_what_orbax_cannot_hold(tmp_path, tree, problem):
    pytest.importorskip("orbax.checkpoint")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
        interop.to_orbax(tmp_path / "ckpt", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


WAYS_OUT = {
    "safetensors": interop.to_safetensors,
    "npz": interop.to_npz,
    "flax": interop.to_flax,
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_what_is_lost_is_listed_once(tmp_path, way):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "key": jax.random.key(0),
        "weak": jnp.asarray(1.0),
        "sharded": jax.device_put(jnp.zeros(8), sharding),
        "same": jnp.zeros(3),
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree, metadata=[1])
    path = tmp_path / "out"
    with pytest.raises(eqx_ckpt.CheckpointError, match="would lose") as e:
        WAYS_OUT[way](tmp_path / "ckpt", path, strict=True)
    assert not path.exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WAYS_OUT[way](tmp_path / "ckpt", path)
    (warning,) = caught
    for text in (str(e.value), str(warning.message)):
        assert "of 'key', that it is a PRNG key of 'threefry2x32'." in text
        assert "of 'weak', its weak type." in text
        assert "of 'sharded', its sharding." in text
        assert "of '@metadata', all of it." in text
        assert "'same'" not in text


def npz_with_bfloat16(path):
    np.savez(path / "a.npz", x=np.ones(2, jnp.bfloat16), y=np.ones(2, np.float32))
    return interop.open_npz(path / "a.npz")


def flax_with_text(path):
    serialization = pytest.importorskip("flax.serialization")
    tree = {"x": "text", "y": np.ones(2, np.float32)}
    (path / "a.msgpack").write_bytes(serialization.to_bytes(tree))
    return interop.open_flax(path / "a.msgpack")


def orbax_with_text(path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "a", {"x": "text", "y": jnp.ones(2)})
    return interop.open_orbax(path / "a")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "source_in", [npz_with_bfloat16, flax_with_text, orbax_with_text]
)
@pytest.mark.parametrize("way", [*WAYS_OUT, "copy"])
def test_what_a_source_could_not_read_is_listed(tmp_path, source_in, way):
    source, write = source_in(tmp_path), WAYS_OUT.get(way, eqx_ckpt.copy)
    before = {*tmp_path.iterdir()}
    lost = f"of 'x', all of it: {source.manifest.unsaved['x']}."
    with pytest.raises(eqx_ckpt.CheckpointError, match="would lose") as e:
        write(source, tmp_path / "out", strict=True)
    assert lost in str(e.value)
    assert {*tmp_path.iterdir()} == before
    with pytest.warns(UserWarning, match="does not keep") as caught:
        write(source, tmp_path / "out")
    assert [lost in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_what_was_never_saved_is_not_lost(tmp_path, way):
    tree = {"w": jnp.ones(2), "activation": jax.nn.relu, "name": "mlp"}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    for source in (tmp_path / "ckpt", interop.open_eqx(tmp_path / "a.eqx", tree)):
        WAYS_OUT[way](source, tmp_path / "out", strict=True, overwrite=True)


def nested(depth: int, leaf: object = 1) -> object:
    """Dictionaries in dictionaries, so many of them, around a leaf."""
    return functools.reduce(lambda tree, _: {"a": tree}, range(depth), leaf)


@pytest.mark.parametrize(
    ("way", "leaf", "problem"),
    [
        ("safetensors", jnp.ones(2, jnp.int4), "the dtype `int4`"),
        ("safetensors", 1j, "the dtype `complex128`"),
        ("safetensors", 2**63, "does not fit into its 64 bits"),
        ("npz", jnp.ones(2, jnp.bfloat16), "the dtype `bfloat16`"),
        ("npz", jnp.ones(2, jnp.float8_e5m2), "the dtype `float8_e5m2`"),
        ("npz", -(2**63) - 1, "does not fit into its 64 bits"),
        ("flax", np.array("2026", "M8[D]"), "the dtype `datetime64"),
        ("flax", 2**64, "does not fit into its 64 bits"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, way, leaf, problem):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {"x": leaf, "y": leaf})
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem) as e:
        WAYS_OUT[way](tmp_path / "ckpt", tmp_path / "out")
    assert "'x'" in str(e.value)
    assert "'y'" in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_the_deepest_leaf_of_flax(tmp_path, monkeypatch):
    """Also as an array that is cut into chunks."""
    monkeypatch.setattr("eqx_ckpt.interop._writers._flax_writer.CHUNK_BYTES", 16)
    tree = nested(198, jnp.arange(20))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    source = interop.open_flax(interop.to_flax(tmp_path / "ckpt", tmp_path / "a"))
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "deep", nested(900))
    with pytest.raises(eqx_ckpt.CheckpointError, match="900 keys, of which 198 can"):
        interop.to_flax(tmp_path / "deep", tmp_path / "b")


@pytest.mark.parametrize(
    ("way", "key", "problem"),
    [
        *((way, "a\ud800", "a key that is not Unicode") for way in WAYS_OUT),
        ("npz", "a\0b", "a key with a NUL"),
        ("npz", "é" * 32766, "longer than the 65535 bytes"),
    ],
)
def test_keys_that_a_format_cannot_hold(tmp_path, way, key, problem):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {key: jnp.ones(2), "a": 1})
    (name,) = eqx_ckpt.inspect.read_manifest(tmp_path / "ckpt").leaves.keys() - {"a"}
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem) as e:
        WAYS_OUT[way](tmp_path / "ckpt", tmp_path / "out")
    assert repr(name) in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_long_key_in_an_archive(tmp_path):
    key = "a" * (2**16 - 1 - len(".npy"))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {key: jnp.ones(2)})
    with np.load(interop.to_npz(tmp_path / "ckpt", tmp_path / "a.npz")) as found:
        assert found.files == [key]


def test_metadata_that_are_not_unicode(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", {}, metadata={"a": "\ud800"})
    with pytest.raises(eqx_ckpt.CheckpointError, match="of '@metadata', all of it"):
        interop.to_safetensors(tmp_path / "ckpt", tmp_path / "out", strict=True)


@pytest.mark.parametrize("most", [0, -1, True])
def test_a_size_of_shards_that_is_none(tmp_path, ckpt, most):
    error = TypeError if most is True else ValueError
    with pytest.raises(error, match=f"`max_shard_bytes` is {most!r}"):
        interop.to_safetensors(ckpt, tmp_path / "m", max_shard_bytes=most)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_what_exists_is_not_overwritten(tmp_path, ckpt, way):
    path = tmp_path / "out"
    path.write_text("mine")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="overwrite=True"):
        WAYS_OUT[way](ckpt, path)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="replaces only"):
        WAYS_OUT[way](ckpt, path, overwrite=True)
    assert path.read_text() == "mine"
    path.unlink()
    WAYS_OUT[way](ckpt, path)
    inode = path.stat().st_ino
    WAYS_OUT[way](ckpt, path, overwrite=True)
    assert path.stat().st_ino != inode
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt", "out"}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_failure_leaves_nothing(tmp_path, ckpt, way):
    (ckpt / "half" / "c.0").write_bytes(b"")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="half"):
        WAYS_OUT[way](ckpt, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_names_that_meet(tmp_path):
    tree = {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    with pytest.raises(eqx_ckpt.CheckpointError, match="would both be 'a.b'"):
        interop.to_safetensors(tmp_path / "ckpt", tmp_path / "out")


WAYS_TO_A_FILE = {
    **WAYS_OUT,
    "eqx": lambda source, path, **options: interop.to_eqx(
        source, path, ARRAYS, **options
    ),
}
WAYS_TO_A_DISK = {**WAYS_TO_A_FILE, "orbax": interop.to_orbax}


@pytest.mark.parametrize("way", WAYS_TO_A_DISK)
@pytest.mark.parametrize("url", ["s3://bucket/m", "gs://b/m", "file:///m", "s3:/b/m"])
def test_a_file_is_not_written_to_a_url(tmp_path, ckpt, monkeypatch, way, url):
    if way == "orbax":
        pytest.importorskip("orbax.checkpoint")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointError, match="local disks only") as e:
        WAYS_TO_A_DISK[way](ckpt, url)
    assert repr(url) in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_secret_in_a_url_is_not_shown(ckpt):
    with pytest.raises(eqx_ckpt.CheckpointError) as e:
        interop.to_npz(ckpt, eqx_ckpt.StorePath("s3://user:secret@bucket/m.npz"))
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("way", WAYS_TO_A_FILE)
def test_a_directory_is_not_replaced(tmp_path, ckpt, way):
    (tmp_path / "out.x").mkdir()
    for overwrite in (False, True):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="is a directory"):
            WAYS_TO_A_FILE[way](ckpt, tmp_path / "out.x", overwrite=overwrite)


@pytest.mark.parametrize("way", WAYS_TO_A_FILE)
def test_a_failure_leaves_no_folders(tmp_path, ckpt, way):
    (ckpt / "half" / "c.0").write_bytes(b"")
    (tmp_path / "old").mkdir()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="half"):
        WAYS_TO_A_FILE[way](ckpt, tmp_path / "old" / "new" / "deep" / "out")
    assert {p.name for p in tmp_path.rglob("*")} & {"old", "new", "deep"} == {"old"}


@pytest.mark.parametrize(
    "open_it",
    [
        interop.open_flax,
        lambda path: interop.open_eqx(path, ARRAYS),
    ],
)
def test_a_file_is_not_read_from_a_url(open_it):
    with pytest.raises(eqx_ckpt.CheckpointError, match="local disks only"):
        open_it("s3://bucket/model")


def test_a_file_system_without_links(tmp_path, ckpt, monkeypatch):
    """Such as FAT; what somebody else has put there meanwhile stays."""
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]

    def refuse(source, target):
        if target == str(files[1]):
            files[1].write_bytes(b"somebody else's")
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)

    monkeypatch.setattr(os, "link", refuse)
    interop.to_npz(ckpt, files[0])
    assert {*np.load(files[0])} == {*eqx_ckpt.inspect.read_manifest(ckpt).leaves}
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="exists already"):
        interop.to_npz(ckpt, files[1])
    assert files[1].read_bytes() == b"somebody else's"
    assert sorted(tmp_path.glob("*.npz")) == files
    assert not [*tmp_path.glob(".*")]
