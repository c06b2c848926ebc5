"""Committed samples as an xarray tree that reads lazily."""

import json
from collections import defaultdict
from typing import Any

import numpy as np

from .._errors import CheckpointError
from .._format.recorded import dimension_names, Leaf
from .._storage.recorded import Recorded
from ._exports import common_draws, plain_dtype, plain_samples


def to_datatree(recorded: Recorded) -> Any:
    """The samples as lazy arrays; a `/` in a name opens a group."""
    try:
        import xarray
        from xarray.backends import BackendArray
        from xarray.core import indexing
    except ImportError:
        raise ImportError(
            "`to_datatree` needs xarray: `pip install 'eqx-ckpt[xarray]'`."
        ) from None

    class Lazy(BackendArray):  # pyright: ignore[reportUntypedBaseClass]
        """The lazy array of a leaf: xarray reads a region at a time."""

        def __init__(self, leaf: Leaf) -> None:
            self._leaf = leaf
            lead = (draws,) if record.chains is None else (record.chains, draws)
            self.shape = (*lead, *leaf.record.data_shape)
            self.dtype = plain_dtype(leaf)

        def __getitem__(self, key: Any) -> Any:
            support = indexing.IndexingSupport.BASIC
            return indexing.explicit_indexing_adapter(
                key, self.shape, support, self._part
            )

        def _part(self, key: tuple[Any, ...]) -> np.ndarray:
            return _part(recorded, self._leaf, key)

    record = recorded.record
    draws = common_draws(record)
    axes = {"draw"} if record.chains is None else {"chain", "draw"}
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for leaf in record.leaves:
        if not axes.isdisjoint(leaf.name.split("/")):
            raise CheckpointError(
                f"The leaf {leaf.name!r}, or a group that it is in, has the name of an "
                "axis of all leaves, which xarray does not allow. Read it with `read`."
            )
        group, _, name = leaf.name.rpartition("/")
        data = indexing.LazilyIndexedArray(Lazy(leaf))
        names = dimension_names(leaf, record.chains)
        groups[f"/{group}"][name] = xarray.Variable(names, data)
    root = groups["/"]
    root["draw"] = ("draw", np.arange(draws))
    if record.chains is not None:
        root["chain"] = ("chain", np.arange(record.chains))
    datasets = {name: xarray.Dataset(variables) for name, variables in groups.items()}
    try:
        tree = xarray.DataTree.from_dict(datasets)
    except ValueError as e:
        raise CheckpointError(
            f"xarray cannot hold these leaves in one tree: {e}\nRead them with `read`."
        ) from e
    if record.metadata is not None:
        tree.attrs["metadata"] = json.dumps(record.metadata)
    return tree


def _part(recorded: Recorded, leaf: Leaf, key: tuple[Any, ...]) -> np.ndarray:
    """Convert an index to integers and slices with positive steps."""
    record = recorded.record
    sizes = [record.draws[0]]
    if record.chains is not None:
        sizes = [record.chains, *sizes]
    ranges, inner = [], []
    for one, size in zip(key, sizes, strict=False):
        is_slice = isinstance(one, slice)
        ranges.append(range(size)[one] if is_slice else range(int(one), int(one) + 1))
        inner.append(slice(None) if is_slice else 0)
    if record.chains is None:
        found = plain_samples(recorded, leaf, range(1), ranges[0])
    else:
        chains = range(ranges[0].start, ranges[0].stop)
        found = plain_samples(recorded, leaf, chains, ranges[1])
        found = found[:: ranges[0].step]
    return found[(*inner, *key[len(sizes) :])]
