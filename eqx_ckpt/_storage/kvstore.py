"""TensorStore's contexts and futures, and arrays that it writes as files."""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from .._errors import CheckpointError, CorruptCheckpointError, LeafNameError
from .._format.chunks import chunk_keys
from .._format.dtypes import SIZES
from .._format.leaves import LeafRecord
from .._format.manifest import MANIFEST, zarr_metadata
from .._types import Checksums, Report
from .chunk_bytes import CHECKSUM_BYTES, Wanted
from .files import File, files_of
from .storage import ArrayWrite, Chunks, KvSpec, Storage
from .translate import translated


# Importing TensorStore takes longer than all the rest of this package, so the functions
# that need it do.
if TYPE_CHECKING:
    import tensorstore as ts

# Encoded chunks wait in memory until they are written.
MAX_IN_FLIGHT = 48 * 2**20
# About twenty seconds, for a store that is busy or unreachable.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
# A request that makes no progress for so many seconds is given up, and retried.
_STALLED = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
# What comes around the name of a leaf in a path: `/`, what TensorStore appends to a
# file while it writes, and the name of an attempt.
_AROUND = 39 + 16
_MAX_PATH = 4095
# By process.
_contexts: "dict[int, ts.Context]" = {}


def context() -> "ts.Context":
    """The context of the whole process: it holds threads, and the data of `memory://`.

    Files are not synced one by one, and not locked: an attempt has a directory of its
    own, and the commit flushes it at once. A lock that a dead process left would be
    written over without being cut, which stores its tail behind the new value.
    """
    pid = os.getpid()
    if pid not in _contexts:
        if _contexts:
            raise CheckpointError(
                "This process was forked from one that had used TensorStore, which "
                "does not survive that. Start it with the method `spawn`, or save and "
                "restore in its parent only."
            )
        for name, value in _STALLED.items():
            os.environ.setdefault(name, value)
        import tensorstore as ts

        _contexts[pid] = ts.Context(
            {
                "file_io_sync": False,
                "file_io_locking": {"mode": "none"},
                "s3_request_retries": _RETRIES,
                "gcs_request_retries": _RETRIES,
            }
        )
    return _contexts[pid]


def array_spec(record: LeafRecord, known: dict[LeafRecord, "ts.Spec"]) -> "ts.Spec":
    """The spec to open an array, parsed once for all arrays of one type."""
    import tensorstore as ts

    key = record._replace(path=(), sharding=None, weak_type=False, crc32c=())
    if key not in known:
        # Without the last two, TensorStore skips all-zero chunks and reads a lost chunk
        # as zeros. See tests/faults/test_damage.py.
        known[key] = ts.Spec(
            {
                "driver": "zarr3",
                "metadata": zarr_metadata(record),
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
        )
    return known[key]


@dataclass
class ChunkFiles(Chunks):
    """Each chunk is a file, which TensorStore writes and this package reads."""

    place: Storage

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        above = len(os.fsencode(self.place.spec["path"])) + _AROUND
        for name, record in leaves.items():
            keys = chunk_keys(record.data_shape, record.chunk_shape)[-1:]
            length = above + len(name) + max(map(len, (MANIFEST, *keys)))
            if length > _MAX_PATH and record.is_array:
                raise LeafNameError(
                    f"Nothing was saved: files of the leaf {name[:80] + '...'!r}, "
                    f"whose name has {len(name)} bytes, would have paths of {length} "
                    f"bytes, and the system takes {_MAX_PATH}. Pass `layout='ocdbt'`, "
                    "which has names of any length, or nest the PyTree less."
                )

    def write(
        self,
        writes: Sequence[ArrayWrite],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        """Write every array, a bounded number of bytes at a time.

        No checksums are returned: `checksums` reads them when all files exist.
        """
        import tensorstore as ts

        root = wait_for(ts.KvStore.open(self.place.spec, context=context()), "file")
        specs: dict[LeafRecord, ts.Spec] = {}
        opening = [
            ts.open(
                array_spec(write.record, specs),
                kvstore=root / f"{write.name}/",
                create=create,
                open=not create,
                assume_metadata=not create,
                context=context(),
            )
            for write in writes
        ]
        writing: deque[tuple[str, ts.WriteFutures, int]] = deque()
        try:
            in_flight = 0
            for write, opened in zip(writes, opening, strict=True):
                store = wait_for(opened, write.name)
                record = write.record
                for region, array in write.shards:
                    target = (
                        store if array.shape == record.data_shape else store[region]
                    )
                    # Nobody changes the arrays before this function returns.
                    future = target.write(
                        array, can_reference_source_data_indefinitely=True
                    )
                    writing.append((write.name, future, array.nbytes))
                    in_flight += array.nbytes
                    while in_flight > MAX_IN_FLIGHT:
                        name, future, nbytes = writing.popleft()
                        wait_for(future, name)
                        in_flight -= nbytes
                        if written:
                            written(name, nbytes)
            for name, future, nbytes in writing:
                wait_for(future, name)
                if written:
                    written(name, nbytes)
        finally:
            for future in (*opening, *(future for _, future, _ in writing)):
                future.exception()
        return {}

    def checksums(
        self, name: str, record: LeafRecord, known: Checksums
    ) -> tuple[str, ...]:
        """The last bytes of each file, which must exist in its full size."""
        found: list[str] = []
        expected = math.prod(record.chunk_shape) * SIZES[record.data_type]
        expected += CHECKSUM_BYTES
        # zstd makes incompressible data a little larger.
        is_packed = record.compression is not None
        most = expected * 1.01 + 1024 if is_packed else expected
        for chunk in chunk_keys(record.data_shape, record.chunk_shape):
            key = f"{name}/{chunk}"
            try:
                fd = os.open(self.place.spec["path"] + key, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                raise CorruptCheckpointError(f"{key} is missing") from None
            try:
                size = os.fstat(fd).st_size
                if size > most or (size < expected and not is_packed):
                    raise CorruptCheckpointError(
                        f"{key} has {size} bytes instead of {expected}"
                    )
                tail = os.pread(fd, CHECKSUM_BYTES, max(0, size - CHECKSUM_BYTES))
                found.append(tail.hex())
            finally:
                os.close(fd)
        return tuple(found)

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
        return files_of(self.place.spec["path"], wanted)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return self.place.read_all(keys)


def own_context() -> "ts.Context":
    """A context for a database, whose caches have seen no other at its path."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}}, context())


def open_kvstore(spec: KvSpec) -> "ts.KvStore":
    """Open the key-value store of a spec; a database gets its own caches."""
    import tensorstore as ts

    used = own_context() if "base" in spec else context()
    return wait_for(ts.KvStore.open(spec, context=used), spec["driver"])


def wait_for(future: Any, name: str, seconds: float | None = None) -> Any:
    """Wait for a TensorStore future; translate its error."""
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(
            f"No answer within {seconds:g} seconds ({name}). Look at the endpoint and "
            "the credentials."
        ) from None
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as e:
        problem = translated(e, name)
    # Not in there, where TensorStore's error would be its context, with all details.
    raise problem


def of_leaf(error: OSError, name: str) -> OSError:
    """The same `OSError`, with the name of the leaf."""
    if error.errno is None:
        return error
    text = f"{os.strerror(error.errno)} (leaf {name!r})"
    return OSError(error.errno, text, error.filename)
