"""What a commit says: the record of all processes, and what is safe if it fails."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Sequence
from typing import Any

from .._errors import CheckpointError
from .._format.recorded import Record, STATES
from .._storage.url import Store
from .._types import PathLike


logger = logging.getLogger("eqx_ckpt")


def merged(record: Record, parts: Sequence[Any], steps: int, where: str) -> Record:
    """The next record, from what each process has written: draws and checksums."""
    draws = [*record.draws]
    checksums = {
        leaf.name: [*(record.checksums or {}).get(leaf.name, [""] * len(draws))]
        for leaf in record.leaves
    }
    changed = [chain for part in parts for chain, _, _ in part]
    if len({*changed}) < len(changed):
        raise CheckpointError(
            f"Two processes have recorded the same chain of {where}. Pass arrays that "
            "are sharded over the chains. Nothing was committed."
        )
    for part in parts:
        for chain, taken, texts in part:
            draws[chain] = taken
            for leaf, text in zip(record.leaves, texts, strict=True):
                checksums[leaf.name][chain] = text
    return dataclasses.replace(
        record,
        commit=record.commit + 1,
        draws=tuple(draws),
        state=None,
        steps=record.steps + steps,
        checksums={name: tuple(texts) for name, texts in checksums.items()},
    )


def explained(
    failure: BaseException, leaf: str, record: Record, where: str
) -> BaseException:
    """A failure, with the leaf, the recording, and how many draws are safe."""
    if not isinstance(failure, Exception):
        return failure
    leaf = f"leaf {leaf!r}, " if leaf else ""
    safe = 0 if not record.is_committed else min(record.draws)
    text = f"{leaf}recording {where}, of which {safe} draws are safe"
    if isinstance(failure, OSError) and failure.errno is not None:
        reason = f"{os.strerror(failure.errno)} ({text})"
        return OSError(failure.errno, reason, failure.filename)
    return CheckpointError(f"{failure} ({text})")


@contextlib.contextmanager
def warned(what: str) -> Generator[None, None, None]:
    """Go on without what could not be cleaned up; the next writer does it."""
    try:
        yield
    except (OSError, CheckpointError) as e:
        logger.warning("%s: %s", what, e)


def below(path: PathLike, place: str) -> PathLike:
    """Where the states are."""
    return path / STATES if isinstance(path, Store) else f"{place}/{STATES}"
