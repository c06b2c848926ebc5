"""How a checkpoint comes into being in an object store, where nothing can be renamed.

Its objects go below a fresh prefix. Then the manifest, which points to them, is created
where there was none: the one step that a store does for one writer only.
"""

import itertools
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    LeafNameError,
)
from .._format.chunks import chunk_keys
from .._format.leaves import LeafRecord
from .._format.manifest import foreign, MANIFEST
from .._format.parse import from_bytes, strangers
from .._types import Layout
from .directory import already_there, Attempt, DirectoryAttempt
from .key_values import (
    delete_below,
    delete_keys,
    list_keys,
    read_key,
    read_version,
    write_key,
)
from .kvstore import KvSpec, shown
from .patience import LAST_PATIENCE


logger = logging.getLogger("eqx_ckpt")

# `@<uuid>/`, the prefix of an attempt.
ATTEMPT = re.compile(r"@[0-9a-f]{32}/")
_STEP_ATTEMPT = re.compile(r"[0-9]{6,}/@[0-9a-f]{32}/")
# Seconds in which nothing happens below the prefix of an attempt, until a manager takes
# it for dead; and until it takes itself for dead, which is sooner.
GRACE = 600.0
_OWN_GRACE = 300.0
_BEAT = 60.0
# Of S3 and of GCS.
_MAX_KEY = 1024
_MAX_OBJECT = 5 * 2**30
# Of the keys of ours that have no leaf's name, such as `@<uuid>/p1234/d/<uuid>`.
_OWN = 80
_TRIES = 2
_ALIVE = "alive"
_PROBE = "probe"
# The buckets that were seen to keep conditions, by what identifies them.
_keep_conditions: set[tuple[object, ...]] = set()


def check_layout(layout: Layout) -> None:
    if layout not in ("zarr", "ocdbt"):
        raise CheckpointError(f"`layout` is {layout!r}. Pass 'zarr' or 'ocdbt'.")


def check_limits(
    target: KvSpec, leaves: Mapping[str, LeafRecord], layout: Layout
) -> None:
    """Raise if a key or a chunk is larger than object stores take."""
    check_layout(layout)
    if target["driver"] not in ("s3", "gcs"):
        return
    problems: list[str] = []
    length = len(target["path"].encode()) + _OWN
    if length > _MAX_KEY:
        problems.append(f"- any leaf: without its name, keys would have {length} bytes")
    for name, record in leaves.items():
        if not record.is_array:
            continue
        last = chunk_keys(record.data_shape, record.chunk_shape)[-1:]
        key = max(MANIFEST, *last, key=len)
        length = len(f"{target['path']}@{'0' * 32}/{name}/{key}".encode())
        nbytes = math.prod(record.chunk_shape) * record.itemsize
        if layout == "zarr" and length > _MAX_KEY:
            problems.append(f"- {name!r}: its key would have {length} bytes")
        elif nbytes > _MAX_OBJECT:
            problems.append(f"- {name!r}: a chunk would have {nbytes} bytes")
    if problems:
        raise LeafNameError(
            f"{shown(target)} cannot take these leaves:\n"
            + "\n".join(problems)
            + f"\nA key has {_MAX_KEY} bytes at most, an object {_MAX_OBJECT}. Pass "
            "`layout='ocdbt'`, which has keys of any length, or a shorter path; shard "
            "the leaf so that its shards can be cut evenly."
        )


class StoreAttempt:
    """Keys below a fresh prefix, which the manifest, created last, points to."""

    def __init__(self, target: KvSpec, overwrite: bool) -> None:
        self._target = target
        self._life: _Life | None = None
        self._old = read_version(target, MANIFEST)
        if self._old.value is not None and not overwrite:
            raise already_there(shown(target))
        self._check_keys()
        self.root = f"@{uuid.uuid4().hex}/"
        self.base = {**target, "path": target["path"] + self.root}
        self._is_ours = True
        try:
            if target.get("use_conditional_write", True):
                _check_conditions(self.base, replace=self._old.value is not None)
        except BaseException:
            self.abandon()
            raise
        self._life = _Life(self.base)

    def _check_keys(self) -> None:
        """Raise if there is anything that is not of a checkpoint."""
        where = shown(self._target)
        keys = [key for key in list_keys(self._target) if not ATTEMPT.match(key)]
        others = strangers(keys, self._old.value, where)
        if others:
            raise CheckpointExistsError(
                f"{where} holds something else, such as {others[0]!r}. Nothing was "
                "saved; choose another path."
            )

    def commit(self, manifest: bytes) -> None:
        assert self._life is not None
        self._life.check()
        # From here on a request may arrive, whatever is heard of it.
        self._is_ours = False
        try:
            is_there = self._publish(manifest)
        except Exception as e:
            e.add_note(
                "Whether the checkpoint was saved is not known: look again when the "
                f"store answers. If it was, it is whole. ({shown(self._target)})"
            )
            raise
        if not is_there:
            self._is_ours = True
            raise already_there(shown(self._target))
        if self._old.value is not None:
            self._remove_old(self._old.value)

    def _publish(self, manifest: bytes) -> bool:
        """Whether the manifest is there now; raises if that cannot be known.

        If an answer is lost, TensorStore asks again, and is then refused because of
        its own first request. So what is there is compared with what was to be.
        """
        for _ in range(_TRIES):
            problem: Exception | None = None
            try:
                if write_key(self._target, MANIFEST, manifest, self._old.version):
                    return True
            except (OSError, CheckpointError) as e:
                problem = e
            found = read_key(self._target, MANIFEST)
            if found == manifest:
                return True
            if found != self._old.value and self._is_of_another(found):
                return False
            if problem is not None:
                raise problem
        raise CheckpointError(
            f"{shown(self._target)} refuses the manifest, and nobody else's is there."
        )

    def _is_of_another(self, manifest: bytes | None) -> bool:
        """Not if it is damaged, maybe on its way: then it could be our own."""
        if manifest is None:
            return True  # Somebody has removed what was to be replaced.
        try:
            return from_bytes(manifest, shown(self._target)).root != self.root
        except CorruptCheckpointError:
            return False
        except CheckpointError:
            return True

    def _remove_old(self, old: bytes) -> None:
        try:
            remove_data(self._target, old)
        except (OSError, CheckpointError) as e:
            logger.warning("Could not delete what was replaced: %s", e)

    def abandon(self) -> None:
        if self._life is not None:
            self._life.end()
        if self._is_ours:
            try:
                delete_below(self._target, self.root)
            except (OSError, CheckpointError) as e:
                logger.warning("Could not delete %s: %s", shown(self.base), e)


class _Life:
    """Signs of life below the prefix of an attempt, as long as that goes on.

    They are for managers, which look whether anything changes there: no clock of two
    machines is compared.
    """

    def __init__(self, base: KvSpec) -> None:
        self._base = base
        self._last = clock()
        self._longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        for number in itertools.count():
            is_last = self._ended.wait(_BEAT)
            try:
                if not is_last:
                    now = clock()
                    write_key(self._base, f"{_ALIVE}.{number}", b"1")
                    self._longest = max(self._longest, now - self._last)
                    self._last = now
                if number:
                    delete_keys(self._base, [f"{_ALIVE}.{number - 1}"])
            except (OSError, CheckpointError) as e:
                logger.debug("No sign of life in %s: %s", shown(self._base), e)
            if is_last:
                return

    def check(self) -> None:
        """Raise if a manager could have taken this attempt for dead, now or before."""
        silent = max(self._longest, clock() - self._last)
        if silent > _OWN_GRACE:
            raise CheckpointError(
                f"For {silent:.0f} seconds this save was suspended, or could not reach "
                f"{shown(self._base)}, and a manager may have removed its data "
                "meanwhile. Nothing was saved; save again."
            )

    def end(self) -> None:
        self._ended.set()
        self._thread.join(LAST_PATIENCE)


def clock() -> float:
    """Seconds that nobody sets, and that go on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _check_conditions(base: KvSpec, *, replace: bool) -> None:
    """Raise unless the store keeps conditions: of two writers, both would win."""
    place = (base["driver"], base.get("endpoint"), base.get("bucket"), replace)
    if place in _keep_conditions:
        return
    refused: CheckpointError | None = None
    try:
        keeps = _keeps_conditions(base, replace)
    except CheckpointError as e:
        write_key(base, _PROBE, b"")  # Raises, if it was not for the condition.
        keeps, refused = False, e
    if not keeps:
        what = "create an object only if there is none"
        if replace:
            what = "replace a checkpoint only if nobody else has"
        raise CheckpointError(
            f"The store of {shown(base)} cannot {what}, so that of two writers both "
            "would seem to succeed. Nothing was saved. If nobody else ever saves "
            "there, say so: `eqx_ckpt.Store(url, single_writer=True)`. Or save to "
            "another path."
        ) from refused
    _keep_conditions.add(place)


def _keeps_conditions(base: KvSpec, replace: bool) -> bool:
    """Ask the store for what it must refuse."""
    absent = read_version(base, _PROBE)
    write_key(base, _PROBE, b"first", absent.version)
    write_key(base, _PROBE, b"second", absent.version)
    found = read_version(base, _PROBE)
    expected = b"first"
    if replace:
        write_key(base, _PROBE, b"third", found.version)
        write_key(base, _PROBE, b"fourth", found.version)
        found, expected = read_version(base, _PROBE), b"third"
    delete_keys(base, [_PROBE])
    return found.value == expected


def remove_checkpoint(base: KvSpec) -> None:
    """Delete a checkpoint: first the manifest, so that it is never half there."""
    manifest = read_key(base, MANIFEST)
    delete_keys(base, [MANIFEST])
    if manifest is not None:
        remove_data(base, manifest)


def remove_data(base: KvSpec, manifest: bytes) -> None:
    """Delete what a manifest points to."""
    checkpoint = from_bytes(manifest, shown(base))
    if checkpoint.root:
        delete_below(base, checkpoint.root)
    else:
        # A directory that was copied to the store.
        keys = list_keys(base)
        others = {MANIFEST, *foreign(keys, checkpoint)}
        delete_keys(base, [key for key in keys if key not in others])


class Debris:
    """What dead attempts have left in a run, as one manager sees it over time."""

    def __init__(self, run: KvSpec) -> None:
        self._run = run
        # By prefix: what was there, and since when it is the same.
        self._seen: dict[str, tuple[int, float]] = {}
        self._in_use: set[str] = set()

    def sweep(self) -> None:
        """Delete the attempts in which nothing has changed for `GRACE`."""
        found: dict[str, list[str]] = {}
        everything = list_keys(self._run)
        manifests = {key for key in everything if key.endswith(f"/{MANIFEST}")}
        self._in_use = {p for p in self._in_use if _manifest_of(p) in manifests}
        for key in everything:
            if (m := _STEP_ATTEMPT.match(key)) and m[0] not in self._in_use:
                found.setdefault(m[0], []).append(key)
        seen, now = self._seen, clock()
        self._seen = {}
        for prefix, keys in found.items():
            state = hash(tuple(sorted(keys)))
            before, since = seen.get(prefix, (0, now))
            if state != before:
                self._seen[prefix] = state, now
            elif now - since < GRACE:
                self._seen[prefix] = before, since
            elif self._is_in_use(prefix):
                self._in_use.add(prefix)
            else:
                logger.info("Removing %s, which a dead process left.", prefix)
                delete_below(self._run, prefix)

    def _is_in_use(self, prefix: str) -> bool:
        manifest = read_key(self._run, _manifest_of(prefix))
        if manifest is None:
            return False
        try:
            return prefix.partition("/")[2] == from_bytes(manifest, prefix).root
        except CheckpointError:
            return True  # Damaged: its data may still be of use.


def _manifest_of(prefix: str) -> str:
    """The manifest beside the prefix of an attempt."""
    return f"{prefix.partition('/')[0]}/{MANIFEST}"


# How to begin an attempt, by the driver of its target.
ATTEMPTS: dict[str, Callable[[KvSpec, bool], Attempt]] = {
    "file": DirectoryAttempt,
    "memory": StoreAttempt,
    "s3": StoreAttempt,
    "gcs": StoreAttempt,
}
