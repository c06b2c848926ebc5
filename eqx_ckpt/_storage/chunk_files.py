"""Arrays whose chunks are files, written and read by plain system calls."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._errors import CorruptCheckpointError, LeafNameError
from .._format.chunks import chunk_keys
from .._format.leaves import LeafRecord
from .._format.manifest import array_type, MANIFEST, ZarrTexts
from .._types import Checksums, Report
from .chunk_bytes import Wanted
from .chunk_codec import Piece, stored
from .crew import Crew, MAX_IN_FLIGHT
from .files import File, files_of, of_leaf, write_file
from .kvstore import context
from .storage import ArrayWrite, Chunks, Storage


# What comes around the name of a leaf in a path: `/`, and the name of an attempt.
_AROUND = 39 + 16
_MAX_PATH = 4095


class ChunkFiles(Chunks):
    """Each array is a folder, and each chunk a file in it."""

    def __init__(self, place: Storage) -> None:
        self.place = place
        self._root = place.spec["path"]
        self._folders = {""}

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        above = len(os.fsencode(self._root)) + _AROUND
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
        context()  # Raises in a forked process, which must not compress.
        checksums: Checksums = {write.name: {} for write in writes}
        texts = ZarrTexts()
        if not create:
            # Process 0 may have removed it, if it did not wait; `gather` will say so.
            os.makedirs(self._root, exist_ok=True)

        def write_piece(piece: Piece) -> None:
            try:
                for chunk, parts in stored([piece]):
                    last = write_file(self._root + chunk.key, parts)
                    checksums[chunk.name][chunk.position] = last.hex()
            except OSError as e:
                raise of_leaf(e, piece.name) from None

        def heard(piece: Piece) -> None:
            if written:
                written(piece.name, piece.array.nbytes)

        with Crew(write_piece, MAX_IN_FLIGHT, heard) as crew:
            for name, record, shards in writes:
                try:
                    self._make(name)
                    if create:
                        text = texts[array_type(record)]
                        write_file(f"{self._root}{name}/{MANIFEST}", [text])
                except OSError as e:
                    raise of_leaf(e, name) from None
                for region, array in shards:
                    if array.size:
                        piece = Piece(name, record, region, array)
                        crew.put(piece, array.nbytes)
            crew.finish()
        return checksums

    def _make(self, folder: str) -> None:
        if folder in self._folders:
            return
        self._make(folder.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):  # By another process of the job.
            os.mkdir(self._root + folder)
        self._folders.add(folder)

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, File]]:
        return files_of(self._root, wanted)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return self.place.read_all(keys)
