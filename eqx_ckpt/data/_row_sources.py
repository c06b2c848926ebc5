"""Sources of rows: arrays, and anything with `len` and `[i]`."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jaxtyping import Array, PyTree

from .._types import check_flag, check_kind, KeyPath, shown
from ._order import Rows
from ._row_reader import as_in_jax, DataSource, name_of, narrowed, RowReader


class ArrayDataSource(DataSource):
    """Rows of arrays in memory, or of memory maps.

    !!! example

        ```python
        import eqx_ckpt
        import numpy as np

        images, labels = np.zeros((1000, 8, 8), np.float32), np.arange(1000) % 10
        source = eqx_ckpt.data.ArrayDataSource(x=images, y=labels)
        loader = eqx_ckpt.data.Loader(source, batch_size=100)
        ```
    """

    def __init__(self, *, on_device: bool = False, **arrays: Any) -> None:
        """**Arguments:**

        - `on_device`: put the arrays on the default device, if they fit there; then
            batches are taken without the host. Pass the loader to compiled functions as
            an argument.
        - `**arrays`: NumPy or JAX arrays, or memory maps, with the same first axis. A
            batch is a dictionary of these names.

        **Raises:**

        - `ValueError`: there are no arrays, or their first axes differ.
        - `TypeError`: an array does not hold numbers.
        - `OverflowError`: with `on_device`, integers do not fit into those of JAX.
        """
        check_flag("on_device", on_device)
        self._reader = _ArrayReader(on_device, arrays)


class _ArrayReader(RowReader):
    """Reads rows of arrays."""

    is_quick = True

    def __init__(self, on_device: bool, arrays: Mapping[str, Any]) -> None:
        arrays = {
            name: as_numbers(repr(name), array, "leave it out")
            for name, array in arrays.items()
        }
        self.rows = Rows(common_length({n: a.shape for n, a in arrays.items()}))
        self._is_on_device = on_device
        # Loaders hold them, so that they are freed when the last one is closed.
        self._put: weakref.WeakValueDictionary[str, Array] = (
            weakref.WeakValueDictionary()
        )
        if on_device:
            for array in arrays.values():
                narrowed(array, as_in_jax(array.dtype))
        else:
            arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._arrays = arrays
        self.like = {
            name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
            for name, array in arrays.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled; another process puts the arrays on its own device."""
        return {name: value for name, value in vars(self).items() if name != "_put"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _put=weakref.WeakValueDictionary())

    @property
    def on_device(self) -> dict[str, Array] | None:
        if not self._is_on_device:
            return None
        found = {}
        for name, array in self._arrays.items():
            there = self._put.get(name)
            if there is None:
                there = jnp.asarray(narrowed(array, as_in_jax(array.dtype)))
            found[name] = self._put[name] = there
        return found

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: _rows_of(np.asarray(array), indices)
            for name, array in self._arrays.items()
        }

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        for array, rows in zip(out, jax.tree.leaves(self._arrays), strict=True):
            if array.dtype == rows.dtype:
                _rows_of(rows, indices, array)
            else:
                array[...] = narrowed(_rows_of(rows, indices), array.dtype)


def _rows_of(
    array: np.ndarray, indices: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Rows of an array, by numbers that are all inside."""
    if array.flags.c_contiguous and array.flags.aligned:
        # With a different mode, NumPy would copy the whole of `out`, and back.
        return array.take(indices, axis=0, out=out, mode="clip")
    # `take` would copy the whole array first.
    rows = array[indices]
    if out is None:
        return rows
    out[...] = rows
    return out


def is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def as_numbers(name: str, value: Any, way_out: str) -> np.ndarray | jax.Array:
    """The value as an array of numbers; an array of JAX stays where it is."""
    is_array = isinstance(value, np.ndarray | jax.Array)
    try:
        array = value if is_array else np.asarray(value)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{name} is not an array of numbers: {e} Convert it, or {way_out}."
        ) from e
    check_numbers(name, array.dtype, way_out)
    return array


def check_numbers(name: str, dtype: Any, way_out: str) -> None:
    """Refuse text, objects, PRNG keys and the like, which a batch cannot have."""
    is_extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    if is_extended or (dtype.kind in "OSTUMmV" and dtype.isbuiltin != 2):
        raise TypeError(
            f"{name} is of dtype {dtype}, and a batch can only have numbers. "
            f"Convert it, or {way_out}."
        )


def common_length(shapes: Mapping[str, tuple[int, ...]], way_out: str = "") -> int:
    """The common length of the first axes."""
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    if len(lengths) != 1 or None in lengths:
        found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        raise ValueError(
            "The arrays of a source have the same first axis, one entry for each row; "
            f"found {found or 'no arrays'}.{way_out}"
        )
    return lengths.pop()  # type: ignore[return-value]


class RandomAccessDataSource(DataSource):
    """Rows of anything with `len` and `[i]`.

    Examples are Hugging Face datasets, `tfds.data_source`, Grain's map datasets and
    torch's map datasets. A row is a dictionary, a tuple, or any other PyTree of numbers
    and arrays, and a batch is the same PyTree of arrays. A list in a row becomes one
    array. All rows have the same shapes.

    !!! example

        ```python
        import eqx_ckpt

        dataset = [{"x": [i, i + 1], "y": i, "text": str(i)} for i in range(10)]
        source = eqx_ckpt.data.RandomAccessDataSource(dataset, exclude=["text"])
        ```
    """

    def __init__(self, dataset: Any, *, exclude: Sequence[str] = ()) -> None:
        """**Arguments:**

        - `dataset`: has `len(dataset)` and `dataset[i]`. If it also has a method
            `__getitems__`, that is called with a list of numbers, and returns the rows.
            Loaders may call both from threads.
        - `exclude`: keys of the rows to leave out, such as columns of text.

        **Raises:**

        - `TypeError`: `dataset` is a stream or a dictionary, or a part of a row is not
            a number or an array of numbers.
        - `ValueError`: nothing is left of a row, `exclude` has a key that row 0 does
            not, or is given for rows that are no dictionaries.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} is a stream: it has no `len` or no `[i]`. "
                "The position in a stream is not a value that can be saved, so no "
                "training could resume exactly. Load it into arrays, or use the "
                "random-access form of the data set."
            )
        check_kind("exclude", exclude, Iterable, "a list of keys")
        if isinstance(exclude, str):
            raise TypeError(
                f"`exclude` is {shown(exclude)}. Pass a list: [{exclude!r}]."
            )
        self._reader = _DatasetReader(dataset, frozenset(exclude))


class _DatasetReader(RowReader):
    """Reads rows of anything with `len` and `[i]`."""

    def __init__(self, dataset: Any, exclude: frozenset[str]) -> None:
        self._dataset = dataset
        self._exclude = exclude
        self.rows = Rows(len(dataset))
        row = _first(dataset) if self.rows.total else {}
        if exclude and not isinstance(row, Mapping):
            raise ValueError(
                "`exclude` is for rows that are dictionaries; row 0 of the data set is "
                f"of type {type(row).__name__}. Leave `exclude` out."
            )
        if exclude and self.rows.total and (unknown := exclude.difference(row)):
            raise ValueError(
                f"`exclude` has {_listed(unknown)}, and row 0 of the data set has only "
                f"{_listed(row)}. Correct the key, or leave it out."
            )
        first = self._kept(row)
        leaves, self._treedef = jtu.tree_flatten_with_path(first, is_leaf=_is_whole)
        if self.rows.total and not leaves:
            raise ValueError(
                "The rows of the data set have no arrays. Pass rows that have some, "
                "and `exclude` fewer keys."
            )
        self._names = [name_of(path) for path, _ in leaves]
        arrays = [
            as_numbers(name, value, _way_out(first, path, value))
            for name, (path, value) in zip(self._names, leaves, strict=True)
        ]
        self.like = self._treedef.unflatten(
            jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays
        )

    def _kept(self, row: Any) -> PyTree:
        if isinstance(row, Mapping):
            return {key: row[key] for key in row if key not in self._exclude}
        return row

    def take(self, indices: np.ndarray) -> PyTree[np.ndarray]:
        numbers = [int(i) for i in indices]
        if len(self._dataset) != self.rows.total:
            raise RuntimeError(
                f"The data set has {len(self._dataset)} rows now, and had "
                f"{self.rows.total} when the loader was made."
            )
        # Datasets of torch and Hugging Face have it too.
        many = getattr(self._dataset, "__getitems__", None)
        columns: list[list[np.ndarray]] = []
        which = f"One of the rows {numbers[:10]}"
        try:
            found = many(numbers) if many else (self._dataset[i] for i in numbers)
            which = ""
            for row in found:
                columns.append(self._checked(self._kept(row)))
        except Exception as e:
            which = which or f"Row {numbers[min(len(columns), len(numbers) - 1)]}"
            raise RuntimeError(f"{which} of the data set cannot be read: {e}") from e
        if len(columns) != len(numbers):
            raise RuntimeError(
                f"The data set gave {len(columns)} rows, and was asked for "
                f"{len(numbers)}: {numbers[:10]}"
            )
        return self._treedef.unflatten(map(np.stack, zip(*columns, strict=True)))

    def _checked(self, row: PyTree) -> list[np.ndarray]:
        arrays = [np.asarray(value) for value in self._treedef.flatten_up_to(row)]
        likes = jax.tree.leaves(self.like)
        for name, array, like in zip(self._names, arrays, likes, strict=True):
            if array.shape != like.shape or array.dtype != like.dtype:
                raise ValueError(
                    f"{name} is {array.dtype}{list(array.shape)}, and in row 0 "
                    f"{like.dtype}{list(like.shape)}; pad or convert the rows"
                )
        return arrays


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, keys)))


def _first(dataset: Any) -> Any:
    try:
        return dataset[0]
    except KeyError as e:
        raise TypeError(
            f"`dataset[0]` of a {type(dataset).__name__} is a KeyError, and rows are "
            "numbered from 0. Of a dictionary, pass one entry, or its arrays to "
            "`eqx_ckpt.data.ArrayDataSource(x=array)`."
        ) from e


def _is_whole(value: Any) -> bool:
    """Whether a part of a row is one entry: `None` too, so that it is refused."""
    return value is None or isinstance(value, list)


def _way_out(row: PyTree, path: KeyPath, value: Any) -> str:
    """What to do about a part of a row that is not an array of numbers."""
    is_column = isinstance(row, Mapping)
    exclude = f": `exclude=[{path[0].key!r}]`" if is_column else " of the rows"
    whole = ". A list becomes one array, a tuple does not"
    return f"leave it out{exclude}{whole if isinstance(value, list) else ''}"
