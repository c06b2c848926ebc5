"""Committed samples as an xarray tree that reads lazily."""

import contextlib
import functools as ft
import io
import json
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, IO

import numpy as np

from .._errors import CheckpointError
from .._format.chunk_grid import batches, blocks, whole
from .._format.dtype_names import is_numpys
from .._format.leaf_record import from_stored, plain_dtype
from .._format.sample_record import dimension_names, Leaf, Record
from .._sources.data_tree import data_tree, LazyArray
from .._sources.recording_source import memory, Recorded
from .._storage.calls.opening import reading
from .._storage.calls.safe_files import writing_to
from .._storage.calls.store_path import local_path
from .._storage.interface.output_files import AGAIN, NewFiles, NPZ
from .._storage.interface.replacing import Kind
from .._types import PathLike


def to_datatree(recorded: Recorded) -> Any:
    """The samples as lazy arrays; a `/` in a name opens a group."""
    record = recorded.record
    draws = common_draws(record)
    lead = (draws,) if record.chains is None else (record.chains, draws)
    arrays = [
        LazyArray(
            leaf.name,
            dimension_names(leaf, record.chains),
            (*lead, *leaf.record.data_shape),
            plain_dtype(leaf.record),
            ft.partial(_part, recorded, leaf),
        )
        for leaf in record.leaves
    ]
    axes = {"draw": np.arange(draws)}
    if record.chains is not None:
        axes["chain"] = np.arange(record.chains)
    tree = data_tree(arrays, axes, "Read it with `read`.")
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


# Host memory for one read.
_WINDOW = 32 * 2**20


def plain_samples(
    recorded: Recorded, leaf: Leaf, chains: range, draws: range
) -> np.ndarray:
    """Samples of a leaf, in its `plain_dtype`."""
    return _plain(recorded.samples(leaf, chains, draws), leaf)


def _plain(stored: np.ndarray, leaf: Leaf) -> np.ndarray:
    if leaf.record.kind == "key":
        return stored
    return np.asarray(from_stored(stored, leaf.record)).astype(
        plain_dtype(leaf.record), copy=False
    )


def common_draws(record: Record) -> int:
    """The number of draws of each chain; raise if these numbers differ."""
    if len(set(record.draws)) > 1:
        raise ValueError(
            f"The chains have {min(record.draws)} to {max(record.draws)} draws, so "
            "they do not form one array. Nothing was written; `to_npz` writes a file "
            "for each chain."
        )
    return record.draws[0]


def to_npz(recorded: Recorded, directory: PathLike, overwrite: bool) -> list[Path]:
    """Write one `.npz` archive per chain."""
    record = recorded.record
    _check_dtypes(record.leaves, "npz file", is_numpys)
    folder = local_path(directory)
    paths = [f"{folder}/chain_{chain}.npz" for chain in range(len(record.draws))]
    with NewFiles(paths, NPZ, overwrite=overwrite) as new:
        for parts in _chain_by_chain(recorded):
            with new.next() as f, zipfile.ZipFile(f, "w") as archive:
                for leaf, (draws, rows) in zip(record.leaves, parts, strict=True):
                    name = f"{leaf.name}.npy"
                    with archive.open(name, "w", force_zip64=True) as member:
                        header = {
                            "descr": np.lib.format.dtype_to_descr(
                                plain_dtype(leaf.record)
                            ),
                            "fortran_order": False,
                            "shape": (draws, *leaf.record.data_shape),
                        }
                        np.lib.format.write_array_header_2_0(member, header)
                        for some in rows:
                            member.write(memory(some))
    return [Path(path) for path in new.paths]


def _chain_by_chain(
    recorded: Recorded,
) -> Iterator[list[tuple[int, Iterable[np.ndarray]]]]:
    """For each chain, the number of its draws and their parts, of each leaf.

    Many short chains are read together, because they are in the same chunks.
    """
    record = recorded.record
    nbytes = sum(leaf.row_bytes for leaf in record.leaves)
    chains = zip(range(len(record.draws)), record.draws, strict=True)
    # Beside them is a part of their band.
    for some in batches(chains, lambda chain: chain[1] * nbytes, _WINDOW // 2):
        first, draws = some[0]
        if len(some) == 1:
            yield [(draws, _parts(recorded, leaf, first)) for leaf in record.leaves]
            continue
        together = range(first, first + len(some))
        arrays = [recorded.samples_of_each(leaf, together) for leaf in record.leaves]
        for parts in zip(*[[*one] for one in arrays], strict=True):
            yield [
                (len(rows), [_plain(rows, leaf)])
                for leaf, rows in zip(record.leaves, parts, strict=True)
            ]


def _differs(path: str) -> str:
    with reading(path) as f:
        return "" if f.read(8) == b"\x89HDF\r\n\x1a\n" else "It does not begin as one."


_HDF5 = Kind("an HDF5 file", _differs)


def to_hdf5(recorded: Recorded, path: PathLike, overwrite: bool) -> Path:
    """Write an HDF5 file with one dataset per leaf."""
    try:
        import h5py
    except ImportError:
        raise ImportError(
            "`to_hdf5` needs h5py: `pip install 'eqx-ckpt[hdf5]'`."
        ) from None

    record = recorded.record
    draws = common_draws(record)

    def fits(dtype: np.dtype) -> bool:
        try:
            h5py.h5t.py_create(dtype, logical=True)
        except TypeError:
            return False
        return is_numpys(dtype)

    _check_dtypes(record.leaves, "HDF5 file", fits)
    with (
        NewFiles([path], _HDF5, overwrite=overwrite) as new,
        new.next() as f,
        _for_hdf5(f.name) as (target, check),
        h5py.File(target, "w") as file,
    ):
        if record.metadata is not None:
            file.attrs["metadata"] = json.dumps(record.metadata)
        for leaf in record.leaves:
            lead = (draws,) if record.chains is None else (record.chains, draws)
            shape = (*lead, *leaf.record.data_shape)
            dataset: Any = file.create_dataset(
                leaf.name, shape, plain_dtype(leaf.record)
            )
            for axis, label in enumerate(dimension_names(leaf, record.chains)):
                dataset.dims[axis].label = label
            array = leaf.array(record.chains, draws)
            region = whole(shape)
            for at in blocks(region, array.chunk_shape, array.itemsize):
                chains = range(1) if record.chains is None else _range(at[0])
                some = _range(at[len(lead) - 1])
                dataset[at] = plain_samples(recorded, leaf, chains, some)[
                    (slice(None),) * len(lead) + at[len(lead) :]
                ]
                check()
    return Path(new.paths[0])


class _Target(io.FileIO):
    """A file of which HDF5 does not see a failure, as it would crash later."""

    _failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            self._failure = self._failure or e
            return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as e:
            self._failure = self._failure or e
            return size or 0

    def check(self) -> None:
        """Raise the failure, if there was one."""
        if self._failure is not None:
            with writing_to(os.path.dirname(str(self.name)), AGAIN):
                raise self._failure


@contextlib.contextmanager
def _for_hdf5(path: str) -> Generator[tuple[IO[bytes], Callable[[], None]], None, None]:
    """A file for HDF5, and what raises if writing has failed, as the end does."""
    target = _Target(path, "r+")
    try:
        with io.BufferedRandom(target) as f:
            yield f, target.check
    finally:
        target.check()


def _range(span: slice) -> range:
    return range(span.start, span.stop)


def _parts(recorded: Recorded, leaf: Leaf, chain: int) -> Iterator[np.ndarray]:
    """The draws of a chain, in parts of whole chunks that fit into memory."""
    draws = recorded.record.draws[chain]
    size = max(1, _WINDOW // max(1, leaf.rows * leaf.row_bytes)) * leaf.rows
    for start in range(0, draws, size):
        some = range(start, min(start + size, draws))
        rows = plain_samples(recorded, leaf, range(chain, chain + 1), some)
        yield rows.reshape(len(some), *leaf.record.data_shape)


def _check_dtypes(leaves: Sequence[Leaf], format: str, fits: Any) -> None:
    problems = [
        f"- {leaf.name!r}: {plain_dtype(leaf.record)}."
        for leaf in leaves
        if not fits(plain_dtype(leaf.record))
    ]
    if problems:
        raise CheckpointError(
            f"Nothing was written, because a {format} cannot hold the dtypes of these "
            "leaves:\n" + "\n".join(problems)
        )
