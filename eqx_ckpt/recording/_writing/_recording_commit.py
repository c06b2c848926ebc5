"""Merge what the processes of a job commit; say what is safe if a commit fails."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from ..._errors import CheckpointError
from ..._format.sample_record import Record, STATES
from ..._storage.calls.safe_files import on_full_disk
from ..._storage.calls.store_path import StorePath
from ..._types import PathLike


logger = logging.getLogger("eqx_ckpt")


class Settled(NamedTuple):
    """What a process has written since the last commit.

    **Attributes:**

    - `draws`: the chains that have grown, each with its number of draws.
    - `checksums`: for each leaf, the bands that have grown, each with its checksums.
    """

    draws: Sequence[tuple[int, int]]
    checksums: Sequence[Sequence[tuple[int, str]]]


def merged(record: Record, parts: Sequence[Any], steps: int, where: str) -> Record:
    """Merge what all processes have settled into the next record."""
    settled = [Settled(*part) for part in parts]
    draws = [*record.draws]
    checksums = {
        leaf.name: [
            *(record.checksums or {}).get(
                leaf.name, [""] * len(leaf.bands(record.chains))
            )
        ]
        for leaf in record.leaves
    }
    for chain, taken in _once([pair for one in settled for pair in one.draws], where):
        draws[chain] = taken
    for i, leaf in enumerate(record.leaves):
        grown = [pair for one in settled for pair in one.checksums[i]]
        for band, text in _once(grown, where):
            checksums[leaf.name][band] = text
    return dataclasses.replace(
        record,
        commit=record.commit + 1,
        draws=tuple(draws),
        state=None,
        steps=record.steps + steps,
        checksums={name: tuple(texts) for name, texts in checksums.items()},
    )


def _once(pairs: Sequence[Any], where: str) -> Sequence[Any]:
    """Raise if two processes have settled the same."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise CheckpointError(
            f"Two processes have recorded the same chains of {where}. Pass arrays that "
            "are sharded over the chains. Nothing was committed."
        )
    return pairs


def explained(
    failure: BaseException, leaf: str, safety: str, where: str
) -> BaseException:
    """Add the leaf, the recording, and what is safe to a failure."""
    if not isinstance(failure, Exception):
        return failure
    leaf = f"leaf {leaf!r}, " if leaf else ""
    text = f"{leaf}recording {where}, {safety}"
    if isinstance(failure, OSError) and failure.errno is not None:
        text += on_full_disk(failure.errno, "open the recording again, to go on there")
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
    return path / STATES if isinstance(path, StorePath) else f"{place}/{STATES}"
