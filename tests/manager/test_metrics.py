"""The metrics of a run, also of steps that were removed."""

import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect
from faults import metrics, replay, runs
from faults.metrics import loss
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote
from stores.place import Place
from support import METRICS, metrics_log


LAST = [eqx_ckpt.keep_last(1)]


@pytest.fixture(params=["directory", "memory", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "s3":
        place: Place = request.getfixturevalue("s3")
        return f"{place.url}/run"
    memory = f"memory://{uuid.uuid4().hex}/run"
    return memory if request.param == "memory" else str(tmp_path / "run")


def logs(run: Any) -> list[pathlib.Path]:
    return sorted(pathlib.Path(run).glob("metrics.*"))


def test_of_removed_steps(run: str) -> None:
    with CheckpointManager(run, keep=LAST) as manager:
        for step in range(1, 6):
            metadata = {
                "loss": 1 / step if step > 1 else math.inf,
                "eval": {"f1": step, "name": "a"},
                "is_good": True,
            }
            manager.save(step, {"w": step}, metadata=metadata)
    assert manager.steps() == [5]
    found = inspect.metrics(run)
    assert [*found] == [1, 2, 3, 4, 5]
    assert found[1] == {"loss": math.inf, "eval/f1": 1}
    assert found[4] == {"loss": 0.25, "eval/f1": 4}
    assert found[5] == {"loss": 0.2, "eval/f1": 5}
    manager = CheckpointManager(run)
    manager.restore({"w": 0})
    manager.save(6, {"w": 6}, metadata=loss(6)).result()
    manager.delete(5)
    assert [*inspect.metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_many_logs_become_one(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "_MOST_LOGS", 3)
    stored = metrics_log.Run(run).stored
    counts: list[int] = []
    for step in range(1, 12):
        # Another manager each time.
        metrics.save(run, step, step)
        counts.append(len(stored.beside(METRICS)))
    assert max(counts) == 2
    assert inspect.metrics(run) == {step: loss(step) for step in range(1, 12)}


def test_nothing_is_written_without_metrics(tmp_path: pathlib.Path) -> None:
    for keep, metadata in ((LAST, None), (LAST, {"name": "a"}), (None, loss(1))):
        run = tmp_path / str(len([*tmp_path.iterdir()]))
        with CheckpointManager(run, keep=keep) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"w": 1}, metadata=metadata)
        assert not logs(run)


def test_of_another_branch(tmp_path: pathlib.Path) -> None:
    """Only what has led to the newest step is on the curve."""
    keep = [eqx_ckpt.keep_last(2)]
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"w": 1}, metadata=loss(step))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        manager.restore({"w": 0}, 3)
        manager.delete(4)
        assert [*inspect.metrics(tmp_path)] == [1, 2, 3]
        for step in (6, 7, 8):
            manager.save(step, {"w": 1}, metadata={"loss": -step})
    found = inspect.metrics(tmp_path)
    assert found == {1: loss(1), 2: loss(2), 3: loss(3)} | {
        step: {"loss": -step} for step in (6, 7, 8)
    }


@pytest.mark.parametrize("most", [2, 64])
def test_of_a_step_that_was_saved_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What was removed last counts, also when logs become one; ten times, no luck."""
    monkeypatch.setattr(metrics_log, "_MOST_LOGS", most)
    with CheckpointManager(tmp_path, keep=LAST) as manager:
        for again in range(10):
            manager.save(3, {"w": 1}, metadata={"loss": again}).result()
            if again < 9:
                manager.delete(3)
        manager.save(4, {"w": 1}).result()
        assert inspect.metrics(tmp_path) == {3: {"loss": 9}, 4: {}}
        manager.delete(4)
        for step in (4, 5):
            manager.save(step, {"w": 1}, metadata=loss(step)).result()
        assert inspect.metrics(tmp_path)[4] == loss(4)


def test_of_a_step_that_was_saved_again_without(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path, keep=LAST) as manager:
        manager.save(1, {"w": 1}, metadata=loss(1)).result()
        manager.delete(1)
        manager.save(1, {"w": 1}).result()
        manager.save(2, {"w": 1}).result()
    assert inspect.metrics(tmp_path) == {2: {}}


def test_of_what_both_branches_have(tmp_path: pathlib.Path) -> None:
    """The newest step goes on from the step 3 that was removed first."""
    keep = [eqx_ckpt.keep_every(2)]
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"w": 1}, metadata=loss(step)).result()
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"w": 0}, 2)
        manager.save(3, {"w": 1}, metadata={"loss": -3}).result()
        manager.delete(3)
    assert inspect.metrics(tmp_path) == {step: loss(step) for step in (1, 2, 3, 4)}


def test_of_a_long_history(tmp_path: pathlib.Path) -> None:
    """A manifest names the last 32 sessions, and each step has one of its own."""
    for step in range(1, 41):
        metrics.save(str(tmp_path), step, step)
    assert [*inspect.metrics(tmp_path)] == [*range(1, 41)]


@pytest.mark.parametrize("at", [30, 420])
def test_of_a_branch_in_a_long_history(tmp_path: pathlib.Path, at: int) -> None:
    """It was left lately, or before all sessions that the manifest names."""
    run, keep = tmp_path / "run", [eqx_ckpt.keep_last(2)]
    for step in range(10, 450, 10):
        with CheckpointManager(run, keep=keep) as manager:
            if step > 10:
                manager.restore({"w": 0}, step - 10)
            manager.save(step, {"w": 1}, metadata=loss(step))
        if step == at:
            with CheckpointManager(run) as manager:
                manager.restore({"w": 0}, at - 10)
                manager.save(at + 5, {"w": 1}, metadata={"loss": -1}).result()
                manager.delete(at + 5)
    manager.fork(tmp_path / "fork")
    with CheckpointManager(tmp_path / "fork", keep=LAST) as forked:
        forked.restore({"w": 0})
        forked.save(450, {"w": 1}, metadata=loss(450))
    led = {step: loss(step) for step in range(10, 450, 10)}
    assert inspect.metrics(run) == led
    assert inspect.metrics(tmp_path / "fork") == {**led, 450: loss(450)}


def test_of_a_run_that_was_deleted(tmp_path: pathlib.Path) -> None:
    """A later one in its place has a curve of its own, whatever is known of that."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1}, metadata=loss(1)).result()
        manager.delete(1)
    for step in range(2, 40):
        with CheckpointManager(tmp_path) as manager:
            if step > 2:
                manager.restore({"w": 0})
            manager.save(step, {"w": 1}, metadata=loss(step))
    for step in range(2, 36):
        shutil.rmtree(tmp_path / f"{step:06d}")
    assert [*inspect.metrics(tmp_path)] == [*range(36, 40)]


def test_of_a_mirror_and_a_fork(tmp_path: pathlib.Path) -> None:
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror", keep=LAST)
    with CheckpointManager(tmp_path / "run", keep=LAST, mirror=mirror) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": 1}, metadata=loss(step)).result()
            manager.uploads()[step].result()
        manager.fork(tmp_path / "fork")
    for place in ("run", "mirror", "fork"):
        assert inspect.metrics(tmp_path / place) == {s: loss(s) for s in (1, 2, 3)}


def test_of_a_fork(run: str) -> None:
    """Its curve is what led to its first step, removed or there, and what it makes."""
    metrics.save(run, 1, 2)
    with CheckpointManager(run) as manager:
        manager.restore({"w": 0})
        for step in (3, 4, 5, 6):
            manager.save(step, {"w": 1}, metadata=loss(step))
    with CheckpointManager(run) as manager:
        manager.restore({"w": 0}, 4)
        manager.save(7, {"w": 1}, metadata=loss(7)).result()
        manager.fork(f"{run}b", 7)
        manager.fork(f"{run}c", 5)
    CheckpointManager(f"{run}c").fork(f"{run}d")
    for step in manager.steps():
        manager.delete(step)
    with CheckpointManager(f"{run}c") as manager:
        manager.restore({"w": 0})
        manager.save(6, {"w": 1}, metadata={"loss": -6}).result()
        manager.delete(5)
    led = {step: loss(step) for step in (1, 2, 3, 4, 5)}
    assert inspect.metrics(f"{run}c") == {**led, 6: {"loss": -6}}
    assert inspect.metrics(f"{run}d") == led
    assert inspect.metrics(f"{run}b") == {s: loss(s) for s in (1, 2, 3, 4, 7)}


def test_of_a_fork_without_metrics(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        for step in (1, 2):
            manager.save(step, {"w": 1}).result()
        manager.fork(tmp_path / "b")
    assert not logs(tmp_path / "b")


def not_json(text: str) -> str:
    return text[:-1]


def no_steps(text: str) -> str:
    return "[1]"


def of_another_type(text: str) -> str:
    value = json.loads(text)
    for one in value["removed"]:
        one["metrics"] = {"loss": "<script>"}
    return json.dumps(value)


def deep(text: str) -> str:
    return "[" * 100_000


@pytest.mark.parametrize("damage", [not_json, no_steps, of_another_type, deep])
def test_what_is_damaged_is_left_out(
    tmp_path: pathlib.Path, damage: Callable[[str], str]
) -> None:
    metrics.save(str(tmp_path), 1, 3)
    one, _ = logs(tmp_path)
    (of_one,) = json.loads(one.read_text())["removed"]
    one.write_text(damage(one.read_text()))
    expected = {step: loss(step) for step in (1, 2, 3) if step != of_one["step"]}
    assert inspect.metrics(tmp_path) == expected
    one.unlink()
    one.symlink_to("/dev/zero")
    assert inspect.metrics(tmp_path) == expected


def test_a_log_that_cannot_be_written(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk gets room all the same."""
    real = os.fsync

    def full(fd: int) -> None:
        if "/metrics." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, os.strerror(28))
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    metrics.save(str(tmp_path), 1, 2)
    assert CheckpointManager(tmp_path).steps() == [2]
    assert not logs(tmp_path)
    assert "The metrics of removed steps are lost" in caplog.text


def test_where_there_is_no_run(tmp_path: pathlib.Path) -> None:
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="There is no step"):
        inspect.metrics(tmp_path)


# Of a save of one array that removes a step.
OPERATIONS = 40


@pytest.mark.once
def test_kill_at_every_operation(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(metrics.save, str(disk / "before/run"), 1, 2)
    hits: dict[str, list[str]] = {}
    ends = 0
    for n in range(1, OPERATIONS + 1):
        place = disk / str(n)
        shutil.copytree(disk / "before", place)
        fault = Fault(str(place), n)
        outcome = zygote.run(metrics.save, f"{place}/run", 3, 3, fault=fault)
        assert outcome.error is None
        hits[str(place)] = outcome.hits
        ends += not outcome.signal
    assert ends
    found = zygote.call(runs.each, metrics.look, [*hits], timeout=OF_MANY)
    for (steps, metrics_of), hit in zip(found, hits.values(), strict=True):
        assert steps == [9], hit
        assert metrics_of in ({1: loss(1), 2: loss(2)}, {s: loss(s) for s in (1, 2, 3)})


@pytest.mark.once
def test_every_state_that_a_power_cut_leaves(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    (disk / "initial").mkdir()
    zygote.call(metrics.save, str(disk / "initial/run"), 1, 2)
    root, log = disk / "root", disk / "log"
    shutil.copytree(disk / "initial", root)
    fault = Fault(str(root), log=str(log))
    assert (
        zygote.run(metrics.save_and_note, f"{root}/run", 3, 4, fault=fault).error
        is None
    )

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        found = inspect.metrics(directory / "run")
        last = max([2, *map(int, notes)])
        assert set(range(1, last + 1)) <= {*found} <= {1, 2, 3, 4}, f"{found}, {notes}"
        assert all(found[step] == loss(step) for step in found)

    result = replay.explore(log, root, disk / "initial", disk, check)
    assert result.states > 40
    assert not result.bad, str(result)
