"""One manager and several threads: of the caller, of its saves, and none at all."""

import concurrent.futures
import itertools
import sys
import threading

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointError, CheckpointManager


TREE = {"w": np.ones(3), "step": 1}


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(n, function):
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        for future in [pool.submit(function) for _ in range(n)]:
            future.result(60)


def test_saves_of_many_threads_go_one_by_one(tmp_path, hasty):
    numbers, running, most = itertools.count(), [], []

    def watch(phase, *_):
        if phase == "commit":
            running.append(phase)
            most.append(len(running))
            running.pop()

    def work():
        for _ in range(6):
            saving = manager.save(next(numbers), TREE)
            manager.wait()
            assert saving.done()
            assert manager.restore(TREE)["step"] == 1

    with CheckpointManager(tmp_path, progress=watch) as manager:
        in_threads(6, work)
    assert manager.steps() == list(range(36))
    assert set(most) == {1}


@pytest.mark.parametrize("named", [False, True])
def test_keep_may_restore(tmp_path, named):
    restored = []

    def keep(steps):
        newest = max(steps)
        restored.append(manager.restore(TREE, newest if named else None))
        return steps

    manager = CheckpointManager(tmp_path, keep=keep)
    with manager:
        for step in (1, 2):
            manager.save(step, TREE | {"step": step}).result(60.0)
    assert [tree["step"] for tree in restored] == [1, 2]


def test_progress_may_restore(tmp_path):
    restored = []

    def look(phase, *_):
        if phase == "commit" and manager.steps():
            restored.append(manager.restore(TREE)["step"])

    other = CheckpointManager(tmp_path)
    other.save(1, TREE).result()
    manager = CheckpointManager(tmp_path, progress=look)
    manager.save(2, TREE).result(60.0)
    assert restored == [1]


@pytest.mark.parametrize("method", ["save", "wait", "close", "delete"])
@pytest.mark.parametrize("where", ["keep", "progress"])
def test_a_save_does_not_wait_for_itself(tmp_path, method, where):
    def call(phase, *_):
        if where == "progress" and phase == "commit":
            ask()

    def keep(steps):
        if where == "keep":
            ask()
        return steps

    def ask():
        args = {"save": (9, TREE), "delete": (1,)}.get(method, ())
        getattr(manager, method)(*args)

    manager = CheckpointManager(tmp_path, keep=keep, progress=call)
    with pytest.raises(CheckpointError, match="would wait for itself"):
        manager.save(1, TREE).result(60.0)
    assert manager.steps() == ([1] if where == "keep" else [])
    manager.close()


class NoThread(threading.Thread):
    def start(self):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("staging_bytes", [None, 1])
def test_a_save_that_gets_no_thread(tmp_path, monkeypatch, staging_bytes):
    # One leaf more than what is always allowed to be staged.
    n = 60 if staging_bytes else 1
    tree = {str(i): np.ones(2**20, np.uint8) for i in range(n)}
    manager = CheckpointManager(tmp_path, staging_bytes=staging_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        saving = manager.save(1, tree)
        with pytest.raises(CheckpointError, match="got no thread: can't start new"):
            saving.result(60.0)
    assert list(tmp_path.iterdir()) == []
    with manager:
        manager.save(1, tree)
    eqx_ckpt.inspect.verify(tmp_path / "000001")
