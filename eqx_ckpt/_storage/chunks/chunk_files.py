"""Arrays whose chunks are files, written and read by plain system calls."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.chunk_grid import chunk_keys
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..._types import Checksums, Report
from ..calls.safe_files import of_leaf, open_existing, size_of_existing
from ..calls.worker_threads import MAX_IN_FLIGHT, Workers
from ..interface.base import Base
from ..interface.chunk_bytes import (
    check_size,
    Chunk,
    no_checksums,
    Piece,
    stored,
    Wanted,
)
from ..interface.place import Chunks, Storage
from .shared_files import Folders, NewFiles, SharedFiles


# What comes around the name of a leaf in a path: `/`, and the name of an attempt.
_AROUND = 39 + 16


_MAX_PATH = 4095


class File:
    """A chunk in a file; a context in which the file is open.

    It is read with plain calls: under a mapping, a failing disk or a truncated file
    would end the process with a signal.
    """

    def __init__(self, path: str, chunk: Chunk, folders: Folders) -> None:
        self._path = path
        self._chunk = chunk
        self._folders = folders
        self.nbytes = 0

    def __enter__(self) -> None:
        key = self._chunk.key
        self._folders.check(key)
        self._file = open_existing(self._path, key)
        self.nbytes = self._file.nbytes

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._file.fill(buffers, offset, self.nbytes)


@dataclass(eq=False)
class ChunkFiles(Chunks):
    """Each array is a folder, and each chunk a file in it."""

    place: Storage
    has_folders = True
    _folders: set[str] = field(default_factory=set, init=False)
    _files: NewFiles = field(init=False)

    def __post_init__(self) -> None:
        self._files = NewFiles(None, self.place.spec["path"])

    def write_within(self, folder: int) -> None:
        self._files = NewFiles(folder, "")

    def share(self, base: Base, new: Base) -> None:
        self._files = SharedFiles(self._files, base, new)

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        above = len(os.fsencode(self.place.spec["path"])) + _AROUND
        for name, record in leaves.items():
            keys = chunk_keys(record.data_shape, record.chunk_shape)[-1:]
            length = above + len(name) + max(map(len, (MANIFEST, *keys)))
            if length > _MAX_PATH and record.is_array:
                raise LeafNameError(
                    f"Nothing was saved: files of the leaf {name[:80] + '...'!r}, "
                    f"whose name has {len(name)} bytes, would have paths of {length} "
                    f"bytes, and the system takes {_MAX_PATH}. Pass `layout='ocdbt'`, "
                    "which has names of any length, or nest the PyTree less."
                )

    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        checksums = no_checksums(arrays)

        def on_done(piece: Piece, found: dict[int, str]) -> None:
            for position, checksum in found.items():
                checksums[piece.name][position] = checksum
            if written:
                written(piece.name, piece.array.nbytes)

        with Workers(self._write, MAX_IN_FLIGHT, on_done) as workers:
            for name, record in arrays.items():
                self._begin(name, record, create)
            for piece in pieces:
                workers.put(piece, piece.array.nbytes)
            workers.finish()
        return checksums

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        with contextlib.suppress(OSError):  # The write fails too, in its own thread.
            self._make_folders(name)
            return self._files.adopt(name, record, positions)
        return None

    def _make_folders(self, name: str) -> None:
        """Make the folder of an array, and those that it is in.

        Never the folder of all arrays: if that is gone, so are some of them.
        """
        missing: list[str] = []
        while name and name not in self._folders:
            missing.append(name)
            name = name.rpartition("/")[0]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # By another process.
                self._files.make(folder)
            self._folders.add(folder)

    def _begin(self, name: str, record: LeafRecord, create: bool) -> None:
        """Make the folder of an array, and its metadata."""
        try:
            self._make_folders(name)
            if create:
                self._files.write_metadata(name, zarr_json(record[:9]))
        except OSError as e:
            raise of_leaf(e, name, self.place.url()) from None

    def _write(self, piece: Piece) -> dict[int, str]:
        """Write the chunks of a piece; return their checksums, by position."""
        found: dict[int, str] = {}
        try:
            for chunk, encoded in stored(piece):
                self._files.write(chunk, encoded)
                found[chunk.position] = encoded.checksums
        except OSError as e:
            raise of_leaf(e, piece.name, self.place.url()) from None
        return found

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
        return files_of(self.place.spec["path"], wanted)

    def missing(self, wanted: Iterable[Wanted]) -> str:
        """As elsewhere; no file is opened for its size."""
        path = self.place.spec["path"]
        folders = Folders(path)
        try:
            for chunk, _ in wanted:
                folders.check(chunk.key)
                check_size(chunk, size_of_existing(path, chunk.key))
        except CorruptCheckpointError as e:
            return str(e)
        return ""

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return self.place.read_all(keys)


def files_of(path: str, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
    folders = Folders(path)
    for one in wanted:
        yield one, File(path, one.chunk, folders)
