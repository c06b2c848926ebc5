"""A stored checkpoint: its readers, and whether its metadata are intact."""

import contextlib
import gc
import json
import os
from collections.abc import Generator, Mapping

from .._errors import CorruptCheckpointError
from .._format.leaves import LeafRecord
from .._format.manifest import MANIFEST, zarr_json
from .storage import Chunks


# The paths that this process is reading. Changes to a list are atomic, without a lock.
being_read: list[str] = []
os.register_at_fork(after_in_child=being_read.clear)

_MAX_ARRAY_METADATA = 2**16


@contextlib.contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Pause the garbage collector: of thousands of new objects, none is garbage.

    Scanning them repeatedly takes a seventh of the time for 5,000 leaves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_array_metadata(
    chunks: Chunks, records: Mapping[str, LeafRecord], damage: dict[str, str]
) -> None:
    """Compare the `zarr.json` of leaves, which no restore needs, with the manifest."""
    keys = {f"{name}/{MANIFEST}": name for name in records}
    for (key, name), data in zip(
        keys.items(), chunks.read_all(list(keys)), strict=True
    ):
        if isinstance(data, CorruptCheckpointError):
            damage[name] = f"{key}: {data}"
            continue
        expected = zarr_json(records[name][:9])
        if data == expected:
            continue
        try:
            if data is None:
                damage[name] = f"{key} is missing"
            elif len(data) > _MAX_ARRAY_METADATA or (
                json.loads(data) != json.loads(expected)
            ):
                damage[name] = f"{key} is not what was saved"
        except (ValueError, RecursionError) as e:
            damage[name] = f"{key}: {e}"
