"""A leaf of a run over its steps, as one lazy array."""

import pathlib
import random
import uuid
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect


STEPS = (1, 2, 5, 10)


def state(step: int) -> dict[str, Any]:
    count = np.arange(5 * 7 * 3)
    return {
        "model": eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(step)),
        "cube": count.reshape(5, 7, 3) + 1000 * step,
        "half": jnp.full((4, 2), step, jnp.bfloat16),
        "big": (count[:6] + step).astype(">f4"),
        "dates": (count[:3] + step).astype("datetime64[D]"),
        "key": jax.random.key(step),
        "empty": np.zeros((0, 3)),
        "scalar": jnp.asarray(step / 2),
        "seen": step,
        "rate": 1 / step,
        "is_last": step == 10,
        "huge": 10**30 + step,
    }


@pytest.fixture(params=[{}, {"compression": "zstd"}, {"layout": "ocdbt"}], ids=str)
def run(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return saved(str(tmp_path / "run"), **request.param)


def saved(run: str, **how: Any) -> str:
    with CheckpointManager(run, **how) as manager:
        for step in STEPS:
            manager.save(step, state(step))
    return run


def oracle(name: str) -> np.ndarray:
    """All of a leaf, by what `load` says of each step."""
    found: list[Any] = []
    for step in STEPS:
        value: Any = state(step)[name]
        found.append(jax.random.key_data(value) if name == "key" else value)
    return np.stack([np.asarray(value) for value in found])


def an_index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """A basic index of NumPy."""
    keys: list[Any] = []
    for size in shape[: draw.randint(0, len(shape))]:
        if size and draw.random() < 0.4:
            keys.append(draw.choice([int, np.int64])(draw.randrange(-size, size)))
        else:
            ends = [draw.choice([None, *range(-size - 1, size + 2)]) for _ in range(2)]
            keys.append(slice(*ends, draw.choice([None, 1, 2, -1, -3])))
    if draw.random() < 0.3:
        keys.insert(draw.randint(0, len(keys)), ...)
        if len(keys) > len(shape):
            keys.pop()
    return tuple(keys) if len(keys) != 1 or draw.random() < 0.5 else keys[0]


def test_any_index(run: str) -> None:
    found = inspect.leaf_history(run)
    assert found.steps == STEPS
    draw = random.Random(0)
    for name in state(1).keys() - {"model"}:
        expected, leaf = oracle(name), found[name]
        assert (leaf.shape, leaf.dtype.name) == (expected.shape, expected.dtype.name)
        assert (len(leaf), leaf.nbytes) == (len(STEPS), expected.nbytes)
        for _ in range(60 if name == "cube" else 15):
            key = an_index(draw, leaf.shape)
            try:
                expected[key]
            except IndexError:
                with pytest.raises(IndexError):
                    leaf[key]
                continue
            part = leaf[key]
            assert np.shape(part) == np.shape(expected[key]), (name, key)
            assert np.array_equal(part, expected[key]), (name, key)
        assert np.array_equal(np.asarray(leaf), expected)
    assert found["half"].dtype == ml_dtypes.bfloat16
    weights = found["model/layers/0/weight"][:, 1]
    for step, weight in zip(STEPS, weights, strict=True):
        assert np.array_equal(weight, state(step)["model"].layers[0].weight[1])


def test_in_memory_and_of_some_steps() -> None:
    run = saved(f"memory://{uuid.uuid4().hex}/run")
    found = inspect.leaf_history(run, steps=[np.int64(10), 2])
    assert found.steps == (10, 2)
    assert found["seen"][...].tolist() == [10, 2]
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="The steps there are 1"):
        inspect.leaf_history(run, [3])
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="There is no step"):
        inspect.leaf_history(f"{run}/none")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="`steps` is empty"):
        inspect.leaf_history(run, [])


def test_only_what_is_asked_for_is_read(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    w = np.zeros((2, 2**21))  # Each row is in a chunk of its own.
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, {"w": w + step, "b": 1.5})
    chunks = sorted((run / "000002/w").glob("c.*"))
    assert len(chunks) > 1
    chunks[-1].write_bytes(bytes(chunks[-1].stat().st_size))
    leaf = inspect.leaf_history(run)["w"]
    assert leaf[:, 0, 5].tolist() == [1, 2]
    assert leaf[0, 1, -1] == 1
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w'"):
        leaf[1, 1, -1]
    manager.delete(1)
    with pytest.raises(eqx_ckpt.CheckpointError, match="replaced or removed"):
        leaf[0, 1, -1]


def test_leaves_that_are_not_the_same_in_all_steps(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.zeros(3), "b": 1, "gone": 1, "moved": np.zeros(2)})
        manager.save(2, {"a": np.zeros(3), "b": 2.0, "moved": jnp.zeros(2, "float32")})
        manager.save(3, {"a": jnp.zeros(4), "b": 3.0, "new": 1, "moved": np.ones(2)})
    found = inspect.leaf_history(tmp_path)
    assert [*found] == []
    assert len(found) == 0
    for name, said in {
        "a": r"is float32\[4\] in step 3, and something else, or missing, in: 1, 2\.",
        "b": "is float in step 3, .*in: 1. Pass `steps` without them",
        "gone": "is missing in step 3, .*in: 1",
        "new": "in: 1, 2",
        "moved": r"is float64\[2\] in step 3, .*in: 2\.",
        "Moved": "No step has a leaf 'Moved'. .*'moved'",
    }.items():
        assert name not in found
        with pytest.raises(eqx_ckpt.LeafMismatchError, match=said):
            found[name]
    assert [*inspect.leaf_history(tmp_path, [2, 3])] == ["b"]


@pytest.mark.parametrize(
    "key", [[0, 1], np.array([True]), None, "a", (0, 0, 0, 0, 0), (..., ...), 4, (0, 7)]
)
def test_what_is_no_index(tmp_path: pathlib.Path, key: Any) -> None:
    leaf = inspect.leaf_history(saved(str(tmp_path)))["cube"]
    with pytest.raises(IndexError):
        leaf[key]


def test_as_an_xarray_tree(run: str) -> None:
    pytest.importorskip("xarray")
    found = inspect.leaf_history(run)
    tree = found.to_datatree()
    assert tree["step"].values.tolist() == [*STEPS]
    cube = tree["cube"]
    assert cube.dims == ("step", "cube_dim_0", "cube_dim_1", "cube_dim_2")
    assert not cube.variable._in_memory
    part = cube.sel(step=5)[::-2, [1, 3]]
    assert np.array_equal(part, oracle("cube")[2][::-2, [1, 3]])
    weight = tree["model/layers/0/weight"]
    assert weight.mean("step").shape == (4, 2)
    assert np.array_equal(tree["seen"], STEPS)


def test_names_of_axes_among_those_of_leaves(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("xarray")
    with CheckpointManager(tmp_path) as manager:
        for step in (3, 5):
            encoder = {
                "weight": jnp.ones(4) * step,
                "weight_dim_0": jnp.zeros(2),
                "layers": [{"weight": jnp.ones((8, 2)), "step_": step}],
            }
            manager.save(step, {"step": step, "encoder": encoder})
    tree = inspect.leaf_history(tmp_path).to_datatree()
    assert tree["step__"].values.tolist() == [3, 5]
    assert tree["step"].values.tolist() == [3, 5]
    assert tree["encoder/layers/0/step_"].dims == ("step__",)
    assert tree["encoder/layers/0/weight"].shape == (2, 8, 2)
    weight = tree["encoder/weight"]
    assert weight.dims == ("step__", "encoder/weight_dim_0")
    assert weight.sel(step__=5).values.tolist() == [5] * 4


def test_integers_stay_integers(tmp_path: pathlib.Path) -> None:
    values = {"most": [-(2**63), 2**63 - 1], "more": [-1, 2**63], "large": [2**63] * 2}
    with CheckpointManager(tmp_path) as manager:
        for i in (0, 1):
            manager.save(i, {name: of[i] for name, of in values.items()})
    found = inspect.leaf_history(tmp_path)
    for name, dtype in {"most": np.int64, "more": object, "large": object}.items():
        assert found[name].dtype == dtype
        assert found[name][:].tolist() == values[name]
        assert found[name][1] == values[name][1]
