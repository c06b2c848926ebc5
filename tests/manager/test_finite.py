"""`check_finite`: a step with NaNs or infinities is not saved."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ckpt


def refusal(directory, tree):
    """What a checking manager says of a second step, which is not saved."""
    manager = eqx_ckpt.CheckpointManager(directory, check_finite=True)
    manager.save(1, {"step": 1}).result()
    future = manager.save(2, tree)
    with pytest.raises(eqx_ckpt.CheckpointError) as caught:
        future.result()
    assert manager.steps() == [1]
    return str(caught.value)


DTYPES = "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 float8_e4m3 >f4"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_one_nan_among_many_numbers(tmp_path, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tree = {"fine": np.ones((300, 70), dtype), "bad": np.ones((300, 70), dtype)}
    with eqx_ckpt.CheckpointManager(tmp_path / "a", check_finite=True) as manager:
        manager.save(1, tree)
    tree["bad"][299, 69] = np.nan
    text = refusal(tmp_path / "b", tree)
    assert "'bad'" in text
    assert "1 NaN, 0 infinite" in text
    assert "'fine'" not in text


@pytest.mark.parametrize("value", [np.inf, -np.inf, complex(0, np.inf)])
def test_infinities(tmp_path, value):
    text = refusal(tmp_path, {"w": np.array([[0, value], [value, 1]])})
    assert "0 NaN, 2 infinite" in text


@pytest.mark.parametrize("dtype", ["M8[D]", ">M8[ns]", "m8[s]"])
def test_dates_that_are_not_times(tmp_path, dtype):
    """They count as NaNs, as in `stats`."""
    tree = {"dates": np.array(["NaT", 5, "NaT"], dtype)}
    assert "2 NaN, 0 infinite" in refusal(tmp_path / "run", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    assert eqx_ckpt.inspect.stats(tmp_path / "c")["dates"].nan == 2


def test_python_numbers(tmp_path):
    text = refusal(
        tmp_path, {"loss": float("nan"), "z": 1j * float("inf"), "n": 10**400}
    )
    assert "- 'loss': Python float = nan." in text
    assert "- 'z'" in text
    assert "- 'n'" not in text


def test_what_has_no_numbers_is_saved(tmp_path):
    tree = {
        "key": jax.random.key(0),
        "dates": np.array(["1969-12-31", "2020-01-01"], "M8[D]"),
        "bytes": np.full(8, 255, np.uint8),
        "ints": jnp.full(4, -1),
        "empty": np.empty((0, 3)),
        "largest": np.array([np.finfo(np.float32).max] * 3, np.float32),
    }
    with eqx_ckpt.CheckpointManager(tmp_path, check_finite=True) as manager:
        manager.save(1, tree)
    assert manager.steps() == [1]


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_the_next_call_raises_and_older_steps_stay(tmp_path, layout):
    manager = eqx_ckpt.CheckpointManager(
        tmp_path, keep=eqx_ckpt.keep_last(1), layout=layout, check_finite=True
    )
    manager.save(1, {"w": jnp.ones(3)})
    manager.save(2, {"w": jnp.array([1, jnp.nan, jnp.inf])})
    with pytest.raises(eqx_ckpt.CheckpointError, match="1 NaN, 1 infinite"):
        manager.save(3, {"w": jnp.ones(3)})
    assert manager.steps() == [1]
    assert manager.restore({"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]
    manager.save(3, {"w": jnp.ones(3)})
    manager.close()
    assert manager.steps() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]


def test_one_nan_in_a_shard(tmp_path):
    sharding = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
    array = jax.device_put(jnp.ones((8, 4)).at[5, 1].set(jnp.nan), sharding)
    assert "1 NaN, 0 infinite" in refusal(tmp_path, {"w": array})


def test_many_leaves_are_counted(tmp_path):
    text = refusal(tmp_path, [np.full(2, np.nan)] * 50)
    assert len(text.splitlines()) < 30
    assert "and 30 more" in text


def test_without_the_check_they_are_saved(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.array([jnp.nan])})
    assert manager.steps() == [1]
