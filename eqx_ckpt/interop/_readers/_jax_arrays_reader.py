"""Arrays that `jax.experimental.array_serialization`, Levanter or Marin wrote."""

import os
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._errors import CheckpointError, CheckpointNotFoundError, LeafMismatchError
from ..._format.leaf_names import encode
from ..._format.leaf_record import CannotSave
from ..._sources.foreign_zarr import Place
from ..._storage.calls.store_path import StorePath
from ..._tree.leaves.key_paths import typed
from ..._tree.leaves.leaf_kinds import describe_like
from ..._types import PathLike, TypedPath
from ._foreign_records import (
    array_record,
    corrupt,
    manifest_of,
    Named,
    parse_object,
    split,
)
from ._zarr_source import check_arrays, ZarrSource


FORMAT = "directory of arrays of JAX"


_TREE, _LEAVES, _ARRAYS = "pytreedef.json", "__jax_leaf_ids", "array_store"


_METADATA = "metadata.json"


_MAX_METADATA = 2**26


def open_jax_arrays(path: PathLike, like: PyTree = None) -> ZarrSource:
    """Open a directory of arrays that `jax.experimental.array_serialization` wrote.

    Levanter's and Marin's checkpoints are such directories. The arrays are in folders
    (Zarr 2 or 3) or in one OCDBT database, and their folders are their names: digits
    are positions. A chunk that is missing holds the array's fill value, since old
    versions of JAX leave out chunks of zeros.

    **Arguments:**

    - `path`: the directory, or its URL in an object store.
    - `like`: the PyTree that was saved, or one of `jax.ShapeDtypeStruct`s; only for
        what `pytree_serialization.save` wrote, which has numbers instead of names.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. `manifest.metadata` is the content of `metadata.json`, if there is one.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there are no arrays at `path`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the metadata of an array are not valid.
    - [`eqx_ckpt.LeafMismatchError`][]: `like` has other leaves.

    !!! example

        ```python
        import os

        import eqx_ckpt
        import jax.numpy as jnp
        from jax.experimental.array_serialization import serialization

        manager = serialization.GlobalAsyncCheckpointManager()
        place = os.path.abspath("arrays/model/weight")
        manager.serialize_with_paths(
            [jnp.ones(3)], [place], on_commit_callback=lambda: None
        )
        manager.wait_until_finished()

        source = eqx_ckpt.interop.open_jax_arrays("arrays")
        like = {"model": {"weight": jnp.zeros(3)}}
        tree = eqx_ckpt.tree_deserialise_leaves(source, like)
        ```
    """
    place = Place(path)
    tree = place.file(_TREE, _MAX_METADATA)
    if tree is not None:
        return _of_tree(path, place, tree, like)
    if like is not None:
        raise CheckpointError(
            f"{place} has no `{_TREE}`: its arrays have names, and need no `like`."
        )
    metadata = place.file(_METADATA, _MAX_METADATA)
    return _source(
        place,
        place,
        {key: split(key, "/") for key in place.array_keys()},
        None if metadata is None else parse_object(metadata, place.url(), FORMAT),
    )


def is_numbered(path: PathLike) -> bool:
    """Whether arrays have numbers instead of names."""
    return Place(path).file(_TREE, _MAX_METADATA) is not None


def _source(
    place: Place, where: Place, keys: dict[str, TypedPath], metadata: Any
) -> ZarrSource:
    if not keys:
        raise CheckpointNotFoundError(f"There are no Zarr arrays in {where}.")
    damage: dict[str, str] = {}
    arrays = place.describe([*keys], damage)
    check_arrays(damage, where, FORMAT)
    leaves: list[Named] = []
    unsaved: dict[str, str] = {}
    for key, array in arrays.items():
        try:
            record = array_record(array.dtype, array.shape, keys[key])
            leaves.append(Named(key, record._replace(kind="jax")))
        except CannotSave as e:
            unsaved[encode(keys[key])] = f"an array that {e}"
    return ZarrSource(
        str(where),
        manifest_of(
            leaves, where.url(), unsaved=unsaved, metadata=metadata, separators="/"
        ),
        {encode(keys[key]): array for key, array in arrays.items()},
        allow_missing_chunks=True,
    )


def _of_tree(path: PathLike, where: Place, tree: bytes, like: PyTree) -> ZarrSource:
    """The arrays of a tree, numbered in the order of its leaves."""
    if like is None:
        raise CheckpointError(
            f"{where} was written by `pytree_serialization.save`, which numbers the "
            "leaves: pass the PyTree that was saved as `like`."
        )
    found = parse_object(tree, where.url(), FORMAT).get(_LEAVES)
    if not isinstance(found, list):
        raise corrupt(where.url(), FORMAT, f"`{_TREE}` has no `{_LEAVES}`")
    leaves = jtu.tree_flatten_with_path(like, lambda node: node is None)[0]
    if len(leaves) != len(found):
        raise LeafMismatchError(
            f"`like` has {len(leaves)} leaves, and {where} has {len(found)}. Pass the "
            "PyTree that was saved."
        )
    keys: dict[str, TypedPath] = {}
    for i, ((key_path, leaf), text) in enumerate(zip(leaves, found, strict=True)):
        expected = _in_words(leaf)
        if expected != text:
            raise LeafMismatchError(
                f"The first leaf of {where} that differs from `like` is "
                f"`{jtu.keystr(key_path)}`: {expected} in `like`, {text} there."
            )
        if leaf is not None:
            keys[str(i)] = typed(key_path)
    store = (
        path / _ARRAYS
        if isinstance(path, StorePath)
        else f"{os.fspath(path)}/{_ARRAYS}"
    )
    return _source(Place(store), where, keys, None)


def _in_words(leaf: Any) -> str | None:
    """A leaf as JAX writes it."""
    if leaf is None:
        return None
    record = describe_like(leaf)
    if record is None or not record.dtype:
        return type(leaf).__name__
    return f"Array({record.dtype}[{', '.join(map(str, record.shape))}])"
