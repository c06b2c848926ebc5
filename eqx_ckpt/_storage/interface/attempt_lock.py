"""Locks that show which attempts are alive, and the removal of the others."""

import contextlib
import errno
import fcntl
import logging
import os
import re
import uuid
from collections.abc import Callable, Generator

from ..._errors import CheckpointError
from ..calls.opening import LONGEST_NAME, open_plain
from ..calls.posix_calls import delete, fsync


logger = logging.getLogger("eqx_ckpt")


# What surrounds the name of a target: `.`, and `.<uuid>.lock`.
_MAX_NAME = LONGEST_NAME - 39


# What a file system without locks answers; NFS without its lock service says the first.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


# The descriptors of locks, and of what they protect.
held: set[int] = set()


def lock_file(fd: int, how: int, path: str) -> None:
    """Lock an open file; `BlockingIOError` if it is locked already.

    Any other error names its path, and says what to do where there are no locks.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as e:
        number = e.errno or 0
        way_out = ": use a file system that has locks" if number in _NO_LOCKS else ""
        raise OSError(number, os.strerror(number) + way_out, path) from e


@contextlib.contextmanager
def locked_attempt(target: str) -> Generator[str, None, None]:
    """A fresh hidden name beside a target, and a lock that this process holds.

    The kernel releases the lock when the process dies, so `sweep` recognises dead
    attempts. It is a separate file: NFS cannot lock directories.
    """
    parent, name = os.path.split(target)
    if len(os.fsencode(name)) > _MAX_NAME:
        raise CheckpointError(
            f"The name {name[:40] + '...'!r} has {len(os.fsencode(name))} bytes. "
            f"Nothing was written; choose one of {_MAX_NAME} at most: a longer one is "
            "needed beside it until the end, and file systems take 255."
        )
    stem, lock = "", None
    # Registered before anything is opened, as Ctrl-C may come at any line.
    try:
        while lock is None:
            stem = f"{parent}/.{name}.{uuid.uuid4().hex}"
            lock = os.open(stem + ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            held.add(lock)
            try:
                lock_file(lock, fcntl.LOCK_EX, f"{stem}.lock")
                swept = not os.fstat(lock).st_nlink
            except BlockingIOError:
                swept = True
            except OSError as e:
                if e.errno not in _NO_LOCKS:
                    raise
                # `sweep` fails there, and removes nothing.
                swept = False
            if swept:
                held.discard(lock)
                os.close(lock)
                lock = None
        yield stem
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(stem + ".lock")
            held.discard(lock)
            os.close(lock)


def _let_go() -> None:
    """Close what is held, in a forked child: that could outlive its parent."""
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=_let_go)


# `.000100.<uuid>`: the directory of an attempt, or the lock of its process.
_CLAIM = re.compile(r"(\..+\.[0-9a-f]{32})\.(?:tmp|lock)")


def attempts_in(directory: str) -> list[str]:
    """The hidden names of attempts in a directory, without `.tmp` or `.lock`."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({m[1] for name in names if (m := _CLAIM.fullmatch(name))})


def is_dead(stem: str) -> bool:
    """Whether no process holds the lock of an attempt; changes nothing."""
    # The lock is held before there is a directory.
    if not os.path.lexists(f"{stem}.tmp"):
        return False
    try:
        lock = open_plain(f"{stem}.lock")[0]
    except FileNotFoundError:
        return os.path.lexists(f"{stem}.tmp")
    except OSError as e:
        logger.warning("%s.tmp stays: its lock cannot be opened: %s", stem, e)
        return False
    try:
        lock_file(lock, fcntl.LOCK_SH, f"{stem}.lock")
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def target_of(stem: str) -> str:
    """The path that an attempt is beside."""
    directory, name = os.path.split(stem)
    return os.path.join(directory, name[1:-33])


def sweep_attempts(directory: str, still_needed: Callable[[str], str]) -> None:
    """Remove what dead attempts left in a directory, and nothing of a live one.

    `still_needed` says why what a dead one left has to stay, or `''`.
    """
    for name in attempts_in(directory):
        _sweep_one(os.path.join(directory, name), still_needed)


def _sweep_one(stem: str, still_needed: Callable[[str], str]) -> None:
    try:
        lock = open_plain(stem + ".lock", os.O_RDWR | os.O_CREAT)[0]
    except OSError as e:
        # It belongs to a different user, or is a link. The others can still be removed.
        logger.warning("%s.tmp stays: its lock cannot be opened: %s", stem, e)
        return
    try:
        lock_file(lock, fcntl.LOCK_EX, f"{stem}.lock")
        if not os.fstat(lock).st_nlink:
            return
        if problem := still_needed(stem):
            logger.warning("%s.tmp stays: %s", stem, problem)
        else:
            logger.info("Removing %s.tmp, which a dead process left.", stem)
            # What that exchanged or hid must not reappear half deleted.
            fsync(os.path.dirname(stem))
            delete(stem + ".tmp")
            os.unlink(stem + ".lock")
    except BlockingIOError:
        logger.debug("%s.tmp is in use.", stem)
    finally:
        os.close(lock)
