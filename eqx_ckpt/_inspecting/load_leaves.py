"""Load leaves without a PyTree to restore them into."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from .._format.chunk_grid import whole
from .._format.leaf_names import is_below
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.source import read_regions, RegionRead, Source
from .._sources.consistent_read import read_consistently
from .._tree.matching.name_tree import checked_prefix, nested
from .._types import PathLike


def load(source: PathLike | Source, prefix: str = "") -> Any:
    """Load a checkpoint, or a part of it, as NumPy arrays.

    It needs neither the code that saved it nor a `like`. Nothing goes to an
    accelerator, and no dtype changes.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `prefix`: only the leaves below this name, or the one leaf of this name.

    **Returns:**

    Nested dictionaries of the leaves, with the keys of the saved tree, and lists for
    what had positions from 0 on, such as lists and tuples. Or, if `prefix` is the name
    of a leaf, that leaf. An array is a NumPy array; of typed PRNG keys, their key data;
    of bytes that a custom `filter_spec` wrote, an array of `uint8`; a Python number is
    itself.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: there is no leaf below `prefix`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: leaves are damaged; names each of them.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"layers": [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}], "step": 5}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree)
        assert eqx_ckpt.load("ckpt")["layers"][0]["w"].sum() == 3
        assert eqx_ckpt.load("ckpt", "layers/1/w").tolist() == [0, 0, 0]
        ```
    """
    return read_consistently(source, lambda found: _loaded(found, prefix))


def _loaded(source: Source, prefix: str) -> Any:
    manifest = source.manifest
    prefix = checked_prefix(prefix, manifest)
    reads = [
        RegionRead(name, record, whole(record.data_shape))
        for name, record in manifest.leaves.items()
        if record.is_array and is_below(prefix, name)
    ]
    arrays = {
        read.name: from_stored(array, read.record)
        for read, array in zip(reads, read_regions(source, reads), strict=True)
    }

    def leaf(name: str, record: LeafRecord) -> Any:
        if record.is_array:
            return arrays[name]
        return scalar_from_text(record.kind, record.value or "")

    records = [r for n, r in manifest.leaves.items() if is_below(prefix, n)]
    depth = len(prefix.split("/")) if prefix else 0
    return _with_lists(nested(manifest, prefix, leaf), _not_lists(records, depth), ())


_Keys: TypeAlias = tuple[str | int, ...]


def _not_lists(records: Iterable[LeafRecord], depth: int) -> set[_Keys]:
    """The nodes, by their keys below `depth`, of which some keys are no positions."""
    found: set[_Keys] = set()
    for record in records:
        keys = tuple(key for _, key in record.path[depth:])
        kinds = [kind for kind, _ in record.path[depth:]]
        found.update(keys[:i] for i, kind in enumerate(kinds) if kind != "index")
    return found


def _with_lists(node: Any, not_lists: set[_Keys], at: _Keys) -> Any:
    if not isinstance(node, dict):
        return node
    found = {k: _with_lists(x, not_lists, (*at, k)) for k, x in node.items()}
    is_list = (
        bool(found) and at not in not_lists and found.keys() == {*range(len(found))}
    )
    return [found[i] for i in range(len(found))] if is_list else found
