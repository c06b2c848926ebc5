"""Looking at a checkpoint without restoring it."""

import functools as ft
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from ._errors import LeafMismatchError
from ._format.chunks import batches, blocks, whole
from ._format.leaves import dtype_from_tag, key_shape, LeafRecord
from ._format.manifest import Manifest
from ._format.names import is_below
from ._format.parse import scalar_from_text
from ._storage.checkpoint import (
    check_array_metadata,
    check_database,
    open_checkpoint,
    raise_damage,
    read_consistently,
)
from ._storage.chunk_reads import read_regions
from ._storage.kvstore import KvSpec, RegionRead
from ._tree.filter_spec import default_deserialise_filter_spec
from ._tree.match import Match
from ._tree.plan import checked_prefix, plan_reads
from ._types import IsLeaf, PathLike


# Host memory for what `verify` reads at a time.
_WINDOW = 64 * 2**20


def read_manifest(path: PathLike) -> Manifest:
    """What a checkpoint says of itself; reads no array.

    **Arguments:**

    - `path`: the directory of the checkpoint.

    **Returns:**

    A [`eqx_ckpt.Manifest`][]: the leaves, the metadata, the versions that saved it.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `path`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"w": jnp.ones(3), "step": 5}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree, metadata={"loss": 0.31})
        manifest = eqx_ckpt.read_manifest("ckpt")
        assert manifest.metadata == {"loss": 0.31}
        assert manifest.leaves["w"].shape == (3,)
        assert manifest.leaves["step"].value == "5"
        ```
    """
    return open_checkpoint(path)[1]


def tree_like(path: PathLike, *, prefix: str = "") -> PyTree:
    """The structure of a checkpoint: a `like` for when its code is not at hand.

    **Arguments:**

    - `path`: the directory of the checkpoint.
    - `prefix`: only the leaves below this name.

    **Returns:**

    Nested dictionaries of `jax.ShapeDtypeStruct`s, whose keys are the keys of the tree
    that was saved. Python scalars are there themselves: they have no dtype. What a
    custom `filter_spec` wrote as bytes needs that code, and cannot be restored so.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `path`.
    - [`eqx_ckpt.LeafMismatchError`][]: there is no leaf below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"model": {"w": jnp.ones(3)}, "step": 5})
        like = eqx_ckpt.tree_like("ckpt", prefix="model")
        model = eqx_ckpt.tree_deserialise_leaves("ckpt", like, prefix="model")
        assert model["w"].shape == (3,)
        ```
    """
    manifest = read_manifest(path)
    prefix = checked_prefix(prefix, manifest)
    return nested(manifest, prefix, lambda _, record: _struct(record))


def nested(
    manifest: Manifest, prefix: str, leaf: Callable[[str, LeafRecord], Any]
) -> PyTree:
    """Nested dictionaries of something for each leaf below `prefix`."""
    skip = prefix.count("/") + 1 if prefix else 0
    tree: Any = {}
    for name, record in manifest.leaves.items():
        if not is_below(prefix, name):
            continue
        keys = [token for _, token in record.path[skip:]]
        if not keys:
            return leaf(name, record)
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf(name, record)
    return _sortable(tree)


def _sortable(node: Any) -> Any:
    """JAX sorts the keys of a `dict`, and cannot sort integers among strings."""
    if not isinstance(node, dict):
        return node
    children = {key: _sortable(child) for key, child in node.items()}
    return children if len(set(map(type, children))) < 2 else OrderedDict(children)


def _struct(record: LeafRecord) -> Any:
    if not record.is_array:
        return scalar_from_text(record.kind, record.value or "")
    if record.kind == "key" and key_shape(record.impl or "") is None:
        raise LeafMismatchError(
            f"The checkpoint has a {record}, which this JAX does not know. Define that "
            "PRNG implementation first, or choose other leaves with `prefix`."
        )
    if record.kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record.impl)).dtype
    else:
        dtype = dtype_from_tag(record.dtype)
    return jax.ShapeDtypeStruct(record.shape, dtype, weak_type=record.weak_type)


def match(
    path: PathLike,
    like: PyTree,
    filter_spec: PyTree = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    prefix: str = "",
    sharding: PyTree = None,
) -> Match:
    """What [`eqx_ckpt.tree_deserialise_leaves`][] would do with the same arguments.

    **Arguments:**

    - All: as [`eqx_ckpt.tree_deserialise_leaves`][].

    **Returns:**

    A [`eqx_ckpt.Match`][]: for every leaf whether it is the same, missing, unexpected,
    of another shape, dtype or kind, or cannot be sharded so; and the bytes to read. It
    prints well.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `path`.
    - [`eqx_ckpt.LeafMismatchError`][]: `filter_spec`, `where` or `prefix` do not fit.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest is damaged.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        found = eqx_ckpt.match("ckpt", {"w": jnp.ones(4), "b": jnp.ones(4)})
        assert not found.ok
        assert found.leaves["w"].status == "shape"
        assert found.leaves["b"].status == "missing"
        ```
    """
    manifest = read_manifest(path)
    return plan_reads(
        manifest,
        like,
        filter_spec,
        is_leaf,
        where=where,
        prefix=prefix,
        sharding=sharding,
    ).match


def verify(path: PathLike) -> None:
    """Read every byte of every leaf, and compare it with its checksum.

    **Arguments:**

    - `path`: the directory of the checkpoint.

    **Returns:**

    Nothing.

    **Raises:**

    - [`eqx_ckpt.CorruptCheckpointError`][]: names every leaf that is damaged, and how.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `path`.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        eqx_ckpt.verify("ckpt")
        ```
    """
    read_consistently(path, ft.partial(ft.partial, _verify))


def _verify(base: KvSpec, manifest: Manifest) -> None:
    damage: dict[str, str] = {}
    arrays = {name: r for name, r in manifest.leaves.items() if r.is_array}
    reads = (
        RegionRead(name, record, piece)
        for name, record in arrays.items()
        for piece in blocks(
            whole(record.data_shape), record.chunk_shape, record.itemsize
        )
    )
    for window in batches(reads, lambda read: read.nbytes, _WINDOW):
        read_regions(base, window, damage)
    whole_so_far = {name: r for name, r in arrays.items() if name not in damage}
    check_array_metadata(base, whole_so_far, damage)
    raise_damage(damage, base)
    if manifest.layout == "ocdbt":
        check_database(base)
