"""Files below a directory, as values of keys, and as chunks."""

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from .._errors import CorruptCheckpointError, LeafNameError
from .._format.manifest import MAX_BYTES
from .._format.names import alike
from .chunk_bytes import Chunk, Wanted
from .opening import NotPlain, open_plain


_FOLDER = re.compile(r"d|p\d+|ocdbt\.process_\d+")
_OF_DATABASE = re.compile(rf"{_FOLDER.pattern}|manifest\..*|[0-9a-f]{{32}}")
# One that lists the last few versions has some kB.
_MAX_MANIFEST = 2**20


def open_file(path: str, key: str) -> tuple[int, int] | None:
    """Open a file of a checkpoint; never a link out of it, nor a pipe that blocks.

    Return its descriptor, and its size in bytes; `None` if there is no such file.
    """
    try:
        return open_plain(path + key)
    # A `ValueError` is of a path that no file can have: it has a NUL, perhaps.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except NotPlain as e:
        problem = (e.strerror or "").replace("It", key, 1)
        raise CorruptCheckpointError(problem) from None


def open_existing(path: str, key: str) -> tuple[int, int]:
    """Like `open_file`, for a file that has to be there."""
    opened = open_file(path, key)
    if opened is None:
        raise CorruptCheckpointError(f"{key} is missing")
    return opened


def read_file(path: str, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
    """The content of a file, or its first `most` bytes; `None` if there is none."""
    opened = open_file(path, key)
    if opened is None:
        return None
    with os.fdopen(opened[0], "rb") as f:
        return f.read(most)


def read_files(
    path: str, keys: Sequence[str]
) -> Iterator[bytes | CorruptCheckpointError | None]:
    for key in keys:
        try:
            yield read_file(path, key)
        except CorruptCheckpointError as e:
            yield e


def of_leaf(error: OSError, name: str) -> OSError:
    """The same `OSError`, with the name of the leaf."""
    if error.errno is None:
        return error
    text = f"leaf {name!r}{on_full_disk(error.errno, 'save again')}"
    return OSError(error.errno, f"{os.strerror(error.errno)} ({text})", error.filename)


def on_full_disk(number: int, then: str) -> str:
    """What to do if an error number is that of a full disk, or of a quota."""
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    return f"; delete what is no longer needed, and {then}" if is_full else ""


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
    """All files below a directory, relative to it."""
    return [
        os.path.relpath(f"{folder}/{name}", path)
        for folder, folders, names in os.walk(path)
        # A link to a directory is not walked into.
        for name in (*names, *(f for f in folders if os.path.islink(f"{folder}/{f}")))
    ]


class _Folders:
    """The folders of a checkpoint, checked not to be links that lead out of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: set[str] = set()

    def check(self, key: str) -> None:
        """Check the folders of a key, once; called by any thread."""
        folder = key.rpartition("/")[0]
        while folder and folder not in self._known:
            if os.path.islink(self._path + folder):
                raise CorruptCheckpointError(f"{folder} is a symbolic link")
            self._known.add(folder)
            folder = folder.rpartition("/")[0]


class File:
    """A chunk in a file; a context in which the file is open.

    It is read with plain calls: under a mapping, a failing disk or a truncated file
    would end the process with a signal.
    """

    def __init__(self, path: str, chunk: Chunk, folders: _Folders) -> None:
        self._path = path
        self._chunk = chunk
        self._folders = folders
        self.nbytes = 0

    def __enter__(self) -> None:
        key = self._chunk.key
        self._folders.check(key)
        self._fd, self.nbytes = open_existing(self._path, key)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        fill(self._fd, self._chunk.key, buffers, offset)


def fill(fd: int, key: str, buffers: Sequence[memoryview], offset: int) -> None:
    """Read into all of the buffers, from an offset in a file."""
    left = sum(map(len, buffers))
    while (count := os.preadv(fd, buffers, offset)) < left:
        offset += count
        left -= count
        buffers = rest(buffers, count)
        if count == 0:
            raise CorruptCheckpointError(
                f"{key} was cut to {offset} bytes while it was read"
            )


def rest(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers after their first bytes are filled."""
    left: list[memoryview] = []
    for buffer in buffers:
        left += [buffer[count:]] if count < len(buffer) else []
        count = max(0, count - len(buffer))
    return left


def files_of(path: str, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
    folders = _Folders(path)
    for one in wanted:
        yield one, File(path, one.chunk, folders)


def database_problem(path: str) -> str:
    """The first entry of a database that is no plain file nor directory, or ''.

    TensorStore would follow a link out of the checkpoint, wait for ever for a pipe, and
    die of a manifest that does not fit in memory.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry, name in _entries(path):
            if entry.is_symlink():
                return f"{name} is a symbolic link"
            kind = "directory" if _FOLDER.fullmatch(entry.name) else "file"
            if not (entry.is_dir() if kind == "directory" else entry.is_file()):
                return f"{name} is not a {kind}"
            size = entry.stat().st_size
            if entry.name.startswith("manifest.") and size > _MAX_MANIFEST:
                return f"{name} has {size} bytes"
    return ""


def folder_problem(path: str, folder: str, most: int) -> str:
    """The first entry below a folder that TensorStore must not open, or ''.

    It must not have links, as a database; and no file has more than `most` bytes, which
    TensorStore would allocate.
    """
    parts = itertools.accumulate(filter(None, folder.split("/")), "{}/{}".format)
    if link := next((part for part in parts if os.path.islink(path + part)), None):
        return f"{link} is a symbolic link"
    todo = [path + folder]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                name = os.path.relpath(entry.path, path)
                if entry.is_symlink():
                    return f"{name} is a symbolic link"
                if entry.is_dir():
                    todo.append(entry.path)
                elif not entry.is_file():
                    return f"{name} is not a file"
                elif (size := entry.stat().st_size) > most:
                    return f"{name} has {size} bytes, and {most} would be too many"
    return ""


def _entries(path: str, prefix: str = "") -> Iterator[tuple[os.DirEntry[str], str]]:
    """Every entry of a database with its name; a directory before its content."""
    with os.scandir(path) as entries:
        for entry in entries:
            if _OF_DATABASE.fullmatch(entry.name):
                yield entry, prefix + entry.name
                if entry.is_dir():
                    yield from _entries(entry.path, f"{prefix}{entry.name}/")
