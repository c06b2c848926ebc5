"""What a recording refuses, and what it says then."""

import errno
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from interop.mutations import check, retyped


LIKE = {"theta": jax.ShapeDtypeStruct((3,), jnp.float32), "n": np.int32(0)}
BLOCK = {"theta": np.ones((10, 3), np.float32), "n": np.arange(10, dtype=np.int32)}


def refuses(error: type[Exception], *words: str):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words)))


@pytest.fixture
def recording(tmp_path):
    with Recording(tmp_path / "run", LIKE) as recording:
        yield recording


def test_every_difference_of_samples_is_in_one_error(recording):
    theta = np.ones((10, 4), np.float32)
    with refuses(
        eqx_ckpt.LeafMismatchError,
        "'extra': not in `like`",
        "'n': not in the samples",
        "'theta': float32[draws, 3] in the recording, NumPy float32[10, 4]",
    ):
        recording.extend({"theta": theta, "extra": theta})
    assert recording.samples.read(stop=None) if recording.committed else True


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.ones((10, 3)), "float32[draws, 3] in the recording, NumPy float64[10, 3]"),
        (jnp.ones((10, 3), jnp.bfloat16), "bfloat16[10, 3] in the samples"),
        (np.ones((2, 10, 3), np.float32), "NumPy float32[2, 10, 3] in the samples"),
        (np.ones((9, 3), np.float32), "different numbers of draws"),
        (1.0, "a `float` in the samples"),
        ([np.ones((10, 3), np.float32)], "'theta/0': not in `like`"),
        (
            jax.ShapeDtypeStruct((10, 3), jnp.float32),
            "a `ShapeDtypeStruct` in the samples",
        ),
    ],
    ids=str,
)
def test_samples_that_disagree(recording, leaf, words):
    with refuses(eqx_ckpt.LeafMismatchError, words):
        recording.extend({**BLOCK, "theta": leaf})
    recording.extend(BLOCK)
    recording.commit()
    assert recording.committed == 10


def test_samples_that_are_traced_or_deleted(recording):
    with refuses(eqx_ckpt.LeafMismatchError, "is being traced"):
        jax.jit(recording.extend)(BLOCK)
    theta = jnp.ones((10, 3))
    theta.delete()
    with refuses(eqx_ckpt.LeafMismatchError, "was deleted"):
        recording.extend({**BLOCK, "theta": theta})


@pytest.mark.parametrize(
    "keep",
    [np.ones(9, bool), np.ones(10), np.ones((2, 10), bool), True, jax.random.key(0)],
)
def test_keep_of_another_shape(recording, keep):
    with refuses(ValueError, "`keep` is"):
        recording.extend(BLOCK, keep)


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({}, "no leaves"),
        (
            {"x": 1.0, "f": len},
            "leave it out: `equinox.filter(like, equinox.is_array)`",
        ),
        ({"x": 1.0}, "`['x']` is a `float`; pass `np.float32(0)`"),
        ({"x": np.array("a")}, "cannot be stored exactly"),
    ],
)
def test_a_like_that_cannot_be_recorded(tmp_path, like, words):
    with refuses(eqx_ckpt.CheckpointError, words):
        Recording(tmp_path / "run", like)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["chains", "max_samples", "chunk_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, np.True_, "a"])
def test_counts(tmp_path, name, value, unchecked):
    kind = ValueError if type(value) is int else TypeError
    with refuses(kind, f"`{name}` is {value!r}"):
        unchecked.recording.Recording(tmp_path, LIKE, **{name: value})


def test_compression(tmp_path, unchecked):
    with pytest.raises(ValueError, match="`compression` is 'gzip'"):
        unchecked.recording.Recording(tmp_path, LIKE, compression="gzip")
    with refuses(eqx_ckpt.CheckpointError, "'gzip'"):
        Recording(tmp_path, LIKE, compression=lambda name, record: "gzip")


def test_what_is_there_already(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "checkpoint", {"w": jnp.ones(3)})
    with refuses(
        eqx_ckpt.CheckpointExistsError, "holds 'w', and is not a recording. Choose"
    ):
        Recording(tmp_path / "checkpoint", LIKE)
    with refuses(eqx_ckpt.CheckpointNotFoundError, "It holds a checkpoint"):
        Samples(tmp_path / "checkpoint")
    with refuses(eqx_ckpt.CheckpointNotFoundError, "No recording at"):
        Samples(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with refuses(eqx_ckpt.CheckpointExistsError, "is a file, or is in one"):
            Recording(path, LIKE)


def test_going_on_with_something_else(tmp_path):
    Recording(tmp_path, LIKE, chains=2, chunk_bytes=100).close()
    with refuses(
        eqx_ckpt.CheckpointError,
        "'new': not in the recording",
        "'theta': float32[3] in the recording, float32[4] in `like`",
        "`chains`: 2 in the recording, None now",
    ):
        Recording(tmp_path, {"theta": jnp.ones(4), "n": np.int32(0), "new": np.ones(2)})
    with refuses(
        eqx_ckpt.CheckpointError, "'n': chunks of 25 draws in the recording, 2 now"
    ):
        Recording(tmp_path, LIKE, chains=2, chunk_bytes=8)
    with refuses(
        eqx_ckpt.CheckpointError, "compression None in the recording, 'zstd' now"
    ):
        Recording(tmp_path, LIKE, chains=2, compression="zstd")
    Recording(tmp_path, LIKE, chains=2).close()


def test_two_writers(recording, tmp_path):
    with refuses(eqx_ckpt.CheckpointError, "written by another process"):
        Recording(tmp_path / "run", LIKE)
    recording.extend(BLOCK)
    recording.close()
    with Recording(tmp_path / "run", LIKE) as other:
        assert other.committed == 10
    with refuses(eqx_ckpt.CheckpointError, "is closed"):
        recording.extend(BLOCK)


@pytest.mark.parametrize(
    "kwargs",
    [{"start": -1}, {"start": 11}, {"stop": 11}, {"start": 5, "stop": 4}, {"thin": 0}]
    + [{"chain": 0}],
)
def test_draws_that_are_not_there(recording, kwargs):
    recording.extend(BLOCK)
    recording.commit()
    with pytest.raises(ValueError, match="`(start|stop|thin|chain)` is"):
        recording.samples.read(**kwargs)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`where`"):
        recording.samples.read(where=lambda t: None)


def flip(path: pathlib.Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["flip", "cut", "gone", "swap", "old"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_damaged_chunks_are_named(tmp_path, what, chunk):
    with Recording(tmp_path, LIKE, chunk_bytes=48) as recording:
        recording.extend(BLOCK)
    path = tmp_path / f"samples/theta/c.{chunk}.0"
    if what == "flip":
        flip(path, 3)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "gone":
        path.unlink()
    else:
        other = bytes(48)
        path.write_bytes((tmp_path / "samples/n/c.0").read_bytes()[:48] + other[:4])
    samples = Samples(tmp_path)
    with refuses(eqx_ckpt.CorruptCheckpointError, "'theta'", f"c.{chunk}.0"):
        samples.verify()
    with refuses(eqx_ckpt.CorruptCheckpointError, "'theta'"):
        samples.read()
    assert samples.read(where=lambda t: t["n"]).tolist() == list(range(10))
    if chunk == 2:
        with refuses(eqx_ckpt.CorruptCheckpointError, "'theta'"):
            Recording(tmp_path, LIKE)


def test_a_damaged_record(tmp_path):
    with Recording(tmp_path, LIKE) as recording:
        recording.extend(BLOCK)
    record = tmp_path / "recording.json"
    good = record.read_bytes()
    for i in range(0, len(good), 7):
        flip(record, i)
        with pytest.raises(eqx_ckpt.CheckpointError):
            Samples(tmp_path)
        record.write_bytes(good)
    record.write_bytes(good.replace(b'"version": 1', b'"version": 2'))
    with refuses(eqx_ckpt.CheckpointError, "version 2", "reads version 1"):
        Samples(tmp_path)
    record.write_bytes(b'{"format": "other", "version": 1}')
    with refuses(eqx_ckpt.CorruptCheckpointError, "a different format"):
        Recording(tmp_path, LIKE)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Recording(tmp_path / "run", LIKE)


def sealed(tree: dict) -> bytes:
    """A record with the digest of its contents."""
    data = json.dumps(tree | {"digest": "0" * 64}).encode()
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("draws", [10, 2**40 - 1])
def test_a_record_that_claims_chunks_of_2_to_the_40(tmp_path, compression, draws):
    path = tmp_path / "run"
    with Recording(path, LIKE, compression=compression) as recording:
        recording.extend(BLOCK)
    record = path / "recording.json"
    tree = json.loads(record.read_bytes())
    tree["leaves"]["theta"]["chunk"] = tree["leaves"]["n"]["chunk"] = [1, 2**40]
    record.write_bytes(sealed(tree | {"draws": draws}))
    samples = Samples(path)
    calls = {
        "read": samples.read,
        "thinned": lambda: samples.read(thin=5),
        "verify": samples.verify,
        "npz": lambda: samples.to_npz(tmp_path / "npz"),
        "go on": lambda: Recording(path, LIKE),
    }
    for call in calls.values():
        with refuses(eqx_ckpt.CorruptCheckpointError, "bytes instead of"):
            call()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_record_with_values_of_other_types(tmp_path, is_sealed):
    with Recording(tmp_path / "run", LIKE, metadata={"a": 1}) as recording:
        recording.extend(BLOCK)
        recording.commit()
    record = tmp_path / "run" / "recording.json"
    whole = json.loads(record.read_bytes())
    changes = [*retyped(whole)]
    for tree in random.Random(0).sample(changes, 60):
        is_record = is_sealed and isinstance(tree, dict)
        record.write_bytes(sealed(tree) if is_record else json.dumps(tree).encode())
        check(lambda: eqx_ckpt.interop.open_source(tmp_path / "run"), tmp_path)
    for digest in ("\ud800", 3, None, [1]):
        record.write_text(json.dumps(whole | {"digest": digest}))
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="the digest"):
            eqx_ckpt.inspect.read_manifest(tmp_path / "run")


@pytest.mark.parametrize(
    ("leaf", "change", "problem"),
    [
        ("key", {"impl": "rbg"}, "the shape of a different PRNG implementation"),
        ("n", {"kind": "jax", "dtype": "<M8[ns]"}, "which is not JAX's"),
        ("n/more", {"path": [["key", "n"], ["key", "more"]]}, "a leaf beside"),
        (None, {"metadata": json.loads("[" * 70 + "]" * 70)}, "so few levels"),
    ],
)
def test_a_record_of_what_no_recording_has(tmp_path, leaf, change, problem):
    with Recording(tmp_path, {"key": jax.random.key(0), "n": np.int64(0)}) as recording:
        recording.append({"key": jax.random.key(1), "n": np.int64(1)})
    record = tmp_path / "recording.json"
    tree = json.loads(record.read_bytes())
    if leaf is not None:
        entry = tree["leaves"].get(leaf, tree["leaves"]["n"])
        tree["leaves"][leaf] = entry | change
        tree["checksums"].setdefault(leaf, tree["checksums"]["n"])
    record.write_bytes(sealed(tree if leaf else tree | change))
    with refuses(eqx_ckpt.CorruptCheckpointError, problem):
        eqx_ckpt.tree_like(tmp_path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with refuses(OSError, "use a file system that has locks", str(tmp_path)):
        Recording(tmp_path, LIKE)
