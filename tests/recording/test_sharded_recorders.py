"""Recorders in programs whose chains are sharded over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_ckpt.recording import Recording, Samples
from versions import thinned


LIKE = {"x": jnp.zeros(3)}
CHAINS, STEPS = 8, 11
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
)
CALLBACK = "custom-call callback"
TRANSFER = re.compile(r"\b(infeed|outfeed|send|recv|copy-start|custom-call)\((.*)")


needs_explicit_axes = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="JAX 0.9 gathers chains on Explicit axes."
)


def start() -> np.ndarray:
    return np.arange(CHAINS * 3, dtype=np.float32).reshape(CHAINS, 3)


def loop(x, recorder):
    """Of one chain, or of all of them."""

    def body(carry, i):
        x, recorder = carry
        x = x / 2 + i
        return (x, recorder.save({"x": x}, keep=x[..., 0] > 1)), None

    (x, recorder), _ = jax.lax.scan(body, (x, recorder), jnp.arange(STEPS) * 1.0)
    return x, recorder.flush()


def expected() -> list[np.ndarray]:
    x, found = start(), []
    for i in range(STEPS):
        x = np.float32(x / 2 + i)
        found.append(x)
    every = np.stack(found, axis=1)
    return [chain[chain[:, 0] > 1] for chain in every]


@pytest.mark.parametrize("form", ["all", "vmap"])
@pytest.mark.parametrize("is_set", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize("shape", thinned([((4,),), ((2, 2),)], 2), ids=str)
@pytest.mark.parametrize("how", ["auto", "explicit", "explicit, by device_put"])
def test_each_device_sends_its_own_chains(tmp_path, form, is_set, shape, how):
    kind = AxisType.Auto if how == "auto" else AxisType.Explicit
    names = ("chains", "model")[: len(shape)]
    devices = jax.devices()[:4]
    mesh = jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)
    place = NamedSharding(mesh, P("chains"))
    run = jax.jit(loop if form == "all" else jax.vmap(loop))
    with Recording(tmp_path, LIKE, chains=CHAINS) as recording:
        if how == "explicit, by device_put":
            recorder = jax.device_put(recording.recorder(block=4), place)
        else:
            recorder = recording.recorder(block=4, sharding=place)
        x = jax.device_put(start(), place)
        if is_set:
            with jax.set_mesh(mesh):
                text = run.lower(x, recorder).compile().as_text()
                run(x, recorder)
        else:
            text = run.lower(x, recorder).compile().as_text()
            run(x, recorder)
    # On meshes of Explicit axes, JAX 0.9 gathers them: its `shard_map` fails in `vmap`.
    is_old = jax.__version_info__ < (0, 10) and AxisType.Explicit in mesh.axis_types
    assert is_old or not COLLECTIVE.findall(text)
    found = Samples(tmp_path)
    for chain, wanted in enumerate(expected()):
        np.testing.assert_array_equal(found.read(chain=chain)["x"], wanted)


@pytest.mark.parametrize(
    ("kinds", "spec", "is_sharded"),
    [
        ((AxisType.Auto, AxisType.Explicit), P("chains"), True),
        ((AxisType.Explicit, AxisType.Auto), P("chains"), True),
        ((AxisType.Explicit, AxisType.Auto), P(("chains", "model")), True),
        ((AxisType.Explicit, AxisType.Explicit), P("chains", "model"), False),
    ],
    ids=str,
)
@needs_explicit_axes
def test_axes_of_both_kinds(tmp_path, kinds, spec, is_sharded):
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("chains", "model"), kinds, devices=devices)
    like = {"x": jnp.zeros(4)}

    def loop(x, recorder):
        def body(carry, i):
            x, recorder = carry
            x = x / 2 + i
            return (x, recorder.save({"x": x}, keep=x.max(1) > 1)), None

        (x, recorder), _ = jax.lax.scan(body, (x, recorder), jnp.arange(STEPS) * 1.0)
        return x, recorder.flush()

    x = np.arange(CHAINS * 4, dtype=np.float32).reshape(CHAINS, 4)
    with Recording(tmp_path, like, chains=CHAINS) as recording:
        place = NamedSharding(mesh, P(spec[0])) if is_sharded else None
        recorder = recording.recorder(block=4, sharding=place)
        jax.jit(loop)(jax.device_put(x, NamedSharding(mesh, spec)), recorder)
    drawn = []
    for i in range(STEPS):
        x = np.float32(x / 2 + i)
        drawn.append(x)
    found = Samples(tmp_path)
    for chain, wanted in enumerate(np.stack(drawn, axis=1)):
        kept = wanted[wanted.max(1) > 1]
        np.testing.assert_array_equal(found.read(chain=chain)["x"], kept)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@needs_explicit_axes
def test_a_recorder_adds_no_collective(tmp_path, kind):
    """To a program whose chains depend on each other."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("chains",), (kind,), devices=devices)
    place = NamedSharding(mesh, P("chains"))

    def loop(x, recorder):
        def body(carry, i):
            x, recorder = carry
            x = x / 2 + i + x.mean(0)
            if recorder is not None:
                recorder = recorder.save({"x": x}, keep=x[:, 0] > 1)
            return (x, recorder), None

        (x, recorder), _ = jax.lax.scan(body, (x, recorder), jnp.arange(STEPS) * 1.0)
        return x, None if recorder is None else recorder.flush()

    x = jax.device_put(start(), place)

    def moves(recorder):
        text = jax.jit(loop).lower(x, recorder).compile().as_text()
        transfers = [
            kind + " callback" * ("callback" in rest)
            for kind, rest in TRANSFER.findall(text)
        ]
        return sorted(COLLECTIVE.findall(text)), transfers

    collectives, transfers = moves(None)
    assert collectives
    assert not transfers
    with Recording(tmp_path, LIKE, chains=CHAINS) as recording:
        found = moves(recording.recorder(block=4, sharding=place))
    # Each call of the recorder has one callback for begun, and one for whole blocks.
    assert found == (collectives, 4 * [CALLBACK])


@pytest.mark.parametrize("spec", [P(), P(None, "chains"), P("chains", None)], ids=str)
def test_a_sharding_of_something_else(tmp_path, spec):
    mesh = jax.make_mesh((2,), ("chains",), devices=jax.devices()[:2])
    with Recording(tmp_path / "a", LIKE, chains=CHAINS) as recording:
        if spec == P("chains", None):
            recording.recorder(sharding=NamedSharding(mesh, spec))
        else:
            with pytest.raises(ValueError, match=r"`sharding` is .*first axis"):
                recording.recorder(sharding=NamedSharding(mesh, spec))
    with (
        Recording(tmp_path / "b", LIKE) as recording,
        pytest.raises(ValueError, match="`sharding` is .*`chains`"),
    ):
        recording.recorder(sharding=NamedSharding(mesh, P("chains")))
    with (
        Recording(tmp_path / "c", LIKE, chains=7) as recording,
        pytest.raises(ValueError, match="`sharding` is .*7 chains"),
    ):
        recording.recorder(sharding=NamedSharding(mesh, P("chains")))
