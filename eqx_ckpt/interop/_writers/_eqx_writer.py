"""Writing files that `equinox.tree_deserialise_leaves` reads."""

import functools as ft
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._format.dtype_names import is_numpys
from ..._format.leaf_names import encode
from ..._format.leaf_record import (
    dtype_from_tag,
    LeafRecord,
    scalar_from_text,
    SCALAR_KINDS,
)
from ..._format.source import Source
from ..._inspecting.inspect_checkpoint import read_manifest
from ..._restoring.tree_like import tree_match
from ..._storage.calls.opening import reading
from ..._storage.calls.store_path import local_path
from ..._storage.interface.output_files import NewFiles
from ..._storage.interface.replacing import Kind
from ..._tree.leaves.key_paths import key_paths, typed
from ..._tree.leaves.leaf_kinds import describe_like
from ..._tree.leaves.transient import is_transient
from ..._tree.matching.explain_match import explain
from ..._tree.matching.foreign_spelling import spelled
from ..._types import IsLeaf, PathLike, TypedPath
from .._readers._npy_header import read_npy
from ._export_checks import check_leaves, Form, in_order, INTEGERS, losses


def to_eqx(
    source: PathLike | Source,
    path: PathLike,
    like: PyTree,
    is_leaf: IsLeaf = None,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, as `equinox.tree_serialise_leaves` would.

    One leaf at a time is in memory, in the order of `like`.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.to_safetensors`][].
    - `path`: the file; `.eqx` is added if there is no suffix, as in Equinox.
    - `like`: a PyTree of the structure that was saved, of arrays or
        `jax.ShapeDtypeStruct`s.
    - `is_leaf`: as that of `equinox.tree_serialise_leaves`.
    - `strict`: raise, instead of warning once, if something is lost: shardings, weak
        types, metadata and the settings of data loaders are left out.
    - `overwrite`: replace an existing file of this format, and no other.

    **Returns:**

    The file.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: `like` has other leaves.
    - [`eqx_ckpt.CheckpointError`][]: Equinox would not read a leaf back as it is in
        `like`: it is a PRNG key, or has a dtype of JAX's other than bfloat16, or has
        that in a NumPy array; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: the file exists already.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.

    !!! example

        ```python
        import eqx_ckpt
        import equinox as eqx
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        eqx_ckpt.tree_serialise_leaves("ckpt", model)
        eqx_ckpt.interop.to_eqx("ckpt", "model.eqx", like=model)
        model = eqx.tree_deserialise_leaves("model.eqx", model)
        ```
    """
    found = tree_match(source, like, is_leaf=is_leaf)
    if not found.ok:
        raise LeafMismatchError(explain(found.leaves))
    manifest = read_manifest(source)
    paths: dict[str, tuple[TypedPath, str]] = {}
    # By the name of the leaf before them, or of none, what is not in the checkpoint.
    fresh: dict[str | None, list[np.ndarray]] = {}
    name = None
    for key_path, leaf in key_paths(like, is_leaf):
        if is_transient(leaf):
            arrays = jtu.tree_leaves(leaf.fresh(), is_leaf)
            fresh.setdefault(name, []).extend(map(np.asarray, arrays))
        elif (expected := describe_like(leaf)) is not None:
            name = encode(typed(key_path))
            paths[name] = typed(key_path), expected.kind
    other = spelled(manifest, ((name, path) for name, (path, _) in paths.items()))
    kinds = {other.get(name, name): kind for name, (_, kind) in paths.items()}
    place = Path(local_path(path))
    # Such as `.`, to whose own name no suffix is added.
    is_folder = os.path.basename(os.fspath(path)) in ("", ".", "..")
    if not (is_folder or place.suffix):
        place = place.with_suffix(".eqx")
    new_file = NewFiles([place], _KIND, overwrite=overwrite)
    check_leaves(
        manifest,
        Form("a file of Equinox", integers=INTEGERS),
        lambda name, record: _problem(kinds[name], record),
        ft.partial(losses, keeps_numbers=True, keeps_numpy=True, keeps_byte_order=True),
        strict=strict,
    )
    values = in_order(source, [*kinds])
    with new_file as new, new.next() as f:
        for array in _arrays(values, [*paths], fresh):
            # To a file, NumPy would write past it, and not say why that fails.
            np.save(_Writes(f), array, allow_pickle=False)
    return Path(new.paths[0])


def _arrays(
    values: Iterator[tuple[str, LeafRecord, Any]],
    names: list[str],
    fresh: Mapping[str | None, list[np.ndarray]],
) -> Iterator[np.ndarray]:
    """The arrays of a file, of the checkpoint and created anew, in their order."""
    yield from fresh.get(None, ())
    for name, (_, record, value) in zip(names, values, strict=True):
        yield np.asarray(value, _dtype(record), order="C")
        yield from fresh.get(name, ())


class _Writes:
    """What `np.save` needs of a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes, /) -> int:
        return self._file.write(data)


def _differs(path: str) -> str:
    """Why a file is not of Equinox, which writes one `.npy` after the other, or `""`.

    One that is called `.npy` is of NumPy.
    """
    if path.endswith(".npy"):
        return "Its name is that of an array of NumPy."
    with reading(path) as f:
        size = os.fstat(f.fileno()).st_size
        try:
            while f.tell() < size:
                f.seek(read_npy(f.read).nbytes, os.SEEK_CUR)
        except (ValueError, NotImplementedError) as e:
            return f"In it, {e}."
        return "" if f.tell() == size else "It is cut."


_KIND = Kind("a file of Equinox", _differs)


def _dtype(record: LeafRecord) -> np.dtype:
    """The dtype of a leaf in the file, which keeps the byte order."""
    if record.kind in SCALAR_KINDS:
        return np.asarray(scalar_from_text(record.kind, record.value or "")).dtype
    return dtype_from_tag(record.dtype)


def _problem(kind: str, record: LeafRecord) -> str | None:
    """Why Equinox does not read a leaf as one of the `kind` in `like`, if so."""
    if record.kind == "key":
        return "a PRNG key"
    if record.kind == "bytes":
        return "what a `filter_spec` wrote"
    # The file has no names of JAX's own dtypes. JAX knows bfloat16 by its size, and
    # only NumPy arrays have dtypes of other byte orders, or of times.
    dtype = _dtype(record)
    is_read = dtype.isbuiltin == 1 or dtype == np.dtype("bfloat16")
    if not (is_numpys(dtype) if kind == "numpy" else is_read):
        return f"the dtype `{dtype}`, which Equinox writes but does not read"
    return None
