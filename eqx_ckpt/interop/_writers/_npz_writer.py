"""Writing archives of NumPy."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..._errors import CheckpointError
from ..._format.dtype_names import is_numpys
from ..._format.leaf_record import LeafRecord, plain_dtype
from ..._format.source import Source
from ..._inspecting.inspect_checkpoint import iter_leaves, read_manifest
from ..._storage.interface.output_files import NewFiles, NPZ
from ..._types import PathLike
from .._readers._npz_reader import SEPARATORS
from ._export_checks import check_leaves, Form, INT64, key_texts, losses, plain


# Of a file in a zip archive.
_MAX_NAME = 2**16 - 1


def to_npz(
    source: PathLike | Source,
    path: PathLike,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, to an archive that `numpy.load` opens.

    The keys of each leaf are joined by `/`. One leaf at a time is in memory. The
    archive is not compressed.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.to_safetensors`][].
    - `path`: the file, such as `"arrays.npz"`.
    - `strict`: raise, instead of warning once, if something is lost: PRNG keys become
        their data, Python numbers and JAX's arrays become NumPy arrays, and shardings,
        weak types, metadata and the settings of data loaders are left out. Or if
        [`eqx_ckpt.interop.open_npz`][] would not open the file, because the names of
        two leaves clash once they are split at `/` and `.`.
    - `overwrite`: replace an existing file of this format, and no other.

    **Returns:**

    The file.

    **Raises:**

    - [`eqx_ckpt.CheckpointError`][]: NumPy cannot store the dtype of a leaf, such as
        `bfloat16`, or a zip file its keys; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: the file exists already.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np

        eqx_ckpt.tree_serialise_leaves("ckpt", {"model": {"w": jnp.ones(3)}})
        eqx_ckpt.interop.to_npz("ckpt", "arrays.npz")
        assert np.load("arrays.npz")["model/w"].shape == (3,)
        ```
    """
    manifest = read_manifest(source)
    keys = {name: _key(record) for name, record in manifest.leaves.items()}
    if len({*keys.values()}) != len(keys):
        raise CheckpointError(
            "Nothing was written: two leaves would have the same key, because keys "
            "have a `/` in them."
        )
    new_file = NewFiles([path], NPZ, overwrite=overwrite)
    check_leaves(
        manifest,
        Form("an npz file", SEPARATORS, INT64),
        _problem,
        lambda record: losses(record, keeps_numbers=False, keeps_numpy=True),
        strict=strict,
    )
    with (
        new_file as new,
        new.next() as f,
        zipfile.ZipFile(f, "w") as archive,
    ):
        values = iter_leaves(source)
        for key in keys.values():
            # Without a name here, which would keep it while the next one is read.
            _write(archive, key, *next(values)[1:])
    return Path(new.paths[0])


def _write(archive: zipfile.ZipFile, key: str, record: LeafRecord, value: Any) -> None:
    with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, plain(record, value), allow_pickle=False)


def _key(record: LeafRecord) -> str:
    return "/".join(key_texts(record))


def _problem(_: str, record: LeafRecord) -> str | None:
    if "\0" in _key(record):
        return "a key with a NUL, where a zip file cuts names"
    if len(f"{_key(record)}.npy".encode()) > _MAX_NAME:
        return f"keys longer than the {_MAX_NAME} bytes of a name in a zip file"
    dtype = plain_dtype(record)
    # NumPy would write the size of JAX's own dtypes, without their name.
    if not is_numpys(dtype):
        return f"the dtype `{dtype}`"
    return None
