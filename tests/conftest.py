import itertools
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest
from jaxtyping import config, PRNGKeyArray


pytest_plugins = ["faults.fixtures", "stores.fixtures"]

# Eight devices, so that one process can save and restore sharded arrays.
jax.config.update("jax_num_cpu_devices", 8)

# How long a file operation takes says nothing about its correctness.
hypothesis.settings.register_profile("eqx_ckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("eqx_ckpt")


@pytest.fixture
def getkey() -> Callable[[], PRNGKeyArray]:
    """Gives another PRNG key at each call, the same ones in each test."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the type checks of the tests, which come before the package's own."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
