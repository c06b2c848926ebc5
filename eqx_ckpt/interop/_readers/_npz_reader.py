"""Archives of `numpy.savez` and `numpy.savez_compressed`."""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..._errors import CorruptCheckpointError
from ..._format.leaf_names import encode
from ..._format.leaf_record import CannotSave
from ..._storage.calls.threads import ForkedLock
from ..._storage.interface.foreign_file import (
    ForeignFile,
    read_bytes,
    read_exactly,
    Reads,
)
from ..._storage.locate import locate_file
from ..._types import PathLike
from ._file_extents import Extent, FileSource, ReadInto, Run
from ._foreign_records import array_record, corrupt, manifest_of, Named, split
from ._npy_header import Npy, read_npy


FORMAT = "npz file"


SEPARATORS = "/."


# A flag of a member.
_UTF8 = 0x800


# Bytes of a local header before its name, and the most that may follow.
_LOCAL = 30


_PIECE = 2**20


# Read at the end of an archive: more than its last record, with a comment.
_TAIL = 2**17


# Read of a member in advance: its own header, and that of its array, as a rule.
_HEAD = 512


# The last record of an archive, and the one before that tells where a larger one is,
# which has so many bytes.
_END = struct.Struct("<4s4H2LH")


_END64 = struct.Struct("<4sLQL")


_RECORD64 = 56


# Readers of a member that are kept, as a rule one for each thread.
_MOST_READERS = 4


# zlib cannot compress data further than this.
_MAX_RATIO = 1032


_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def open_npz(path: PathLike) -> FileSource:
    """Open an archive of `numpy.savez`, compressed or not.

    Keys are split at `/` and `.`, and digits become positions: `"layers.0.weight"` is
    the leaf `layers/0/weight`. Opening reads headers only. A leaf of a compressed
    archive is decompressed up to the last row that is needed.

    **Arguments:**

    - `path`: an `.npz` file; or its URL: `s3://`, `gs://`, or `https://` of a server
        that sends parts of files.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. 64-bit arrays are restored as NumPy arrays, unless `like` has JAX arrays.
    Strings, arrays with fields, and arrays whose dtype NumPy has not stored, such as
    bfloat16, are listed in `manifest.unsaved` and cannot be restored; nor can pickled
    objects, which are never unpickled.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such file.
    - [`eqx_ckpt.CorruptCheckpointError`][]: it is not a valid archive.
    - [`eqx_ckpt.LeafNameError`][]: after splitting, two keys are equal, or one is
        inside another.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np

        np.savez("arrays.npz", **{"encoder/w": np.ones(3, np.float32)})
        arrays = eqx_ckpt.interop.open_npz("arrays.npz")
        like = {"encoder": {"w": jnp.zeros(3)}}
        tree = eqx_ckpt.tree_deserialise_leaves(arrays, like)
        ```
    """
    file = locate_file(path)
    leaves: list[Named] = []
    extents: dict[str, Extent] = {}
    unsaved: dict[str, str] = {}
    with file.opened() as reads:
        members = _members(file, reads)
        headers = [_header(member, reads) for member in members]
    for member, npy in zip(members, headers, strict=True):
        key = member.name.removesuffix(".npy")
        keys = split(key, SEPARATORS)
        if isinstance(npy, str):
            unsaved[encode(keys)] = npy
            continue
        try:
            if npy.is_pickled:
                raise CannotSave("is pickled, and nothing is unpickled")
            record = array_record(npy.dtype, npy.shape, keys)
        except CannotSave as e:
            unsaved[encode(keys)] = f"an array that {e}"
            continue
        leaves.append(Named(key, record))
        extents[encode(keys)] = _Elements(
            file,
            member.offset,
            npy.is_fortran,
            npy.is_big_endian,
            member=member,
            first=npy.header_nbytes,
        )
    manifest = manifest_of(leaves, file.path, unsaved=unsaved, separators=SEPARATORS)
    return FileSource(file.path, manifest, extents)


@dataclass(frozen=True)
class _Member:
    """One file of an archive, of `nbytes` in the archive, perhaps compressed."""

    file: ForeignFile
    name: str
    offset: int
    nbytes: int
    nbytes_stored: int
    is_deflated: bool
    crc32: int


class _Reader:
    """Reads a member, from positions that never decrease."""

    def __init__(self, member: _Member) -> None:
        self._member = member
        self._unpacked = _Inflated(member) if member.is_deflated else None
        self._checked = self._crc = 0
        self.position = 0

    def read(self, reads: Reads, start: int, target: memoryview) -> None:
        member = self._member
        if self._unpacked is None:
            if start + len(target) > member.nbytes:
                raise CorruptCheckpointError("it ends too early")
            read_exactly(reads, member.offset + start, target)
        else:
            self._unpacked.skip(reads, start - self.position)
            self._unpacked.fill(reads, target)
        self.position = start + len(target)
        if self._checked == start:
            self._checked, self._crc = self.position, zlib.crc32(target, self._crc)
            if self._checked == member.nbytes and self._crc != member.crc32:
                raise CorruptCheckpointError("its checksum is not that of the zip")


class _Inflated:
    """The decompressed bytes of a member, in order."""

    def __init__(self, member: _Member) -> None:
        self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
        self._next = member.offset
        self._end = member.offset + member.nbytes_stored
        self._packed = b""

    def skip(self, reads: Reads, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _PIECE)))
        while nbytes:
            part = scratch[: min(nbytes, _PIECE)]
            self.fill(reads, part)
            nbytes -= len(part)

    def fill(self, reads: Reads, target: memoryview) -> None:
        while target:
            if not self._packed and self._next < self._end:
                nbytes = min(reads.ready(self._next), self._end - self._next)
                self._packed = read_bytes(reads, self._next, nbytes)
                self._next += nbytes
            try:
                found = self._zlib.decompress(self._packed, min(len(target), _PIECE))
            except zlib.error as e:
                raise CorruptCheckpointError(f"it cannot be decompressed: {e}") from e
            self._packed = self._zlib.unconsumed_tail
            if not found and (self._zlib.eof or self._next == self._end):
                raise CorruptCheckpointError("its compressed data end too early")
            target[: len(found)] = found
            target = target[len(found) :]


class _Readers:
    """Readers that stopped before the end of a member; a copy begins with none."""

    def __init__(self) -> None:
        self._lock = ForkedLock()
        self._readers: list[_Reader] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Readers, ()

    def take(self, position: int) -> _Reader | None:
        """The one that has the least to skip."""
        with self._lock.own:
            usable = [r for r in self._readers if r.position <= position]
            if not usable:
                return None
            closest = max(usable, key=lambda reader: reader.position)
            self._readers.remove(closest)
            return closest

    def keep(self, reader: _Reader) -> None:
        with self._lock.own:
            self._readers.append(reader)
            del self._readers[:-_MOST_READERS]


@dataclass(frozen=True, kw_only=True)
class _Elements(Extent):
    """The elements of an array in a member, after its header."""

    member: _Member
    first: int
    in_order: ClassVar[bool] = True
    _readers: _Readers = field(default_factory=_Readers, compare=False)

    def opened(self, reads: Reads) -> ReadInto:
        """Go on where an earlier read ended: many parts are decompressed only once."""

        def read(start: int, target: memoryview) -> None:
            reader = self._readers.take(self.first + start) or self._new(reads, start)
            reader.read(reads, self.first + start, target)
            if reader.position < self.member.nbytes:
                self._readers.keep(reader)

        return read

    def span(self, runs: Sequence[Run]) -> tuple[int, int]:
        member, last = self.member, runs[-1]
        if member.is_deflated:
            return member.offset, member.offset + member.nbytes_stored
        begin = 0 if runs[0].start == 0 else self.first + runs[0].start
        end = self.first + last.start + last.nbytes
        return member.offset + begin, member.offset + end

    def _new(self, reads: Reads, start: int) -> _Reader:
        reader = _Reader(self.member)
        # The checksum is of all that precedes.
        if start == 0 or self.member.is_deflated:
            reader.read(reads, 0, memoryview(bytearray(self.first)))
        return reader


def _header(member: _Member, reads: Reads) -> Npy | str:
    """The header of an array, or a description of what else it is."""
    position = 0
    reader = _Reader(member)

    def read(nbytes: int) -> bytes:
        nonlocal position
        data = bytearray(nbytes)
        reader.read(reads, position, memoryview(data))
        position += nbytes
        return bytes(data)

    try:
        npy = read_npy(read)
        if not npy.is_pickled and npy.header_nbytes + npy.nbytes != member.nbytes:
            raise ValueError("its size does not follow from its shape")
    except NotImplementedError as e:
        return str(e)
    except (ValueError, EOFError, CorruptCheckpointError) as e:
        reason = f"{member.name[:200]!r}: {e}"
        raise corrupt(member.file.path, FORMAT, reason) from None
    return npy


def _members(file: ForeignFile, reads: Reads) -> list[_Member]:
    """The directory of an archive, checked; its files do not overlap."""
    try:
        size = _size(file)
        reads.prefetch([(max(0, size - _TAIL), size)])
        f = _Seekable(reads, size)
        with zipfile.ZipFile(f) as archive:
            infos = archive.infolist()
            directory = archive.start_dir
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as e:
        raise corrupt(file.path, FORMAT, str(e)) from None
    infos.sort(key=lambda info: info.header_offset)
    headers = (
        (i.header_offset, i.header_offset + _HEAD + len(i.filename)) for i in infos
    )
    reads.prefetch((a, min(b, directory)) for a, b in headers if 0 <= a < directory)
    members: list[_Member] = []
    end = 0
    for info in infos:
        try:
            if info.header_offset < end:
                raise ValueError("it overlaps another one")
            member = _member(file, size, reads, info)
        except (ValueError, EOFError) as e:
            reason = f"{info.filename[:200]!r}: {e}"
            raise corrupt(file.path, FORMAT, reason) from None
        end = member.offset + member.nbytes_stored
        members.append(member)
    if len({member.name for member in members}) != len(members):
        raise corrupt(file.path, FORMAT, "a name is there twice")
    return members


def _size(file: ForeignFile) -> int:
    """The size of an archive: as its directory tells it, where nobody else does."""
    if file.size is not None:
        return file.size
    tail = file.tail(_TAIL)
    at = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
    if at < 0:
        raise ValueError("it has no directory")
    *_, nbytes, start, _ = _END.unpack_from(tail, at)
    end = start + nbytes
    locator = tail[max(0, at - _END64.size) : at]
    if locator.startswith(b"PK\6\7"):
        # Of a directory of more than 4 GiB, or that many files; it has a fixed size.
        end = _END64.unpack(locator)[2] + _RECORD64 + _END64.size
    size = end + len(tail) - at
    if problem := file.end_problem(size):
        raise ValueError(f"its directory ends at byte {size}, and {problem}")
    return size


class _Seekable(io.RawIOBase):
    """A file that is read where `zipfile` seeks."""

    def __init__(self, reads: Reads, size: int) -> None:
        self._reads = reads
        self._size = size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        if begin[whence] + offset < 0:
            raise OSError("a position before the begin of the file")
        self._position = begin[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._size - self._position)
        data = read_bytes(
            self._reads, self._position, rest if size < 0 else min(size, rest)
        )
        self._position += len(data)
        return data


def _member(
    file: ForeignFile, size: int, reads: Reads, info: zipfile.ZipInfo
) -> _Member:
    if not info.filename.endswith(".npy"):
        raise ValueError("it is not an `.npy` file")
    if info.compress_type not in _METHODS or info.flag_bits & 1:
        raise ValueError("its compression or encryption is not that of NumPy")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise ValueError("it is a link")
    if not 0 <= info.header_offset <= size - _LOCAL:
        raise ValueError("it is not in the file")
    local = bytearray(_LOCAL)
    read_exactly(reads, info.header_offset, memoryview(local))
    magic, name_nbytes, extra_nbytes = struct.unpack("<4s22xHH", local)
    if magic != b"PK\3\4":
        raise ValueError("it has no header of its own")
    name = bytearray(name_nbytes)
    read_exactly(reads, info.header_offset + _LOCAL, memoryview(name))
    if name.decode("utf8" if info.flag_bits & _UTF8 else "cp437") != info.orig_filename:
        raise ValueError("it has another name in its own header")
    offset = info.header_offset + _LOCAL + name_nbytes + extra_nbytes
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if offset + info.compress_size > size:
        raise ValueError("it ends behind the end of the file")
    fits = (
        info.file_size <= info.compress_size * _MAX_RATIO
        if is_deflated
        else info.file_size == info.compress_size
    )
    if not fits:
        raise ValueError(f"it cannot be {info.file_size} bytes")
    return _Member(
        file,
        info.filename,
        offset,
        info.file_size,
        info.compress_size,
        is_deflated,
        info.CRC,
    )
