"""Each state that the disks of two processes may have of a step; run in both."""

import errno
import itertools
import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import step_states

from . import lost_parts
from .failing_jobs import caught
from .lost_parts import disk, manager
from .programs import shared


# Step 2 on one disk: as it was saved; nothing; a damaged manifest; the part of an
# earlier save of the step; or what cannot be read for some time.
STATES = "there", "absent", "damaged", "stale", "unreadable"


class Case(NamedTuple):
    """`is_everywhere`: whether each process has all shards."""

    states: tuple[str, str]
    is_everywhere: bool
    is_mirrored: bool


class Expected(NamedTuple):
    """What the states make of step 2.

    **Attributes:**

    - `is_step`: whether it is one on the disks, damaged or not.
    - `is_damaged`: whether a restore raises.
    - `value`: which one a restore returns, with a fallback.
    - `is_useless`: whether the next save removes the parts.
    - `is_forked`: whether it is another step than that of the mirror.
    """

    is_step: bool
    is_damaged: bool
    value: float
    is_useless: bool
    is_forked: bool


OLDER, STALE, NEW = 1.0, 20.0, 2.0


def cases() -> Iterator[Case]:
    for states in itertools.product(STATES, repeat=2):
        for is_everywhere in (True, False):
            yield Case(states, is_everywhere, False)
            if states[0] <= states[1]:
                yield Case(states, is_everywhere, True)


def expected(case: Case) -> Expected:
    """As the documentation says."""
    seen = ["there" if state == "unreadable" else state for state in case.states]
    parts = [state for state in seen if state in ("there", "stale")]
    is_damaged = "damaged" in seen
    is_whole = len(parts) == 2 and parts[0] == parts[1]
    is_covered = is_whole or case.is_everywhere and bool(parts)
    is_step = is_covered or is_damaged
    value = OLDER
    if is_covered:
        value = STALE if parts[0] == "stale" else NEW
    elif case.is_mirrored:
        value = NEW
    # A stale part is not of the history of the step in the mirror.
    is_made = is_covered or case.is_mirrored and {*parts} == {"there"}
    is_forked = case.is_mirrored and is_step and parts[:1] == ["stale"]
    is_useless = not is_step and not is_made
    return Expected(is_step, is_damaged, value, is_useless, is_forked)


def tree(value: float, *, is_everywhere: bool) -> dict[str, Any]:
    mesh = jax.make_mesh((2, jax.local_device_count()), ("x", "y"))
    spec = P(None, "y") if is_everywhere else P("x", "y")
    data = np.full((4, 4), value, np.float32)
    return {"w": shared(data, NamedSharding(mesh, spec)), "n": np.full(3, value)}


def check(place: str, part: int) -> list[str]:
    """Check every third case; return them."""
    done: list[str] = []
    for number, case in enumerate(itertools.islice(cases(), part, None, 3)):
        try:
            _check(f"{place}/{number}", case, audits=number % 3 == 0)
        except Exception as e:
            e.add_note(f"{case}, {expected(case)}")
            raise
        done.append(str(case))
    return done


def _check(place: str, case: Case, *, audits: bool) -> None:
    index, is_everywhere = jax.process_index(), case.is_everywhere
    states = [tree(value, is_everywhere=is_everywhere) for value in (OLDER, NEW, STALE)]
    how = {"mirror": eqx_ckpt.Mirror(f"{place}/there")} if case.is_mirrored else {}
    _save_and_spoil(place, case, states, how)
    then, here = expected(case), disk(place)
    like = states[0]
    with manager(place, **how) as one:
        if "unreadable" in case.states:
            with _unreadable(case.states[index] == "unreadable"):
                for call in (one.latest, lambda: one.restore(like)):
                    kind, text = caught(call)
                    assert (kind, "Too many open files" in text) == ("OSError", True)
            one.save(5, like).result()  # Nothing was taken for lost.
            assert _steps(here) >= {1, 5}
            assert case.states[index] == "absent" or 2 in _steps(here)
            one.delete(5)
        if then.is_step:
            error = caught(one.save, 2, like)
            assert error[0] == "CheckpointExistsError", error
        if then.is_forked:
            for call in (one.latest, lambda: one.restore(like, on_damage="fallback")):
                kind, text = caught(call)
                assert "both were saved as step 2, and not once" in text, (kind, text)
            return
        is_newest = then.is_step or case.is_mirrored
        assert one.latest() == (2 if is_newest else 1)
        if then.is_damaged:
            kind, text = caught(one.restore, like)
            assert kind == "CorruptCheckpointError"
            assert "Pass `on_damage='fallback'` to replace" in text
        elif is_newest and audits:
            replayed = tree(then.value, is_everywhere=is_everywhere)
            assert one.audit(lambda state, step: replayed, like, 1, 2).steps == (2,)
        how = {"on_damage": "fallback"} if then.is_damaged else {}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = one.restore(like, **how)
        assert (found["n"] == then.value).all(), found
        assert all((s.data == then.value).all() for s in found["w"].addressable_shards)
        falls_back = is_newest and then.value == OLDER
        assert any("Step 2 is damaged" in str(w.message) for w in warned) == falls_back
        before = _steps(here)
        one.save(3, like).result()
        gone = {2} if then.is_useless else set[int]()
        assert _steps(here) == (before | {3}) - gone, before
        if is_newest:
            one.delete(2)
        assert 2 not in _steps(here)
        assert one.latest() == 3


def _save_and_spoil(
    place: str, case: Case, states: list[Any], how: dict[str, Any]
) -> None:
    """Save steps 1 and 2, and bring what this process has into its state."""
    older, new, stale = states
    state, step = case.states[jax.process_index()], disk(place) / "000002"
    if "stale" in case.states:
        with manager(place) as one:
            one.save(2, stale).result()
        shutil.move(step, step.with_name("stale"))
    with manager(place, **how) as one:
        one.save(1, older).result()
        one.save(2, new).result()
    if state in ("absent", "stale"):
        shutil.rmtree(step)
    if state == "stale":
        shutil.move(step.with_name("stale"), step)
    if state == "damaged":
        manifest = step / "zarr.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
    # The processes do not go on before all disks are as they are to be.
    with manager(f"{place}/meeting") as one:
        one.latest()


def keep_an_earlier_part(place: str) -> tuple[int | None, float]:
    """Process 2 has an earlier part of step 2; return the newest, and its value."""
    step = disk(place) / "000002"
    mesh = jax.make_mesh((jax.device_count(),), ("x",))

    def state(value: float) -> dict[str, Any]:
        data = np.full(3, value, np.float32)
        return {"w": shared(data, NamedSharding(mesh, P())), "n": value}

    with manager(place) as one:
        one.save(2, state(STALE)).result()
    shutil.move(step, step.with_name("stale"))
    with manager(place) as one:
        one.save(2, state(NEW)).result()
    if jax.process_index() == 2:
        shutil.rmtree(step)
        shutil.move(step.with_name("stale"), step)
    with manager(place) as one:
        return one.latest(), one.restore(state(0.0))["n"]


def lose_of_three(place: str) -> tuple[tuple[int | None, float], Any]:
    """What each process sees if one of three has lost something."""
    seen = keep_an_earlier_part(f"{place}/earlier")
    return seen, lost_parts.lose_beside_a_repaired_part(f"{place}/repaired")


def _unreadable(is_here: bool) -> Any:
    opened = step_states.Checkpoint

    def fail(place: Any) -> Any:
        if is_here and "000002" in str(place):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(place)

    return mock.patch.object(step_states, "Checkpoint", fail)


def _steps(here: pathlib.Path) -> set[int]:
    return {int(path.name) for path in here.glob("0*")}
