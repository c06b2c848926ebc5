"""The files of a checkpoint: written, or shared with an earlier one by hard links."""

import functools as ft
import logging
import os
from collections.abc import Collection, Iterable

from ..._errors import CorruptCheckpointError
from ..._format.chunk_grid import chunk_keys
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..calls.safe_files import has_bytes, write_file
from ..interface.base import Base, FileId, KnownChunk
from ..interface.chunk_bytes import Chunk, Encoded


logger = logging.getLogger("eqx_ckpt")


class Folders:
    """The folders of a checkpoint, checked not to be links that lead out of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: set[str] = set()

    def check(self, key: str) -> None:
        """Check the folders of a key, once; called by any thread."""
        folder = key.rpartition("/")[0]
        while folder and folder not in self._known:
            if os.path.islink(self._path + folder):
                raise CorruptCheckpointError(f"{folder} is a symbolic link")
            self._known.add(folder)
            folder = folder.rpartition("/")[0]


class NewFiles:
    """Files below a root, which may be relative to a folder that is open."""

    def __init__(self, within: int | None, root: str) -> None:
        self.within = within
        self.root = root

    def make(self, folder: str) -> None:
        os.mkdir(self.root + folder, dir_fd=self.within)

    def write_metadata(self, name: str, text: bytes) -> None:
        """Write the `zarr.json` of an array."""
        write_file(f"{self.root}{name}/{MANIFEST}", [text], self.within)

    def write(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write a chunk; its checksums are known then."""
        write_file(self.root + chunk.key, encoded, self.within)

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        """Link chunks of an array that is in the base, and return the checksums.

        `None`, and nothing is linked, unless this process knows all of the files.
        """
        return None


class SharedFiles(NewFiles):
    """Files of which those that are equal to files of a base are links to these.

    Whoever has a base's file open for writing, or damages it, would change what was
    linked. So nobody here opens a file again that was committed, and a file is compared
    by its new name, after the link, unless this process knows it.

    **Attributes:**

    - `new`: what is written now, as the base of a later save.
    """

    def __init__(self, files: NewFiles, base: Base, new: Base) -> None:
        super().__init__(files.within, files.root)
        self._base = base
        self._folders = Folders(base.path)
        self.new = new

    def write_metadata(self, name: str, text: bytes) -> None:
        self.new.metadata[name] = text
        key = f"{name}/{MANIFEST}"
        is_linked = self._base.metadata.get(name) == text and self._link(key)
        if is_linked and (self._base.is_copied or self._is_equal(key, [text])):
            return
        super().write_metadata(name, text)

    def write(self, chunk: Chunk, encoded: Encoded) -> None:
        key, file = chunk.key, None
        if self._base.proposed(chunk, encoded, self.new) and self._link(key):
            known, file = self._base.chunks[key], self._file_id(key)
            if file == known.file:
                encoded.checksums = known.checksums
            elif self._is_equal(key, encoded):
                self._base.chunks[key] = KnownChunk(encoded.checksums, file)
            else:
                file = None
        if file is None:
            super().write(chunk, encoded)
            file = self._file_id(key)
        self.new.metadata[chunk.name] = zarr_json(chunk.record[:9])
        self.new.chunks[key] = KnownChunk(encoded.checksums, file)

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        text = zarr_json(record[:9])
        if self._base.metadata.get(name) != text:
            return None
        keys = chunk_keys(record.data_shape, record.chunk_shape)
        found = [""] * len(keys)
        linked: dict[str, KnownChunk] = {}
        for position, key in enumerate(keys):
            if positions is not None and position not in positions:
                continue
            key = f"{name}/{key}"
            known = self._base.chunks.get(key)
            if known is None or not (known.file or self._base.is_copied):
                break
            if not self._link(key):
                break
            linked[key] = known
            if known.file and self._file_id(key) != known.file:
                break
            found[position] = known.checksums
        else:
            self.new.metadata[name] = text
            self.new.chunks.update(linked)
            return found
        for key in linked:
            os.unlink(self.root + key, dir_fd=self.within)
        return None

    def _link(self, key: str) -> bool:
        """Link a file of the base; return whether that was possible."""
        try:
            self._folders.check(key)
            os.link(
                self._base.path + key,
                self.root + key,
                dst_dir_fd=self.within,
                follow_symlinks=False,
            )
        except FileNotFoundError:
            return False  # The base was removed meanwhile.
        except OSError as e:
            # If it is not the link that is impossible, the write fails too.
            _say_once(os.path.dirname(self._base.path.rstrip("/")), e.strerror or "")
            return False
        except CorruptCheckpointError as e:
            _say_once(self._base.path, str(e))
            return False
        return True

    def _is_equal(self, key: str, parts: Iterable[memoryview | bytes]) -> bool:
        """Whether a file that was linked has these bytes; otherwise, it is unlinked."""
        try:
            is_equal = has_bytes(self.root + key, parts, self.within)
        except OSError:
            is_equal = False  # The disk cannot read it.
        if not is_equal:
            os.unlink(self.root + key, dir_fd=self.within)
        return is_equal

    def _file_id(self, key: str) -> FileId:
        found = os.stat(self.root + key, dir_fd=self.within, follow_symlinks=False)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@ft.cache
def _say_once(path: str, reason: str) -> None:
    logger.warning(
        "Files in %s cannot be shared, and are written again: %s.", path, reason
    )
