"""Lazy arrays by name, as an `xarray.DataTree`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._errors import CheckpointError


class LazyArray(NamedTuple):
    """An array of which a part is read: by integers and slices, one for each axis."""

    name: str
    dimensions: list[str]
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[Any, ...]], np.ndarray]


def data_tree(
    arrays: Iterable[LazyArray], axes: Mapping[str, np.ndarray], instead: str
) -> Any:
    """The arrays in groups: a `/` in a name opens one. `axes` are of all arrays.

    `instead` says how to read what xarray cannot hold.
    """
    try:
        import xarray
        from xarray.backends import BackendArray
        from xarray.core import indexing
    except ImportError:
        raise ImportError(
            "`to_datatree` needs xarray: `pip install 'eqx-ckpt[xarray]'`."
        ) from None

    class Lazy(BackendArray):  # pyright: ignore[reportUntypedBaseClass]
        """An array of which xarray reads a region at a time."""

        def __init__(self, array: LazyArray) -> None:
            self.shape, self.dtype, self._read = array.shape, array.dtype, array.read

        def __getitem__(self, key: Any) -> Any:
            support = indexing.IndexingSupport.BASIC
            return indexing.explicit_indexing_adapter(
                key, self.shape, support, self._read
            )

    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for array in arrays:
        if not axes.keys().isdisjoint(array.name.split("/")):
            raise CheckpointError(
                f"The leaf {array.name!r}, or a group that it is in, has the name of "
                f"an axis of all leaves, which xarray does not allow. {instead}"
            )
        group, _, name = array.name.rpartition("/")
        data = indexing.LazilyIndexedArray(Lazy(array))
        groups[f"/{group}"][name] = xarray.Variable(array.dimensions, data)
    for name, values in axes.items():
        groups["/"][name] = (name, values)
    datasets = {name: xarray.Dataset(variables) for name, variables in groups.items()}
    try:
        return xarray.DataTree.from_dict(datasets)
    except ValueError as e:
        raise CheckpointError(
            f"xarray cannot hold these leaves in one tree: {e}\n{instead}"
        ) from e
