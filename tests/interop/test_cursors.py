"""Cursors of data in other formats: no settings of a loader are lost unsaid."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import data, interop
from helpers import assert_same


def loader(batch_size: int = 2, cache: int = 1) -> data.Loader:
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    source = data.ArrayDataSource(i=np.arange(10), x=rows)
    return data.Loader(source, batch_size, cache=cache)


def begun(it: data.Loader) -> data.Cursor:
    cursor = it.start(3)
    for _ in range(2):
        cursor, _ = it.next(cursor)
    return cursor


def around(cursor: data.Cursor, place: str) -> dict:
    """A tree in which the cursor is first, last, or between other leaves."""
    tree = {"b": cursor}
    if place != "first":
        tree["a"] = jnp.ones(3, jnp.bfloat16)
    if place != "last":
        tree["c"] = {"w": jnp.arange(4.0), "n": 2.5}
    return tree


def assert_goes_on(found: data.Cursor, saved: data.Cursor, it: data.Loader) -> None:
    for _ in range(4):
        (found, batch), (saved, expected) = it.next(found), it.next(saved)
        assert_same(batch, expected)


def by_spec(f, x):
    return eqx.default_deserialise_filter_spec(f, x)


CACHED = [("between", 1), ("first", 3), ("last", 3)]


@pytest.mark.parametrize(("place", "cache"), CACHED)
@pytest.mark.parametrize("how", ["concrete", "abstract", "custom", "header"])
def test_files_of_equinox_have_cursors(tmp_path, place, cache, how):
    it = loader(cache=cache)
    cursor = begun(it)
    with open(tmp_path / "a.eqx", "wb") as f:
        if how == "header":
            f.write(b'{"made": "by hand"}\n')
        eqx.tree_serialise_leaves(f, around(cursor, place))
    like = around(it.start(), place)
    if how == "abstract":
        like = eqx.filter_eval_shape(lambda: like)
    spec = (by_spec,) if how == "custom" else ()
    source = interop.open_eqx(tmp_path / "a.eqx", like, *spec)
    assert not any("rows" in name for name in source.manifest.leaves)
    for target in (like, around(loader(cache=2).start(), place)):
        found = eqx_ckpt.tree_deserialise_leaves(source, target)
        assert found["b"].seed == 3
        drawn = it if target is like else loader(cache=2)
        assert_goes_on(found["b"], cursor, drawn)
        rest = {name: x for name, x in around(cursor, place).items() if name != "b"}
        assert_same({name: x for name, x in found.items() if name != "b"}, rest)
    wrong = around(loader(5).start(), place)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="different loader"):
        eqx_ckpt.tree_deserialise_leaves(source, wrong)


def test_batches_of_another_shape_are_named(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", {"b": begun(loader(cache=3))})
    like = {"b": loader(cache=2).start()}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="block.rows"):
        interop.open_eqx(tmp_path / "a.eqx", like)


@pytest.mark.filterwarnings("ignore:A file of Equinox does not keep")
@pytest.mark.parametrize(("place", "cache"), CACHED)
@pytest.mark.parametrize("is_abstract", [False, True])
def test_equinox_reads_cursors(tmp_path, place, cache, is_abstract):
    it = loader(cache=cache)
    tree, like = around(begun(it), place), around(it.start(), place)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    seen = eqx.filter_eval_shape(lambda: like) if is_abstract else like
    interop.to_eqx(tmp_path / "c", tmp_path / "a.eqx", seen)
    found = eqx.tree_deserialise_leaves(tmp_path / "a.eqx", like)
    assert_goes_on(found["b"], tree["b"], it)
    assert_same({**found, "b": 0}, {**tree, "b": 0})
    source = interop.open_eqx(tmp_path / "a.eqx", like)
    found = eqx_ckpt.tree_deserialise_leaves(source, like)
    assert_goes_on(found["b"], tree["b"], it)
    wrong = around(loader(5, cache).start(), place)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="different loader"):
        interop.to_eqx(tmp_path / "c", tmp_path / "b.eqx", wrong)


EXPORTS = {
    "safetensors": (interop.to_safetensors, interop.open_safetensors),
    "npz": (interop.to_npz, interop.open_npz),
    "flax": (interop.to_flax, interop.open_flax),
    "orbax": (interop.to_orbax, interop.open_orbax),
    "eqx": (interop.to_eqx, interop.open_eqx),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_lost_settings_are_told(tmp_path, name):
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    write, open_ = EXPORTS[name]
    it = loader()
    like = {"b": it.start()}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"b": begun(it)})
    args = (like,) if name == "eqx" else ()
    text = f"of 'b/block', the settings of its loader: {it.settings}"
    with pytest.raises(eqx_ckpt.CheckpointError, match="would lose") as e:
        write(tmp_path / "c", tmp_path / "no", *args, strict=True)
    assert text in str(e.value)
    assert not (tmp_path / "no").exists()
    with pytest.warns(UserWarning, match="does not keep") as warned:
        path = write(tmp_path / "c", tmp_path / "file", *args)
    assert any(text in str(w.message) for w in warned)
    source = open_(path, *args)
    assert len(jax.tree.leaves(eqx_ckpt.load(source))) == 3
    if name != "eqx":
        # Without settings, nobody knows which rows these integers are of.
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="no settings"):
            eqx_ckpt.tree_deserialise_leaves(source, like)
        like = {"b": it.start(accept_any=True)}
        where = {"casting": "same_kind", "transform": _as_jax} if name == "npz" else {}
        found = eqx_ckpt.tree_deserialise_leaves(source, like, **where)
        assert_goes_on(found["b"], begun(it), it)


def _as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


def test_settings_are_told_under_their_new_name(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"b": begun(loader())})
    for transform in (eqx_ckpt.rename({"b": "new"}), lambda tree: {"new": tree["b"]}):
        with pytest.raises(eqx_ckpt.CheckpointError, match="of 'new/block'") as e:
            interop.to_safetensors(
                tmp_path / "c", tmp_path / "a", strict=True, transform=transform
            )
        assert "'b/block'" not in str(e.value)


def test_a_copy_keeps_settings(tmp_path):
    it = loader()
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"b": begun(it)})
    interop.convert(tmp_path / "c", tmp_path / "d", to="checkpoint", strict=True)
    found = eqx_ckpt.tree_deserialise_leaves(tmp_path / "d", {"b": it.start()})
    assert_goes_on(found["b"], begun(it), it)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="different loader"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "d", {"b": loader(5).start()})
