"""The only module that knows TensorStore: arrays to bytes at rest, and back."""

import errno
import math
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import numpy as np

from ._chunks import batches, chunk_keys, Region, shape_of, touched
from ._errors import CheckpointError, CorruptCheckpointError
from ._leaves import LeafRecord
from ._manifest import MAX_BYTES, zarr_metadata
from ._placement import empty
from ._types import PathLike, Report


# Importing TensorStore takes longer than all the rest of this package, so the functions
# that need it do.
if TYPE_CHECKING:
    import tensorstore as ts

# Encoded chunks wait in memory until the disk has taken them.
MAX_IN_FLIGHT = 48 * 2**20
_BATCH = 32 * 2**20
_CHECKSUM_BYTES = 4
# Smaller files are not mapped by TensorStore.
_MAPPED = 2**16
_SCRATCH = bytearray(2**20)
# By process.
_contexts: "dict[int, ts.Context]" = {}

KvSpec: TypeAlias = dict[str, Any]


class ArrayWrite(NamedTuple):
    """A leaf's record, and its data as regions and arrays that cover it."""

    name: str
    record: LeafRecord
    shards: Iterable[tuple[Region, np.ndarray]]


class RegionRead(NamedTuple):
    """A region of a leaf's array."""

    name: str
    record: LeafRecord
    region: Region

    @property
    def nbytes(self) -> int:
        return math.prod(shape_of(self.region)) * self.record.itemsize


def _context() -> "ts.Context":
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
        import tensorstore as ts

        _contexts[pid] = ts.Context(
            {
                "file_io_sync": False,
                "file_io_locking": {"mode": "none"},
                "file_io_mode": {"mode": "memmap"},
            }
        )
    return _contexts[pid]


def locate(path: PathLike) -> KvSpec:
    """Where a path is, as the `kvstore` of a TensorStore spec."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise CheckpointError(f"{text!r} is not a path. Pass a directory.")
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "memory":
        return {"driver": "memory", "path": rest.strip("/") + "/"}
    if separator and scheme.isalnum():
        raise CheckpointError(
            f"{text!r}: `{scheme}://` is not supported. Pass a directory."
        )
    folder = os.path.realpath(os.path.expanduser(text))
    if "\\" in folder or not folder.isprintable():
        raise CheckpointError(
            f"{folder!r} has a backslash or a character that does not print, which "
            "TensorStore cannot be trusted with. Choose another directory."
        )
    return {"driver": "file", "path": folder.rstrip("/") + "/"}


def _spec(record: LeafRecord, known: dict[LeafRecord, "ts.Spec"]) -> "ts.Spec":
    """How to open an array; parsed once for all arrays that are alike."""
    import tensorstore as ts

    key = record._replace(path=(), sharding=None, weak_type=False, crc32c=())
    if key not in known:
        # Without the last two, TensorStore skips all-zero chunks and reads a lost chunk
        # as zeros. See test_damage.py.
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
) -> None:
    """Write every array, a bounded number of bytes at a time.

    Unless `create`, another process creates them. `written` is told of every piece that
    TensorStore is done with. When this returns or raises, TensorStore writes nothing
    below `base` any more.
    """
    import tensorstore as ts

    root, context = _kvstore(base), _context()
    specs: dict[LeafRecord, ts.Spec] = {}
    # Nobody changes the arrays before this function returns, so that no copy is needed;
    # but `memory://` would keep referring to them.
    on_disk = base["driver"] == "file"
    opening = [
        ts.open(
            _spec(write.record, specs),
            kvstore=root / f"{write.name}/",
            create=create,
            open=not create,
            assume_metadata=not create,
            context=context,
        )
        for write in writes
    ]
    writing: deque[tuple[str, ts.WriteFutures, int]] = deque()
    try:
        in_flight = 0
        for write, opened in zip(writes, opening, strict=True):
            store = _result(opened, write.name)
            record = write.record
            for region, array in write.shards:
                target = store if array.shape == record.data_shape else store[region]
                future = target.write(
                    array, can_reference_source_data_indefinitely=on_disk
                )
                writing.append((write.name, future, array.nbytes))
                in_flight += array.nbytes
                while in_flight > MAX_IN_FLIGHT:
                    name, future, nbytes = writing.popleft()
                    _result(future, name)
                    in_flight -= nbytes
                    if written:
                        written(name, nbytes)
        for name, future, nbytes in writing:
            _result(future, name)
            if written:
                written(name, nbytes)
    finally:
        for future in (*opening, *(future for _, future, _ in writing)):
            future.exception()


def checksum(
    base: KvSpec, key: str, record: LeafRecord, *, look_through: bool = False
) -> str:
    """The last four bytes of a chunk; proves that it is there, in its full size."""
    itemsize = np.dtype(record.data_type).itemsize
    expected = math.prod(record.chunk_shape) * itemsize + _CHECKSUM_BYTES
    if base["driver"] == "file":
        fd = _open_file(base, key)
        if fd is None:
            raise CorruptCheckpointError(f"{key} is missing")
        try:
            size = os.fstat(fd).st_size
            if look_through and _MAPPED <= size == expected:
                _look_through(fd, size)
            tail = os.pread(fd, _CHECKSUM_BYTES, max(0, size - _CHECKSUM_BYTES))
        finally:
            os.close(fd)
    else:
        data = read_key(base, key) or b""
        size, tail = len(data), data[-_CHECKSUM_BYTES:]
    if size != expected:
        raise CorruptCheckpointError(f"{key} has {size} bytes instead of {expected}")
    return tail.hex()


def _look_through(fd: int, size: int) -> None:
    """Read a file, so that a disk that fails is an error.

    TensorStore maps it, and a disk that fails under a mapping kills the process.
    """
    for offset in range(0, size, len(_SCRATCH)):
        os.preadv(fd, [_SCRATCH], offset)


def read_regions(
    base: KvSpec,
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    arrived: Report | None = None,
) -> list[np.ndarray]:
    """Read regions of arrays into buffers that JAX takes over as they are.

    What is wrong with a leaf is put into `damage` under its name; its array is then not
    to be used. `raise_damage` makes an error of that. `arrived` is told of each region.
    """
    import tensorstore as ts

    root, context = _kvstore(base), _context()
    specs: dict[LeafRecord, ts.Spec] = {}
    known: set[str] = set()
    buffers: list[np.ndarray] = []
    reading: list[tuple[str, ts.WriteFutures, int]] = []
    try:
        # While TensorStore reads one batch, the next one is looked through.
        for batch in batches(reads, lambda read: read.nbytes, _BATCH):
            sound = [_is_sound(base, read, known, damage) for read in batch]
            # The metadata are known, so that nothing is read to open an array.
            opening = [
                ts.open(
                    _spec(read.record, specs),
                    kvstore=root / f"{read.name}/",
                    open=True,
                    assume_metadata=True,
                    context=context,
                )
                if is_sound and read.nbytes
                else None
                for read, is_sound in zip(batch, sound, strict=True)
            ]
            todo = zip(batch, sound, opening, strict=True)
            for (name, record, region), is_sound, opened in todo:
                buffers.append(empty(region, record) if is_sound else np.empty(0))
                if opened is not None:
                    store = _result(opened, name)
                    if buffers[-1].shape != record.data_shape:
                        store = store[region]
                    future = ts.array(buffers[-1]).write(store)
                    reading.append((name, future, buffers[-1].nbytes))
        for name, future, nbytes in reading:
            try:
                _result(future, name)
            except CorruptCheckpointError as e:
                damage.setdefault(name, str(e))
            if arrived:
                arrived(name, nbytes)
    finally:
        for _, future, _ in reading:
            future.exception()
    return buffers


def _is_sound(
    base: KvSpec, read: RegionRead, known: set[str], damage: dict[str, str]
) -> bool:
    """Compare the tails of the chunks of a region with the manifest.

    TensorStore compares the checksum of a chunk with its content, which does not show
    that two chunks changed places. And it is told nothing that could abort the process,
    such as a chunk shape that its files do not have.
    """
    record = read.record
    shape, chunk = record.data_shape, record.chunk_shape
    keys = chunk_keys(shape, chunk)
    try:
        for i in touched(read.region, shape, chunk) if keys else ():
            key = f"{read.name}/{keys[i]}"
            if key in known:
                continue
            _check_folders(base, key, known)
            if checksum(base, key, record, look_through=True) != record.crc32c[i]:
                raise CorruptCheckpointError(
                    f"{keys[i]} is not the chunk that was saved"
                )
            known.add(key)
    except CorruptCheckpointError as e:
        damage.setdefault(read.name, str(e))
        return False
    return True


def _check_folders(base: KvSpec, key: str, known: set[str]) -> None:
    """No folder of a checkpoint is a link that leads out of it."""
    folder = key.rpartition("/")[0]
    while base["driver"] == "file" and folder and folder not in known:
        if os.path.islink(base["path"] + folder):
            raise CorruptCheckpointError(f"{folder} is a symbolic link")
        known.add(folder)
        folder = folder.rpartition("/")[0]


def shown(base: KvSpec) -> str:
    """A place in words, for errors."""
    scheme = "" if base["driver"] == "file" else base["driver"] + "://"
    return repr(scheme + base["path"].rstrip("/"))


def read_key(base: KvSpec, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
    """The value of a key, or its first `most` bytes; `None` if there is none."""
    if base["driver"] != "file":
        found = _result(_kvstore(base).read(key), key)
        return found.value if found.state == "value" else None
    fd = _open_file(base, key)
    if fd is None:
        return None
    with open(fd, "rb") as f:
        return f.read(most)


def _open_file(base: KvSpec, key: str) -> int | None:
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


def create_key(base: KvSpec, key: str, value: bytes) -> bool:
    """Write a value unless the key exists already; whether it was written."""
    kvstore = _kvstore(base)
    absent = _result(kvstore.read(key), key)
    if absent.state == "value":
        return False
    written = kvstore.write(key, value, if_equal=absent.stamp.generation)
    return bool(_result(written, key).generation)


def replace_key(base: KvSpec, key: str, value: bytes) -> None:
    _result(_kvstore(base).write(key, value), key)


def delete_below(base: KvSpec, prefix: str) -> None:
    """Delete every key that starts with `prefix`."""
    import tensorstore as ts

    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    _result(_kvstore(base).delete_range(ts.KvStore.KeyRange(prefix, end)), prefix)


def _kvstore(base: KvSpec) -> "ts.KvStore":
    import tensorstore as ts

    return _result(ts.KvStore.open(base, context=_context()), base["path"])


def _result(future: Any, name: str) -> Any:
    try:
        return future.result()
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as e:
        raise _translated(e, name) from None


def _translated(error: Exception, name: str) -> Exception:
    """TensorStore's errors are `ValueError`s with a status and details in the text."""
    text = re.sub(
        r"\s*\[(tensorstore_spec|source locations)=.*", "", str(error), flags=re.S
    )
    code = re.search(r"\[os_error_code='(\d+)'", str(error))
    if code:
        number = int(code[1])
        return OSError(number, f"{os.strerror(number)} (leaf {name!r}: {text})")
    if text.startswith(("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF")):
        return CorruptCheckpointError(text)
    return CheckpointError(f"TensorStore failed at {name!r}: {text}")
