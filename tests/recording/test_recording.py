"""Recordings: exactly what was recorded comes back, and other readers take it."""

import gc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from eqx_ckpt.recording._writing._sample_columns import Column
from helpers import files_below, until
from recording import chains


LIKE = {"theta": jax.ShapeDtypeStruct((3,), jnp.float32), "n": np.int32(0)}


def samples(count: int, start: int = 0, chains: int | None = None) -> dict:
    """Draws that count from `start`, and from 1000 more for each chain."""
    n = np.arange(start, start + count, dtype=np.int32)
    if chains is not None:
        n = n + 1000 * np.arange(chains, dtype=np.int32)[:, None]
    return {"theta": np.float32(n[..., None] + np.array([0, 0.25, 0.5])), "n": n}


def assert_equal(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("counts", [[7, 1, 20], [4, 4], [0, 30]])
def test_what_was_recorded_is_read(tmp_path, counts, compression):
    total = sum(counts)
    kwargs = {"chunk_bytes": 48, "compression": compression}
    with Recording(tmp_path / "a", LIKE, **kwargs) as recording:
        assert recording.committed is None
        start = 0
        for count in counts:
            recording.extend(samples(count, start))
            recording.commit()
            start += count
            assert recording.committed == start
            assert_equal(recording.samples.read(), samples(start))
    found = Samples(tmp_path / "a")
    found.verify()
    for draws in [slice(0, None), slice(3, total - 1, 2), slice(1, 7, 5), slice(5, 5)]:
        expected = {name: array[draws] for name, array in samples(total).items()}
        some = {"start": draws.start, "stop": draws.stop, "thin": draws.step or 1}
        assert_equal(found.read(**some), expected)
    assert found.read(where=lambda t: t["n"], start=2).tolist() == list(range(2, total))


@pytest.mark.parametrize("kind", ["numpy", "jax", "sharded"])
def test_chains(tmp_path, kind):
    def made(count, start=0):
        found = samples(count, start, 4)
        if kind == "numpy":
            return found
        found = jax.tree.map(jnp.asarray, found)
        mesh = Mesh(np.array(jax.devices()[:2]), ("chains",))
        place = NamedSharding(mesh, PartitionSpec("chains"))
        return jax.device_put(found, place) if kind == "sharded" else found

    keep = np.arange(20) % 3 == 0
    with Recording(tmp_path, LIKE, chains=4, chunk_bytes=48) as recording:
        recording.extend(made(10))
        recording.extend(made(20), keep)
        recording.append(jax.tree.map(lambda x: x[:, 5], made(20)))
    expected = jax.tree.map(
        lambda a, b: np.concatenate([a, b[:, keep], b[:, 5:6]], 1), made(10), made(20)
    )
    found = Samples(tmp_path)
    assert found.chains == 4
    assert found.committed == 18
    assert_equal(found.read(), expected)
    assert_equal(found.read(chain=2), jax.tree.map(lambda x: x[2], expected))


def test_chains_that_keep_different_draws(tmp_path):
    keep = np.zeros((2, 10), bool)
    keep[0, :7] = keep[1, 4] = True
    with Recording(tmp_path, LIKE, chains=2, chunk_bytes=48) as recording:
        recording.extend(samples(10, 0, 2), keep)
        recording.commit()
        assert np.array_equal(recording.committed, [7, 1])
    found = Samples(tmp_path)
    assert found.read(where=lambda t: t["n"], chain=0).tolist() == list(range(7))
    assert found.read(where=lambda t: t["n"], chain=1).tolist() == [1004]
    assert found.read(where=lambda t: t["n"], stop=1).tolist() == [[0], [1004]]
    with pytest.raises(ValueError, match="1 to 7 draws"):
        found.read()
    # Readers of Zarr see no draw that a chain does not have.
    assert zarr.open_group(tmp_path / "samples")["n"].shape == (2, 1)


JAX_DTYPES = [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
    ml_dtypes.uint2,
]
NUMPY_DTYPES = [
    np.bool_,
    np.int8,
    np.uint64,
    np.float16,
    np.complex64,
    ">f4",
    "<M8[ns]",
]


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *JAX_DTYPES], ids=str)
def test_all_dtypes(tmp_path, dtype):
    dtype = np.dtype(dtype)
    values = np.arange(20).reshape(10, 2) % 2
    values = values.astype(np.int64).astype(dtype)
    with Recording(tmp_path, [np.zeros(2, dtype)], chunk_bytes=16) as recording:
        recording.extend([values])
        recording.commit()
        recording.append([values[0]])
    (found,) = Samples(tmp_path).read().values()
    assert found.dtype == dtype
    assert found.tobytes() == values.tobytes() + values[:1].tobytes()


def test_keys_scalars_and_modules(tmp_path):
    class Sample(eqx.Module):
        key: jax.Array
        flag: jax.Array
        empty: jax.Array

    keys = jr.split(jr.key(3, impl="rbg"), 10)
    like = Sample(keys[0], jnp.array(True), jnp.zeros((0, 3)))
    block = Sample(keys, jnp.arange(10) % 2 == 0, jnp.zeros((10, 0, 3)))
    with Recording(tmp_path, like) as recording:
        recording.extend(block)
        recording.append(jax.tree.map(lambda x: x[0], block))
        recording.commit()
        found = recording.samples.read()
    assert isinstance(found, Sample)
    assert (found.key[:10] == keys).all()
    assert found.flag.tolist() == [True, False] * 5 + [True]
    assert found.empty.shape == (11, 0, 3)


def test_leaves_without_bytes_go_on(tmp_path):
    like = {"empty": np.zeros((0, 3)), "x": np.float32(0)}
    for count in (5, 1, 4):
        with Recording(tmp_path, like, chunk_bytes=12) as recording:
            n = np.arange(count, dtype=np.float32)
            recording.extend({"empty": np.zeros((count, 0, 3)), "x": n})
            recording.commit()
            recording.append({"empty": like["empty"], "x": np.float32(9)})
    found = Samples(tmp_path)
    found.verify()
    assert found.read()["empty"].shape == (13, 0, 3)
    assert found.read()["x"].tolist() == [0, 1, 2, 3, 4, 9, 0, 9, 0, 1, 2, 3, 9]


def test_a_record_that_readers_would_refuse_is_not_committed(tmp_path, monkeypatch):
    recording = Recording(tmp_path, LIKE)
    recording.extend(samples(5))
    recording.commit()
    recording.extend(samples(5, 5))
    monkeypatch.setattr(Column, "settle", lambda column: "a checksum")
    with pytest.raises(eqx_ckpt.CheckpointError, match="would refuse.*5 draws are"):
        recording.commit()
    recording.close()
    assert_equal(Samples(tmp_path).read(), samples(5))


def test_names_that_are_hard(tmp_path):
    like = {"W": np.float32(0), "w": np.float32(0), "a/b": [np.float32(0)]}
    like["recording.json"] = like["zarr.json"] = np.float32(0)
    block = jax.tree.map(lambda x: np.arange(5, dtype=np.float32), like)
    block["W"] = block["W"] + 1
    with Recording(tmp_path, like) as recording:
        recording.extend(block)
    found = Samples(tmp_path).read()
    assert found["W"].tolist() == [1, 2, 3, 4, 5]
    assert found["w"].tolist() == [0, 1, 2, 3, 4]
    assert found["a/b"][0].tolist() == [0, 1, 2, 3, 4]


def test_other_readers_read_while_it_is_written(tmp_path):
    like = {"theta": np.zeros(3, np.float32), "in": {"n": np.int32(0)}}
    with Recording(tmp_path / "a", like, chains=2, chunk_bytes=48) as recording:
        for i in range(3):
            block = samples(10, 10 * i, 2)
            recording.extend({"theta": block["theta"], "in": {"n": block["n"]}})
            recording.commit()
            expected = samples(10 * (i + 1), 0, 2)
            recording.extend(
                {"theta": block["theta"], "in": {"n": block["n"]}}, [False] * 10
            )
            folder = tmp_path / "a/samples"
            group = zarr.open_group(folder, mode="r")
            np.testing.assert_array_equal(group["in/n"][:], expected["n"])
            assert group["theta"].metadata.dimension_names == (
                "chain",
                "draw",
                "theta_dim_0",
            )
            array = ts.open(
                {"driver": "zarr3", "kvstore": f"file://{folder}/theta"}, read=True
            ).result()
            np.testing.assert_array_equal(array.read().result(), expected["theta"])


@pytest.mark.peers
def test_xarray_computes_a_mean(tmp_path):
    xarray = pytest.importorskip("xarray")
    with Recording(tmp_path, LIKE, chains=2) as recording:
        recording.extend(samples(10, 0, 2))
    with xarray.open_datatree(
        tmp_path / "samples", engine="zarr", consolidated=False
    ) as tree:
        assert tree["theta"].dims == ("chain", "draw", "theta_dim_0")
        mean = tree["theta"].mean(("chain", "draw"))
        np.testing.assert_allclose(mean, [504.5, 504.75, 505])


def test_a_state_comes_back_with_its_samples(tmp_path):
    path = tmp_path / "run"
    with Recording(path, LIKE) as recording:
        recording.extend(samples(5))
        recording.commit({"step": 5, "model": {"w": jnp.arange(3.0)}})
        recording.extend(samples(5, 5))
        recording.commit({"step": 10, "model": {"w": jnp.arange(3.0) + 1}})
        assert [p.name for p in (path / "states").iterdir()] == ["000002"]
        recording.extend(samples(3, 10))
        with pytest.warns(UserWarning, match="3 draws that were recorded"):
            recording.close()
        recording.close()
    with Recording(path, LIKE) as recording:
        assert recording.committed == 10
        with pytest.raises(eqx_ckpt.CheckpointError, match="Call `resume` first"):
            recording.extend(samples(1))
        like = {"step": 0, "model": {"w": jnp.zeros(3)}}
        w = recording.resume(like["model"], prefix="model")["w"]
        assert w.tolist() == [1, 2, 3]
        assert recording.resume(like)["step"] == 10
        assert eqx_ckpt.tree_match(recording.state_path, like).ok
        recording.extend(samples(5, 10))
        recording.commit()
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="No state"):
            recording.resume(like)
    assert_equal(Samples(path).read(), samples(15))
    assert not list((path / "states").iterdir())


def test_uncommitted_files_are_deleted_at_the_end(tmp_path):
    with Recording(tmp_path, LIKE, chunk_bytes=48) as recording:
        recording.extend(samples(4))
        recording.commit({"step": 4})
        committed = files_below(tmp_path / "samples")
        recording.extend(samples(100, 4))
        until(lambda: files_below(tmp_path / "samples") > committed)
        with pytest.warns(UserWarning, match="100 draws that were recorded"):
            recording.close()
    assert files_below(tmp_path / "samples") == committed


def test_numpy_may_change_and_jax_be_donated(tmp_path):
    expected = samples(1000)
    like = {"a": LIKE["theta"], "b": LIKE["theta"]}
    with Recording(tmp_path, like) as recording:
        host = expected["theta"].copy()
        device = jnp.array(host)
        recording.extend({"a": host, "b": device})
        host[:] = -1
        jax.jit(lambda x: x * 0, donate_argnums=0)(device)
    found = Samples(tmp_path).read()
    assert_equal(found, {"a": expected["theta"], "b": expected["theta"]})


def test_no_more_than_max_samples(tmp_path):
    with Recording(tmp_path, LIKE, max_samples=12) as recording:
        recording.extend(samples(10))
        with pytest.raises(eqx_ckpt.CheckpointError, match="`max_samples` is 12"):
            recording.extend(samples(10, 10))
    assert_equal(Samples(tmp_path).read(), samples(12))


def fails_after(path, *commits) -> None:
    with Recording(path, LIKE) as recording:
        recording.extend(samples(5))
        for state in commits:
            recording.commit(state)
            recording.extend(samples(5))
        raise KeyError


def test_an_exception_keeps_what_needs_no_state(tmp_path):
    with pytest.raises(KeyError):
        fails_after(tmp_path / "a")
    assert Samples(tmp_path / "a").committed == 5
    with pytest.raises(KeyError):
        fails_after(tmp_path / "b", {"step": 5})
    assert Samples(tmp_path / "b").committed == 5


def test_a_recording_that_is_forgotten_lets_others_write(tmp_path):
    recording = Recording(tmp_path, LIKE)
    recording.extend(samples(5))
    del recording
    gc.collect()
    with Recording(tmp_path, LIKE) as again:
        assert again.committed is None


def test_metadata(tmp_path):
    metadata = {"eps": np.float32(0.5), "names": ["a"], "best": math.nan}
    for _ in range(2):
        with Recording(tmp_path, LIKE, metadata=metadata) as recording:
            recording.commit()
    found = Samples(tmp_path).metadata
    assert math.isnan(found.pop("best"))
    assert found == {"eps": 0.5, "names": ["a"]}
    assert Samples(tmp_path).committed == 0
    with pytest.raises(eqx_ckpt.CheckpointError, match="`metadata`"):
        Recording(tmp_path, LIKE, metadata={"eps": 1})


def test_a_sampler(tmp_path):
    assert chains.sample(str(tmp_path), 3)["step"] == 9
    for one, other in zip(
        chains.recorded(str(tmp_path)), chains.reference(3), strict=True
    ):
        assert_equal(one, other)
