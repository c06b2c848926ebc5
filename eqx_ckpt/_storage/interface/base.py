"""An earlier checkpoint, whose chunks a save may share."""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..._format.chunk_grid import chunk_keys
from ..._format.leaf_record import CRC32C_DIGITS
from ..._format.manifest import Manifest, zarr_json
from ..._format.references import attempt_at
from ..._types import SHARING_LAYOUTS
from .chunk_bytes import Chunk, Encoded


# The device of a file, its inode, its bytes, and when they were written.
FileId = tuple[int, int, int, int]


class KnownChunk(NamedTuple):
    """The checksums of a chunk, and where it is.

    On a disk, `file`, if this process knows that; in a store, the `attempt` of the run.
    """

    checksums: str
    file: FileId | None = None
    attempt: str = ""


@dataclass
class Base:
    """The chunks of a checkpoint by key, and the `zarr.json` of its arrays by name.

    Nothing depends on its truth: a file is compared before it is shared, unless this
    process has written it, or compared it before, or the base `is_copied`.

    **Attributes:**

    - `path`: the directory of the arrays; it ends with `/`.
    - `arrays`: the very arrays that this process has saved there, if none can change.
    - `fingerprints`: of arrays, as they were on their devices.
    - `same`: the names of arrays that are known to be those of the base before it.
    - `changed`: the names of arrays with a chunk that differs from that of the base.
    - `is_copied`: whether all of it is taken as it is there, damage included.
    """

    path: str
    metadata: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[str, KnownChunk] = field(default_factory=dict)
    arrays: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    is_copied: bool = False

    @classmethod
    def of(cls, path: str, manifest: Manifest) -> "Base":
        """That of a checkpoint whose arrays are at a path."""
        base, own = cls(path), attempt_at(path)
        arrays = manifest.leaves.items() if manifest.layout in SHARING_LAYOUTS else ()
        for name, record in arrays:
            if record.is_array:
                base.metadata[name] = zarr_json(record[:9])
                keys = chunk_keys(record.data_shape, record.chunk_shape)
                attempts = manifest.references.get(name, ("",) * len(keys))
                for key, checksums, attempt in zip(
                    keys, record.checksums, attempts, strict=True
                ):
                    known = KnownChunk(checksums, attempt=attempt or own)
                    base.chunks[f"{name}/{key}"] = known
        return base

    def proposed(self, chunk: Chunk, encoded: Encoded, new: "Base") -> bool:
        """Whether a chunk of `new` seems to be that of this one; note it if not."""
        known = self.chunks.get(chunk.key)
        if known is None or self.metadata[chunk.name] != zarr_json(chunk.record[:9]):
            return False
        if chunk.name in new.same:
            return True
        if encoded.content_hash() == known.checksums[CRC32C_DIGITS:]:
            return True
        new.changed.add(chunk.name)
        return False

    def learn(self, new: "Base") -> None:
        """Note what a checkpoint shows of the arrays that it shares with this one."""
        differ = {
            key.rpartition("/")[0]
            for key, chunk in new.chunks.items()
            if self.chunks.get(key) != chunk
        }
        for name in new.arrays.keys() - differ:
            self.arrays[name] = new.arrays[name]
            if name in new.fingerprints:
                self.fingerprints[name] = new.fingerprints[name]
