"""Writing checkpoints of Orbax, by Orbax."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import CheckpointExistsError
from .._format.leaves import LeafRecord
from .._format.source import Source
from .._inspect import read_manifest
from .._like import tree_like
from .._restore import tree_deserialise_leaves
from .._types import PathLike
from ._out import check_leaves, losses, plain_dtype


def to_orbax(
    source: PathLike | Source,
    path: PathLike,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, by `orbax.checkpoint.StandardCheckpointer`.

    The tree becomes nested dictionaries, and lists where there are positions. Unlike
    the other ways out, it is in memory as a whole: Orbax takes PyTrees of arrays.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.to_safetensors`][].
    - `path`: the directory.
    - `strict`: raise, instead of warning once, if something is lost: shardings, weak
        types and metadata are left out, and NumPy scalars become arrays.
    - `overwrite`: replace a directory that exists.

    **Returns:**

    The directory.

    **Raises:**

    - `ImportError`: Orbax is not installed.
    - [`eqx_ckpt.CheckpointError`][]: Orbax cannot hold a leaf; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: something already exists at `path`.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"layers": [{"w": jnp.ones(3)}]})
        place = eqx_ckpt.interop.to_orbax("ckpt", "orbax")
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(place)
        assert tree["layers"][0]["w"].shape == (3,)
        ```
    """
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError:
        raise ImportError(
            "`to_orbax` needs Orbax: `pip install 'eqx-ckpt[orbax]'`."
        ) from None
    check_leaves(
        read_manifest(source),
        "checkpoint of Orbax",
        _problem,
        _losses,
        strict=strict,
    )
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if os.path.lexists(place) and not overwrite:
        raise CheckpointExistsError(
            f"{str(place)!r} exists already. Choose another path, or pass "
            "`overwrite=True`."
        )
    tree = _as_lists(tree_deserialise_leaves(source, tree_like(source)))
    with contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        checkpointer.save(place, tree, force=overwrite)
        checkpointer.wait_until_finished()
    return place


def _problem(_: str, record: LeafRecord) -> str | None:
    dtype = plain_dtype(record)
    if record.kind == "bytes":
        return "what a `filter_spec` wrote"
    if dtype.kind in "mM":
        return f"the dtype `{dtype}`"
    if 0 in record.data_shape:
        return "an array without elements"
    if record.kind == "complex":
        return "a Python complex number"
    if record.kind == "int" and not -(2**63) <= int(record.value or "", 0) < 2**63:
        return "an integer of more than 64 bits"
    return None


def _losses(record: LeafRecord) -> list[str]:
    found = losses(record, keeps_numbers=True, keeps_numpy=True)
    if record.kind == "key":
        found.remove(f"that it is a PRNG key of {record.impl!r}")
    if record.kind == "numpy_scalar":
        found.append("that it is a NumPy scalar")
    return found


def _as_lists(node: Any) -> Any:
    """A tree with lists instead of dictionaries of positions."""
    if isinstance(node, np.generic):
        return np.asarray(node)
    if not isinstance(node, dict):
        return node
    children = {key: _as_lists(child) for key, child in node.items()}
    if children and sorted(children, key=str) == sorted(range(len(children)), key=str):
        return [children[i] for i in range(len(children))]
    return children
