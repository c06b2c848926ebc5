"""What else may be in the directory of a run: strange names, and what is unreadable."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_best, keep_last
from helpers import besides_metrics
from support import locate


TREE = {"w": np.ones(3), "step": 1}
# No step of a run is written like this.
NAMES = [
    "9999999999999999999",
    "9223372036854775808",
    "1" + 19 * "0",
    "0",
    "00000",
    "0000000",
    "000000000000000000000000",
    "٠٠٠٠٠٥",
    "०००००५",
    "00000⁵",
    "-00005",
    "+00005",
    "0x0005",
    "000_05",
    "1e0005",
    " 000005",
    "000005 ",
    "000005\n",
    "000005.tmp",
    ".000005",
    "000005~",
    "step_5",
    os.fsdecode(b"00000\xff"),
]


def fill(path, what):
    """Put something at a path."""
    if what == "checkpoint":
        elsewhere = path.parents[1] / "checkpoint"
        eqx_ckpt.tree_serialise_leaves(elsewhere, TREE, overwrite=True)
        shutil.copytree(elsewhere, path)
    elif what == "directory":
        path.mkdir()
        (path / "notes").write_text("mine")
    elif what == "file":
        path.write_text("mine")
    elif what == "link":
        path.symlink_to("000001")
    elif what == "dangling link":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)


def use(run, others=()):
    """Save, remove, restore and list in a run; returns the steps at the end."""
    keep = [keep_last(2), keep_best("loss", 1)]
    with CheckpointManager(run, keep=keep) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, TREE, metadata={"loss": step}).result()
    assert manager.steps() == [1, *others, 3, 4]
    assert manager.latest() == 4
    assert manager.restore(TREE)["step"] == 1
    assert manager.best("loss") == 1
    assert "step" in manager._repr_html_()
    manager.delete(3)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        manager.delete(3)
    assert eqx_ckpt.inspect.garbage_collect(run, dry_run=True) == {}
    return manager.steps()


@pytest.mark.parametrize(
    "what", ["checkpoint", "directory", "file", "link", "dangling link", "pipe"]
)
def test_entries_that_are_no_steps(tmp_path, what):
    (tmp_path / "run").mkdir()
    for name in NAMES:
        fill(tmp_path / "run" / name, what)
    before = set(besides_metrics(tmp_path / "run"))
    assert use(tmp_path / "run") == [1, 4]
    assert set(besides_metrics(tmp_path / "run")) == before | {"000001", "000004"}


@pytest.mark.parametrize("what", ["directory", "file", "dangling link", "pipe"])
def test_entries_with_the_name_of_a_step(tmp_path, what):
    (tmp_path / "run").mkdir()
    for step in (0, 9, 2**63 - 1):
        fill(tmp_path / "run" / f"{step:06d}", what)
    assert use(tmp_path / "run") == [1, 4]
    assert len(besides_metrics(tmp_path / "run")) == 5


def test_keys_of_a_store_that_are_no_steps():
    run = f"memory://{uuid.uuid4().hex}/run"
    for name in NAMES[:-1]:
        for key in ("zarr.json", f"@{uuid.uuid4().hex}/w/c.0"):
            locate(run).write(f"{name}/{key}", b"mine")
    before = set(locate(run).list_keys())
    assert use(run) == [1, 4]
    assert before < set(locate(run).list_keys())


@pytest.fixture
def unreadable():
    """A run whose step 9, and nothing else, this process may not read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run = Path(folder) / "run"
        run.mkdir()
        run.chmod(0o777)
        fill(run / "000009", "checkpoint")
        (run / "000009").chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield run
        os.seteuid(user)
        (run / "000009").chmod(0o755)


def test_a_step_that_cannot_be_read_is_left_alone(unreadable, caplog):
    """It may be the newest, so nothing says that another one is."""
    keep = [keep_last(1), keep_best("loss", 1)]
    with CheckpointManager(unreadable, keep=keep) as manager:
        for step in (1, 2, 3):
            manager.save(step, TREE, metadata={"loss": step}).result()
    assert "Step 9 stays, as it cannot be read" in caplog.text
    for ask in (manager.latest, manager.steps, lambda: manager.restore(TREE)):
        with pytest.raises(PermissionError, match="000009"):
            ask()
    assert manager.restore(TREE, 3)["step"] == 1
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="are 1, 3, 9"):
        manager.restore(TREE, 2)
    with pytest.raises(PermissionError, match="000009"):
        manager.delete(9)
    manager.delete(1)
    assert "000009" in manager._repr_html_()
    assert besides_metrics(unreadable) == ["000003", "000009"]


def test_an_old_step_that_cannot_be_read_hides_no_newer_one(unreadable):
    with CheckpointManager(unreadable) as manager:
        manager.save(10, TREE)
    assert manager.latest() == 10
    assert manager.restore(TREE)["step"] == 1
