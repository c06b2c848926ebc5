"""Copying sources into checkpoints."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from helpers import assert_same


TREE = {
    "model": eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0)),
    "Wq": jnp.ones(3, jnp.bfloat16),
    "wq": jnp.zeros((3, 0)),
    "key": jax.random.key(1),
    "weak": jnp.asarray(1.0),
    "numpy": np.arange(5, dtype=">f8"),
    "numbers": [3, 2.5, True, 1j],
    "large": jnp.arange(3 * 2**20.0).reshape(3, -1),
}


@pytest.fixture
def ckpt(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", TREE, metadata={"step": 3})
    return tmp_path / "a"


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_checkpoint(ckpt, tmp_path, layout, compression):
    copied = tmp_path / "b"
    eqx_ckpt.copy(ckpt, copied, layout=layout, compression=compression)
    assert_same(eqx_ckpt.tree_deserialise_leaves(copied, TREE), TREE)
    before, after = map(eqx_ckpt.inspect.read_manifest, (ckpt, copied))
    assert after.metadata == {"step": 3}
    assert after.layout == layout
    assert after.unsaved == before.unsaved
    assert after.leaves.keys() == before.leaves.keys()
    assert after.leaves["large"].compression == compression
    eqx_ckpt.inspect.verify(copied)
    eqx_ckpt.copy(copied, tmp_path / "c")
    again = eqx_ckpt.inspect.read_manifest(tmp_path / "c")
    assert again.leaves == before.leaves


def test_another_format(tmp_path):
    arrays = {"Layers.0.w": np.ones((2, 3), np.float32), "layers.0.w": np.arange(4)}
    np.savez(tmp_path / "a.npz", **arrays)
    source = eqx_ckpt.interop.open_npz(tmp_path / "a.npz")
    eqx_ckpt.copy(source, tmp_path / "b")
    found = dict(
        (name, x) for name, _, x in eqx_ckpt.inspect.iter_leaves(tmp_path / "b")
    )
    assert [x.tolist() for x in found.values()] == [x.tolist() for x in arrays.values()]
    like = {
        "Layers": [{"w": jnp.zeros((2, 3))}],
        "layers": [{"w": np.zeros(4, np.int64)}],
    }
    tree = eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", like)
    assert tree["layers"][0]["w"].tolist() == [0, 1, 2, 3]


def test_damage_is_not_copied(ckpt, tmp_path):
    with open(ckpt / "large" / "c.0.0", "r+b") as f:
        f.write(b"damaged")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'large'"):
        eqx_ckpt.copy(ckpt, tmp_path / "b")
    assert {p.name for p in tmp_path.iterdir()} == {"a"}


def test_what_exists_is_kept(ckpt, tmp_path):
    other = tmp_path / "b"
    eqx_ckpt.tree_serialise_leaves(other, {"x": jnp.zeros(1)})
    with pytest.raises(eqx_ckpt.CheckpointExistsError):
        eqx_ckpt.copy(ckpt, other)
    eqx_ckpt.copy(ckpt, other, overwrite=True)
    assert_same(eqx_ckpt.tree_deserialise_leaves(other, TREE), TREE)
