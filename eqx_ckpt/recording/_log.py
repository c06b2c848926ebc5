"""What is committed of a recording, what is on its way, and how the two change."""

import contextlib
import dataclasses
import logging
import os
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
from .._format.recorded import from_bytes, Leaf, RECORD, Record, STATES
from .._save import tree_serialise_leaves
from .._steps import Run
from .._storage.directory import locate
from .._storage.recorded import Recorded
from .._storage.url import Store
from .._types import PathLike
from ._columns import Column, columns_of, make_groups, show, trim
from ._leaves import Block, check_same, rows_of, to_stored
from ._writer import Writer


logger = logging.getLogger("eqx_ckpt")
# Host memory for samples that wait to be written.
PENDING_BYTES = 256 * 2**20


class _Rows(NamedTuple):
    """Samples of one leaf and one chain on their way; `kept` says which, or all."""

    column: Column
    rows: np.ndarray
    kept: np.ndarray | slice


class Log:
    """The only writer of a recording.

    **Attributes:**

    - `record`: what is committed.
    - `base`: where it is.
    - `has_recorder`: whether compiled programs may hand samples over.
    """

    def __init__(
        self,
        path: PathLike,
        wanted: Record,
        differs: Callable[[Leaf, Leaf], str],
        max_samples: int | None,
    ) -> None:
        self.base = locate(path)
        self.where = str(self.base)
        self._max_samples = max_samples
        self._files = self.base.writer()
        self._lock = threading.RLock()
        self._is_closed = self._is_reported = False
        self.has_recorder = False
        self._failure: BaseException | None = None
        # Raised by the next call, but what was taken can be committed.
        self._full: CheckpointError | None = None
        self._leaf = ""
        self._files.acquire()
        try:
            self.record = self._begin(wanted, differs)
            self._states = Run(_below(path, self.base.url()))
            self._tidy_up()
            self._columns = self._go_on()
        except BaseException:
            self._files.release()
            raise
        self._taken = np.array(self.record.draws, np.int64)
        self._writer = Writer(self._write, PENDING_BYTES, f"eqx_ckpt records {path}")
        # Samples from the beginning would follow those that are there.
        self.must_resume = self.record.state is not None

    def _begin(self, wanted: Record, differs: Callable[[Leaf, Leaf], str]) -> Record:
        data = self._files.read(RECORD)
        if data is not None:
            found = from_bytes(data, self.where)
            check_same(found, wanted, self.where, differs)
            found = dataclasses.replace(found, writer=uuid.uuid4().hex)
            self._files.take_over(RECORD, found.to_bytes())
            return found
        strangers = self._files.strangers()
        if strangers:
            explanation = self.base.explain()
            raise CheckpointExistsError(
                f"{self.where} holds {strangers[0]!r}, and is no recording."
                f"{explanation and ' '}{explanation} Choose another path."
            )
        self._files.commit(RECORD, wanted.to_bytes())
        return wanted

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

    def _tidy_up(self) -> None:
        """Delete what was written after the last commit."""
        make_groups(self._files, self.record)
        trim(self._files, self.record)
        show(self._files, self.record)
        self._states.sweep(starting=True)
        self._forget_states()

    def _forget_states(self) -> None:
        """Delete the states before the last commit, and those after it."""
        with _warned(f"Old states of {self.where} could not be deleted"):
            others = [n for n in self._states.steps() if n != self.record.state]
            if others:
                self._states.remove(others)

    def state_path(self) -> PathLike:
        """Of the checkpoint of the last state."""
        if self.record.state is None:
            raise CheckpointNotFoundError(
                f"No state was committed with the last samples of {self.where}."
            )
        return self._states.path(self.record.state)

    @property
    def draws(self) -> np.ndarray:
        """How many samples each chain has, committed or not."""
        return self._taken.copy()

    def extend(self, block: Block, keep: Any = None) -> None:
        """Take samples; they are written while the caller goes on."""
        with self._lock:
            self.check()
            kept, is_full = self._kept(block.draws, keep)
            job: list[_Rows] = []
            for leaf, columns, array in zip(
                self.record.leaves, self._columns, block.arrays, strict=True
            ):
                for chain, rows in rows_of(array, leaf, self.record.chains):
                    job.append(_Rows(columns[chain], rows, kept[chain]))
            self._taken += [_count(some, block.draws) for some in kept]
            self._writer.put(job, sum(rows.nbytes for _, rows, _ in job))
            if is_full:
                raise self._is_full()
            self._raise_failure()

    def _wait_for_programs(self) -> None:
        """Wait for the samples that running programs hand over."""
        if self.has_recorder and not self._is_closed:
            jax.effects_barrier()

    def receive(self, chain: int, arrays: Sequence[np.ndarray], count: int) -> None:
        """Take samples of one chain, as a compiled program hands them over."""
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
        """Let the next call raise."""
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        return bool(self._failure or self._writer.failure or self._full)

    def _is_full(self) -> CheckpointError:
        return CheckpointError(
            f"The recording {self.where} is full: `max_samples` is "
            f"{self._max_samples}. The samples up to there were taken."
        )

    def _kept(self, draws: int, keep: Any) -> tuple[list[Any], bool]:
        """Which draws of each chain are taken, and whether there are too many."""
        masks = _masks(keep, len(self.record.draws), draws)
        most = self._max_samples
        kept: list[Any] = []
        is_full = False
        for taken, mask in zip(self._taken, masks, strict=True):
            some = slice(0, draws) if mask is None else np.flatnonzero(mask)
            if most is not None and taken + _count(some, draws) > most:
                is_full = True
                left = int(max(0, most - taken))
                some = slice(0, left) if isinstance(some, slice) else some[:left]
            kept.append(some)
        return kept, is_full

    def _write(self, job: Sequence[_Rows]) -> None:
        for column, rows, kept in job:
            self._leaf = column.leaf.name
            column.append(rows[kept])

    def commit(self, state: PyTree = None, steps: int = 0) -> None:
        """Make the samples so far, and the state, durable together."""
        self._wait_for_programs()
        with self._lock:
            self.check()
            self._writer.drain()
            self._raise_failure()
            number = self.record.commit + 1
            if state is not None:
                # If this fails, all is as it was, and there may be another commit.
                tree_serialise_leaves(self._states.path(number), state)
            try:
                self._commit(number, None if state is None else number, steps)
            except BaseException as e:
                self._failure = e
                self._raise_failure()

    def _commit(self, number: int, state: int | None, steps: int) -> None:
        checksums: dict[str, tuple[str, ...]] = {}
        for leaf, columns in zip(self.record.leaves, self._columns, strict=True):
            self._leaf = leaf.name
            checksums[leaf.name] = tuple(column.settle() for column in columns)
        self._leaf = ""
        self._files.flush()
        record = dataclasses.replace(
            self.record,
            commit=number,
            draws=tuple(map(int, self._taken)),
            state=state,
            steps=self.record.steps + steps,
            checksums=checksums,
        )
        self._files.commit(RECORD, record.to_bytes())
        self.record = record
        self.must_resume = False
        show(self._files, record)
        self._forget_states()

    def close(self, *, warn: bool = True) -> None:
        """Commit what needs no state, delete what was not committed; the end."""
        self._wait_for_programs()
        with self._lock:
            if self._is_closed:
                return
            full, self._full = self._full, None
            self._writer.drain()
            self._failure = self._failure or self._writer.failure
            try:
                rest = int((self._taken - self.record.draws).sum())
                if rest and self._failure is None:
                    if self.record.state is None:
                        self.commit()
                    elif warn:
                        warnings.warn(
                            f"{rest} draws that were recorded in {self.where} after "
                            "the last `commit` are dropped, since no state comes "
                            "after them. Call `commit(state)` before the end.",
                            stacklevel=4,
                        )
            finally:
                self._end()
            if not self._is_reported:
                self._raise_failure()
            if full is not None:
                raise full

    def _end(self) -> None:
        self._is_closed = True
        self._writer.stop()
        try:
            with _warned(f"Not all of {self.where} could be tidied up"):
                trim(self._files, self.record)
                self._files.flush()
        finally:
            self._files.release()

    def abandon(self) -> None:
        """Let go of everything, without a word."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.stop()
            self._files.release()

    def check(self) -> None:
        """Raise if no more samples can be taken, or earlier ones were not."""
        if self._is_closed:
            raise CheckpointError(
                f"The recording {self.where} is closed. Make a new `Recording` of it."
            )
        self._raise_failure()
        if self._full is not None:
            full, self._full = self._full, None
            raise full
        if self.must_resume:
            raise CheckpointError(
                f"The recording {self.where} has a state, after which the next samples "
                "come. Call `resume` first, or choose another path."
            )

    def _raise_failure(self) -> None:
        failure = self._failure = self._failure or self._writer.failure
        if failure is not None:
            self._is_reported = True
            raise self._explained(failure) from failure

    def _explained(self, failure: BaseException) -> BaseException:
        if not isinstance(failure, Exception):
            return failure
        leaf = f"leaf {self._leaf!r}, " if self._leaf else ""
        safe = 0 if not self.record.is_committed else min(self.record.draws)
        safe_text = f"{leaf}recording {self.where}, of which {safe} draws are safe"
        if isinstance(failure, OSError) and failure.errno is not None:
            text = f"{os.strerror(failure.errno)} ({safe_text})"
            return OSError(failure.errno, text, failure.filename)
        return CheckpointError(f"{failure} ({safe_text})")


@contextlib.contextmanager
def _warned(what: str) -> Any:
    """Go on without what could not be cleaned up; the next writer does it."""
    try:
        yield
    except (OSError, CheckpointError) as e:
        logger.warning("%s: %s", what, e)


def _below(path: PathLike, place: str) -> PathLike:
    """Where the states are."""
    return path / STATES if isinstance(path, Store) else f"{place}/{STATES}"


def _count(some: Any, draws: int) -> int:
    return len(range(draws)[some]) if isinstance(some, slice) else len(some)


def _masks(keep: Any, chains: int, draws: int) -> list[Any]:
    """For each chain which draws to keep, or `None` for all."""
    if keep is None:
        return [None] * chains
    mask = np.asarray(keep)
    if mask.dtype != np.bool_ or mask.shape not in ((draws,), (chains, draws)):
        raise ValueError(
            f"`keep` is {mask.dtype}{list(mask.shape)}. Pass bool[{draws}], or "
            f"bool[{chains}, {draws}] with a row for each chain."
        )
    return list(np.broadcast_to(mask, (chains, draws)))
