"""The chunks of a checkpoint, some of which may be in earlier attempts of its run."""

from collections.abc import Iterable, Iterator, Sequence

from ..._errors import CorruptCheckpointError
from ..._format.manifest import Manifest
from ..._format.references import attempts_of
from ..calls.threads import at_once
from .chunk_bytes import Chunk, ChunkBytes, Wanted
from .place import run_of, Storage, StoredChunks


def stored_chunks(place: Storage, manifest: Manifest) -> StoredChunks:
    """The arrays of the checkpoint at a place."""
    own = place.layouts[manifest.layout](place.arrays(manifest.root))
    return ReferredChunks(own, run_of(place), manifest) if manifest.references else own


class ReferredChunks(StoredChunks):
    """The arrays of a step that refers to earlier attempts."""

    def __init__(self, own: StoredChunks, run: Storage, manifest: Manifest) -> None:
        self.place = own.place
        self.are_values = own.are_values
        self._own = own
        self._references = manifest.references
        of_run = run.layouts[manifest.layout]
        self._run = of_run(run)
        self._attempts = {
            attempt: of_run(run / attempt)
            for attempt in attempts_of(manifest.references)
        }

    def _attempt(self, chunk: Chunk) -> str:
        """The attempt where a chunk is; `''` for the step's own."""
        attempts = self._references.get(chunk.name)
        return attempts[chunk.position] if attempts else ""

    def fetch(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, ChunkBytes]]:
        own: list[Wanted] = []
        elsewhere: list[Wanted] = []
        for one in wanted:
            if attempt := self._attempt(one.chunk):
                key = attempt + one.chunk.key.removeprefix(attempt)
                chunk = one.chunk._replace(key=key)
                elsewhere.append(one._replace(chunk=chunk))
            else:
                own.append(one)
        yield from self._own.fetch(own)
        yield from self._run.fetch(elsewhere)

    def listed(self) -> set[str]:
        listed = at_once(lambda attempt: self._at(attempt).listed(), self._attempts)
        found = self._own.listed()
        for attempt, keys in listed.items():
            found.update(attempt + key for key in keys)
        return found

    def _at(self, attempt: str) -> StoredChunks:
        return self._attempts[attempt] if attempt else self._own

    def missing(self, wanted: Iterable[Wanted]) -> str:
        by_attempt: dict[str, list[Wanted]] = {}
        for one in wanted:
            by_attempt.setdefault(self._attempt(one.chunk), []).append(one)
        problems = at_once(
            lambda attempt: self._at(attempt).missing(by_attempt[attempt]), by_attempt
        )
        return next((a + problem for a, problem in problems.items() if problem), "")

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        return self._own.read_all(keys)

    def problem(self) -> str:
        return self._own.problem()

    def verify(self) -> None:
        self._own.verify()
