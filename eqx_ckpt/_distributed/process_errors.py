"""Errors of the processes of a job, which all of them raise."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import CheckpointError
from .call_matching import nothing_done


# What a store says has no number.
_OF_STORES = (ConnectionError, TimeoutError)


# So many processes are named in an error.
MOST_NAMED = 16


def named(processes: Sequence[int], between: str = " and ") -> str:
    """Some processes, or the first of many."""
    if len(processes) <= MOST_NAMED:
        return between.join(f"process {i}" for i in processes)
    shown = ", ".join(map(str, processes[:3]))
    return f"processes {shown} and {len(processes) - 3} more"


def too_late(
    what: str,
    late: list[int],
    members: tuple[int, ...],
    timeout: float,
    outcome: str = "",
) -> CheckpointError:
    return CheckpointError(
        f"No answer from {named(late)} of {len(members)} within {timeout:g} seconds "
        f"({what}). It has died, hangs, or is late: its own output may say more. "
        f"{outcome or nothing_done(what)}A longer `timeout` gives it more time."
    )


def to_json(error: BaseException) -> dict[str, Any]:
    """An error as JSON, for another process."""
    number = error.errno if isinstance(error, OSError) else None
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"kind": type(error).__name__, "text": text, "errno": number}


def from_json(index: int | None, error: dict[str, Any]) -> Exception:
    """The error of another process; of the same type if the package defines it.

    `None`: it is not that of one process alone.
    """
    text = error["text"]
    if index is not None:
        text = f"Process {index} failed: {error['kind']}: {text}"
    for kind in CheckpointError.__subclasses__():
        if kind.__name__ == error["kind"]:
            return kind(text)
    if error["errno"] is not None:
        return OSError(error["errno"], text)
    for kind in _OF_STORES:
        if kind.__name__ == error["kind"]:
            return kind(text)
    return CheckpointError(text)


def verdict(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the first process tells all of their messages: who has failed, and why."""
    failed = (i for i, value in enumerate(said) if value["error"] is not None)
    index = next(failed, None)
    return {"failed": None if index is None else (index, said[index]["error"])}


def failure_in(verdict: Mapping[str, Any]) -> Exception | None:
    """The error of the first process that has failed, if one has."""
    return from_json(*verdict["failed"]) if verdict["failed"] else None
