"""A folder of runs: one line a run, the best one, and which was forked from which."""

import errno
import os
import shutil
import subprocess
import sys
import uuid

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect

from .test_json import check


pytest.importorskip("typer")


ON_DISK = pytest.mark.parametrize("folder", ["disk"], indirect=True)
LOSSES = {"a": [3.0, 1.0, 2.0], "b": [4.0, 5.0], "c": [1.0]}


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """Three runs, of which the loss is known."""
    if request.param == "disk":
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes/a.txt").write_text("mine")
    is_memory = request.param == "memory"
    where = f"memory://{uuid.uuid4().hex}/runs" if is_memory else str(tmp_path)
    for run, losses in LOSSES.items():
        with CheckpointManager(f"{where}/{run}") as manager:
            for step, loss in enumerate(losses, 1):
                w = np.full(3, loss)
                manager.save(step, {"w": w}, metadata={"loss": loss})
    return where


def test_ls(folder, ask, data):
    status, text = ask("ls", folder)
    assert status == 0
    head, *rows = [line.split() for line in text.splitlines()]
    assert head == ["run", "newest", "age", "size", "steps"]
    assert [row[:2] for row in rows] == [["a", "3"], ["b", "2"], ["c", "1"]]
    assert [row[-1] for row in rows] == ["loss=2", "loss=5", "loss=1"]
    status, found = data("ls", folder, "--best", "loss")
    assert status == 0
    check("ls", found)
    best = {run["name"]: [*run["best"].values()] for run in found["runs"]}
    # Of equal ones, the first run.
    assert best == {"a": [2, 1.0, True], "b": [1, 4.0, False], "c": [1, 1.0, False]}
    assert [run["path"] for run in found["runs"]] == [f"{folder}/{r}" for r in LOSSES]
    _, text = ask("ls", folder, "--best", "loss", "--mode", "max")
    assert [line.split()[-2] for line in text.splitlines() if "[best]" in line] == [
        "[best]"
    ]
    assert "5 at 2" in text


def test_the_best_step(folder):
    assert inspect.best_step(folder, "loss", "max") == f"{folder}/b/000002"
    # Of equal ones, the largest number.
    assert inspect.best_step(folder, "loss") == f"{folder}/a/000002"
    assert inspect.best_step(f"{folder}/b", "loss") == f"{folder}/b/000001"
    assert eqx_ckpt.load(inspect.best_step(folder, "loss"), "w").tolist() == [1.0] * 3
    for metric, match in {"none": "None of the 6 steps", "w": "None of the 6"}.items():
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=match):
            inspect.best_step(folder, metric)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="There is no step"):
        inspect.best_step(f"{folder}/none", "loss")


@ON_DISK
def test_equal_values_in_several_runs(folder, ask, data):
    """The list marks the run that `best_step` chooses from: with the larger step."""
    for step in (2, 1):
        with CheckpointManager(f"{folder}/d") as manager:
            manager.save(4 - step, {"w": np.zeros(3)}, metadata={"loss": 1.0})
    assert inspect.best_step(folder, "loss") == f"{folder}/d/000003"
    _, found = data("ls", folder, "--best", "loss")
    best = [run["name"] for run in found["runs"] if (run["best"] or {}).get("is_best")]
    assert best == ["d"]


def test_a_nested_number(tmp_path, data):
    with CheckpointManager(tmp_path / "a") as manager:
        for step, loss in enumerate((2.0, 1.0), 1):
            manager.save(step, {"w": loss}, metadata={"eval": {"loss": loss}})
    _, found = data("ls", str(tmp_path), "--best", "eval/loss")
    assert found["runs"][0]["best"] == {"step": 2, "value": 1.0, "is_best": True}
    _, found = data("ls", str(tmp_path / "a"), "--best", "eval/loss")
    assert [step["step"] for step in found["steps"] if step["best"]] == [2]


def test_a_run_stands_for_its_newest_step(folder, ask, data):
    a, b = f"{folder}/a", f"{folder}/b"
    status, text = ask("diff", a, b, "--values")
    assert status == 1
    assert text.startswith(f"{a}/000003 and {b}/000002:\nw: different values: 3 ")
    assert data("diff", a, b, "--values")[1]["a"] == f"{a}/000003"
    assert ask("diff", a, f"{a}/000003", "--values")[0] == 0
    assert ask("diff", a, f"{folder}/none")[0] == 2


@ON_DISK
def test_the_best_step_without_jax(folder):
    program = (
        "import sys; from eqx_ckpt.__main__ import main; "
        f"main(['ls', {folder!r}, '--best', 'loss']); print('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "[best]" in done.stdout
    assert done.stdout.endswith("False\n")


def test_log(folder, ask, data):
    a = CheckpointManager(f"{folder}/a")
    a.fork(f"{folder}/d", 2)
    a.fork(f"{folder}/0")
    CheckpointManager(f"{folder}/d").fork(f"{folder}/e")
    status, text = ask("log", folder)
    assert status == 0
    lines = text.splitlines()
    names = ["a", "├── 0", "└── d", "    └── e", "b", "c"]
    assert [line.partition("  step")[0] for line in lines] == names
    assert lines[0].startswith("a  step 3, 3 steps, ")
    assert lines[1].startswith("├── 0  step 3, 1 step, ")
    assert lines[1].endswith(", forked from step 3 of a")
    assert lines[3].endswith(", forked from step 2 of d")
    status, found = data("log", folder)
    check("log", found)
    ids = {run["name"]: run["id"] for run in found["runs"]}
    forked = {run["name"]: run["forked"] for run in found["runs"]}
    assert forked["e"] == {"run": ids["d"], "step": 2, "name": "d"}
    assert forked["a"] is None
    for step in a.steps():
        a.delete(step)
    # What it came from is not there.
    status, text = ask("log", folder)
    assert f"forked from step 3 of run {ids['a'][:8]}" in text.splitlines()[0]
    assert ask("ls", folder)[1].count("forked from") == 3


@ON_DISK
def test_a_run_that_was_copied(folder, ask, tmp_path):
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    CheckpointManager(tmp_path / "copy").fork(tmp_path / "z")
    status, text = ask("log", folder)
    assert status == 0
    assert len(text.splitlines()) == 5
    assert "└── z" in text


def test_a_circle_that_was_forged(folder, ask, monkeypatch):
    from support import folder_commands

    entries = folder_commands._entries

    def forged(runs):
        found, status = entries(runs)
        for entry, name in zip(found, ["b", "a", "c"], strict=True):
            entry["forked"] = {"run": "0" * 32, "step": 1, "name": name}
        return found, status

    monkeypatch.setattr(folder_commands, "_entries", forged)
    status, text = ask("log", folder)
    assert status == 0
    assert sorted(line.split("  ")[0][-1] for line in text.splitlines()) == [*"abc"]


def test_metrics_that_some_steps_have(tmp_path, ask):
    for run in ("a", "b"):
        with CheckpointManager(tmp_path / run) as manager:
            for step, metric in ((1, f"of_{run}"), (2, "new"), (3, "other")):
                value = float("nan") if metric == "other" else 1.0
                manager.save(step, {"w": 1}, metadata={metric: value, "text": "x"})
    status, text = ask("ls", tmp_path, "--best", "zz")
    assert status == 2
    assert "None of the 6 steps" in text
    assert "The numbers there are 'new', 'of_a', 'of_b'." in text
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError) as error:
        inspect.best_step(tmp_path, "zz")
    assert str(error.value) in text
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="are 'new', 'of_b'"):
        manager.best("zz")


def test_what_is_wrong(folder, ask, data):
    status, text = ask("ls", folder, "--best", "lss")
    assert status == 2
    assert f"in '{folder}' has a number 'lss'" in text
    assert "The numbers there are 'loss'" in text
    status, text = ask("ls", folder, "--own")
    assert status == 2
    assert f"Pass one of them: '{folder}/a'" in text
    status, text = ask("log", f"{folder}/a")
    assert status == 2
    assert "It is one run: pass the folder that it is in" in text
    for command in ("ls", "log"):
        assert ask(command, f"{folder}/none")[0] == 2


@ON_DISK
def test_what_may_not_be_listed(folder, ask, monkeypatch, caplog):
    system_listdir = os.listdir

    def refused(path="."):
        if os.path.basename(os.fspath(path).rstrip("/")) == "notes":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return system_listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    status, text = ask("ls", folder)
    assert status == 0
    assert f"'{folder}/notes' is passed over" in caplog.text
    assert "loss=2" in text
    assert inspect.best_step(folder, "loss") == f"{folder}/a/000002"


@ON_DISK
def test_a_misnamed_step(folder, ask, tmp_path, caplog):
    (tmp_path / "a/000002").rename(tmp_path / "a/2")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="none"):
        inspect.best_step(folder, "none")
    assert "step 2 is named '000002'" in caplog.text
    (tmp_path / "a/2").rename(tmp_path / "a/4")
    with pytest.raises(eqx_ckpt.CheckpointError, match="step 4 is named '000004'"):
        inspect.best_step(folder, "loss")
    for command in ("ls", "log"):
        status, text = ask(command, folder)
        assert status == 1
        assert "step 4 is named '000004'" in text
    eqx_ckpt.tree_serialise_leaves(tmp_path / "notes/7", 1)
    ask("log", folder)
    assert "step 7 is named '000007'" in caplog.text


@ON_DISK
def test_damage(folder, ask, data, tmp_path):
    (tmp_path / "a/000003/zarr.json").write_bytes(b"damaged")
    (tmp_path / "b/000001/zarr.json").write_bytes(b"damaged")
    status, found = data("ls", folder, "--best", "loss")
    assert status == 1
    check("ls", found)
    # What cannot be read may be better.
    assert [run["problem"] is None for run in found["runs"]] == [False, False, True]
    assert [run["best"]["step"] for run in found["runs"]] == [2, 2, 1]
    status, text = ask("log", folder)
    assert status == 1
    assert "damaged" in text.splitlines()[0]
    with pytest.raises(eqx_ckpt.CorruptCheckpointError):
        inspect.best_step(folder, "loss")
