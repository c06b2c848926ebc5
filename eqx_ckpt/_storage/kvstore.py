"""TensorStore: keys and values, and arrays that are files."""

import errno
import math
import os
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import numpy as np

from .._errors import CheckpointError, CorruptCheckpointError
from .._format.chunks import Region
from .._format.leaves import LeafRecord
from .._format.manifest import zarr_metadata
from .._types import PathLike, Report, Tails
from .translate import translated
from .url import censored, remote_kvstore, SCHEMES, Store


# Importing TensorStore takes longer than all the rest of this package, so the functions
# that need it do.
if TYPE_CHECKING:
    import tensorstore as ts

# Encoded chunks wait in memory until the disk has taken them.
MAX_IN_FLIGHT = 48 * 2**20
CHECKSUM_BYTES = 4
# Twenty seconds or so, for a store that says that it is busy, or cannot be reached.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
# A request of which no byte moves for so many seconds is given up, and tried again.
_STALLED = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
# Values that are next to each other in a file are read by one request.
_FEWER_REQUESTS = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 32 * 2**20,
    "experimental_read_coalescing_interval": "1ms",
}
# By process.
_contexts: "dict[int, ts.Context]" = {}

KvSpec: TypeAlias = dict[str, Any]


class ArrayWrite(NamedTuple):
    """A leaf's record, and its data as regions and arrays that cover it."""

    name: str
    record: LeafRecord
    shards: Iterable[tuple[Region, np.ndarray]]


def context() -> "ts.Context":
    """One for the whole process: they hold threads, and `memory://` lives in one.

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


def locate(path: PathLike) -> KvSpec:
    """Where a path is, as the `kvstore` of a TensorStore spec."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise CheckpointError(f"{text!r} is not a path. Pass a directory.")
    scheme, separator, rest = text.partition(":/")
    if separator and scheme in (*SCHEMES, "memory") and not rest.startswith("/"):
        raise CheckpointError(
            f"{censored(text)!r} has lost a slash: `pathlib` cannot hold a URL. Pass "
            "a string, or an `eqx_ckpt.Store`."
        )
    if separator and scheme in SCHEMES:
        return remote_kvstore(path if isinstance(path, Store) else Store(text))
    if separator and scheme == "memory":
        return {"driver": "memory", "path": rest.strip("/") + "/"}
    if separator and scheme.isalnum() and rest.startswith("/"):
        raise CheckpointError(
            f"{censored(text)!r}: `{scheme}://` is not supported. Pass a directory, or "
            "an URL that begins with `s3://` or `gs://`."
        )
    folder = os.path.realpath(os.path.expanduser(text))
    if "\\" in folder or not folder.isprintable():
        raise CheckpointError(
            f"{folder!r} has a backslash or a character that does not print, which "
            "TensorStore cannot be trusted with. Choose another directory."
        )
    return {"driver": "file", "path": folder.rstrip("/") + "/"}


def database(base: KvSpec, name: str = "") -> KvSpec:
    """The OCDBT database at a place, or at a name below it."""
    spec = {"driver": "ocdbt", "base": {**base, "path": base["path"] + name}}
    return spec if base["driver"] == "file" else spec | _FEWER_REQUESTS


def new_database(base: KvSpec, name: str = "") -> KvSpec:
    """As `database`, of one that is to be written.

    A store gets a new manifest for each transaction: to replace one on a condition is
    more than some can, and TensorStore would try for ever. Its files are smaller, so
    that several are sent at a time.
    """
    if base["driver"] == "file":
        return database(base, name)
    config = {"manifest_kind": "numbered"}
    return {
        **database(base, name),
        "config": config,
        "target_data_file_size": 32 * 2**20,
    }


def shown(base: KvSpec) -> str:
    """A place in words, for errors."""
    return repr(url(base))


def url(base: KvSpec, key: str = "") -> str:
    while base["driver"] == "ocdbt":
        base = base["base"]
    path = base["path"].rstrip("/") if not key else base["path"] + key
    if base["driver"] == "file":
        return path
    scheme = {"gcs": "gs"}.get(base["driver"], base["driver"])
    bucket = base["bucket"] + "/" if "bucket" in base else ""
    return f"{scheme}://{bucket}{path}"


def array_spec(record: LeafRecord, known: dict[LeafRecord, "ts.Spec"]) -> "ts.Spec":
    """How to open an array; parsed once for all arrays that are alike."""
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


def write_arrays(
    base: KvSpec,
    writes: Sequence[ArrayWrite],
    written: Report | None = None,
    *,
    create: bool = True,
) -> Tails:
    """Write every array, a bounded number of bytes at a time.

    What its chunks end with is not returned: the files are there to be looked at.
    Unless `create`, another process creates them. `written` is told of every piece that
    TensorStore is done with. When this returns or raises, TensorStore writes nothing
    below `base` any more, which is a directory.
    """
    import tensorstore as ts

    root = result(ts.KvStore.open(base, context=context()), "file")
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
            store = result(opened, write.name)
            record = write.record
            for region, array in write.shards:
                target = store if array.shape == record.data_shape else store[region]
                # Nobody changes the arrays before this function returns.
                future = target.write(
                    array, can_reference_source_data_indefinitely=True
                )
                writing.append((write.name, future, array.nbytes))
                in_flight += array.nbytes
                while in_flight > MAX_IN_FLIGHT:
                    name, future, nbytes = writing.popleft()
                    result(future, name)
                    in_flight -= nbytes
                    if written:
                        written(name, nbytes)
        for name, future, nbytes in writing:
            result(future, name)
            if written:
                written(name, nbytes)
    finally:
        for future in (*opening, *(future for _, future, _ in writing)):
            future.exception()
    return {}


def checksum(base: KvSpec, key: str, record: LeafRecord) -> str:
    """The last four bytes of a file; proves that it is there, in its full size."""
    itemsize = np.dtype(record.data_type).itemsize
    expected = math.prod(record.chunk_shape) * itemsize + CHECKSUM_BYTES
    fd = open_file(base, key)
    if fd is None:
        raise CorruptCheckpointError(f"{key} is missing")
    try:
        size = os.fstat(fd).st_size
        # What zstd cannot make smaller, it makes a little larger.
        most = expected if record.compression is None else expected * 1.01 + 1024
        if size > most or (size < expected and record.compression is None):
            raise CorruptCheckpointError(
                f"{key} has {size} bytes instead of {expected}"
            )
        return os.pread(fd, CHECKSUM_BYTES, max(0, size - CHECKSUM_BYTES)).hex()
    finally:
        os.close(fd)


def open_file(base: KvSpec, key: str) -> int | None:
    """A file of a checkpoint: never a link out of it, nor a pipe that blocks."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(base["path"] + key, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise CorruptCheckpointError(f"{key} is a link or a socket") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CorruptCheckpointError(f"{key} is not a file")


def own_context() -> "ts.Context":
    """For a database: with caches that know of none that was at the same place."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}}, context())


def kvstore(base: KvSpec) -> "ts.KvStore":
    import tensorstore as ts

    used = own_context() if base["driver"] == "ocdbt" else context()
    return result(ts.KvStore.open(base, context=used), base["driver"])


def result(future: Any, name: str, seconds: float | None = None) -> Any:
    """What a future of TensorStore comes to, after so many seconds at most."""
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
    """The same failure of the operating system, with the name of the leaf."""
    if error.errno is None:
        return error
    text = f"{os.strerror(error.errno)} (leaf {name!r})"
    return OSError(error.errno, text, error.filename)
