"""A file of another program in a store, or behind the URL of a web server."""

import abc
import bisect
import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ..._errors import CheckpointError, CheckpointNotFoundError
from ..calls.send_window import Transfers, window_of
from ..calls.tensorstore_calls import (
    is_out_of_range,
    KvSpec,
    open_kvstore,
    value_of,
)
from ..interface.foreign_file import ForeignFile, PIECE, Reads
from ..interface.place import Storage
from ..interface.sure_reads import listed_and_missing


# What is read in place of one more request; and what a request counts at least.
_GAP = 2**16


# Bytes of compressed data that are read at once.
_AT_ONCE = 2**22


# Read when a file is opened.
_HEAD = slice(0, 8)


_ALL = slice(0, None)


_T = TypeVar("_T")


class Block(NamedTuple):
    """Bytes of a file, from a position."""

    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class RemoteFile(ForeignFile):
    """A file that is read by ranges; its generation tells whether it is still the same.

    A copy of it in another process reads the same version.

    **Attributes:**

    - `head`: what was read when it was opened.
    """

    def __init__(self, spec: KvSpec, key: str, path: str) -> None:
        self.path = path
        self._size: int | None = None
        self._spec, self._key = spec, key
        self._generation: bytes | None = None
        try:
            head = self.read(_HEAD)
        except EOFError:
            head = self.read(_ALL)
            self._size = len(head)
        self.head = Block(0, head)

    @property
    def size(self) -> int | None:
        return self._size

    @abc.abstractmethod
    def _wait_for(self, future: Any) -> Any:
        """The answer to a request; an error of this package that names the file."""

    @abc.abstractmethod
    def _check_missing(self) -> None:
        """Raise if it is not sure that there is no file."""

    @contextlib.contextmanager
    def opened(self) -> Generator["RemoteReads", None, None]:
        yield RemoteReads(self, [self.head])

    def tail(self, most: int) -> bytes:
        try:
            return self.read(slice(-most, None))
        except EOFError:
            return self.read(_ALL)

    def whole(self, most: int) -> bytes:
        # Not all at once: a store sends what it has of a range.
        with contextlib.suppress(EOFError):
            self.read(slice(most, most + 1))
            raise ValueError(f"it has more than {most} bytes")
        return self.read(_ALL)

    def end_problem(self, end: int) -> str:
        last, next = self._ask(slice(end - 1, end)), self._ask(slice(end, end + 1))
        try:
            self._answer(last)
        except EOFError:
            return "it ends before that"
        with contextlib.suppress(EOFError):
            self._answer(next)
            return "it has more bytes"
        return ""

    @property
    def version(self) -> str:
        return f"{self.path} {self._generation!r}"

    def read(self, range: slice) -> bytes:
        return self._answer(self._ask(range))

    def blocks(
        self, requests: Iterable[tuple[int, int, _T]]
    ) -> Iterator[tuple[Block, _T]]:
        """Ask for ranges, many at a time."""
        asked = Transfers[tuple[int, Any, _T]](window_of(self._spec, "from"))
        try:
            for start, stop, item in requests:
                nbytes = max(stop - start, _GAP)
                while not asked.has_room(nbytes):
                    yield self._arrived(asked)
                asked.add((start, self._ask(slice(start, stop)), item), nbytes)
            while asked:
                yield self._arrived(asked)
        finally:
            asked.give_up()

    def _arrived(self, asked: Transfers[tuple[int, Any, _T]]) -> tuple[Block, _T]:
        with asked.oldest() as (start, future, item):
            return Block(start, self._answer(future)), item

    def _ask(self, range: slice) -> Any:
        return open_kvstore(self._spec).read(self._key, byte_range=range)

    def _answer(self, future: Any) -> bytes:
        """The data of an answer; `EOFError` if the file ends before."""
        try:
            found = self._wait_for(future)
        except CheckpointError:
            if not is_out_of_range(future.exception()):
                raise
            self._check_version()
            raise EOFError(f"{self.path!r} ends too early") from None
        value = value_of(found, self.path)
        if value is None and self._generation is None:
            self._check_missing()
            raise CheckpointNotFoundError(f"There is no file {self.path!r}.")
        generation = found.stamp.generation
        self._generation = self._generation or generation
        if value is None or generation != self._generation:
            raise self._changed()
        return value

    def _check_version(self) -> None:
        """Raise if the file is another one than before."""
        if self._generation is None:
            return
        # An empty file has no first byte.
        future = self._ask(_ALL if self._size == 0 else slice(0, 1))
        try:
            found = self._wait_for(future)
        except CheckpointError:
            if is_out_of_range(future.exception()):
                raise self._changed() from None
            raise
        if found.stamp.generation != self._generation:
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path!r} was replaced or removed after it had been opened. Open it "
            "again, when nobody writes to it."
        )


class ObjectFile(RemoteFile):
    """An object of a store."""

    def __init__(self, place: Storage, key: str) -> None:
        self._place = place
        super().__init__(place.spec, key, place.url(key))

    def _wait_for(self, future: Any) -> Any:
        return self._place.wait_for(future, self._key)

    def _check_missing(self) -> None:
        if self._place.is_listed(self._key):
            raise listed_and_missing(self._place, self._key)

    def beside(self, name: str) -> "ObjectFile":
        return ObjectFile(self._place, name)


class RemoteReads(Reads):
    """Reads of a remote file; what was read in advance is in blocks.

    One thread that reads in order gets what it will need up to a position, `ahead`.
    """

    def __init__(
        self, file: RemoteFile, blocks: Sequence[Block] = (), ahead: int = 0
    ) -> None:
        self._file = file
        self._blocks = [*blocks]  # In their order.
        self._ahead = ahead

    def fill(self, buffers: Sequence[memoryview], offset: int, total: int) -> None:
        stop = offset + sum(map(len, buffers))
        if self._file.size is not None and stop > self._file.size:
            raise EOFError(f"the file ends at byte {self._file.size}")
        for buffer in buffers:
            while buffer:
                block = self._block_with(offset) or self._next_block(offset, stop)
                part = memoryview(block.data)[offset - block.start :][: len(buffer)]
                buffer[: len(part)] = part
                buffer, offset = buffer[len(part) :], offset + len(part)

    def _next_block(self, offset: int, stop: int) -> Block:
        end = max(stop, min(offset + PIECE, self._ahead))
        block = Block(offset, self._file.read(slice(offset, end)))
        if self._ahead:
            self._blocks = [block]
        return block

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        items = ((start, stop, None) for start, stop in spans)
        self._blocks += [block for block, _ in self._file.blocks(_merged(items))]
        self._blocks.sort(key=lambda block: (block.start, block.stop))

    def ready(self, offset: int) -> int:
        block = self._block_with(offset)
        return _AT_ONCE if block is None else block.stop - offset

    def fetch(self, items: Iterable[tuple[int, int, _T]]) -> Iterator[tuple[Reads, _T]]:
        large: list[tuple[int, _T]] = []

        def small() -> Iterator[tuple[int, int, _T]]:
            for start, stop, item in items:
                if stop - start > PIECE:
                    large.append((stop, item))
                else:
                    yield start, stop, item

        for block, found in self._file.blocks(_merged(small())):
            reads = RemoteReads(self._file, [block])
            for item in found:
                yield reads, item
        for stop, item in large:
            yield RemoteReads(self._file, ahead=stop), item

    def _block_with(self, offset: int) -> Block | None:
        i = bisect.bisect_right(self._blocks, offset, key=lambda block: block.start)
        return self._blocks[i - 1] if i and offset < self._blocks[i - 1].stop else None


def _merged(
    items: Iterable[tuple[int, int, _T]],
) -> Iterator[tuple[int, int, list[_T]]]:
    """Requests for what is between offsets, which do not decrease, and what is near."""
    begin = end = 0
    found: list[_T] = []
    for start, stop, item in items:
        is_near = start <= end + _GAP and max(stop, end) - begin <= PIECE
        if found and not is_near:
            yield begin, end, found
            found = []
        if not found:
            begin, end = start, stop
        end = max(end, stop)
        found.append(item)
    if found:
        yield begin, end, found
