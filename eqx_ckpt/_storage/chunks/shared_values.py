"""The chunks of a save in a store that are in earlier attempts of its run."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from ..._errors import CheckpointError
from ..._format.chunk_grid import chunk_keys
from ..._format.leaf_record import CHECKSUM_DIGITS, LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..._format.manifest_parser import HEAD_BYTES
from ..._format.references import attempt_at, INCREMENTAL, pin_of, SWEPT
from ..calls.threads import at_once
from ..interface.base import Base, KnownChunk
from ..interface.chunk_bytes import Chunk, Encoded
from ..interface.committed_manifest import root_of
from ..interface.place import run_of, Storage


logger = logging.getLogger("eqx_ckpt")


# Writes a value of a key below a location.
Put: TypeAlias = Callable[[Storage, str, bytes], None]


class SharedValues:
    """What a save refers to, in place of writing it again.

    A chunk is known by the hash of its content, and is seen to be there. It is not read
    again, as all of the base would have to be.

    **Attributes:**

    - `new`: what is saved now, as the base of a later save.
    """

    def __init__(self, place: Storage, base: Base, new: Base) -> None:
        self._place = place
        self._base = base
        self.new = new
        new.path = place.spec["path"]
        self._own = attempt_at(new.path)
        self._known: Mapping[str, KnownChunk] | None = None

    def begin(self, put: Put) -> None:
        """Say what this attempt may refer to, so that nobody removes it; once."""
        if self._known is not None:
            return
        self._known = {}
        try:
            self._known = self._pinned(put)
        except (OSError, CheckpointError) as e:
            logger.warning("Nothing is shared with %s: %s", self._base.path, e)

    def _pinned(self, put: Put) -> Mapping[str, KnownChunk]:
        base, known = attempt_at(self._base.path), self._base.chunks
        attempts = {chunk.attempt for chunk in known.values()}
        if not base or not attempts:
            return {}
        run = run_of(run_of(self._place))
        put(run, INCREMENTAL, b"1")
        put(self._place, *pin_of(attempts))
        # Whoever has deleted it before, has not seen that. Nobody does so after this.
        step, _, root = base.partition("/")
        if root_of(run.read(f"{step}/{MANIFEST}", HEAD_BYTES) or b"") != root:
            return {}
        listed = at_once(lambda attempt: (run / attempt).list_keys(), attempts)
        # A manager that marks an attempt later than that sees what was said here.
        there = {
            attempt + key
            for attempt, keys in listed.items()
            if SWEPT not in keys
            for key in keys
        }
        return {
            key: chunk for key, chunk in known.items() if chunk.attempt + key in there
        }

    def find(self, chunk: Chunk, encoded: Encoded) -> str:
        """The checksums of an equal chunk, and its attempt; `''` if there is none."""
        known = (self._known or {}).get(chunk.key)
        if known is None or not self._base.proposed(chunk, encoded, self.new):
            return ""
        return known.checksums + known.attempt

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        """The same of chunks of an array that is that of the base."""
        if self._base.metadata.get(name) != zarr_json(record[:9]):
            return None
        keys = chunk_keys(record.data_shape, record.chunk_shape)
        found = [""] * len(keys)
        for position in range(len(keys)) if positions is None else positions:
            known = (self._known or {}).get(f"{name}/{keys[position]}")
            if known is None:
                return None
            found[position] = known.checksums + known.attempt
        for key, text in zip(keys, found, strict=True):
            if text:
                self._note(name, record, f"{name}/{key}", text)
        return found

    def note(self, chunk: Chunk, text: str) -> None:
        """Note that a chunk is here, or in the attempt that follows its checksums."""
        self._note(chunk.name, chunk.record, chunk.key, text)

    def _note(self, name: str, record: LeafRecord, key: str, text: str) -> None:
        self.new.metadata[name] = zarr_json(record[:9])
        checksums, attempt = text[:CHECKSUM_DIGITS], text[CHECKSUM_DIGITS:]
        self.new.chunks[key] = KnownChunk(checksums, attempt=attempt or self._own)
