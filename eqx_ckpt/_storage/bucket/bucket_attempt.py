"""Saving a checkpoint in a bucket, where nothing can be renamed.

Its objects are written below a fresh prefix. Then the manifest, which points to them,
is created if none exists: the one operation that succeeds for one writer only.
"""

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Sequence
from types import TracebackType

from ..._errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError
from ..._format.manifest import foreign, MANIFEST
from ..._format.manifest_parser import from_bytes, HEAD, unrelated_keys
from ..._format.references import attempt_at, attempts_of, SWEPT
from ..._format.sample_record import RECORD
from ..._types import Layout
from ..calls.threads import both
from ..interface.place import Attempt, run_of, Share, Shown
from ..interface.referred_chunks import stored_chunks
from ..interface.replacing import already_there, inside, remove_replaced
from ..interface.sure_reads import (
    first_surely,
    listed_and_missing,
    missing_surely,
    read_surely,
    TRIES,
)
from . import publication
from .heartbeat import Heartbeat, SHOWN
from .keyvalue_place import KeyValues, Versioned
from .reference_marks import may_be_referred_to


logger = logging.getLogger("eqx_ckpt")


# `@<uuid>/`, the prefix of an attempt.
PREFIX = re.compile(r"@[0-9a-f]{32}/")


PROBE = "probe"


# The buckets that passed the test of conditional writes, by their identity.
_keep_conditions: set[tuple[object, ...]] = set()


class BucketAttempt(Attempt):
    """Keys below a fresh prefix, which the manifest, created last, points to."""

    def __init__(self, target: KeyValues, layout: Layout, overwrite: bool) -> None:
        self._target = target
        self._heartbeat: Heartbeat | None = None
        (self._old, keys), _ = both(
            lambda: self._look(overwrite),
            lambda: check_above(target),
        )
        self._check_keys(keys)
        self.root = f"@{uuid.uuid4().hex}/"
        self._place = target / self.root
        self.chunks = target.layouts[layout](self._place)
        self._is_ours = True
        # Whether others may have seen the manifest, and refer to what is here.
        self._was_shown = False
        try:
            if target.spec.get("use_conditional_write", True):
                check_conditions(self._place, replace=self._old.value is not None)
        except BaseException:
            self._clean_up()
            raise
        self._heartbeat = Heartbeat(self._place)

    def _look(self, overwrite: bool) -> tuple[Versioned, list[str]]:
        """The existing manifest and keys; raise if they may not be replaced."""
        for _ in range(TRIES):
            old, keys = both(
                lambda: self._target.read_version(MANIFEST), self._target.list_keys
            )
            if old.value is not None and not overwrite:
                raise already_there(str(self._target))
            # Another writer may have committed between the two requests.
            if old.value is not None or MANIFEST not in keys:
                return old, keys
        raise listed_and_missing(self._target, MANIFEST)

    def _check_keys(self, keys: Sequence[str]) -> None:
        """Raise if there are keys that do not belong to a checkpoint."""
        where = str(self._target)
        keys = [key for key in keys if not PREFIX.match(key)]
        unrelated = unrelated_keys(keys, self._old.value, where)
        other = first_surely(self._target, unrelated)
        if other is not None:
            raise CheckpointExistsError(
                f"{where} holds something else, such as {other!r}. Nothing was "
                "saved; choose another path."
            )

    def show(self) -> Shown:
        assert self._heartbeat is not None
        self._heartbeat.show()
        return super().show()

    def commit(self, manifest: bytes) -> None:
        assert self._heartbeat is not None
        self._heartbeat.check()
        publishing = publication.Publication(self._target, manifest, self._old)
        self._was_shown = True
        try:
            publishing.publish()
            self._is_ours = False
            if self._heartbeat.is_late() or publishing.is_unanswered:
                self._check_data(publishing, manifest)
        except BaseException as e:
            self._is_ours = not (publishing.is_possible or publishing.is_unanswered)
            if publishing.is_possible:
                e.add_note(
                    "Whether the checkpoint was saved is not known: look again when "
                    f"the store answers. ({self._target})"
                )
            raise
        if self._old.value is not None:
            self._remove_old(self._old.value, publishing, manifest)

    def _check_data(self, publishing: publication.Publication, manifest: bytes) -> None:
        """Raise if the data were removed before the manifest that is there was.

        A manager marks what it removes, and looks for the manifest after that. So
        either it has seen the manifest, or its mark, or what it has left, is seen here.
        And the first request for the manifest may have had no answer: what it created
        may have been deleted, with the data, before the next one.
        """
        assert self._heartbeat is not None
        parsed = from_bytes(manifest, str(self._target))
        chunks = stored_chunks(self._target, parsed)
        run = run_of(self._target)
        elsewhere = (run / attempt for attempt in attempts_of(parsed.references))
        places = [self._place, *elsewhere]
        problem: Exception = CheckpointError(f"A manager is removing {self._place}.")
        for pause in (0.0, *publication.PAUSES):
            time.sleep(pause)
            try:
                is_marked = any(SWEPT in place.list_keys() for place in places)
                is_missing = bool(missing_surely(chunks, parsed.leaves))
            except (OSError, CheckpointError) as e:
                problem = e
                continue
            if is_missing:
                publishing.take_back()
                self._heartbeat.check()
                raise CheckpointError(
                    f"{self._target} was removed by another process while it was "
                    "saved. Save again."
                )
            if not is_marked:
                return
        raise problem

    def _remove_old(
        self, old: bytes, publishing: publication.Publication, manifest: bytes
    ) -> None:
        """Delete what was replaced, if the new data are seen to be intact."""
        try:
            parsed = from_bytes(manifest, str(self._target))
            chunks = stored_chunks(self._target, parsed)
            problem = missing_surely(chunks, parsed.leaves)
        except (OSError, CheckpointError) as e:
            _warn(e)
            return

        def remove() -> None:
            try:
                remove_data(self._target, old)
            except (OSError, CheckpointError) as e:
                _warn(e)

        where = str(self._target)
        remove_replaced(where, problem, remove=remove, put_back=publishing.take_back)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clean_up()
        is_missing = isinstance(error, CorruptCheckpointError | ConnectionError)
        if is_missing and self._is_ours and self._heartbeat is not None:
            # A manager has removed the data that are missing.
            self._heartbeat.check()

    def _clean_up(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._is_ours:
            try:
                if not (self._was_shown and may_be_referred_to(self._target)):
                    self._target.delete_below(self.root)
            except (OSError, CheckpointError) as e:
                logger.warning("Could not delete %s: %s", self._place, e)


def _warn(error: Exception) -> None:
    logger.warning("Could not delete what was replaced: %s", error)


class BucketShare(Share):
    """Writes below the prefix of another process's attempt."""

    def __init__(self, place: KeyValues, layout: Layout) -> None:
        if read_surely(place, SHOWN) is None:
            # The same URL is a different store for each process.
            raise FileNotFoundError(place.url(SHOWN))
        self.chunks = place.layouts[layout](place)

    def flush(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def check_above(place: KeyValues) -> None:
    """Raise if a location is in a checkpoint or a recording, unless it is its state."""
    what, above = whole_above(place)
    if what and not (place.is_state and what == "recording"):
        raise inside(str(place), what, repr(above))


def whole_above(place: KeyValues) -> tuple[str, str]:
    """The closest checkpoint or recording above: which of them, and where."""
    key = _closest_above(place.at(""), place.spec["path"].rstrip("/"))
    folder, _, file = key.rpartition("/")
    what = "recording" if file == RECORD else "checkpoint"
    return (what, place.at(f"{folder}/").url()) if key else ("", "")


def _closest_above(bucket: KeyValues, path: str) -> str:
    """The key of what makes a location above a path a checkpoint or a recording."""
    parts = path.split("/")
    above = ["".join(f"{part}/" for part in parts[:i]) for i in range(len(parts))]
    keys = [folder + file for folder in above[::-1] for file in (MANIFEST, RECORD)]
    # It may be allowed to read less than the whole bucket.
    with contextlib.suppress(PermissionError):
        for key, value in zip(keys, bucket.read_all(keys), strict=True):
            is_there = isinstance(value, bytes)
            if is_there and (key.endswith(RECORD) or HEAD.match(value)):
                return key
    return ""


def check_conditions(place: KeyValues, *, replace: bool) -> None:
    """Raise if the store ignores conditions: two writers would both succeed."""
    spec = place.spec
    store = (spec["driver"], spec.get("endpoint"), spec.get("bucket"), replace)
    if store in _keep_conditions:
        return
    refused: CheckpointError | None = None
    for _ in range(2):  # One answer alone may be wrong.
        try:
            if _keeps_conditions(place, replace):
                _keep_conditions.add(store)
                return
        except CheckpointError as e:
            refused = e
    if refused:
        # Raises if the refusal has another cause than the condition.
        place.write(PROBE, b"")
    what = "create an object only if there is none"
    if replace:
        what = "replace a checkpoint only if nobody else has"
    raise CheckpointError(
        f"The store of {place} cannot {what}, so that of two writers both would seem "
        "to succeed. Nothing was saved. If nobody else ever saves there, say so: "
        "`eqx_ckpt.StorePath(url, single_writer=True)`. Or save to another path."
    ) from refused


def _keeps_conditions(place: KeyValues, replace: bool) -> bool:
    """Request a write that the store must refuse."""
    absent = place.read_version(PROBE)
    place.write(PROBE, b"first", absent.version)
    place.write(PROBE, b"second", absent.version)
    found = place.read_version(PROBE)
    expected = b"first"
    if replace:
        place.write(PROBE, b"third", found.version)
        place.write(PROBE, b"fourth", found.version)
        found, expected = place.read_version(PROBE), b"third"
    place.delete([PROBE])
    return found.value == expected


def remove_data(place: KeyValues, manifest: bytes) -> bool:
    """Delete what a manifest pointed to; return whether, as others may refer to it.

    Then a sweep deletes it, when nobody does.
    """
    checkpoint = from_bytes(manifest, str(place))
    # To a directory that was copied to the store, nothing can refer.
    is_attempt = bool(attempt_at(place.spec["path"] + checkpoint.root))
    if is_attempt and may_be_referred_to(place):
        return False
    if checkpoint.root:
        place.delete_below(checkpoint.root)
    else:
        keys = place.list_keys()
        others = {MANIFEST, *foreign(keys, checkpoint)}
        place.delete([key for key in keys if key not in others])
    return True
