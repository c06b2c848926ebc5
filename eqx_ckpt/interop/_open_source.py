"""Opening whatever is at a path."""

import contextlib
import os
from collections.abc import Callable
from typing import Any, get_args

from jaxtyping import PyTree

from .._errors import CheckpointError, CheckpointNotFoundError
from .._format.manifest import MANIFEST
from .._format.source import Source
from .._sources.checkpoint_source import opened
from .._storage.directory.foreign_paths import (
    format_at,
    format_of,
    format_of_folder,
    without_names,
)
from .._storage.interface.committed_manifest import is_checkpoint
from .._storage.interface.foreign_file import read_bytes
from .._storage.locate import is_web, locate, locate_file
from .._types import as_text, check_word, Format, PathLike
from ._readers._eqx_reader import open_eqx
from ._readers._flax_reader import open_flax
from ._readers._jax_arrays_reader import is_numbered, open_jax_arrays
from ._readers._npz_reader import open_npz
from ._readers._orbax_reader import open_orbax
from ._readers._safetensors_reader import open_safetensors


# Of a remote file: enough to tell its format.
_HEAD_BYTES = 512


_OPEN: dict[str, Callable[[Any, PyTree], Source]] = {
    "checkpoint": lambda path, like: opened(path),
    "eqx": open_eqx,
    "flax": lambda path, like: open_flax(path),
    "jax_arrays": lambda path, like: open_jax_arrays(
        path, like if is_numbered(path) else None
    ),
    "npz": lambda path, like: open_npz(path),
    "orbax": lambda path, like: open_orbax(path),
    "safetensors": lambda path, like: open_safetensors(path),
}


def open_source(
    path: PathLike, *, format: Format | None = None, like: PyTree = None
) -> Source:
    """Open a checkpoint, a recording, or anything else that this package reads.

    **Arguments:**

    - `path`: a file or a directory; or a URL: of a checkpoint, of one of Orbax, JAX or
        Levanter, or of files of safetensors or npz.
    - `format`: what it is: `"checkpoint"`, or the function of `eqx_ckpt.interop` that
        opens it. Without it, the first bytes of a file and the files in a directory
        decide.
    - `like`: the PyTree that was saved, for `"eqx"`, and for `"jax_arrays"` whose
        leaves are numbered; others do not need it.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is nothing that can be read.
    - [`eqx_ckpt.CheckpointError`][]: the format is not known, or it needs `like`.
    - What the function that opens it raises.

    !!! example

        ```python
        import eqx_ckpt
        import numpy as np

        np.savez("arrays.npz", w=np.ones(3, np.float32))
        source = eqx_ckpt.interop.open_source("arrays.npz")
        assert source.manifest.leaves["w"].shape == (3,)
        ```
    """
    if format is not None:
        check_word("format", format, get_args(Format))
        return _opened(format, path, like)
    if is_web(as_text(path)):
        return _opened(_format_of_file(path), path, like)
    try:
        return opened(path)
    except CheckpointNotFoundError as e:
        if found := format_at(os.path.expanduser(os.fspath(path))):
            return _opened(found, path, like)
        if "://" not in os.fspath(path):
            raise
        return _in_store(path, like, e)


def _opened(format: str, path: PathLike, like: PyTree) -> Source:
    if format == "eqx" and like is None:
        raise CheckpointError(
            f"{without_names(os.fspath(path), format)}: its leaves are in the order of "
            "the PyTree that was saved. Pass that as `like`."
        )
    return _OPEN[format](path, like)


def _in_store(path: PathLike, like: PyTree, error: CheckpointNotFoundError) -> Source:
    """What others have saved in an object store; raise the error if there is none."""
    place = locate(path)
    if place.whole_above()[0]:
        raise error  # Of ours, which says where it is.
    format = ""
    with contextlib.suppress(CheckpointNotFoundError):
        format = _format_of_file(path)
    if format:
        return _opened(format, path, like)
    keys = place.list_keys()
    parts = (key.split("/") for key in keys)
    first = next((key[0] for key in parts if key[1:] == [MANIFEST]), None)
    if first is not None and is_checkpoint(place / f"{first}/"):
        raise CheckpointNotFoundError(
            f"{error} It holds checkpoints, such as {first!r}: pass one of them."
        )
    if format := format_of_folder(key for key in keys if "/" not in key):
        return _opened(format, path, like)
    for format in ("orbax", "jax_arrays"):
        try:
            return _OPEN[format](path, like)
        except CheckpointNotFoundError:
            continue
    raise error


def _format_of_file(path: PathLike) -> str:
    """The format of a file in a store, or behind a URL."""
    file = locate_file(path)
    try:
        with file.opened() as reads:
            head = read_bytes(reads, 0, _HEAD_BYTES)
    except EOFError:
        head = file.tail(_HEAD_BYTES)
    if found := format_of(file.path.partition("?")[0], head, file.size):
        return found
    raise CheckpointError(
        f"The format of {file.path!r} is not known here. Pass `format`, if it is one "
        "that this package reads."
    )
