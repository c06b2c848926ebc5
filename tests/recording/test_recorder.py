"""Saving samples inside compiled programs, under all transformations."""

import gc
import weakref

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ckpt
from eqx_ckpt.recording import record_scan, Recording, Samples
from helpers import until


LIKE = {"x": jnp.zeros(2), "i": jnp.int32(0)}


def sample(i, first=0):
    i = jnp.asarray(i + first, jnp.int32)
    return {"x": i + jnp.array([0.0, 0.5]), "i": i}


def loop(recorder, first=0, length=20, every=1):
    def body(recorder, i):
        keep = (i + first) % every == 0
        return recorder.save(sample(i, first), keep), None

    recorder, _ = jax.lax.scan(body, recorder, jnp.arange(length))
    return recorder.flush()


@pytest.mark.parametrize("block", [1, 7, 20, 100])
def test_in_a_scan(tmp_path, block):
    with Recording(tmp_path, LIKE) as recording:
        recorder = jax.jit(loop)(recording.recorder(block=block))
        recording.commit()
        assert recording.committed == 20
        recorder = jax.jit(loop)(recorder, 20)
        assert not recorder.failed
    found = Samples(tmp_path).read()
    assert found["i"].tolist() == list(range(40))
    np.testing.assert_array_equal(found["x"][:, 1], np.arange(40) + 0.5)


def test_in_while_and_cond(tmp_path):
    @jax.jit
    def run(recorder):
        def body(carry):
            i, recorder = carry
            recorder = jax.lax.cond(
                i % 2 == 0, lambda r: r.save(sample(i)), lambda r: r, recorder
            )
            return i + 1, recorder

        return jax.lax.while_loop(lambda c: c[0] < 9, body, (0, recorder))[1].flush()

    with Recording(tmp_path, LIKE) as recording:
        run(recording.recorder(block=2))
    assert Samples(tmp_path).read()["i"].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("nested", [False, True])
def test_under_vmap_each_chain_keeps_its_own(tmp_path, nested):
    firsts = jnp.array([0, 1, 2, 3])
    with Recording(tmp_path, LIKE, chains=4) as recording:
        recorder = recording.recorder(block=3)
        run = jax.vmap(lambda r, first: loop(r, first, 20, every=3))
        if nested:
            run = jax.vmap(run)
            recorder, firsts = jax.tree.map(
                lambda x: x.reshape(2, 2, *x.shape[1:]), (recorder, firsts)
            )
        jax.jit(run)(recorder, firsts)
    found = Samples(tmp_path)
    for chain in range(4):
        expected = [i for i in range(chain, chain + 20) if i % 3 == 0]
        assert found.read(chain=chain)["i"].tolist() == expected


def test_chains_without_vmap(tmp_path):
    with Recording(tmp_path, LIKE, chains=3) as recording:
        samples = jax.vmap(sample)(jnp.arange(3))
        keep = jnp.array([True, False, True])
        recorder = recording.recorder(block=4)
        jax.jit(lambda r: r.save(samples, keep).save(samples).flush())(recorder)
        jax.effects_barrier()
    assert Samples(tmp_path).read(chain=0)["i"].tolist() == [0, 0]
    assert Samples(tmp_path).read(chain=1)["i"].tolist() == [1]


@pytest.mark.parametrize(("replicas", "check_vma"), [(1, False), (2, True)])
def test_under_shard_map(tmp_path, replicas, check_vma):
    devices = np.array(jax.devices()[: 2 * replicas]).reshape(2, replicas)
    mesh = Mesh(devices, ("chains", "model"))
    spec = PartitionSpec("chains")
    like = {"x": jnp.zeros(20_000)}

    def run(recorder, first):
        def chain(recorder, first):
            def body(recorder, i):
                return recorder.save({"x": jnp.full(20_000, first + i)}), None

            return jax.lax.scan(body, recorder, jnp.arange(6.0))[0].flush()

        return jax.vmap(chain)(recorder, first)

    with Recording(tmp_path, like, chains=4) as recording:
        sharded = jax.shard_map(
            run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
        recorder = recording.recorder(block=4, sharding=NamedSharding(mesh, spec))
        jax.jit(sharded)(recorder, jnp.arange(4.0) * 10)
    found = Samples(tmp_path).read()["x"]
    expected = np.arange(4)[:, None] * 10 + np.arange(6)
    np.testing.assert_array_equal(
        found, np.broadcast_to(expected[..., None], found.shape)
    )


def test_keys_and_gradients(tmp_path):
    with Recording(tmp_path, {"key": jr.key(0), "y": jnp.float32(0)}) as recording:

        def loss(y, recorder):
            recorder = recorder.save({"key": jr.key(5), "y": y * 2}).flush()
            return y**2, recorder

        gradient, _ = jax.jit(jax.grad(loss, has_aux=True))(3.0, recording.recorder())
        assert gradient == 6
    found = Samples(tmp_path).read()
    assert (found["key"] == jr.key(5)).all()
    assert found["y"].tolist() == [6]


def test_more_than_max_samples_stops_the_loop(tmp_path):
    @jax.jit
    def run(recorder):
        def goes_on(carry):
            return (carry[0] < 1000) & ~carry[1].failed

        def body(carry):
            return carry[0] + 1, carry[1].save(sample(carry[0]))

        return jax.lax.while_loop(goes_on, body, (0, recorder))[0]

    recording = Recording(tmp_path, LIKE, max_samples=25)
    assert run(recording.recorder(block=10)) == 30
    with pytest.raises(eqx_ckpt.CheckpointError, match="`max_samples` is 25"):
        recording.close()
    assert Samples(tmp_path).read()["i"].tolist() == list(range(25))


def test_an_old_recorder_is_an_error(tmp_path):
    recording = Recording(tmp_path, LIKE)
    recorder = recording.recorder(block=2)
    jax.jit(loop)(recorder)
    recording.commit()
    assert jax.jit(loop)(recorder).failed
    with pytest.raises(eqx_ckpt.CheckpointError, match="older recorder was used again"):
        recording.commit()
    recording.close()
    assert Samples(tmp_path).committed == 20


def test_one_program_serves_all_recordings(tmp_path):
    traced = []

    @jax.jit
    def run(recorder):
        traced.append(1)
        return loop(recorder)

    dead = []
    for name in "ab":
        with Recording(tmp_path / name, LIKE) as recording:
            run(recording.recorder(block=5))
        dead.append(weakref.ref(recording._log))
        del recording
    assert len(traced) == 1

    def are_dead():
        gc.collect()
        return not any(ref() for ref in dead)

    until(are_dead)  # A thread of JAX may hold its last call a moment longer.
    assert Samples(tmp_path / "b").committed == 20


@pytest.mark.parametrize("keep", [2, 1.0, [True] * 3, [[True, False]]], ids=str)
@pytest.mark.parametrize("chains", [None, 2])
def test_keep_that_is_not_a_bool(tmp_path, keep, chains):
    many = sample(0) if chains is None else jax.vmap(sample)(jnp.arange(2))
    with Recording(tmp_path, LIKE, chains=chains) as recording:
        recorder = recording.recorder(block=4)
        with pytest.raises(ValueError, match="`keep` is .*must be bool"):
            jax.jit(lambda r, keep: r.save(many, keep))(recorder, jnp.array(keep))
        with pytest.raises(ValueError, match="`keep` is .*must be bool"):
            recorder.save(many, keep)
        for other in (None, "x", {"a": True}, jax.random.key(0)):
            with pytest.raises(ValueError, match="`keep` is .*must be bool"):
                recorder.save(many, other)
        recorder.save(many, np.True_).save(many, False).flush()
    assert Samples(tmp_path).committed == 1


def test_what_it_refuses(tmp_path):
    with Recording(tmp_path, LIKE) as recording:
        with pytest.raises(ValueError, match="`block` is 0"):
            recording.recorder(block=0)
        recorder = recording.recorder()
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="'i': not in the samples"):
            jax.jit(lambda r: r.save({"x": jnp.zeros(2)}))(recorder)


def test_the_strictest_promotion(tmp_path):
    def run(some):
        def save(i, some):
            sample = {"x": jnp.full(2, i, jnp.float32), "i": i}
            return some.save(sample, keep=i > 1)

        return jax.lax.fori_loop(0, 6, save, some)

    buffer = eqx_ckpt.recording.SampleBuffer(LIKE, 3)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        Recording(tmp_path, LIKE, chains=2) as recording,
    ):
        recorder = recording.recorder(block=3)
        jax.eval_shape(
            lambda r, b: (jax.vmap(run)(r).flush(), run(b)), recorder, buffer
        )


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, ">f4", "<M8[s]"])
def test_dtypes_that_a_device_would_change(tmp_path, dtype):
    like = {"x": np.zeros(2, dtype), "ok": np.float32(0)}
    with Recording(tmp_path, like) as recording:
        for record in (
            recording.recorder,
            lambda: record_scan(
                lambda state, _: (state, like), 0, length=2, recording=recording
            ),
        ):
            with pytest.raises(
                eqx_ckpt.CheckpointError, match="(?s)'x': .*jax_enable_x64"
            ):
                record()
    with pytest.raises(eqx_ckpt.CheckpointError, match="'x': "):
        eqx_ckpt.recording.SampleBuffer(like, 3)


def test_64_bits_where_they_are_enabled(tmp_path):
    like = {"x": np.zeros(2), "n": np.int64(0)}
    sample = {"x": np.array([1.0, 1 / 3]), "n": np.int64(2**40 + 5)}
    with jax.enable_x64(True), Recording(tmp_path, like) as recording:
        recorder = jax.jit(lambda r: r.save(sample))(recording.recorder(block=3))
        narrow = {"x": jnp.ones(2, jnp.float32), "n": jnp.int64(0)}
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="float32"):
            recorder.save(narrow)
        with (
            jax.enable_x64(False),
            pytest.raises(eqx_ckpt.CheckpointError, match="jax_enable_x64"),
        ):
            recorder.save(sample)
        recorder.flush()
    found = Samples(tmp_path).read()
    np.testing.assert_array_equal(found["x"][0], sample["x"])
    assert found["n"].tolist() == [2**40 + 5]
