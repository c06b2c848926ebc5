"""Rows of stored arrays: of a checkpoint, or of any Zarr arrays."""

import math
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import CheckpointError
from .._format.display import in_bytes
from .._format.leaf_names import is_below
from .._sources.checkpoint_source import opened
from .._sources.foreign_zarr import open_zarr
from .._sources.recording_source import Recorded
from .._sources.stored_rows import CheckpointRows, SampleRows, ZarrRows
from .._storage.calls.host_memory import memory
from .._storage.calls.threads import ForkedLock
from .._tree.matching.name_tree import checked_prefix, nested, struct_of
from .._types import check_integer, PathLike, shown
from ._order import Rows
from ._row_reader import DataSource, RowReader
from ._row_sources import check_numbers, common_length


_Stored = CheckpointRows | SampleRows | ZarrRows


class StoredDataSource(DataSource):
    """Rows of the arrays of a checkpoint, or of Zarr arrays, on disk or in a bucket.

    Rows are read in chunks, as they are stored. The orders `"shuffle"` and `"epochs"`
    permute the chunks, and shuffle the rows of `window` of them together, so that each
    chunk is read once in an epoch. Data from a checkpoint are compared with their
    checksums.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"x": jnp.ones((50, 3)), "y": jnp.ones(50)}
        eqx_ckpt.tree_serialise_leaves("data", tree)
        source = eqx_ckpt.data.StoredDataSource("data")
        loader = eqx_ckpt.data.Loader(source, batch_size=10)
        cursor, batch = loader.next(loader.start(seed=0))
        assert batch["x"].shape == (10, 3)
        ```
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        prefix: str = "",
        window: int = 8,
        **arrays: PathLike,
    ) -> None:
        """**Arguments:**

        - `path`: of a checkpoint, as [`eqx_ckpt.tree_deserialise_leaves`][]. A batch is
            what [`eqx_ckpt.tree_like`][] shows: nested dictionaries. Of a recording,
            the rows are the draws of its first chain, then of the second, ...
        - `prefix`: only the arrays below this name.
        - `window`: how many chunks are shuffled together; about twice as many are kept
            in memory.
        - `**arrays`: in place of `path`, the paths of Zarr arrays (version 2 or 3). A
            batch is a dictionary of these names.

        **Raises:**

        - `ValueError`: the first axes of the arrays differ, or there are no arrays, or
            a `prefix` for Zarr arrays.
        - `TypeError`: an array does not hold numbers, such as PRNG keys.
        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint, or no array.
        - [`eqx_ckpt.CheckpointError`][]: the rows that are stored together, or a chunk,
            do not fit in memory.
        """
        if (path is None) == (not arrays):
            raise ValueError(
                "Pass either the path of a checkpoint, or Zarr arrays by name: "
                "`StoredDataSource(x='data/x.zarr')`."
            )
        if arrays and prefix:
            raise ValueError(
                f"`prefix` is {shown(prefix)}, and Zarr arrays have none. Pass the "
                "path of each array."
            )
        window = check_integer("window", window, 1)
        found = _opened(path, prefix) if path is not None else _zarr(arrays)
        where = ", ".join(map(str, arrays.values() or [path]))
        self._reader = _StoredReader(*found, window, where)


class _StoredReader(RowReader):
    """Reads rows in chunks, as they are stored, and keeps some of them."""

    def __init__(
        self, stored: _Stored, names: PyTree[str], window: int, where: str
    ) -> None:
        self._stored = stored
        self._names, self._treedef = jax.tree.flatten(names)
        structs = stored.structs
        # A leaf that is not an array has no first axis.
        shapes = {n: structs[n].shape if n in structs else () for n in self._names}
        count = common_length(shapes, " Pass the `prefix` below which the data are.")
        self.like = self._treedef.unflatten(
            jax.ShapeDtypeStruct(structs[n].shape[1:], structs[n].dtype)
            for n in self._names
        )
        self._chunk = max(1, min(count, stored.chunk))
        self._check_fits(where)
        self.rows = Rows(count, self._chunk, min(window, -(-count // self._chunk)))
        self._capacity = 2 * self.rows.window
        self._kept: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._lock = ForkedLock()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled; a copy begins with no rows."""
        return vars(self) | {"_kept": OrderedDict()}

    def _check_fits(self, where: str) -> None:
        rows = jax.tree.leaves(self.like)
        nbytes = self._chunk * sum(math.prod(r.shape) * r.dtype.itemsize for r in rows)
        if nbytes > memory():
            raise CheckpointError(
                f"{where}: {self._chunk} rows are read together, which take "
                f"{in_bytes(nbytes)}, and this machine has {in_bytes(memory())}. Write "
                "smaller rows, or in smaller chunks."
            )

    def take(self, indices: np.ndarray) -> PyTree[np.ndarray]:
        chunks = indices // self._chunk
        taken = [
            np.empty((len(indices), *s.shape), s.dtype)
            for s in jax.tree.leaves(self.like)
        ]
        with self._lock.own:
            for chunk in np.unique(chunks):
                here = chunks == chunk
                inside = indices[here] - chunk * self._chunk
                for array, rows in zip(taken, self._rows(int(chunk)), strict=True):
                    array[here] = rows[inside]
        return self._treedef.unflatten(taken)

    def _rows(self, chunk: int) -> list[np.ndarray]:
        """The rows of a chunk: an array for each leaf, in order."""
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return self._kept[chunk]
        start = chunk * self._chunk
        found = self._stored.read(start, min(start + self._chunk, self.rows.total))
        self._kept[chunk] = [found[name] for name in self._names]
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return self._kept[chunk]

    def close(self) -> None:
        with self._lock.own:
            self._kept.clear()


def _opened(
    path: PathLike, prefix: str
) -> tuple[CheckpointRows | SampleRows, PyTree[str]]:
    """A checkpoint, and the names of its leaves below `prefix`, as nested dicts."""
    source = opened(path)
    manifest = source.manifest
    prefix = checked_prefix(prefix, manifest)
    leaves = {n: r for n, r in manifest.leaves.items() if is_below(prefix, n)}
    for name, record in leaves.items():
        if record.is_array:
            way_out = "pass a `prefix` without it"
            check_numbers(repr(name), struct_of(record).dtype, way_out)
    arrays = {n: r for n, r in leaves.items() if r.kind in ("jax", "numpy")}
    names = nested(manifest, prefix, lambda name, _: name)
    if isinstance(source, Recorded):
        return SampleRows(source, arrays), names
    return CheckpointRows(source, arrays), names


def _zarr(arrays: dict[str, PathLike]) -> tuple[ZarrRows, PyTree[str]]:
    found = {name: open_zarr(path) for name, path in arrays.items()}
    for name, array in found.items():
        check_numbers(repr(name), array.dtype.numpy_dtype, "leave it out")
    return ZarrRows(found), {name: name for name in arrays}
