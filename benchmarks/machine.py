"""The machine and the versions, which the numbers mean nothing without."""

import os
import platform
from pathlib import Path

from . import table


def machine(folder: Path) -> str:
    """A sentence on this machine, and on the disk of a folder."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = ("jax", "tensorstore", "equinox", "orbax-checkpoint", "safetensors", "flax")
    return (
        f"{os.cpu_count()} cores ({_processor()}), {memory:.0f} GiB, "
        f"{_file_system(folder)}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}; "
        + ", ".join(f"{name} {table.version(name)}" for name in names)
        + "."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def _file_system(folder: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    around = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    return max(around, key=lambda m: len(m[1]))[2]
