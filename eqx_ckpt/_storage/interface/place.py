"""The interface of a backend: a location with keys and values that holds checkpoints.

`locate` finds the `Storage` of a path once; nothing else asks which backend it is.
"""

import abc
import contextlib
import math
import re
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.chunk_grid import whole
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import MAX_BYTES
from ..._types import (
    check_word,
    Checksums,
    Layout,
    LAYOUTS,
    Report,
    SHARING_LAYOUTS,
)
from ..calls.tensorstore_calls import KvSpec
from .base import Base
from .chunk_bytes import check_size, ChunkBytes, chunks_of, Piece, Wanted
from .free_space import WhyTooFew


S = TypeVar("S", bound="Storage")


# The key of the lock or lease of a writer.
WRITER_LOCK = "writer.lock"


MAX_STEP = 2**63 - 1


# The beginning of the name of a file beside the steps of a run, and what follows it.
METRICS = "metrics."
CONFIGS = "config."


_BESIDE = {
    METRICS: re.compile(r"metrics\.[0-9a-f]{32}\.json"),
    CONFIGS: re.compile(r"config\.[0-9a-f]{32}\.json"),
}


_STEP = re.compile(r"[0-9]{6}|[1-9][0-9]{6,18}")


class Storage(abc.ABC):
    """A location: a checkpoint, a run, or an empty place for one.

    **Attributes:**

    - `spec`: of the TensorStore key-value store; its path ends with `/`.
    - `layouts`: the classes that keep chunks here, by the layout of a checkpoint.
    - `is_state`: whether a state of the recording that this is in is saved here.
    - `is_shared`: whether all processes of a job see the same values.
    - `max_key`, `max_object`: how many bytes a key and a value may have.
    - `always_fits`: if path and leaf name together are shorter, no limit is exceeded.
    - `database`: options for the spec of an OCDBT database here.
    """

    spec: KvSpec
    layouts: ClassVar[Mapping[Layout, "Callable[[Storage], Chunks]"]]
    is_state: bool
    is_shared: ClassVar[bool] = True
    max_key: ClassVar[float] = math.inf
    max_object: ClassVar[float] = math.inf
    always_fits: ClassVar[float] = 0
    database: "ClassVar[DatabaseOptions]"

    @abc.abstractmethod
    def url(self, key: str = "") -> str:
        """This location, or a key in it, as a user would write it."""

    def __str__(self) -> str:
        return repr(self.url())

    @abc.abstractmethod
    def at(self: S, path: str) -> S:
        """Another path of the same file system or bucket."""

    def __truediv__(self: S, name: str) -> S:
        """The location below a name, which ends with `/`."""
        return self.at(self.spec["path"] + name)

    @abc.abstractmethod
    def as_state(self: S) -> S:
        """This location, for a state that its recording commits itself."""

    def arrays(self: S, root: str) -> S:
        """The location of the arrays of what is here; it is not elsewhere."""
        return self / root

    @abc.abstractmethod
    def read(self, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
        """The value of a key, or its first `most` bytes; `None` if there is none."""

    @abc.abstractmethod
    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        """For each of several keys its value, an error, or `None` if missing."""

    @abc.abstractmethod
    def list_keys(self) -> list[str]:
        """All keys, relative to this location."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders directly below this location, in order."""

    @abc.abstractmethod
    def is_listed(self, key: str) -> bool:
        """Whether a store lists a key, even if it cannot be read.

        Raises if the bucket does not exist or may not be listed.
        """

    @abc.abstractmethod
    def identity(self) -> object:
        """A value that differs for each checkpoint; `None` if there is none."""

    @abc.abstractmethod
    def wait_for(self, future: Any, key: str = "", most: float | None = None) -> Any:
        """Wait for a TensorStore future; translate its error.

        After `most` seconds it has failed.
        """

    @abc.abstractmethod
    def begin(
        self,
        layout: Layout,
        arrays: Sequence[str],
        *,
        overwrite: bool,
        why_too_few: WhyTooFew,
    ) -> "Attempt":
        """Begin to save a checkpoint here with arrays of these names.

        Raises `LeafNameError` if two of them would be in one place, and `OSError` if
        they surely do not fit.
        """

    @abc.abstractmethod
    def join(self, shown: "Shown", layout: Layout) -> "Share":
        """Take part in an attempt that another process has begun, and shows.

        Raises `FileNotFoundError` if this process cannot see it.
        """

    def why_apart(self, base: "Storage") -> str:
        """Why a checkpoint here cannot share chunks with one at `base`, or `''`."""
        return "" if type(base) is type(self) else f"it is not in a place as {self}"

    @contextlib.contextmanager
    def marked(self) -> Generator[str]:
        """Leave a mark beside this location, by which others tell that they `see` it.

        By default there is none: all see the same.
        """
        yield ""

    def sees(self, mark: str) -> bool:
        """Whether a mark of another process is seen here."""
        return True

    def marks(self) -> list[str]:
        """The marks that are seen here, of whatever process."""
        return []

    @abc.abstractmethod
    def steps(self) -> "Steps":
        """The steps of a run, if this is one."""

    @abc.abstractmethod
    def writer(self) -> "SoleWriter":
        """A writer for this place, which lets no other writer in."""

    def database_problem(self) -> str:
        """Why TensorStore must not open an OCDBT database here, or `''`."""
        return ""

    def folder_problem(self, folder: str, most: int, *, links: bool = False) -> str:
        """Why TensorStore must not open an array in a folder here, or `''`.

        No file of it has more than `most` bytes, or is a link, unless these may be
        there.
        """
        return ""

    def whole_above(self) -> tuple[str, str]:
        """The closest checkpoint or recording above this: which of them, and where."""
        return "", ""

    def explain(self) -> str:
        """A sentence about what is here instead of a checkpoint."""
        return ""

    def explain_run(self) -> str:
        """A sentence about what is here instead of a run."""
        return ""


class DatabaseOptions(NamedTuple):
    """How an OCDBT database is kept in one kind of storage.

    - `read`, `write`: entries of its spec, besides the base.
    - `max_transaction`: bytes that wait in memory for a commit.
    - `waits`: whether to wait for a commit that was aborted.
    """

    read: KvSpec
    write: KvSpec
    max_transaction: int
    waits: bool


class StoredChunks(abc.ABC):
    """The arrays of a checkpoint that is there, as chunks."""

    place: Storage
    # Whether a chunk is in memory before it is read into its place.
    are_values: bool = False

    @abc.abstractmethod
    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        """Request chunks; entering a `ChunkBytes` raises the error of that chunk."""

    def listed(self) -> set[str]:
        """The keys that a store lists; none on a disk."""
        return set()

    @abc.abstractmethod
    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        """As `Storage.read_all`, for the files beside the chunks."""

    def problem(self) -> str:
        """Why nothing here may be read, or `''`."""
        return ""

    def missing(self, wanted: Iterable[Wanted]) -> str:
        """What is wrong with the first chunk that is not there in full, or `''`.

        Names and sizes are compared; no data are read.
        """
        for one, source in self.fetch(wanted):
            try:
                with source:
                    check_size(one.chunk, source.nbytes)
            except CorruptCheckpointError as e:
                return str(e)
        return ""

    def verify(self) -> None:  # noqa: B027
        """Raise if anything but the chunks is damaged."""

    def __str__(self) -> str:
        return str(self.place)


class Chunks(StoredChunks):
    """The arrays of a checkpoint, as chunks below one location; they can be written."""

    # Whether each array has a folder of its name.
    has_folders: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        """Raise `LeafNameError` if a leaf exceeds what the storage takes."""

    @abc.abstractmethod
    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        """Write arrays, or some of their pieces; return the checksums of the chunks.

        Without `create`, another process writes the metadata of the arrays. `written`
        is called with each piece of data that is no longer needed. When this raises,
        nothing more is written to a disk.
        """

    def send_at_most(self, nbytes: int) -> None:  # noqa: B027
        """Have no more chunks than that on their way to a store at a time."""

    def write_within(self, folder: int) -> None:  # noqa: B027
        """Write to this open directory from now on, wherever its path leads then."""

    def share(self, base: Base, new: Base) -> None:
        """Share what is equal with a base; note in `new` what is here then.

        Only for the `SHARING_LAYOUTS`.
        """
        raise NotImplementedError

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        """Share chunks of an array, if it is known to be that of the base.

        By default, all of them. Return the checksums of all chunks, "" of those that
        another process writes; or `None` if they have to be written.
        """
        raise NotImplementedError

    def complete(  # noqa: B027
        self, arrays: Mapping[str, LeafRecord], checksums: Checksums
    ) -> None:
        """Write what depends on which chunks of all processes are shared."""

    def part(self, name: str) -> "Chunks":
        """The location where one of several processes writes; `name` ends with `/`."""
        return self

    def merge(self, names: Sequence[str]) -> None:  # noqa: B027
        """Join the parts with these names without copying their data."""


def every_chunk(leaves: Mapping[str, LeafRecord]) -> Iterator[Wanted]:
    """The chunks of all arrays."""
    for name, record in leaves.items():
        if record.is_array and 0 not in record.data_shape:
            for chunk in chunks_of(name, record, whole(record.data_shape)):
                yield Wanted(chunk, [])


class Shown(NamedTuple):
    """Where an attempt is, and the inode of its directory, which others compare."""

    path: str
    inode: int = 0


class Attempt(contextlib.AbstractContextManager[Any]):
    """One try to save one checkpoint, by one process or by several.

    A context manager: on exit, everything that was not committed is removed.

    **Attributes:**

    - `chunks`: where this process writes arrays, once the context is entered.
    - `root`: how the manifest refers to that location.
    - `is_first`: whether this process creates the arrays, and commits.
    """

    chunks: Chunks
    root: str
    is_first: bool = True

    def share(self, base: Base, new: Base) -> None:
        """As `Chunks.share`; also before the context is entered."""
        self.chunks.share(base, new)

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        """As `Chunks.adopt`; also before the context is entered."""
        return self.chunks.adopt(name, record, positions)

    def send_at_most(self, nbytes: int) -> None:
        """As `Chunks.send_at_most`; also before the context is entered."""
        self.chunks.send_at_most(nbytes)

    def show(self) -> Shown:
        """Let other processes see the attempt, which they are about to `join`."""
        return Shown(self.chunks.place.spec["path"])

    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None,
    ) -> Checksums:
        """Write what this process saves, as `Chunks.write`."""
        return self.chunks.write(arrays, pieces, written, create=self.is_first)

    def gather(self, checksums: Checksums) -> None:  # noqa: B027
        """Wait until all processes have written; add the checksums of the others."""

    @abc.abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Make the checkpoint exist, durably; `CheckpointExistsError` if one does.

        Only the manifest of the first process counts.
        """

    @abc.abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Share(contextlib.AbstractContextManager[Any]):
    """One process's part in an attempt that another process has begun."""

    chunks: Chunks

    def is_removed(self) -> bool:
        """Whether the process that has begun the attempt has removed it."""
        return False

    @abc.abstractmethod
    def flush(self) -> None:
        """Make everything that this process has written durable."""

    @abc.abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Steps(abc.ABC):
    """The steps of a run.

    **Attributes:**

    - `only_time_tells`: which attempt is dead, so that it is swept again and again.
    """

    only_time_tells: ClassVar[bool] = False

    @abc.abstractmethod
    def named(self) -> list[int]:
        """Every entry with the name of a step, in order."""

    @abc.abstractmethod
    def saved(self, doubtful: dict[int, OSError] | None = None) -> list[int]:
        """The committed steps, in order, damaged or not.

        Those of which it cannot be seen whether they are committed go to `doubtful`,
        with the reason; without it, this raises.
        """

    @abc.abstractmethod
    def unusable(self) -> dict[str, bool]:
        """What looked like a step when `saved` listed it last, and is none.

        By name, whether it is a checkpoint, with a number that is not a step's name,
        such as `3` or `0000003`, or one that no step has. Otherwise, its name is a
        step's, and it contains something, but no manifest.
        """

    def check_place(self) -> None:  # noqa: B027
        """Raise if the run was moved since this process used it first."""

    @abc.abstractmethod
    def metadata(self, step: int) -> Any:
        """The metadata of a step that `saved` listed."""

    @abc.abstractmethod
    def problem(self, step: int) -> str:
        """Why a step that `saved` listed is not intact, or `''`; see `SeenIntact`.

        Raises `CheckpointNotFoundError` if it is not there any more, and `OSError` if
        that cannot be seen.
        """

    @abc.abstractmethod
    def own_bytes(self, steps: Sequence[int]) -> dict[int, int]:
        """The bytes that each of all steps shares with no other one of them."""

    @abc.abstractmethod
    def remove(self, steps: Sequence[int]) -> None:
        """Remove steps; none is ever visible in part."""

    @abc.abstractmethod
    def beside(self, kind: str) -> list[str]:
        """The names of the files of a kind beside the steps: `METRICS` or `CONFIGS`."""

    @abc.abstractmethod
    def read_beside(self, name: str) -> bytes | None:
        """A file beside the steps, or `None` if it is gone."""

    @abc.abstractmethod
    def write_beside(self, name: str, value: bytes) -> None:
        """Write a file of a new name beside the steps, durably."""

    @abc.abstractmethod
    def delete_beside(self, names: Sequence[str]) -> None:
        """Delete files beside the steps, of which others have the content."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Remove what attempts left that are known to be dead; one sweep at a time."""

    def end_sweeps(self) -> None:  # noqa: B027
        """Let a sweep in another thread end soon, and each later one do nothing."""

    @abc.abstractmethod
    def orphans(self) -> dict[str, int | None]:
        """What attempts left that seem dead, and its bytes if the storage tells them.

        An attempt in a store may still live: whether it does is seen over time only.
        """

    @abc.abstractmethod
    def sweep_all(self) -> None:
        """Remove what dead attempts left, however long it takes to know that."""


class SoleWriter(abc.ABC):
    """Writes values below keys, as the only one; a commit refers to some of them.

    What is written is durable after `flush`. A key that has committed data is replaced,
    not written: it has one value or the other at any time, and after a power cut.
    """

    @abc.abstractmethod
    def acquire(self) -> int:
        """Be the only writer until `release`; raise if somebody else is.

        Returns a number by which other processes `join`: the inode of a directory.
        """

    @abc.abstractmethod
    def join(self, number: int) -> None:
        """Write for another process of the same job, which is the only writer."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let others write; a second call does nothing."""

    @abc.abstractmethod
    def unrelated_key(self) -> str | None:
        """A key that no recording has written, before there is a record."""

    @abc.abstractmethod
    def read(self, key: str) -> bytes | None:
        """The last value of a key that was committed, or written since."""

    @abc.abstractmethod
    def list(self, folder: str) -> list[str]:
        """The keys directly below a folder."""

    def check(self, arrays: Sequence[str]) -> None:  # noqa: B027
        """Raise `LeafNameError` if two of these names would be in one place."""

    @abc.abstractmethod
    def make(self, folder: str) -> None:
        """Make a folder, where there are folders."""

    @abc.abstractmethod
    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        """Write a value that no commit refers to."""

    @abc.abstractmethod
    def replace(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        """Write a value in place of a committed one; until `flush` it may be either."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Make all that was written durable."""

    @abc.abstractmethod
    def show(self, key: str, value: bytes) -> None:
        """Replace a value that nothing depends on, in one step."""

    @abc.abstractmethod
    def take_over(self, key: str, value: bytes) -> None:
        """Replace what `read` gave, so that no earlier writer can `commit` there.

        It is durable then: the earlier writer may have died, or failed, before that.
        """

    def check_is_here(self, folder: str) -> None:  # noqa: B027
        """Raise if what was written by its path, and not by this, is elsewhere."""

    @abc.abstractmethod
    def commit(self, key: str, value: bytes) -> None:
        """Replace a value durably, in one step; raise if another writer has."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop what was written since the last `flush`, as far as that is possible."""

    def delete_others(self, folder: str, keys: Collection[str]) -> None:  # noqa: B027
        """Delete what is directly below a folder, but for some keys.

        Without locks, all stays: a writer that was suspended might delete what another
        one has committed since. The next writer writes over it.
        """


def has_a_writer(where: str) -> CheckpointError:
    return CheckpointError(
        "The recording is written by another process, or by another `Recording`: "
        f"{where}. Call its `close()`, wait for its process, or choose another path."
    )


def check_layout(layout: Layout) -> None:
    check_word("layout", layout, LAYOUTS)


def check_shares(argument: str, layout: Layout) -> None:
    """Raise if checkpoints of a layout cannot share chunks."""
    if layout not in SHARING_LAYOUTS:
        raise ValueError(
            f"`{argument}` is for checkpoints with `layout='zarr'`. With "
            f"`layout={layout!r}`, each checkpoint is written in full: leave "
            f"`{argument}` out."
        )


def run_of(place: S) -> S:
    """The location of the run that a step is in."""
    above, slash, _ = place.spec["path"].rstrip("/").rpartition("/")
    return place.at(above + slash)


def is_step_at(place: Storage) -> bool:
    """Whether a location has the name of a step."""
    return is_step(place.spec["path"].rstrip("/").rpartition("/")[2])


def step_name(step: int) -> str:
    """The name of a step in its run."""
    return f"{step:06d}"


def is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None and int(name) <= MAX_STEP


def log_name(number: int, digits: str) -> str:
    """The name of a log of metrics: names of newer ones are later in their order.

    `digits` are 16 hexadecimal ones that nobody else has.
    """
    return f"{METRICS}{number:016x}{digits}.json"


def log_number(name: str) -> int:
    return int(name.removeprefix(METRICS)[:16], 16)


def is_beside(kind: str, name: str) -> bool:
    """Whether a name is that of a file of a kind beside the steps of a run."""
    return _BESIDE[kind].fullmatch(name) is not None


def is_misspelled_step(name: str) -> bool:
    """Whether a name is a number, but not as the name of a step is written."""
    return name.isascii() and name.isdigit() and not is_step(name)


ONE_CHECKPOINT = "It is one checkpoint, and no run: pass the directory that it is in."


ONE_RECORDING = "It is a recording, and no run."
