"""What is written for other programs, and copied, while file operations fail."""

import hashlib
import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same

from . import shim, workloads
from .shim import Fault


def _to_eqx(source: str, path: str) -> None:
    like = workloads.tree(0)
    interop.to_eqx(source, path, like, overwrite=os.path.exists(path))


def _named(function: Callable[..., Any]) -> Callable[[str, str], None]:
    def write(source: str, path: str) -> None:
        function(source, path, overwrite=os.path.exists(path))

    return write


WRITERS: dict[str, Callable[[str, str], None]] = {
    "new.eqx": _to_eqx,
    "new.npz": _named(interop.to_npz),
    "new.safetensors": _named(interop.to_safetensors),
    "new.msgpack": _named(interop.to_flax),
    "orbax": _named(interop.to_orbax),
    "copy": _named(eqx_ckpt.copy),
}


def write_and_die(name: str, source: str, path: str) -> None:
    """Be killed before what was written takes its name."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.link = os.rename = os.replace = die
    WRITERS[name](source, path)


def digest(path: str) -> str:
    """What is at a path, in a few bytes; nothing if that is missing."""
    if not os.path.lexists(path):
        return ""
    if path.endswith("orbax"):
        # Orbax writes when it began, and where.
        return str(seed_of(interop.open_orbax(path)))
    files = [path]
    if os.path.isdir(path):
        files = [str(p) for p in sorted(pathlib.Path(path).rglob("*")) if p.is_file()]
    data = b"".join(
        os.path.relpath(file, path).encode() + pathlib.Path(file).read_bytes()
        for file in files
        # The versions and the time of the last save differ.
        if not file.endswith("copy/zarr.json")
    )
    return hashlib.sha256(data).hexdigest()


def seed_of(source: str | interop.Source) -> int:
    """Of the tree that a source holds, every value of it."""
    restored = eqx_ckpt.tree_deserialise_leaves(source, workloads.tree(0))
    assert_same(restored, workloads.tree(restored["step"]))
    return restored["step"]


def _prepare(directory: str, name: str) -> tuple[pathlib.Path, ...]:
    """Save two checkpoints, and export each of them to a folder of its own."""
    place = pathlib.Path(directory)
    folders = place / "first", place / "second"
    for seed, folder in enumerate(folders, 1):
        eqx_ckpt.tree_serialise_leaves(place / f"{seed}", workloads.tree(seed))
        folder.mkdir()
        WRITERS[name](f"{place}/{seed}", f"{folder}/{name}")
    return place, *folders


def digests(directory: str, name: str) -> list[str]:
    """As `_prepare`: of what was exported."""
    return [digest(f"{folder}/{name}") for folder in _prepare(directory, name)[1:]]


def replace(directory: str, name: str) -> None:
    """Export the second checkpoint to where the first one is."""
    place = pathlib.Path(directory)
    WRITERS[name](f"{place.parent}/2", f"{place}/{name}")
    shim.note("saved")


Struck = tuple[list[str], Exception | None, str, list[str]]


def strike(
    directory: str, name: str, old: bool, fault: Fault, distance: int
) -> tuple[str, str, list]:
    """Let each operation of an export fail, or each at a distance, one after the other.

    Return the digest of the old file, of the new one, and for each operation that was
    hit: it, the error, the digest of what is there, and what was left over.
    """
    write = WRITERS[name]
    place, first, second = _prepare(directory, name)
    found: list[Struck] = []
    for n in range(1, 1000, distance):
        folder = place / f"struck {n}"
        shutil.copytree(first, folder) if old else folder.mkdir()
        read, report = os.pipe()
        nth = Fault(str(folder), n, fault.what, fault.kinds, fault.for_ever)
        error: Exception | None = None
        shim.arm(nth, report)
        try:
            write(f"{place}/2", f"{folder}/{name}")
        except Exception as e:
            error = e
        shim.disarm()
        os.close(report)
        with open(read, errors="surrogateescape") as lines:
            hits = lines.read().splitlines()
        if not hits:
            break
        left = sorted({*os.listdir(folder)} - {name})
        found.append((hits[:1], error, digest(f"{folder}/{name}"), left))
    before = digest(f"{first}/{name}") if old else ""
    return before, digest(f"{second}/{name}"), found
