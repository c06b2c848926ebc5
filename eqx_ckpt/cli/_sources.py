"""What commands are given: paths of checkpoints, recordings, and other formats."""

import os

import eqx_ckpt

from .._storage.foreign import format_at
from .._storage.reading import opened


def source_at(path: str) -> eqx_ckpt.Source:
    """What is at a path, in whatever format; ours is opened without importing JAX."""
    try:
        return opened(path)
    except eqx_ckpt.CheckpointNotFoundError:
        is_remote = "://" in path
        format = "" if is_remote else format_at(os.path.expanduser(path))
        if format == "eqx":
            raise eqx_ckpt.CheckpointError(
                f"{path!r} is a file of Equinox, which has no names. Make a checkpoint "
                "of it: `eqx-ckpt convert` does, with `--like MODULE:NAME`."
            ) from None
        if not (is_remote or format):
            raise
        return eqx_ckpt.interop.open_source(path)


def path_or_source(path: str) -> str | eqx_ckpt.Source:
    """The path itself if it is ours: then it is noticed if that is replaced."""
    try:
        opened(path)
        return path
    except eqx_ckpt.CorruptCheckpointError:
        return path
    except eqx_ckpt.CheckpointNotFoundError:
        return source_at(path)
