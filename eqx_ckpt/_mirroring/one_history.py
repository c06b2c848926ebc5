"""Whether the steps in two places came from one another."""

from collections.abc import Mapping

from .._errors import CheckpointError
from .._format.run_history import History
from .._steps.compare_histories import relations
from .._steps.run_steps import Run


class OtherHistory(CheckpointError):
    """Two steps did not come from one another."""


def check_histories(newest: Mapping[Run, int]) -> None:
    """Raise if two steps, each of a place, did not come from one another."""
    if len(newest) < 2:
        return
    found: list[tuple[Run, int, History]] = []
    for run, step in newest.items():
        history = run.history(step)
        if history is None:
            continue
        for other, older, before in found:
            if why := difference(before, history):
                raise OtherHistory(
                    f"Step {older} in {other.directory!r} and step {step} in "
                    f"{run.directory!r} are of different histories: {why}. Nothing "
                    "was chosen. To go on from one of them, delete the steps of the "
                    "other one, use one of the two places alone, or pass another "
                    "`mirror`."
                )
        found.append((run, step, history))


def difference(one: History, other: History) -> str:
    """Why two steps did not come from one another, or `''`."""
    if one == other:
        return ""
    if one.step == other.step:
        return f"both were saved as step {one.step}, and not once"
    found = relations({one.step: one, other.step: other})
    return str(found[min(found)])


def check_beside(mirror: Run, step: int, history: History, related: set[int]) -> None:
    """Raise if a step in a mirror and another one there did not come from one another.

    Those that are known to be `related` are not read again.
    """
    for other in mirror.readable_or_not():
        if other == step or other in related:
            continue
        found = mirror.history(other)
        if found is not None and (why := difference(found, history)):
            raise OtherHistory(
                f"Step {step} does not belong to the steps in {mirror.directory!r}: "
                f"step {other} there is of a different history ({why}). It was not "
                "uploaded. To go on with one of them, delete the steps of the other "
                "one, or pass another `mirror`. A training that goes on from a step "
                "has to restore it with the manager that saves."
            )
        related.add(other)
