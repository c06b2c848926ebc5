"""Every kind of leaf by every way in: no way changes what comes back."""

import functools as ft
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import eqx_ckpt
from versions import thinned

from . import leaves
from .check import all_differences, assert_none, differences, Route, Tree
from .contexts import CONTEXTS, THAT_MATTER
from .leaves import SHAPE
from .likes import everywhere, LIKES, made, mixed
from .operations import through
from .oracle import outcome, Value
from .routes import ROUTES
from .ways import DIRECT


# JAX says so of a NumPy leaf of 64 bits that `restore_or_init` traces.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Explicitly requested dtype .* is not available"
)
FEW = ("itself", "same", "jax", "numpy", "scalar", "struct in rows", "evaluated", "int")
WORDS = ("no", "safe", "same_kind", "unsafe")
REFUSED = "`jax.jit` under `jax.set_mesh`"
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
        {word: differences(route, mixed(route.seen, word), word) for word in WORDS}
    )


def test_every_context(route, request):
    """In each way, every other context: each context meets half of the ways."""
    problems = {}
    odd = [*ROUTES].index(request.node.callspec.params["route"]) % 2
    for name, run in [*CONTEXTS.items()][odd::2]:
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


@pytest.mark.parametrize("name", thinned(CONTEXTS, 3))
def test_contexts(direct, name):
    names = LIKES if name in THAT_MATTER else FEW
    make = lambda: {like: made(like, direct.seen) for like in names}  # noqa: E731
    assert_none(CONTEXTS[name](make, ft.partial(all_differences, direct)))


@pytest.mark.parametrize("name", thinned(SHARDINGS, 2))
def test_shardings(direct, name):
    likes = {like: made(like, direct.seen) for like in LIKES}
    assert_none(all_differences(direct, likes, sharding=SHARDINGS[name]()))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_jit_under_a_mesh(direct, axes):
    """What has to be computed is refused, and all else is as it is elsewhere."""

    def check(likes: Mapping[str, Tree]) -> dict[str, list[str]]:
        problems = {}
        for name, like in likes.items():
            computed = {
                n: x for n, x in like.items() if becomes_weak(direct.seen[n], x)
            }
            rest = {n: x for n, x in like.items() if n not in computed}
            problems[name] = differences(direct, rest)
            for leaf, one in computed.items():
                with pytest.raises(eqx_ckpt.CheckpointError, match=REFUSED):
                    direct.call.restore(direct.source, {leaf: one})
        with pytest.raises(eqx_ckpt.CheckpointError, match=REFUSED):
            through("negated").restore(direct.source, {"jax_float32": jnp.zeros(SHAPE)})
        return problems

    make = lambda: {name: made(name, direct.seen) for name in LIKES}  # noqa: E731
    with jax.set_mesh(leaves.mesh(axes)):
        assert_none(CONTEXTS["jit"](make, check))


def becomes_weak(saved: Any, like: Any) -> bool:
    value = outcome(saved, like)
    return isinstance(value, Value) and value.weak


def test_a_store(some, s3):
    eqx_ckpt.tree_serialise_leaves(s3.url, {"part": some})
    route = Route(s3.url, some, DIRECT)
    assert_none(
        {str(draw): differences(route, mixed(some, str(draw))) for draw in (1, 2)}
    )
