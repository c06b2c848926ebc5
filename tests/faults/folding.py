"""What the children of the zygote do in a directory that ignores letter case."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import eqx_ckpt

from . import jobs, shim
from .failing_jobs import caught


def call(root: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shim.fold(root)
    return function(*args, **kwargs)


def errors(root: str, tree: Any, like: Any, other: str) -> dict[str, tuple[str, str]]:
    """What each way to save a tree raises, and the archive and checkpoint at `other`.

    `like` has as many leaves, of one sample.
    """
    shim.fold(root)
    run, path = f"{root}/run", f"{root}/new"
    archive = eqx_ckpt.interop.open_npz(f"{other}.npz")

    def managed(function: str, *args: Any) -> None:
        with eqx_ckpt.CheckpointManager(run) as manager:
            getattr(manager, function)(*args)

    def recorded() -> None:
        eqx_ckpt.recording.Recording(f"{root}/recording", like).close()

    def with_state() -> None:
        with eqx_ckpt.recording.Recording(f"{root}/states", np.zeros(2)) as recording:
            recording.extend(np.zeros((1, 2)))
            try:
                recording.commit(tree)
            finally:
                recording.commit({"renamed": 1})

    found = {
        "save": caught(eqx_ckpt.tree_serialise_leaves, path, tree),
        "overwrite": caught(
            eqx_ckpt.tree_serialise_leaves, f"{root}/old", tree, overwrite=True
        ),
        "async": caught(eqx_ckpt.tree_serialise_leaves_async, path, tree),
        "manager": caught(managed, "save", 1, tree),
        "copy": caught(eqx_ckpt.copy, other, path),
        "import": caught(eqx_ckpt.copy, archive, path),
        "recording": caught(recorded),
        "state": caught(with_state),
    }
    (record,) = eqx_ckpt.inspect.read_manifest(f"{root}/states").leaves.values()
    assert record.shape == (1, 2)
    return found


def in_a_job(root: str, tree: Any, other: str) -> list[list[tuple[str, str]]]:
    """What the processes of a job raise."""
    shim.fold(root)
    return jobs.values(2, 1, _of_process, f"{root}/new", tree, other)


def _of_process(path: str, tree: Any, other: str) -> list[tuple[str, str]]:
    return [
        caught(eqx_ckpt.tree_serialise_leaves, path, tree, timeout=20.0),
        caught(eqx_ckpt.copy, other, path, timeout=20.0),
    ]


def there_and_back(root: str, tree: Any, layout: Any) -> tuple[Any, list[str]]:
    """Save a tree; what is restored and verified, and the entries on the disk."""
    shim.fold(root)
    path = f"{root}/new"
    eqx_ckpt.tree_serialise_leaves(path, tree, layout=layout)
    eqx_ckpt.inspect.verify(path)
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree)
    return restored, os.listdir(root)


def moved(checkpoint: str, root: str, tree: Any) -> list[tuple[str, str]]:
    """Copy files one after the other; what it raises to read each leaf, and all."""
    shim.fold(root)
    path = f"{root}/moved"
    for folder, _, names in os.walk(checkpoint):
        target = path + folder.removeprefix(checkpoint)
        os.makedirs(target, exist_ok=True)
        for name in names:
            with (
                open(f"{folder}/{name}", "rb") as f,
                open(f"{target}/{name}", "wb") as g,
            ):
                g.write(f.read())
    ways = [lambda t, key=key: t[key] for key in tree]
    restore = eqx_ckpt.tree_deserialise_leaves
    return [
        *(caught(restore, path, tree, where=where) for where in ways),
        caught(restore, path, tree),
        caught(eqx_ckpt.inspect.verify, path),
    ]
