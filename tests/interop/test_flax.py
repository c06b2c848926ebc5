"""Msgpack of flax, written by flax."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


serialization = pytest.importorskip("flax.serialization")

TREE = {
    "params": {"Dense_0": {"kernel": jnp.arange(12.0).reshape(3, 4)}},
    "bf16": jnp.ones(3, jnp.bfloat16),
    "fp8": jnp.ones(3, jnp.float8_e5m2),
    "list": [jnp.zeros((0, 2)), (jnp.ones(1, jnp.int32),)],
    "numbers": {"a": True, "b": -3, "c": 2**40, "d": 2.5, "e": 1 - 2j},
    "scalar": np.float32(3),
    "wide": np.arange(3),
    "a.b/c": jnp.zeros(()),
}


def save(path, tree):
    path.write_bytes(serialization.to_bytes(tree))
    return interop.open_flax(path)


def test_what_flax_wrote(tmp_path):
    source = save(tmp_path / "a.msgpack", {**TREE, "text": "hi", "none": None})
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)
    assert source.manifest.unsaved == {"text": "'hi'"}
    eqx_ckpt.inspect.verify(source)


def test_arrays_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 400)
    tree = {"w": jnp.arange(64 * 24.0).reshape(64, 24), "b": jnp.arange(3.0)}
    source = save(tmp_path / "a.msgpack", tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "x")
    sharding = {"w": jax.NamedSharding(mesh, spec), "b": None}
    found = eqx_ckpt.tree_deserialise_leaves(source, tree, sharding=sharding)
    assert np.array_equal(found["w"], tree["w"])


def test_a_single_array(tmp_path):
    source = save(tmp_path / "a.msgpack", jnp.arange(3.0))
    found = eqx_ckpt.tree_deserialise_leaves(source, jnp.zeros(3))
    assert found.tolist() == [0, 1, 2]


def ndarray(shape=(2,), name=b"float32", data=bytes(8)):
    """An array as flax packs it, by hand."""
    body = b"\x93" + bytes([0x90 + len(shape)])
    body += b"".join(b"\xcf" + struct.pack(">Q", n) for n in shape)
    body += bytes([0xA0 + len(name)]) + name + b"\xc4" + bytes([len(data)]) + data
    return b"\xc7" + bytes([len(body), 1]) + body


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too early"),
        (b"\xc1", "no object begins"),
        (b"\x81\xa1x", "too early"),
        (b"\x80\x80", "its first object ends at byte 1"),
        (b"\xdf\xff\xff\xff\xff", "too early"),
        (b"\xdb\xff\xff\xff\xff", "too early|string of"),
        (b"\x81\xa1x\xc6\xff\xff\xff\xff", "too early"),
        (b"\x91" * 100_000 + b"\xc0", "too deeply"),
        (b"\x82\xa1x\x01\xa1x\x02", "'x' is there twice"),
        (b"\x81\x90\x01", "a key is"),
        (b"\x81\xa1x" + ndarray((3,)), "its size does not follow"),
        (b"\x81\xa1x" + ndarray((2**63,)), "its shape is not one"),
        (b"\x81\xa1x" + ndarray((2**61, 8), data=b""), "its size does not follow"),
        (b"\x81\xa1x" + ndarray(name=b"object"), "'x'"),
        (b"\x81\xa1x" + ndarray(name=b"f4,f4"), "its dtype is not one"),
        (b"\x81\xa1x\xd4\x01\xc0", "the array 'x'"),
        (b"\x81\xa1x\xd4\x02\xc0", "not a valid msgpack"),
        (b"\x81\xa1x\x81\xb9__msgpack_chunked_array__\xc3", "the array 'x'"),
    ],
)
def test_msgpack_that_lies(tmp_path, data, problem):
    (tmp_path / "a.msgpack").write_bytes(data)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=problem) as e:
        interop.open_flax(tmp_path / "a.msgpack")
    assert "a.msgpack" in str(e.value)


def test_names_that_meet(tmp_path):
    (tmp_path / "a.msgpack").write_bytes(b"\x82\xa10\x01\x00\x02")
    with pytest.raises(eqx_ckpt.LeafNameError):
        interop.open_flax(tmp_path / "a.msgpack")
