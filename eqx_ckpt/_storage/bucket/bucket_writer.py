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
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._errors import CheckpointError
from ..calls.send_window import Transfers, window_of
from ..calls.threads import start
from ..interface.place import has_a_writer, SoleWriter, WRITER_LOCK
from ..interface.sure_reads import ask_surely, first_surely
from .bucket_attempt import check_above, check_conditions, PROBE
from .heartbeat import clock
from .keyvalue_place import KeyValues, Versioned
from .store_patience import LAST_PATIENCE


# Seconds between two changes of a lease, and without one until it counts for nothing.
INTERVAL = 5.0


LAPSED_AFTER = 20.0


_POLL = 0.5


_TRIES = 5


# A lease that nobody holds.
_FREE = b"free"


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
        # A process that has joined has none: it knows the name of the first one's.
        self._lease: _Lease | None = None
        self._name = b""
        # Whether versions were read since it was asked who has the lease: another
        # writer may have written them.
        self._must_ask = False

    def acquire(self) -> int:
        check_above(self._place)
        if self._conditions:
            check_conditions(self._place, replace=True)
        self._lease = _Lease(self._place, self._conditions)
        self._lease.start()
        self.join(self._lease.number)
        return self._lease.number

    def join(self, number: int) -> None:
        self._name = _name_of(number)
        absent = self._place.read_version(uuid.uuid4().hex, 1)
        self._absent = absent.version

    def release(self) -> None:
        self.forget()
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
        self._know(key, found.version)
        return found.value

    def _know(self, key: str, version: bytes) -> None:
        """Note a version that was read."""
        self._versions[key] = version
        self._must_ask = True

    def list(self, folder: str) -> list[str]:
        keys = (self._place / f"{folder}/").list_keys()
        return [f"{folder}/{key}" for key in keys if "/" not in key]

    def make(self, folder: str) -> None: ...

    def write(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        self._begin(key, b"".join(parts), self._versions.get(key, self._absent))

    def replace(self, key: str, parts: Sequence[memoryview | bytes]) -> None:
        if key not in self._versions:
            self._know(key, self._place.read_version(key, 1).version)
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

    def forget(self) -> None:
        self._writing.give_up()

    def _begin(self, key: str, value: bytes, version: bytes) -> None:
        while not self._writing.has_room(len(value)):
            self._finish()
        if self._must_ask:
            self._check_held()
            self._must_ask = False
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
        """Ask the store who has the lease; who takes it later writes new versions."""
        value = self._place.read(WRITER_LOCK) or b""
        if not value.startswith(self._name):
            raise has_a_writer(str(self._place))

    def _check(self) -> None:
        if self._lease is not None and self._lease.is_lost:
            raise has_a_writer(str(self._place))


class _Lease:
    """An object that a thread changes, so that a second writer gives up.

    **Attributes:**

    - `number`: what its value begins with.
    - `is_lost`: whether another writer has taken it.
    """

    def __init__(self, place: KeyValues, conditions: bool) -> None:
        self._place = place
        self._conditions = conditions
        self.number = uuid.uuid4().int
        self.is_lost = False
        self._version = _lapsed(place)
        if not self._put(b"%s 0" % _name_of(self.number)):
            raise has_a_writer(str(place))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._is_beating = False

    def start(self) -> None:
        """Start the thread; without it, the conditions alone keep others away."""
        self._is_beating = start(self._thread)

    def _put(self, value: bytes) -> bool:
        """Replace the value if the lease is still ours; return whether it is."""
        condition = self._version if self._conditions else None
        future = self._place.writing(WRITER_LOCK, value, condition)
        if written := self._place.wait_for(future).generation:
            self._version = written
            return True
        # The answer was lost, or an earlier value has arrived late.
        found = self._place.read_version(WRITER_LOCK)
        is_ours = (found.value or b"").startswith(_name_of(self.number))
        if is_ours:
            self._version = found.version
        return is_ours

    def _beat(self) -> None:
        for number in itertools.count(1):
            if self._ended.wait(INTERVAL):
                return
            with contextlib.suppress(OSError, CheckpointError):
                if not self._put(b"%s %d" % (_name_of(self.number), number)):
                    self.is_lost = True
                    return

    def end(self) -> None:
        """Let others write at once."""
        self._ended.set()
        if self._is_beating:
            self._thread.join(LAST_PATIENCE)
        with contextlib.suppress(OSError, CheckpointError):
            self._put(_FREE)


def _name_of(number: int) -> bytes:
    return b"%032x" % number


def _is_held(lease: Versioned) -> bool:
    return lease.value not in (None, _FREE)


def _lapsed(place: KeyValues) -> bytes:
    """The version of a lease that nobody holds; raise if somebody does."""
    first = place.read_version(WRITER_LOCK)
    since = clock()
    found = first
    while _is_held(found) and clock() - since < LAPSED_AFTER:
        threading.Event().wait(_POLL)
        found = place.read_version(WRITER_LOCK)
        if _is_held(found) and found.value != first.value:
            raise has_a_writer(str(place))
    return found.version
