"""Creating the manifest of an attempt in a bucket: its commit.

A response can be lost, and a request that is repeated is refused because of the first
one. So after each request that does not succeed, the manifest that is there is compared
with the one to be created.
"""

import itertools
import re
import time

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.manifest import MANIFEST
from ..._format.manifest_parser import from_bytes
from ..calls.tensorstore_calls import contradicts, status_of
from ..interface.replacing import already_there
from ..interface.sure_reads import read_surely
from .keyvalue_place import KeyValues, Versioned


# Seconds before each further try.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)


# The status of a store that refuses what it was asked for, whenever it is asked. Others
# may be about a request that was repeated because its first response was lost.
_REFUSED = re.compile(r"3\d\d|4(?!04|08|09|12|29)\d\d|501|507")


class Publication:
    """The requests that create one manifest, or replace one.

    **Attributes:**

    - `is_possible`: whether the manifest may be there, or come to be there.
    - `is_unanswered`: whether a request had no answer, so that it may arrive later,
        even after another's manifest is gone.
    """

    def __init__(self, target: KeyValues, manifest: bytes, old: Versioned) -> None:
        self._target = target
        self._manifest = manifest
        self._root = from_bytes(manifest, str(target)).root
        self._old = old
        self.is_possible = self.is_unanswered = False

    def publish(self) -> None:
        """Create the manifest; raise if it is not there, or if that is not known."""
        for pause in itertools.chain(PAUSES, [None]):
            problem = self._try()
            if problem is None or self._is_there(problem):
                return
            if pause is None or not self.is_possible:
                raise problem
            time.sleep(pause)

    def _try(self) -> Exception | None:
        """Send one request; return why it does not seem to have succeeded."""
        before, self.is_possible = self.is_possible, True
        future = self._target.writing(
            MANIFEST, self._manifest, self._old.version, retries=False
        )
        try:
            if self._target.wait_for(future, MANIFEST).generation:
                return None
        except (OSError, CheckpointError) as e:
            status = "" if future.cancelled() else status_of(future.exception())
            is_open = not _REFUSED.fullmatch(status)
            self.is_possible = before or is_open
            self.is_unanswered |= is_open
            return e
        return contradicts(
            self._target.url(MANIFEST), "it cannot be created, and nobody else has"
        )

    def _is_there(self, problem: Exception) -> bool:
        """Whether the manifest is there; raise if somebody else has been faster."""
        try:
            found = self._target.read(MANIFEST)
        except (OSError, CheckpointError):
            if self.is_possible:
                raise
            raise problem from None
        if found == self._manifest:
            return True
        if found is not None and found != self._old.value:
            if self._is_of_another(found):
                self.is_possible = False
                raise already_there(str(self._target))
        elif self._old.value is not None and self._is_gone(found):
            self.is_possible = False
            raise CheckpointError(
                f"{self._target} was removed by another process, while it was to be "
                "replaced. Nothing was saved; save again."
            )
        return False

    def _is_of_another(self, manifest: bytes) -> bool:
        """False if it is damaged or incomplete: then it could be our own."""
        try:
            return from_bytes(manifest, str(self._target)).root != self._root
        except CorruptCheckpointError:
            return False
        except CheckpointError:
            return True

    def _is_gone(self, found: bytes | None) -> bool:
        """Whether a listing and a second read confirm that the manifest is gone."""
        return found is None and read_surely(self._target, MANIFEST) is None

    def take_back(self) -> None:
        """Put what was there before in place of our manifest, if it is there still."""
        found = self._target.read_version(MANIFEST)
        if found.value == self._manifest:
            old, version = self._old.value, found.version
            self._target.wait_for(self._target.writing(MANIFEST, old, version))
        is_there = read_surely(self._target, MANIFEST) == self._manifest
        self.is_possible = is_there or self.is_unanswered
