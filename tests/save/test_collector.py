"""The garbage collector is paused while a tree is gone through, and no longer."""

import functools as ft
import gc
import threading
import time

import jax.numpy as jnp
import pytest

import eqx_ckpt


TREE = {"w": jnp.ones(3), "step": 1}


@pytest.fixture(params=[True, False], ids=["on", "off"])
def as_before(request):
    """Whether the collector is on before, which it has to be afterwards.

    A thread that an earlier test left may pause it for a moment.
    """

    def is_restored():
        deadline = time.monotonic() + 60
        while gc.isenabled() != request.param and time.monotonic() < deadline:
            time.sleep(0.01)
        return gc.isenabled() == request.param

    (gc.enable if request.param else gc.disable)()
    yield is_restored
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


def test_of_two_threads_the_last_one_turns_it_on(tmp_path, as_before):
    """The other one begins while the first still pauses it, and ends after it."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    begun, first_has_ended = threading.Event(), threading.Event()

    def begin(tree):
        begun.set()
        assert first_has_ended.wait(60)
        return tree["w"]

    match = ft.partial(eqx_ckpt.tree_match, tmp_path / "new", TREE)
    second = threading.Thread(target=match, kwargs={"where": begin})

    def where(tree):
        if not begun.is_set():
            second.start()
            assert begun.wait(60)
        return tree["w"]

    match(where=where)
    assert not gc.isenabled()
    first_has_ended.set()
    second.join(60)
    assert as_before()
