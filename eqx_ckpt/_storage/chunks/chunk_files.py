"""Arrays whose chunks are files, written and read by plain system calls."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastcrc import crc32

from ..._errors import CorruptCheckpointError, LeafNameError
from ..._format.chunk_grid import chunk_keys
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MANIFEST, zarr_json
from ..._types import Checksums, Report
from ..calls.safe_files import fill, of_leaf, open_existing, write_file
from ..calls.worker_threads import Crew, MAX_IN_FLIGHT, SMALL
from ..interface.chunk_bytes import CHECKSUM_BYTES, Chunk, Wanted
from ..interface.place import ArrayWrite, Chunks, Storage
from .chunk_codec import Piece, stored


# What comes around the name of a leaf in a path: `/`, and the name of an attempt.
_AROUND = 39 + 16


_MAX_PATH = 4095


# A disk that keeps one thread waiting so long gets several that wait.
_PATIENCE = 1.0  # seconds


class _Folders:
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


class File:
    """A chunk in a file; a context in which the file is open.

    It is read with plain calls: under a mapping, a failing disk or a truncated file
    would end the process with a signal.
    """

    def __init__(self, path: str, chunk: Chunk, folders: _Folders) -> None:
        self._path = path
        self._chunk = chunk
        self._folders = folders
        self.nbytes = 0

    def __enter__(self) -> None:
        key = self._chunk.key
        self._folders.check(key)
        self._fd, self.nbytes = open_existing(self._path, key)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        fill(self._fd, self._chunk.key, buffers, offset)


@dataclass(eq=False)
class ChunkFiles(Chunks):
    """Each array is a folder, and each chunk a file in it."""

    place: Storage
    has_folders = True
    _folders: set[str] = field(default_factory=set, init=False)

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
        writes: Sequence[ArrayWrite],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        checksums: Checksums = {write.name: {} for write in writes}
        if not create:
            # Process 0 may have removed it, if it did not wait; `gather` will say so.
            os.makedirs(self.place.spec["path"], exist_ok=True)

        def write_piece(piece: Piece) -> None:
            self._write(piece, checksums[piece.name])

        def heard(piece: Piece) -> None:
            if written:
                written(piece.name, piece.array.nbytes)

        crew: Crew[Piece] | None = None
        wall, cpu = time.perf_counter(), time.thread_time()
        with contextlib.ExitStack() as stack:
            for name, record, shards in writes:
                self._begin(name, record, create)
                for region, array in shards:
                    if array.size == 0:
                        continue
                    piece = Piece(name, record, region, array)
                    waited = time.perf_counter() - wall - (time.thread_time() - cpu)
                    if array.nbytes < SMALL and waited <= _PATIENCE:
                        self._write(piece, checksums[name])
                        if written:
                            written(name, array.nbytes)
                        continue
                    if crew is None:
                        crew = stack.enter_context(
                            Crew(write_piece, MAX_IN_FLIGHT, heard)
                        )
                    crew.put(piece, array.nbytes)
            if crew:
                crew.finish()
        return checksums

    def _begin(self, name: str, record: LeafRecord, create: bool) -> None:
        """Make the folder of an array, and its metadata.

        Never the folder of all arrays: if that is gone, so are some of them.
        """
        root = self.place.spec["path"]
        try:
            for folder in itertools.accumulate(name.split("/"), "{}/{}".format):
                if folder not in self._folders:
                    self._folders.add(folder)
                    with contextlib.suppress(FileExistsError):  # By another process.
                        os.mkdir(root + folder)
            if create:
                text = zarr_json(record[:9])
                write_file(f"{root}{name}/{MANIFEST}", [text])
        except OSError as e:
            raise of_leaf(e, name) from None

    def _write(self, piece: Piece, checksums: dict[int, str]) -> None:
        """Write the chunks of a piece, and add their checksums, by position."""
        name, record, _, array = piece
        root = self.place.spec["path"]
        is_plain = record.compression is None and array.nbytes < SMALL
        try:
            if is_plain and array.shape == record.data_shape == record.chunk_shape:
                # In one step, as there may be thousands of them.
                (key,) = chunk_keys(record.data_shape, record.chunk_shape)
                data = array.tobytes()
                checksum = crc32.iscsi(data).to_bytes(CHECKSUM_BYTES, "little")
                write_file(f"{root}{name}/{key}", [data + checksum])
                checksums[0] = checksum.hex()
                return
            for chunk, parts in stored([piece]):
                checksum = write_file(root + chunk.key, parts)
                checksums[chunk.position] = checksum.hex()
        except OSError as e:
            raise of_leaf(e, name) from None

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
        return files_of(self.place.spec["path"], wanted)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return self.place.read_all(keys)


def files_of(path: str, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
    folders = _Folders(path)
    for one in wanted:
        yield one, File(path, one.chunk, folders)
