"""What is saved once for many tests."""

import warnings

import pytest

from versions import thinned

from . import leaves
from .check import Route, Tree
from .places import to_memory
from .routes import ROUTES
from .ways import DIRECT


@pytest.fixture(scope="session")
def every() -> Tree:
    """A leaf of every kind and dtype."""
    return leaves.tree()


@pytest.fixture(scope="session")
def some(every: Tree) -> Tree:
    """A leaf of every kind."""
    return {name: every[name] for name in leaves.SOME}


@pytest.fixture(scope="session")
def source(some: Tree) -> str:
    return to_memory({"part": some})


@pytest.fixture(scope="session")
def direct(source: str, some: Tree) -> Route:
    return Route(source, some, DIRECT)


@pytest.fixture(scope="module", params=thinned(ROUTES, 4))
def route(request: pytest.FixtureRequest, some: Tree, tmp_path_factory) -> Route:
    """Each way in, which the tests of it share."""
    if request.param == "orbax":
        pytest.importorskip("orbax.checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not keep")
        return ROUTES[request.param](some, tmp_path_factory.mktemp("route"))
