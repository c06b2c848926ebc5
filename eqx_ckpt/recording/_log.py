"""The writer's side of a recording: committed samples, and samples being written."""

import contextlib
import dataclasses
import threading
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
)
from .._format.recorded import from_bytes, Leaf, RECORD, Record
from .._save import tree_serialise_leaves
from .._steps import Run
from .._storage.directory import locate
from .._storage.recorded import Recorded
from .._types import PathLike
from ._columns import Column, columns_of, make_groups, show, trim
from ._commit import below, explained, merged, warned
from ._keep import count, kept_of
from ._leaves import Block, chains_here, check_same, rows_of, to_stored
from ._team import Team
from ._writer import Writer


# Host memory for samples that wait to be written.
PENDING_BYTES = 256 * 2**20


class _Rows(NamedTuple):
    """Samples of one leaf and chain to be written: the rows that `kept` selects."""

    column: Column
    rows: np.ndarray
    kept: np.ndarray | slice


class Log:
    """The only writer of a recording.

    **Attributes:**

    - `record`: the last committed record.
    - `base`: the storage of the recording.
    - `has_recorder`: whether a compiled program may still send samples.
    """

    def __init__(
        self,
        path: PathLike,
        wanted: Record,
        differs: Callable[[Leaf, Leaf], str],
        max_samples: int | None,
        deadline: float,
    ) -> None:
        self.base = locate(path)
        self.where = str(self.base)
        self._max_samples = max_samples
        self._files = self.base.writer()
        self._lock = threading.RLock()
        self._is_closed = self._is_reported = False
        self.has_recorder = False
        self._failure: BaseException | None = None
        # The next call raises it, but the samples recorded before can be committed.
        self._full: CheckpointError | None = None
        self._leaf = ""
        self.team = Team(self.where, deadline)
        if not (self.team.is_alone or self.base.is_shared):
            raise CheckpointError(
                f"{self.where} is in the memory of one process, but several processes "
                "record. Pass a directory or URL that all of them see."
            )
        self._states = Run(below(path, self.base.url()))
        self.record = wanted
        try:
            self.team.from_first("beginning", lambda: self._begin(wanted, differs))
            self.team.gather("beginning", lambda: self._join(wanted, differs))
            self._columns = self._go_on()
        except BaseException:
            self._files.release()
            raise
        self._taken = np.array(self.record.draws, np.int64)
        # The chains that other processes have recorded since this log began.
        self._elsewhere: set[int] = set()
        self._writer = Writer(self._write, PENDING_BYTES, f"eqx_ckpt records {path}")
        # Otherwise a sampler that starts afresh would append to the samples of an old
        # state.
        self.must_resume = self.record.state is not None

    def _begin(self, wanted: Record, differs: Callable[[Leaf, Leaf], str]) -> None:
        """Acquire the recording, and delete what was written after the last commit."""
        self._found()  # Before there is a lock.
        self._files.acquire()
        self._files.check([leaf.name for leaf in wanted.leaves])
        self.record = self._found_or_new(wanted, differs)
        make_groups(self._files, self.record)
        trim(self._files, self.record)
        show(self._files, self.record)
        self._files.flush()
        self._states.sweep(starting=True)
        self._forget_states()

    def _join(self, wanted: Record, differs: Callable[[Leaf, Leaf], str]) -> None:
        """Join the recording that the first process has acquired."""
        if self.team.is_first:
            return
        self._files.join()
        data = self._files.read(RECORD)
        if data is None:
            raise CheckpointError(
                f"This process does not see {self.where}, which process 0 has "
                "created. All processes must record to one shared directory or URL."
            )
        self.record = from_bytes(data, self.where)
        check_same(self.record, wanted, self.where, differs)

    def _found_or_new(
        self, wanted: Record, differs: Callable[[Leaf, Leaf], str]
    ) -> Record:
        data = self._found()
        if data is not None:
            found = from_bytes(data, self.where)
            check_same(found, wanted, self.where, differs)
            found = dataclasses.replace(found, writer=uuid.uuid4().hex)
            self._files.take_over(RECORD, found.to_commit())
            return found
        self._files.commit(RECORD, wanted.to_commit())
        return wanted

    def _found(self) -> bytes | None:
        """The record; raise if there is none, and something else is there."""
        data = self._files.read(RECORD)
        strangers = self._files.strangers() if data is None else []
        if strangers:
            explanation = self.base.explain()
            raise CheckpointExistsError(
                f"{self.where} holds {strangers[0]!r}, and is not a recording."
                f"{explanation and ' '}{explanation} Choose another path."
            )
        return data

    def _go_on(self) -> list[list[Column]]:
        record = self.record
        recorded = Recorded(self.base, record)
        columns = columns_of(self._files, record)
        for leaf, chains in zip(record.leaves, columns, strict=True):
            for chain, column in enumerate(chains):
                full, rest = divmod(record.draws[chain], leaf.rows)
                if leaf.row_bytes and (full or rest):
                    rows = None
                    if rest:
                        some = range(full * leaf.rows, record.draws[chain])
                        found = recorded.samples(leaf, range(chain, chain + 1), some)
                        rows = found if record.chains is None else found[0]
                    column.go_on(record.checksums_of(leaf, chain, full), rows)
        return columns

    def _forget_states(self) -> None:
        """Delete all states but the one of the last commit."""
        with warned(f"Old states of {self.where} could not be deleted"):
            others = [n for n in self._states.steps() if n != self.record.state]
            if others:
                self._states.remove(others)

    def state_path(self) -> PathLike:
        """The path of the checkpoint of the last state."""
        if self.record.state is None:
            raise CheckpointNotFoundError(
                f"No state was committed with the last samples of {self.where}."
            )
        return self._states.path(self.record.state)

    @property
    def draws(self) -> np.ndarray:
        """The number of samples of each chain, committed or not."""
        return self._taken.copy()

    def extend(self, block: Block, keep: Any = None) -> None:
        """Queue samples, for the writer thread to write."""
        with self._lock:
            self.check()
            here = self._chains_here(block)
            kept, full = kept_of(
                keep, self._taken.tolist(), block.draws, self._max_samples
            )
            job: list[_Rows] = []
            for leaf, columns, array in zip(
                self.record.leaves, self._columns, block.arrays, strict=True
            ):
                for chain, rows in rows_of(array, leaf, self.record.chains):
                    if chain in here:
                        job.append(_Rows(columns[chain], rows, kept[chain]))
            for chain in here:
                self._taken[chain] += count(kept[chain], block.draws)
            self._writer.put(job, sum(rows.nbytes for _, rows, _ in job))
            if full & here:
                raise self._is_full()
            self._raise_failure()

    def _chains_here(self, block: Block) -> set[int]:
        """The chains that this process writes."""
        if self.team.is_alone:
            return set(range(len(self._taken)))
        here = chains_here(
            block.arrays, self.record.chains, is_first=self.team.is_first
        )
        if moved := here & self._elsewhere:
            raise CheckpointError(
                f"The chains {sorted(moved)} were recorded by another process before. "
                "Keep each of them in one process until the recording is closed."
            )
        return here

    def _wait_for_programs(self) -> None:
        """Wait until running programs have sent their samples."""
        if self.has_recorder and not self._is_closed:
            jax.effects_barrier()

    def receive(self, chain: int, arrays: Sequence[np.ndarray], count: int) -> None:
        """Queue samples of one chain that a compiled program has sent."""
        with self._lock:
            self.check()
            most = self._max_samples
            left = count if most is None else int(most - self._taken[chain])
            some = slice(0, min(left, count))
            job = [
                _Rows(columns[chain], to_stored(array, leaf.record), some)
                for leaf, columns, array in zip(
                    self.record.leaves, self._columns, arrays, strict=True
                )
            ]
            self._taken[chain] += min(left, count)
            self._writer.put(job, sum(rows.nbytes for _, rows, _ in job))
            if left < count:
                self._full = self._is_full()

    def fail(self, error: BaseException) -> None:
        """Make the next call raise this error."""
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        return bool(self._failure or self._writer.failure or self._full)

    def _is_full(self) -> CheckpointError:
        return CheckpointError(
            f"The recording {self.where} is full: `max_samples` is "
            f"{self._max_samples}. The samples up to there were taken."
        )

    def _write(self, job: Sequence[_Rows]) -> None:
        for column, rows, kept in job:
            self._leaf = column.leaf.name
            column.append(rows[kept])

    def commit(self, state: PyTree = None, steps: int = 0) -> None:
        """Commit the samples so far together with the state."""
        self._wait_for_programs()
        with self._lock:
            number = self.record.commit + 1
            parts = self.team.gather(f"commit {number}", self._settled)
            record = merged(self.record, parts, steps, self.where)
            if state is not None:
                # If this fails, nothing has changed, and `commit` can be called again.
                path, deadline = self._states.path(number), self.team.deadline
                tree_serialise_leaves(path, state, deadline=deadline)
                record = dataclasses.replace(record, state=number)
            with self._fatal():
                self.team.from_first(
                    f"commit {number}",
                    lambda: self._files.commit(RECORD, record.to_commit()),
                )
                self._committed(record)

    def _settled(self) -> list[Any]:
        """Write the last chunks; return draws and checksums of changed chains."""
        self.check()
        self._writer.drain()
        self._raise_failure()
        settled: list[Any] = []
        with self._fatal():
            for chain, taken in enumerate(self._taken.tolist()):
                if taken == self.record.draws[chain]:
                    continue
                checksums: list[str] = []
                for columns in self._columns:
                    self._leaf = columns[chain].leaf.name
                    checksums.append(columns[chain].settle())
                settled.append([chain, taken, checksums])
            self._leaf = ""
            self._files.flush()
        return settled

    def _committed(self, record: Record) -> None:
        """Continue from a record that has just been committed."""
        for chain, (before, now) in enumerate(
            zip(self._taken.tolist(), record.draws, strict=True)
        ):
            if before != now:
                self._elsewhere.add(chain)
        self._taken[:] = record.draws
        self.record = record
        self.must_resume = False
        if self.team.is_first:
            show(self._files, record)
            self._forget_states()

    @contextlib.contextmanager
    def _fatal(self) -> Any:
        """Refuse further samples after a failure in this block."""
        try:
            yield
        except BaseException as e:
            self._failure = e
            self._raise_failure()

    def close(self, error: BaseException | None = None) -> None:
        """Commit samples that need no state, delete uncommitted files, and release.

        After an `error`, do not wait for the other processes of a job.
        """
        self._wait_for_programs()
        with self._lock:
            if self._is_closed:
                return
            full, self._full = self._full, None
            self._writer.drain()
            self._failure = self._failure or self._writer.failure
            try:
                if self._failure is None and (error is None or self.team.is_alone):
                    self._commit_the_rest(error)
            finally:
                self._end()
            if not self._is_reported:
                self._raise_failure()
            if full is not None:
                raise full

    def _commit_the_rest(self, error: BaseException | None) -> None:
        here = int((self._taken - self.record.draws).sum())
        rest = sum(self.team.gather("the end", lambda: here))
        if rest and self.record.state is None:
            self.commit()
        elif rest and error is None:
            warnings.warn(
                f"{rest} draws that were recorded in {self.where} after the last "
                "`commit` are dropped, because no state was committed with them. "
                "Call `commit(state)` before the end.",
                stacklevel=5,
            )

    def _end(self) -> None:
        self._is_closed = True
        self._writer.stop()
        try:
            with warned(f"Could not clean up all of {self.where}"):
                if not self.team.is_first:
                    return
                trim(self._files, self.record)
                self._files.flush()
        finally:
            self._files.release()

    def abandon(self) -> None:
        """Release the recording, without a commit and without an error."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.stop()
            self._files.release()

    def check(self) -> None:
        """Raise if no more samples can be recorded, or if earlier ones were lost."""
        if self._is_closed:
            raise CheckpointError(
                f"The recording {self.where} is closed. Open it again with "
                "`Recording(path, like)`."
            )
        self._raise_failure()
        if self._full is not None:
            full, self._full = self._full, None
            raise full
        if self.must_resume:
            raise CheckpointError(
                f"The recording {self.where} has a committed state, from which the "
                "next samples must continue. Call `resume` first, or choose another "
                "path."
            )

    def _raise_failure(self) -> None:
        failure = self._failure = self._failure or self._writer.failure
        if failure is not None:
            self._is_reported = True
            raise explained(failure, self._leaf, self.record, self.where) from failure
