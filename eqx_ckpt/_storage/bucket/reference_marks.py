"""What the steps of a run in a bucket, and its living attempts, refer to."""

from collections.abc import Collection, Sequence

from ..._errors import CorruptCheckpointError
from ..._format.manifest import MANIFEST
from ..._format.manifest_parser import from_bytes
from ..._format.references import INCREMENTAL, keys_referred_to, PIN, pinned_by
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
    return read_surely(run, INCREMENTAL, 1) is not None


class Marks:
    """What may not be removed of attempts that are not those of a step."""

    def __init__(self, run: KeyValues) -> None:
        self._run = run
        self._keys: set[str] = set()
        self._attempts: set[str] = set()
        # By the only attempt of a step, what its manifest refers to.
        self._known: dict[str, set[str]] = {}

    def read(self, everything: Sequence[str], living: Collection[str]) -> None:
        """Read what is referred to, as all keys of the run show it.

        `living`: the attempts that may still be committed, or are already. Raises if a
        manifest is damaged, as it may refer to anything.
        """
        self._keys, self._attempts = set(), set()
        if not _is_incremental(self._run):
            return
        attempts: dict[str, set[str]] = {}
        pins: list[str] = []
        for key in everything:
            step, _, rest = key.partition("/")
            root, _, last = rest.partition("/")
            if root.startswith("@"):
                attempts.setdefault(step, set()).add(f"{step}/{root}/")
            if last.startswith(PIN):
                pins.append(key)
        known, self._known = self._known, {}
        committed: set[str] = set()
        for key in everything:
            step, _, rest = key.partition("/")
            if rest == MANIFEST and is_step(step):
                of_step = attempts.get(step, set())
                committed.add(self._add_step(step, of_step, known))
        for key in pins:
            attempt = key.rpartition("/")[0] + "/"
            if attempt in committed or attempt not in living:
                continue
            value = read_surely(self._run, key)
            try:
                self._attempts |= pinned_by(value or b"")
            except ValueError as e:
                where = self._run.url(key)
                raise CorruptCheckpointError(f"{where} is damaged: {e}.") from None

    def _add_step(
        self, step: str, attempts: set[str], known: dict[str, set[str]]
    ) -> str:
        """Add what a step refers to; return the attempt that its manifest names."""
        # If there is one attempt only, the manifest is that of before.
        attempt = min(attempts) if len(attempts) == 1 else ""
        found = known.get(attempt)
        if found is None:
            place = self._run / f"{step}/"
            data = read_surely(place, MANIFEST)
            if data is None:
                return ""
            manifest = from_bytes(data, str(place))
            attempt = f"{step}/{manifest.root}"
            found = keys_referred_to(manifest.leaves, manifest.references)
        if {attempt} == attempts:
            self._known[attempt] = found
        self._keys |= found
        return attempt

    def unmarked(self, attempt: str, keys: Sequence[str]) -> list[str]:
        """The keys of an attempt, below the run, to which nothing refers."""
        if attempt in self._attempts:
            return []
        return [key for key in keys if key not in self._keys]
