"""The steps of a run in a bucket, and the data that dead attempts left there."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.manifest import MANIFEST, Manifest
from ..._format.manifest_parser import from_bytes, HEAD_BYTES
from ..._format.references import SWEPT
from ..calls.tensorstore_calls import contradicts
from ..calls.threads import at_once, both
from ..interface.committed_manifest import (
    committed_steps,
    is_checkpoint,
    problem_of,
    read_metadata,
    root_of,
)
from ..interface.place import (
    is_beside,
    is_misspelled_step,
    is_step,
    step_name,
    Steps,
)
from ..interface.sure_reads import read_surely
from . import heartbeat
from .bucket_attempt import PREFIX, remove_data
from .keyvalue_place import KeyValues
from .own_chunks import own_bytes
from .reference_marks import Marks


logger = logging.getLogger("eqx_ckpt")


# Seconds between two looks at what may be dead.
_PAUSE = 30.0


_STEP_ATTEMPT = re.compile(r"([0-9]+)/@[0-9a-f]{32}/")


class BucketSteps(Steps):
    """The steps of a run in a bucket, found in one listing of all keys."""

    only_time_tells = True

    def __init__(self, run: KeyValues) -> None:
        self._run = run
        self._orphans = OrphanSweeper(run)
        # By step, in the last list of all keys: the attempts, the metadata or what is
        # wrong with them; and by root, what is remembered for the next list.
        self._attempts: dict[int, set[str]] = {}
        self._found: dict[int, Any] = {}
        self._by_root: dict[str, Any] = {}
        self._unusable: dict[str, bool] = {}
        # By step, its attempts when it was seen to be intact.
        self._intact: dict[int, set[str]] = {}

    def named(self) -> list[int]:
        return sorted(self._named())

    def _named(self) -> dict[int, bool]:
        """The steps that have a manifest, and whether each has data of its own."""
        found: list[int] = []
        misspelled: list[str] = []
        attempts: dict[int, set[str]] = {}
        everything = self._run.list_keys()
        if not everything:  # One such answer would begin a run anew.
            everything, _ = both(
                self._run.list_keys, lambda: self._run.is_listed(MANIFEST)
            )
        for key in everything:
            step, _, rest = key.partition("/")
            if not is_step(step):
                if rest == MANIFEST and is_misspelled_step(step):
                    misspelled.append(step)
                continue
            if rest == MANIFEST:
                found.append(int(step))
            elif root := PREFIX.match(rest):
                attempts.setdefault(int(step), set()).add(root[0])
        self._unusable = dict.fromkeys(misspelled, True)
        self._attempts = {step: attempts.get(step, set()) for step in found}
        known = self._by_root.copy()
        self._by_root = {
            root: known[root]
            for roots in self._attempts.values()
            for root in roots
            if root in known
        }
        # If another attempt exists too, the manifest may belong to that one by now.
        self._found = {
            step: known[root]
            for step, roots in self._attempts.items()
            for root in roots
            if len(roots) == 1 and root in known
        }
        return {step: bool(roots) for step, roots in self._attempts.items()}

    def metadata(self, step: int) -> Any:
        """As of the last listing; the metadata of all steps are read at once."""
        found = self._found
        if step not in found:
            missing = {step, *self._attempts} - found.keys()
            found.update(at_once(self._read, missing))
        if isinstance(found[step], CheckpointError):
            raise found[step]
        return found[step]

    def _read(self, step: int) -> Any:
        try:
            root, metadata = read_metadata(self._step(step))
        except CheckpointError as e:
            return e
        if root:
            self._by_root[root] = metadata
        return metadata

    def saved(self, doubtful: dict[int, OSError] | None = None) -> list[int]:
        named = self._named()
        # A manifest without data was copied here, or is something else.
        unclear = {step: self._step(step) for step in named if not named[step]}
        clear = [step for step in named if named[step]]
        return sorted([*clear, *committed_steps(unclear, doubtful)])

    def unusable(self) -> dict[str, bool]:
        """Data without a manifest may be those of a living attempt."""
        found = self._unusable
        return {name: True for name in found if is_checkpoint(self._run / f"{name}/")}

    def problem(self, step: int) -> str:
        attempts = self._attempts.get(step, set())
        # If there is one attempt only, it is the one that was seen.
        if len(attempts) == 1 and self._intact.get(step) == attempts:
            return ""
        problem = problem_of(self._step(step))
        if not problem:
            self._intact[step] = attempts
        return problem

    def own_bytes(self, steps: Sequence[int]) -> dict[int, int]:
        found = at_once(self._manifest, steps)
        return own_bytes({step: m for step, m in found.items() if m is not None})

    def _manifest(self, step: int) -> Manifest | None:
        """The manifest of a step, unless that was removed meanwhile."""
        place = self._step(step)
        data = read_surely(place, MANIFEST)
        return None if data is None else from_bytes(data, str(place))

    def remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                _remove(self._step(step))
            except CorruptCheckpointError as e:
                # The step is removed, and a sweep will find its data.
                logger.warning("Could not delete all of step %d: %s", step, e)

    def beside(self, kind: str) -> list[str]:
        return sorted(key for key in self._run.list_keys(kind) if is_beside(kind, key))

    def read_beside(self, name: str) -> bytes | None:
        return self._run.read(name)

    def write_beside(self, name: str, value: bytes) -> None:
        self._run.write(name, value)

    def delete_beside(self, names: Sequence[str]) -> None:
        self._run.delete(names)

    def sweep(self) -> None:
        self._orphans.sweep()

    def end_sweeps(self) -> None:
        self._orphans.end()

    def orphans(self) -> dict[str, int | None]:
        return dict.fromkeys(map(self._run.url, self._orphans.candidates()))

    def sweep_all(self) -> None:
        """Watch for as long as an attempt may be silent, unless there is none."""
        seen: float | None = None  # When all that is there had been seen.
        while self._orphans.candidates():
            before = heartbeat.clock()
            self._orphans.sweep()
            if seen is None:
                seen = heartbeat.clock()
            elif before - seen >= heartbeat.ORPHANED_AFTER:
                return
            time.sleep(_PAUSE)

    def _step(self, step: int) -> KeyValues:
        return self._run / f"{step_name(step)}/"


def _remove(place: KeyValues) -> None:
    """Delete a checkpoint: the manifest first, so no part is ever visible.

    Its writer, if it had no answer, may create the manifest once more: before it is
    looked for, so that the data stay; or after that, and then it sees the mark.
    """
    manifest = place.read(MANIFEST)
    place.delete([MANIFEST])
    root = root_of((manifest or b"")[:HEAD_BYTES])
    if root:
        place.write(f"{root}{SWEPT}", b"1")
    stays = True
    try:
        if place.is_listed(MANIFEST):
            raise contradicts(place.url(MANIFEST), "it was deleted, and it is listed")
        stays = manifest is not None and not remove_data(place, manifest)
    finally:
        if root and stays:
            place.delete([f"{root}{SWEPT}"])


class _Unknown(NamedTuple):
    """Attempts that may be in use.

    - `found`: their keys, by prefix.
    - `contested`: those of steps that have a manifest and several attempts.
    - `alone`: those that have a manifest, and are the only ones of their step.
    """

    found: dict[str, list[str]]
    contested: set[str]
    alone: set[str]


class OrphanSweeper:
    """Deletes the data of dead attempts, which one manager observes over time.

    And of steps that were deleted, while other steps may have referred to them. What is
    referred to stays.
    """

    def __init__(self, run: KeyValues) -> None:
        self._run = run
        # By prefix: its keys, and those that no manifest needs.
        self._keys, self._unneeded = _Unchanged(), _Unchanged()
        self._in_use: set[str] = set()
        self._marks = Marks(run)
        self._is_ended = threading.Event()

    def end(self) -> None:
        """Ask nothing more, and take every attempt for one that is in use."""
        self._is_ended.set()

    def candidates(self) -> list[str]:
        """The prefixes of attempts with something that nothing refers to.

        They may be alive.
        """
        everything = self._run.list_keys()
        found = self._unknown(everything).found
        unused = self._unused([*found])
        if not unused or not self._read_marks(everything, ()):
            return []
        return [p for p in unused if self._marks.unmarked(p, found[p])]

    def _unknown(self, everything: Sequence[str]) -> "_Unknown":
        """The attempts that are not known to be in use, as all keys show them."""
        found: dict[str, list[str]] = {}
        for key in everything:
            m = _STEP_ATTEMPT.match(key)
            if m and is_step(m[1]):
                found.setdefault(m[0], []).append(key)
        manifests = {key for key in everything if key.endswith(f"/{MANIFEST}")}
        counts = Counter(map(_manifest_of, found))
        contested = {
            prefix
            for prefix in found
            if counts[_manifest_of(prefix)] > 1 and _manifest_of(prefix) in manifests
        }
        # What alone has a manifest beside it stays in use.
        self._in_use = {
            prefix
            for prefix in self._in_use - contested
            if _manifest_of(prefix) in manifests
        }
        unknown = {prefix: found[prefix] for prefix in found.keys() - self._in_use}
        beside = {prefix for prefix in unknown if _manifest_of(prefix) in manifests}
        return _Unknown(unknown, contested, beside - contested)

    def sweep(self) -> None:
        """Delete attempts that have been unused and unchanged for long enough.

        That is `ORPHANED_AFTER`. It begins when the last manifest that names an attempt
        is gone: whoever replaced that may have to put it back. For a key, when the last
        manifest that refers to it is: a list may lag, and lack who refers to it now.
        """
        everything = self._run.list_keys()
        found, contested, alone = self._unknown(everything)
        waiting = found.keys() - contested | {*self._unused([*contested])}
        keys = {prefix: sorted(found[prefix]) for prefix in waiting}
        silent = self._keys.long_enough(keys)
        doubtful = waiting - alone | {*self._unused(sorted(silent & alone))}
        if doubtful and not self._read_marks(everything, silent):
            return
        unneeded = self._unneeded.long_enough(
            {prefix: self._marks.unneeded(prefix, keys[prefix]) for prefix in doubtful}
        )
        unused = self._unused(sorted(silent & unneeded))
        unmarked = {p: self._marks.unmarked(p, keys[p]) for p in unused}
        if removed := {p: of_it for p, of_it in unmarked.items() if of_it}:
            self._remove(removed, silent)

    def _unused(self, prefixes: Sequence[str]) -> list[str]:
        """The attempts that no manifest refers to; the others are remembered."""
        is_in_use = at_once(self._is_in_use, prefixes)
        self._in_use.update(prefix for prefix in prefixes if is_in_use[prefix])
        return [prefix for prefix in prefixes if not is_in_use[prefix]]

    def _is_in_use(self, prefix: str) -> bool:
        """Whether a manifest refers to an attempt, as far as that is not certain.

        Beside a manifest whose own data are not intact, every attempt counts: it may be
        the only copy.
        """
        if self._is_ended.is_set():
            return True
        key, root = _manifest_of(prefix), prefix.partition("/")[2]
        head = self._run.read(key, HEAD_BYTES)
        if head is None:
            return self._run.is_listed(key)
        if root_of(head) == root:
            return True
        manifest = self._run.read(key)
        try:
            named = root if manifest is None else from_bytes(manifest, prefix).root
            place = self._run / prefix.removesuffix(root)
            return named == root or bool(problem_of(place))
        except CheckpointError:
            return True  # Damaged: its data may still be useful.

    def _read_marks(self, everything: Sequence[str], dead: Collection[str]) -> bool:
        """Whether it can be seen what the steps and the living attempts refer to."""
        if self._is_ended.is_set():
            return False
        try:
            self._marks.read(everything, dead)
        except CheckpointError as e:
            logger.warning("Nothing can be swept in %s: %s", self._run, e)
            return False
        return True

    def _remove(
        self, unmarked: Mapping[str, Sequence[str]], dead: Collection[str]
    ) -> None:
        """Delete keys of attempts, but for what is committed, or needed, meanwhile.

        Nothing is deleted because of one answer: what is not needed was not needed
        before, either. Whoever commits something after this has looked sees the mark,
        which is deleted last; so does whoever wants to refer to something.
        """
        for prefix in unmarked:
            (self._run / prefix).write(SWEPT, b"1")
        # What is referred to by now, and by whom; nobody refers to more after this.
        is_known = self._read_marks(self._run.list_keys(), dead)
        for prefix, before in unmarked.items():
            place = self._run / prefix
            if is_known and not self._is_in_use(prefix):
                logger.info("Removing %s, which nothing needs any more.", prefix)
                found = self._marks.unmarked(prefix, before)
                keys = [key.removeprefix(prefix) for key in found]
                place.delete([key for key in keys if key != SWEPT])
            place.delete([SWEPT])


class _Unchanged:
    """Since when keys have been the same, as one manager has seen them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def long_enough(self, keys: Mapping[str, Sequence[str]]) -> set[str]:
        """The prefixes whose keys have been the same for `ORPHANED_AFTER`."""
        seen, now = self._seen, heartbeat.clock()
        self._seen = {}
        found: set[str] = set()
        for prefix, of_prefix in keys.items():
            state = hash(tuple(of_prefix))
            before, since = seen.get(prefix, (None, now))
            self._seen[prefix] = state, since if state == before else now
            if state == before and now - since >= heartbeat.ORPHANED_AFTER:
                found.add(prefix)
        return found


def _manifest_of(prefix: str) -> str:
    """The manifest beside the prefix of an attempt."""
    return f"{prefix.partition('/')[0]}/{MANIFEST}"
