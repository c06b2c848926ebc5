"""Arrays on an accelerator, which are copied to the host.

On a machine without one, the CPU's devices are taken for it: they have pinned memory,
too.
"""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import leaf_data, staging


PINNED = "pinned_host"

DTYPES = (
    "bool int2 uint2 int4 uint4 int8 uint8 int16 int32 int64 uint64 float16 bfloat16 "
    "float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e8m0fnu "
    "float4_e2m1fn"
).split()
SHAPES = [(), (0,), (3,), (7, 5), (300, 113)]
AXES = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(params=["least", "all"], autouse=True)
def on_an_accelerator(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether small arrays are in pinned memory, too."""
    if jax.default_backend() == "cpu":
        for module in (leaf_data, staging):
            monkeypatch.setattr(module, "is_on_host", lambda leaf: False)
    if request.param == "all":
        monkeypatch.setattr(leaf_data, "_LEAST_PINNED", 0)


def bits(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def check(tree: dict[str, Any], path: Path) -> None:
    back = eqx_ckpt.tree_deserialise_leaves(path, tree)
    for name, leaf in tree.items():
        assert back[name].sharding == leaf.sharding, name
        assert back[name].dtype == leaf.dtype, name
        assert bits(back[name]) == bits(leaf), name


def arrays() -> dict[str, jax.Array]:
    """All dtypes and shapes; integers that each of the dtypes has."""
    numbers = np.random.default_rng(0)
    found: dict[str, jax.Array] = {}
    for name in DTYPES:
        dtype = getattr(ml_dtypes, name, None) or np.dtype(name)
        for shape in SHAPES:
            array = jnp.asarray(numbers.integers(0, 2, shape)).astype(dtype)
            found[f"{name}{shape}"] = jax.device_put(array)
    return found


def special() -> dict[str, jax.Array]:
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    found = {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 5),
        "weak": jnp.asarray(0.5),
        "committed": jax.device_put(jnp.arange(9.0), device),
        "pinned": jax.device_put(jnp.arange(9.0), pinned),
    }
    for axis in AXES:
        mesh = jax.make_mesh((1,), ("x",), (axis,), devices=[device])
        sharding = NamedSharding(mesh, P("x"))
        found[axis.name] = jax.device_put(jnp.ones((4, 3)), sharding)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
    for spec in (P("x"), P()):
        found[f"{spec}"] = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, spec))
    return found


@pytest.mark.parametrize("made", [arrays, special])
def test_all_kinds_of_arrays(made: Any, tmp_path: Path):
    with jax.enable_x64(True):
        tree = made()
        eqx_ckpt.tree_serialise_leaves(tmp_path / "sync", tree)
        check(tree, tmp_path / "sync")
        eqx_ckpt.tree_serialise_leaves_async(tmp_path / "async", tree).result()
        check(tree, tmp_path / "async")


@pytest.mark.parametrize("axis", AXES)
def test_in_each_context(axis: AxisType, tmp_path: Path):
    tree = {"x": jnp.asarray([float("nan"), 1.0]), "key": jax.random.key(0)}
    mesh = jax.make_mesh((1,), ("x",), (axis,), devices=jax.devices()[:1])
    contexts = [
        contextlib.nullcontext(),
        jax.set_mesh(mesh),
        jax.transfer_guard("disallow"),
        jax.debug_nans(True),
    ]
    for i, context in enumerate(contexts):
        with context:
            eqx_ckpt.tree_serialise_leaves(tmp_path / str(i), tree)
        check(tree, tmp_path / str(i))

    @jax.jit
    def traced(y: jax.Array) -> jax.Array:
        eqx_ckpt.tree_serialise_leaves(tmp_path / "traced", tree)
        return y

    traced(jnp.zeros(()))
    check(tree, tmp_path / "traced")


def test_a_step_donates_what_is_being_saved(tmp_path: Path):
    like = {"x": jax.ShapeDtypeStruct((2**20,), jnp.float32)}
    step = jax.jit(lambda x: x * 7, donate_argnums=0)
    x = jnp.ones(2**20)
    saves: list[Any] = []
    for i in range(4):
        saves.append(eqx_ckpt.tree_serialise_leaves_async(tmp_path / str(i), {"x": x}))
        x = step(x)
    for i, save in enumerate(saves):
        save.result()
        found = eqx_ckpt.tree_deserialise_leaves(tmp_path / str(i), like)
        assert (np.asarray(found["x"]) == 7.0**i).all()


def test_what_is_more_than_the_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(staging, "_PINNED_BYTES", 2**21)
    tree = {str(i): jnp.full(2**18, float(i)) for i in range(8)}
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "a", tree).result()
    check(tree, tmp_path / "a")


def test_when_jax_has_no_pinned_memory_left(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    asked: list[Any] = []
    device_put = jax.device_put

    def full(x: Any, target: Any = None, **kwargs: Any) -> Any:
        if getattr(target, "memory_kind", None) == PINNED:
            asked.append(x)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")
        return device_put(x, target, **kwargs)

    monkeypatch.setattr(leaf_data, "_without_pinned", set())
    monkeypatch.setattr(leaf_data, "_LEAST_PINNED", 0)
    tree = {"a": jnp.arange(5.0), "b": jnp.arange(7.0)}
    monkeypatch.setattr("jax.device_put", full)
    with caplog.at_level(logging.WARNING):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "a", tree)
        eqx_ckpt.tree_serialise_leaves_async(tmp_path / "b", tree).result()
    monkeypatch.undo()
    assert len(asked) == 1
    assert "RESOURCE_EXHAUSTED" in caplog.text
    check(tree, tmp_path / "a")
    check(tree, tmp_path / "b")
