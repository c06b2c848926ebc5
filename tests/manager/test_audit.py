"""A training is replayed, and compared with what was saved."""

import pathlib
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect
from helpers import files_below


def begin() -> dict[str, Any]:
    """A state of each kind of leaf, and what is not saved."""
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    return {
        "model": model,
        "key": jax.random.key(1),
        "zero": jnp.zeros(3),
        "mean": np.full(5, np.nan),
        "half": jnp.ones(2, jnp.bfloat16),
        "seen": 0,
        "rate": 0.5,
    }


@eqx.filter_jit(donate="all")
def updated(arrays: Any, step: Any) -> Any:
    model, key, zero, half = arrays
    key, sub = jax.random.split(key)
    noise = jax.random.normal(sub, (2,))
    model = jax.tree.map(lambda x: x * 0.9 + noise[0] * step, model)
    return model, key, zero, half * 0.5


def step_fn(state: dict[str, Any], step: int) -> dict[str, Any]:
    model, static = eqx.partition(state["model"], eqx.is_array)
    arrays = model, state["key"], state["zero"], state["half"]
    model, key, zero, half = updated(arrays, jnp.asarray(step))
    return state | {
        "model": eqx.combine(model, static),
        "key": key,
        "zero": zero,
        "half": half,
        "mean": state["mean"] + step,
        "seen": state["seen"] + 1,
    }


def trained(run: Any, wrong: Any = None, at: int = 0, **how: Any) -> CheckpointManager:
    """A run of ten steps, of which each second one is saved; one went wrong."""
    manager, state = CheckpointManager(run, **how), begin()
    for step in range(1, 11):
        state = step_fn(state, step)
        if step == at:
            state |= wrong(state)
        if step % 2 == 0:
            manager.save(step, state).result()
    return manager


def test_all_is_reproduced(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "run")
    before = files_below(tmp_path)
    found = manager.audit(step_fn, begin(), 2, 10)
    assert found.ok
    assert (found.steps, found.since, found.leaves) == ((4, 6, 8, 10), 10, ())
    assert str(found) == "The replay reproduces 4, 6, 8, 10."
    assert files_below(tmp_path) == before
    skeleton = eqx.filter_eval_shape(begin)
    assert manager.audit(step_fn, skeleton | {"mean": begin()["mean"]}, 8, 10).ok


WRONG = {
    "one bit": (
        "half",
        lambda s: {"half": jnp.nextafter(s["half"], jnp.inf * s["half"])},
    ),
    "the sign of a zero": ("zero", lambda s: {"zero": -s["zero"]}),
    "the bits of a NaN": ("mean", lambda s: {"mean": -s["mean"]}),
    "a key": ("key", lambda s: {"key": jax.random.fold_in(s["key"], 0)}),
    "a number": ("seen", lambda s: {"seen": s["seen"] + 1}),
    "a float": ("rate", lambda s: {"rate": float(np.nextafter(0.5, 1))}),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("at", [5, 8])
def test_the_first_step_that_went_wrong(
    tmp_path: pathlib.Path, what: str, at: int
) -> None:
    name, wrong = WRONG[what]
    manager = trained(tmp_path / "run", wrong, at)
    calls: list[int] = []

    def counted(state: Any, step: int) -> Any:
        calls.append(step)
        return step_fn(state, step)

    found = manager.audit(counted, begin(), 2, 10)
    saved = at + at % 2
    assert (found.ok, found.since, found.step) == (False, saved - 2, saved)
    assert found.steps == tuple(range(4, saved + 1, 2))
    assert found.leaves[0] == name
    assert f"does not reproduce step {saved}, which differs in {name!r}" in str(found)
    assert calls == list(range(3, saved + 1))
    # What came after is right.
    assert manager.audit(step_fn, begin(), saved, 10).ok == (saved < 10)


def test_all_leaves_are_named_in_the_order_of_the_tree(tmp_path: pathlib.Path) -> None:
    manager = trained(
        tmp_path, lambda s: {"key": jax.random.key(7), "seen": -1, "rate": 9.0}, at=3
    )
    found = manager.audit(step_fn, begin(), 2, 10)
    biases = [f"model/layers/{i}/{of}" for i in (0, 1) for of in ("weight", "bias")]
    assert found.step == 4
    assert found.leaves == ("key", *biases, "rate", "seen")


def test_sharded(tmp_path: pathlib.Path) -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    rows = NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
    step = jax.jit(lambda w: w * 1.5 + 1)
    w = jax.device_put(jnp.arange(8.0), rows)
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3):
            w = step(w)
            wrong = np.asarray(w) + np.eye(8, dtype=np.float32)[7] * (number == 3)
            manager.save(number, {"w": jax.device_put(wrong, rows)})
        like = {"w": jax.ShapeDtypeStruct((8,), w.dtype)}

        def step_fn(state: Any, number: int) -> Any:
            assert state["w"].sharding == rows
            return {"w": step(state["w"])}

        assert manager.audit(step_fn, like, 1, 2, sharding=rows).ok
        found = manager.audit(step_fn, like, 1, 3, sharding=rows)
    assert (found.step, found.leaves) == (3, ("w",))


@pytest.mark.parametrize("wrong", range(2))
def test_each_replica_is_compared(tmp_path: pathlib.Path, wrong: int) -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    devices = jax.devices()[:2]
    everywhere = NamedSharding(jax.make_mesh((2,), ("x",)), P())

    def copies(*values: float) -> Any:
        each = [
            jax.device_put(jnp.full(2, value, "float32"), device)
            for value, device in zip(values, devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays((2,), everywhere, each)

    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": copies(step, step)})
        made = [2.0, 2.0]
        assert manager.audit(
            lambda s, i: {"w": copies(*made)}, {"w": copies(0, 0)}, 1, 2
        ).ok
        made[wrong] = 9
        found = manager.audit(
            lambda s, i: {"w": copies(*made)}, {"w": copies(0, 0)}, 1, 2
        )
    assert found.leaves == ("w",)


def test_an_array_of_another_byte_order(tmp_path: pathlib.Path) -> None:
    """As NumPy makes it of one that is not the machine's."""
    like = {"a": np.arange(3, dtype=">f4")}
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": (like["a"] * 2**step).astype(">f4")})
        assert manager.audit(lambda s, i: {"a": s["a"] * 2}, like, 1, 3).ok
        found = manager.audit(lambda s, i: {"a": s["a"] * i}, like, 1, 3)
    assert (found.step, found.leaves) == (3, ("a",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(2, "datetime64[D]"), np.zeros(2, "int64")),
        (np.zeros(2, "datetime64[D]"), np.zeros(2, "datetime64[s]")),
        (jnp.zeros(2, "float8_e4m3fn"), jnp.zeros(2, "uint8")),
    ],
    ids=str,
)
def test_a_step_fn_that_returns_another_dtype(
    tmp_path: pathlib.Path, before: Any, after: Any
) -> None:
    """Also where the files have one dtype for both."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"a": before})
        with pytest.raises(ValueError, match="another tree than it got, at step 2"):
            manager.audit(lambda s, i: {"a": after}, {"a": before}, 1, 2)


def test_no_error_names_what_an_audit_has_not(tmp_path: pathlib.Path) -> None:
    """It takes no arguments of a restore but `like` and `sharding`."""
    trained(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "mirror")
    state = begin()
    fewer = {name: leaf for name, leaf in state.items() if name != "seen"}
    likes = {
        "'more': Python int in `like`, nothing in": state | {"more": 1},
        "'seen': nothing in `like`, Python int in": fewer,
        "'zero': float32\\[4\\] in `like`, float32": state | {"zero": jnp.zeros(4)},
        "'zero': bfloat16": state | {"zero": jnp.zeros(3, jnp.bfloat16)},
        "'seen': float32": state | {"seen": jnp.zeros(())},
    }
    others = ["missing", "where", "unexpected", "casting", "prefix", "mismatched"]
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror")
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        for said, like in likes.items():
            with pytest.raises(eqx_ckpt.LeafMismatchError, match=said) as e:
                manager.audit(never, like, 2, 4)
            assert str(e.value).startswith("Step 2 does not match `like`:")
            assert not any(f"`{name}" in str(e.value) for name in others)
        next((tmp_path / "run/000002/half").glob("c*")).write_bytes(b"")
        has_no = "has no `on_damage`: audit other steps, or those of a mirror"
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=has_no):
            manager.audit(never, state, 2, 4)
    with CheckpointManager(tmp_path / "mirror") as manager:
        assert manager.audit(step_fn, state, 2, 4).ok


def never(state: Any, step: int) -> Any:
    raise AssertionError("The replay began.")


def test_what_is_wrong_is_said_before_the_replay(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path)
    for a, b in ((4, 4), (6, 4)):
        with pytest.raises(ValueError, match=f"`a` is {a}, and `b` is {b}: pass"):
            manager.audit(never, begin(), a, b)
    for a, b in ((3, 8), (2, 12), (1, 2)):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="The steps there"):
            manager.audit(never, begin(), a, b)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'zero'"):
        manager.audit(never, begin() | {"zero": jnp.zeros(4)}, 2, 4)
    manager.save(12, begin() | {"zero": jnp.zeros(4)}).result()
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'zero'"):
        manager.audit(never, begin(), 2, 12)
    next(iter((tmp_path / "000002/half").glob("c*"))).write_bytes(b"")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'half'"):
        manager.audit(never, begin(), 2, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {**s, "more": 1}, "'more': nothing before, and Python int after"),
        (lambda s: {"key": s["key"]}, "'half': bfloat16\\[2\\] before, and nothing"),
        (lambda s: s | {"zero": jnp.zeros(4)}, "'zero': float32\\[3\\] before, and"),
        (lambda s: s | {"seen": jnp.zeros(())}, "'seen': Python int before, and float"),
        (lambda s: None, "and nothing after"),
    ],
)
def test_a_step_fn_that_returns_another_tree(
    tmp_path: pathlib.Path, change: Any, said: str
) -> None:
    manager = trained(tmp_path)
    calls: list[int] = []

    def changed(state: Any, step: int) -> Any:
        calls.append(step)
        return change(step_fn(state, step))

    with pytest.raises(ValueError, match=f"(?s)another tree .*at step 3:.*{said}"):
        manager.audit(changed, begin(), 2, 10)
    assert calls == [3]


def test_a_run_goes_on_from_its_own_step_after_an_audit(tmp_path: pathlib.Path) -> None:
    trained(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        state = manager.restore(begin())
        manager.audit(step_fn, begin(), 2, 4)
        manager.save(11, step_fn(state, 11))
    history = inspect.read_manifest(tmp_path / "000011").history
    assert history is not None
    assert history.sessions[-1].step == 10


def test_steps_that_only_a_mirror_has(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "mirror")
    for step in (2, 6):
        manager.delete(step)
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror")
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        assert manager.audit(step_fn, begin(), 2, 10).steps == (4, 6, 8, 10)
