"""Recordings in object stores and in memory: killed, resumed, and by two writers."""

import itertools
import json

import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from faults.zygote import Zygote
from recording import buckets, chains
from stores import programs
from stores.place import Place
from stores.proxy import answered, lost
from stores.values import bucket_at
from support import bucket_writer


BLOCKS = 3
SECOND = "written by another process"
_NUMBERS = itertools.count()
LIKE = {"in": {"theta": np.zeros(3, np.float32)}, "n": np.int32(0)}


def samples(count: int, start: int = 0) -> dict:
    n = np.arange(start, start + count, dtype=np.int32)
    n = n + 100 * np.arange(2, dtype=np.int32)[:, None]
    return {"in": {"theta": np.float32(n[..., None] + np.arange(3))}, "n": n}


@pytest.fixture(params=["memory", "s3", "gcs"])
def url(request):
    if request.param == "memory":
        return f"memory://recordings-{next(_NUMBERS)}/run"
    return request.getfixturevalue(request.param).url


@pytest.fixture
def hasty(monkeypatch):
    """Writers whose leases lapse at once."""
    monkeypatch.setattr(bucket_writer, "INTERVAL", 0.05)
    monkeypatch.setattr(bucket_writer, "LAPSED_AFTER", 0.5)
    monkeypatch.setattr(bucket_writer, "_POLL", 0.1)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_was_recorded_is_read(url, compression):
    kwargs = {"chains": 2, "chunk_bytes": 48, "compression": compression}
    with Recording(url, LIKE, **kwargs) as recording:
        assert recording.committed is None
        recording.extend(samples(5))
        recording.commit({"step": 5})
        recording.extend(samples(16, 5))
        recording.commit({"step": 21})
        assert eqx_ckpt.recording.Samples(url).committed == 21
        recording.extend(samples(7, 21))
        with pytest.warns(UserWarning, match="14 draws"):
            recording.close()
    with Recording(url, LIKE, **kwargs) as recording:
        assert recording.resume({"step": 0}) == {"step": 21}
        recording.extend(samples(9, 21))
        recording.commit()
    found = Samples(url)
    found.verify()
    eqx_ckpt.inspect.verify(url)
    np.testing.assert_equal(found.read(), samples(30))
    np.testing.assert_equal(
        found.read(start=3, thin=7, chain=1)["n"], [103, 110, 117, 124]
    )
    keys = bucket_at(url).list_keys()
    assert not [key for key in keys if key.startswith("states/")]


def test_tensorstore_reads_the_arrays_while_they_are_written(url):
    base = bucket_at(url)
    with Recording(url, LIKE, chains=2, chunk_bytes=48) as recording:
        for start in range(0, 30, 10):
            recording.extend(samples(10, start))
            recording.commit()
            recording._log._place.files.flush()
            spec = {"driver": "zarr3", "kvstore": (base / "samples/in/theta/").spec}
            array = ts.open(spec, read=True, context=_context()).result()
            expected = samples(start + 10)["in"]["theta"]
            np.testing.assert_array_equal(array.read().result(), expected)
            names = json.loads(base.read("samples/in/theta/zarr.json") or b"")
            assert names["dimension_names"] == ["chain", "draw", "theta_dim_0"]


def _context() -> ts.Context:
    from support import context

    return context()


def check(zygote: Zygote, place: Place) -> None:
    """What was committed is there; going on gives all, to the bit."""
    assert 0 <= chains.safe(place.url) <= BLOCKS
    names = programs.environment(place)
    state = zygote.call(buckets.sample, names, place.url, BLOCKS)
    found = chains.recorded(place.url)
    for one, other in zip(found, chains.reference(BLOCKS), strict=True):
        assert np.array_equal(one["theta"], other["theta"])
        assert np.array_equal(one["n"], other["n"])
    assert state["step"] == BLOCKS * chains.BLOCK


def kill(zygote: Zygote, place: Place, dies_at: int) -> bool:
    """Whether a process was killed at one of its writes; then another goes on."""
    names = programs.environment(place)
    outcome = zygote.run(buckets.sample, names, place.url, BLOCKS, dies_at)
    assert outcome.error is None
    check(zygote, place)
    bucket_at(place.url).delete(bucket_at(place.url).list_keys())
    return bool(outcome.signal)


@pytest.mark.once
@pytest.mark.parametrize("dies_at", [1, 9, 17, 25])
def test_killed_at_some_writes(zygote, s3, dies_at):
    assert kill(zygote, s3, dies_at)


@pytest.mark.once
@pytest.mark.slow
def test_killed_at_any_write(zygote, place):
    for n in itertools.count(2, 7):
        if not kill(zygote, place, n):
            break
    assert n > 30


@pytest.mark.usefixtures("hasty")
def test_the_second_writer_gets_an_error(url, monkeypatch):
    # However busy this machine is, the first one is seen to live before.
    monkeypatch.setattr(bucket_writer, "LAPSED_AFTER", 600)
    with Recording(url, LIKE, chains=2) as first:
        first.extend(samples(5))
        with pytest.raises(eqx_ckpt.CheckpointError, match=SECOND):
            Recording(url, LIKE, chains=2)
        first.extend(samples(5, 5))
    with Recording(url, LIKE, chains=2) as second:
        assert second.committed == 10


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:.*draws that were recorded")
def test_a_writer_that_was_suspended_changes_nothing(url):
    first = Recording(url, LIKE, chains=2, chunk_bytes=480)
    first.extend(samples(5))
    first.commit({"step": 5})
    # As if its machine had slept, and woke up when another one had taken over.
    first._log._place.files._lease._ended.set()
    with Recording(url, LIKE, chains=2, chunk_bytes=480) as second:
        second.resume({"step": 0})
        first.extend(samples(50, 5))
        second.extend(samples(10, 5))
        second.commit({"step": 15})
        with pytest.raises(eqx_ckpt.CheckpointError, match=SECOND):
            first.commit()
        first.close()
        second.extend(samples(15, 15))
        second.commit({"step": 30})
        assert Samples(url).committed == 30
    found = Samples(url)
    found.verify()
    np.testing.assert_equal(found.read(), samples(30))


def test_a_store_that_fails(s3, impatient):
    with Recording(s3.url, LIKE, chains=2, chunk_bytes=48) as recording:
        recording.extend(samples(5))
        recording.commit({"step": 5})
    recording = Recording(s3.url, LIKE, chains=2, chunk_bytes=48)
    recording.resume({"step": 0})
    s3.proxy.add(answered(403), "PUT", "samples/in/theta/c")
    recording.extend(samples(20, 5))
    with pytest.raises((OSError, eqx_ckpt.CheckpointError), match="5 draws are safe"):
        recording.commit({"step": 25})
    recording.close()
    s3.proxy.rules.clear()
    with Recording(s3.url, LIKE, chains=2) as recording:
        assert recording.committed == 5


def test_a_lost_answer_of_a_commit(s3):
    with Recording(s3.url, LIKE, chains=2, chunk_bytes=48) as recording:
        recording.extend(samples(5))
        s3.proxy.add(lost, "PUT", "recording.json|samples/n/c", when=[1, 2, 3])
        recording.commit({"step": 5})
        recording.extend(samples(5, 5))
        recording.commit({"step": 10})
    np.testing.assert_equal(Samples(s3.url).read(), samples(10))


def test_something_else_is_there(url):
    base = bucket_at(url)
    base.write("notes.txt", b"mine")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="notes.txt"):
        Recording(url, LIKE)
    eqx_ckpt.tree_serialise_leaves(f"{url}/ckpt", {"w": np.ones(3)})
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="is not a recording"):
        Recording(f"{url}/ckpt", LIKE)
    assert base.read("notes.txt") == b"mine"
    assert base.read("writer.lock") is None
