"""The one way to open what somebody else may have made.

A pipe would block whoever opens it, a device may do anything, and a link leads
elsewhere.
"""

import contextlib
import errno
import os
import stat
from typing import BinaryIO


# In bytes, of most file systems.
LONGEST_NAME = 255


class NotPlain(OSError):
    """The path does not lead to a plain file."""


def open_plain(
    path: str,
    flags: int = os.O_RDONLY,
    *,
    follow: bool = False,
    folder: int | None = None,
) -> tuple[int, int]:
    """Open a plain file; return its descriptor, and its size in bytes.

    A path that a user gives may be a link, which is to `follow`. A path may be relative
    to a folder that is open. Raises `NotPlain`, or another `OSError`.
    """
    safe = os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags | safe, 0o666, dir_fd=folder)
    except OSError as e:
        # The links in the path may form a loop, too.
        is_link = e.errno == errno.ELOOP and is_link_at(path, folder)
        if not is_link and e.errno != errno.ENXIO:
            raise _missing_if_too_long(e, path) from None
        raise NotPlain(e.errno, "It is a link or a socket", path) from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return fd, found.st_size
    os.close(fd)
    raise NotPlain(errno.EINVAL, "It is not a file", path)


def status_at(path: str) -> os.stat_result:
    """As `os.lstat`."""
    try:
        return os.lstat(path)
    except OSError as e:
        raise _missing_if_too_long(e, path) from None


def _missing_if_too_long(error: OSError, path: str) -> OSError:
    """The error; for a name that no file can have, that there is no such file."""
    if error.errno != errno.ENAMETOOLONG or longest_name(path) <= LONGEST_NAME:
        return error
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def longest_name(path: str) -> int:
    """The number of bytes of the longest name in a path."""
    return max(map(len, os.fsencode(path).split(b"/")))


def reading(path: str) -> BinaryIO:
    """A file that a user names, to read."""
    return os.fdopen(open_plain(path, follow=True)[0], "rb")


def open_folder(path: str, *, follow: bool = True, folder: int | None = None) -> int:
    """Open a directory; it may be a link to one, which is to `follow`.

    The path may be relative to a folder that is open.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return os.open(path, flags | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)


def make_folder(path: str) -> int:
    """Make a directory, and open it, and not a link that has taken its place."""
    os.mkdir(path)
    try:
        return open_folder(path, follow=False)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise


def path_through(folder: int) -> str:
    """A path to an open directory, whatever is at its own; `""` if there is none."""
    path = f"/proc/self/fd/{folder}"
    # Not everywhere, and not in a process that has given up its privileges.
    return path if os.path.isdir(path) else ""


def is_link_at(path: str, folder: int | None = None) -> bool:
    """Whether a path is a link; it may be relative to a folder that is open."""
    try:
        return stat.S_ISLNK(os.lstat(path, dir_fd=folder).st_mode)
    except (OSError, ValueError):
        return False


def is_removed(folder: int) -> bool:
    """Whether an open directory was removed."""
    try:
        return not os.fstat(folder).st_nlink
    except OSError:
        return True  # By another machine.


def is_open_at(folder: int, path: str) -> bool:
    """Whether a path leads to an open directory, and through no link at its end."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
