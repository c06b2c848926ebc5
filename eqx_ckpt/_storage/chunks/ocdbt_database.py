"""Arrays whose chunks are in one OCDBT database, in any storage."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TYPE_CHECKING

from fastcrc import crc32

from ..._errors import CorruptCheckpointError
from ..._format.leaf_record import LeafRecord
from ..calls.send_window import window_of
from ..calls.tensorstore_calls import (
    contradicts,
    KvSpec,
    open_kvstore,
    own_context,
    resolved,
    wait_for,
)
from ..interface.chunk_bytes import Problem, Wanted
from ..interface.place import Storage
from .chunk_values import check_limits, ChunkValues, Target
from .ocdbt_nodes import Location
from .ocdbt_tree import DatabaseTree


if TYPE_CHECKING:
    import tensorstore as ts


# Seconds: a database retries for ever if a store refuses a valid request.
_COMMIT = 900.0


_MANIFEST = re.compile(r"(^|/)manifest\.[^/]*$")


class Database(ChunkValues):
    """All chunks are in one database, which the storage holds as a few values."""

    @property
    def spec(self) -> KvSpec:
        return {
            "driver": "ocdbt",
            "base": self.place.spec,
            **self.place.database.read,
        }

    @property
    def new_spec(self) -> KvSpec:
        """As `spec`, for a database to be written."""
        return self.spec | self.place.database.write

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        check_limits(self.place, leaves, lambda name, record: "")

    def target(self) -> Target:
        return _Transactions(self)

    def part(self, name: str) -> "Database":
        return type(self)(self.place / name)

    def merge(self, names: Sequence[str]) -> None:
        import tensorstore as ts

        # TensorStore links only within one context.
        context = own_context()
        transaction = ts.Transaction(atomic=True)
        whole, *parts = [
            wait_for(
                ts.KvStore.open(resolved(part.new_spec), context=context),
                part.place.url(),
            )
            for part in (self, *map(self.part, names))
        ]
        target = whole.with_transaction(transaction)
        for linking in [part.experimental_copy_range_to(target) for part in parts]:
            _wait_for_write(self.place, linking)
        _wait_for_write(self.place, transaction.commit_async(), most=_COMMIT)

    def listed(self) -> set[str]:
        # One that has lost chunks may not be one that can be listed.
        return set()

    def problem(self) -> str:
        return self.place.database_problem()

    def missing(self, wanted: Iterable[Wanted]) -> str:
        there = {*self.place.list_keys()}
        keys = [one.chunk.key for one in wanted]
        entries = DatabaseTree(self.place).look_up(key.encode() for key in keys)
        for key in keys:
            entry = entries.get(key.encode(), Problem("not in the database"))
            if isinstance(entry, Problem):
                return f"{key} is missing: {entry.text}"
            if isinstance(entry, Location) and entry.file not in there:
                return f"{key} is missing: {entry.file} is"
        return ""

    def verify(self) -> None:
        """Raise if a manifest of the database is damaged; restores read the last."""
        keys = [key for key in self.place.list_keys() if _MANIFEST.search(key)]
        for key, data in zip(keys, self.place.read_all(keys), strict=True):
            # The last four bytes are the checksum of all the others.
            is_whole = isinstance(data, bytes) and data[-4:] == crc32.iscsi(
                data[:-4]
            ).to_bytes(4, "little")
            if not is_whole:
                raise CorruptCheckpointError(
                    f"{self} is damaged. All leaves are what was saved, but {key} "
                    "of their database is not. Restore them, and save them again."
                )


class _Transactions(Target):
    """Transactions of a database: one, or several if the values do not fit in memory.

    They need not be atomic together: the manifest is written after the last.
    """

    def __init__(self, database: Database) -> None:
        self._place = database.place
        self._store = self._bound = open_kvstore(database.new_spec)
        self._nbytes = 0
        most = self._place.database.max_transaction
        self._window = window_of(self._place.spec, "to", most)
        self._transaction: ts.Transaction | None = None

    def put(self, key: str, value: bytes) -> None:
        import tensorstore as ts

        if not self._window.has_room(len(value), self._nbytes):
            self.finish()
        if self._transaction is None:
            self._transaction = ts.Transaction(atomic=True)
            self._bound = self._store.with_transaction(self._transaction)
        self._window.send(len(value))
        self._nbytes += len(value)
        _wait_for_write(self._place, self._bound.write(key, value), key)

    def finish(self) -> None:
        if self._transaction is not None:
            since = self._window.mark()
            committing = self._transaction.commit_async()
            _wait_for_write(self._place, committing, most=_COMMIT)
            self._window.arrived(self._nbytes, since)
        self._transaction, self._nbytes = None, 0

    def cancel(self) -> None:
        self._window.given_up(self._nbytes)
        if self._transaction is not None:
            self._transaction.abort()
            if self._place.database.waits:
                # A commit that has begun is not aborted.
                self._transaction.future.exception()


def _wait_for_write(
    place: Storage, future: Any, key: str = "", most: float | None = None
) -> None:
    """Wait; what is missing in a database that is being written was just there."""
    try:
        place.wait_for(future, key, most)
    except CorruptCheckpointError as e:
        problem = f"what was just written is missing, or is not the same ({e})"
        raise contradicts(place.url(key), problem) from None
