"""The only writer below a location in a bucket, where there are no locks.

It holds a lease: an object that changes as long as the writer lives. That makes the
error of a second writer an early one. What keeps two writers apart are conditions: each
value that a commit may refer to, and the commit itself, is written only if nobody else
has written it since.
"""

import contextlib
import itertools
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..._errors import CheckpointError
from ..calls.send_window import Transfers, window_of
from ..calls.threads import start
from ..interface.place import has_a_writer, SoleWriter, WRITER_LOCK
from ..interface.sure_reads import ask_surely, first_surely
from .bucket_attempt import check_above, check_conditions, PROBE
from .heartbeat import clock
from .keyvalue_place import KeyValues
from .store_patience import LAST_PATIENCE


# Seconds between two changes of a lease, and without one until it counts for nothing.
INTERVAL = 5.0


LAPSED_AFTER = 20.0


_POLL = 0.5


_TRIES = 5


# Stands for any version: write without a condition.
_ANY = b""


# Bytes of values whose writes are not waited for, at most.
_MAX_IN_FLIGHT = 48 * 2**20


class _Write(NamedTuple):
    key: str
    value: bytes
    future: Any


class BucketWriter(SoleWriter):
    """Values that are written at once, several at a time, until a flush."""

    def __init__(self, place: KeyValues) -> None:
        self._place = place
        self._conditions = bool(place.spec.get("use_conditional_write", True))
        # The version of each key, for the condition of the next write, as far as it is
        # known.
        self._versions: dict[str, bytes] = {}
        self._absent = _ANY
        self._writing = Transfers[_Write](window_of(place.spec, "to"), _MAX_IN_FLIGHT)
        # The process that this one has joined holds it.
        self._lease: _Lease | None = None

    def acquire(self) -> int:
        check_above(self._place)
        if self._conditions:
            check_conditions(self._place, replace=True)
        self._lease = _Lease(self._place, self._conditions)
        self._lease.start()
        self.join(0)
        return 0

    def join(self, inode: int) -> None:
        absent = self._place.read_version(uuid.uuid4().hex, 1)
        self._absent = absent.version

    def release(self) -> None:
        self._writing.give_up()
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def unrelated_key(self) -> str | None:
        # A writer that was killed may have left them.
        ours = (WRITER_LOCK, PROBE)
        keys = [key for key in self._place.list_keys() if key not in ours]
        return first_surely(self._place, keys)

    def read(self, key: str) -> bytes | None:
        while any(write.key == key for write in self._writing):
            self._finish()
        place = self._place
        found = ask_surely(
            place, key, lambda: place.read_version(key), lambda found: found.value
        )
        self._versions[key] = found.version
        return found.value

    def list(self, folder: str) -> list[str]:
        keys = (self._place / f"{folder}/").list_keys()
        return [f"{folder}/{key}" for key in keys if "/" not in key]

    def make(self, folder: str) -> None: ...

    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        self._begin(key, b"".join(parts), self._versions.get(key, self._absent))

    def replace(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        if key not in self._versions:
            self._versions[key] = self._place.read_version(key, 1).version
            # Whoever has taken the lease has a newer version.
            self._check_held()
        self.write(key, parts)

    def flush(self) -> None:
        while self._writing:
            self._finish()

    def show(self, key: str, value: bytes) -> None:
        self._begin(key, value, _ANY)

    def take_over(self, key: str, value: bytes) -> None:
        self.commit(key, value)

    def commit(self, key: str, value: bytes) -> None:
        self._check()
        version = self._versions.get(key, self._absent)
        for _ in range(_TRIES):
            written = self._wait(self._write(key, value, version))
            found = self._place.read_version(key) if not written else None
            if found is None or found.value == value:
                self._versions[key] = written if found is None else found.version
                return
            if found.version != version:
                break
        raise has_a_writer(str(self._place))

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        self._check()
        if not keys:
            return
        if self._lease is None or not self._lease.is_held():
            raise has_a_writer(str(self._place))
        for key in keys:
            self._versions.pop(key, None)
        self._place.delete(keys)

    def forget(self) -> None:
        # A request that was sent may still arrive. Wait for it, so that what it wrote
        # can be deleted.
        while self._writing:
            with contextlib.suppress(OSError, CheckpointError):
                self._finish()

    def _begin(self, key: str, value: bytes, version: bytes) -> None:
        while not self._writing.has_room(len(value)):
            self._finish()
        future = self._write(key, value, version)
        self._writing.add(_Write(key, value, future), len(value))

    def _write(self, key: str, value: bytes, version: bytes) -> Any:
        condition = version if self._conditions and version != _ANY else None
        return self._place.writing(key, value, condition)

    def _wait(self, future: Any) -> bytes:
        return self._place.wait_for(future).generation

    def _finish(self) -> None:
        """Wait for the oldest write."""
        with self._writing.oldest() as write:
            self._settle(*write)

    def _settle(self, key: str, value: bytes, future: Any) -> None:
        """Wait for a write.

        It is refused if a request of a dead writer has arrived since, or if its own
        answer was lost. As long as the lease is ours, it is written over that.
        """
        for _ in range(_TRIES):
            written = self._wait(future)
            if written:
                self._versions[key] = written
                return
            found = self._place.read_version(key)
            if found.value == value:
                self._versions[key] = found.version
                return
            self._check_held()
            future = self._write(key, value, found.version)
        raise has_a_writer(self._place.url(key))

    def _check_held(self) -> None:
        """Ask the store; a process that has joined relies on the one with the lease."""
        if self._lease is not None and not self._lease.is_held():
            raise has_a_writer(str(self._place))

    def _check(self) -> None:
        if self._lease is not None and self._lease.is_lost:
            raise has_a_writer(str(self._place))


class _Lease:
    """An object that a thread changes, so that a second writer gives up.

    **Attributes:**

    - `is_lost`: whether another writer has taken it.
    """

    def __init__(self, place: KeyValues, conditions: bool) -> None:
        self._place = place
        self._conditions = conditions
        self._name = uuid.uuid4().hex
        self.is_lost = False
        if not self._put(0, _lapsed(place)):
            raise has_a_writer(str(place))
        self._version = place.read_version(WRITER_LOCK).version
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._is_beating = False

    def start(self) -> None:
        """Start the thread; without it, the conditions alone keep others away."""
        self._is_beating = start(self._thread)

    def _put(self, number: int, version: bytes) -> bool:
        """Whether the lease is ours now; after a lost answer, its value tells."""
        value = f"{self._name} {number}".encode()
        condition = version if self._conditions else None
        if self._place.write(WRITER_LOCK, value, condition):
            return True
        return self._place.read(WRITER_LOCK) == value

    def _beat(self) -> None:
        for number in itertools.count(1):
            if self._ended.wait(INTERVAL):
                return
            with contextlib.suppress(OSError, CheckpointError):
                if not self._put(number, self._version):
                    self.is_lost = True
                    return
                self._version = self._place.read_version(WRITER_LOCK).version

    def is_held(self) -> bool:
        """Ask the store whether another writer has taken it."""
        value = self._place.read(WRITER_LOCK) or b""
        return value.startswith(self._name.encode())

    def end(self) -> None:
        """Let others write at once."""
        self._ended.set()
        if self._is_beating:
            self._thread.join(LAST_PATIENCE)
        with contextlib.suppress(OSError, CheckpointError):
            if self.is_held():
                self._place.delete([WRITER_LOCK])


def _lapsed(place: KeyValues) -> bytes:
    """The version of a lease that nobody holds; raise if somebody does."""
    first = place.read_version(WRITER_LOCK)
    since = clock()
    found = first
    while found.value is not None and clock() - since < LAPSED_AFTER:
        threading.Event().wait(_POLL)
        found = place.read_version(WRITER_LOCK)
        if found.value is not None and found.value != first.value:
            raise has_a_writer(str(place))
    return found.version
