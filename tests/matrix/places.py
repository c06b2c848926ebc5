"""Where a tree of leaves is saved, and from where it is restored."""

import functools as ft
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import eqx_ckpt

from .check import Tree


_NUMBERS = itertools.count()


def to_memory(tree: Tree, at: Any = None, **how: Any) -> Any:
    path = f"memory://matrix/{next(_NUMBERS)}"
    eqx_ckpt.tree_serialise_leaves(path, tree, **how)
    return path


def to_directory(tree: Tree, at: Path, **how: Any) -> Any:
    eqx_ckpt.tree_serialise_leaves(at / "new", tree, **how)
    return at / "new"


def in_background(tree: Tree, at: Path) -> Any:
    eqx_ckpt.tree_serialise_leaves_async(at / "new", tree).result()
    return at / "new"


def by_manager(tree: Tree, at: Path) -> Any:
    with eqx_ckpt.CheckpointManager(at) as manager:
        manager.save(3, tree)
    return manager


def copied(tree: Tree, at: Path) -> Any:
    eqx_ckpt.copy(to_memory(tree), at / "copy", layout="ocdbt")
    return at / "copy"


def state_of_a_recording(tree: Tree, at: Path) -> Any:
    with eqx_ckpt.recording.Recording(at / "run", {"x": np.float32(0)}) as recording:
        recording.extend({"x": np.ones(3, np.float32)})
        recording.commit(tree)
    return recording.state_path


def through_a_spec(tree: Tree, at: Path) -> Any:
    spec = lambda f, x: eqx_ckpt.default_serialise_filter_spec(f, x)  # noqa: E731
    return to_memory(tree, filter_spec=spec)


PLACES: Mapping[str, Callable[[Tree, Path], Any]] = {
    "memory": to_memory,
    "directory": to_directory,
    "compressed": ft.partial(to_directory, compression="zstd"),
    "database": ft.partial(to_directory, layout="ocdbt"),
    "database in memory": ft.partial(to_memory, layout="ocdbt"),
    "background": in_background,
    "copy": copied,
    "recording": state_of_a_recording,
    "filter_spec": through_a_spec,
}
