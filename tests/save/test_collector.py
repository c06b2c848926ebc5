"""The garbage collector is paused while a tree is gone through, and no longer."""

import gc

import jax.numpy as jnp
import pytest

import eqx_ckpt


TREE = {"w": jnp.ones(3), "step": 1}


@pytest.fixture(params=[True, False], ids=["on", "off"])
def as_before(request):
    """Whether the collector is on before, which it has to be afterwards."""
    if not request.param:
        gc.disable()
    yield lambda: gc.isenabled() == request.param
    gc.enable()


def test_after_a_save(tmp_path, as_before):
    saving = eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", TREE)
    assert as_before()
    saving.result()
    eqx_ckpt.tree_serialise_leaves(tmp_path / "other", TREE)
    assert as_before()


def test_after_a_restore(tmp_path, as_before):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", TREE)
    assert as_before()
    eqx_ckpt.tree_like(tmp_path / "new")
    eqx_ckpt.tree_match(tmp_path / "new", TREE)
    assert as_before()


def test_after_an_error(tmp_path, as_before):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    with pytest.raises(eqx_ckpt.CheckpointExistsError):
        eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", TREE)
    assert as_before()
    with pytest.raises(eqx_ckpt.LeafMismatchError):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", {"other": 1})
    assert as_before()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "none", TREE)
    assert as_before()
