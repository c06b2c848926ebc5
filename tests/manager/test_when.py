"""When to save: functions of a step and the last one, and what the manager does."""

import concurrent.futures
import signal
import threading
import time

import jax.numpy as jnp
import pytest

import eqx_ckpt
from eqx_ckpt import (
    CheckpointManager,
    save_every_seconds,
    save_every_steps,
    save_when_idle,
)


def train(run, steps, save, **options):
    """Train, saving when the manager says so; returns what was saved by then."""
    with CheckpointManager(run, when=save, **options) as manager:
        for step in steps:
            if manager.should_save(step):
                manager.save(step, {"step": step})
                assert not manager.should_save(step)
    return manager.steps()


def test_every_steps():
    save = save_every_steps(100)
    assert [s for s in range(1, 301) if save(s, s - 1)] == [100, 200, 300]
    assert save(100, None)
    assert not save(99, None)
    assert not save(150, 100)


def test_every_steps_in_strides():
    """A loop that jumps over the steps to save still saves as often."""
    saved = [0]
    for step in range(0, 1000, 30):
        if save_every_steps(100)(step, saved[-1]):
            saved.append(step)
    assert saved == [0, 120, 210, 300, 420, 510, 600, 720, 810, 900]


def test_every_seconds(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    save = save_every_seconds(10)
    assert not save(1, None)
    now = 60.0
    assert save(2, None)
    assert not save(3, 2)
    now = 69.9
    assert not save(4, 2)
    now = 70.0
    assert save(5, 2)


@pytest.mark.parametrize("n", [0, -1])
def test_numbers_that_are_no_distances(n):
    with pytest.raises(ValueError, match=f"`n` is {n}"):
        save_every_steps(n)
    with pytest.raises(ValueError, match=f"`seconds` is {n}"):
        save_every_seconds(n)


def test_a_manager_asks_all_of_its_functions(tmp_path):
    asked = []

    def of_mine(step, last):
        asked.append((step, last))
        return step == 7

    assert train(tmp_path, range(1, 12), [save_every_steps(5), of_mine]) == [5, 7, 10]
    assert asked[:2] == [(1, None), (2, None)]
    assert (6, 5) in asked
    assert (11, 10) in asked


def test_a_resumed_run_goes_on_from_its_newest_step(tmp_path):
    assert train(tmp_path, range(1, 16), save_every_steps(10)) == [10]
    assert train(tmp_path, range(16, 25), save_every_steps(10)) == [10, 20]


def test_a_step_that_was_passed_over_is_not_the_last(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20):
            manager.save(step, {"w": jnp.full(2, step)})
    (tmp_path / "000020/w/c.0").write_bytes(b"")
    asked = []

    def of_mine(step, last):
        asked.append(last)
        return False

    with CheckpointManager(tmp_path, when=of_mine) as manager:
        with pytest.warns(UserWarning, match="Step 20 is damaged"):
            manager.restore({"w": jnp.zeros(2, int)}, on_damage="fallback")
        manager.should_save(11)
    assert asked == [10]


def test_the_clock_starts_again_at_a_save(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    saved = []
    with CheckpointManager(tmp_path, when=save_every_seconds(10)) as manager:
        for step in range(1, 8):
            now = 4.0 * step
            if manager.should_save(step):
                saved.append(step)
                manager.save(step, {"w": jnp.zeros(2)})
    assert saved == [3, 7]


class Training:
    """A training whose saves take a known time, by a clock of its own."""

    def __init__(self, path, monkeypatch, when, **options):
        self.now = self.step = 0
        monkeypatch.setattr(time, "monotonic", lambda: float(self.now))
        self.manager = CheckpointManager(path, when=when, **options)

    def is_due(self, now):
        self.now, self.step = now, self.step + 1
        return self.manager.should_save(self.step)

    def save(self, cost):
        ends = self.now + cost

        def is_leaf(x):
            self.now = ends
            return False

        return self.manager.save(self.step, {"step": self.step}, is_leaf=is_leaf)


def test_when_idle(tmp_path, monkeypatch):
    """The mean cost decides, and when the last save has begun."""
    training = Training(tmp_path, monkeypatch, save_when_idle(0.125))
    with training.manager:
        assert training.is_due(100)
        training.save(2).result()
        assert [training.is_due(now) for now in (102, 115, 116)] == [False, False, True]
        training.save(4).result()
        assert [training.is_due(now) for now in (120, 139, 140)] == [False, False, True]
        # The first ones are forgotten.
        for _ in range(8):
            training.save(1).result()
            training.step += 1
        begin = training.now - 1
        assert not training.is_due(begin + 7)
        assert training.is_due(begin + 8)


def test_when_idle_after_a_call_that_fails_at_once(tmp_path, monkeypatch):
    """It is not tried again sooner than a save that takes its time."""
    when = save_when_idle(0.125)
    training = Training(tmp_path, monkeypatch, when, on_error="warn", max_failures=1)

    def is_leaf(x):
        raise OSError("No space left on device")

    with training.manager:
        training.save(2).result()
        assert training.is_due(100)
        failed = training.manager.save(training.step, {"step": 0}, is_leaf=is_leaf)
        assert isinstance(failed.exception(), OSError)
        assert [training.is_due(now) for now in (101, 115, 116)] == [False, False, True]
        training.save(2).result()


def test_when_idle_waits_for_a_running_save(tmp_path, monkeypatch):
    began, may_end = threading.Event(), threading.Event()

    def keep(steps):
        began.set()
        assert may_end.wait(300)
        return steps

    when = save_when_idle(max_steps=4)
    training = Training(tmp_path, monkeypatch, when, keep=keep)
    with training.manager:
        assert training.is_due(0)
        saving = training.save(1)
        assert began.wait(300)
        due = [training.is_due(10**6) for _ in range(4)]
        training.step -= 2
        due.append(training.is_due(10**6))
        may_end.set()
        saving.result()
        assert due == [False, False, False, True, False]
        training.step -= 1
        assert training.is_due(10**6)


def test_when_idle_is_for_managers():
    with pytest.raises(ValueError, match="Pass it to the manager"):
        eqx_ckpt.Mirror("there", when=[save_every_steps(3), save_when_idle()])
    for budget in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match=f"`budget` is {budget}"):
            save_when_idle(budget)
    with pytest.raises(ValueError, match="`max_steps` is 0"):
        save_when_idle(max_steps=0)


def test_without_functions_nothing_is_due(tmp_path):
    assert train(tmp_path, range(10), ()) == []


@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_an_answer_that_is_none(tmp_path, answer):
    with (
        CheckpointManager(tmp_path, when=lambda step, last: answer) as manager,
        pytest.raises(eqx_ckpt.CheckpointError, match="`True` or `False`"),
    ):
        manager.should_save(1)


def test_being_told_to_end(tmp_path):
    with CheckpointManager(tmp_path, when=save_every_steps(2)) as manager:
        assert manager.should_save(2)
        assert not manager.reached_preemption
        signal.raise_signal(signal.SIGTERM)
        assert not manager.reached_preemption
        assert manager.should_save(3)
        assert manager.reached_preemption
        manager.save(3, {"step": 3})
        assert not manager.should_save(3)
        assert manager.reached_preemption


@pytest.mark.parametrize("told", [False, True])
def test_a_save_that_failed_is_due_again(tmp_path, told):
    with CheckpointManager(
        tmp_path, when=save_every_steps(10), check_finite=True
    ) as manager:
        assert manager.should_save(10)
        assert manager.save(10, {"w": jnp.array(jnp.nan)}).exception() is not None
        if told:
            signal.raise_signal(signal.SIGTERM)
        assert manager.should_save(10)
        assert manager.should_save(11)
        manager.save(11, {"w": jnp.array(1.0)})
        assert manager.should_save(12) == told
        assert not manager.should_save(11)


def test_a_save_whose_retention_failed_is_not_due_again(tmp_path):
    with CheckpointManager(
        tmp_path, when=save_every_steps(10), keep=lambda steps: None
    ) as manager:
        assert manager.save(10, {"step": 10}).exception() is not None
        assert not manager.should_save(10)
        assert not manager.should_save(11)


def test_the_last_step_is_the_newest_after_a_deletion(tmp_path):
    lasts = []
    with CheckpointManager(
        tmp_path, when=lambda step, last: lasts.append(last) or False
    ) as manager:
        for step in (10, 20):
            manager.save(step, {"step": step})
        manager.should_save(21)
        manager.delete(20)
        manager.should_save(21)
        manager.delete(10)
        manager.should_save(21)
    assert lasts == [20, 10, None]


def test_a_step_of_an_earlier_run_is_not_saved_again_at_sigterm(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(10, {"step": 10})
    with CheckpointManager(tmp_path, when=save_every_steps(100)) as manager:
        assert not manager.should_save(10)
        signal.raise_signal(signal.SIGTERM)
        assert not manager.should_save(10)
        assert manager.reached_preemption
        assert manager.should_save(11)


def test_closing_in_another_thread(tmp_path):
    """The handler of SIGTERM can be restored in the main thread only."""
    told = []

    def close_there(manager):
        assert not manager.should_save(1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(manager.close).result()

    before = signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    try:
        close_there(CheckpointManager(tmp_path))
        signal.raise_signal(signal.SIGTERM)
        assert told == [True]
        close_there(CheckpointManager(tmp_path))
        with CheckpointManager(tmp_path) as other:
            assert not other.should_save(1)
            signal.raise_signal(signal.SIGTERM)
            assert other.should_save(1)
        assert told == [True]
        signal.raise_signal(signal.SIGTERM)
        assert told == [True, True]
    finally:
        signal.signal(signal.SIGTERM, before)
