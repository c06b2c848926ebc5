"""Restore the newest step of a run, or an older one if that is damaged."""

import functools as ft
import warnings
from collections.abc import Callable, Sequence
from typing import get_args, Literal, TypeAlias

from jaxtyping import PyTree

from .._distributed.process_group import from_first, gather_errors
from .._errors import CheckpointNotFoundError, CorruptCheckpointError
from .._inspecting.inspect_checkpoint import verify
from .._steps.run_steps import Run
from .._types import check_word


OnDamage: TypeAlias = Literal["raise", "fallback"]


def check_on_damage(on_damage: OnDamage) -> None:
    check_word("on_damage", on_damage, get_args(OnDamage))


def resumed(
    run: Run, restored: Callable[[int], PyTree], on_damage: OnDamage, timeout: float
) -> tuple[PyTree, list[int]]:
    """Restore the newest undamaged step; return it with the steps skipped.

    All processes of a job restore the same step.
    """
    how = "" if on_damage == "raise" else f"on_damage={on_damage!r}"
    call = f"restore({how}) in {run.directory!r}"
    steps = from_first(call, ft.partial(_steps, run), timeout)
    newest = f"restore(step={steps[-1]}) in {run.directory!r}"
    result, problem = gather_errors(newest, lambda: restored(steps[-1]), timeout)
    if problem is None:
        return result, []
    if isinstance(problem, CheckpointNotFoundError):
        newer = f"restore() newer than {steps[-1]} in {run.directory!r}"
        step = from_first(
            newer, lambda: max(run.readable_or_not(), default=-1), timeout
        )
        if step > steps[-1]:
            # Another job has saved a newer step, and has removed this one.
            return restored(step), []
    if not isinstance(problem, CorruptCheckpointError):
        raise problem
    older = ft.partial(_newest_whole, run, steps[:-1])
    call = f"restore() older than {steps[-1]} in {run.directory!r}"
    whole = from_first(call, older, timeout)
    if on_damage == "raise" or whole is None:
        raise CorruptCheckpointError(f"{problem}\n{_fallback_hint(steps, whole)}")
    warnings.warn(
        f"Step {steps[-1]} is damaged, and step {whole} was restored: {problem}",
        stacklevel=3,
    )
    return restored(whole), [step for step in steps if step > whole]


def _steps(run: Run) -> list[int]:
    """The committed steps; raise if there are none."""
    steps = run.readable_or_not()
    run.check_unusable(steps)
    if not steps:
        raise CheckpointNotFoundError(
            f"No committed checkpoint in {run.directory!r}. To start a new run there, "
            f"look at `latest()` first, which is `None` then. {run.explain()}"
        )
    return steps


def _newest_whole(run: Run, steps: Sequence[int]) -> int | None:
    for step in reversed(steps):
        try:
            verify(run.path(step))
        except (CorruptCheckpointError, CheckpointNotFoundError):
            continue
        return step
    return None


def _fallback_hint(steps: Sequence[int], whole: int | None) -> str:
    """Advice on the newest step, which is damaged."""
    if whole is None:
        return "None of the older steps is intact."
    return (
        f"This is step {steps[-1]}, the newest. Step {whole} is intact: pass "
        f"`on_damage='fallback'` to go on from there (what is damaged is then replaced "
        f"when that step is saved again), or `step={whole}` to look at it."
    )
