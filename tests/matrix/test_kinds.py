"""Every kind and dtype of leaf into every kind of `like`."""

import functools as ft

import pytest

from versions import thinned

from .check import all_differences, assert_none, differences, Route
from .contexts import CONTEXTS
from .leaves import AtMostThree
from .likes import LIKES, made, mixed
from .places import to_memory
from .ways import DIRECT


@pytest.fixture(scope="module")
def everything(every) -> Route:
    return Route(to_memory({"part": every}), every, DIRECT)


@pytest.mark.parametrize("casting", thinned(["no", "safe", "same_kind", "unsafe"], 2))
def test_every_kind(everything, casting):
    every = everything.seen
    likes = {name: made(name, every) for name in LIKES}
    assert_none(all_differences(everything, likes, casting))


def test_a_number_that_another_one_is_made_of(everything):
    like = dict.fromkeys(everything.seen, AtMostThree(0))
    assert_none(
        {word: differences(everything, like, word) for word in ("no", "unsafe")}
    )


@pytest.mark.parametrize("casting", ["no", "same_kind", "unsafe"])
def test_every_kind_with_x64(everything, casting):
    every = everything.seen

    words = [f"{casting} {draw}" for draw in range(8)]
    make = lambda: {word: mixed(every, word) for word in words}  # noqa: E731
    check = ft.partial(all_differences, everything, casting=casting)
    assert_none(CONTEXTS["x64"](make, check))
