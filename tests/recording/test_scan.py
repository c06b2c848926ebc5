"""Recording scans: what is recorded is what `jax.lax.scan` stacks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

import eqx_ckpt
from eqx_ckpt.recording import record_scan, Recording, SampleBuffer, Samples
from helpers import assert_same


LIKE = {"theta": jnp.zeros(3), "n": jnp.int32(0)}


class Sampler(eqx.Module):
    """Its state has a key, a Python number and a function."""

    theta: jax.Array
    key: jax.Array
    n: jax.Array | int
    jump: object = jnp.tanh


def start() -> Sampler:
    return Sampler(jnp.zeros(3), jr.key(1), 0)


def step(state, x):
    key, subkey = jr.split(state.key)
    push = 0.0 if x is None else x
    theta = state.jump(state.theta) + jr.normal(subkey, (3,)) + push
    state = Sampler(theta, key, state.n + 1, state.jump)
    return state, {"theta": theta, "n": jnp.asarray(state.n, jnp.int32)}


def expected(length, xs=None):
    arrays, rest = eqx.partition(start(), eqx.is_array_like)

    def once(arrays, x):
        state, sample = step(eqx.combine(arrays, rest), x)
        return eqx.filter(state, eqx.is_array_like), sample

    arrays, samples = jax.lax.scan(once, arrays, xs, length=length)
    return eqx.combine(arrays, rest), samples


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"thin": 3},
        {"block": 7},
        {"thin": 4, "block": 5, "commit_every": 16},
        {"block": 60},
        {"commit_every_seconds": 1e-9, "block": 20},
        {"commit_every_seconds": 0.01},
        {"commit_every_seconds": 0.05, "thin": 3},
        {"block": 59},
    ],
    ids=str,
)
def test_it_records_what_a_scan_stacks(tmp_path, kwargs):
    with Recording(tmp_path, LIKE) as recording:
        state = record_scan(step, start(), length=60, recording=recording, **kwargs)
        assert recording.steps == 60
        assert eqx.tree_equal(recording.resume(state), state)
    last, samples = expected(60)
    # XLA may compile a loop of one step in another way, which rounds differently.
    rtol = 1e-5 if "commit_every_seconds" in kwargs else 0
    leaves = jax.tree.leaves(state), jax.tree.leaves(last)
    assert eqx.tree_equal(*leaves, rtol=rtol, atol=rtol)
    thin = kwargs.get("thin", 1)
    found = Samples(tmp_path).read()
    for name, array in samples.items():
        np.testing.assert_allclose(found[name], array[thin - 1 :: thin], rtol=rtol)


def test_xs_and_keep(tmp_path):
    xs = jnp.linspace(0, 1, 40)

    def keep(state, sample):
        return (state.n % 3 == 0) & (sample["n"] > 10)

    with Recording(tmp_path, LIKE) as recording:
        record_scan(
            step, start(), length=40, recording=recording, xs=xs, keep=keep, block=6
        )
    n = np.asarray(expected(40, xs)[1]["n"])
    theta = expected(40, xs)[1]["theta"][(n % 3 == 0) & (n > 10)]
    np.testing.assert_array_equal(Samples(tmp_path).read()["theta"], theta)


@pytest.mark.parametrize("first", [[0, 20], [20, 20]])
def test_chains_under_vmap(tmp_path, first):
    def one(arrays, _):
        def chain(arrays):
            theta = arrays["theta"] + jr.normal(jr.fold_in(arrays["key"], 0), (3,))
            sample = {"theta": theta, "n": arrays["n"] + 1}
            return {"key": jr.split(arrays["key"])[0], **sample}, sample

        return jax.vmap(chain)(arrays)

    def keep(arrays, sample):
        return sample["n"] > jnp.array(first)

    state = {"theta": jnp.zeros((2, 3)), "key": jr.split(jr.key(0))}
    state["n"] = jnp.zeros(2, jnp.int32)
    with Recording(tmp_path, LIKE, chains=2) as recording:
        record_scan(one, state, length=30, recording=recording, keep=keep, block=8)
    _, samples = jax.lax.scan(one, state, length=30)
    found = Samples(tmp_path)
    for chain in range(2):
        theta = samples["theta"][first[chain] :, chain]
        np.testing.assert_array_equal(found.read(chain=chain)["theta"], theta)


def test_a_scan_goes_on(tmp_path):
    for total in (20, 20, 44):
        with Recording(tmp_path, LIKE) as recording:
            state = start()
            if recording.committed is not None:
                state = recording.resume(
                    jax.tree.map(jnp.asarray, eqx.filter(state, eqx.is_array_like))
                )
                state = eqx.combine(state, start())
            left = total - recording.steps
            state = record_scan(step, state, length=left, recording=recording, block=4)
    last, samples = expected(44)
    assert_same(jax.tree.leaves(state)[0], jax.tree.leaves(last)[0])
    found = Samples(tmp_path).read()
    np.testing.assert_array_equal(found["theta"], samples["theta"])


@pytest.mark.parametrize("kind", [np.zeros, jnp.zeros])
def test_a_state_with_numbers_goes_on(tmp_path, kind):
    def step(state, _):
        sample = {"theta": state["theta"] * 1.0, "n": state["n"] * 1}
        return {"theta": state["theta"] + 0.5, "n": state["n"] + 1}, sample

    state = {"theta": kind(3), "n": 0}
    for committed in (None, 4):
        with Recording(tmp_path, LIKE) as recording:
            assert recording.committed == committed
            if committed:
                state = recording.resume(state)
            record_scan(step, state, length=4, recording=recording)
    found = Samples(tmp_path).read()
    assert found["n"].tolist() == list(range(8))
    np.testing.assert_array_equal(found["theta"][:, 0], np.arange(8) / 2)


def test_xs_of_numpy(tmp_path):
    def step(state, x):
        return state, {"x": x}

    with Recording(tmp_path, {"x": jnp.float32(0)}) as recording:
        record_scan(step, 0, length=4, recording=recording, xs=np.arange(4.0), block=3)
        record_scan(step, 0, length=0, recording=recording, xs=np.zeros(0))
    assert Samples(tmp_path).read()["x"].tolist() == [0, 1, 2, 3]


def test_a_program_is_compiled_once(tmp_path):
    traced = []

    def counting(state, x):
        traced.append(1)
        return step(state, x)

    for name in "ab":
        with Recording(tmp_path / name, LIKE) as recording:
            record_scan(counting, start(), length=20, recording=recording, block=10)
        traced.append(0)
    # For the second one, only the shapes of its samples are looked at.
    assert sum(traced[traced.index(0) :]) == 1


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"thin": 0}, "`thin` is 0"),
        ({"thin": 7}, "`length` is 60 and `thin` is 7"),
        ({"block": 0}, "`block` is 0"),
        ({"length": -1}, "`length` is -1"),
        ({"commit_every": -1}, "`commit_every` is -1"),
        ({"commit_every_seconds": -1}, "`commit_every_seconds` is -1"),
        ({"commit_every_seconds": float("nan")}, "`commit_every_seconds` is nan"),
        ({"commit_every_seconds": "a"}, "`commit_every_seconds` is 'a'"),
        ({"xs": jnp.zeros(59)}, "`xs` has a leaf of shape"),
        ({"xs": [0] * 60}, r"`xs` has a leaf of shape \(\)"),
        ({"xs": 1.0}, r"`xs` has a leaf of shape \(\)"),
    ],
)
def test_arguments(tmp_path, kwargs, words, unchecked):
    kwargs = {"length": 60, **kwargs}
    with unchecked.recording.Recording(tmp_path, LIKE) as recording:
        with pytest.raises(ValueError, match=words):
            unchecked.recording.record_scan(
                step, start(), recording=recording, **kwargs
            )
        assert recording.committed is None


def test_inside_jit(tmp_path):
    with (
        Recording(tmp_path, LIKE) as recording,
        pytest.raises(ValueError, match="inside `jax.jit`"),
    ):
        jax.jit(lambda x: record_scan(step, x, length=60, recording=recording))(
            jnp.zeros(3)
        )


def test_samples_that_disagree_are_found_first(tmp_path):
    ran = []

    def other(state, x):
        jax.debug.callback(lambda: ran.append(1))
        return state, {"theta": jnp.zeros(4), "n": 1.0}

    with (
        Recording(tmp_path, LIKE) as recording,
        pytest.raises(
            eqx_ckpt.LeafMismatchError, match=r"(?s)'n'.*'theta': float32\[3\]"
        ),
    ):
        record_scan(other, start(), length=60, recording=recording)
    assert not ran


def test_only_arrays_of_a_state_can_change(tmp_path):
    def step(state, _):
        n, phase, norm = state
        return (n + 1, phase + "!", norm), {"n": n}

    begun = (jnp.float32(0), "warm-up", jnp.linalg.norm)
    with Recording(tmp_path, {"n": jnp.float32(0)}) as recording:
        with pytest.raises(ValueError, match=r"`state\[1\]` from 'warm-up' to"):
            record_scan(step, begun, length=5, recording=recording)
        record_scan(
            lambda state, _: ((state[0] + 1, *state[1:]), {"n": state[0]}),
            begun,
            length=5,
            recording=recording,
        )
    assert Samples(tmp_path).committed == 5


def test_a_buffer_under_transformations():
    def run(buffer, first):
        def body(i, buffer):
            sample = {"theta": jnp.full(3, i + first, jnp.float32), "n": i + first}
            return buffer.save(sample, keep=i % 2 == first % 2)

        return jax.lax.fori_loop(0, 10, body, buffer)

    buffer = SampleBuffer(LIKE, capacity=4)
    one = jax.jit(run)(buffer, jnp.int32(0))
    assert (int(one.count), int(one.overflow)) == (4, 1)
    assert one.samples["n"].tolist() == [0, 2, 4, 6]
    firsts = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    many = jax.vmap(jax.vmap(run, (None, 0)), (None, 0))(buffer, firsts)
    assert many.count.tolist() == [[4, 4], [4, 4]]
    assert many.samples["n"][1, 1].tolist() == [4, 6, 8, 10]
    assert many.samples["theta"].shape == (2, 2, 4, 3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_buffer_of_sharded_samples(kind):
    mesh = jax.make_mesh((4,), ("d",), (kind,), devices=jax.devices()[:4])
    theta = np.arange(4.0, dtype=np.float32)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    buffer = SampleBuffer({"theta": jnp.zeros(4)}, 3)
    save = jax.jit(lambda buffer, theta: buffer.save({"theta": theta}))
    for _ in range(2):
        buffer = save(buffer, jax.device_put(theta, place))
    np.testing.assert_array_equal(buffer.samples["theta"], [theta, theta, 0 * theta])


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="`where` of JAX 0.9 refuses such axes."
)
def test_a_buffer_for_each_chain_of_a_mesh():
    explicit = (AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("d",), explicit, devices=jax.devices()[:4])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    theta = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    keep = np.arange(8) % 2 == 0
    given = jax.device_put((theta, keep), place)
    buffer = SampleBuffer({"theta": jnp.zeros(3), "key": jr.key(0)}, 3)

    def save(buffer, theta, keep):
        return buffer.save({"theta": theta, "key": jr.key(7)}, keep=keep)

    def of_all(theta, keep):
        some = jax.vmap(lambda keep: save(buffer, jnp.ones(3), keep))(keep)
        return jax.vmap(lambda b, t: save(b, t, jnp.bool(True)))(some, theta)

    def in_a_loop(theta, keep):
        def step(i, some):
            return save(some, i * theta, jnp.bool(True))

        return jax.lax.fori_loop(1, 5, step, save(buffer, jnp.ones(3), keep))

    with jax.set_mesh(mesh):
        found = jax.jit(of_all)(*given)
        looped = jax.jit(jax.vmap(in_a_loop))(*given)
    saved = np.asarray(found.samples["theta"])
    saved_in_a_loop = np.asarray(looped.samples["theta"])
    for i, first in enumerate(keep.tolist()):
        begun = [np.ones(3)] if first else []
        rows = [*begun, theta[i], *np.zeros((2 - len(begun), 3))]
        np.testing.assert_array_equal(saved[i], rows)
        rows = [*begun, theta[i], 2 * theta[i], 3 * theta[i]][:3]
        np.testing.assert_array_equal(saved_in_a_loop[i], rows)
    assert found.count.tolist() == [2, 1] * 4
    assert looped.overflow.tolist() == [2, 1] * 4
    assert jax.typeof(found.count).sharding.spec[0] == "d"
    # Without a mesh in the context, JAX has no such loops.
    alone = jax.vmap(lambda theta: save(buffer, theta, jnp.bool(True)))(given[0])
    again = jax.vmap(lambda b, theta: save(b, theta, jnp.bool(True)))(alone, given[0])
    np.testing.assert_array_equal(np.asarray(again.samples["theta"])[:, 1], theta)


def test_a_buffer_of_keys():
    buffer = SampleBuffer({"key": jr.key(0)}, 2)
    buffer = jax.jit(lambda b: b.save({"key": jr.key(7)}))(buffer)
    assert buffer.samples["key"][0] == jr.key(7)


def test_a_buffer_can_be_donated():
    sample = {"theta": jnp.zeros(3), "n": jnp.int32(5)}
    run = eqx.filter_jit(lambda buffer: buffer.save(sample), donate="all")
    assert run(run(SampleBuffer(LIKE, 3))).samples["n"].tolist() == [5, 5, 0]


def test_a_buffer_refuses():
    buffer = SampleBuffer(LIKE, 2)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'n': not in the samples"):
        buffer.save({"theta": jnp.zeros(3)})
    for keep in (2, 1.0, jnp.ones(2, bool), None, "x", jr.key(0)):
        with pytest.raises(ValueError, match=r"`keep` is .*must be bool\[\]\.$"):
            buffer.save({"theta": jnp.zeros(3), "n": jnp.int32(5)}, keep=keep)
    with pytest.raises(ValueError, match="`capacity` is 0"):
        SampleBuffer(LIKE, 0)


def test_each_sample_can_be_committed(tmp_path):
    with Recording(tmp_path, LIKE) as recording:
        record_scan(
            step, start(), length=5, recording=recording, commit_every_seconds=0.0
        )
        assert recording._log.record.commit == 5
    found = Samples(tmp_path).read()["theta"]
    np.testing.assert_allclose(found, expected(5)[1]["theta"], rtol=1e-5)


def test_a_block_that_is_too_large_is_fitted(tmp_path):
    with Recording(tmp_path, LIKE) as recording:
        record_scan(step, start(), length=60, recording=recording, block=300)
    assert Samples(tmp_path).committed == 60


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (None, "None"),
        (2, r"int32\[\]"),
        ("x", "a `str`"),
        ({"a": True}, "a `dict`"),
        (jr.key(0), r"key<fry>\[\]"),
        (jnp.ones(3, bool), r"bool\[3\]"),
    ],
    ids=str,
)
def test_keep_is_looked_at_first(tmp_path, keep, words):
    ran = []

    def watched(state, x):
        jax.debug.callback(lambda: ran.append(1))
        return step(state, x)

    with (
        Recording(tmp_path, LIKE) as recording,
        pytest.raises(
            ValueError, match=rf"`keep` returns {words}\. It must be bool\[\]"
        ),
    ):
        record_scan(
            watched,
            start(),
            length=60,
            recording=recording,
            keep=lambda state, sample: keep,
        )
    assert not ran


def test_samples_with_functions(tmp_path):
    def step(n, _):
        return n + 1, Sampler(jnp.full(3, n, jnp.float32), jr.key(n), n)

    like = Sampler(jnp.zeros(3), jr.key(0), jnp.int32(0), None)
    with Recording(tmp_path, like) as recording:
        record_scan(step, jnp.int32(0), length=5, recording=recording)
    assert Samples(tmp_path).read()["n"].tolist() == list(range(5))
    buffer = SampleBuffer(like, 2).save(step(jnp.int32(7), None)[1])
    assert buffer.samples.theta[0].tolist() == [7, 7, 7]
