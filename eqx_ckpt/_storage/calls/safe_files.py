"""Files below a directory, as values of keys, and as chunks."""

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.leaf_names import alike
from ..._format.manifest import MAX_BYTES
from ..._lazy import Array, np
from .file_reads import FileReads, fill
from .opening import NotPlain, open_plain, status_at
from .posix_calls import start_write_back


def open_file(path: str, key: str, folder: int | None = None) -> tuple[int, int] | None:
    """Open a file of a checkpoint; never a link out of it, nor a pipe that blocks.

    Return its descriptor, and its size in bytes; `None` if there is no such file. The
    path may be relative to a folder that is open.
    """
    try:
        return open_plain(path + key, folder=folder)
    # A `ValueError` is of a path that no file can have: it has a NUL, perhaps.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except NotPlain as e:
        problem = (e.strerror or "").replace("It", key, 1)
        raise CorruptCheckpointError(problem) from None


def open_existing(path: str, key: str) -> FileReads:
    """Open a file that has to be there."""
    opened = open_file(path, key)
    if opened is None:
        raise CorruptCheckpointError(f"{key} is missing")
    return FileReads(*opened, key)


def size_of_existing(path: str, key: str) -> int:
    """The size of a file that has to be there, without opening it."""
    try:
        found = status_at(path + key)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise CorruptCheckpointError(f"{key} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{key} is not a file")
    return found.st_size


def read_file(
    path: str, key: str, most: int = MAX_BYTES + 1, folder: int | None = None
) -> bytes | None:
    """The content of a file, or its first `most` bytes; `None` if there is none."""
    opened = open_file(path, key, folder)
    if opened is None:
        return None
    fd, size = opened
    parts: list[bytes] = []
    try:
        # A file object takes longer to make than a small file to read.
        while most and (part := os.read(fd, min(most, size + 1))):
            parts.append(part)
            most -= len(part)
    finally:
        os.close(fd)
    return b"".join(parts)


def read_files(
    path: str, keys: Sequence[str]
) -> Iterator[bytes | CorruptCheckpointError | None]:
    for key in keys:
        try:
            yield read_file(path, key)
        except CorruptCheckpointError as e:
            yield e


def of_leaf(error: OSError, name: str, base: str = "") -> OSError:
    """The same `OSError`, with the name of the leaf, and the path from its `base`."""
    if error.errno is None:
        return error
    text = f"leaf {name!r}{on_full_disk(error.errno, 'save again')}"
    path = os.path.join(base, error.filename) if error.filename else None
    return OSError(error.errno, f"{os.strerror(error.errno)} ({text})", path)


def on_full_disk(number: int, then: str) -> str:
    """What to do if an error number is that of a full disk, or of a quota."""
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    return f"; delete what is no longer needed, and {then}" if is_full else ""


@contextlib.contextmanager
def writing_to(path: str, then: str) -> Generator[None, None, None]:
    """Let an error of the file system name a path, and say what to do."""
    try:
        yield
    except OSError as e:
        number = e.errno or 0
        text = os.strerror(number) + on_full_disk(number, then)
        raise OSError(number, text, path) from e


def check_case(names: Sequence[str], place: str, remedy: str = "") -> None:
    """Raise if arrays of these names share folders where letter case is ignored."""
    if pairs := alike(names):
        shown = "\n".join(f"- {a!r} and {b!r}." for a, b in pairs)
        raise LeafNameError(
            f"Nothing was saved: the file system of {place!r} ignores letter case, and "
            f"these leaves would share a directory in it:\n{shown}\nRename one of "
            f"each, {remedy}or choose a path on a file system that does not."
        )


def list_files(path: str) -> list[str]:
    """All files below a directory, relative to it; none if it is missing.

    An error of the disk is raised: what is not listed is not there.
    """
    return [
        os.path.relpath(f"{folder}/{name}", path)
        for folder, folders, names in os.walk(path, onerror=_raise_unless_missing)
        # A link to a directory is not walked into.
        for name in (*names, *(f for f in folders if os.path.islink(f"{folder}/{f}")))
    ]


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def has_bytes(
    path: str, parts: Iterable[memoryview | bytes], folder: int | None = None
) -> bool:
    """Whether this is a plain file, and has these bytes; it may change afterwards.

    All parts are made, if they are equal.
    """
    fd, nbytes = open_plain(path, folder=folder)
    offset, memory = 0, bytearray()
    try:
        for part in parts:
            memory = memory if len(memory) == len(part) else bytearray(len(part))
            fill(fd, path, [memoryview(memory)], offset)
            offset += len(part)
            if not np.array_equal(_as_words(memory), _as_words(part)):
                return False
    except CorruptCheckpointError:
        return False  # It is shorter.
    finally:
        os.close(fd)
    return offset == nbytes


def _as_words(data: bytearray | memoryview | bytes) -> Array:
    """Bytes, eight in a number where they can be, which are compared faster."""
    return np.frombuffer(data, np.uint8 if len(data) % 8 else np.uint64)


# To ask for the write-back of a smaller file costs more than it gains.
_LARGE = 2**21  # bytes


def write_file(
    path: str, parts: Iterable[memoryview | bytes], folder: int | None = None
) -> None:
    """Write a file, which must not exist.

    Each part is written before the next one is made. A path may be relative to a folder
    that is open.
    """
    nbytes = 0
    fd = os.open(
        path,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
        0o666,
        dir_fd=folder,
    )
    try:
        for part in parts:
            nbytes += len(part)
            left = memoryview(part)
            while left:  # It may write fewer bytes at a time.
                left = left[os.write(fd, left) :]
        if nbytes >= _LARGE:
            # Otherwise, the disk would be idle until the flush.
            start_write_back(fd)
    finally:
        os.close(fd)
