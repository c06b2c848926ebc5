"""Every kind of leaf by every way in: no way changes what comes back."""

import jax
import pytest
from jax.sharding import AxisType

import eqx_ckpt

from . import leaves
from .check import assert_none, differences
from .contexts import CONTEXTS
from .exact import difference
from .likes import everywhere, LIKES, made, NONE
from .oracle import outcome, Value
from .ways import (
    by_manager,
    CALLS,
    DIRECT,
    FORMATS,
    FROM_MANAGER,
    FROM_STATE_DICT,
    PLACES,
)


FEW = ("itself", "same", "jax", "numpy", "scalar", "struct in rows", "evaluated", "int")


@pytest.mark.parametrize("name", CALLS)
def test_arguments(source, some, name):
    assert_none(
        {
            like: differences(source, some, made(like, some), CALLS[name])
            for like in LIKES
        }
    )


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(source, some, name):
    problems = {}
    decides = name in ("x64", "auto mesh", "explicit mesh", "default device")
    for like in LIKES if decides else FEW:
        with CONTEXTS[name]():
            problems[like] = differences(source, some, made(like, some), DIRECT)
    assert_none(problems)


SHARDINGS = {
    "device": lambda: jax.devices()[6],
    "everywhere": lambda: everywhere(AxisType.Auto),
    "explicit": lambda: everywhere(AxisType.Explicit),
    "mesh": lambda: leaves.mesh(),
    "explicit mesh": lambda: leaves.mesh(AxisType.Explicit),
    "rows": lambda: leaves.rows(),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings(source, some, name):
    to = SHARDINGS[name]()
    assert_none(
        {
            like: differences(source, some, made(like, some), DIRECT, sharding=to)
            for like in LIKES
        }
    )


@pytest.mark.parametrize("name", PLACES)
def test_places(some, name, tmp_path):
    source = PLACES[name]({"part": some}, tmp_path)
    assert_none(
        {like: differences(source, some, made(like, some), DIRECT) for like in FEW}
    )


def test_a_manager(some, tmp_path):
    manager = by_manager({"part": some}, tmp_path)
    assert_none(
        {
            like: differences(manager, some, made(like, some), FROM_MANAGER)
            for like in FEW
        }
    )


def test_a_state_dict(some):
    state = eqx_ckpt.to_state_dict({"part": some})
    assert_none(
        {
            like: differences(state, some, made(like, some), FROM_STATE_DICT)
            for like in LIKES
        }
    )


def test_a_store(some, s3):
    eqx_ckpt.tree_serialise_leaves(s3.url, {"part": some})
    assert_none(
        {
            like: differences(s3.url, some, made(like, some), DIRECT)
            for like in ("itself", "struct in rows", "int")
        }
    )


def test_restore_or_init(source, some):
    arrays = {n: x for n, x in made("same", some).items() if isinstance(x, jax.Array)}
    expected = {n: outcome(some[n], LIKES["evaluated"](x)) for n, x in arrays.items()}
    arrays = {n: x for n, x in arrays.items() if isinstance(expected[n], Value)}
    found = eqx_ckpt.restore_or_init(
        source, lambda: {"part": arrays}, unexpected="ignore"
    )
    problems = {n: difference(found["part"][n], expected[n]) for n in arrays}
    assert not {n: problem for n, problem in problems.items() if problem}


def test_inside_jit(source, some):
    problems = {}

    @jax.jit
    def trace(x: jax.Array) -> jax.Array:
        for like, some_like in likes.items():
            problems[like] = differences(source, some, some_like, DIRECT)
        return x

    likes = {name: made(name, some) for name in LIKES}
    trace(1.0)
    assert_none(problems)


@pytest.mark.filterwarnings("ignore:.*does not keep")
@pytest.mark.parametrize("name", FORMATS)
def test_formats(some, name, tmp_path):
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    form = FORMATS[name]
    seen = {leaf: form.seen(value) for leaf, value in some.items()}
    seen = {leaf: value for leaf, value in seen.items() if value is not NONE}
    source = form.put({"part": {leaf: some[leaf] for leaf in seen}}, tmp_path)
    assert_none(
        {like: differences(source, seen, made(like, some), DIRECT) for like in LIKES}
    )
