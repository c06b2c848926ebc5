"""What several tests need."""

import contextlib
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree


# What JAX has compiled for the tests is kept here.
CACHE = Path(__file__).parents[1] / ".cache"


@contextlib.contextmanager
def folder_on_disk() -> Generator[Path]:
    """An empty folder outside of memory: what is read there may be cold."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def use_memory() -> None:
    """Let temporary files be in memory, where a flush takes no time.

    Also those of processes that are started. `TMPDIR` decides, if it is set.
    """
    memory, gigabytes = Path("/dev/shm"), 4
    if memory.is_dir() and shutil.disk_usage(memory).free >= gigabytes * 2**30:
        tempfile.tempdir = os.environ.setdefault("TMPDIR", str(memory))


def bits(leaf: Any) -> Any:
    """A leaf as something that is equal only to a leaf that is the same to the bit."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        data = np.asarray(jax.random.key_data(leaf))
        return str(leaf.dtype), leaf.shape, data.tobytes()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        weak = isinstance(leaf, jax.Array) and leaf.weak_type
        return type(leaf), array.dtype, array.shape, weak, array.tobytes()
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def assert_same(a: PyTree, b: PyTree) -> None:
    """The same structure, types, dtypes, shapes, weak types and bits."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    leaves = zip(jtu.tree_leaves_with_path(a), jtu.tree_leaves(b), strict=True)
    for (path, x), y in leaves:
        assert bits(x) == bits(y), jtu.keystr(path)


def structs(tree: PyTree) -> PyTree:
    """The skeleton of a tree, as `eqx.filter_eval_shape` makes it."""
    with np.errstate(all="ignore"):  # It narrows what NumPy has too wide for JAX.
        return eqx.filter_eval_shape(lambda: tree)


def until(is_so: Callable[[], bool], patience: float = 60.0) -> None:
    """Wait until something is so; fail after that many seconds."""
    end = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_uploads(below: Path) -> None:
    """Wait until managers know what is in mirrors there, and have nothing to upload.

    Managers that other tests have left behind may try again and again.
    """
    start = f"eqx_ckpt uploads to {below}"
    until(lambda: not any(t.name.startswith(start) for t in threading.enumerate()))


def files_below(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def keep_compiled(whose: str) -> dict[str, str]:
    """The environment of processes that compile once for all of them, and the next run.

    A half-written entry, which a killed process leaves, is a warning of JAX, which then
    compiles: this is not for processes in which warnings are errors.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / whose),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def evict(directory: Path) -> None:
    """Drop the files below a directory from the page cache, where there is one."""
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def besides_metrics(run: Path) -> list[str]:
    """What is in the directory of a run, in order, but for the metrics of old steps."""
    names = (path.name for path in run.iterdir())
    return sorted(name for name in names if not name.startswith("metrics."))


@contextlib.contextmanager
def full_disk(limit: int) -> Generator[None]:
    """Let no file grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
