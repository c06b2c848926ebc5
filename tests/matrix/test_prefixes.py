"""Arguments that are PyTree prefixes: `filter_spec`, `sharding` and `frozen`."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import PyTree

import eqx_ckpt
from eqx_ckpt import data, interop
from helpers import assert_same, structs


LOADER = data.Loader(data.ArrayDataSource(x=np.arange(20.0)), 4)


def _cursor() -> data.Cursor:
    return LOADER.next(LOADER.start(seed=0))[0]


def _tree() -> PyTree:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    return {
        "cursor": _cursor(),
        "layers": [{"w": jnp.arange(4.0)}, (jnp.ones(2, int), None)],
        "norm": (norm, state),
        "scale": 2.5,
    }


def _save(path, tree, **options):
    eqx_ckpt.tree_serialise_leaves(path, tree, **options)


def _restore(path, like, **options):
    return eqx_ckpt.tree_deserialise_leaves(path, like, **options)


def _write(f, x):
    eqx_ckpt.default_serialise_filter_spec(f, x)


def _read(f, x):
    return eqx_ckpt.default_deserialise_filter_spec(f, x)


def _for_each(entry: Any, tree: PyTree) -> list[PyTree]:
    """The same entry for all leaves, in prefixes of several depths."""
    every = jtu.tree_map(lambda _: entry, tree)
    above = dict(every, layers=[entry, entry], norm=entry)
    return [entry, dict.fromkeys(tree, entry), above, every]


def _is_layer(x: Any) -> bool:
    return isinstance(x, dict) and set(x) == {"w"}


@pytest.mark.parametrize("depth", range(4))
class TestAnyDepth:
    """A prefix of any depth says what one entry for all says.

    Also one that `jax.tree_util.tree_map` has made of a tree with a cursor, whose
    block of rows is not saved.
    """

    def test_a_spec_that_saves(self, tmp_path, depth):
        tree = _tree()
        _save(tmp_path / "all", tree, filter_spec=_write)
        _save(tmp_path / "a", tree, filter_spec=_for_each(_write, tree)[depth])
        each = [
            _restore(tmp_path / name, tree, filter_spec=_read) for name in ("all", "a")
        ]
        assert_same(*each)

    def test_a_spec_that_restores(self, tmp_path, depth):
        tree = _tree()
        _save(tmp_path / "a", tree)
        like = structs(tree)
        found = _restore(
            tmp_path / "a", like, filter_spec=_for_each(_read, like)[depth]
        )
        assert_same(found, _restore(tmp_path / "a", like))

    def test_a_sharding(self, tmp_path, depth):
        tree = _tree()
        _save(tmp_path / "a", tree)
        device = jax.devices()[-1]
        sharding = _for_each(device, tree)[depth]
        found = _restore(tmp_path / "a", tree, sharding=sharding)
        for leaf in jtu.tree_leaves(found, eqx.is_array):
            assert not isinstance(leaf, jax.Array) or leaf.devices() == {device}
        assert_same(found, _restore(tmp_path / "a", tree, sharding=device))

    def test_frozen(self, tmp_path, depth):
        tree = _tree()
        _save(tmp_path / "a", tree)
        frozen = _for_each(True, tree)[depth]
        _save(tmp_path / "b", tree, base=tmp_path / "a", frozen=frozen)
        assert_same(_restore(tmp_path / "b", tree), _restore(tmp_path / "a", tree))

    def test_a_spec_of_a_file_of_equinox(self, tmp_path, depth):
        tree = _tree()
        eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)

        def read(f: io.BufferedIOBase, x: Any) -> Any:
            return eqx.default_deserialise_filter_spec(f, x)

        source = interop.open_eqx(
            tmp_path / "a.eqx", tree, _for_each(read, tree)[depth]
        )
        found = _restore(source, tree)
        plain = _restore(interop.open_eqx(tmp_path / "a.eqx", tree), tree)
        assert_same(found, plain)


LAYERS = {"a": {"w": jnp.ones(2)}, "b": None}
BELOW = {
    "a leaf": (_is_layer, {"a": {"w": True}, "b": True}),
    "None": (lambda x: x is None, {"a": True, "b": None}),
}


@pytest.mark.parametrize("case", BELOW)
def test_no_entry_is_below_a_leaf(tmp_path, case):
    """JAX itself takes such a prefix, and loses the leaf that `is_leaf` has chosen."""
    is_leaf, prefix = BELOW[case]
    _save(tmp_path / "a", LAYERS)
    for argument, entry in (("filter_spec", _read), ("sharding", jax.devices()[0])):
        if (argument, case) == ("sharding", "None"):
            continue  # There, `None` is an entry.
        below = jtu.tree_map(lambda _, entry=entry: entry, prefix)
        with pytest.raises(eqx_ckpt.LeafMismatchError, match=f"`{argument}`"):
            _restore(tmp_path / "a", LAYERS, is_leaf=is_leaf, **{argument: below})
    below = jtu.tree_map(lambda _: _write, prefix)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec`"):
        _save(tmp_path / "b", LAYERS, is_leaf=is_leaf, filter_spec=below)
    base = tmp_path / "a"
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`frozen`"):
        _save(tmp_path / "b", LAYERS, is_leaf=is_leaf, base=base, frozen=prefix)


def test_the_cursor_of_a_prefix_is_for_a_cursor(tmp_path):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    _save(tmp_path / "a", tree)
    prefix = {"a": jtu.tree_map(lambda _: _read, _cursor()).block, "b": _read}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="`filter_spec`"):
        _restore(tmp_path / "a", tree, filter_spec=prefix)
