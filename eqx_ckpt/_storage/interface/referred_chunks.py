"""The chunks of a checkpoint, some of which may be in earlier attempts of its run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..._errors import CorruptCheckpointError
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import Manifest
from ..._format.references import attempts_of
from ..._types import Checksums, Report
from ..calls.threads import at_once
from .chunk_bytes import Chunk, ChunkBytes, Piece, Wanted
from .place import Chunks, run_of, Storage


def stored_chunks(place: Storage, manifest: Manifest) -> Chunks:
    """The arrays of the checkpoint at a place."""
    own = place.layouts[manifest.layout](place.arrays(manifest.root))
    return ReferredChunks(own, run_of(place), manifest) if manifest.references else own


class ReferredChunks(Chunks):
    """The arrays of a step that refers to earlier attempts; they are only read."""

    def __init__(self, own: Chunks, run: Storage, manifest: Manifest) -> None:
        self.place = own.place
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

    def _at(self, attempt: str) -> Chunks:
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

    def check(self, leaves: Mapping[str, LeafRecord]) -> None:
        raise NotImplementedError

    def write(
        self,
        arrays: Mapping[str, LeafRecord],
        pieces: Iterable[Piece],
        written: Report | None = None,
        *,
        create: bool = True,
    ) -> Checksums:
        raise NotImplementedError
