"""The writer's side of a recording: committed samples, and samples being written."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from ..._errors import CheckpointError, warn
from ..._format.sample_record import Leaf, Record
from ..._saving.save import save_state
from ..._types import PathLike
from ._chain_spread import chains_here, of_these, with_whole_bands
from ._recording_commit import explained, logger, merged, Settled
from ._recording_place import Place
from ._sample_columns import append, Column
from ._sample_leaves import (
    Block,
    checked_keep,
    counts_of,
    fitting,
    kept_of,
    on_host,
    room_of,
    rows_of,
    to_stored,
)
from ._sample_receiver import Taker
from ._writer_thread import Writer


# Host memory for samples that wait to be written.
PENDING_BYTES = 256 * 2**20


class _Rows(NamedTuple):
    """Samples to be written, of one leaf and of adjacent chains; see `append`."""

    columns: Sequence[Column]
    first: int
    rows: np.ndarray
    kept: np.ndarray | None


class _Job(NamedTuple):
    """Samples to be written, of all leaves, and the number of draws of some chains."""

    chains: int | slice
    draws: Any
    rows: list[_Rows]


class Log(Taker):
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
        timeout: float,
    ) -> None:
        super().__init__()
        self._max_samples = max_samples
        self._is_closed = self._is_reported = False
        self.has_recorder = False
        self._has_overflowed = False
        self._commit_failed = self._is_cut = False
        self._leaf = ""
        self._pid = os.getpid()
        self._writer = Writer(self._write, PENDING_BYTES, f"eqx_ckpt records {path}")
        place = None
        try:
            # Last, because it locks the recording.
            self._place = place = Place(path, wanted, differs, max_samples, timeout)
            self.base, self.where, self.team = place.base, place.where, place.team
            # The draws that were queued, and those that were written.
            self._taken = np.array(place.record.draws, np.int64)
            self._written = self._taken.copy()
            # The chains that other processes have recorded since this log began.
            self._elsewhere = np.zeros(len(self._taken), bool)
            # Otherwise a sampler that starts afresh would append to the samples of an
            # old state.
            self.must_resume = place.record.state is not None
        except BaseException:
            if place is not None:
                place.files.release()
            raise

    @property
    def record(self) -> Record:
        return self._place.record

    def state_path(self) -> PathLike:
        """The path of the checkpoint of the last state."""
        return self._place.state_path()

    def extend(self, block: Block, keep: Any = None) -> None:
        """Queue samples, for the writer thread to write."""
        self.check()
        if keep is not None:
            each = (len(self._taken), block.draws)
            keep = checked_keep(keep, each[1:], each, convert=np.asarray)
        if not self.team.is_alone:
            block, keep = with_whole_bands(self.record, block, keep)
        here = self._chains_here(block)
        # Without the lock: a running program may have to send samples before it can
        # return these.
        keep = on_host(keep)
        found = [
            [*rows_of(array, leaf, self.record.chains)]
            for leaf, array in zip(self.record.leaves, block.arrays, strict=True)
        ]
        # What a program has sent before comes before.
        self._wait_for()
        with self.lock:
            self.check()
            kept, full = kept_of(keep, self._taken, block.draws, self._max_samples)
            rows = [
                self._rows(columns, start, rows, kept)
                for columns, parts in zip(self._place.columns, found, strict=True)
                for first, part in parts
                for start, rows in of_these(here, first, part)
            ]
            draws = np.where(here, counts_of(kept, block.draws), 0)
            self._queue(_Job(slice(None), draws, rows))
            if (full & here).any():
                self._overflow()
            self.check()

    def _rows(
        self,
        columns: Sequence[Column],
        first: int,
        rows: np.ndarray,
        kept: np.ndarray | None,
    ) -> _Rows:
        some = None if kept is None else kept[first : first + len(rows)]
        return _Rows(columns, first, rows, some)

    def _queue(self, job: _Job) -> None:
        # An interrupt may come between these two: see `_drain`.
        self._taken[job.chains] += job.draws
        self._writer.put(job, sum(one.rows.nbytes for one in job.rows))

    def _drain(self) -> None:
        """Wait until all samples are written; what is written was taken."""
        self._writer.drain()
        self._taken = self._written.copy()

    def _chains_here(self, block: Block) -> np.ndarray:
        """Which chains this process writes, as bools."""
        if self.team.is_alone:
            return np.ones(len(self._taken), bool)
        here = chains_here(block.arrays, self.record.chains)
        if (moved := here & self._elsewhere).any():
            raise CheckpointError(
                f"The chains {np.flatnonzero(moved).tolist()} were recorded by another "
                "process before. Keep each of them in one process until the recording "
                "is closed."
            )
        return here

    def fitting(self, keep: np.ndarray | None, draws: int) -> int:
        """The number of draws of a block, in all processes, before the first one that
        `max_samples` excludes.
        """
        most = self._max_samples
        if most is None:
            return draws
        here = fitting(keep, self._taken, draws, most)
        return self.team.combine("room", lambda: here, min)

    def _wait_for(self, state: PyTree = None) -> None:
        """Wait until running programs have sent their samples, without the lock."""
        if self.has_recorder and not self._is_closed:
            jax.effects_barrier()
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            jax.block_until_ready([x for x in arrays if not x.is_deleted()])

    def receive(self, chain: int, arrays: Sequence[np.ndarray], count: int) -> bool:
        """Queue samples of one chain that a compiled program has sent.

        Return whether all were taken; if not, the next call of the recording raises.
        """
        with self.lock:
            if self._is_closed:
                logger.warning("Samples for %s came after its end: lost.", self.where)
                return False
            if self._failed() is not None:
                return False
            most = self._max_samples
            fits = count
            if most is not None:
                fits = min(count, int(room_of(self._taken[chain], most)))
            rows = [
                _Rows(columns, chain, to_stored(array[:fits], leaf.record)[None], None)
                for leaf, columns, array in zip(
                    self.record.leaves, self._place.columns, arrays, strict=True
                )
            ]
            self._queue(_Job(chain, fits, rows))
            if fits < count:
                self._overflow()
            return fits == count

    def _overflow(self) -> None:
        self._has_overflowed = True
        self.refuse(self.full())

    def _failed(self) -> BaseException | None:
        self.failure = self.failure or self._writer.failure
        return self.failure

    def full(self) -> CheckpointError:
        """The error for samples that `max_samples` excludes."""
        return CheckpointError(
            f"The recording {self.where} is full: `max_samples` is "
            f"{self._max_samples}. The samples up to there were taken."
        )

    def _write(self, job: _Job) -> None:
        for columns, first, rows, kept in job.rows:
            self._leaf = columns[0].leaf.name
            append(columns, first, rows, kept)
        self._written[job.chains] += job.draws

    def commit(self, state: PyTree = None, steps: int = 0) -> None:
        """Commit the samples so far together with the state."""
        self._check_process()
        self._wait_for(state)

        def ready() -> None:
            self.check()
            self._check_is_whole(has_state=state is not None)

        with self.lock:
            self._commit_failed = True
            self._commit(ready, state, steps)

    def _commit(
        self, ready: Callable[[], None], state: PyTree = None, steps: int = 0
    ) -> None:
        what = f"commit {self.record.commit + 1}"
        what += " with a state" if state is not None else ""
        parts = self.team.combine(what, lambda: self._settled(ready), list)
        record = merged(self.record, parts, steps, self.where)
        if state is not None:
            record = dataclasses.replace(record, state=self._saved_state(state))
        with self._fatal():
            self._place.commit(record)
            self._committed()

    def _saved_state(self, state: PyTree) -> int:
        """The number of a state that was saved.

        If this fails, nothing has changed, and `commit` can be called again.
        """
        number = self._place.new_state()
        try:
            save_state(self._place.states.path(number), state, self.team.timeout)
        except OSError as e:
            raise explained(e, "", self._place.safety(), self.where) from e
        return number

    def _check_is_whole(self, *, has_state: bool) -> None:
        """Raise if the samples so far are not all that the program has recorded."""
        self.check_flushed(f"Nothing was committed to {self.where}")
        if has_state and self.has_gap:
            raise CheckpointError(
                f"{self.where} lacks samples before this state, because they were "
                "refused. So no program can resume from it: call `commit()` without "
                "a state."
            )

    def _settled(self, ready: Callable[[], None]) -> Settled:
        """Write the chunks that are not full, too; return what has changed."""
        ready()
        self._drain()
        self._raise_failure()
        taken = self._taken
        grown = np.flatnonzero(taken != self.record.draws)
        checksums: list[list[tuple[int, str]]] = []
        with self._fatal():
            for columns in self._place.columns:
                self._leaf = columns[0].leaf.name
                checksums.append(
                    [
                        (band, column.settle())
                        for band, column in enumerate(columns)
                        if column.has_changed
                    ]
                )
            self._leaf = ""
            self._place.files.flush()
        draws = zip(grown.tolist(), taken[grown].tolist(), strict=True)
        return Settled([*draws], checksums)

    def _committed(self) -> None:
        """Continue from a record that has just been committed."""
        draws = np.array(self.record.draws, np.int64)
        self._elsewhere |= draws != self._taken
        self._taken, self._written = draws, draws.copy()
        for columns in self._place.columns:
            for column in columns:
                column.has_changed = False
        self.must_resume = self._commit_failed = False

    @contextlib.contextmanager
    def _fatal(self) -> Any:
        """Refuse further samples after a failure in this block."""
        try:
            yield
        except BaseException as e:
            self.failure = e
            self._raise_failure()

    def close(self, error: BaseException | None = None) -> None:
        """Commit samples that need no state, delete uncommitted files, and release.

        After an `error`, do not wait for the other processes of a job. A forked child
        leaves the recording to its parent.
        """
        if self._is_forked():
            return
        self._wait_for()
        with self.lock:
            if self._is_closed:
                return
            self._drain()
            try:
                if self._failed() is None and (error is None or self.team.is_alone):
                    self._commit_the_rest(error)
            finally:
                self._end()
            if not self._is_reported:
                self._raise_failure()
            if self.refusal is not None:
                raise self.refusal
            self.check_flushed(f"{self.where} lacks its last samples")

    def _commit_the_rest(self, error: BaseException | None) -> None:
        here = int((self._taken - self.record.draws).sum())
        # A program that resumes would record the same samples, and fail again.
        rest, is_full = self.team.combine(
            "the end",
            lambda: [here, self._has_overflowed],
            lambda parts: [
                sum(count for count, _ in parts),
                any(overflowed for _, overflowed in parts),
            ],
        )
        if rest and (self.record.state is None or is_full) and not self._is_cut:
            self._commit(lambda: None)
        elif rest:
            text = (
                f"{rest} draws that were recorded in {self.where} after the last "
                "`commit` are dropped, because no state was committed with them."
            )
            if error is not None:
                error.add_note(text)
            elif self._commit_failed:
                raise CheckpointError(f"{text} The last call of `commit` had failed.")
            else:
                text += " Call `commit(state)` before the end."
                warn(text)

    def scan_failed(self, has_rest: bool, has_committed: bool) -> None:
        """Let nothing follow but the committed state, as the caller has no later one.

        If the scan has recorded samples since then, they must not be committed.
        """
        self._is_cut |= has_rest
        self.must_resume |= has_committed and self.record.state is not None

    def check_resumed(self) -> None:
        """Raise if there are samples after the state that the user asks for."""
        rest = int((self._taken - self.record.draws).sum())
        if rest and not self._is_closed:
            raise CheckpointError(
                f"{rest} draws were recorded in {self.where} after the last commit, so "
                "they do not come before its state. To drop them and continue from it, "
                "call `close()`, and open the recording again."
            )

    def _end(self) -> None:
        self._is_closed = True
        self._writer.stop()
        self._place.leave()

    def abandon(self) -> None:
        """Release the recording, without a commit and without an error.

        After `close`, this does nothing, unless that was interrupted.
        """
        if not self._is_forked():
            self._is_closed = True
            self._writer.stop()
            self._place.files.release()

    def _is_forked(self) -> bool:
        """Whether this is a child of the process that records: it has no writer."""
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked():
            raise CheckpointError(
                f"The recording {self.where} was opened by another process, of which "
                "this one is a fork. Record there, or open a recording at another path."
            )

    def check(self) -> None:
        """Raise if no more samples can be recorded, or if earlier ones were lost."""
        self._check_process()
        if self._is_closed:
            raise CheckpointError(
                f"The recording {self.where} is closed. Open it again with "
                "`Recording(path, like)`."
            )
        if self._is_cut:
            raise CheckpointError(
                f"A scan into {self.where} was interrupted or failed after it had "
                "recorded samples, so no state follows them. Call `close()`, which "
                "drops them, and open the recording again."
            )
        self._raise_failure()
        with self.lock:
            refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        if self.must_resume:
            raise CheckpointError(
                f"The recording {self.where} has a committed state, from which the "
                "next samples must continue. Call `resume` first, or choose another "
                "path."
            )

    def _raise_failure(self) -> None:
        failure = self._failed()
        if failure is not None:
            self._is_reported = True
            safety = self._place.safety()
            raise explained(failure, self._leaf, safety, self.where) from failure
