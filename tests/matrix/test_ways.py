"""Every kind of leaf by every way in: no way changes what comes back."""

import functools as ft

import jax
import pytest
from jax.sharding import AxisType

import eqx_ckpt

from . import leaves
from .check import all_differences, assert_none, differences, Route
from .contexts import CONTEXTS, THAT_MATTER
from .likes import everywhere, LIKES, made, mixed
from .ways import DIRECT


# JAX says so of a NumPy leaf of 64 bits that `restore_or_init` traces.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Explicitly requested dtype .* is not available"
)
FEW = ("itself", "same", "jax", "numpy", "scalar", "struct in rows", "evaluated", "int")
WORDS = ("no", "safe", "same_kind", "unsafe")
SHARDINGS = {
    "device": lambda: jax.devices()[6],
    "everywhere": lambda: everywhere(AxisType.Auto),
    "explicit": lambda: everywhere(AxisType.Explicit),
    "mesh": lambda: leaves.mesh(),
    "explicit mesh": lambda: leaves.mesh(AxisType.Explicit),
    "rows": lambda: leaves.rows(),
}


def test_every_like(route):
    """In each way, each kind of leaf meets each kind of `like`, or one of many."""
    assert_none(
        {
            f"{word} {draw}": differences(route, mixed(route.seen, f"{draw}"), word)
            for word in WORDS
            for draw in range(2)
        }
    )


def test_every_context(route):
    problems = {}
    for name, run in CONTEXTS.items():
        make = ft.partial(mixed, route.seen, name)
        check = ft.partial(differences, route, casting=WORDS[len(name) % 4])
        problems[name] = run(make, check)
    assert_none(problems)


def test_every_sharding(route):
    assert_none(
        {
            name: differences(route, mixed(route.seen, name), WORDS[i % 4], to())
            for i, (name, to) in enumerate(SHARDINGS.items())
            if route.call.takes_sharding
        }
    )


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(direct, name):
    names = LIKES if name in THAT_MATTER else FEW
    make = lambda: {like: made(like, direct.seen) for like in names}  # noqa: E731
    assert_none(CONTEXTS[name](make, ft.partial(all_differences, direct)))


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings(direct, name):
    likes = {like: made(like, direct.seen) for like in LIKES}
    assert_none(all_differences(direct, likes, sharding=SHARDINGS[name]()))


def test_a_store(some, s3):
    eqx_ckpt.tree_serialise_leaves(s3.url, {"part": some})
    route = Route(s3.url, some, DIRECT)
    assert_none(
        {str(draw): differences(route, mixed(some, str(draw))) for draw in (1, 2)}
    )
