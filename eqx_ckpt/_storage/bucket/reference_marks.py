"""What the steps of a run in a bucket, and its living attempts, refer to."""

import functools as ft
from collections.abc import Collection, Mapping, Sequence

from ..._errors import CheckpointNotFoundError, CorruptCheckpointError
from ..._format.manifest import MANIFEST
from ..._format.manifest_parser import from_bytes
from ..._format.references import INCREMENTAL, keys_referred_to, PIN, pinned_by
from ..calls.threads import at_once, both
from ..interface.place import is_step, is_step_at, run_of
from ..interface.sure_reads import read_surely
from .keyvalue_place import KeyValues


def may_be_referred_to(place: KeyValues) -> bool:
    """Whether other steps may refer to what is, or was, at a place.

    Who refers to it has said so in the run before it looked at the manifest here. So
    this is asked after that is deleted or replaced.
    """
    return is_step_at(place) and _is_incremental(run_of(place))


def _is_incremental(run: KeyValues) -> bool:
    # Much is deleted if it is missing: two wrong answers are not enough.
    ask = ft.partial(read_surely, run, INCREMENTAL, 1)
    return both(ask, ask) != (None, None)


class Marks:
    """What may not be removed of attempts that are not those of a step."""

    def __init__(self, run: KeyValues) -> None:
        self._run = run
        # What manifests name, and refer to; what living attempts may refer to.
        self._keys: set[str] = set()
        self._committed: set[str] = set()
        self._pinned: set[str] = set()
        # By the only attempt of a step, what its manifest refers to.
        self._known: dict[str, set[str]] = {}

    def read(self, everything: Sequence[str], dead: Collection[str]) -> None:
        """Read what is referred to, as all keys of the run show it.

        `dead`: the attempts that cannot be committed any more; who began after these
        were seen lives. Raises if a manifest is damaged, as it may refer to anything.
        """
        self._keys, self._committed, self._pinned = set(), set(), set()
        if INCREMENTAL not in everything and not _is_incremental(self._run):
            return
        attempts: dict[str, set[str]] = {}
        pins: dict[str, str] = {}
        for key in everything:
            step, _, rest = key.partition("/")
            root, _, last = rest.partition("/")
            if root.startswith("@"):
                attempts.setdefault(step, set()).add(f"{step}/{root}/")
                if last.startswith(PIN) and "/" not in last:
                    pins[key] = f"{step}/{root}/"
        steps = [
            step
            for step, _, rest in (key.partition("/") for key in everything)
            if rest == MANIFEST and is_step(step)
        ]
        self._read_steps({step: attempts.get(step, set()) for step in steps})
        for key, attempt in pins.items():
            if attempt in self._committed or attempt in dead:
                continue
            value = read_surely(self._run, key)
            try:
                self._pinned |= pinned_by(value or b"")
            except ValueError as e:
                where = self._run.url(key)
                raise CorruptCheckpointError(f"{where} is damaged: {e}.") from None

    def _read_steps(self, steps: Mapping[str, set[str]]) -> None:
        """Read what steps refer to; those with the same only attempt are known."""
        found = {
            step: (attempt, self._known[attempt])
            for step, attempts in steps.items()
            for attempt in attempts
            if len(attempts) == 1 and attempt in self._known
        }
        found.update(at_once(self._read_step, steps.keys() - found.keys()))
        self._known = {}
        for step, (attempt, keys) in found.items():
            if {attempt} == steps[step]:
                self._known[attempt] = keys
            self._keys |= keys
            self._committed.add(attempt)

    def _read_step(self, step: str) -> tuple[str, set[str]]:
        """The attempt that the manifest of a step names, and what it refers to."""
        place = self._run / f"{step}/"
        data = read_surely(place, MANIFEST)
        try:
            if data is not None:
                manifest = from_bytes(data, str(place))
                keys = keys_referred_to(manifest.leaves, manifest.references)
                return f"{step}/{manifest.root}", keys
        except CheckpointNotFoundError:
            pass  # It is something else.
        return "", set()

    def unneeded(self, attempt: str, keys: Sequence[str]) -> list[str]:
        """The keys of an attempt, below the run, that no manifest needs."""
        if attempt in self._committed:
            return []
        return [key for key in keys if key not in self._keys]

    def unmarked(self, attempt: str, keys: Sequence[str]) -> list[str]:
        """Those of them that no living attempt may need, either."""
        return [] if attempt in self._pinned else self.unneeded(attempt, keys)
