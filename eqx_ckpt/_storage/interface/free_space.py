"""Whether what is about to be saved fits on a disk."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import TypeAlias


# Says of so many free bytes why they are surely too few, or `''`.
WhyTooFew: TypeAlias = Callable[[int], str]


# Those that store each byte that is written. Others may compress, or share blocks.
_STORES_ALL = ("ext2", "ext3", "ext4", "xfs", "tmpfs")


# Who has it may write where only the superuser should (capabilities(7)).
_CAP_SYS_RESOURCE = 24


# Seconds: what was just deleted may be counted as free a moment later.
_PAUSES = (0.1, 0.9)


def check_room(folder: int, path: str, why_too_few: WhyTooFew) -> None:
    """Raise if a file system has too little room, as far as that can be told.

    `folder` is an open directory of it, and `path` is what is to be saved.
    """
    problem = ""
    for pause in (0.0, *_PAUSES):
        time.sleep(pause)
        found = os.fstatvfs(folder)
        if not why_too_few(found.f_bavail * found.f_frsize):
            return
        free = _free_bytes(folder, found)
        problem = "" if free is None else why_too_few(free)
        if not problem:
            return
    text = f"{os.strerror(errno.ENOSPC)}: {problem}"
    raise OSError(errno.ENOSPC, text, path)


def _free_bytes(folder: int, found: os.statvfs_result) -> int | None:
    """The bytes that surely are all that this process can write; `None` if unknown."""
    if found.f_blocks == 0:  # It has no bound.
        return None
    kind, options = _mounted(os.fstat(folder).st_dev)
    if kind not in _STORES_ALL:
        return None
    # Which users they are for is in the options, unless it is the superuser.
    has_reserved = "resuid=" in options or "resgid=" in options or _is_privileged()
    blocks = found.f_bfree if has_reserved else found.f_bavail
    return blocks * found.f_frsize


def _mounted(device: int) -> tuple[str, str]:
    """The type and the options of the file system of a device, if it is listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as f:
        for line in f.read().decode(errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                name, *_, options = kind.split(" ")
                return name, options
    return "", ""


def _is_privileged() -> bool:
    with contextlib.suppress(OSError), open("/proc/self/status") as f:
        for line in f:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return True
