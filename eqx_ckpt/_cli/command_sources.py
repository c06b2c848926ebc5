"""What commands are given: paths of checkpoints, recordings, and other formats."""

import os
from collections.abc import Callable
from typing import TypeVar

import eqx_ckpt

from .._format.source import Source
from .._sources.checkpoint_source import opened
from .._sources.consistent_read import read_consistently
from .._steps.run_steps import Run
from .._storage.directory.foreign_paths import format_at, without_names
from .._storage.locate import is_web


_T = TypeVar("_T")


def found_at(path: str) -> str | Source:
    """What is at a path, for a function that reads it.

    The path itself if it is ours: then it is read again if it is replaced meanwhile.
    """
    if is_web(path):
        return eqx_ckpt.interop.open_source(path)
    try:
        opened(path)
        return path
    except eqx_ckpt.CorruptCheckpointError:
        return path
    except eqx_ckpt.CheckpointNotFoundError:
        is_remote = "://" in path
        expanded = os.path.expanduser(path)
        format = "" if is_remote else format_at(expanded)
        if problem := without_names(expanded, format):
            raise eqx_ckpt.CheckpointError(
                f"{problem}. Make a checkpoint of it: `eqx-ckpt convert` does, with "
                "`--like MODULE:NAME`."
            ) from None
        if not (is_remote or format):
            raise
        return eqx_ckpt.interop.open_source(path)


def newest_at(path: str) -> str:
    """The newest step of what may be a run; otherwise the path itself."""
    if is_web(path):
        return path
    try:
        opened(path)
    except eqx_ckpt.CheckpointNotFoundError:
        run = Run(path)
        if steps := run.readable_or_not():
            run.check_unusable(steps)
            return run.location(steps[-1]).url()
    except (eqx_ckpt.CheckpointError, OSError):
        pass  # Whoever reads it says that.
    return path


def reading(path: str, read: Callable[[Source], _T]) -> _T:
    """Read what is at a path: again from the start if it is replaced meanwhile."""
    return read_consistently(found_at(path), read)
