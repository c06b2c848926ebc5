"""Reading regions of arrays, and comparing every byte with its checksum."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

from .._errors import CorruptCheckpointError
from .._format.chunks import batches, chunk_keys, shape_of, touched
from .._format.leaves import LeafRecord
from .._types import Report
from .buffers import empty
from .chunk_values import read_objects
from .kvstore import (
    array_spec,
    checksum,
    context,
    KvSpec,
    kvstore,
    RegionRead,
    result,
)


_BATCH = 32 * 2**20
_FOLDER = re.compile(r"d|p\d+")
_OF_DATABASE = re.compile(rf"{_FOLDER.pattern}|manifest\..*|[0-9a-f]{{32}}")
# One that lists a few of the last versions has some kB.
_MAX_MANIFEST = 2**20


def read_regions(
    base: KvSpec,
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    arrived: Report | None = None,
) -> list[np.ndarray]:
    """Read regions of arrays into buffers that JAX takes over as they are.

    What is wrong with a leaf is put into `damage` under its name; its array is then not
    to be used. `raise_damage` makes an error of that. `arrived` is told of each region.
    """
    if base["driver"] == "ocdbt" and base["base"]["driver"] == "file":
        problem = _database_problem(base["base"]["path"])
        if problem:
            damage.update({read.name: problem for read in reads})
            return [np.empty(0) for _ in reads]
    if base["driver"] != "file":
        return read_objects(base, reads, damage, arrived)
    import tensorstore as ts

    root = kvstore(base)
    specs: dict[LeafRecord, ts.Spec] = {}
    known: set[str] = set()
    buffers: list[np.ndarray] = []
    reading: list[tuple[str, ts.WriteFutures, int]] = []
    try:
        # While TensorStore reads one batch, the next one is looked through.
        for batch in batches(reads, lambda read: read.nbytes, _BATCH):
            sound = [_is_sound(base, read, known, damage) for read in batch]
            # The metadata are known, so that nothing is read to open an array.
            opening = [
                ts.open(
                    array_spec(read.record, specs),
                    kvstore=root / f"{read.name}/",
                    open=True,
                    assume_metadata=True,
                    context=context(),
                )
                if is_sound and read.nbytes
                else None
                for read, is_sound in zip(batch, sound, strict=True)
            ]
            todo = zip(batch, sound, opening, strict=True)
            for (name, record, region), is_sound, opened in todo:
                shape = shape_of(region) if is_sound else (0,)
                buffers.append(empty(shape, record.data_type))
                if opened is not None:
                    store = result(opened, name)
                    if buffers[-1].shape != record.data_shape:
                        store = store[region]
                    future = ts.array(buffers[-1]).write(store)
                    reading.append((name, future, buffers[-1].nbytes))
        for name, future, nbytes in reading:
            try:
                result(future, name)
            except CorruptCheckpointError as e:
                damage.setdefault(name, str(e))
            if arrived:
                arrived(name, nbytes)
    finally:
        for _, future, _ in reading:
            future.exception()
    return buffers


def _database_problem(path: str) -> str:
    """What a database has that is no file or directory of its own, or ''.

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


def _entries(path: str, prefix: str = "") -> Iterator[tuple[os.DirEntry[str], str]]:
    """All of a database, and what it is called; a directory before what is in it."""
    with os.scandir(path) as entries:
        for entry in entries:
            if _OF_DATABASE.fullmatch(entry.name):
                yield entry, prefix + entry.name
                if entry.is_dir():
                    yield from _entries(entry.path, f"{prefix}{entry.name}/")


def _is_sound(
    base: KvSpec, read: RegionRead, known: set[str], damage: dict[str, str]
) -> bool:
    """Compare the tails of the chunks of a region with the manifest.

    TensorStore compares the checksum of a chunk with its content, which does not show
    that two chunks changed places. And it is told nothing that could abort the process,
    such as a chunk shape that its files do not have.
    """
    record = read.record
    shape, chunk = record.data_shape, record.chunk_shape
    keys = chunk_keys(shape, chunk)
    try:
        for i in touched(read.region, shape, chunk) if keys else ():
            key = f"{read.name}/{keys[i]}"
            if key in known:
                continue
            _check_folders(base, key, known)
            if checksum(base, key, record, look_through=True) != record.crc32c[i]:
                raise CorruptCheckpointError(
                    f"{keys[i]} is not the chunk that was saved"
                )
            known.add(key)
    except CorruptCheckpointError as e:
        damage.setdefault(read.name, str(e))
        return False
    return True


def _check_folders(base: KvSpec, key: str, known: set[str]) -> None:
    """No folder of a checkpoint is a link that leads out of it."""
    folder = key.rpartition("/")[0]
    while folder and folder not in known:
        if os.path.islink(base["path"] + folder):
            raise CorruptCheckpointError(f"{folder} is a symbolic link")
        known.add(folder)
        folder = folder.rpartition("/")[0]
