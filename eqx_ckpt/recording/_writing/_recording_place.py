"""Where a recording is: what is committed there, and who may write."""

import contextlib
import dataclasses
import functools as ft
import hashlib
import uuid
from collections.abc import Callable

from ..._errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from ..._format.sample_record import from_bytes, Leaf, RECORD, Record, STATES
from ..._steps.run_steps import Run
from ..._storage.interface.place import step_name
from ..._storage.interface.sure_reads import read_surely
from ..._storage.locate import locate
from ..._types import PathLike
from ._recording_commit import below, warned
from ._recording_team import Team
from ._sample_columns import Column, columns_of, is_complete, make_groups, show, trim
from ._sample_leaves import check_same


class Place:
    """The location of a recording, of which this process is the only writer.

    **Attributes:**

    - `base`: its storage; `files` writes there.
    - `where`: its path, for messages.
    - `team`: the processes that write.
    - `record`: the last committed record.
    - `columns`: for each leaf and band of chains, what continues after that commit.
    """

    def __init__(
        self,
        path: PathLike,
        wanted: Record,
        differs: Callable[[Leaf, Leaf], str],
        max_samples: int | None,
        timeout: float,
    ) -> None:
        self.base = locate(path)
        self.where = str(self.base)
        self.files = self.base.writer()
        self.team = Team(self.where, timeout)
        if not (self.team.is_alone or self.base.is_shared):
            raise CheckpointError(
                f"{self.where} is in the memory of one process, but several processes "
                "record. Pass a directory or URL that all of them see."
            )
        self.states = Run(below(path, self.base.url()))
        self.record = wanted = dataclasses.replace(wanted, writer=uuid.uuid4().hex)
        try:
            # The number of the newest state, whoever has saved it.
            self._last_state = 0
            # Whether no commit has failed, so that `record` is there.
            self._is_settled = True
            call = f"beginning (max_samples={max_samples})"
            begun = self.team.from_first(call, lambda: self._begin(wanted, differs))
            join = ft.partial(self._join, begun, wanted, differs)
            self.team.combine(call, join, lambda _: None)
            self.columns = self._go_on()
        except BaseException:
            self.files.release()
            raise

    def _begin(
        self, wanted: Record, differs: Callable[[Leaf, Leaf], str]
    ) -> tuple[int, str, int]:
        """Acquire the recording, and drop what was written after the last commit.

        Return by what the other processes know it, and the number of the newest state.
        """
        self._found()  # Before there is a lock.
        number = self.files.acquire()
        self.files.check([leaf.name for leaf in wanted.leaves])
        self.record = self._found_or_new(wanted, differs)
        make_groups(self.files, self.record)
        trim(self.files, self.record)
        show(self.files, self.record)
        self.files.flush()
        self.states.stored.sweep()
        self._forget_states()
        self._last_state = max(self.states.readable_or_not(), default=0)
        digest = "" if self.team.is_alone else _digest(self.files.read(RECORD))
        return number, digest, self._last_state

    def _join(
        self,
        begun: tuple[int, str, int],
        wanted: Record,
        differs: Callable[[Leaf, Leaf], str],
    ) -> None:
        """Join the recording that the first process has acquired."""
        if self.team.is_first:
            return
        number, digest, self._last_state = begun
        data = None
        with contextlib.suppress(FileNotFoundError):
            self.files.join(number)
            data = self.files.read(RECORD)
        if data is None or _digest(data) != digest:
            raise CheckpointError(
                f"This process does not see {self.where} as process 0 has opened it. "
                "All processes must record to one shared directory, or to one store."
            )
        self.record = from_bytes(data, self.where)
        check_same(self.record, wanted, self.where, differs)

    def _found_or_new(
        self, wanted: Record, differs: Callable[[Leaf, Leaf], str]
    ) -> Record:
        data = self._found()
        if data is None:
            self.files.commit(RECORD, wanted.to_commit())
            return wanted
        found = from_bytes(data, self.where)
        check_same(found, wanted, self.where, differs)
        found = dataclasses.replace(found, writer=wanted.writer)
        self.files.take_over(RECORD, found.to_commit())
        return found

    def _found(self) -> bytes | None:
        """The record; raise if there is none, and something else is there."""
        data = self.files.read(RECORD)
        other = self.files.unrelated_key() if data is None else None
        if other is not None:
            # It may be of a recording that has begun in between.
            data = self.files.read(RECORD)
        if other is not None and data is None:
            raise CheckpointExistsError(
                f"{self.where} holds {other!r}, and is not a recording. Choose another "
                "path."
            )
        return data

    def _go_on(self) -> list[list[Column]]:
        columns = columns_of(self.files, self.record)
        for of_leaf in columns:
            for column in of_leaf:
                column.check()
        return columns

    def new_state(self) -> int:
        """The number of a new state.

        It is greater than those of earlier writers: one that was suspended may still
        delete what it knows of.
        """
        self._last_state = max(self._last_state, self._known) + 1
        return self._last_state

    @property
    def _known(self) -> int:
        """Up to this number, no state is of a later writer."""
        return max(self.record.commit, self.record.state or 0)

    def state_path(self) -> PathLike:
        """The path of the checkpoint of the last state."""
        if self.record.state is None:
            raise CheckpointNotFoundError(
                f"No state was committed with the last samples of {self.where}. To "
                "record more samples there, begin with a state of your own, and pass "
                "the one that follows them to `commit`."
            )
        return self.states.path(self.record.state)

    def commit(self, record: Record) -> None:
        """Replace the record, in all processes; clean up after the previous one."""
        call = f"commit {record.commit}"
        self._is_settled = False
        self.team.from_first(call, lambda: self._commit(record), final=True)
        self.record = record
        self._is_settled = True
        if self.team.is_first:
            show(self.files, record)
            self._forget_states()

    def _commit(self, record: Record) -> None:
        if record.state is not None:
            self.files.check_is_here(f"{STATES}/{step_name(record.state)}")
        self.files.commit(RECORD, record.to_commit())

    def _forget_states(self) -> None:
        """Delete the states before the one of the last commit.

        Later ones may be of a writer that has taken over, as this one was suspended.
        """
        with warned(f"Old states of {self.where} could not be deleted"):
            steps = [n for n in self.states.steps() if n <= self._known]
            others = [n for n in steps if n != self.record.state]
            if others:
                self.states.stored.remove(others)

    def leave(self) -> None:
        """Drop what was not committed, and let others write."""
        try:
            with warned(f"Could not clean up all of {self.where}"):
                if self.team.is_first and self._is_known():
                    trim(self.files, self.record)
                    self.files.flush()
        finally:
            self.files.release()

    def _is_known(self) -> bool:
        """Whether `record` is there.

        Otherwise a commit was interrupted, or failed, when its record was there. That
        may be durable or not, so the next writer cleans up.
        """
        if self._is_settled:
            return True
        data = self.files.read(RECORD)
        return data is not None and (
            from_bytes(data, self.where).commit == self.record.commit
        )

    def safety(self) -> str:
        """What a reader finds now, for the message of a failure."""
        record = self.record
        if not record.is_committed:
            return "0 draws are safe"
        try:
            data = read_surely(self.base, RECORD)
            now = None if data is None else from_bytes(data, self.where)
            if now is not None and self._is_ours(now) and is_complete(self.files, now):
                return f"{min(record.draws)} draws are safe"
        except (OSError, CheckpointError) as e:
            return f"{min(record.draws)} draws were committed; reading fails: {e}"
        return (
            f"0 draws are safe: files of {min(record.draws)} committed draws are gone"
        )

    def _is_ours(self, found: Record) -> bool:
        """Whether it is the last record, or that of a commit that has failed here."""
        here = self.record
        return found.commit == here.commit or found.writer == here.writer


def _digest(record: bytes | None) -> str:
    return hashlib.sha256(record or b"").hexdigest()
