"""Merge what the processes of a job commit; say what is safe if a commit fails."""

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
    """Merge the draws and checksums of all processes into the next record."""
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
    failure: BaseException, leaf: str, safety: str, where: str
) -> BaseException:
    """Add the leaf, the recording, and what is safe to a failure."""
    if not isinstance(failure, Exception):
        return failure
    leaf = f"leaf {leaf!r}, " if leaf else ""
    text = f"{leaf}recording {where}, {safety}"
    if isinstance(failure, OSError) and failure.errno is not None:
        reason = f"{os.strerror(failure.errno)} ({text})"
        return OSError(failure.errno, reason, failure.filename)
    return CheckpointError(f"{failure} ({text})")


@contextlib.contextmanager
def warned(what: str) -> Generator[None, None, None]:
    """Log a failed clean-up as a warning, and continue: the next writer cleans up."""
    try:
        yield
    except (OSError, CheckpointError) as e:
        logger.warning("%s: %s", what, e)


def below(path: PathLike, place: str) -> PathLike:
    """The directory of the states below a recording."""
    return path / STATES if isinstance(path, Store) else f"{place}/{STATES}"
