"""System calls that make changes to directories atomic and durable."""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import sys


logger = logging.getLogger("eqx_ckpt")


LIBC = ctypes.CDLL(None, use_errno=True)


_AT_FDCWD = -100


_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


# What a file system answers that has no links, such as FAT, and some of FUSE.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


_SYNC_FILE_RANGE_WRITE = 2


def delete(directory: str) -> None:
    """Delete a hidden directory; log what cannot be deleted, which is harmless.

    Of a link, delete only the link: its target is not ours. To open a pipe, as `rmtree`
    does, would block. Ctrl-C is raised when it is deleted.
    """
    try:
        _delete(directory)
    except KeyboardInterrupt:
        _delete(directory)
        raise


def _delete(directory: str) -> None:
    if os.path.islink(directory) or not os.path.isdir(directory):
        with contextlib.suppress(OSError):
            os.unlink(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        logger.warning("Could not delete all of %s; delete it by hand.", directory)


def fsync_all(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (*(f"{folder}/{name}" for name in names), folder):
            fsync(path)
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        fsync(directory)


def fsync(path: str, folder: int | None = None) -> None:
    # A directory is opened for reading, too.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(fd)
    except OSError as e:
        raise OSError(e.errno, os.strerror(e.errno or 0), path) from e
    finally:
        os.close(fd)


def start_write_back(fd: int) -> None:
    """Let the system begin to write a file to the disk, where it can be asked to.

    Whether that succeeds is known after the flush.
    """
    if sys.platform == "linux":
        all_of_it = ctypes.c_int64(0), ctypes.c_int64(0)
        LIBC.sync_file_range(fd, *all_of_it, _SYNC_FILE_RANGE_WRITE)


def exchange(a: str, b: str, folder: int | None = None) -> None:
    """Exchange two directories in one atomic operation.

    The path of the first may be relative to a folder that is open.
    """
    if sys.platform != "linux":
        raise OSError(
            errno.ENOTSUP, "`overwrite=True` needs Linux's atomic exchange of names"
        )
    _rename(a, b, _RENAME_EXCHANGE, folder)


def rename_to_new(a: str, b: str) -> None:
    """Rename a file; `FileExistsError` if something has its new name.

    Unlike a plain rename, a link never takes the place of a file.
    """
    try:
        os.link(a, b)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        _rename(a, b, _RENAME_NOREPLACE)
    else:
        os.unlink(a)


def _rename(a: str, b: str, how: int, folder: int | None = None) -> None:
    of_a = _AT_FDCWD if folder is None else folder
    arguments = (of_a, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    if LIBC.renameat2(*arguments, how) != 0:
        raise os_error(b)


def os_error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def flush(fd: int, directory: str) -> None:
    """Make everything below `directory`, and its parent directories, durable.

    One `syncfs` costs a tenth of an `fsync` per file. See docs/performance.md.
    """
    if sys.platform != "linux":
        fsync_all(directory)
    elif LIBC.syncfs(fd) != 0:
        raise os_error(directory)
