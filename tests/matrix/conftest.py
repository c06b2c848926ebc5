"""What is saved once for many tests."""

import pytest

from . import leaves
from .ways import to_memory, Tree


@pytest.fixture(scope="session")
def every() -> Tree:
    """A leaf of every kind and dtype."""
    return leaves.tree()


@pytest.fixture(scope="session")
def every_source(every: Tree) -> str:
    return to_memory({"part": every})


@pytest.fixture(scope="session")
def some(every: Tree) -> Tree:
    """A leaf of every kind."""
    return {name: every[name] for name in leaves.SOME}


@pytest.fixture(scope="session")
def source(some: Tree) -> str:
    return to_memory({"part": some})
