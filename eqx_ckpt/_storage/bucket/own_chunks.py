"""What each step of a run in a bucket has for itself, by the manifests alone."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from ..._format.chunk_grid import shape_of, whole
from ..._format.manifest import Manifest
from ..interface.chunk_bytes import chunks_of
from ..interface.place import step_name


def own_bytes(manifests: Mapping[int, Manifest]) -> dict[int, int]:
    """The bytes of data in the chunks that no other of these steps has."""
    chunks = {
        step: dict(_chunks(f"{step_name(step)}/{manifest.root}", manifest))
        for step, manifest in manifests.items()
    }
    count = Counter(key for of_step in chunks.values() for key in of_step)
    return {
        step: sum(nbytes for key, nbytes in of_step.items() if count[key] == 1)
        for step, of_step in chunks.items()
    }


def _chunks(own: str, manifest: Manifest) -> Iterator[tuple[str, int]]:
    """The keys below the run of all chunks of a step, and the bytes of their data."""
    for name, record in manifest.leaves.items():
        if not record.is_array or 0 in record.data_shape:
            continue
        attempts = manifest.references.get(name)
        for chunk in chunks_of(name, record, whole(record.data_shape)):
            attempt = (attempts[chunk.position] if attempts else "") or own
            nbytes = record.itemsize * math.prod(shape_of(chunk.region))
            yield attempt + chunk.key, nbytes
