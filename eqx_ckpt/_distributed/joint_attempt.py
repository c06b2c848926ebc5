"""One checkpoint, saved by all processes of a job, which agree on each step.

Process 0 begins and commits. In between, each process writes its part of the arrays and
flushes it.
"""

import abc
import contextlib
import functools as ft
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from .._errors import CheckpointError, LeafMismatchError
from .._format.leaf_record import LeafRecord
from .._storage.interface.base import Base
from .._storage.interface.chunk_bytes import Piece
from .._storage.interface.free_space import WhyTooFew
from .._storage.interface.place import Attempt, run_of, Share, Shown, Storage
from .._storage.locate import locate
from .._tree.plans.write_plan import Write
from .._types import Checksums, Layout, PathLike, Report
from .call_matching import one_for_all
from .process_errors import failure_in, to_json, verdict
from .process_group import digest_of, Group, group_of, Solo
from .shared_place import check_is_one
from .write_assignment import assign, only_process


class Together(contextlib.ExitStack):
    """The processes of a job that save one checkpoint, as a context.

    An exception raised before the plans are compared is broadcast, so that every
    process raises.
    """

    def __init__(self, group: Group | Solo) -> None:
        super().__init__()
        self.in_background = group.has_service
        self.from_first = group.from_first
        self.goes_on = group.goes_on
        self._group = group
        self._has_plan = False
        self.callback(group.close)
        self.push(self._report_failure)

    def _report_failure(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not self._has_plan:
            with contextlib.suppress(CheckpointError):
                said = {"error": to_json(error)}
                self._group.combine("plan", said, verdict)

    def begin(
        self,
        target: Storage,
        layout: Layout,
        overwrite: bool,
        writes: Sequence[Write],
        why_too_few: WhyTooFew,
    ) -> tuple[Attempt, list[Write]]:
        """The attempt to save all of `writes`, and the writes of this process."""
        attempt = JointAttempt(self._group, target, layout, overwrite, why_too_few)
        self._has_plan = True
        return attempt, attempt.agree(writes)


class LateAttempt(Attempt):
    """An attempt that begins when something is asked of it, at the latest on entry.

    `_begin` sets `chunks` and `root`. `_report_failure` tells the other processes.
    """

    def __init__(self) -> None:
        # What this process has to close.
        self._stack = contextlib.ExitStack()
        self._bases: tuple[Base, Base] | None = None
        self._has_begun = False
        self._failure: BaseException | None = None

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _report_failure(self, error: BaseException) -> None: ...

    def share(self, base: Base, new: Base) -> None:
        self._bases = base, new

    def adopt(
        self, name: str, record: LeafRecord, positions: Collection[int] | None
    ) -> list[str] | None:
        self._begin_once()
        return super().adopt(name, record, positions)

    def send_at_most(self, nbytes: int) -> None:
        self._begin_once()
        super().send_at_most(nbytes)

    def __enter__(self) -> Self:
        self._begin_once()
        return self

    def _begin_once(self) -> None:
        """Begin, or raise what this has raised before."""
        if self._failure is not None:
            raise self._failure
        if self._has_begun:
            return
        try:
            self._begin()
            if self._bases is not None:
                self.chunks.share(*self._bases)
        except BaseException as e:
            self._failure = e
            self._end(e)
            raise
        self._has_begun = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._stack:
            if error is not None:
                self._report_failure(error)


class JointAttempt(LateAttempt):
    """The attempt of several processes; process 0 begins it and commits."""

    def __init__(
        self,
        group: Group | Solo,
        target: Storage,
        layout: Layout,
        overwrite: bool,
        why_too_few: WhyTooFew,
    ) -> None:
        if not target.is_shared and group.size > 1:
            raise CheckpointError(
                f"{target} is in the memory of one process. {one_for_all('save to')}"
            )
        super().__init__()
        self.is_first = group.is_first
        self._group = group
        self._target = target
        self._layout: Layout = layout
        self._overwrite = overwrite
        self._why_too_few = why_too_few
        self._arrays: list[str] = []
        self._attempt: Attempt | None = None
        self._share: Share | None = None
        # Whether the others wait for this process's checksums, or for its commit.
        self._is_awaited = self._is_to_commit = False

    def agree(self, writes: Sequence[Write]) -> list[Write]:
        """Agree on what is saved, and where; return the writes of this process."""
        self._arrays = [write.name for write in writes if write.leaf is not None]
        place = f"path {self._target}, overwrite={self._overwrite}, "
        place += f"layout={self._layout!r}"
        try:
            return agreed(self._group, place, writes, self._target)[0]
        except BaseException as e:
            self._report_failure(e)
            self._group.close()
            raise

    def _begin(self) -> None:
        """Let process 0 begin the attempt, and join it."""
        shown, self.root = self._group.from_first("begun", self._begin_first)
        self._is_awaited = True
        chunks = self._attempt.chunks if self._attempt else self._join(shown).chunks
        self.chunks = chunks.part(_part(self._group.index))

    def _begin_first(self) -> tuple[Shown, str]:
        attempt = self._target.begin(
            self._layout,
            self._arrays,
            overwrite=self._overwrite,
            why_too_few=self._why_too_few,
        )
        self._attempt = self._stack.enter_context(attempt)
        return attempt.show(), attempt.root

    def _join(self, shown: Sequence[Any]) -> Share:
        path, _ = shown
        try:
            self._share = self._target.join(Shown(*shown), self._layout)
        except FileNotFoundError:
            raise CheckpointError(
                f"Process {self._group.index} does not see "
                f"{self._target.at(path).url()}, which process 0 has made. "
                f"{one_for_all('save to')}"
            ) from None
        return self._stack.enter_context(self._share)

    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None,
    ) -> Checksums:
        try:
            return super().write(arrays, pieces, written)
        except (OSError, CheckpointError):
            # Process 0 did not wait for this one; `gather` will say so.
            if self._share is None or not self._share.is_removed():
                raise
            return {}

    def gather(self, checksums: Checksums) -> None:
        if self._share is not None:
            self._share.flush()
        self._exchange(None, checksums)
        self._is_to_commit = self.is_first

    def commit(self, manifest: bytes) -> None:
        self._is_to_commit = False
        publish = ft.partial(self._publish, manifest)
        self._group.from_first("committed", publish, final=True)

    def _publish(self, manifest: bytes) -> None:
        assert self._attempt is not None
        self._attempt.chunks.merge([_part(i) for i in range(self._group.size)])
        self._attempt.commit(manifest)

    def _exchange(self, error: BaseException | None, checksums: Checksums) -> None:
        """Tell the first process what this one has written, or why it failed.

        There, `checksums` get those of all, for which it has room. If one has failed,
        all raise.
        """

        def collect(said: list[dict[str, Any]]) -> dict[str, Any]:
            found = verdict(said)
            for value in () if found["failed"] else said:
                for name, position, checksum in value["checksums"]:
                    checksums[name][position] = checksum
            return found

        self._is_awaited = False
        said = _written(error, checksums)
        failure = failure_in(self._group.combine("written", said, collect))
        if failure is not None and error is None:
            raise failure

    def _report_failure(self, error: BaseException) -> None:
        """Report a failure to the other processes, unless they know it already."""
        with contextlib.suppress(CheckpointError, type(error)):
            if self._is_awaited:
                # Wait: nothing may be removed while the others write.
                self._exchange(error, {})
            elif self._is_to_commit:
                self._group.from_first("committed", ft.partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error


def _part(index: int) -> str:
    """The location where a process writes, in a layout in which each needs its own."""
    return f"p{index}/"


def _written(error: BaseException | None, checksums: Checksums) -> dict[str, Any]:
    return {
        "error": None if error is None else to_json(error),
        "checksums": [
            (name, position, checksum)
            for name, of_leaf in checksums.items()
            for position, checksum in enumerate(of_leaf)
            if checksum
        ],
    }


def all_saving(path: PathLike, timeout: float) -> Together | None:
    """The processes that save to this path together; `None` if there is only one."""
    try:
        place = str(locate(path))
    except Exception:
        # The error is raised later, when it can be sent to all processes.
        place = repr(path)
    return together(f"save({place})", timeout)


def together(call: str, timeout: float) -> Together | None:
    """All processes of the job, in the same call; `None` if there is only one."""
    group = group_of(call, timeout)
    return None if group is None else Together(group)


def _line(write: Write) -> str:
    """The properties of a leaf that must be equal in all processes."""
    name, record, leaf, _ = write
    weak = "weakly typed, " if record.weak_type else ""
    line = f"leaf {name!r}, {record}, {weak}"
    if only_process(leaf) is not None:
        line += "of one process"
    else:
        line += f"sharded as {record.sharding}, in chunks of {record.chunk_shape}"
    compression = f", compression={record.compression!r}" if record.is_array else ""
    return line + compression


def agreed(
    group: Group | Solo, place: str, writes: Sequence[Write], target: Storage | None
) -> tuple[list[Write], dict[str, int]]:
    """Agree on what is saved; on the place, too, if it is one for all.

    Return the writes of this process, and the leaves that all see on one process.
    """
    places = _agree(group, [place, *map(_line, writes)], writes, target)
    arrays = [write for write in writes if write.leaf is not None]
    return assign(arrays, group.size, group.index, places), places


def _agree(
    group: Group | Solo,
    outline: Sequence[str],
    writes: Sequence[Write],
    target: Storage | None,
) -> dict[str, int]:
    """The leaves that all processes see on the same single process."""
    above = "" if target is None else run_of(target).url()
    places = {
        write.name: place
        for write in writes
        if (place := only_process(write.leaf)) not in (None, group.index)
    }
    digest = digest_of(outline)
    plan = {"error": None, "digest": digest, "places": places}
    agreed = group.combine(
        "plan", plan, lambda plans: _compared(plans, is_new=above not in group.seen)
    )
    if failure := failure_in(agreed):
        raise failure
    if agreed["differ"]:
        raise _different(group, outline)
    if target is not None and agreed["is_new"]:
        check_is_one(group, target)
        group.seen.add(above)
    return agreed["places"]


def _compared(plans: Sequence[dict[str, Any]], *, is_new: bool) -> dict[str, Any]:
    """What the first process says of all plans; raise if they cannot be carried out."""
    said = verdict(plans)
    if said["failed"]:
        return said
    differ = len({plan["digest"] for plan in plans}) > 1
    every = [] if differ else plans
    places = {name: of for plan in every for name, of in plan["places"].items()}
    for name, of in places.items():
        for index, plan in enumerate(plans):
            found = plan["places"].get(name, index)
            if found != of:
                raise LeafMismatchError(
                    f"Leaf {name!r} is on the devices of process {found} in process "
                    f"{index}, and of process {of} in a different one. Nothing was "
                    "saved. Let all processes save the same arrays."
                )
    return said | {"differ": differ, "places": places, "is_new": is_new}


def _different(group: Group | Solo, outline: Sequence[str]) -> LeafMismatchError:
    return LeafMismatchError(
        "The processes do not save the same:\n"
        + "\n".join(group.first_difference(outline))
        + "\nNothing was saved. All processes have to call this with the same path, "
        "`layout` and `compression`, and with trees of the same structure, shapes, "
        "dtypes and shardings."
    )
