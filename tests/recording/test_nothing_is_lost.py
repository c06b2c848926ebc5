"""No draw is lost without an error, and none that an error calls safe."""

import shutil
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.recording import record_scan, Recording, Samples
from eqx_ckpt.recording._writing import _recording_log


pytestmark = pytest.mark.once


LIKE = {"x": jnp.float32(0)}


def saves(recorder, length, first=0):
    def body(i, recorder):
        return recorder.save({"x": jnp.float32(i)})

    return jax.lax.fori_loop(first, first + length, body, recorder)


def step(n, _):
    return n + 1, {"x": jnp.float32(n)}


def read(path) -> list[float]:
    samples = Samples(path)
    samples.verify()
    return samples.read()["x"].tolist()


def test_the_end_raises_what_failed_in_a_program(tmp_path):
    path = tmp_path / "run"
    run = jax.jit(saves, static_argnums=1)

    def record() -> None:
        with Recording(path, LIKE, chunk_bytes=64) as recording:
            shutil.rmtree(path / "samples/x")
            recorder = run(recording.recorder(block=8), 200)
            jax.effects_barrier()
            run(recorder, 200).flush()

    with pytest.raises(OSError, match=r"No such file.*\(leaf 'x', .* 0 draws are safe"):
        record()
    assert Samples(path).committed is None


@pytest.mark.parametrize("every", [0, 5])
@pytest.mark.parametrize("keep", [None, lambda state, _: state % 3 != 0])
def test_a_scan_that_fills_a_recording_can_go_on(tmp_path, every, keep):
    numbers = [n for n in range(40) if keep is None or (n + 1) % 3]
    options = {"block": 10, "commit_every": every, "keep": keep}
    with (
        pytest.raises(eqx_ckpt.CheckpointError, match="`max_samples` is 15"),
        Recording(tmp_path, LIKE, max_samples=15) as recording,
    ):
        record_scan(step, 0, length=40, recording=recording, **options)
    assert read(tmp_path) == numbers[:15]
    with Recording(tmp_path, LIKE) as recording:
        state = recording.resume(0)
        assert recording.steps == state
        record_scan(
            step, state, length=40 - recording.steps, recording=recording, **options
        )
    assert read(tmp_path) == numbers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("every", "words"), [(0, "interrupted or failed"), (10, "Call `resume` first")]
)
def test_a_scan_that_fails_repeats_no_sample(tmp_path, every, words):
    def failing(n, x):
        return step(eqx.error_if(n, n == 23, "on purpose"), x)

    def scan(step, recording):
        state = 0 if recording.committed is None else recording.resume(0)
        length = 40 - recording.steps
        how = {"recording": recording, "block": 5, "commit_every": every}
        return record_scan(step, state, length=length, **how)

    with Recording(tmp_path, LIKE) as recording:
        with pytest.raises(RuntimeError, match="on purpose"):
            scan(failing, recording)
        with pytest.raises(eqx_ckpt.CheckpointError, match=words):
            record_scan(step, 0, length=40, recording=recording)
        with pytest.raises(eqx_ckpt.CheckpointError, match=words):
            recording.append({"x": jnp.float32(0)})
    with Recording(tmp_path, LIKE) as recording:
        assert recording.steps == 20 * bool(every)
        scan(step, recording)
    assert read(tmp_path) == list(range(40))


def test_a_state_before_the_last_samples(tmp_path):
    block = {"x": np.ones(10, np.float32)}
    with Recording(tmp_path, LIKE) as recording:
        recording.extend(block)
        recording.commit({"n": 10})
        assert recording.resume({"n": 0}) == {"n": 10}
        recording.extend(block)
        with pytest.raises(eqx_ckpt.CheckpointError, match="10 draws were recorded"):
            recording.resume({"n": 0})
        recording.commit({"n": 20})
    assert len(read(tmp_path)) == 20


def test_programs_whose_samples_are_slow_to_compute(tmp_path):
    like = {"x": jnp.zeros(200_000)}

    @jax.jit
    def run(recorder, x):
        for i in range(8):
            y = x + i
            if i % 2 == 0:
                y = y.reshape(400, 500)
                for _ in range(3):
                    y = y @ (jnp.eye(500) * 1.0)
                y = y.reshape(-1)
            recorder = recorder.save({"x": y})
        return recorder.flush()

    with Recording(tmp_path, like) as recording:
        run(recording.recorder(block=1), jnp.zeros(200_000))
    found = Samples(tmp_path).read()["x"]
    np.testing.assert_allclose(found[:, 0], np.arange(8), atol=1e-3)


@pytest.mark.parametrize("then", ["commits", "ends"])
def test_a_recording_goes_on_after_a_commit_that_failed(tmp_path, then):
    run = jax.jit(saves, static_argnums=(1, 2))

    def record():
        with Recording(tmp_path, LIKE) as recording:
            recorder = run(recording.recorder(block=4), 8, 0).flush()
            recording.commit({"n": 8})
            recorder = run(recorder, 10, 8)
            with pytest.raises(eqx_ckpt.CheckpointError, match=r"recorder\.flush\(\)"):
                recording.commit({"n": 18})
            run(recorder, 7, 18).flush()
            if then == "commits":
                recording.commit({"n": 25})

    if then == "commits":
        record()
        assert read(tmp_path) == list(range(25))
    else:
        words = "17 draws .* are dropped.*`commit` had failed"
        with pytest.raises(eqx_ckpt.CheckpointError, match=words):
            record()
        assert read(tmp_path) == list(range(8))


def test_samples_that_never_left_the_device_are_missed(tmp_path):
    """A program that does not return its recorder, twice."""
    run = jax.jit(lambda recorder: (saves(recorder, 3), 0)[1])
    with Recording(tmp_path, LIKE) as recording:
        recorder = recording.recorder(block=4)
        run(recorder)
        run(recorder)
        with pytest.raises(eqx_ckpt.CheckpointError, match="older recorder"):
            recording.commit()


def test_samples_that_are_on_the_device_at_the_end_are_missed(tmp_path):
    recording = Recording(tmp_path, LIKE)
    recorder = saves(recording.recorder(block=4), 3)
    with pytest.raises(eqx_ckpt.CheckpointError, match="lacks its last samples"):
        recording.close()
    del recorder


@pytest.mark.parametrize("again", [False, True])
def test_a_directory_that_is_deleted(tmp_path, again):
    path = tmp_path / "run"
    block = {"x": np.ones(10, np.float32)}
    recording = Recording(path, LIKE)
    recording.extend(block)
    recording.commit()
    shutil.rmtree(path)
    other = Recording(path, LIKE) if again else None
    recording.extend(block)
    with pytest.raises(FileNotFoundError, match="0 draws are safe.*are gone"):
        recording.commit()
    recording.close()
    assert path.exists() == again
    if other is not None:
        other.extend(block)
        other.close()
        assert read(path) == [1] * 10


def test_a_file_that_is_deleted(tmp_path):
    block = {"x": np.ones(20, np.float32)}
    recording = Recording(tmp_path, LIKE, chunk_bytes=64)
    recording.extend(block)
    recording.commit()
    shutil.rmtree(tmp_path / "samples")
    recording.extend(block)
    with pytest.raises(FileNotFoundError, match="files of 20 committed draws are gone"):
        recording.commit()
    recording.close()


def test_appending_while_a_program_records(tmp_path):
    """`append` waits for the program, which waits until its samples are taken."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("d",), devices=devices)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    @jax.jit
    def run(x, recorder):
        def body(carry, _):
            x, recorder = carry
            x = x + 1
            return (x, recorder.save({"x": x})), None

        (x, recorder), _ = jax.lax.scan(body, (x, recorder), length=200)
        return x, recorder.flush()

    def record() -> None:
        with Recording(tmp_path, LIKE, chains=4) as recording:
            recorder = recording.recorder(block=1, sharding=place)
            x = jax.device_put(jnp.zeros(4), place)
            for _ in range(3):
                x, recorder = run(x, recorder)
                recording.append({"x": x})

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    found = Samples(tmp_path).read()["x"]
    expected = [n for n in range(1, 601) for _ in range(1 + (n % 200 == 0))]
    assert found.tolist() == [expected] * 4


def test_a_full_queue_is_waited_for_until_there_is_room(tmp_path, monkeypatch):
    """On a slow disk, the sampler goes on when one block is written."""
    may_write = threading.Semaphore(0)
    append = _recording_log.append

    def slow_append(*args) -> None:
        may_write.acquire()
        append(*args)

    monkeypatch.setattr(_recording_log, "append", slow_append)
    monkeypatch.setattr(_recording_log, "PENDING_BYTES", 4 * 40)
    with Recording(tmp_path, LIKE) as recording:
        blocks = [
            {"x": np.arange(10 * i, 10 * i + 10, dtype=np.float32)} for i in range(6)
        ]
        for block in blocks[:4]:
            recording.extend(block)
        thread = threading.Thread(target=recording.extend, args=blocks[4:5])
        thread.start()
        may_write.release()
        thread.join(60)
        has_room = not thread.is_alive()
        may_write.release(len(blocks))
        thread.join()
        recording.extend(blocks[5])
    assert has_room
    assert read(tmp_path) == list(range(60))
