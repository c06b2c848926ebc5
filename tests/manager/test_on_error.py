"""`on_error="warn"`: which failures of saves a training survives, beside a model."""

import concurrent.futures
import functools as ft
import logging
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, default_serialise_filter_spec
from helpers import assert_same


MOST = 2
NOTES = ("So many saves have failed", "It was the last save")


class Broken(OSError):
    """What fails by the test."""


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(10, step), "step": step}


class Faults:
    """Lets the next save fail in the call, or in the background."""

    def __init__(self) -> None:
        self.now = self.later = False

    def write(self, f: Any, leaf: Any) -> Any:
        if self.now:
            self.now = False
            raise Broken("in the call")
        return default_serialise_filter_spec(f, leaf)

    def progress(self, phase: str, *_: Any) -> None:
        if self.later:
            self.later = False
            raise Broken("in the background")


@dataclass
class Model:
    """How many saves have failed in a row, and what is raised."""

    there: set[int] = field(default_factory=set)
    in_a_row: int = 0
    logged: int = 0
    is_unseen: bool = False  # Whether the last save has failed, and was logged only.
    running: tuple[int, str] | None = None

    def fails(self) -> bool:
        """Whether a failure is raised."""
        self.in_a_row += 1
        self.is_unseen = self.in_a_row <= MOST
        self.logged += self.is_unseen
        return not self.is_unseen

    def settles(self) -> bool:
        """Whether whoever waits for the save that was begun raises."""
        ended, self.running = self.running, None
        if ended is None:
            return False
        step, what = ended
        if what == "later":
            return self.fails()
        self.there.add(step)
        self.in_a_row, self.is_unseen = 0, False
        return False

    def saves(self, step: int, what: str) -> bool:
        """Whether the call raises."""
        if self.settles():
            return True
        if what == "here":
            return self.fails()
        self.running = step, what
        return False

    def closes(self) -> bool:
        raises = self.settles() or self.is_unseen
        self.in_a_row, self.is_unseen = 0, False
        return raises


CALLS = "ok ok here later later exists wait close".split()


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """At most so many failures in a row, each of them logged, and none is lost."""
    chance, faults, model = random.Random(seed), Faults(), Model()

    def made() -> CheckpointManager:
        return CheckpointManager(
            tmp_path / "run",
            on_error="warn",
            max_failures=MOST,
            progress=faults.progress,
        )

    def expect(call: Callable[[], Any], *, raises: bool) -> None:
        if raises:
            with pytest.raises(Broken) as caught:
                call()
            notes = [n for n in caught.value.__notes__ if n.startswith(NOTES)]
            assert len(notes) == 1
        else:
            call()

    def save(step: int, what: str) -> None:
        faults.now = what == "here"
        future = manager.save(step, state(step), faults.write)
        assert (future.exception() is None) == (what == "ok")

    manager = made()
    for step in range(60):
        what = chance.choice(CALLS)
        if what in ("ok", "here", "later"):
            raises = model.saves(step, what)
            faults.later = what == "later" and not raises
            expect(ft.partial(save, step, what), raises=raises)
            faults.now = False
        elif what == "wait":
            expect(manager.wait, raises=model.settles())
        elif what == "close":
            expect(manager.close, raises=model.closes())
            manager = made()
        elif there := manager.steps():
            raises = model.settles()
            with pytest.raises(Broken if raises else eqx_ckpt.CheckpointExistsError):
                manager.save(there[-1], state(0))
        lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        assert sum("the training goes on" in line for line in lines) == model.logged
    manager.close() if not model.closes() else pytest.raises(Broken, manager.close)
    assert manager.steps() == sorted(model.there)
    for one in model.there:
        assert_same(manager.restore(state(0), one), state(one))


def test_the_next_try_is_as_far_away_as_any_save(tmp_path: pathlib.Path) -> None:
    faults, when = Faults(), eqx_ckpt.save_every_steps(10)
    with CheckpointManager(tmp_path, when=when, on_error="warn") as manager:
        saved: list[int] = []
        for step in range(1, 41):
            if manager.should_save(step):
                faults.now = step < 40
                manager.save(step, state(step), faults.write)
                saved.append(step)
    assert saved == [10, 20, 30, 40]
    assert manager.steps() == [40]


def test_an_error_in_the_arguments_is_raised(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path, on_error="warn") as manager:
        with pytest.raises(ValueError, match="not a step"):
            manager.save(-1, state(1))
        with pytest.raises(eqx_ckpt.CheckpointError, match="'w'"):
            manager.save(1, {"w": np.array([object()])})
    with pytest.raises(ValueError, match="`max_failures` is for `on_error='warn'`"):
        CheckpointManager(tmp_path, max_failures=3)
    with pytest.raises(eqx_ckpt.CheckpointError, match="closed"):
        manager.save(1, state(1))


def test_a_mistake_is_no_try(tmp_path: pathlib.Path) -> None:
    """What fails after it is not the save of that step."""

    def wrong(f: Any, leaf: Any) -> Any:
        raise ValueError("wrong")

    faults, when = Faults(), eqx_ckpt.save_every_steps(10)
    manager = CheckpointManager(tmp_path, when=when, on_error="warn")
    other = CheckpointManager(tmp_path, progress=faults.progress)
    with pytest.raises(ValueError, match="wrong"):
        manager.save(9, state(9), wrong)
    assert manager.should_save(10)
    faults.later = True
    concurrent.futures.wait([other.save(1, state(1))])
    with pytest.raises(Broken):
        manager.save(10, state(10))
    manager.save(10, state(10)).result()
    manager.close()
    assert manager.steps() == [10]
