"""Converting from any format into any other."""

import os
from collections.abc import Callable
from typing import Any, get_args

from jaxtyping import PyTree

from .._errors import CheckpointError
from .._format.source import Source
from .._sources.checkpoint_source import check_is_source
from .._storage.directory.foreign_paths import SUFFIXES
from .._types import as_text, check_word, Format, PathLike, shown, Target
from ._open_source import open_source
from ._readers._eqx_reader import is_maker
from ._writers._checkpoint_copy import copy
from ._writers._eqx_writer import to_eqx
from ._writers._flax_writer import to_flax
from ._writers._npz_writer import to_npz
from ._writers._orbax_writer import to_orbax
from ._writers._safetensors_writer import to_safetensors


_WRITE: dict[str, Callable[..., Any]] = {
    "flax": to_flax,
    "npz": to_npz,
    "orbax": to_orbax,
    "safetensors": to_safetensors,
}


def convert(
    source: PathLike | Source,
    path: PathLike,
    *,
    to: Target | None = None,
    format: Format | None = None,
    like: PyTree = None,
    strict: bool = False,
    overwrite: bool = False,
) -> None:
    """Write what is in one format in another one.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.open_source`][], or an
        [`eqx_ckpt.interop.Source`][].
    - `path`: where to write.
    - `to`: `"checkpoint"`, `"orbax"`, `"safetensors"`, `"npz"`, `"flax"` or `"eqx"`.
        Without it, the suffix of `path` decides: `.safetensors`, `.npz`, `.msgpack` of
        flax, or `.eqx`; any other one is an error.
    - `format`: what the source is, as in [`eqx_ckpt.interop.open_source`][].
    - `like`: the PyTree that was saved, or is to be restored, if the source or the
        target has no names, such as a file of Equinox; as in
        [`eqx_ckpt.interop.open_eqx`][], if the source is one.
    - `strict`: raise, instead of warning once, if the format does not keep something,
        such as metadata or shardings. A checkpoint keeps all that can be read.
    - `overwrite`: replace what exists, if it is of the same format.

    **Returns:**

    Nothing.

    **Raises:**

    - [`eqx_ckpt.CheckpointError`][]: the format cannot be told from `path`, it cannot
        hold a leaf, or it needs `like`; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: something exists at `path`.
    - What [`eqx_ckpt.interop.open_source`][] and the function that writes raise.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        eqx_ckpt.interop.convert("ckpt", "model.safetensors")
        eqx_ckpt.interop.convert("model.safetensors", "again", to="checkpoint")
        ```
    """
    check_is_source(source)
    target = _target(path) if to is None else to
    check_word("to", target, get_args(Target))
    if target == "eqx" and (like is None or is_maker(like)):
        raise CheckpointError(
            "A file of Equinox has no names: its leaves are in the order of a PyTree. "
            "Pass that, or one of `jax.ShapeDtypeStruct`s, as `like`."
        )
    if not isinstance(source, Source):
        source = open_source(source, format=format, like=like)
    elif format is not None:
        raise ValueError(
            f"`format` is {shown(format)}, and `source` is open already. Pass its path."
        )
    if target == "checkpoint":
        copy(source, path, strict=strict, overwrite=overwrite)
    elif target == "eqx":
        to_eqx(source, path, like, strict=strict, overwrite=overwrite)
    else:
        _WRITE[target](source, path, strict=strict, overwrite=overwrite)


def _target(path: PathLike) -> str:
    suffix = os.path.splitext(as_text(path))[1].lower()
    if suffix not in SUFFIXES:
        raise CheckpointError(
            f"The suffix of {os.fspath(path)!r} names no format. Choose one of "
            f"{', '.join(SUFFIXES)}, or pass `to`: one of "
            f"{', '.join(map(repr, get_args(Target)))}."
        )
    return SUFFIXES[suffix]
