"""Every kind of leaf, loaded without a `like`, and compared with another one."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt

from .averages import others
from .exact import difference
from .oracle import key_data, kind_of, letter, NUMBERS, on_host, Value
from .places import to_memory


def test_every_kind_is_loaded_as_numpy(every):
    found = eqx_ckpt.load(to_memory({"part": every}))["part"]
    assert found.keys() == every.keys()
    problems = []
    for name, leaf in every.items():
        kind = kind_of(leaf)
        if kind in NUMBERS:
            plain = kind(leaf)
            expected = Value(kind, plain)
        else:
            data = on_host(key_data(leaf) if kind == "key" else leaf)
            expected = Value("numpy", data, data.dtype)
        if problem := difference(found[name], expected):
            problems.append(f"{name}: {problem}")
    assert problems == []


def test_parts_that_are_loaded(every):
    path = to_memory({"part": every, "list": [{"w": np.arange(3)}, {"w": np.ones(2)}]})
    assert eqx_ckpt.load(path, "list/1/w").tolist() == [1, 1]
    first, second = eqx_ckpt.load(path, "list")
    assert [first["w"].tolist(), second["w"].tolist()] == [[0, 1, 2], [1, 1]]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'list/2'"):
        eqx_ckpt.load(path, "list/2")
    whole = eqx_ckpt.load(path)
    copy = to_memory(whole)
    assert eqx_ckpt.inspect.digest(to_memory(eqx_ckpt.load(copy))) == (
        eqx_ckpt.inspect.digest(copy)
    )


@np.errstate(all="ignore")
def norm_rel(a, b):
    """By NumPy, in 64 bits; infinite where a number became no number."""
    kind = complex if letter(a.dtype) == "c" else float
    a, b = a.astype(kind).reshape(-1), b.astype(kind).reshape(-1)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    far = np.where(same, 0, np.abs(b - a))
    if not np.isfinite(far).all():
        return math.inf
    before = np.abs(a[np.isfinite(a)])
    scale = max(before.max(initial=0), 1e-300)
    return np.linalg.norm(far / scale) / np.linalg.norm(before / scale)


def test_changes_of_norms(every):
    """Against NumPy, in the order that is promised."""
    first, second = others(every, 2)
    paths = [to_memory({"part": tree}) for tree in (first, second)]
    found = eqx_ckpt.inspect.diff(*paths, "part", values=True)
    assert found.compared == len(every)
    assert len(found) > 20
    for name, leaf in found.items():
        old, new = (on_host(t[name.removeprefix("part/")]) for t in (first, second))
        expected = norm_rel(old, new)
        assert leaf.norm_rel == pytest.approx(expected, rel=1e-6), name
    order = [leaf.norm_rel for leaf in found.values()]
    assert order == sorted(order, reverse=True)


def test_the_order_of_a_table():
    old = {
        "count": jnp.array(3),
        "key": np.arange(2),
        "large": jnp.array([3.0, 4.0]),
        "rate": 0.1,
        "same": jnp.ones(3),
        "shape": jnp.ones(2),
        "small": jnp.array([30.0, 40.0]),
        "zero": jnp.zeros(2),
    }
    new = old | {
        "count": jnp.array(900),
        "large": jnp.array([3.0, 9.0]),
        "rate": 0.2,
        "shape": jnp.ones(3),
        "small": jnp.array([30.0, 45.0]),
        "zero": jnp.ones(2),
        "new": 1,
    }
    del new["key"]
    paths = [to_memory(tree) for tree in (old, new)]
    found = eqx_ckpt.inspect.diff(*paths, values=True)
    assert [*found] == [
        *("key", "shape", "new"),
        *("zero", "large", "small"),
        *("count", "rate"),
    ]
    assert found["large"].norm_rel == 1
    assert found["small"].norm_rel == pytest.approx(0.1)
    lines = str(found).splitlines()
    assert lines[0] == (
        "8 of 9 leaves differ: 1 only in a, 1 different type, 1 only in b, 4 different "
        "values, 1 different value."
    )
    assert lines[1].split() == [
        *("leaf", "count", "max_abs", "max_rel", "norm_rel", "a", "b", "status")
    ]
    row = "large 1 5 0.556 1 float32[2] float32[2] different values"
    assert " ".join(lines[6].split()) == row
    assert repr(found) == str(found)
    assert "<td>large</td>" in found._repr_html_()
    same = eqx_ckpt.inspect.diff(paths[0], paths[0], values=True)
    assert (same, str(same)) == ({}, "No difference in 8 leaves.")
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'smal'.*'small'"):
        eqx_ckpt.inspect.diff(*paths, "smal")


def test_a_norm_of_many_chunks(tmp_path):
    """Those that are equal count, too."""
    a = np.random.default_rng(0).normal(size=(3, 2**21)).astype(np.float32)
    b = a.copy()
    b[1, 7] += 3
    for name, array in (("a", a), ("b", b)):
        eqx_ckpt.tree_serialise_leaves(tmp_path / name, {"w": array})
    found = eqx_ckpt.inspect.diff(tmp_path / "a", tmp_path / "b", values=True)["w"]
    wide = a.astype(float)
    expected = np.linalg.norm(b.astype(float) - wide) / np.linalg.norm(wide)
    assert found.norm_rel == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tree", [{}, {"a": {}}, []])
def test_a_tree_without_leaves_is_loaded_as_a_dictionary(tree):
    assert eqx_ckpt.load(to_memory(tree)) == {}
