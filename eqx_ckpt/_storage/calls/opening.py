"""The one way to open what somebody else may have made.

A pipe would block whoever opens it, a device may do anything, and a link leads
elsewhere.
"""

import errno
import os
import stat
from typing import BinaryIO


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
        is_link = e.errno == errno.ELOOP and _is_link(path, folder)
        if not is_link and e.errno != errno.ENXIO:
            raise
        raise NotPlain(e.errno, "It is a link or a socket", path) from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return fd, found.st_size
    os.close(fd)
    raise NotPlain(errno.EINVAL, "It is not a file", path)


def _is_link(path: str, folder: int | None) -> bool:
    try:
        status = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode)


def reading(path: str) -> BinaryIO:
    """A file that a user names, to read."""
    return os.fdopen(open_plain(path, follow=True)[0], "rb")


def open_folder(path: str, *, follow: bool = True) -> int:
    """Open a directory; it may be a link to one, which is to `follow`."""
    link = 0 if follow else os.O_NOFOLLOW
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | link)


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
    except OSError:
        return False
