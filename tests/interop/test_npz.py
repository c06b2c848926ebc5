"""Archives of NumPy: stored, compressed, and hostile."""

import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from eqx_ckpt import interop
from eqx_ckpt.interop._readers import _npz_reader as _npz
from helpers import assert_same


RNG = np.random.default_rng(0)
ARRAYS = {
    "model/layers/0/w": RNG.normal(size=(6, 4)).astype(np.float32),
    "model.layers.1.w": np.asfortranarray(RNG.normal(size=(6, 4)).astype(np.float32)),
    "empty": np.zeros((0, 3), np.float16),
    "step": np.array(7, np.int32),
    "swapped": np.arange(5, dtype=">i4"),
    "wide": RNG.normal(size=3),
}
LIKE = {
    "model": {"layers": [{"w": jnp.zeros((6, 4))}, {"w": jnp.zeros((6, 4))}]},
    "empty": jnp.zeros((0, 3), jnp.float16),
    "step": jnp.zeros((), jnp.int32),
    "swapped": np.zeros(5, ">i4"),
    "wide": np.zeros(3),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    source = interop.open_npz(tmp_path / "a.npz")
    layers = [{"w": ARRAYS["model/layers/0/w"]}, {"w": ARRAYS["model.layers.1.w"]}]
    expected = {
        "model": jax.tree.map(jnp.asarray, {"layers": layers}),
        "empty": jnp.asarray(ARRAYS["empty"]),
        "step": jnp.asarray(ARRAYS["step"]),
        "swapped": ARRAYS["swapped"],
        "wide": ARRAYS["wide"],
    }
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, LIKE), expected)
    eqx_ckpt.inspect.verify(source)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_sharded_array(tmp_path, save, order):
    array = np.asarray(RNG.normal(size=(16, 24, 9)).astype(np.float32), order=order)
    save(tmp_path / "x.npz", x=array)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    found = eqx_ckpt.tree_deserialise_leaves(
        interop.open_npz(tmp_path / "x.npz"),
        {"x": jax.ShapeDtypeStruct(array.shape, jnp.float32)},
        sharding=sharding,
    )
    assert np.array_equal(found["x"], array)


def test_what_is_no_array_of_numbers_is_listed(tmp_path):
    fields = np.zeros(2, [("a", np.int32), ("b", np.int32)])
    np.savez(
        tmp_path / "a.npz",
        x=np.ones(2, np.float32),
        text=np.array(["a", "b"]),
        fields=fields,
        objects=np.array([{}, None]),
        bf16=np.ones(2, jnp.bfloat16),
    )
    source = interop.open_npz(tmp_path / "a.npz")
    assert source.manifest.leaves.keys() == {"x"}
    like = {"x": jnp.zeros(2), "objects": jnp.zeros(2)}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="nothing is unpickled"):
        eqx_ckpt.tree_deserialise_leaves(source, like)


def test_pickles_are_not_opened(tmp_path):
    class Boom:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        header = npy((1,), "|O", nbytes=0)
        archive.writestr("x.npy", header + pickle.dumps([Boom()]))
    source = interop.open_npz(tmp_path / "a.npz")
    assert "pickled" in source.manifest.unsaved["x"]
    assert not (tmp_path / "boom").exists()


def npy(shape=(4,), descr="<f4", nbytes=None):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()
    return header + bytes(16 if nbytes is None else nbytes)


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as f:
        for name, data in members.items():
            f.writestr(name.replace("_", "."), data)
    return path


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too early"),
        (b"PNG", "too early"),
        (npy()[:20], "too early"),
        (npy(nbytes=15), "its size does not follow"),
        (npy(shape=(2**62,)), "too large"),
        (npy(shape=(2**40, 2**40)), "too large"),
        (npy(shape="(-4,)"), "its header is"),
        (npy(descr="<f4,<f4"), "its header is"),
        (npy(descr="q9"), "its header is"),
        (npy().replace(b"False", b"None "), "its header is"),
        (b"\x93NUMPY\2\0\xff\xff\xff\xff", "its header has 4294967295 bytes"),
        (b"\x93NUMPY\x09\0", "not a version"),
    ],
)
def test_a_member_that_lies(tmp_path, data, problem):
    path = archive(tmp_path / "a.npz", x_npy=data)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=problem) as e:
        interop.open_npz(path)
    assert "'x.npy'" in str(e.value)


@pytest.mark.parametrize("key", ["x", "é"])
def test_a_member_of_two_names(tmp_path, key):
    """The one in front of its data is what other programs may go by."""
    path = tmp_path / "a.npz"
    np.savez(path, **{key: np.ones(3, np.float32)})
    assert len(interop.open_npz(path).manifest.leaves) == 1
    name = f"{key}.npy".encode()
    path.write_bytes(path.read_bytes().replace(name, name.replace(b".", b"_"), 1))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="it has another name"):
        interop.open_npz(path)


def test_bombs(tmp_path):
    """An archive whose sizes lie, and one whose members share their bytes."""
    data = (archive(tmp_path / "a.npz", x_npy=npy((2**28,), nbytes=2**20))).read_bytes()
    at = data.rindex(b"PK\1\2")
    lie = data[: at + 24] + (2**30 + 76).to_bytes(4, "little") + data[at + 28 :]
    (tmp_path / "b.npz").write_bytes(lie)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="cannot be 1073"):
        interop.open_npz(tmp_path / "b.npz")

    data = archive(tmp_path / "c.npz", x_npy=npy(), y_npy=npy()).read_bytes()
    at = data.rindex(b"PK\1\2")
    both = data[: at + 42] + bytes(4) + data[at + 46 :]
    (tmp_path / "d.npz").write_bytes(both)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="overlaps another"):
        interop.open_npz(tmp_path / "d.npz")


@pytest.mark.parametrize("way", [eqx_ckpt.inspect.verify, eqx_ckpt.inspect.stats])
def test_all_parts_are_decompressed_once(tmp_path, way, monkeypatch):
    """The cost of 128 KB that become 128 MB follows their size, not its square."""
    header = npy((2**25,), nbytes=0)
    archive(tmp_path / "a.npz", x_npy=header + bytes(2**27))
    source = interop.open_npz(tmp_path / "a.npz")
    nbytes = 0

    def counted(fd, offset, target, read=_npz.read_exactly):
        nonlocal nbytes
        nbytes += len(target)
        read(fd, offset, target)

    monkeypatch.setattr(_npz, "read_exactly", counted)
    way(source)
    # Each of a few threads may decompress it all.
    assert nbytes <= 5 * (tmp_path / "a.npz").stat().st_size
    assert pickle.loads(pickle.dumps(source)).manifest == source.manifest


def test_a_read_goes_on_where_another_ended(tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(100, size=2**20)
    np.savez_compressed(tmp_path / "a.npz", x=x)
    source = interop.open_npz(tmp_path / "a.npz")
    record = source.manifest.leaves["x"]
    nbytes = 0

    def counted(reads, start, size, read=_npz.read_bytes):
        nonlocal nbytes
        nbytes += size
        return read(reads, start, size)

    monkeypatch.setattr(_npz, "read_bytes", counted)
    for start in range(0, x.size, 2**16):
        region = (slice(start, start + 2**16),)
        [found] = source.read([interop.RegionRead("x", record, region)], {})
        np.testing.assert_array_equal(found, x[region])
    assert nbytes <= (tmp_path / "a.npz").stat().st_size


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit(tmp_path, save):
    save(tmp_path / "a.npz", x=RNG.normal(size=1000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[4000] ^= 4
    (tmp_path / "a.npz").write_bytes(data)
    source = interop.open_npz(tmp_path / "a.npz")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'x': it"):
        eqx_ckpt.tree_deserialise_leaves(source, {"x": np.zeros(1000)})


@pytest.mark.parametrize("data", [b"", b"PK", b"\x93NUMPY", b"PK\5\6" + bytes(18)])
def test_no_archive(tmp_path, data):
    (tmp_path / "a.npz").write_bytes(data)
    if data.startswith(b"PK\5"):
        assert not interop.open_npz(tmp_path / "a.npz").manifest.leaves
        return
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=r"a\.npz"):
        interop.open_npz(tmp_path / "a.npz")
