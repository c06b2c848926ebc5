"""An earlier checkpoint, whose chunks a save may share."""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..._format.chunk_grid import chunk_keys
from ..._format.manifest import Manifest, zarr_json


# The device of a file, its inode, its bytes, and when they were written.
FileId = tuple[int, int, int, int]


class KnownChunk(NamedTuple):
    """The checksums of a chunk, and its file, if this process knows that."""

    checksums: str
    file: FileId | None = None


@dataclass
class Base:
    """The chunks of a checkpoint by key, and the `zarr.json` of its arrays by name.

    Nothing depends on its truth: a file is compared before it is shared, unless this
    process has written it, or compared it before.

    **Attributes:**

    - `path`: the directory of the arrays; it ends with `/`.
    - `arrays`: the very arrays that this process has saved there, if none can change.
    - `same`: the names of those that were the same in the base before it.
    """

    path: str
    metadata: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[str, KnownChunk] = field(default_factory=dict)
    arrays: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, path: str, manifest: Manifest) -> "Base":
        """That of a checkpoint whose arrays are at a path."""
        base = cls(path)
        arrays = manifest.leaves.items() if manifest.layout == "zarr" else ()
        for name, record in arrays:
            if record.is_array:
                base.metadata[name] = zarr_json(record[:9])
                keys = chunk_keys(record.data_shape, record.chunk_shape)
                for key, checksums in zip(keys, record.checksums, strict=True):
                    base.chunks[f"{name}/{key}"] = KnownChunk(checksums)
        return base
