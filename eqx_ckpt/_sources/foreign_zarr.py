"""Other programs' Zarr arrays, in directories or in OCDBT databases."""

import bisect
import functools as ft
import itertools
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.display import in_bytes
from .._format.source import RegionRead
from .._lazy import Array, DType, np
from .._storage.calls.host_memory import memory
from .._storage.calls.tensorstore_calls import (
    context,
    KvSpec,
    own_context,
    resolved,
    wait_for,
)
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._storage.chunks.ocdbt_database import Database
from .._storage.chunks.ocdbt_tree import DatabaseTree
from .._storage.locate import locate
from .._types import PathLike, Report


if TYPE_CHECKING:
    import tensorstore as ts


# The files with the metadata of an array, and TensorStore's driver for it.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}


_DATABASE = "manifest.ocdbt"


_MAX_METADATA = 2**20


_MAX_NBYTES = 2**62


_MAX_RANK = 32


# The index of a shard has 16 bytes for each inner chunk, which has one byte at least.
_MOST_OVERHEAD = 32


_DTYPE = re.compile(r"[<>|]?[a-z][a-z0-9_]{1,24}")


class ZarrArray(NamedTuple):
    """The metadata of an array, and its location."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: DType
    place: KvSpec
    key: str
    driver: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, which TensorStore allocates whenever it reads of it."""
        return math.prod(self.chunk) * self.dtype.itemsize


class Place:
    """A location of arrays: a directory, a bucket, or an OCDBT database in one.

    **Attributes:**

    - `is_database`: whether its keys are in a database.
    - `keys`: all keys; those of a database in order.
    """

    def __init__(self, path: PathLike) -> None:
        self._outer = locate(path)
        self.is_database = self._read(_DATABASE, 1) is not None
        self._base = Database(self._outer) if self.is_database else self._outer
        problem = self._outer.database_problem() if self.is_database else ""
        if problem:
            raise CorruptCheckpointError(f"{self} is damaged: {problem}.")

    def __str__(self) -> str:
        return str(self._outer)

    def url(self) -> str:
        """This location, as a user would write it."""
        return self._outer.url()

    def file(self, name: str, most: int) -> bytes | None:
        """A file beside the arrays, of `most` bytes at most."""
        data = self._read(name, most + 1)
        if data is not None and len(data) > most:
            raise CorruptCheckpointError(f"{self}: {name} has more than {most} bytes.")
        return data

    def _read(self, name: str, most: int) -> bytes | None:
        try:
            return self._outer.read(name, most)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{self} is damaged: {e}.") from None

    def files(self) -> set[str]:
        """The keys of all files below it."""
        return set(self._outer.list_keys())

    def array_keys(self) -> list[str]:
        """The keys of all arrays."""
        endings = tuple("/" + name for name in _DRIVERS)
        return [key.rpartition("/")[0] for key in self.keys if key.endswith(endings)]

    @ft.cached_property
    def keys(self) -> list[str]:
        return sorted(self._sizes) if self.is_database else self._outer.list_keys()

    @ft.cached_property
    def _sizes(self) -> dict[str, int]:
        """The size of each value of a database, by its key.

        TensorStore would list what has no end, and allocate what a value is said to
        have.
        """
        try:
            sizes = DatabaseTree(self._outer).sizes()
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{self} is damaged: {e}.") from None
        return {key.decode(errors="replace"): size for key, size in sizes.items()}

    def describe(
        self, keys: Sequence[str], damage: dict[str, str]
    ) -> dict[str, ZarrArray]:
        """The arrays that exist; the problem with one is put into `damage`."""
        found: dict[str, ZarrArray] = {}
        todo = list(keys)
        for name, driver in _DRIVERS.items():
            names = [_folder(key) + name for key in todo]
            self._check_metadata(names)
            for key, data in zip(todo, self._base.read_all(names), strict=True):
                if data is None:
                    continue
                try:
                    if isinstance(data, CorruptCheckpointError):
                        raise data
                    described = _described(data, driver)
                    array = ZarrArray(*described, self._base.spec, key, driver)
                    _check_size(array, self)
                    self._check_files(array)
                    found[key] = array
                except (CorruptCheckpointError, ValueError) as e:
                    damage[key] = str(e)
            todo = [key for key in todo if key not in found and key not in damage]
        damage.update({key: "there is no such array" for key in todo})
        return found

    def _check_metadata(self, names: Iterable[str]) -> None:
        """Raise `CorruptCheckpointError` for metadata that do not fit in memory."""
        for name in names if self.is_database else ():
            if self._sizes.get(name, 0) > _MAX_METADATA:
                reason = f"{name} has {self._sizes[name]} bytes"
                raise CorruptCheckpointError(f"{self} is damaged: {reason}.")

    def _check_files(self, array: ZarrArray) -> None:
        """Raise `CorruptCheckpointError` for files that TensorStore must not open.

        It would follow a link out of the directory, wait for ever for a pipe, and end
        the process for a file that does not fit in memory.
        """
        folder = _folder(array.key)
        most = array.chunk_nbytes * _MOST_OVERHEAD + _MAX_METADATA
        if self.is_database:
            problem = self._value_problem(folder, most)
        else:
            problem = self._outer.folder_problem(folder, most)
        if problem:
            raise CorruptCheckpointError(problem)

    def _value_problem(self, folder: str, most: int) -> str:
        """The first value below a folder that has more than `most` bytes, or `''`."""
        first = bisect.bisect_left(self.keys, folder)
        for key in itertools.islice(self.keys, first, None):
            if not key.startswith(folder):
                break
            if (size := self._sizes[key]) > most:
                return f"{key} has {size} bytes, and {most} would be too many"
        return ""

    def rows(self, driver: str) -> "ts.TensorStore":
        """Open the array that is here, to read rows of it; its files may be links."""
        import tensorstore as ts

        spec = {"driver": driver, "kvstore": resolved(self._outer.spec)}
        opening = ts.open(spec, read=True, open=True, context=context())
        try:
            array = wait_for(opening, str(self))
        except CorruptCheckpointError as e:
            raise CheckpointError(
                f"{self} is no Zarr array that TensorStore reads: {e}. If it is not "
                "damaged, write it anew with a dtype and codecs that TensorStore has."
            ) from None
        itemsize = array.dtype.numpy_dtype.itemsize
        chunk = array.chunk_layout.write_chunk.shape or ()
        if (nbytes := math.prod(chunk) * itemsize) > memory():
            raise CheckpointError(
                f"{self} has chunks of {in_bytes(nbytes)}, and this machine has "
                f"{in_bytes(memory())}: write it anew, in smaller chunks."
            )
        most = nbytes * _MOST_OVERHEAD + _MAX_METADATA
        if problem := self._outer.folder_problem("", most, links=True):
            raise CorruptCheckpointError(f"{self} is damaged: {problem}.")
        return array


def _check_size(array: ZarrArray, place: Place) -> None:
    """Raise `ValueError` for an array that claims far more than is there.

    TensorStore ends the process if memory is short.
    """
    most = memory()
    if array.chunk_nbytes > most:
        raise ValueError(
            f"its chunks of {in_bytes(array.chunk_nbytes)} are larger than the memory "
            f"of this machine, {in_bytes(most)}"
        )
    if array.nbytes <= most:
        return
    folder = _folder(array.key)
    there = sum(key.startswith(folder) for key in place.keys) - 1
    if array.nbytes - there * array.chunk_nbytes > most:
        raise ValueError(
            f"its shape {str(array.shape)[:100]} is that of {in_bytes(array.nbytes)}, "
            f"and {there} chunks of {in_bytes(array.chunk_nbytes)} are there"
        )


def _described(
    data: bytes, driver: str
) -> tuple[tuple[int, ...], tuple[int, ...], DType]:
    """Shape, chunk shape and dtype; check that TensorStore can open the array."""
    if len(data) > _MAX_METADATA:
        raise ValueError(f"its metadata have {len(data)} bytes")
    try:
        metadata = json.loads(data)
        if driver == "zarr3":
            grid = metadata["chunk_grid"]
            chunk, name = grid["configuration"]["chunk_shape"], metadata["data_type"]
        else:
            chunk, name = metadata["chunks"], metadata["dtype"]
        shape = _sizes(metadata["shape"])
        chunk = _sizes(chunk)
        if len(chunk) != len(shape):
            raise ValueError("its chunks have a different rank")
        if not isinstance(name, str) or not _DTYPE.fullmatch(name):
            raise ValueError(f"its dtype is {str(name)[:100]!r}")
        dtype = np.dtype(name).newbyteorder("=")
        limits = [max(size, 1) for size in shape]
        if any(c > 2 * n + 1 for c, n in zip(chunk, limits, strict=True)):
            raise ValueError(f"its chunks {str(chunk)[:100]} are larger than it is")
        if math.prod(limits) * dtype.itemsize >= _MAX_NBYTES:
            raise ValueError("it is too large")
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        reason = f"{type(e).__name__}: {str(e)[:100]}"
        raise ValueError(f"its metadata are not those of an array ({reason})") from None
    return shape, chunk, dtype


def _sizes(found: Any) -> tuple[int, ...]:
    sizes = isinstance(found, list) and len(found) <= _MAX_RANK
    if not sizes or not all(type(n) is int and 0 <= n < _MAX_NBYTES for n in found):
        raise ValueError(f"its shape is {str(found)[:100]}")
    return tuple(found)


def read_zarr(
    arrays: Mapping[str, ZarrArray],
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    report: Report | None = None,
    *,
    allow_missing_chunks: bool,
) -> list[Array]:
    """Read regions of arrays, by their names in `arrays`.

    A missing chunk is damage, or stands for the array's fill value if its writer leaves
    out such chunks.
    """
    found: list[Array] = []
    opened = _open(arrays, {read.name for read in reads}, allow_missing_chunks)
    waiting: deque[tuple[RegionRead, Any]] = deque()
    in_flight = 0

    def take() -> None:
        nonlocal in_flight
        read, future = waiting.popleft()
        in_flight -= read.nbytes
        try:
            found.append(np.asarray(wait_for(future, read.name)))
            if report is not None:
                report(read.name, read.nbytes)
        except CorruptCheckpointError as e:
            damage.setdefault(read.name, str(e))
            found.append(np.empty(read.shape, read.record.data_type))

    for read in reads:
        _check_fits(arrays[read.name], read)
        waiting.append((read, _reading(opened[read.name], read)))
        in_flight += read.nbytes
        while in_flight > MAX_IN_FLIGHT:
            take()
    while waiting:
        take()
    return found


def _check_fits(array: ZarrArray, read: RegionRead) -> None:
    nbytes = read.nbytes + array.chunk_nbytes
    if nbytes > memory():
        raise CheckpointError(
            f"Leaf {read.name!r} cannot be read at once: that takes "
            f"{in_bytes(nbytes)}, and this machine has {in_bytes(memory())}. Restore "
            "parts of it, with a `sharding`, or make a checkpoint of all with `copy`."
        )


def _open(
    arrays: Mapping[str, ZarrArray], names: Iterable[str], allow_missing_chunks: bool
) -> dict[str, Any]:
    """Open the arrays that are needed; return futures."""
    import tensorstore as ts

    own = own_context()
    return {
        name: ts.open(
            {
                "driver": arrays[name].driver,
                "kvstore": {
                    **resolved(arrays[name].place),
                    "path": _path(arrays[name]),
                },
                "fill_missing_data_reads": allow_missing_chunks,
                "recheck_cached_metadata": "open",
                "recheck_cached_data": "open",
            },
            read=True,
            open=True,
            context=own if "base" in arrays[name].place else context(),
        )
        for name in names
    }


def _path(array: ZarrArray) -> str:
    return array.place.get("path", "") + _folder(array.key)


def _folder(key: str) -> str:
    """The beginning of the keys in an array, which may be the whole place."""
    return f"{key}/" if key else ""


def _reading(opened: Any, read: RegionRead) -> Any:
    """The future of a region; it raises what opening the array raised."""
    try:
        array: ts.TensorStore = wait_for(opened, read.name)
    except CorruptCheckpointError as e:
        return _Failed(e)
    return array[read.region].read() if read.region else array.read()


class _Failed:
    """A future that has failed."""

    def __init__(self, error: CorruptCheckpointError) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> Any:
        raise self._error


def open_zarr(path: PathLike) -> "ts.TensorStore":
    """A Zarr array of version 3 or 2."""
    place = Place(path)
    for name, driver in _DRIVERS.items():
        if place.file(name, _MAX_METADATA) is not None:
            return place.rows(driver)
    raise CheckpointNotFoundError(
        f"There is no Zarr array at {place}: no `zarr.json`, and no `.zarray`."
    )
