"""Keys that other formats do not keep: the same tree is restored, or they are named."""

import random
import re
import warnings
from collections import OrderedDict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same
from versions import thinned


CKPT = "memory://keys"
TEXTS = ["a", "b", "a.b", "a/b", "0", "1", "-1", "", "é", "a.0", ".", "0/a", "b.c.d"]
# By format: the suffix, what writes, what opens, and where keys are split.
FORMATS = {
    "safetensors": (
        ".safetensors",
        interop.to_safetensors,
        interop.open_safetensors,
        ".",
    ),
    "npz": (".npz", interop.to_npz, interop.open_npz, "./"),
    "flax": (".msgpack", interop.to_flax, interop.open_flax, ""),
    "orbax": ("", interop.to_orbax, interop.open_orbax, ""),
}


class Layer(eqx.Module):
    weight: Any
    state: Any


def random_tree(rng: random.Random, depth: int = 0) -> Any:
    """A tree whose leaves all differ, in every container that has keys."""
    if depth and rng.random() < 0.3 + 0.2 * depth:
        return jnp.array([rng.random(), 1.0])

    def child():
        return random_tree(rng, depth + 1)

    kind = rng.choice(["dict", "dict", "ints", "mixed", "list", "module"])
    count = rng.randrange(1, 4)
    if kind == "list":
        return [child() for _ in range(count)]
    if kind == "module":
        return Layer(child(), child())
    if kind == "ints":
        return {i: child() for i in rng.sample(range(4), count)}
    texts: list[Any] = rng.sample(TEXTS, count)
    if kind == "mixed":
        return OrderedDict((key, child()) for key in [rng.randrange(3), *texts])
    return {key: child() for key in texts}


def keys_of(tree: Any, separators: str) -> list[tuple[str, ...]]:
    """The keys of each leaf as texts, split at separators."""
    found = []
    for path, _ in jtu.tree_leaves_with_path(tree):
        texts = [jtu.keystr((key,), simple=True) for key in path]
        if separators:
            texts = re.split(f"[{separators}]", separators[0].join(texts))
        found.append(tuple(texts))
    return found


def do_clash(tree: Any, separators: str) -> bool:
    """Whether the keys of a leaf are those of another one, or the first of them."""
    keys = keys_of(tree, separators)
    starts = {key[:i] for key in keys for i in range(len(key))}
    return len({*keys}) < len(keys) or not starts.isdisjoint(keys)


def export(name: str, path: Any, **how: Any) -> str:
    """Write the checkpoint; returns what was lost or refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            FORMATS[name][1](CKPT, path, **how)
        except eqx_ckpt.CheckpointError as e:
            return str(e)
    return "".join(str(w.message) for w in caught if "does not keep" in str(w.message))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", thinned(FORMATS, len(FORMATS)))
def test_any_tree_is_restored_or_its_leaves_are_named(name, tmp_path):
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    suffix, _, open_file, separators = FORMATS[name]
    rng = random.Random(name)
    for i in range(15 if name == "orbax" else 40):
        tree = random_tree(rng)
        try:
            eqx_ckpt.tree_serialise_leaves(CKPT, tree, overwrite=True)
        except eqx_ckpt.LeafNameError:
            continue
        path = tmp_path / f"{i}{suffix}"
        lost = export(name, path, strict=True)
        clashes = do_clash(tree, separators)
        if name == "orbax":
            flat = [".".join(keys) for keys in keys_of(tree, "")]
            clashes = clashes or len({*flat}) < len(flat)
        assert bool(lost) == clashes, (tree, lost)
        if not lost:
            source = open_file(path)
            assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
            check_copies(source, tree, path)
            continue
        leaves = eqx_ckpt.inspect.read_manifest(CKPT).leaves
        assert any(repr(leaf) in lost for leaf in leaves) or "two leaves" in lost
        assert not path.exists()
        if not export(name, path).startswith("Nothing was written"):
            with pytest.raises(eqx_ckpt.LeafNameError):
                open_file(path)


def check_copies(source: Any, tree: Any, path: Any) -> None:
    """A copy, and a copy of it, restore as the file does, and differ in nothing."""
    first, second = f"{CKPT}-first", f"{CKPT}-second"
    eqx_ckpt.copy(source, first, overwrite=True)
    eqx_ckpt.copy(first, second, overwrite=True, layout="ocdbt")
    separators = source.manifest.separators
    assert eqx_ckpt.inspect.read_manifest(second).separators == separators is not None
    assert_same(eqx_ckpt.tree_deserialise_leaves(second, tree), tree)
    eqx_ckpt.inspect.verify(second)
    for pair in ((source, second), (first, second), (CKPT, second), (second, CKPT)):
        found = eqx_ckpt.inspect.diff(*pair, values=True)
        # A file does not say whether an array is NumPy's.
        differ = {n: d for n, d in found.items() if d.status != "different type"}
        assert not differ, (tree, path)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: list[eqx.nn.Linear]

    def __init__(self, key: Any) -> None:
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.layers = [eqx.nn.Linear(3, 3, key=key)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FORMATS)
def test_the_state_of_a_model_comes_back(name, tmp_path, getkey):
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    model, state = eqx.nn.make_with_state(Normed)(getkey())
    tree = {"model": model, "state": state, "named": {"0": jnp.ones(2)}}
    # Weak types are lost, and the warning says so.
    tree = jax.tree.map(lambda x: x.astype(x.dtype) if eqx.is_array(x) else x, tree)
    eqx_ckpt.tree_serialise_leaves(CKPT, tree, overwrite=True)
    suffix, write, open_file, _ = FORMATS[name]
    # Others have arrays only, so that the model's `inference` is one.
    write(CKPT, tmp_path / f"a{suffix}", strict=name in ("flax", "orbax"))
    source = open_file(tmp_path / f"a{suffix}")
    like = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, like), tree)
    assert eqx_ckpt.tree_match(source, like).ok
    for prefix in ("model", "named", "state"):
        part = eqx_ckpt.tree_deserialise_leaves(source, like[prefix], prefix=prefix)
        assert_same(part, tree[prefix])
    interop.to_eqx(source, tmp_path / "a.eqx", tree)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "a.eqx", like), tree)


def test_two_leaves_of_like_that_became_one_are_missing(tmp_path):
    np.savez(tmp_path / "a.npz", **{"a/b": np.ones(2, np.float32)})
    source = interop.open_npz(tmp_path / "a.npz")
    x = jnp.zeros(2)
    for like in ({"a.b": x}, {"a/b": x}, {"a": {"b": x}}):
        found = eqx_ckpt.tree_deserialise_leaves(source, like)
        assert (jax.tree.leaves(found)[0] == 1).all()
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=r"'a\.b': float32.* not in"):
        eqx_ckpt.tree_deserialise_leaves(source, {"a.b": x, "a": {"b": x}})
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=r"'a\.b': float32.* not in"):
        eqx_ckpt.tree_deserialise_leaves(source, {"a.b": x, "a/b": x})


def test_a_name_that_makes_a_file_unreadable_is_said(tmp_path):
    x = jnp.ones(2)
    eqx_ckpt.tree_serialise_leaves(CKPT, {"a.b": x, "a": x}, overwrite=True)
    with pytest.raises(eqx_ckpt.CheckpointError, match="would lose:\n.*'a', its name"):
        interop.to_safetensors(CKPT, tmp_path / "a.safetensors", strict=True)
    with pytest.warns(UserWarning, match="of 'a', its name: as 'a' it clashes with"):
        interop.to_safetensors(CKPT, tmp_path / "a.safetensors")
    with pytest.raises(eqx_ckpt.LeafNameError):
        interop.open_safetensors(tmp_path / "a.safetensors")
