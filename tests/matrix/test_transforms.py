"""Every kind of leaf through transforms that compute: as JAX does outside of them."""

import numpy as np
import pytest

import eqx_ckpt
from versions import thinned

from .check import assert_none, differences, Route, Tree
from .contexts import CONTEXTS
from .likes import made, mixed
from .operations import OPERATIONS, results, through
from .oracle import is_jaxs
from .places import to_memory


@pytest.fixture(scope="module")
def everything(every) -> str:
    return to_memory({"part": every})


@pytest.mark.parametrize("operation", thinned(OPERATIONS, 3))
def test_every_kind(everything, every, operation):
    seen, _ = results(operation, every)
    route = Route(everything, seen, through(operation))
    likes = {name: made(name, seen) for name in ("same", "numpy", "struct everywhere")}
    likes["mixed"] = mixed(seen, operation)
    assert_none({name: differences(route, like) for name, like in likes.items()})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_64_bits(everything, every, operation):
    wide = {n: x for n, x in every.items() if "64" in n or "128" in n}

    def check(seen: Tree) -> list[str]:
        route = Route(everything, seen, through(operation))
        return differences(route, mixed(seen, operation), "same_kind")

    make = lambda: results(operation, wide)[0]  # noqa: E731
    assert_none({"x64": CONTEXTS["x64"](make, check)})


@pytest.mark.parametrize("operation", ["stacked", "reshaped"])
def test_what_jax_lacks(source, some, operation):
    _, names = results(operation, some)
    # Of nothing, JAX may return what it has.
    names = [name for name in names if np.size(some[name])]
    assert len(names) > 9
    way = through(operation)
    assert way.match is not None
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
