"""Subclasses of Python's numbers are made again from the number, or refused by name."""

import enum

import equinox as eqx
import pytest

import eqx_ckpt
from helpers import assert_same


PATH = "memory://subclasses"


class Old(enum.IntEnum):
    WARM_UP = 1
    DECAY = 2


class New(enum.IntEnum):
    WARM_UP = 1


class Metres(float):
    pass


class Length(float):
    def __new__(cls, value, unit):
        return super().__new__(cls, value)


class Half(float):
    def __new__(cls, value):
        return super().__new__(cls, value / 2)


class Failing(int):
    def __init__(self, value):
        if value > 5:
            raise ZeroDivisionError("too many")


def saved(tree):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    return tree


def test_a_subclass_comes_back():
    tree = saved({"phase": Old.DECAY, "x": Metres("nan"), "y": Metres(-0.0)})
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, tree), tree)


@pytest.mark.parametrize(
    ("number", "like", "words"),
    [
        (Old.DECAY, New.WARM_UP, "`New` .which 2 is not: 2 is not a valid New"),
        (2.5, Length(1, "m"), "`Length` .which 2.5 is not: .*unit"),
        (2.0, Half(2), "`Half` .which 2.0 is not: it makes 1.0"),
        (7, Failing(0), "`Failing` .which 7 is not: too many"),
    ],
)
def test_a_subclass_that_cannot_be_made(number, like, words):
    saved({"a": {"x": number}, "b": 1})
    tree = {"a": {"x": like}, "b": 0}
    found = eqx_ckpt.tree_match(PATH, tree)
    assert list(found.problems) == ["a/x"]
    assert found.leaves["a/x"].status == "kind"
    words = f"'a/x'.*{words}"
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=words):
        eqx_ckpt.tree_deserialise_leaves(PATH, tree)
    spec = lambda f, x: eqx_ckpt.default_deserialise_filter_spec(f, x)  # noqa: E731
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=words):
        eqx_ckpt.tree_deserialise_leaves(PATH, tree, spec)
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, tree, where=lambda t: t["b"])
    assert_same(restored, {"a": {"x": like}, "b": 1})


def test_equinox_default_names_the_leaf_too():
    saved({"x": Old.DECAY})
    spec = lambda f, x: eqx.default_deserialise_filter_spec(f, x)  # noqa: E731
    with pytest.raises(ValueError, match="2 is not a valid New") as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, {"x": New.WARM_UP}, spec)
    assert "'x'" in error.value.__notes__[0]
