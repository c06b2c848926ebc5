"""A checkpoint at rest: its manifest, its identity, and whether it is whole."""

import contextlib
import gc
import json
import os
import re
from collections.abc import Generator, Mapping
from typing import Any

from fastcrc import crc32

from .._errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.leaves import LeafRecord
from .._format.manifest import MANIFEST, zarr_metadata
from .._format.parse import HEAD, HEAD_BYTES, is_foreign, metadata_from_bytes
from .key_values import check_bucket, list_keys, read_key, read_keys
from .kvstore import KvSpec, shown


# The paths that this process is reading. A list is changed in one step, without a lock.
being_read: list[str] = []
os.register_at_fork(after_in_child=being_read.clear)

_ROOT = re.compile(rb'\n"root": "(@[0-9a-f]{32}/)",\n')
_DATABASE_MANIFEST = re.compile(r"(^|/)manifest\.[^/]*$")
_MAX_ARRAY_METADATA = 2**16


def read_metadata(base: KvSpec) -> tuple[str, Any]:
    """The root and the metadata of a checkpoint, without the rest of its manifest."""
    data = manifest_of(base)
    metadata = metadata_from_bytes(data, shown(base))
    root = _ROOT.search(data)
    return root[1].decode() if root else "", metadata


def manifest_of(base: KvSpec) -> bytes:
    data = read_key(base, MANIFEST)
    if data is None:
        if base["driver"] not in ("file", "memory"):
            # Without the bucket there is no key either; only a listing tells.
            list_keys({**base, "path": base["path"] + MANIFEST})
            check_bucket(base)
        raise CheckpointNotFoundError(
            f"No committed checkpoint at {shown(base)}: there is no `{MANIFEST}`."
        )
    return data


def is_checkpoint(base: KvSpec) -> bool:
    """Whether a checkpoint was committed here; a damaged one was."""
    try:
        head = read_key(base, MANIFEST, HEAD_BYTES)
        if head is None or HEAD.match(head):
            return head is not None
        return not is_foreign(read_key(base, MANIFEST) or b"")
    except CorruptCheckpointError:
        return True


@contextlib.contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Thousands of small objects are made, of which none is garbage.

    Going through them again and again is a seventh of the time for 5,000 leaves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identity(base: KvSpec) -> object:
    """Something that is equal only for the same checkpoint, and `None` for none."""
    if base["driver"] != "file":
        return read_key(base, MANIFEST, HEAD_BYTES)
    try:
        status = os.stat(base["path"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def check_array_metadata(
    base: KvSpec, records: Mapping[str, LeafRecord], damage: dict[str, str]
) -> None:
    """Compare the `zarr.json` of leaves, which no restore needs, with the manifest."""
    keys = {f"{name}/{MANIFEST}": name for name in records}
    for (key, name), data in zip(
        keys.items(), read_keys(base, list(keys)), strict=True
    ):
        if isinstance(data, CorruptCheckpointError):
            damage[name] = f"{key}: {data}"
            continue
        try:
            if data is None:
                damage[name] = f"{key} is missing"
            elif len(data) > _MAX_ARRAY_METADATA or json.loads(data) != zarr_metadata(
                records[name]
            ):
                damage[name] = f"{key} is not what was saved"
        except (ValueError, RecursionError) as e:
            damage[name] = f"{key}: {e}"


def check_database(base: KvSpec) -> None:
    """Raise if a manifest of a database is damaged, of which restores read the last."""
    place = base["base"]
    keys = [key for key in list_keys(place) if _DATABASE_MANIFEST.search(key)]
    for key, data in zip(keys, read_keys(place, keys), strict=True):
        # The last four bytes are the checksum of all the others.
        is_whole = isinstance(data, bytes) and data[-4:] == crc32.iscsi(
            data[:-4]
        ).to_bytes(4, "little")
        if not is_whole:
            raise CorruptCheckpointError(
                f"{shown(base)} is damaged. All leaves are what was saved, but {key} "
                "of their database is not. Restore them, and save them again."
            )
