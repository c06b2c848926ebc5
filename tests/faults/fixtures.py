"""The fixtures of the fault tests."""

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from . import shim
from .zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process under the fault shim that forks a child for each fault."""
    if reason := shim.missing():
        pytest.skip(reason)
    libraries = shim.build(tmp_path_factory.mktemp("shim"))
    process = Zygote(libraries)
    yield process
    process.close()


@pytest.fixture
def disk() -> Iterator[pathlib.Path]:
    """An empty directory, with a short path."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="faults-")).resolve()
    yield directory
    shutil.rmtree(directory)
