"""Files of safetensors, by the real library, by hand, and broken ones."""

import json
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


numpy_files = pytest.importorskip("safetensors.numpy")

BY_HAND = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(path, header, data=b"", length=None):
    """A file by hand; the header may be anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "model.layers.0.weight": rng.normal(size=(6, 4)).astype(np.float32),
        "model.layers.1.weight": rng.normal(size=(6, 4)).astype(np.float32),
        "model.norm": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "half": rng.normal(size=(2, 0, 3)).astype(np.float16),
        "mask": np.array([True, False]),
        "step": np.array(7, np.int32),
        "wide": rng.normal(size=3),
    }


LIKE = {
    "model": {
        "layers": [{"weight": jnp.zeros((6, 4))}, {"weight": jnp.zeros((6, 4))}],
        "norm": jnp.zeros(4, jnp.bfloat16),
    },
    "half": jnp.zeros((2, 0, 3), jnp.float16),
    "mask": jnp.zeros(2, bool),
    "step": jnp.zeros((), jnp.int32),
    "wide": np.zeros(3),
}


def as_tree(t):
    tree = {
        "model": {
            "layers": [{"weight": t[f"model.layers.{i}.weight"]} for i in (0, 1)],
            "norm": t["model.norm"],
        },
        **{name: t[name] for name in ("half", "mask", "step")},
    }
    return {**jax.tree.map(jnp.asarray, tree), "wide": t["wide"]}


def test_what_the_library_wrote(tmp_path, tensors):
    numpy_files.save_file(tensors, tmp_path / "a.safetensors", {"format": "np"})
    source = interop.open_safetensors(tmp_path / "a.safetensors")
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, LIKE), as_tree(tensors))
    assert eqx_ckpt.inspect.read_manifest(source).metadata == {"format": "np"}
    assert str(source) == repr(str(tmp_path / "a.safetensors"))
    part = eqx_ckpt.tree_deserialise_leaves(
        source, LIKE["model"]["layers"][1], prefix="model/layers/1"
    )
    assert np.array_equal(part["weight"], tensors["model.layers.1.weight"])


def test_the_structure_without_code(tmp_path, tensors):
    numpy_files.save_file(tensors, tmp_path / "a.safetensors")
    source = interop.open_safetensors(tmp_path / "a.safetensors")
    like = eqx_ckpt.tree_like(source)
    assert like["model"]["layers"][1]["weight"].shape == (6, 4)
    found = eqx_ckpt.tree_deserialise_leaves(source, like)
    # JAX would narrow it.
    assert isinstance(found["wide"], np.ndarray)
    assert found["wide"].dtype == np.float64
    eqx_ckpt.inspect.verify(source)


def test_a_leaf_that_is_not_there(tmp_path, tensors):
    numpy_files.save_file(tensors, tmp_path / "a.safetensors")
    source = interop.open_safetensors(tmp_path / "a.safetensors")
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="bias"):
        eqx_ckpt.tree_deserialise_leaves(source, {**LIKE, "bias": jnp.zeros(3)})


@pytest.mark.parametrize("tag", BY_HAND)
def test_dtypes_of_eight_bits(tmp_path, tag):
    header = {"x": entry(tag, (256,), (0, 256))}
    path = write(tmp_path / "x.safetensors", header, bytes(range(256)))
    like = {"x": jax.ShapeDtypeStruct((256,), BY_HAND[tag])}
    found = eqx_ckpt.tree_deserialise_leaves(interop.open_safetensors(path), like)
    assert np.asarray(found["x"]).view(np.uint8).tolist() == list(range(256))


def test_packed_dtypes_are_listed_and_not_guessed(tmp_path):
    header = {"x": entry("F4", (4,), (0, 2)), "y": entry("U8", (2,), (2, 4))}
    path = write(tmp_path / "x.safetensors", header, b"abcd")
    source = interop.open_safetensors(path)
    like = {"y": jnp.zeros(2, jnp.uint8)}
    assert eqx_ckpt.tree_deserialise_leaves(source, like)["y"].tolist() == [99, 100]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=r"F4\[4\] of safetensors"):
        eqx_ckpt.tree_deserialise_leaves(source, {**like, "x": jnp.zeros(4)})


def test_digits_are_positions_only_as_people_write_them(tmp_path):
    names = ["a.0", "a.01", "a.-1", "b..c", "d.١"]
    data = bytes(len(names))
    header = {name: entry("U8", (1,), (i, i + 1)) for i, name in enumerate(names)}
    source = interop.open_safetensors(write(tmp_path / "x.safetensors", header, data))
    keys = {tuple(k for _, k in r.path) for r in source.manifest.leaves.values()}
    expected = {("a", 0), ("a", "01"), ("a", "-1"), ("b", "", "c"), ("d", "١")}
    assert keys == expected


def split(tensors, folder):
    """Two files and their index, as Hugging Face has them."""
    names = list(tensors)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, inside in files.items():
        numpy_files.save_file({n: tensors[n] for n in inside}, folder / file)
    weight_map = {name: file for file, inside in files.items() for name in inside}
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return index


@pytest.mark.parametrize("name", [".", "model.safetensors.index.json"])
def test_an_index(tmp_path, tensors, name):
    split(tensors, tmp_path)
    source = interop.open_safetensors(tmp_path / name)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, LIKE), as_tree(tensors))
    assert source.manifest.metadata == {"total_size": 1}


def test_a_file_beside_its_index(tmp_path, tensors):
    split(tensors, tmp_path)
    numpy_files.save_file(tensors, tmp_path / "consolidated.safetensors")
    assert interop.open_safetensors(tmp_path).manifest.metadata == {"total_size": 1}
    numpy_files.save_file({"old": tensors["half"]}, tmp_path / "model.safetensors")
    both = "'model.safetensors.index.json', 'model.safetensors': pass one of them"
    with pytest.raises(eqx_ckpt.CheckpointError, match=both):
        interop.open_safetensors(tmp_path)


def test_a_directory_with_one_file(tmp_path, tensors):
    numpy_files.save_file(tensors, tmp_path / "a.safetensors")
    source = interop.open_safetensors(tmp_path)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, LIKE), as_tree(tensors))
    numpy_files.save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(eqx_ckpt.CheckpointError, match="'a.safetensors', 'b.safe"):
        interop.open_safetensors(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="no safetensors file"):
        interop.open_safetensors(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.update(x="../model-1.safetensors"), "'x' is in '../model-1"),
        (lambda w: w.update(x="/etc/passwd"), "'x' is in '/etc/passwd'"),
        (lambda w: w.update(x=3), "'x' is in '3'"),
        (lambda w: w.update(x="model-3.safetensors"), "which is not there"),
        (lambda w: w.update(x="\ud800.safetensors"), "which is not there"),
        (lambda w: w.update(x="x" * 300), "which is not there"),
        (lambda w: w.update(x="model-1.safetensors"), "lacks 'x'"),
        (lambda w: w.pop("half"), "has in addition 'half'"),
        (lambda w: w.update(half="model-1.safetensors"), "lacks 'half'"),
    ],
)
def test_an_index_that_lies(tmp_path, tensors, change, problem):
    index = split(tensors, tmp_path)
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
        interop.open_safetensors(index)


HEADERS = {
    "hole": ({"x": entry(offsets=(4, 12))}, bytes(12), "follows a hole"),
    "overlap": ({"x": entry(), "y": entry()}, bytes(8), "overlaps another"),
    "rest": ({"x": entry()}, bytes(9), "its tensors end at byte"),
    "short": ({"x": entry()}, bytes(7), "ends behind the end"),
    "size": ({"x": entry(shape=(3,))}, bytes(8), "follow from its shape"),
    "overflow": ({"x": entry(shape=(2**61, 8))}, bytes(8), "follow from its shape"),
    "negative": ({"x": entry(shape=(-1, -2))}, bytes(8), "is not a size"),
    "bool": ({"x": entry("U8", (True,), (0, 1))}, bytes(1), "is not a size"),
    "float": ({"x": entry(shape=(2.0,))}, bytes(8), "is not a size"),
    "dtype": ({"x": entry("F33")}, bytes(8), "dtype is not known"),
    "no dtype": ({"x": {"shape": [], "data_offsets": [0, 1]}}, b"a", "the keys"),
    "list": ([], b"", "not an object"),
    "entry": ({"x": 3}, b"", "is 3"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "metadata are not strings"),
    "rank": ({"x": entry("U8", [1] * 40, (0, 1))}, b"a", "too many dimensions"),
    "json": (b'{"x": ', b"", "no JSON"),
    "utf8": (b'{"\xff": 1}', b"", "no JSON"),
    "deep": (b"[" * 50_000, b"", "no JSON"),
    "twice": (b'{"__metadata__": {}, "__metadata__": {}}', b"", "is there twice"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies(tmp_path, case):
    header, data, problem = HEADERS[case]
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=problem) as e:
        interop.open_safetensors(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize("length", [0, 3, 2**31, 2**63, 2**64 - 1])
def test_a_header_that_is_not_there(tmp_path, length):
    path = write(tmp_path / "x.safetensors", b"{}", length=length)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="x.safetensors"):
        interop.open_safetensors(path)


def test_names_that_meet_once_they_are_split(tmp_path):
    header = {"a": entry("U8", (1,), (0, 1)), "a.b": entry("U8", (1,), (1, 2))}
    path = write(tmp_path / "x.safetensors", header, b"ab")
    with pytest.raises(eqx_ckpt.LeafNameError, match="'a' and 'a.b'"):
        interop.open_safetensors(path)


def test_a_boolean_that_is_neither(tmp_path):
    path = write(
        tmp_path / "x.safetensors", {"x": entry("BOOL", (2,), (0, 2))}, b"\0\2"
    )
    like = {"x": jnp.zeros(2, bool)}
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'x': it has a byte"):
        eqx_ckpt.tree_deserialise_leaves(interop.open_safetensors(path), like)


def test_a_file_that_changes(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    numpy_files.save_file(tensors, path)
    source = interop.open_safetensors(path)
    os.utime(path, (0, 0))
    with pytest.raises(eqx_ckpt.CheckpointError, match="was changed after it"):
        eqx_ckpt.tree_deserialise_leaves(source, LIKE)


def test_no_file(tmp_path):
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="There is no file"):
        interop.open_safetensors(tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(eqx_ckpt.CheckpointError, match="is not a file"):
        interop.open_safetensors(tmp_path / "pipe")


@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes are read from files, in a list of one number."""
    total, preadv = [0], os.preadv

    def counted(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        total[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return total


@pytest.mark.parametrize(
    "spec",
    [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec(None, None, "x")],
)
def test_a_sharded_array(tmp_path, spec):
    array = np.random.default_rng(1).normal(size=(16, 24, 40)).astype(np.float32)
    numpy_files.save_file({"x": array}, tmp_path / "x.safetensors")
    source = interop.open_safetensors(tmp_path / "x.safetensors")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, spec)
    like = {"x": jax.ShapeDtypeStruct(array.shape, jnp.float32)}
    found = eqx_ckpt.tree_deserialise_leaves(source, like, sharding=sharding)
    assert found["x"].sharding == sharding
    assert np.array_equal(found["x"], array)


def test_only_what_is_wanted_is_read(tmp_path, bytes_read):
    arrays = {f"l.{i}": np.full((512, 4096), i, np.float32) for i in range(3)}
    numpy_files.save_file(arrays, tmp_path / "x.safetensors")
    source = interop.open_safetensors(tmp_path / "x.safetensors")
    like = {"l": [jnp.zeros((512, 4096))] * 3}
    bytes_read[0] = 0
    found = eqx_ckpt.tree_deserialise_leaves(source, like, where=lambda t: t["l"][1])
    assert bytes_read[0] == arrays["l.1"].nbytes
    assert (np.asarray(found["l"][1]) == 1).all()


def test_an_equinox_model(tmp_path, getkey):
    model = eqx.nn.MLP(3, 2, 8, 2, key=getkey())
    tensors = {
        f"layers.{i}.{part}": np.asarray(getattr(layer, part))
        for i, layer in enumerate(model.layers)
        for part in ("weight", "bias")
    }
    numpy_files.save_file(tensors, tmp_path / "mlp.safetensors")
    source = interop.open_safetensors(tmp_path / "mlp.safetensors")
    skeleton = eqx.filter_eval_shape(eqx.nn.MLP, 3, 2, 8, 2, key=jax.random.key(1))
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, skeleton), model)
