"""Recordings in the files and trees of others, read with the real libraries."""

import errno
import json
import sys
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from helpers import full_disk
from support import recording_source


pytestmark = pytest.mark.peers


LIKE = {"in": {"theta": np.zeros(3, np.float32)}, "n": np.int32(0), "key": jr.key(0)}


def samples(count: int) -> dict:
    n = np.arange(count, dtype=np.int32) + 100 * np.arange(2, dtype=np.int32)[:, None]
    keys = jr.split(jr.key(0), (2, count))
    return {"in": {"theta": np.float32(n[..., None] + np.arange(3))}, "n": n} | {
        "key": keys
    }


@pytest.fixture
def found(tmp_path):
    kwargs = {"chains": 2, "chunk_bytes": 48, "metadata": {"eps": 0.5}}
    with Recording(tmp_path / "chain", LIKE, **kwargs) as recording:
        recording.extend(samples(50))
    return Samples(tmp_path / "chain")


@pytest.fixture
def uneven(tmp_path):
    """Chains with 20 draws and with 7."""
    keep = np.arange(20) < np.array([[20], [7]])
    with Recording(tmp_path / "uneven", LIKE, chains=2) as recording:
        recording.extend(samples(20), keep)
    return Samples(tmp_path / "uneven")


def test_npz(found, tmp_path):
    files = found.to_npz(tmp_path / "out")
    assert [file.name for file in files] == ["chain_0.npz", "chain_1.npz"]
    for chain, file in enumerate(files):
        arrays = np.load(file)
        assert set(arrays) == {"in/theta", "n", "key"}
        expected = jax.tree.map(lambda x, c=chain: x[c], samples(50))
        np.testing.assert_array_equal(arrays["in/theta"], expected["in"]["theta"])
        np.testing.assert_array_equal(arrays["n"], expected["n"])
        np.testing.assert_array_equal(arrays["key"], jr.key_data(expected["key"]))
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="chain_0.npz"):
        found.to_npz(tmp_path / "out")
    found.to_npz(tmp_path / "out", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "chain_0.npz",
        "chain_1.npz",
    ]


def test_npz_of_chains_that_differ(uneven, tmp_path):
    lengths = [len(np.load(file)["n"]) for file in uneven.to_npz(tmp_path / "out")]
    assert lengths == [20, 7]


def test_npz_without_chains_and_draws(tmp_path):
    like = {"a": jnp.zeros((0, 2)), "b": jnp.int8(0)}
    with Recording(tmp_path / "chain", like) as recording:
        recording.commit()
        (file,) = Samples(tmp_path / "chain").to_npz(tmp_path / "none")
        recording.append({"a": jnp.zeros((0, 2)), "b": jnp.int8(3)})
    assert np.load(file)["a"].shape == (0, 0, 2)
    (file,) = Samples(tmp_path / "chain").to_npz(tmp_path / "one")
    assert np.load(file)["a"].shape == (1, 0, 2)
    assert np.load(file)["b"].tolist() == [3]


def test_hdf5(found, tmp_path):
    h5py = pytest.importorskip("h5py")
    path = found.to_hdf5(tmp_path / "out/chain.h5")
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["in/theta"], samples(50)["in"]["theta"])
        np.testing.assert_array_equal(file["n"], samples(50)["n"])
        np.testing.assert_array_equal(file["key"], jr.key_data(samples(50)["key"]))
        labels = [dimension.label for dimension in file["in/theta"].dims]
        assert labels == ["chain", "draw", "theta_dim_0"]
        assert json.loads(file.attrs["metadata"]) == {"eps": 0.5}
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="chain.h5"):
        found.to_hdf5(path)
    found.to_hdf5(path, overwrite=True)
    assert [p.name for p in path.parent.iterdir()] == ["chain.h5"]


@pytest.mark.parametrize("form", ["npz", "hdf5"])
def test_a_full_disk(found, tmp_path, form):
    pytest.importorskip("h5py")
    write = {"npz": found.to_npz, "hdf5": found.to_hdf5}[form]
    with full_disk(1000), pytest.raises(OSError, match="too large: '.*/out") as caught:
        write(tmp_path / "out/chain")
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [">f4", np.complex64, np.bool_, np.float16, np.int8])
def test_dtypes_of_hdf5(tmp_path, dtype):
    h5py = pytest.importorskip("h5py")
    values = (np.arange(10) % 2).astype(dtype)
    with Recording(tmp_path / "a", {"x": np.zeros((), dtype)}) as recording:
        recording.extend({"x": values})
    with h5py.File(Samples(tmp_path / "a").to_hdf5(tmp_path / "x.h5")) as file:
        np.testing.assert_array_equal(file["x"][()], values)


def test_dtypes_that_files_cannot_hold(tmp_path):
    like = {"a": np.zeros(2, ml_dtypes.bfloat16), "b": jnp.zeros(2, jnp.int4)}
    like |= {"c": np.float32(0), "d": jnp.zeros(2, jnp.float8_e5m2)}
    with Recording(tmp_path / "a", like) as recording:
        recording.append(like)
    found = Samples(tmp_path / "a")
    bad = "- 'a': bfloat16.\n- 'b': int4.\n- 'd': float8_e5m2"
    with pytest.raises(eqx_ckpt.CheckpointError, match=bad):
        found.to_npz(tmp_path / "out")
    if "h5py" in sys.modules:
        with pytest.raises(eqx_ckpt.CheckpointError, match="'a': bfloat16.\n- 'b'"):
            found.to_hdf5(tmp_path / "out/x.h5")
    assert not (tmp_path / "out").exists()


def test_damage_leaves_no_file(found, tmp_path):
    file = tmp_path / "chain/samples/n/c.1.2"
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'n'"):
        found.to_npz(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_is_bounded(tmp_path):
    big = {"x": jax.ShapeDtypeStruct((2**18,), jnp.float32)}
    with Recording(tmp_path / "a", big) as recording:
        for _ in range(10):
            recording.extend({"x": np.ones((10, 2**18), np.float32)})
    found = Samples(tmp_path / "a")
    tracemalloc.start()
    try:
        found.to_npz(tmp_path / "out")
        if "h5py" in sys.modules:
            found.to_hdf5(tmp_path / "x.h5")
        # Of 100 MiB; buffers are larger than what is in them by a page.
        assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    finally:
        tracemalloc.stop()


def test_little_is_read_at_a_time_if_one_chain_is_far_ahead(tmp_path, monkeypatch):
    """The others of its band are read as zeros."""
    monkeypatch.setattr(recording_source, "_BAND_BYTES", 2**10, raising=False)
    keep = np.arange(32)[:, None] == np.zeros(300, int)
    like = {"n": np.int32(0)}
    with Recording(tmp_path / "a", like, chains=32, chunk_bytes=400) as recording:
        recording.extend({"n": np.arange(9600, dtype=np.int32).reshape(32, 300)}, keep)
    found, read = Samples(tmp_path / "a"), []
    samples = recording_source.Recorded.samples

    def noted(*how: Any) -> np.ndarray:
        read.append(samples(*how))
        return read[-1]

    monkeypatch.setattr(recording_source.Recorded, "samples", noted)
    files = found.to_npz(tmp_path / "out")
    assert max(rows.nbytes for rows in read) <= 2**10
    lengths = [np.load(file)["n"].tolist() for file in files]
    assert lengths == [[*range(300)], *[[]] * 31]


def test_datatree(found):
    xarray = pytest.importorskip("xarray")
    tree = found.to_datatree()
    assert isinstance(tree, xarray.DataTree)
    theta = tree["in/theta"]
    assert theta.dims == ("chain", "draw", "theta_dim_0")
    expected = samples(50)["in"]["theta"]
    np.testing.assert_array_equal(theta, expected)
    np.testing.assert_array_equal(tree["n"], samples(50)["n"])
    np.testing.assert_array_equal(tree["key"], jr.key_data(samples(50)["key"]))
    np.testing.assert_array_equal(theta[1, 3:40:7, 2], expected[1, 3:40:7, 2])
    np.testing.assert_array_equal(theta[:, ::-3], expected[:, ::-3])
    np.testing.assert_array_equal(theta[::-1, 4, [2, 0]], expected[::-1, 4, [2, 0]])
    np.testing.assert_array_equal(theta.sel(chain=0, draw=[9, 5]), expected[0, [9, 5]])
    mean = theta.mean(("chain", "draw"))
    np.testing.assert_allclose(mean, expected.mean((0, 1)))
    assert json.loads(tree.attrs["metadata"]) == {"eps": 0.5}


def test_a_tree_is_read_when_it_is_used(found, tmp_path):
    pytest.importorskip("xarray")
    tree = found.to_datatree()
    (tmp_path / "chain/samples/n/c.1.2").unlink()
    assert tree["in/theta"].shape == (2, 50, 3)
    assert tree["n"][0].values.tolist() == list(range(50))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="c.1.2 is missing"):
        tree["n"].values  # noqa: B018


def test_arviz_computes_a_summary(tmp_path):
    arviz = pytest.importorskip("arviz")
    draws = np.random.default_rng(0).normal(1, 2, (4, 500, 2))
    with Recording(tmp_path, {"theta": np.zeros(2)}, chains=4) as recording:
        recording.extend({"theta": draws})
    dataset = Samples(tmp_path).to_datatree().to_dataset()
    summary = arviz.summary(dataset, round_to="none")
    np.testing.assert_allclose(summary["mean"], draws.mean((0, 1)))
    assert (summary["r_hat"] < 1.02).all()


def test_chains_that_differ_are_no_array(uneven, tmp_path):
    for library, export in (
        ("h5py", lambda: uneven.to_hdf5(tmp_path / "x.h5")),
        ("xarray", lambda: uneven.to_datatree()),
    ):
        pytest.importorskip(library)
        with pytest.raises(ValueError, match="7 to 20 draws"):
            export()


@pytest.mark.parametrize("chains", [None, 2])
@pytest.mark.parametrize("name", ["draw", "draw/x", "in/draw/x", "chain", "in/chain/x"])
def test_names_of_axes(tmp_path, name, chains):
    pytest.importorskip("xarray")
    like = np.float32(0)
    for part in reversed(name.split("/")):
        like = {part: like}
    with Recording(tmp_path, like, chains=chains) as recording:
        recording.commit()
    samples = Samples(tmp_path)
    if chains is None and "chain" in name:
        assert samples.to_datatree()[name].shape == (0,)
        return
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"leaf '{name}'.* has the name"):
        samples.to_datatree()


def test_a_name_with_two_shapes(tmp_path):
    pytest.importorskip("xarray")
    with Recording(tmp_path, {"x": np.zeros(2), "in": {"x": np.zeros(3)}}) as recording:
        recording.commit()
    with pytest.raises(
        eqx_ckpt.CheckpointError, match="(?s)'/in' is not aligned.*`read`"
    ):
        Samples(tmp_path).to_datatree()
