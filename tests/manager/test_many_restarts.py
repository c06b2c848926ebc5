"""Runs of far more restarts than a manifest names: it names the last 32 sessions."""

import collections
import json
import random
import uuid
from typing import Any

import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_every, keep_last, Mirror
from eqx_ckpt.__main__ import main
from support import Run


pytestmark = pytest.mark.once


PATIENCE = 60


class Training:
    """A run and its mirror, session by session, and the steps that either may have.

    Steps of the training are multiples of ten, and those of branches are not.
    """

    def __init__(self, keep: Any, keep_there: Any, seed: int) -> None:
        self.root = f"memory://{uuid.uuid4().hex}"
        self.run, self.there = f"{self.root}/run", f"{self.root}/there"
        self.keep, self.mirror = keep, Mirror(self.there, keep=keep_there)
        self.random = random.Random(seed)
        self.newest = 0
        self.done: collections.Counter[str] = collections.Counter()
        with self.manager() as manager:
            self.save(manager, 0)

    def manager(self, mirrored: bool = True) -> CheckpointManager:
        mirror = self.mirror if mirrored else None
        return CheckpointManager(self.run, keep=self.keep, mirror=mirror)

    def save(self, manager: CheckpointManager, step: int) -> None:
        manager.save(step, {"step": step}).result()
        if step in manager.uploads():
            manager.uploads()[step].result(PATIENCE)

    def restart(self, mirrored: bool = True) -> None:
        with self.manager(mirrored) as manager:
            assert manager.restore({"step": 0}) == {"step": self.newest}
            for _ in range(self.random.choice([1, 1, 2])):
                self.newest += 10
                self.save(manager, self.newest)

    def stay_without_the_mirror(self) -> None:
        """So long that the steps in between are gone, if the run keeps few."""
        for _ in range(35):
            self.restart(mirrored=False)

    def lose_the_disk(self) -> None:
        run = CheckpointManager(self.run)
        for step in run.steps():
            run.delete(step)

    def branch(self) -> None:
        """Go back, and then go on from there, or from the newest step after all."""
        run = CheckpointManager(self.run)
        older = [step for step in run.steps()[:-1] if step > self.newest - 300]
        if not older:
            return
        self.done["branch"] += 1
        old, new = self.random.choice(older), self.newest + 5
        with self.manager() as manager:
            manager.restore({"step": 0}, old)
            manager.save(new, {"step": new}).result()
            error = manager.uploads()[new].exception(PATIENCE)
            assert "is of a different history (fork of step" in str(error)
            with pytest.raises(eqx_ckpt.CheckpointError, match="fork of step"):
                manager.restore({"step": 0})
        if self.random.random() < 0.5:
            run.delete(new)
            return
        for place in (run, CheckpointManager(self.there)):
            for step in place.steps():
                if old < step < new:
                    place.delete(step)
        with self.manager() as manager:
            assert manager.restore({"step": 0}) == {"step": new}
            self.newest += 10
            self.save(manager, self.newest)


def listed(place: str, capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    capsys.readouterr()
    assert main(["ls", place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    return {entry["step"]: entry["history"]["relation"] for entry in found}


@pytest.mark.parametrize(
    ("keep", "keep_there"),
    [
        ([keep_last(3)], None),
        ([keep_last(5)], [keep_last(1), keep_every(700)]),
    ],
)
def test_a_mirror_goes_on(
    keep: Any,
    keep_there: Any,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(keep, keep_there, seed=len(str(keep_there)))
    for i in range(100):
        training.restart()
        if i == 50:
            # The steps in between tell the others, as long as they are there.
            relations = {*listed(training.there, capsys).values()}
            assert relations == {"same"} or keep_there is not None
            training.stay_without_the_mirror()
            training.restart()
        if i % 12 == 11:
            training.branch()
        if i % 40 == 20:
            training.lose_the_disk()
    assert training.done["branch"] > 3
    eqx_ckpt.sync(training.run, training.there)
    assert training.newest in CheckpointManager(training.there).steps()
    relations = {*listed(training.there, capsys).values()}
    assert relations <= {"same", "unknown"}
    refused = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert all("(fork of step" in text for text in refused)


def train(run: str, there: str, steps: Any, keep: Any = None) -> None:
    """A session for each step."""
    for step in steps:
        with CheckpointManager(run, mirror=Mirror(there, keep=keep)) as manager:
            if manager.latest() is not None:
                manager.restore({"step": 0})
            manager.save(step, {"step": step})


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_few_steps_of_a_mirror_are_read(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those near the one that is uploaded, each once; by a restore the newest two."""
    run, there = f"{root}/run", f"{root}/there"
    train(run, there, range(45))
    read: collections.Counter[str] = collections.Counter()
    found = Run.history

    def count(run: Run, step: int) -> Any:
        read[f"{run.directory} {step}"] += 1
        return found(run, step)

    monkeypatch.setattr(Run, "history", count)
    with CheckpointManager(run, mirror=Mirror(there)) as manager:
        manager.restore({"step": 0})
        assert sum(read.values()) == 3  # And the newest one here.
        read.clear()
        for step in range(45, 50):
            manager.save(step, {"step": step}).result()
            manager.uploads()[step].result(PATIENCE)
    assert len(read) == 32
    assert {*read.values()} == {1}


@pytest.mark.parametrize("keep_there", [None, [keep_last(1)]])
def test_a_machine_that_comes_back_late(root: str, keep_there: Any) -> None:
    """It has an old step, and meanwhile another one went on, by far more restarts."""
    there = f"{root}/there"
    train(f"{root}/old", there, [0, 10], keep_there)
    train(f"{root}/new", there, range(20, 420, 10), keep_there)
    with CheckpointManager(f"{root}/old", mirror=Mirror(there)) as manager:
        assert manager.latest() == 410
        assert manager.restore({"step": 0}) == {"step": 410}


def test_a_branch_of_long_ago(root: str) -> None:
    """The steps in between tell it, also where the mirror has far more sessions."""
    there, old = f"{root}/there", f"{root}/old"
    train(old, there, [0, 10])
    train(old, f"{root}/apart", [15])
    train(f"{root}/new", there, range(20, 420, 10))
    with (
        CheckpointManager(old, mirror=Mirror(there)) as manager,
        pytest.raises(eqx_ckpt.CheckpointError, match="fork of step 10"),
    ):
        manager.restore({"step": 0})


def test_a_branch_that_no_step_tells(root: str) -> None:
    """It has a number that no step can have that has led to the newest one."""
    there, old = f"{root}/there", f"{root}/old"
    train(old, there, [0, 10])
    train(old, f"{root}/apart", [9999])
    train(f"{root}/new", there, range(20, 420, 10), [keep_last(1)])
    with CheckpointManager(old, mirror=Mirror(there)) as manager:
        with pytest.raises(eqx_ckpt.CheckpointError, match="another branch"):
            manager.restore({"step": 0})
        manager.close()
        assert "(another branch)" in str(manager.upload_error)
    assert manager.mirrored() == [410]


def test_a_branch_that_is_too_young(root: str) -> None:
    """It has a low number, and more sessions than the newest step does not name."""
    there, old = f"{root}/there", f"{root}/old"
    train(old, there, [0])
    train(f"{root}/new", there, range(300, 640, 10), [keep_last(1)])
    train(old, f"{root}/apart", range(15, 20))
    with (
        CheckpointManager(old, mirror=Mirror(there)) as manager,
        pytest.raises(eqx_ckpt.CheckpointError, match="another branch"),
    ):
        manager.restore({"step": 0})


def test_a_manager_that_goes_back(root: str) -> None:
    """What it has uploaded itself is of another branch then."""
    run, there = f"{root}/run", f"{root}/there"
    with CheckpointManager(run, mirror=Mirror(there)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"step": step}).result()
            manager.uploads()[step].result(PATIENCE)
        manager.restore({"step": 0}, 2)
        manager.save(4, {"step": 4}).result()
        error = manager.uploads()[4].exception(PATIENCE)
        assert "step 3 there is of a different history (fork of step 2)" in str(error)
        manager.delete(3)
        manager.save(5, {"step": 5}).result()
        manager.uploads()[5].result(PATIENCE)
    assert manager.mirrored() == [1, 2, 5]


def test_a_mirror_whose_steps_were_replaced(root: str) -> None:
    """What a manager has read before does not stand for what is there now."""
    run, there = f"{root}/run", f"{root}/there"
    train(f"{root}/other", f"{root}/others", [1])
    with CheckpointManager(run, mirror=Mirror(there)) as manager:
        manager.save(3, {"step": 3}).result()
        manager.uploads()[3].result(PATIENCE)
        eqx_ckpt.copy(f"{root}/others/000001", f"{there}/000001")
        manager.save(4, {"step": 4}).result()
        assert "step 1 there" in str(manager.uploads()[4].exception(PATIENCE))
        CheckpointManager(there).delete(1)
        eqx_ckpt.copy(f"{run}/000003", f"{there}/000001")
        manager.save(5, {"step": 5}).result()
        manager.uploads()[5].result(PATIENCE)
    assert manager.mirrored() == [1, 3, 5]
