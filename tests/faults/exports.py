"""What is written for other programs, and copied, while file operations fail."""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import eqx_ckpt
from eqx_ckpt import interop

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
    "copy": _named(eqx_ckpt.copy),
}


def digest(path: str) -> str:
    """What is at a path, in a few bytes; nothing if that is missing."""
    if not os.path.lexists(path):
        return ""
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


Struck = tuple[list[str], Exception | None, str, list[str]]


def strike(directory: str, name: str, old: bool, fault: Fault) -> tuple[str, str, list]:
    """Let each operation of an export fail, one after the other.

    Return the digest of the old file, of the new one, and for each operation that was
    hit: it, the error, the digest of what is there, and what was left over.
    """
    place, write = pathlib.Path(directory), WRITERS[name]
    for seed in (1, 2):
        eqx_ckpt.tree_serialise_leaves(place / f"{seed}", workloads.tree(seed))
    first, second = place / "first", place / "second"
    for folder, seed in ((first, 1), (second, 2)):
        folder.mkdir()
        write(f"{place}/{seed}", f"{folder}/{name}")
    found: list[Struck] = []
    for n in range(1, 200):
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
