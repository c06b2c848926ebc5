"""The average of checkpoints: every kind of leaf into every kind of `like`."""

import pytest

import eqx_ckpt
from versions import thinned

from .averages import mean, others
from .check import assert_none, differences, Route
from .likes import LIKES, made, mixed
from .places import to_memory
from .ways import DIRECT


WEIGHTS = {1: [3.0], 2: [1.0, 1.0], 3: [0.25, 2.0, 5e-3], 5: [1.0] * 5}


@pytest.mark.parametrize("count", thinned(WEIGHTS, 2))
def test_every_kind(every, count):
    trees = others(every, count)
    paths = [to_memory({"part": tree}) for tree in trees]
    weights = WEIGHTS[count]
    source = eqx_ckpt.average(paths, None if set(weights) == {1.0} else weights)
    route = Route(source, mean(trees, weights), DIRECT)
    likes = {"itself": made("itself", every), "numpy": made("numpy", every)}
    likes |= {f"drawn {count} {i}": mixed(every, f"{count} {i}") for i in range(3)}
    assert_none({name: differences(route, like) for name, like in likes.items()})


def test_the_average_of_one_tree_is_that_tree(some):
    path = to_memory({"part": some})
    route = Route(eqx_ckpt.average([path] * 7), some, DIRECT)
    names = [name for name in LIKES if "committed" not in name]
    assert_none({"same": differences(route, mixed(some, "same", names), "same_kind")})
