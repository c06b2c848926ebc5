"""Restore the newest step of a run, or an older one if that is damaged."""

import contextlib
import functools as ft
from collections.abc import Callable, Sequence
from typing import get_args, Literal, TypeAlias, TypeVar

from .._distributed.jax_service import is_first
from .._distributed.process_group import (
    from_first,
    gather_errors,
    group_or_solo,
)
from .._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    warn,
)
from .._inspecting.inspect_checkpoint import verify
from .._restoring.restore import Check
from .._storage.calls.threads import in_thread
from .._types import check_word
from .tiers import Copy, Tiers


_T = TypeVar("_T")


# What was made, and the first failure of any process.
_Tried: TypeAlias = tuple[_T | None, Exception | None]


OnDamage: TypeAlias = Literal["raise", "fallback"]


def check_on_damage(on_damage: OnDamage) -> None:
    check_word("on_damage", on_damage, get_args(OnDamage))


def resumed(
    tiers: Tiers,
    step: int | None,
    restored: Callable[[Copy, Check], _T],
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

    def again(copy: Copy) -> _Tried[_T]:
        newest = f"restore(step={copy.step}) in {tiers.directory!r}"
        return gather_errors(newest, lambda: restored(copy, None), timeout)

    copies, tried = tried_last(call, choose, here, restored, again, timeout)
    last = copies[-1]
    result, problem = tried
    if problem is None:
        assert result is not None
        return result, []
    if isinstance(problem, CheckpointNotFoundError) and step is None:
        newer = f"restore() newer than {last.step} in {tiers.directory!r}"
        found = from_first(newer, lambda: tiers.copies()[-1:], timeout)
        if found and found[0][0] > last.step:
            # Another job has saved a newer step, and has removed this one.
            return restored(Copy(*found[0]), None), []
    if not isinstance(problem, CorruptCheckpointError):
        raise problem
    try:
        whole = _found_whole(tiers, copies, step, timeout)
    except (CheckpointError, OSError) as e:
        if on_damage == "fallback":
            raise e from problem
        why = f"Whether another copy or step is intact is not known: {e}"
        raise CorruptCheckpointError(f"{problem}\n{why}") from e
    if on_damage == "raise" or whole is None:
        hint = _fallback_hint(tiers, last, whole) if step is None or whole else ""
        raise CorruptCheckpointError(f"{problem}\n{hint}".rstrip())
    where = f" in {tiers.place(whole.tier)!r}" if whole.tier else ""
    warn(
        f"Step {last.step} is damaged, and step {whole.step}{where} was restored: "
        f"{problem}"
    )
    first = copies.index(whole) + 1 if whole in copies else 0
    passed = [copy.step for copy in copies[first:] if copy.tier == 0]
    return restored(whole, None), passed


class _OtherIsChosen(Exception):
    """What is being restored is not what was chosen."""


def tried_last(
    call: str,
    choose: Callable[[], Sequence[Copy]],
    likely: Copy | None,
    early: Callable[[Copy, Check], _T],
    again: Callable[[Copy], _Tried[_T]],
    timeout: float,
) -> tuple[list[Copy], _Tried[_T]]:
    """The copies that process 0 chooses, and what was restored of the last of them.

    Mirrors take time to say what they have. Meanwhile, the `likely` one is restored; if
    it is not chosen, the last one is, `again`. Raise what `choose` raises.
    """
    listed, tried = _while_chosen(call, choose, likely, early, timeout)
    copies = [Copy(*copy) for copy in listed]
    if tried is None or copies[-1] != likely:
        tried = None  # It may be large.
        tried = again(copies[-1])
    return copies, tried


def _while_chosen(
    call: str,
    choose: Callable[[], Sequence[Copy]],
    likely: Copy | None,
    early: Callable[[Copy, Check], _T],
    timeout: float,
) -> tuple[Sequence[Copy], _Tried[_T] | None]:
    if likely is None:
        return from_first(call, choose, timeout), None
    name = f"eqx_ckpt chooses in {call}"
    answer = in_thread(choose, name) if is_first() else None

    def check() -> None:
        if answer is None or not answer.done():
            return
        if answer.exception() or answer.result()[-1] != likely:
            raise _OtherIsChosen

    meanwhile = f"{call}, meanwhile"
    tried = gather_errors(meanwhile, lambda: early(likely, check), timeout)
    choose = choose if answer is None else answer.result
    try:
        return from_first(call, choose, timeout), tried
    except BaseException:
        tried = None  # Who keeps the error would keep what was restored.
        raise


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


def _found_whole(
    tiers: Tiers, copies: Sequence[Copy], step: int | None, timeout: float
) -> Copy | None:
    """As `_newest_whole`, on all processes; they wait for as long as that goes on."""
    call = f"restore() older than {copies[-1].step} in {tiers.directory!r}"
    with contextlib.closing(group_or_solo(call, timeout)) as group:
        goes_on = ft.partial(group.goes_on, "older")
        look = ft.partial(_newest_whole, tiers, copies, step, goes_on)
        found = group.from_first("older", look)
    return None if found is None else Copy(*found)


def _newest_whole(
    tiers: Tiers, copies: Sequence[Copy], step: int | None, goes_on: Callable[[], None]
) -> Copy | None:
    """The best copy but for the last one; of a given step, one in another tier.

    `goes_on` is called while they are read.
    """
    others = copies[:-1] if step is None else tiers.farther(copies[-1])
    for copy in reversed(others):
        try:
            verify(tiers.path(copy), progress=lambda *_: goes_on())
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
