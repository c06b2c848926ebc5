"""A stored checkpoint: its readers, and whether its metadata are intact."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import CheckpointNotFoundError, CorruptCheckpointError
from .._format.chunk_grid import relative
from .._format.leaf_record import CRC32C_DIGITS, LeafRecord
from .._format.manifest import MANIFEST, Manifest, zarr_json
from .._format.manifest_parser import check_source, from_bytes, HEAD, HEAD_BYTES
from .._format.source import raise_damage, RegionRead, Source
from .._lazy import Array
from .._storage.chunks.chunk_reads import read_chunks
from .._storage.interface.base import Base
from .._storage.interface.chunk_bytes import chunks_of, content_hash
from .._storage.interface.committed_manifest import read_committed
from .._storage.interface.place import Storage, StoredChunks
from .._storage.interface.referred_chunks import stored_chunks
from .._storage.interface.sure_reads import listed_and_missing
from .._storage.locate import locate
from .._types import no_path, PathLike, Report, SHARING_LAYOUTS
from .recording_source import find_recorded, Recorded


_MAX_ARRAY_METADATA = 2**16


def check_array_metadata(
    chunks: StoredChunks, records: Mapping[str, LeafRecord], damage: dict[str, str]
) -> None:
    """Compare the `zarr.json` of leaves, which no restore needs, with the manifest."""
    # One answer of a store is not enough.
    if doubtful := _damaged_metadata(chunks, records, set()):
        again = {name: records[name] for name in doubtful}
        damage.update(_damaged_metadata(chunks, again, chunks.listed()))


def _damaged_metadata(
    chunks: StoredChunks, records: Mapping[str, LeafRecord], listed: set[str]
) -> dict[str, str]:
    keys = [f"{name}/{MANIFEST}" for name in records]
    damage: dict[str, str] = {}
    for name, key, data in zip(records, keys, chunks.read_all(keys), strict=True):
        if data is None and key in listed:
            raise listed_and_missing(chunks.place, key)
        if problem := _metadata_problem(key, data, zarr_json(records[name][:9])):
            damage[name] = problem
    return damage


def _metadata_problem(
    key: str, data: bytes | CorruptCheckpointError | None, expected: bytes
) -> str:
    if data == expected:
        return ""
    if data is None:
        return f"{key} is missing"
    if isinstance(data, CorruptCheckpointError):
        return f"{key}: {data}"
    try:
        is_equal = len(data) <= _MAX_ARRAY_METADATA and (
            json.loads(data) == json.loads(expected)
        )
    except (ValueError, RecursionError) as e:
        return f"{key}: {e}"
    return "" if is_equal else f"{key} is not what was saved"


class Checkpoint(Source):
    """A committed checkpoint, as it is now.

    **Attributes:**

    - `place`: where it is.
    - `chunks`: its arrays.
    - `digest`: of its manifest.
    """

    def __init__(self, path: PathLike | Storage) -> None:
        place = path if isinstance(path, Storage) else locate(path)
        try:
            data, manifest = read_committed(place, from_bytes)
        except CheckpointNotFoundError as e:
            raise CheckpointNotFoundError(f"{e} {place.explain()}".rstrip()) from None
        self.place, self._head = place, data[:HEAD_BYTES]
        head = HEAD.match(self._head)
        assert head is not None
        self.digest = head[2].decode()
        self.chunks = stored_chunks(place, manifest)
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        return read_chunks(self.chunks, reads, damage, report)

    def read_into(
        self,
        reads: Sequence[RegionRead],
        targets: Sequence[Array],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> None:
        read_chunks(self.chunks, reads, damage, report, targets)

    @property
    def has_checksums(self) -> bool:
        return True

    @property
    def version(self) -> str:
        return self.digest

    def has_changed(self) -> bool:
        # The head has the digest of the manifest, which has all checksums.
        return self.place.read(MANIFEST, HEAD_BYTES) != self._head

    def check_hashes(
        self,
        reads: Sequence[RegionRead],
        arrays: Sequence[Array],
        damage: dict[str, str],
    ) -> None:
        """Compare whole chunks that were read with the hashes of what was saved."""
        for read, array in zip(reads, arrays, strict=True):
            if read.name not in damage and (key := other_chunk(read, array)):
                damage[read.name] = (
                    f"{key} was changed, its checksum too: its hash differs"
                )

    def check_the_rest(self, damage: dict[str, str]) -> None:
        """Raise for damage to files that no restore reads, and for all other damage."""
        # Of an array that has chunks elsewhere, there is no `zarr.json`.
        without = damage.keys() | self._manifest.references.keys()
        arrays = self._manifest.leaves.items()
        undamaged = {n: r for n, r in arrays if r.is_array and n not in without}
        check_array_metadata(self.chunks, undamaged, damage)
        raise_damage(damage, self)
        self.chunks.verify()

    def as_base(self) -> Base:
        """It as the base of a save; one whose layout shares nothing has no chunks."""
        return Base.of(self.chunks.place.spec["path"], self._manifest)

    def __str__(self) -> str:
        return str(self.chunks)


def other_chunk(read: RegionRead, array: Array) -> str:
    """The key of a chunk whose content has another hash than in the record, or `''`."""
    for chunk in chunks_of(*read):
        content = array[(*relative(chunk.region, read.region), ...)]
        expected = read.record.checksums[chunk.position][CRC32C_DIGITS:]
        if content_hash(content) != expected:
            return chunk.key
    return ""


def base_at(path: PathLike, target: Storage) -> Base:
    """A checkpoint as the base of a save, which may share its chunks."""
    place = locate(path)
    found = Checkpoint(place)
    problem = target.why_apart(place)
    if found.manifest.layout not in SHARING_LAYOUTS:
        problem = f"it has layout={found.manifest.layout!r}, and not 'zarr'"
    if problem:
        raise ValueError(
            f"Nothing can be shared with `base`, {place}: {problem}. Pass a different "
            "`base`, or leave it out."
        )
    return found.as_base()


def check_is_source(source: Any) -> None:
    """Raise if a value is neither a path nor a source."""
    if not isinstance(source, str | os.PathLike | Source):
        raise no_path(source, "that of a checkpoint, or an `eqx_ckpt.interop.Source`")


def opened(source: PathLike | Source) -> Source:
    """The checkpoint at a path, or the recording, as it is now."""
    check_is_source(source)
    if isinstance(source, Checkpoint | Recorded):
        return source
    if isinstance(source, Source):
        check_source(source.manifest, str(source))
        return source
    try:
        return Checkpoint(source)
    except CheckpointNotFoundError:
        recorded = find_recorded(locate(source))
        if recorded is None:
            raise
        return recorded
