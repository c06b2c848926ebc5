"""What processes do in one run, and what of it must be there afterwards.

Each operation is a function of a directory, and one of what is there: by name, the seed
of a tree. That gives what is there afterwards, and the error, if there is one.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import eqx_ckpt
from eqx_ckpt import CheckpointExistsError, CheckpointNotFoundError, interop

from . import runs, workloads
from .exports import seed_of


# By name, the seed of a tree.
There: TypeAlias = dict[str, int]
End: TypeAlias = tuple[There, type[Exception] | None]
ARCHIVE = "new.npz"
OTHER = 100  # Added to the step, for the seed of who comes in between.


class Operation(NamedTuple):
    perform: Callable[..., None]  # of a directory, and by whom
    expected: Callable[[There, int], End]


def save(directory: str, who: int) -> None:
    runs.save(directory, 4, 9, 4 + who)


def _saved(there: There, who: int) -> End:
    if "000004" in there:
        return there, CheckpointExistsError
    return {**there, "000004": 4 + who}, None


def overwrite(directory: str, who: int) -> None:
    workloads.save(os.path.join(directory, "000002"), 2 + who, overwrite=True)


def _overwritten(there: There, who: int) -> End:
    return {**there, "000002": 2 + who}, None


def retain(directory: str, who: int) -> None:
    runs.save(directory, 5, 1, 5 + who)


def _retained(there: There, who: int) -> End:
    if "000005" in there:
        return there, CheckpointExistsError
    others = {k: v for k, v in there.items() if not k.isdecimal() or int(k) > 5}
    return {**others, "000005": 5 + who}, None


def delete(directory: str, who: int) -> None:
    runs.delete(directory, 2)


def _deleted(there: There, who: int) -> End:
    others = {k: v for k, v in there.items() if k != "000002"}
    return others, None if others != there else CheckpointNotFoundError


def sweep(directory: str, who: int) -> None:
    runs.start(directory)


def _swept(there: There, who: int) -> End:
    return there, None


def copy(directory: str, who: int) -> None:
    eqx_ckpt.copy(f"{directory}/000002", f"{directory}/000009")


def export(directory: str, who: int) -> None:
    interop.to_npz(f"{directory}/000002", f"{directory}/{ARCHIVE}")


def _copied_to(name: str) -> Callable[[There, int], End]:
    def copied(there: There, who: int) -> End:
        if name in there:
            return there, CheckpointExistsError
        if "000002" not in there:
            return there, CheckpointNotFoundError
        return {**there, name: there["000002"]}, None

    return copied


OPERATIONS = {
    "save": Operation(save, _saved),
    "overwrite": Operation(overwrite, _overwritten),
    "retain": Operation(retain, _retained),
    "delete": Operation(delete, _deleted),
    "sweep": Operation(sweep, _swept),
    "copy": Operation(copy, _copied_to("000009")),
    "export": Operation(export, _copied_to(ARCHIVE)),
}


def look(directory: str) -> There:
    """What is there once a manager has started; all of it is whole."""
    runs.start(directory)
    assert not runs.hidden(directory)
    found: There = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        found[name] = seed_of(interop.open_npz(path) if name == ARCHIVE else path)
    return found


def problem(
    before: There, first: str, second: str, answers: tuple[Any, Any, Any]
) -> str:
    """What is wrong with what two calls returned or raised, and with what is there.

    It has to be as if one of them had come after the other; but the first may give up
    if the second replaces what it reads.
    """
    one, two = (OPERATIONS[name].expected for name in (first, second))
    *ends, there = answers
    between, error = one(before, 0)
    after, last = two(between, OTHER)
    possible = [(after, error, last)]
    between, error = two(before, OTHER)
    after, last = one(between, 0)
    possible.append((after, last, error))
    gives_up = ("was replaced or removed while", "was replaced meanwhile")
    if any(text in str(ends[0]) for text in gives_up):
        possible.append((between, type(ends[0]), error))
    for after, *errors in possible:
        if there == after and all(map(_is_told, errors, ends)):
            return ""
    return f"{first}: {ends[0]!r}, {second}: {ends[1]!r}, and {there} is there"


def _is_told(expected: type[Exception] | None, end: Any) -> bool:
    if expected is None:
        return end is None
    # Of two who delete a step, both may hear that it is gone.
    is_gone = end is None and expected is CheckpointNotFoundError
    return is_gone or isinstance(end, expected)
