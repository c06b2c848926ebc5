import gc
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import ModuleType
from unittest import mock


# Tests compile thousands of programs, and run each of them once or twice: so compile
# quickly, also in processes that they start. JAX looks at this when it is imported.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import equinox  # noqa: F401
import hypothesis
import jax
import pytest
import tensorstore  # noqa: F401
from beartype import BeartypeConf
from beartype.claw import beartype_package
from jaxtyping import PRNGKeyArray

from helpers import CACHE, use_memory


# Each call in the package checks its types, in a tenth of the time that
# `jaxtyping.jaxtyped` takes, which also compares names of axes: there are none. That is
# a fifth of the time of these tests, so one run of `make test` does it, with the newest
# packages, and the others call the package as its users do. What is called for each
# leaf and chunk, and has no public name, is left to pyright.
if os.environ.get("CHECK_TYPES"):
    beartype_package(
        "eqx_ckpt",
        conf=BeartypeConf(
            claw_is_pep526=False,
            claw_skip_package_names=(
                "eqx_ckpt._format",
                "eqx_ckpt._storage.calls",
                "eqx_ckpt._storage.interface",
                "eqx_ckpt._storage.chunks",
                "eqx_ckpt._tree",
            ),
        ),
    )
with mock.patch("typing.TYPE_CHECKING", True):  # Some types are imported there.
    import eqx_ckpt

    for name in eqx_ckpt.__all__:
        getattr(eqx_ckpt, name)


pytest_plugins = ["faults.fixtures", "stores.fixtures"]

# What the tests in a folder need, or look at.
MARKS = {
    "interop": ["peers"],
    "loading": ["oldest"],
    "matrix": ["oldest"],
    "model": ["once"],
    "multiprocess": ["job", "oldest"],
    "project": ["form"],
    "recording": ["oldest"],
    "report": ["browser", "once"],
    "restore": ["oldest"],
    "save": ["oldest"],
    "stores": ["store"],
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        for mark in MARKS.get(item.path.relative_to(tests).parts[0], ()):
            item.add_marker(mark)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """A save ends before the folder that it writes is removed."""
    from support import background_save

    futures.wait([*background_save.pending_saves], timeout=60)


# While tests are imported and collected, next to nothing becomes garbage.
gc.disable()

use_memory()

# Eight devices, so that one process can save and restore sharded arrays.
jax.config.update("jax_num_cpu_devices", 8)

# A program is compiled once for all workers, and for the next run.
jax.config.update("jax_compilation_cache_dir", f"{CACHE}/workers")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# How long a file operation takes says nothing about its correctness. The same examples
# each time: whether a change is right must not depend on chance.
hypothesis.settings.register_profile(
    "eqx_ckpt", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("eqx_ckpt")


@pytest.fixture
def getkey() -> Callable[[], PRNGKeyArray]:
    """Gives another PRNG key at each call, the same ones in each test."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture(scope="session")
def unchecked() -> ModuleType:
    """The package once more, without these checks, which come before its own."""
    spec = importlib.util.spec_from_file_location("unchecked", eqx_ckpt.__file__)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["unchecked"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
