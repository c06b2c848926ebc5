"""Every kind of leaf through transforms that compute: as JAX does outside of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt

from .check import assert_none, differences
from .contexts import CONTEXTS
from .likes import made, NONE
from .oracle import is_jaxs, kind_of, narrow, NUMBERS
from .ways import call


OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "sliced": lambda x: x[2:6],
    # Not a row with a -0.0, of which XLA may make 0.0 on a mesh.
    "taken": lambda x: x[3],
    "reversed": lambda x: jnp.flip(x, 0),
    "stacked": lambda x: jnp.stack([x, x]),
    "concatenated": lambda x: jnp.concatenate([x, x]),
    "reshaped": lambda x: jnp.reshape(x, (-1,)),
    "cast": lambda x: x.astype(jnp.float16),
    "negated": lambda x: -x,
    "compared": lambda x: x == x,
    "weakened": lambda x: x.sum() * 0 + 1.5,
}
NO_KEYS = ("cast", "negated", "compared", "weakened")
# JAX has no arithmetic of these, and none of it is exact of the others.
DTYPES = ("float32", "bfloat16", "complex64", "int32", "uint8")


def made_by(operation: str, leaf: Any) -> Any:
    """What it makes of a leaf outside of a transform; `NONE`: nothing to try.

    `None`: JAX does not have its dtype.
    """
    kind = kind_of(leaf)
    if kind in NUMBERS or np.ndim(leaf) == 0 or 0 in leaf.shape:
        return NONE
    if leaf.dtype == "int1":  # JAX holds these, but does not compute with them.
        return NONE
    if kind == "key":
        if operation in NO_KEYS:
            return NONE
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        impl = jax.random.key_impl(leaf)
        return OPERATIONS[operation](jax.random.wrap_key_data(data, impl=impl))
    moves = operation in ("sliced", "taken", "stacked", "concatenated", "reshaped")
    if not is_jaxs(leaf.dtype) or narrow(leaf.dtype) != leaf.dtype:
        return None
    if leaf.dtype.name not in DTYPES and not moves:
        return NONE
    if leaf.dtype.kind == "c" and operation == "cast":
        return NONE
    return OPERATIONS[operation](at_home(leaf))


def at_home(leaf: Any) -> jax.Array:
    """The same array on one device."""
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jnp.full(leaf.shape, np.asarray(leaf).flat[0].item())
    return jnp.asarray(np.asarray(leaf))


def through(operation: str) -> Any:
    def transform(old: Any, names: list[str]) -> Any:
        return {"part": {n: OPERATIONS[operation](old["part"][n]) for n in names}}

    return call(
        lambda like: {
            "like": {"part": like},
            "transform": lambda old: transform(old, [*like]),
            "unexpected": "ignore",
        }
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_transforms(source, some, operation):
    outside = {name: made_by(operation, leaf) for name, leaf in some.items()}
    seen = {n: x for n, x in outside.items() if x is not NONE and x is not None}
    likes = ("same", "numpy", "struct everywhere", "int")
    assert_none(
        {
            like: differences(source, seen, made(like, seen), through(operation))
            for like in likes
        }
    )


@pytest.mark.parametrize(
    "name", ["x64", "auto mesh", "explicit mesh", "default device", "disabled jit"]
)
def test_transforms_in_contexts(source, some, name):
    outside = {leaf: made_by("negated", x) for leaf, x in some.items()}
    seen = {n: x for n, x in outside.items() if x is not NONE and x is not None}
    problems = {}
    for like in ("same", "struct everywhere"):
        leaves = made(like, seen)
        with CONTEXTS[name]():
            problems[like] = differences(source, seen, leaves, through("negated"))
    assert_none(problems)


@pytest.mark.parametrize("operation", ["sliced", "stacked", "reshaped"])
def test_what_jax_lacks(source, some, operation):
    names = [name for name, x in some.items() if made_by(operation, x) is None]
    assert len(names) > 9
    way = through(operation)
    for name in names:
        like = {name: np.zeros_like(some[name])}
        with pytest.raises(eqx_ckpt.LeafMismatchError, match=f"'part/{name}'"):
            way.restore(source, like)
        # Of what would be narrow, JAX may compute something that is not needed.
        if is_jaxs(some[name].dtype):
            found = way.match(source, like).leaves
            assert found[f"part/{name}"].status == "dtype"
        else:
            with pytest.raises(eqx_ckpt.LeafMismatchError, match=f"'part/{name}'"):
                way.match(source, like)
