"""Build the shims, and arm them in a process that was started with them."""

import ctypes
import errno
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass


# The same order as `enum kind` in faultshim.c.
KINDS = (
    "create",
    "write",
    "sync",
    "rename",
    "unlink",
    "mkdir",
    "truncate",
    "link",
    "open",
    "read",
    "lock",
)
# What changes a disk: all but opening, reading and locking what is there.
CHANGES = KINDS[:8]
_NOT_ERRNO = {"KILL": -1, "SHORT": -2, "STOP": -3, "STOP_EIO": -4, "SLOW": -5}


@dataclass(frozen=True)
class Fault:
    """At the `nth` operation below `root` of one of `kinds`, do `what`.

    `what` is an errno's name, "KILL" (before the operation), "SHORT" (a write writes
    its first half), "STOP" (before the operation, see races.py), "STOP_EIO" (and
    then it fails), or "SLOW" (it takes 20 ms more). `nth=0`: only count. `log`: a file
    that receives all operations.
    """

    root: str
    nth: int = 0
    what: str = "KILL"
    kinds: tuple[str, ...] = CHANGES
    for_ever: bool = False
    log: str = ""


def build(directory: pathlib.Path) -> str:
    """Compile the shims into `directory`; return what `LD_PRELOAD` has to be."""
    flags = ["-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    libraries: list[str] = []
    for name in ("foldshim", "faultshim"):
        source = pathlib.Path(__file__).with_name(f"{name}.c")
        library = directory / f"{name}.so"
        subprocess.run(["gcc", *flags, "-o", library, source], check=True)
        libraries.append(str(library))
    return ":".join(libraries)


def missing() -> str:
    """Why the shim cannot be built here, or ''."""
    if os.uname().sysname != "Linux":
        return "the fault shim is written for Linux"
    return "" if shutil.which("gcc") else "there is no gcc to build the fault shim"


def arm(fault: Fault, report: int) -> None:
    """Start counting; what is hit is written to the file descriptor `report`."""
    shim = ctypes.CDLL(None)
    shim.faultshim_report_to(report)
    if fault.log and shim.faultshim_log(os.fsencode(fault.log)):
        raise OSError(f"The log {fault.log} cannot be opened.")
    number = _NOT_ERRNO.get(fault.what) or getattr(errno, fault.what)
    shim.faultshim_arm(
        os.fsencode(fault.root),
        ctypes.c_uint(_bits(fault.kinds)),
        ctypes.c_long(fault.nth),
        number,
        fault.for_ever,
    )


def disarm() -> int:
    """Stop, and return how many operations were counted."""
    shim = ctypes.CDLL(None)
    shim.faultshim_disarm.restype = ctypes.c_long
    return shim.faultshim_disarm()


def fold(root: str) -> None:
    """Let everything below a directory ignore letter case, in this process."""
    ctypes.CDLL(None).foldshim_fold(os.fsencode(root))


def note(text: str) -> None:
    """Write a line into the log, if there is one: "the save returned"."""
    ctypes.CDLL(None).faultshim_note(text.encode())


def _bits(kinds: Iterable[str]) -> int:
    return sum(1 << KINDS.index(kind) for kind in kinds)
