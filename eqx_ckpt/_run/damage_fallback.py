"""Restore the newest step of a run, or an older one if that is damaged."""

import functools as ft
import warnings
from collections.abc import Callable, Sequence
from typing import get_args, Literal, TypeAlias, TypeVar

from .._distributed.jax_service import is_first
from .._distributed.process_group import from_first, gather_errors
from .._errors import CheckpointNotFoundError, CorruptCheckpointError
from .._inspecting.inspect_checkpoint import verify
from .._storage.calls.threads import in_thread
from .._types import check_word
from .tiers import Copy, Tiers


_T = TypeVar("_T")
_Chosen = TypeVar("_Chosen")
_Likely = TypeVar("_Likely")


OnDamage: TypeAlias = Literal["raise", "fallback"]


def check_on_damage(on_damage: OnDamage) -> None:
    check_word("on_damage", on_damage, get_args(OnDamage))


def resumed(
    tiers: Tiers,
    step: int | None,
    restored: Callable[[Copy], _T],
    on_damage: OnDamage,
    timeout: float,
) -> tuple[_T, list[int]]:
    """Restore a step, or the newest undamaged one; return it with those passed over.

    Only local ones are named. All processes of a job restore the same copy.
    """
    how = "" if step is None else f"step={step}"
    how += "" if on_damage == "raise" else f"on_damage={on_damage!r}"
    call = f"restore({how}) in {tiers.directory!r}"
    choose = ft.partial(copies_of, tiers, step)
    here = None
    if step is None and tiers.has_mirrors:
        steps = from_first(f"{call}, here", tiers.here, timeout)
        choose = ft.partial(copies_of, tiers, step, steps)
        here = Copy(steps[-1], 0) if steps else None
    listed, tried = while_chosen(call, choose, here, restored, timeout)
    copies = [Copy(*copy) for copy in listed]
    last = copies[-1]
    if tried is None or last != here:
        tried = None  # It may be large.
        newest = f"restore(step={last.step}) in {tiers.directory!r}"
        tried = gather_errors(newest, lambda: restored(last), timeout)
    result, problem = tried
    if problem is None:
        assert result is not None
        return result, []
    if isinstance(problem, CheckpointNotFoundError) and step is None:
        newer = f"restore() newer than {last.step} in {tiers.directory!r}"
        found = from_first(newer, lambda: tiers.copies()[-1:], timeout)
        if found and found[0][0] > last.step:
            # Another job has saved a newer step, and has removed this one.
            return restored(Copy(*found[0])), []
    if not isinstance(problem, CorruptCheckpointError):
        raise problem
    older = ft.partial(_newest_whole, tiers, copies, step)
    call = f"restore() older than {last.step} in {tiers.directory!r}"
    whole = from_first(call, older, timeout)
    whole = None if whole is None else Copy(*whole)
    if on_damage == "raise" or whole is None:
        hint = _fallback_hint(tiers, last, whole) if step is None or whole else ""
        raise CorruptCheckpointError(f"{problem}\n{hint}".rstrip())
    where = f" in {tiers.place(whole.tier)!r}" if whole.tier else ""
    warnings.warn(
        f"Step {last.step} is damaged, and step {whole.step}{where} was restored: "
        f"{problem}",
        stacklevel=3,
    )
    first = copies.index(whole) + 1 if whole in copies else 0
    return restored(whole), [copy.step for copy in copies[first:] if copy.tier == 0]


def while_chosen(
    call: str,
    choose: Callable[[], _Chosen],
    likely: _Likely | None,
    restored: Callable[[_Likely], _T],
    timeout: float,
) -> tuple[_Chosen, tuple[_T | None, Exception | None] | None]:
    """What process 0 chooses, and what was restored meanwhile, or why that failed.

    Mirrors take time to say what they have. Raise what `choose` raises.
    """
    if likely is None:
        return from_first(call, choose, timeout), None
    name = f"eqx_ckpt chooses in {call}"
    chosen = in_thread(choose, name) if is_first() else None
    first = f"{call}, meanwhile"
    tried = gather_errors(first, ft.partial(restored, likely), timeout)
    choose = choose if chosen is None else chosen.result
    return from_first(call, choose, timeout), tried


def copies_of(
    tiers: Tiers, step: int | None, here: Sequence[int] | None = None
) -> list[Copy]:
    """The committed steps in all tiers; raise if there are none.

    Those that are `here` may be known.
    """
    if step is not None:
        return [tiers.nearest(step)]
    copies = tiers.copies(here)
    tiers.check_unusable(copies)
    if not copies:
        raise CheckpointNotFoundError(
            f"No committed checkpoint in {tiers.directory!r}. To start a new run "
            "there, look at `latest()` first, which is `None` then. "
            f"{tiers.explain()}"
        )
    return copies


def _newest_whole(
    tiers: Tiers, copies: Sequence[Copy], step: int | None
) -> Copy | None:
    """The best copy but for the last one; of a given step, one in another tier."""
    others = copies[:-1] if step is None else tiers.farther(copies[-1])
    for copy in reversed(others):
        try:
            verify(tiers.path(copy))
        except (CorruptCheckpointError, CheckpointNotFoundError):
            continue
        return copy
    return None


def _fallback_hint(tiers: Tiers, last: Copy, whole: Copy | None) -> str:
    """Advice on a step that is damaged."""
    if whole is None:
        return "None of the older steps is intact."
    if whole.step == last.step:
        return (
            f"Step {whole.step} in {tiers.place(whole.tier)!r} is intact: pass "
            "`on_damage='fallback'` to go on from there."
        )
    return (
        f"This is step {last.step}, the newest. Step {whole.step} is intact: pass "
        f"`on_damage='fallback'` to go on from there (what is damaged is then replaced "
        f"when that step is saved again), or `step={whole.step}` to look at it."
    )
